//! The semantics restated: enumeration, naive f64 loops, and literal transcriptions of what is
//! decided to the bit.
//!
//! Nothing here comes from the crates under test, apart from plain descriptions (shapes,
//! hyperparameters) and the Philox block function, whose known answers core checks.

pub use sparse24_conformance::oracle::{arithmetic, layers, optimizer};

/// The two columns that each of the six patterns keeps, lexicographic.
pub const PAIRS: [[usize; 2]; 6] = [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]];

/// The 90 transposable patterns as indices into [`PAIRS`], row by row: every choice of four rows
/// that keeps two in each column.
#[must_use]
pub fn tile_patterns() -> Vec<[usize; 4]> {
    let mut patterns = Vec::new();
    for a in 0..6 {
        for b in 0..6 {
            for c in 0..6 {
                for e in 0..6 {
                    let rows = [a, b, c, e];
                    let kept =
                        |column| rows.iter().filter(|&&row| PAIRS[row].contains(&column)).count();
                    if (0..4).all(|column| kept(column) == 2) {
                        patterns.push(rows);
                    }
                }
            }
        }
    }
    patterns
}

/// Sixteen bits, bit `4*row + column`, from the two columns of each row.
#[must_use]
pub fn bits(rows: [[usize; 2]; 4]) -> u16 {
    (0..4).map(|row| 1 << (4 * row + rows[row][0]) | 1 << (4 * row + rows[row][1])).sum()
}

/// min(|w|, 2^124); a NaN counts as 2^124.
#[must_use]
pub fn magnitude(w: f32) -> f32 {
    let limit = f32::from_bits((127 + 124) << 23);
    if w.is_nan() || w.abs() > limit { limit } else { w.abs() }
}

/// The sum of the magnitudes of a tile.
#[must_use]
pub fn norm(tile: &[f32; 16]) -> f64 {
    tile.iter().map(|&w| f64::from(magnitude(w))).sum()
}

/// The sum of the magnitudes that sixteen bits keep.
#[must_use]
pub fn kept_norm(tile: &[f32; 16], bits: u16) -> f64 {
    (0..16).filter(|at| bits >> at & 1 == 1).map(|at| f64::from(magnitude(tile[at]))).sum()
}

/// The transposed tile.
#[must_use]
pub fn transposed(tile: &[f32; 16]) -> [f32; 16] {
    std::array::from_fn(|at| tile[at % 4 * 4 + at / 4])
}

/// The transposable search by its definition: candidates in order, a later one wins only if it is
/// strictly greater.
#[must_use]
pub fn canonical(tile: &[f32; 16]) -> u16 {
    let row = |i: usize| -> [f32; 4] { std::array::from_fn(|j| magnitude(tile[4 * i + j])) };
    let (a, b, c, e) = (row(0), row(1), row(2), row(3));
    let (mut d, mut d_prime, mut big_d) = ([0.0_f32; 4], [0.0_f32; 4], [0.0_f32; 4]);
    for j in 0..4 {
        d[j] = a[j] - b[j];
        d_prime[j] = c[j] - e[j];
        big_d[j] = (a[j] + b[j]) - (c[j] + e[j]);
    }
    let negative = |x: f32| x.to_bits() >> 31 == 1;
    let mut winner = (f32::NEG_INFINITY, [[0; 2]; 4]);
    let mut offer = |value: f32, rows: [[usize; 2]; 4]| {
        if value > winner.0 {
            winner = (value, rows);
        }
    };
    for (j, k, i, l) in
        [(0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 1, 2), (1, 2, 0, 3), (1, 3, 0, 2), (2, 3, 0, 1)]
    {
        let (d_jk, d_prime_jk, big_d_il) =
            (d[j] - d[k], d_prime[j] - d_prime[k], big_d[i] - big_d[l]);
        let (above, below) = if negative(big_d_il) { (l, i) } else { (i, l) };
        let (of_a, of_b) = if negative(d_jk) { (k, j) } else { (j, k) };
        let (of_c, of_e) = if negative(d_prime_jk) { (k, j) } else { (j, k) };
        let value = (d_jk.abs() + d_prime_jk.abs()) + big_d_il.abs();
        offer(value, [[above, of_a], [above, of_b], [below, of_c], [below, of_e]]);
    }
    let complement = |[x, y]: [usize; 2]| -> [usize; 2] {
        let mut rest = (0..4).filter(|&i| i != x && i != y);
        [(); 2].map(|()| rest.next().expect("two of four remain"))
    };
    let tb = |x: [f32; 4]| -> (f32, [usize; 2]) {
        let (x_01, x_23) = (x[0] - x[1], x[2] - x[3]);
        let second = (x[0] - x[2]) + (x[1] - x[3]);
        if second.abs() > x_01.abs() + x_23.abs() {
            (second.abs(), if negative(second) { [2, 3] } else { [0, 1] })
        } else {
            (
                x_01.abs() + x_23.abs(),
                [usize::from(negative(x_01)), 2 + usize::from(negative(x_23))],
            )
        }
    };
    let (value, set) = tb(big_d);
    offer(value, [set, set, complement(set), complement(set)]);
    let ((value, set), (value_prime, set_prime)) = (tb(d), tb(d_prime));
    offer(value + value_prime, [set, complement(set), set_prime, complement(set_prime)]);
    bits(winner.1)
}

/// The greedy 2-approximation and its completion, as defined.
#[must_use]
pub fn greedy(tile: &[f32; 16]) -> u16 {
    let m = |row: usize, column: usize| magnitude(tile[4 * row + column]);
    let mut kept = [[false; 4]; 4];
    let in_row = |kept: &[[bool; 4]; 4], row: usize| kept[row].iter().filter(|&&k| k).count();
    let in_column =
        |kept: &[[bool; 4]; 4], column: usize| kept.iter().filter(|row| row[column]).count();
    let mut waiting: Vec<(usize, usize)> = (0..16).map(|at| (at / 4, at % 4)).collect();
    while !waiting.is_empty() {
        let mut largest = 0;
        for at in 1..waiting.len() {
            if m(waiting[at].0, waiting[at].1) > m(waiting[largest].0, waiting[largest].1) {
                largest = at;
            }
        }
        let (row, column) = waiting.remove(largest);
        if in_row(&kept, row) < 2 && in_column(&kept, column) < 2 {
            kept[row][column] = true;
        }
    }
    let open_row = (0..4).find(|&row| in_row(&kept, row) < 2);
    let open_column = (0..4).find(|&column| in_column(&kept, column) < 2);
    if let (Some(i), Some(j)) = (open_row, open_column) {
        let mut best: Option<(f32, usize, usize)> = None;
        for k in 0..4 {
            for l in 0..4 {
                if kept[k][l] && !kept[i][l] && !kept[k][j] {
                    let gain = m(i, l) + m(k, j) - m(k, l);
                    if best.is_none_or(|(most, _, _)| gain > most) {
                        best = Some((gain, k, l));
                    }
                }
            }
        }
        let (_, k, l) = best.expect("one kept cell can move");
        kept[k][l] = false;
        kept[i][l] = true;
        kept[k][j] = true;
    }
    (0..16).filter(|at| kept[at / 4][at % 4]).map(|at| 1 << at).sum()
}

/// The two largest of a group by a stable sort, ascending; a NaN counts as infinite.
#[must_use]
pub fn largest_two(x: [f32; 4]) -> [u8; 2] {
    let m = x.map(|x| if x.is_nan() { f32::INFINITY } else { x.abs() });
    let mut order = [0_u8, 1, 2, 3];
    order.sort_by(|&i, &j| {
        m[usize::from(j)].partial_cmp(&m[usize::from(i)]).expect("no NaN is left")
    });
    [order[0].min(order[1]), order[0].max(order[1])]
}

/// The exact MVUE of a finite group, to the bit: ascending indices and their values.
#[must_use]
pub fn mvue(x: [f32; 4], u: f32) -> ([u8; 2], [f32; 2]) {
    let mut a = x.map(f32::abs);
    let mut factor = 1.0;
    if ((a[0] + a[1]) + (a[2] + a[3])).is_infinite() {
        a = a.map(|a| a / 4.0);
        factor = 4.0;
    }
    let (p01, p23) = (a[0] + a[1], a[2] + a[3]);
    let s = p01 + p23;
    let mut r = s / 2.0;
    for rest in [a[1] + p23, a[0] + p23, a[3] + p01, a[2] + p01] {
        if rest < r {
            r = rest;
        }
    }
    let certain: Vec<usize> = (0..4).filter(|&i| a[i] >= r).collect();
    let pair: [usize; 2] = if r == 0.0 {
        let mut largest = 0;
        for i in 1..4 {
            if a[i] > a[largest] {
                largest = i;
            }
        }
        [largest, largest ^ 1]
    } else if certain.len() == 2 {
        [certain[0], certain[1]]
    } else {
        let others: Vec<usize> = (0..4).filter(|i| !certain.contains(i) && a[*i] > 0.0).collect();
        let mut sums = Vec::new();
        for &i in &others {
            sums.push(sums.last().unwrap_or(&0.0) + a[i]);
        }
        let last = others.len() - 1;
        let t = u * r;
        let t_prime = t + r;
        let first = (0..others.len()).find(|&n| t < sums[n]);
        if certain.len() == 1 {
            [certain[0], others[first.unwrap_or(last)]]
        } else {
            let f = match first {
                None => last - 1,
                Some(n) if n == last => last - 1,
                Some(n) => n,
            };
            let g = (f + 1..others.len()).find(|&n| t_prime < sums[n]).unwrap_or(last);
            [others[f], others[g]]
        }
    };
    let pair = [pair[0].min(pair[1]), pair[0].max(pair[1])];
    let value = |i: usize| if a[i] >= r { x[i] } else { (r * factor).copysign(x[i]) };
    (pair.map(|i| i as u8), pair.map(value))
}

/// The least variance of an unbiased estimate that keeps two of four: sum a^2/p - sum a^2 at p =
/// min(1, a/r), r by bisection of sum p = 2.
#[must_use]
pub fn least_variance(a: [f64; 4]) -> f64 {
    if a.iter().filter(|&&a| a > 0.0).count() <= 2 {
        return 0.0;
    }
    let kept = |r: f64| -> f64 { a.iter().map(|&a| (a / r).min(1.0)).sum() };
    let (mut low, mut high) = (0.0, a.iter().sum::<f64>());
    for _ in 0..200 {
        let r = 0.5 * (low + high);
        if kept(r) > 2.0 {
            low = r;
        } else {
            high = r;
        }
    }
    variance(a, a.map(|a| (a / high).min(1.0)))
}

/// sum a^2/p - sum a^2 of an estimate that keeps element i with probability p_i and value x_i/p_i.
#[must_use]
pub fn variance(a: [f64; 4], p: [f64; 4]) -> f64 {
    (0..4).filter(|&i| a[i] > 0.0).map(|i| a[i] * (a[i] / p[i] - a[i])).sum()
}

/// The probabilities with which the approximate estimator keeps each of four, of which three or
/// more are nonzero.
#[must_use]
pub fn approximate_probabilities(a: [f64; 4]) -> [f64; 4] {
    let s: f64 = a.iter().sum();
    std::array::from_fn(|i| {
        a[i] / s + (0..4).filter(|&j| j != i).map(|j| a[j] / s * a[i] / (s - a[j])).sum::<f64>()
    })
}

/// The number of uniforms: u is a multiple of 2^-24 in [0, 1).
pub const UNIFORMS: u32 = 1 << 24;

/// The n-th uniform.
#[must_use]
pub fn uniform(n: u32) -> f32 {
    assert!(n < UNIFORMS, "a uniform is below 1");
    n as f32 / UNIFORMS as f32
}

/// Splits all uniforms into runs of equal outcomes, `(first, length)`, where each outcome fills at
/// most one run.
///
/// A systematic sample moves monotonically with its uniform, so equal outcomes at both ends mean
/// equal outcomes between them.
pub fn runs<T: PartialEq>(outcome: impl Fn(u32) -> T) -> Vec<(u32, u32)> {
    let mut starts = vec![0];
    while let Some(&start) = starts.last() {
        let (mut inside, mut outside) = (start, UNIFORMS);
        let of_run = outcome(start);
        while outside - inside > 1 {
            let middle = inside + (outside - inside) / 2;
            if outcome(middle) == of_run {
                inside = middle;
            } else {
                outside = middle;
            }
        }
        if outside == UNIFORMS {
            break;
        }
        starts.push(outside);
    }
    let ends = starts.iter().skip(1).copied().chain([UNIFORMS]);
    starts.iter().zip(ends).map(|(&start, end)| (start, end - start)).collect()
}

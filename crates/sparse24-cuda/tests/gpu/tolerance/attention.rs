//! Bounds on attention's difference from the CPU's f32 results, given the same operands.

use ndarray::{Array1, Array2, ArrayView2, Axis, Zip};

/// Relative error of rounding to bf16: half a unit in the last of 8 significant bits.
const BF16: f32 = 1.0 / 256.0;
/// A generous unit for f32: tensor cores may cut off where the CPU rounds, and 2^x is good to two
/// units in the last place.
const F32: f32 = 1.0 / (1 << 22) as f32;

/// One head: operands as the GPU reads them, and the o that the backward pass gets.
pub(crate) struct AttentionHead<'a> {
    pub(crate) q: ArrayView2<'a, f32>,
    pub(crate) k: ArrayView2<'a, f32>,
    pub(crate) v: ArrayView2<'a, f32>,
    pub(crate) o: ArrayView2<'a, f32>,
    pub(crate) d_o: ArrayView2<'a, f32>,
    /// A probability of 0 where it is not visible.
    pub(crate) visible: &'a dyn Fn(usize, usize) -> bool,
    /// The probability of being dropped.
    pub(crate) dropped: f32,
}

/// Bounds on |GPU - CPU|, in the shapes of the results.
pub(crate) struct AttentionBounds {
    pub(crate) o: Array2<f32>,
    pub(crate) lse: f32,
    pub(crate) dq: Array2<f32>,
    pub(crate) dk: Array2<f32>,
    pub(crate) dv: Array2<f32>,
}

/// Scores. s = q.k / sqrt(w) is a sum of w exact products in f32, scaled twice: each side is off by
/// at most (w + 4) F32 |q| |k| / sqrt(w), with the Euclidean norms (Cauchy-Schwarz); let sigma be
/// both sides' together. A probability e^s / sum e^s is off by a factor within e^(2 sigma), and the
/// sum over T keys and the exponentials add (T + 8) F32: together rho. The reference of the
/// exponents cancels, whichever it is. lse = ln sum e^s is off by rho absolutely, and by F32 of
/// itself.
///
/// Forward. p, rounded to bf16, times v, summed in f32, rounded to bf16: (BF16 + 2 rho) sum p |v| +
/// BF16 |o|. With dropout every kept p carries 1 / (1 - dropped); it is left on the dropped ones
/// here, which only raises the bound.
///
/// Backward, to first order in BF16: dv = sum over queries of p dO, p rounded: (BF16 + 2 rho) sum p
/// |dO| + BF16 |dv|. dS = p (dP - D), dP = dO.v, D = dO.o: each of dP and D is off by (w + 4) F32
/// of the sum of its |products|, p by rho, then dS is rounded by BF16:
/// |error of dS| <= BF16 |dS| + p 2 (rho + (w + 4) F32) (|dO|.|v| + |dO|.|o|) =: E; and
/// |dS| <= p (|dP| / (1 - dropped) + |D|), where a dropped dP counts as kept.
/// dq = dS k / sqrt(w): sum E |k| / sqrt(w) + BF16 |dq|, and the sum over T adds
/// T F32 sum |dS| |k|, which rho covers. dk alike. The last rounding, BF16 |result|, is the
/// caller's: `rounded`.
pub(crate) fn attention(head: &AttentionHead<'_>) -> AttentionBounds {
    let (width, keys, queries) = (head.q.ncols() as f32, head.k.nrows(), head.q.nrows());
    let scale = width.sqrt().recip();
    let longest = |x: ArrayView2<'_, f32>| {
        x.rows().into_iter().map(|row| row.dot(&row).sqrt()).fold(0.0, f32::max)
    };
    let sigma = 2.0 * (width + 4.0) * F32 * longest(head.q) * longest(head.k) * scale;
    let rho = 2.0 * sigma + (keys.max(queries) as f32 + 8.0) * F32;

    let absolute = |x: ArrayView2<'_, f32>| x.mapv(f32::abs);
    let (q, k, v, o, d_o) = (
        absolute(head.q),
        absolute(head.k),
        absolute(head.v),
        absolute(head.o),
        absolute(head.d_o),
    );
    let mut p = head.q.dot(&head.k.t()) * scale;
    let mut lse = 0.0_f32;
    for (i, mut row) in p.rows_mut().into_iter().enumerate() {
        row.indexed_iter_mut()
            .filter(|&(j, _)| !(head.visible)(i, j))
            .for_each(|(_, s)| *s = f32::NEG_INFINITY);
        let largest = row.fold(f32::MIN, |largest, &s| largest.max(s));
        row.mapv_inplace(|s| (s - largest).exp());
        let sum = row.sum();
        row.mapv_inplace(|p| if sum > 0.0 { p / sum } else { 0.0 });
        lse = lse.max(if sum > 0.0 { (largest + sum.ln()).abs() } else { 0.0 });
    }
    let kept = 1.0 / (1.0 - head.dropped);
    let share = (BF16 + 2.0 * rho) * kept;
    let projections: Array1<f32> = (&head.d_o * &head.o).sum_axis(Axis(1)).mapv(f32::abs);
    let projection_terms = (&d_o * &o).sum_axis(Axis(1));
    let (slopes, slope_terms) = (head.d_o.dot(&head.v.t()), d_o.dot(&v.t()));
    let mut errors = p.clone();
    let fine = 2.0 * (rho + (width + 4.0) * F32);
    for (i, row) in errors.rows_mut().into_iter().enumerate() {
        Zip::from(row).and(slopes.row(i)).and(slope_terms.row(i)).for_each(|p, slope, terms| {
            let of_ds = slope.abs() * kept + projections[i];
            *p *= BF16 * of_ds + fine * (terms * kept + projection_terms[i]);
        });
    }
    AttentionBounds {
        o: p.dot(&v) * share,
        lse: rho + F32 * lse,
        dq: errors.dot(&k) * scale,
        dk: errors.t().dot(&q) * scale,
        dv: p.t().dot(&d_o) * share,
    }
}

/// |found - expected| <= bound + what rounding the result to bf16 adds; a NaN fails.
pub(crate) fn rounded(found: f32, expected: f32, bound: f32) -> bool {
    (found - expected).abs() <= bound * (1.0 + BF16) + BF16 * expected.abs() + f32::MIN_POSITIVE
}

//! The minimum-variance unbiased 2:4 estimator of a group, and the approximation it improves on.
//!
//! Both return two elements whose expectation over the uniforms is the input. Every operation is
//! rounded to f32 and none are fused, so the indices and values have the same bits on every
//! backend. Groups run along tokens: the operand of the weight gradient is dZ^T.
//!
//! Source: Chmiel et al., "Minimum variance unbiased N:M sparsity for the neural gradients", ICLR
//! 2023.

use ndarray::ArrayView2;

use crate::{
    Element, Error,
    compressed::Compressed24,
    group::Pattern,
    philox::{Purpose, Stream},
};

/// Two kept elements of a group: `indices` ascending, `values` in the same order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Kept24 {
    /// Positions in the group, ascending.
    pub indices: [u8; 2],
    /// The estimate at those positions. It is zero elsewhere.
    pub values: [f32; 2],
}

impl Kept24 {
    const NON_FINITE: Self = Self { indices: [0, 1], values: [f32::NAN; 2] };

    fn new(first: usize, second: usize, value: impl Fn(usize) -> f32) -> Self {
        let (low, high) = (first.min(second), first.max(second));
        Self { indices: [low as u8, high as u8], values: [value(low), value(high)] }
    }

    /// The kept pair.
    #[must_use]
    pub fn pattern(self) -> Pattern {
        Pattern::from_indices(self.indices)
            .expect("an estimate keeps two distinct elements, ascending")
    }
}

/// Which estimator samples the gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Estimator {
    /// [`exact`]: one uniform a group.
    Exact,
    /// [`approximate`]: two uniforms a group.
    Approximate,
}

/// The unbiased estimate of minimum variance, from one uniform `u` in [0, 1).
///
/// With a = |x|, s = sum(a) and R = s without its largest term, r = min(s/2, R). Element i is kept
/// with probability min(a_i, r)/r, by systematic sampling, and its value is copysign(max(a_i, r),
/// x_i). If at most two elements are nonzero, they are kept unchanged. Any non-finite input gives
/// indices 0, 1 and NaN in both values, so that overflow checks notice it. If s overflows, the
/// computation uses a/4 and scales r back; r is infinite only if the estimate itself exceeds f32.
///
/// The variance sum a_i^2/p_i - sum a_i^2 is minimized under sum p <= 2 and p <= 1: the KKT
/// conditions give p_i = min(1, a_i/r), with at most one element clipped.
///
/// ```
/// use sparse24_core::mvue;
///
/// // r = min(20/2, 4) = 4: the dominant element stays, and one of the others becomes 4.
/// let kept = mvue::exact([1.0, -16.0, 2.0, 1.0], 0.25);
/// assert_eq!((kept.indices, kept.values), ([1, 2], [-16.0, 4.0]));
/// ```
#[must_use]
#[inline]
pub fn exact(x: [f32; 4], u: f32) -> Kept24 {
    if !x.iter().all(|x| x.is_finite()) {
        return Kept24::NON_FINITE;
    }
    let magnitudes = x.map(f32::abs);
    let (a, scale) = in_range(magnitudes);
    let (p01, p23) = (a[0] + a[1], a[2] + a[3]);
    let without_largest = (a[1] + p23).min(a[0] + p23).min((a[3] + p01).min(a[2] + p01));
    let r = ((p01 + p23) * 0.5).min(without_largest);
    if r == 0.0 {
        let largest = largest(a);
        return Kept24::new(largest, largest ^ 1, |i| x[i]);
    }

    let value = |i: usize| if a[i] >= r { x[i] } else { (r * scale).copysign(x[i]) };
    let mut certain = (0..4).filter(|&i| a[i] >= r);
    let (first_certain, second_certain) = (certain.next(), certain.next());
    if let (Some(first), Some(second)) = (first_certain, second_certain) {
        return Kept24::new(first, second, value);
    }
    // Running sums of the elements to draw from.
    let mut drawn = [(0, 0.0); 4];
    let mut count = 0;
    let mut running = 0.0;
    for i in (0..4).filter(|&i| a[i] < r && a[i] > 0.0) {
        running += a[i];
        drawn[count] = (i, running);
        count += 1;
    }
    let drawn = &drawn[..count];
    let last = count - 1;
    let after = |start: usize, t: f32| (start..count).find(|&at| t < drawn[at].1).unwrap_or(last);
    let t = u * r;
    match first_certain {
        Some(first) => Kept24::new(first, drawn[after(0, t)].0, value),
        None => {
            let first = after(0, t).min(last - 1);
            Kept24::new(drawn[first].0, drawn[after(first + 1, t + r)].0, value)
        }
    }
}

/// The estimator of the paper's toolkit, from two uniforms in [0, 1): draw i with probability
/// a_i/s, then j among the others.
///
/// The kept value is x_i/pi_i with pi_i = a_i/s + sum over j != i of (a_j/s) a_i/(s - a_j). pi_i is
/// at least the smallest normal f32, so that the value is finite even if the spacing of the
/// uniforms lets an almost impossible element be drawn. Fewer than three nonzeros are kept
/// unchanged. Non-finite inputs are treated as in [`exact`]. The variance is between 1.06 times
/// (Gaussian) and 1.33 times (lognormal, sigma 2) that of [`exact`].
#[must_use]
#[inline]
pub fn approximate(x: [f32; 4], [u, v]: [f32; 2]) -> Kept24 {
    if !x.iter().all(|x| x.is_finite()) {
        return Kept24::NON_FINITE;
    }
    let magnitudes = x.map(f32::abs);
    let (a, _) = in_range(magnitudes);
    let mut nonzero = (0..4).filter(|&i| a[i] > 0.0);
    match (nonzero.next(), nonzero.next(), nonzero.next()) {
        (Some(first), Some(second), None) => return Kept24::new(first, second, |i| x[i]),
        (_, None, _) => {
            let largest = largest(a);
            return Kept24::new(largest, largest ^ 1, |i| x[i]);
        }
        _ => {}
    }
    let total = sum(a);
    let without = |j: usize| (0..4).filter(|&i| i != j).fold(0.0, |sum, i| sum + a[i]);
    let draw = |skip: usize, t: f32| {
        let mut running = 0.0;
        let mut last = 0;
        for i in (0..4).filter(|&i| i != skip && a[i] > 0.0) {
            running += a[i];
            last = i;
            if t < running {
                break;
            }
        }
        last
    };
    let first = draw(4, u * total);
    let second = draw(first, v * without(first));
    Kept24::new(first, second, |i| {
        let others =
            (0..4).filter(|&j| j != i).fold(0.0, |sum, j| sum + a[j] / total * (a[i] / without(j)));
        x[i] / (a[i] / total + others).max(f32::MIN_POSITIVE)
    })
}

/// E|estimate(x) - x|^2 over the uniforms, summed over the group in f64; NaN for non-finite input.
///
/// Exact: sum over a_i < r of a_i (r - a_i), with r as in [`exact`]. Approximate: sum of a_i^2
/// (1/pi_i - 1), with pi_i as in [`approximate`].
#[must_use]
pub fn variance(x: [f32; 4], estimator: Estimator) -> f64 {
    let a = x.map(|x| f64::from(x).abs());
    let total: f64 = a.iter().sum();
    if !total.is_finite() {
        return f64::NAN;
    }
    if a.iter().filter(|a| **a > 0.0).count() < 3 {
        return 0.0;
    }
    match estimator {
        Estimator::Exact => {
            let r = (total * 0.5).min(total - a.iter().copied().fold(0.0, f64::max));
            a.iter().map(|a| a * (r - a).max(0.0)).sum()
        }
        Estimator::Approximate => {
            let kept = |i: usize| {
                let others =
                    (0..4).filter(|&j| j != i).map(|j| a[j] / total * (a[i] / (total - a[j])));
                a[i] / total + others.sum::<f64>()
            };
            (0..4).filter(|&i| a[i] > 0.0).map(|i| a[i] * a[i] * (1.0 / kept(i) - 1.0)).sum()
        }
    }
}

/// The estimate of dZ^T, compressed: `dz` is `[p, r]` as stored, the result
/// `[r, p rounded up to a multiple of 4]`, padded with zeros.
///
/// Group j of row i draws word `j % 4` of [`call`] `i*ceil(p/16) + j/4`; the approximate estimator
/// draws its second uniform from the same place of [`Purpose::MvueSecond`]. Kept values are rounded
/// to the storage type after the estimate.
///
/// # Errors
/// [`Error::TooLarge`] if no memory can hold the result.
pub fn compress<T: Element>(
    dz: ArrayView2<'_, T>,
    estimator: Estimator,
    stream: Stream,
) -> Result<Compressed24<T>, Error> {
    let (p, r) = dz.dim();
    let groups = p.div_ceil(4);
    let mut out = Compressed24::zeros(r, 4 * groups)?;
    for i in 0..r {
        for j in 0..groups {
            let x = core::array::from_fn(|at| {
                if 4 * j + at < p { dz[[4 * j + at, i]].to_f32() } else { 0.0 }
            });
            let kept = estimate(x, estimator, stream, call(p, i, j), j % 4);
            out.set(i, j, kept.pattern(), kept.values.map(T::from_f32));
        }
    }
    Ok(out)
}

/// The Philox call of group `group` of row `row` of dZ^T with `p` tokens:
/// `row*ceil(p/16) + group/4`.
#[must_use]
#[inline]
pub fn call(p: usize, row: usize, group: usize) -> u32 {
    (row * p.div_ceil(16) + group / 4) as u32
}

/// The estimate of one group with word `word` of call `call`.
///
/// # Panics
/// Unless the word is below 4.
#[must_use]
#[inline]
pub fn estimate(
    x: [f32; 4],
    estimator: Estimator,
    stream: Stream,
    call: u32,
    word: usize,
) -> Kept24 {
    let u = stream.uniforms(call)[word];
    match estimator {
        Estimator::Exact => exact(x, u),
        Estimator::Approximate => {
            approximate(x, [u, stream.with_purpose(Purpose::MvueSecond).uniforms(call)[word]])
        }
    }
}

fn sum(a: [f32; 4]) -> f32 {
    (a[0] + a[1]) + (a[2] + a[3])
}

/// The magnitudes and the factor 1 or, if their sum overflows, a quarter of them and the factor 4.
fn in_range(a: [f32; 4]) -> ([f32; 4], f32) {
    if sum(a).is_finite() { (a, 1.0) } else { (a.map(|a| a * 0.25), 4.0) }
}

/// The lowest index of the largest element.
fn largest(a: [f32; 4]) -> usize {
    (1..4).fold(0, |best, i| if a[i] > a[best] { i } else { best })
}

#[cfg(test)]
mod tests {
    use super::{Estimator, Kept24, approximate, exact, variance};

    fn kept(indices: [u8; 2], values: [f32; 2]) -> Kept24 {
        Kept24 { indices, values }
    }

    #[test]
    fn an_overflowing_sum_is_computed_on_quarters() {
        // [1, -1, 1, 1], scaled: r = 2^127, and the sum is 2^128.
        let big = f32::from_bits((127 + 126) << 23);
        assert_eq!(exact([big, -big, big, big], 0.6), kept([1, 3], [-2.0 * big, 2.0 * big]));
        let estimate = approximate([big, -big, big, big], [0.3, 0.9]);
        assert_eq!(estimate, kept([1, 3], [-2.0 * big, 2.0 * big]));
    }

    #[test]
    fn the_variance_of_a_non_finite_group_is_nan() {
        for estimator in [Estimator::Exact, Estimator::Approximate] {
            assert_eq!(variance([0.0, 2.0, 0.0, -3.0], estimator), 0.0);
            assert!(variance([0.0, f32::INFINITY, 0.0, -3.0], estimator).is_nan());
        }
    }

    #[test]
    fn an_underflowing_probability_stays_finite() {
        let tiny = f32::from_bits(1);
        let estimate = approximate([tiny, 1e38, 1e38, tiny], [0.0, 0.0]);
        assert_eq!(estimate.indices, [0, 1]);
        assert!(estimate.values.iter().all(|x| x.is_finite()));
    }
}

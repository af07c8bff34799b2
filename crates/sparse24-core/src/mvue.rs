//! The minimum-variance unbiased 2:4 estimator of a group, exact, and the approximation it improves on.
//!
//! Both return two elements whose expectation over the uniforms is the input. Every operation is f32, rounded, nothing contracted: the
//! indices and values are the same bits on every backend. Groups run along tokens: the operand of the weight gradient is dZ^T.
//!
//! Source: Chmiel et al., "Minimum variance unbiased N:M sparsity for the neural gradients", ICLR 2023.

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
    /// The estimate at those positions; it is zero elsewhere.
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
        Pattern::from_indices(self.indices).expect("an estimate keeps two distinct elements, ascending")
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

/// The unbiased estimate of least variance, from one uniform `u` in [0, 1).
///
/// With a = |x|, s = sum(a) and R = s without its largest term, r = min(s/2, R). Element i is kept with probability min(a_i, r)/r, by
/// systematic sampling, and its value is copysign(max(a_i, r), x_i). When at most two elements are nonzero they are kept unchanged.
/// Any non-finite input gives indices 0, 1 and NaN in both values, so that overflow checks see it. Where s overflows, all is computed on
/// a/4 and r is scaled back; it is infinite only where the estimate itself exceeds f32.
///
/// Var = sum a_i^2/p_i - sum a_i^2 under sum p <= 2, p <= 1: the KKT conditions give p ~ min(1, a/r), at most one clipped.
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
    // Running sums over the elements that are drawn.
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

/// The estimator of the paper's toolkit, from two uniforms in [0, 1): draw i with probability a_i/s, then j among the rest.
///
/// The kept value is x_i/pi_i with pi_i = a_i/s + sum over j != i of (a_j/s) a_i/(s - a_j), computed as
/// copysign(s / (1 + sum over j != i of a_j/(s - a_j)), x_i), which no tiny a_i can bring to 0/0. Fewer than three nonzeros are kept exactly.
/// Non-finite inputs as in [`exact`]. Its variance is about 1.06 times (Gaussian) to 1.33 times (lognormal, sigma 2) that of [`exact`].
#[must_use]
#[inline]
pub fn approximate(x: [f32; 4], [u, v]: [f32; 2]) -> Kept24 {
    if !x.iter().all(|x| x.is_finite()) {
        return Kept24::NON_FINITE;
    }
    let magnitudes = x.map(f32::abs);
    let (a, scale) = in_range(magnitudes);
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
        let others = (0..4).filter(|&j| j != i).fold(0.0, |sum, j| sum + a[j] / without(j));
        (total / (1.0 + others) * scale).copysign(x[i])
    })
}

/// The estimate of dZ^T, compressed: `dz` is `[p, r]` as stored, the result `[r, p rounded up to a multiple of 4]`, padded with zeros.
///
/// Group j of row i draws word `j % 4` of call `i*ceil(p/16) + j/4`; the approximate estimator draws its second uniform from the same
/// place of [`Purpose::MvueSecond`]. Kept values are rounded to the storage type after the estimate.
///
/// # Errors
/// Those of [`Compressed24::zeros`], which the padding rules out.
pub fn compress<T: Element>(dz: ArrayView2<'_, T>, estimator: Estimator, stream: Stream) -> Result<Compressed24<T>, Error> {
    let (p, r) = dz.dim();
    let groups = p.div_ceil(4);
    let mut out = Compressed24::zeros(r, 4 * groups)?;
    for i in 0..r {
        for j in 0..groups {
            let x = core::array::from_fn(|at| if 4 * j + at < p { dz[[4 * j + at, i]].to_f32() } else { 0.0 });
            out.set(i, j, estimate(x, estimator, stream, call(p, i, j), j % 4));
        }
    }
    Ok(out)
}

/// The Philox call of group `group` of row `row` of dZ^T with `p` tokens: `row*ceil(p/16) + group/4`.
#[must_use]
#[inline]
pub fn call(p: usize, row: usize, group: usize) -> u32 {
    (row * p.div_ceil(16) + group / 4) as u32
}

/// One group with the word `word` of call `call`.
#[must_use]
#[inline]
pub fn estimate(x: [f32; 4], estimator: Estimator, stream: Stream, call: u32, word: usize) -> Kept24 {
    let u = stream.uniforms(call)[word];
    match estimator {
        Estimator::Exact => exact(x, u),
        Estimator::Approximate => approximate(x, [u, stream.with_purpose(Purpose::MvueSecond).uniforms(call)[word]]),
    }
}

fn sum(a: [f32; 4]) -> f32 {
    (a[0] + a[1]) + (a[2] + a[3])
}

/// The magnitudes and the factor that brings them back: 1, or a quarter of them and 4 where their sum overflows.
fn in_range(a: [f32; 4]) -> ([f32; 4], f32) {
    if sum(a).is_finite() { (a, 1.0) } else { (a.map(|a| a * 0.25), 4.0) }
}

/// The lowest index of the largest.
fn largest(a: [f32; 4]) -> usize {
    (1..4).fold(0, |best, i| if a[i] > a[best] { i } else { best })
}

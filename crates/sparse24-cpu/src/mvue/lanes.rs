//! The estimate of one group a lane: uniforms, the exact estimator without branches, and core's, lane by lane.
//!
//! Invariant: the bits of [`sparse24_core::mvue`]. Deliberately absent: memory.

use sparse24_core::{
    mvue::{self, Estimator},
    philox::{MULTIPLIERS, Purpose, ROUNDS, Stream, WEYL},
};

use super::CALL_TOKENS;
use crate::simd::Vector;

/// Features that the widest level estimates at a time.
pub(super) const WIDEST: usize = 16;

/// Where the uniforms come from.
#[derive(Clone, Copy)]
pub(super) struct Sampler {
    pub(super) estimator: Estimator,
    pub(super) stream: Stream,
    /// Tokens of dZ.
    pub(super) p: usize,
}

/// The kept pair of a group a lane: values in ascending order of index, and the metadata nibble.
pub(super) struct Kept<V: Vector> {
    pub(super) low: V::F,
    pub(super) high: V::F,
    pub(super) nibble: V::U,
}

impl<V: Vector> Kept<V> {
    /// The four elements of each group, zeros where pruned.
    #[inline(always)]
    pub(super) fn dense(self, v: V) -> [V::F; 4] {
        let zero = v.splat(0.0);
        let [low0, low1, low2] = [v.test(self.nibble, 0b11, 0), v.test(self.nibble, 0b11, 1), v.test(self.nibble, 0b11, 2)];
        let [high1, high2, high3] = [v.test(self.nibble, 0b1100, 4), v.test(self.nibble, 0b1100, 8), v.test(self.nibble, 0b1100, 12)];
        [
            v.select(low0, self.low, zero),
            v.select(low1, self.low, v.select(high1, self.high, zero)),
            v.select(low2, self.low, v.select(high2, self.high, zero)),
            v.select(high3, self.high, zero),
        ]
    }
}

/// The uniforms of one call of each lane, word by word; the second ones are for the approximate estimator.
pub(super) struct Draws<V: Vector> {
    first: [V::F; 4],
    second: [V::F; 4],
}

impl Sampler {
    /// The uniforms of the features from `feature` on for the sixteen tokens from `token` on.
    #[inline(always)]
    pub(super) fn draw<V: Vector>(self, v: V, feature: usize, token: usize) -> Draws<V> {
        let (first, calls_a_feature) = (mvue::call(self.p, feature, token / 4), self.p.div_ceil(CALL_TOKENS) as u32);
        let calls: [u32; WIDEST] = core::array::from_fn(|lane| first.wrapping_add((lane as u32).wrapping_mul(calls_a_feature)));
        let calls = v.load_u(&calls);
        let second = match self.estimator {
            Estimator::Exact => [v.splat(0.0); 4],
            Estimator::Approximate => uniforms(v, self.stream.with_purpose(Purpose::MvueSecond), calls),
        };
        Draws { first: uniforms(v, self.stream, calls), second }
    }

    #[inline(always)]
    pub(super) fn estimate<V: Vector>(self, v: V, x: [V::F; 4], draws: &Draws<V>, word: usize) -> Kept<V> {
        match self.estimator {
            Estimator::Exact => exact(v, x, draws.first[word]),
            Estimator::Approximate => one_by_one(v, x, [draws.first[word], draws.second[word]], Estimator::Approximate),
        }
    }
}

/// Philox4x32-10 for one call of each lane; see [`sparse24_core::philox`].
///
/// Even and odd lanes run apart, since products are twice as wide as words.
#[inline(always)]
fn uniforms<V: Vector>(v: V, stream: Stream, calls: V::U) -> [V::F; 4] {
    let even = philox_even(v, stream, calls);
    let odd = philox_even(v, stream, v.odd_to_even(calls));
    let mut uniforms = [v.splat(0.0); 4];
    for word in 0..4 {
        uniforms[word] = v.uniform(v.interleave_even(even[word], odd[word]));
    }
    uniforms
}

/// The four words of the calls in even lanes, in even lanes.
#[inline(always)]
fn philox_even<V: Vector>(v: V, stream: Stream, calls: V::U) -> [V::U; 4] {
    let ([mut k0, mut k1], [site, micro_step, step]) = stream.address();
    let [m0, m1] = MULTIPLIERS.map(
        #[inline(always)]
        |m| v.splat_u(m),
    );
    let (mut a, mut b, mut c, mut d) = (calls, v.splat_u(site), v.splat_u(micro_step), v.splat_u(step));
    for _ in 0..ROUNDS {
        let (p0, p1) = (v.mul_even(a, m0), v.mul_even(c, m1));
        a = v.xor(v.xor(v.odd_to_even(p1), b), v.splat_u(k0));
        c = v.xor(v.xor(v.odd_to_even(p0), d), v.splat_u(k1));
        (b, d) = (p1, p0);
        (k0, k1) = (k0.wrapping_add(WEYL[0]), k1.wrapping_add(WEYL[1]));
    }
    [a, b, c, d]
}

/// [`mvue::exact`] of a group a lane, without branches but for rare groups.
///
/// Sums over the drawn elements before i are sums over all uncertain ones, since a zero adds nothing. "The first drawn i with t < c_i,
/// else the last" is then the first i that has t < c_i or nothing drawn after it. Where nothing is certain every element is less than r,
/// so that t + r is at least the sum that ends with the first drawn: the second comes after it.
#[inline(always)]
fn exact<V: Vector>(v: V, x: [V::F; 4], u: V::F) -> Kept<V> {
    let zero = v.splat(0.0);
    let a = [v.abs(x[0]), v.abs(x[1]), v.abs(x[2]), v.abs(x[3])];
    let (p01, p23) = (v.add(a[0], a[1]), v.add(a[2], a[3]));
    let s = v.add(p01, p23);
    if v.any(v.not(v.above(v.splat(f32::INFINITY), s))) {
        // A sum that overflows, or an input that is not finite.
        return one_by_one(v, x, [u, u], Estimator::Exact);
    }
    let without_largest = v.least(v.least(v.add(a[1], p23), v.add(a[0], p23)), v.least(v.add(a[3], p01), v.add(a[2], p01)));
    let r = v.least(v.mul(s, v.splat(0.5)), without_largest);

    let open = [v.below(a[0], r), v.below(a[1], r), v.below(a[2], r), v.below(a[3], r)];
    let open_truth = [v.truth(open[0]), v.truth(open[1]), v.truth(open[2]), v.truth(open[3])];
    let c0 = v.select(open_truth[0], a[0], zero);
    let c1 = v.select(open_truth[1], v.add(c0, a[1]), c0);
    let c2 = v.select(open_truth[2], v.add(c1, a[2]), c1);
    let t = v.mul(u, r);
    let after = v.add(t, r);
    let (t_in_0, t_in_1, t_in_2) = (v.below(t, c0), v.below(t, c1), v.below(t, c2));
    let (after_in_1, after_in_2) = (v.below(after, c1), v.below(after, c2));

    let drawn1 = v.and_u(open[1], v.below(zero, a[1]));
    let drawn2 = v.and_u(open[2], v.below(zero, a[2]));
    let drawn3 = v.and_u(open[3], v.below(zero, a[3]));
    let drawn23 = v.or_u(drawn2, drawn3);
    let drawn123 = v.or_u(drawn23, drawn1);
    let both23 = v.and_u(drawn2, drawn3);
    let two_of_123 = v.or_u(both23, v.and_u(drawn23, drawn1));

    let (open01, open23) = (v.and_u(open[0], open[1]), v.and_u(open[2], open[3]));
    let none = v.and_u(open01, open23);
    let at_most_one = v.or_u(v.and_u(open01, v.or_u(open[2], open[3])), v.and_u(open23, v.or_u(open[0], open[1])));
    let one = v.and_u(at_most_one, v.not_u(none));

    // The lower index is 0; if not, it is 1; if neither, 2. The higher is 3; if not, it is 2; if neither, 1. Where nothing is certain the
    // lower must leave one drawn after it.
    let low0_none = v.and_u(none, v.or_u(v.not_u(two_of_123), t_in_0));
    let low0_one = v.and_u(one, v.or_u(v.not_u(drawn123), t_in_0));
    let low0 = v.truth(v.or_u(v.not_u(open[0]), v.or_u(low0_none, low0_one)));
    let low1_none = v.and_u(none, v.or_u(v.not_u(both23), t_in_1));
    let low1_one = v.and_u(one, v.or_u(v.not_u(drawn23), t_in_1));
    let low1 = v.truth(v.or_u(v.not_u(open[1]), v.or_u(low1_none, low1_one)));
    let high3_none = v.and_u(none, v.and_u(drawn3, v.not_u(after_in_2)));
    let high3_one = v.and_u(one, v.and_u(drawn3, v.not_u(t_in_2)));
    let high3 = v.truth(v.or_u(v.not_u(open[3]), v.or_u(high3_none, high3_one)));
    let high2_none = v.and_u(none, v.and_u(drawn23, v.not_u(after_in_1)));
    let high2_one = v.and_u(one, v.and_u(drawn23, v.not_u(t_in_1)));
    let high2 = v.truth(v.or_u(v.not_u(open[2]), v.or_u(high2_none, high2_one)));

    let value0 = v.select(open_truth[0], v.copysign(r, x[0]), x[0]);
    let value1 = v.select(open_truth[1], v.copysign(r, x[1]), x[1]);
    let value2 = v.select(open_truth[2], v.copysign(r, x[2]), x[2]);
    let value3 = v.select(open_truth[3], v.copysign(r, x[3]), x[3]);
    let mut low = v.select(low0, value0, v.select(low1, value1, value2));
    let mut high = v.select(high3, value3, v.select(high2, value2, value1));
    let low_index = v.select_u(low0, v.splat_u(0), v.select_u(low1, v.splat_u(1), v.splat_u(2)));
    let high_index = v.select_u(high3, v.splat_u(3 << 2), v.select_u(high2, v.splat_u(2 << 2), v.splat_u(1 << 2)));
    let mut nibble = v.or_u(low_index, high_index);
    let few = v.at_least(zero, r);
    if v.any(few) {
        // At most one element is not zero: it and its neighbour, the others of its half being zero.
        let upper = v.above(p23, zero);
        low = v.select(few, v.select(upper, x[2], x[0]), low);
        high = v.select(few, v.select(upper, x[3], x[1]), high);
        nibble = v.select_u(few, v.select_u(upper, v.splat_u(2 | 3 << 2), v.splat_u(1 << 2)), nibble);
    }
    Kept { low, high, nibble }
}

/// Core's estimator, lane by lane.
#[inline(always)]
fn one_by_one<V: Vector>(v: V, x: [V::F; 4], uniforms: [V::F; 2], estimator: Estimator) -> Kept<V> {
    let (mut groups, mut draws) = ([[0.0; WIDEST]; 4], [[0.0; WIDEST]; 2]);
    for (stored, x) in groups.iter_mut().zip(x) {
        v.store(x, stored);
    }
    for (stored, u) in draws.iter_mut().zip(uniforms) {
        v.store(u, stored);
    }
    let (values, nibbles) = estimate_each(&groups, &draws, V::LANES, estimator);
    Kept { low: v.load(&values[0]), high: v.load(&values[1]), nibble: v.load_u(&nibbles) }
}

#[inline(never)]
fn estimate_each(
    groups: &[[f32; WIDEST]; 4],
    uniforms: &[[f32; WIDEST]; 2],
    lanes: usize,
    estimator: Estimator,
) -> ([[f32; WIDEST]; 2], [u32; WIDEST]) {
    let (mut values, mut nibbles) = ([[0.0; WIDEST]; 2], [0; WIDEST]);
    for lane in 0..lanes {
        let (group, [u, v]) = (groups.map(|x| x[lane]), uniforms.map(|u| u[lane]));
        let kept = match estimator {
            Estimator::Exact => mvue::exact(group, u),
            Estimator::Approximate => mvue::approximate(group, [u, v]),
        };
        ([values[0][lane], values[1][lane]], nibbles[lane]) = (kept.values, u32::from(kept.pattern().nibble()));
    }
    (values, nibbles)
}

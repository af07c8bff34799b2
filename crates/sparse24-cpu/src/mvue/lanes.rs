//! The estimate of one group a lane: uniforms, the exact estimator without branches, and core's,
//! lane by lane.
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
        let [low0, low1, low2] = [
            v.test(self.nibble, 0b11, 0),
            v.test(self.nibble, 0b11, 1),
            v.test(self.nibble, 0b11, 2),
        ];
        let [high1, high2, high3] = [
            v.test(self.nibble, 0b1100, 4),
            v.test(self.nibble, 0b1100, 8),
            v.test(self.nibble, 0b1100, 12),
        ];
        [
            v.select(low0, self.low, zero),
            v.select(low1, self.low, v.select(high1, self.high, zero)),
            v.select(low2, self.low, v.select(high2, self.high, zero)),
            v.select(high3, self.high, zero),
        ]
    }
}

/// The uniforms of one call of each lane, word by word; the second ones are for the approximate
/// estimator.
pub(super) struct Draws<V: Vector> {
    first: [V::F; 4],
    second: [V::F; 4],
}

impl Sampler {
    /// The uniforms of the features from `feature` on for the sixteen tokens from `token` on.
    #[inline(always)]
    pub(super) fn draw<V: Vector>(self, v: V, feature: usize, token: usize) -> Draws<V> {
        let (first, calls_a_feature) =
            (mvue::call(self.p, feature, token / 4), self.p.div_ceil(CALL_TOKENS) as u32);
        let calls: [u32; WIDEST] = core::array::from_fn(|lane| {
            first.wrapping_add((lane as u32).wrapping_mul(calls_a_feature))
        });
        let calls = v.load_u(&calls);
        let second = match self.estimator {
            Estimator::Exact => [v.splat(0.0); 4],
            Estimator::Approximate => {
                uniforms(v, self.stream.with_purpose(Purpose::MvueSecond), calls)
            }
        };
        Draws { first: uniforms(v, self.stream, calls), second }
    }

    #[inline(always)]
    pub(super) fn estimate<V: Vector>(
        self,
        v: V,
        x: [V::F; 4],
        draws: &Draws<V>,
        word: usize,
    ) -> Kept<V> {
        match self.estimator {
            Estimator::Exact => exact(v, x, draws.first[word]),
            Estimator::Approximate => {
                one_by_one(v, x, [draws.first[word], draws.second[word]], Estimator::Approximate)
            }
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
    let (mut a, mut b, mut c, mut d) =
        (calls, v.splat_u(site), v.splat_u(micro_step), v.splat_u(step));
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
/// Sums over the drawn elements before i are sums over all uncertain ones, since a zero adds
/// nothing; the first i with t < c_i is drawn, since its sum grew. With t' = t where one element is
/// certain and t + r where none is, the lower index is the first of 0, 1, 2 that is certain or has
/// t < c_i, and the higher is 1 if t' < c_1, 2 if t' < c_2, else 3, unless one beyond is certain.
/// That is core's choice wherever at most one element is certain and both kept are nonzero, hence
/// drawn: with nothing certain at least three are drawn, and t + r is at least the sum that ends
/// with the first kept, so that the second comes after it; where core falls back on the last drawn,
/// this falls back on 2 below or on 3 above, which is then the last but one or the last.
#[inline(always)]
fn exact<V: Vector>(v: V, x: [V::F; 4], u: V::F) -> Kept<V> {
    let zero = v.splat(0.0);
    let a = [v.abs(x[0]), v.abs(x[1]), v.abs(x[2]), v.abs(x[3])];
    let (p01, p23) = (v.add(a[0], a[1]), v.add(a[2], a[3]));
    let s = v.add(p01, p23);
    let without_largest = v.least(
        v.least(v.add(a[1], p23), v.add(a[0], p23)),
        v.least(v.add(a[3], p01), v.add(a[2], p01)),
    );
    let r = v.least(v.mul(s, v.splat(0.5)), without_largest);

    // Truths are sign bits until a mask is needed.
    let open = [v.below(a[0], r), v.below(a[1], r), v.below(a[2], r), v.below(a[3], r)];
    let c0 = v.select(v.truth(open[0]), a[0], zero);
    let c1 = v.select(v.truth(open[1]), v.add(c0, a[1]), c0);
    let c2 = v.select(v.truth(open[2]), v.add(c1, a[2]), c1);
    let (open01, open23) = (v.and_u(open[0], open[1]), v.and_u(open[2], open[3]));
    let one_certain_at_most = v
        .or_u(v.and_u(open01, v.or_u(open[2], open[3])), v.and_u(open23, v.or_u(open[0], open[1])));
    let t = v.mul(u, r);
    let after = v.select(v.truth(v.and_u(open01, open23)), v.add(t, r), t);

    let choice = Choice {
        past0: v.truth(v.and_u(open[0], v.not_u(v.below(t, c0)))),
        past1: v.truth(v.and_u(open[1], v.not_u(v.below(t, c1)))),
        below2: v.truth(v.and_u(open[2], v.below(after, c1))),
        below3: v.truth(v.and_u(open[3], v.below(after, c2))),
    };
    let [low, high] = choice.keep(v, x);
    let both_nonzero = v.below(zero, v.least(v.abs(low), v.abs(high)));
    let sound = v.truth(
        v.and_u(v.and_u(v.below(s, v.splat(f32::INFINITY)), one_certain_at_most), both_nonzero),
    );
    let kept = Kept {
        low: v.at_least_in_magnitude(low, r),
        high: v.at_least_in_magnitude(high, r),
        nibble: choice.nibble(v),
    };
    if v.any(v.not(sound)) { rare(v, x, u, kept, sound) } else { kept }
}

/// [`mvue::exact`] where it is not `sound`: at most two elements are nonzero, or the group is
/// core's alone, as one whose sum overflows or that is not finite.
#[inline(always)]
fn rare<V: Vector>(v: V, x: [V::F; 4], u: V::F, kept: Kept<V>, sound: V::M) -> Kept<V> {
    let zero = v.splat(0.0);
    let a = [v.abs(x[0]), v.abs(x[1]), v.abs(x[2]), v.abs(x[3])];
    let nonzero =
        [v.above(a[0], zero), v.above(a[1], zero), v.above(a[2], zero), v.above(a[3], zero)];
    let finite = v.above(v.splat(f32::INFINITY), v.add(v.add(a[0], a[1]), v.add(a[2], a[3])));
    let few = v.and(finite, v.not(three_of(v, nonzero)));
    if v.any(v.not(v.or(sound, few))) {
        return one_by_one(v, x, [u, u], Estimator::Exact);
    }
    // The nonzero ones are kept unchanged, a single one with its neighbour.
    let (lower, upper) = (v.or(nonzero[0], nonzero[1]), v.or(nonzero[2], nonzero[3]));
    let choice = Choice {
        past0: v.and(upper, v.not(nonzero[0])),
        past1: v.not(nonzero[1]),
        below2: v.not(nonzero[2]),
        below3: v.not(v.or(nonzero[3], v.and(upper, v.not(lower)))),
    };
    let [low, high] = choice.keep(v, x);
    Kept {
        low: v.select(few, low, kept.low),
        high: v.select(few, high, kept.high),
        nibble: v.select_u(few, choice.nibble(v), kept.nibble),
    }
}

/// Which two of a group are kept.
#[derive(Clone, Copy)]
struct Choice<M> {
    /// The lower index is not 0.
    past0: M,
    /// Nor 1.
    past1: M,
    /// The higher index, if not 3, is not 2.
    below2: M,
    /// It is not 3.
    below3: M,
}

impl<M: Copy> Choice<M> {
    #[inline(always)]
    fn keep<V: Vector<M = M>>(self, v: V, x: [V::F; 4]) -> [V::F; 2] {
        let low = v.select(self.past0, v.select(self.past1, x[2], x[1]), x[0]);
        [low, v.select(self.below3, v.select(self.below2, x[1], x[2]), x[3])]
    }

    #[inline(always)]
    fn nibble<V: Vector<M = M>>(self, v: V) -> V::U {
        let low = v.select_u(
            self.past0,
            v.select_u(self.past1, v.splat_u(2), v.splat_u(1)),
            v.splat_u(0),
        );
        let high = v.select_u(
            self.below3,
            v.select_u(self.below2, v.splat_u(1 << 2), v.splat_u(2 << 2)),
            v.splat_u(3 << 2),
        );
        v.or_u(low, high)
    }
}

/// At least three of the four.
#[inline(always)]
fn three_of<V: Vector>(v: V, [a, b, c, d]: [V::M; 4]) -> V::M {
    v.or(v.and(v.and(a, b), v.or(c, d)), v.and(v.and(c, d), v.or(a, b)))
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
        ([values[0][lane], values[1][lane]], nibbles[lane]) =
            (kept.values, u32::from(kept.pattern().nibble()));
    }
    (values, nibbles)
}

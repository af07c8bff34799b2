//! The estimate of one group per lane: uniforms, and the exact estimator without branches. Rare
//! groups and the approximate estimator are left to [`sparse24_core::mvue`], lane by lane.

use sparse24_core::{
    mvue::{self, Estimator},
    philox::{MULTIPLIERS, Purpose, ROUNDS, Stream, WEYL},
};

use super::CALL_TOKENS;
use crate::simd::Vector;

/// The largest number of lanes.
const WIDEST: usize = 16;

/// Where the uniforms come from, and how they are used.
#[derive(Clone, Copy)]
pub(super) struct Sampler {
    pub(super) estimator: Estimator,
    pub(super) stream: Stream,
    /// Tokens of dZ.
    pub(super) p: usize,
}

/// The uniforms of one Philox call per lane, word by word; the second ones are for the approximate
/// estimator.
pub(super) struct Draws<V: Vector> {
    first: [V::F; 4],
    second: [V::F; 4],
}

impl Sampler {
    /// Draws for the features from `feature` on and the sixteen tokens from `token` on.
    #[inline(always)]
    pub(super) fn draw<V: Vector>(self, v: V, feature: usize, token: usize) -> Draws<V> {
        let (first, calls_per_feature) =
            (mvue::call(self.p, feature, token / 4), self.p.div_ceil(CALL_TOKENS) as u32);
        let calls: [u32; WIDEST] = core::array::from_fn(|lane| {
            first.wrapping_add((lane as u32).wrapping_mul(calls_per_feature))
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

    /// The four elements of each group, zero where pruned.
    #[inline(always)]
    pub(super) fn estimate<V: Vector>(
        self,
        v: V,
        x: [V::F; 4],
        draws: &Draws<V>,
        word: usize,
    ) -> [V::F; 4] {
        match self.estimator {
            Estimator::Exact => exact(v, x, draws.first[word]),
            Estimator::Approximate => {
                one_by_one(v, x, [draws.first[word], draws.second[word]], Estimator::Approximate)
            }
        }
    }
}

/// The uniforms of one call of [`sparse24_core::philox`] per lane. Even and odd lanes are computed
/// separately because products are twice as wide as words.
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

/// The four words of the calls in the even lanes, in the even lanes.
#[inline(always)]
fn philox_even<V: Vector>(v: V, stream: Stream, calls: V::U) -> [V::U; 4] {
    let ([mut k0, mut k1], [site, micro_step, step]) = stream.address();
    let (m0, m1) = (v.splat_u(MULTIPLIERS[0]), v.splat_u(MULTIPLIERS[1]));
    let (mut a, mut b, mut c, mut d) =
        (calls, v.splat_u(site), v.splat_u(micro_step), v.splat_u(step));
    for _ in 0..ROUNDS {
        let (p0, p1) = (v.mul_even(a, m0), v.mul_even(c, m1));
        a = v.xor_u(v.xor_u(v.odd_to_even(p1), b), v.splat_u(k0));
        c = v.xor_u(v.xor_u(v.odd_to_even(p0), d), v.splat_u(k1));
        (b, d) = (p1, p0);
        (k0, k1) = (k0.wrapping_add(WEYL[0]), k1.wrapping_add(WEYL[1]));
    }
    [a, b, c, d]
}

/// [`mvue::exact`] of a group per lane, without branches except for rare groups.
///
/// An element is open if a_i < r, and certain otherwise. c_i here sums the open elements up to i,
/// as in core, since zeros add nothing. The first i with t < c_i is drawn, since its sum grew. With
/// t' = t if one element is certain and t' = t + r if none is, the lower kept index is the first of
/// 0, 1, 2 that is certain or has t < c_i; the higher is 1 if t' < c_1, otherwise 2 if t' < c_2,
/// otherwise 3, unless one beyond is certain.
///
/// That is core's choice wherever at most one element is certain and both kept elements are
/// nonzero. If nothing is certain, at least three elements are drawn from, and t + r is at least
/// the sum that ends with the first kept element, so that the second comes after it. Where core
/// falls back to the last element with a nonzero sum, this falls back to 2 below and to 3 above,
/// which are then the last but one and the last.
#[inline(always)]
fn exact<V: Vector>(v: V, x: [V::F; 4], u: V::F) -> [V::F; 4] {
    let zero = v.splat(0.0);
    let a = [v.abs(x[0]), v.abs(x[1]), v.abs(x[2]), v.abs(x[3])];
    let (p01, p23) = (v.add(a[0], a[1]), v.add(a[2], a[3]));
    let s = v.add(p01, p23);
    let without_largest = v.least(
        v.least(v.add(a[1], p23), v.add(a[0], p23)),
        v.least(v.add(a[3], p01), v.add(a[2], p01)),
    );
    let r = v.least(v.mul(s, v.splat(0.5)), without_largest);

    // Booleans are sign bits until a mask is needed.
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
    let [low, high] = choice.pair(v, x);
    let both_nonzero = v.below(zero, v.least(v.abs(low), v.abs(high)));
    let sound = v.truth(
        v.and_u(v.and_u(v.below(s, v.splat(f32::INFINITY)), one_certain_at_most), both_nonzero),
    );
    let kept = choice.place(v, [v.raise(low, r), v.raise(high, r)]);
    if v.any(v.not(sound)) { rare(v, x, u, kept, sound) } else { kept }
}

/// [`mvue::exact`] of the groups that are not `sound`: those with at most two nonzero elements, and
/// those whose sum overflows or is not finite, which core computes.
#[inline(always)]
fn rare<V: Vector>(v: V, x: [V::F; 4], u: V::F, kept: [V::F; 4], sound: V::M) -> [V::F; 4] {
    let zero = v.splat(0.0);
    let a = [v.abs(x[0]), v.abs(x[1]), v.abs(x[2]), v.abs(x[3])];
    let nonzero =
        [v.above(a[0], zero), v.above(a[1], zero), v.above(a[2], zero), v.above(a[3], zero)];
    let finite = v.above(v.splat(f32::INFINITY), v.add(v.add(a[0], a[1]), v.add(a[2], a[3])));
    let few = v.and(finite, v.not(three_of(v, nonzero)));
    if v.any(v.not(v.or(sound, few))) {
        return one_by_one(v, x, [u, u], Estimator::Exact);
    }
    // Keep the nonzero elements unchanged, a single one with its neighbour.
    let (lower, upper) = (v.or(nonzero[0], nonzero[1]), v.or(nonzero[2], nonzero[3]));
    let choice = Choice {
        past0: v.and(upper, v.not(nonzero[0])),
        past1: v.not(nonzero[1]),
        below2: v.not(nonzero[2]),
        below3: v.not(v.or(nonzero[3], v.and(upper, v.not(lower)))),
    };
    let unchanged = choice.place(v, choice.pair(v, x));
    let mut out = kept;
    for i in 0..4 {
        out[i] = v.select(few, unchanged[i], kept[i]);
    }
    out
}

/// Which two elements of a group are kept.
#[derive(Clone, Copy)]
struct Choice<M> {
    /// The lower index is not 0.
    past0: M,
    /// If the lower index is not 0, it is not 1 either.
    past1: M,
    /// If the higher index is not 3, it is not 2 either.
    below2: M,
    /// The higher index is not 3.
    below3: M,
}

impl<M: Copy> Choice<M> {
    /// The kept elements in ascending order of index.
    #[inline(always)]
    fn pair<V: Vector<M = M>>(self, v: V, x: [V::F; 4]) -> [V::F; 2] {
        let low = v.select(self.past0, v.select(self.past1, x[2], x[1]), x[0]);
        [low, v.select(self.below3, v.select(self.below2, x[1], x[2]), x[3])]
    }

    /// The group that holds the kept elements in their places, and zeros elsewhere.
    #[inline(always)]
    fn place<V: Vector<M = M>>(self, v: V, [low, high]: [V::F; 2]) -> [V::F; 4] {
        let zero = v.splat(0.0);
        // The lower element if it is 1 or 2, and the higher one.
        let inner = v.select(self.past0, low, zero);
        let outer = v.select(self.below3, high, zero);
        [
            v.select(self.past0, zero, low),
            v.select(
                v.and(self.past0, v.not(self.past1)),
                inner,
                v.select(self.below2, outer, zero),
            ),
            v.select(v.and(self.past0, self.past1), inner, v.select(self.below2, zero, outer)),
            v.select(self.below3, zero, high),
        ]
    }
}

/// At least three of the four.
#[inline(always)]
fn three_of<V: Vector>(v: V, [a, b, c, d]: [V::M; 4]) -> V::M {
    v.or(v.and(v.and(a, b), v.or(c, d)), v.and(v.and(c, d), v.or(a, b)))
}

/// Core's estimator, lane by lane.
#[inline(always)]
fn one_by_one<V: Vector>(
    v: V,
    x: [V::F; 4],
    uniforms: [V::F; 2],
    estimator: Estimator,
) -> [V::F; 4] {
    let (mut groups, mut draws) = ([[0.0; WIDEST]; 4], [[0.0; WIDEST]; 2]);
    for (stored, x) in groups.iter_mut().zip(x) {
        v.store(x, stored);
    }
    for (stored, u) in draws.iter_mut().zip(uniforms) {
        v.store(u, stored);
    }
    estimate_each(&mut groups, &draws, V::LANES, estimator);
    [v.load(&groups[0]), v.load(&groups[1]), v.load(&groups[2]), v.load(&groups[3])]
}

#[inline(never)]
fn estimate_each(
    groups: &mut [[f32; WIDEST]; 4],
    uniforms: &[[f32; WIDEST]; 2],
    lanes: usize,
    estimator: Estimator,
) {
    for lane in 0..lanes {
        let (group, [u, v]) = (groups.map(|x| x[lane]), uniforms.map(|u| u[lane]));
        let kept = match estimator {
            Estimator::Exact => mvue::exact(group, u),
            Estimator::Approximate => mvue::approximate(group, [u, v]),
        };
        groups.iter_mut().for_each(|x| x[lane] = 0.0);
        for (i, value) in kept.indices.into_iter().zip(kept.values) {
            groups[usize::from(i)][lane] = value;
        }
    }
}

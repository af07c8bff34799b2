//! The unbiased 2:4 estimate of dZ^T: compressed for a sparse product, or dense in dZ's own layout for a dense one.
//!
//! Lanes are features: four rows of tokens are a group a feature, and one Philox call of a lane serves sixteen tokens.
//! Bit-identical to [`sparse24_core::mvue`] at every SIMD level and for any number of threads. Deliberately absent: the derivation.

use ndarray::{ArrayView1, ArrayView2, ArrayViewMut2, Axis, s};
use rayon::prelude::*;
use sparse24_core::{
    Element,
    compressed::Compressed24,
    mvue::{self, Estimator},
    philox::{MULTIPLIERS, Purpose, ROUNDS, Stream, WEYL},
};

use crate::{
    Error, convert, shape,
    simd::{self, Available, Kernel, Vector},
    strips,
};

/// The estimate of dZ^T, compressed: `dz` is `[p, r]` as stored, `out` is `[r, p rounded up to a multiple of 4]`.
///
/// Draws and rounding as in [`mvue::compress`]: the estimate is made in f32 and its two values are rounded to `T`.
///
/// # Errors
/// [`Error::Shape`] unless `out` has that shape.
pub fn mvue_compress<T: Element>(
    dz: ArrayView2<'_, T>,
    estimator: Estimator,
    stream: Stream,
    out: &mut Compressed24<T>,
) -> Result<(), Error> {
    mvue_compress_at(Available::best(), dz, estimator, stream, out)
}

/// [`mvue_compress`] at a chosen SIMD level; the result is the same.
///
/// # Errors
/// As [`mvue_compress`].
pub fn mvue_compress_at<T: Element>(
    level: Available,
    dz: ArrayView2<'_, T>,
    estimator: Estimator,
    stream: Stream,
    out: &mut Compressed24<T>,
) -> Result<(), Error> {
    let (p, r) = dz.dim();
    let groups = p.div_ceil(4);
    shape::check("mvue compress", "out", [r, 4 * groups], out.shape())?;
    if dz.is_empty() {
        return Ok(());
    }
    let stride = out.metadata_stride();
    let (values, metadata) = out.parts_mut();
    let values = values.into_slice().expect("values are row-major");
    let features = r.div_ceil(4 * rayon::current_num_threads()).next_multiple_of(WIDEST).min(FEATURES);
    let mut parts: Vec<_> = (0..r)
        .step_by(features)
        .zip(values.chunks_mut(features * 2 * groups))
        .zip(metadata.chunks_mut(features * stride))
        .map(|((first, values), metadata)| Compress { dz, first, sampler: Sampler { estimator, stream, p }, values, metadata })
        .collect();
    strips::for_chunks(&mut parts, 1, |_, parts| parts.iter_mut().for_each(|part| level.run(part)));
    Ok(())
}

/// The same estimate written densely where `dz` `[p, r]` has it: out = decode([`mvue_compress`])^T, zero where pruned.
///
/// # Errors
/// [`Error::Shape`] unless `out` is `[p, r]`.
pub fn mvue_prune(dz: ArrayView2<'_, f32>, estimator: Estimator, stream: Stream, out: ArrayViewMut2<'_, f32>) -> Result<(), Error> {
    mvue_prune_at(Available::best(), dz, estimator, stream, out)
}

/// [`mvue_prune`] at a chosen SIMD level; the result is the same.
///
/// # Errors
/// As [`mvue_prune`].
pub fn mvue_prune_at(
    level: Available,
    dz: ArrayView2<'_, f32>,
    estimator: Estimator,
    stream: Stream,
    mut out: ArrayViewMut2<'_, f32>,
) -> Result<(), Error> {
    let (p, r) = dz.dim();
    shape::check("mvue prune", "out", [p, r], [out.nrows(), out.ncols()])?;
    if dz.is_empty() {
        return Ok(());
    }
    let tokens = strips::rows_per_task(r).next_multiple_of(CALL_TOKENS);
    let sampler = Sampler { estimator, stream, p };
    let parts = out.axis_chunks_iter_mut(Axis(0), tokens).into_par_iter().enumerate();
    parts.for_each(|(task, out)| level.run(Prune { dz, first: task * tokens, sampler, out }));
    Ok(())
}

/// Tokens that one Philox call of a feature serves.
const CALL_TOKENS: usize = 16;

/// Tokens whose estimates are gathered before they are written: their kept f32 values fill two cache lines.
const BLOCK_TOKENS: usize = 64;

/// Most features of a task: as many rows of the output are written side by side, and as many columns of dZ are read from a page.
const FEATURES: usize = 128;

/// Features that the widest level estimates at a time.
const WIDEST: usize = 16;

/// Where the uniforms come from.
#[derive(Clone, Copy)]
struct Sampler {
    estimator: Estimator,
    stream: Stream,
    /// Tokens of dZ.
    p: usize,
}

/// The kept pair of a group a lane: values in ascending order of index, and the metadata nibble.
struct Kept<V: Vector> {
    low: V::F,
    high: V::F,
    nibble: V::U,
}

impl<V: Vector> Kept<V> {
    /// The four elements of each group, zeros where pruned.
    #[inline(always)]
    fn dense(self, v: V) -> [V::F; 4] {
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

/// Some features of dZ, and their rows of the output.
struct Compress<'a, T> {
    dz: ArrayView2<'a, T>,
    first: usize,
    sampler: Sampler,
    values: &'a mut [T],
    metadata: &'a mut [u8],
}

impl<T: Element> Kernel for &mut Compress<'_, T> {
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let (p, groups) = (self.dz.nrows(), self.dz.nrows().div_ceil(4));
        let features = self.values.len() / (2 * groups);
        for token in (0..p).step_by(BLOCK_TOKENS) {
            let rows: [Row<'_, T>; BLOCK_TOKENS] = core::array::from_fn(|at| Row::new(self.dz, token + at));
            let whole = p - token >= BLOCK_TOKENS && rows.iter().all(|row| matches!(row, Row::Contiguous(_)));
            for offset in (0..features).step_by(V::LANES) {
                if whole && features - offset >= V::LANES {
                    self.block::<V, true>(v, &rows, token, offset);
                } else {
                    self.block::<V, false>(v, &rows, token, offset);
                }
            }
        }
    }
}

impl<T: Element> Compress<'_, T> {
    /// Estimates and writes at most 64 tokens of `LANES` features; where it is `WHOLE` it is all of them, from contiguous rows.
    #[inline(always)]
    fn block<V: Vector, const WHOLE: bool>(&mut self, v: V, rows: &[Row<'_, T>; BLOCK_TOKENS], token: usize, offset: usize) {
        let (p, groups) = (self.dz.nrows(), self.dz.nrows().div_ceil(4));
        let feature = self.first + offset;
        let mut slots = [[T::default(); WIDEST]; BLOCK_TOKENS / 2];
        let mut metadata = [[0; WIDEST]; 2];
        for (half, metadata) in metadata.iter_mut().enumerate() {
            let mut nibbles = v.splat_u(0);
            for call in (2 * half..2 * half + 2).rev() {
                let at = call * CALL_TOKENS;
                if WHOLE || token + at < p {
                    let draws = self.sampler.draw(v, feature, token + at);
                    for word in (0..4).rev() {
                        self.ask_for(groups, token, offset + (4 * call + word) % V::LANES);
                        let mut x = [v.splat(0.0); 4];
                        for (x, row) in x.iter_mut().zip(&rows[at + 4 * word..]) {
                            *x = match row {
                                Row::Contiguous(row) if WHOLE => {
                                    simd::prefetch(&row[feature..], V::LANES);
                                    load(v, &row[feature..feature + V::LANES])
                                }
                                _ => row.load(v, feature),
                            };
                        }
                        let kept = self.sampler.estimate(v, x, &draws, word);
                        nibbles = v.join_nibble(nibbles, kept.nibble);
                        let mut pair = [[0.0; WIDEST]; 2];
                        v.store(kept.low, &mut pair[0]);
                        v.store(kept.high, &mut pair[1]);
                        slots[at / 2 + 2 * word] = pair[0].map(convert::narrow);
                        slots[at / 2 + 2 * word + 1] = pair[1].map(convert::narrow);
                    }
                }
            }
            v.store_u(nibbles, metadata);
        }
        let present = if WHOLE { BLOCK_TOKENS / 4 } else { (BLOCK_TOKENS / 4).min(groups - token / 4) };
        let (stride, bytes) = (groups.div_ceil(2), present.div_ceil(2));
        for lane in 0..V::LANES.min(self.values.len() / (2 * groups) - offset) {
            let row = offset + lane;
            let values: [T; BLOCK_TOKENS / 2] = core::array::from_fn(|slot| slots[slot][lane]);
            self.values[row * 2 * groups + token / 2..][..2 * present].copy_from_slice(&values[..2 * present]);
            let nibbles = (u64::from(metadata[1][lane]) << 32 | u64::from(metadata[0][lane])) & u64::MAX >> (64 - 4 * present);
            self.metadata[row * stride + token / 8..][..bytes].copy_from_slice(&nibbles.to_le_bytes()[..bytes]);
        }
    }

    /// Asks for the lines of one row that a block will write: they lie apart, so that no hardware foresees them.
    #[inline(always)]
    fn ask_for(&self, groups: usize, token: usize, row: usize) {
        for line in (0..=BLOCK_TOKENS / 2).step_by(64 / size_of::<T>()) {
            simd::prefetch(self.values, row * 2 * groups + token / 2 + line);
        }
        simd::prefetch(self.metadata, row * groups.div_ceil(2) + token / 8);
    }
}

/// `LANES` elements as f32.
#[inline(always)]
fn load<V: Vector, T: Element>(v: V, row: &[T]) -> V::F {
    if let Some(row) = T::as_f32s(row) {
        return v.load(row);
    }
    let mut x = [0.0; WIDEST];
    x.iter_mut().zip(row).for_each(|(x, &stored)| *x = convert::widen(stored));
    v.load(&x)
}

/// Some tokens of the output, from `first` on.
struct Prune<'a> {
    dz: ArrayView2<'a, f32>,
    first: usize,
    sampler: Sampler,
    out: ArrayViewMut2<'a, f32>,
}

impl Kernel for Prune<'_> {
    #[inline(always)]
    fn run<V: Vector>(mut self, v: V) {
        let (tokens, r) = self.out.dim();
        for offset in (0..tokens).step_by(CALL_TOKENS) {
            let rows: [Row<'_, f32>; CALL_TOKENS] = core::array::from_fn(|at| Row::new(self.dz, self.first + offset + at));
            let mut out = self.out.slice_mut(s![offset..tokens.min(offset + CALL_TOKENS), ..]);
            for feature in (0..r).step_by(V::LANES) {
                let draws = self.sampler.draw(v, feature, self.first + offset);
                for word in 0..out.nrows().div_ceil(4) {
                    let mut x = [v.splat(0.0); 4];
                    for (x, row) in x.iter_mut().zip(&rows[4 * word..]) {
                        *x = row.load(v, feature);
                    }
                    let kept = self.sampler.estimate(v, x, &draws, word);
                    for (i, dense) in kept.dense(v).into_iter().enumerate().take(out.nrows() - 4 * word) {
                        let mut out = out.index_axis_mut(Axis(0), 4 * word + i);
                        match out.as_slice_mut().and_then(|out| out.get_mut(feature..feature + V::LANES)) {
                            Some(out) => v.store(dense, out),
                            None => {
                                let mut lanes = [0.0; WIDEST];
                                v.store(dense, &mut lanes);
                                out.iter_mut().skip(feature).zip(&lanes[..V::LANES]).for_each(|(out, &dense)| *out = dense);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// A token of dZ.
enum Row<'a, T> {
    Contiguous(&'a [T]),
    Strided(ArrayView1<'a, T>),
    /// Beyond the last token: zeros.
    Padding,
}

impl<'a, T: Element> Row<'a, T> {
    #[inline(always)]
    fn new(dz: ArrayView2<'a, T>, token: usize) -> Self {
        if token >= dz.nrows() {
            return Self::Padding;
        }
        let row = dz.index_axis_move(Axis(0), token);
        row.to_slice().map_or(Self::Strided(row), Self::Contiguous)
    }

    /// `LANES` features, zeros beyond the last.
    #[inline(always)]
    fn load<V: Vector>(&self, v: V, feature: usize) -> V::F {
        let mut x = [0.0; WIDEST];
        match self {
            Self::Contiguous(row) if row.len() >= feature + V::LANES => return load(v, &row[feature..feature + V::LANES]),
            Self::Contiguous(row) => x.iter_mut().zip(&row[feature..]).for_each(|(x, &stored)| *x = convert::widen(stored)),
            Self::Strided(row) => x.iter_mut().zip(row.iter().skip(feature)).for_each(|(x, &stored)| *x = convert::widen(stored)),
            Self::Padding => {}
        }
        v.load(&x)
    }
}

/// The uniforms of one call of each lane, word by word; the second ones are for the approximate estimator.
struct Draws<V: Vector> {
    first: [V::F; 4],
    second: [V::F; 4],
}

impl Sampler {
    /// The uniforms of the features from `feature` on for the sixteen tokens from `token` on.
    #[inline(always)]
    fn draw<V: Vector>(self, v: V, feature: usize, token: usize) -> Draws<V> {
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
    fn estimate<V: Vector>(self, v: V, x: [V::F; 4], draws: &Draws<V>, word: usize) -> Kept<V> {
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

//! The unbiased 2:4 estimate of dZ^T: compressed for a sparse product, or dense in dZ's own layout for a dense one.
//!
//! Lanes are features: four token rows by sixteen features are sixteen groups, and one Philox call of a lane serves sixteen tokens.
//! Bit-identical to [`sparse24_core::mvue`] at every SIMD level and for any number of threads. Deliberately absent: the derivation.

use ndarray::{ArrayView2, ArrayViewMut2, Axis, s};
use rayon::prelude::*;
use sparse24_core::{
    Element,
    compressed::Compressed24,
    mvue::{self, Estimator},
    philox::{Purpose, Stream, uniform},
};

use crate::{
    Error, shape,
    simd::{Available, Kernel},
    strips,
};

/// Groups that are estimated at a time, one a feature.
const LANES: usize = 16;

/// One value a lane.
type Lanes<V> = [V; LANES];

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
    let features = strips::rows_per_task(p).clamp(LANES, FEATURES).next_multiple_of(LANES);
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

/// Calls whose results are gathered before they are written: their kept f32 values fill two cache lines.
const CALLS: usize = 4;

/// Most features of a task: as many rows of the output are written side by side.
const FEATURES: usize = 64;

/// Where the uniforms come from.
#[derive(Clone, Copy)]
struct Sampler {
    estimator: Estimator,
    stream: Stream,
    /// Tokens of dZ.
    p: usize,
}

impl Sampler {
    /// The uniforms of sixteen features from `feature` on for the sixteen tokens from `token` on.
    #[inline(always)]
    fn draw(self, feature: usize, token: usize) -> Draws {
        let first = mvue::call(self.p, feature, token / 4);
        let step = self.p.div_ceil(CALL_TOKENS) as u32;
        let calls = core::array::from_fn(|lane| first.wrapping_add((lane as u32).wrapping_mul(step)));
        let second = match self.estimator {
            Estimator::Exact => [[0.0; LANES]; 4],
            Estimator::Approximate => uniforms(self.stream.with_purpose(Purpose::MvueSecond), calls),
        };
        Draws { first: uniforms(self.stream, calls), second }
    }

    #[inline(always)]
    fn estimate(self, x: &[Lanes<f32>; 4], draws: &Draws, word: usize) -> Kept {
        match self.estimator {
            Estimator::Exact => exact(x, &draws.first[word]),
            Estimator::Approximate => approximate(x, &draws.first[word], &draws.second[word]),
        }
    }
}

/// The uniforms of one call of each lane, word by word.
struct Draws {
    first: [Lanes<f32>; 4],
    second: [Lanes<f32>; 4],
}

/// The kept pair of each lane: values in ascending order of index, and the metadata nibble.
struct Kept {
    low: Lanes<f32>,
    high: Lanes<f32>,
    nibble: Lanes<u32>,
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
    fn run(self) {
        let groups = self.dz.nrows().div_ceil(4);
        let stride = groups.div_ceil(2);
        let features = self.values.len() / (2 * groups);
        for token in (0..self.dz.nrows()).step_by(CALLS * CALL_TOKENS) {
            for offset in (0..features).step_by(LANES) {
                let mut values = [[T::default(); 8 * CALLS]; LANES];
                let mut metadata = [0_u64; LANES];
                for call in 0..CALLS {
                    let token = token + call * CALL_TOKENS;
                    if token < self.dz.nrows() {
                        let draws = self.sampler.draw(self.first + offset, token);
                        for word in 0..4 {
                            let x = core::array::from_fn(|i| load(self.dz, token + 4 * word + i, self.first + offset));
                            let kept = self.sampler.estimate(&x, &draws, word);
                            let group = 4 * call + word;
                            for lane in 0..LANES {
                                values[lane][2 * group] = T::from_f32(kept.low[lane]);
                                values[lane][2 * group + 1] = T::from_f32(kept.high[lane]);
                                metadata[lane] |= u64::from(kept.nibble[lane]) << (4 * group);
                            }
                        }
                    }
                }
                let present = (4 * CALLS).min(groups - token / 4);
                let bytes = present.div_ceil(2);
                for lane in 0..LANES.min(features - offset) {
                    let row = offset + lane;
                    self.values[row * 2 * groups + token / 2..][..2 * present].copy_from_slice(&values[lane][..2 * present]);
                    let metadata = metadata[lane] & u64::MAX >> (64 - 4 * present);
                    self.metadata[row * stride + token / 8..][..bytes].copy_from_slice(&metadata.to_le_bytes()[..bytes]);
                }
            }
        }
    }
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
    fn run(mut self) {
        let (tokens, r) = self.out.dim();
        for offset in (0..tokens).step_by(CALL_TOKENS) {
            for feature in (0..r).step_by(LANES) {
                let draws = self.sampler.draw(feature, self.first + offset);
                for word in 0..4.min((tokens - offset).div_ceil(4)) {
                    let token = offset + 4 * word;
                    let x = core::array::from_fn(|i| load(self.dz, self.first + token + i, feature));
                    let kept = self.sampler.estimate(&x, &draws, word);
                    for i in 0..4.min(tokens - token) {
                        let mut dense = [0.0; LANES];
                        for lane in 0..LANES {
                            let high = if kept.nibble[lane] >> 2 == i as u32 { kept.high[lane] } else { 0.0 };
                            dense[lane] = if kept.nibble[lane] & 3 == i as u32 { kept.low[lane] } else { high };
                        }
                        let width = LANES.min(r - feature);
                        let mut out = self.out.index_axis_mut(Axis(0), token + i);
                        match out.as_slice_mut().map(|out| &mut out[feature..feature + width]) {
                            Some(out) => out.copy_from_slice(&dense[..width]),
                            None => out.slice_mut(s![feature..feature + width]).iter_mut().zip(dense).for_each(|(out, dense)| *out = dense),
                        }
                    }
                }
            }
        }
    }
}

/// Sixteen features of a token; zeros beyond the matrix.
#[inline(always)]
fn load<T: Element>(dz: ArrayView2<'_, T>, token: usize, feature: usize) -> Lanes<f32> {
    if token >= dz.nrows() {
        return [0.0; LANES];
    }
    match dz.index_axis_move(Axis(0), token).to_slice().and_then(|row| row[feature..].first_chunk::<LANES>()) {
        Some(row) => core::array::from_fn(|lane| row[lane].to_f32()),
        None => core::array::from_fn(|lane| dz.get([token, feature + lane]).map_or(0.0, |x| x.to_f32())),
    }
}

/// Philox4x32-10 for sixteen calls of one stream; see [`sparse24_core::philox`].
#[inline(always)]
fn uniforms(stream: Stream, calls: Lanes<u32>) -> [Lanes<f32>; 4] {
    let ([mut k0, mut k1], [site, micro_step, step]) = stream.address();
    let mut state = [calls, [site; LANES], [micro_step; LANES], [step; LANES]];
    for _ in 0..10 {
        for lane in 0..LANES {
            let [a, b, c, d] = state.map(|word| word[lane]);
            let (p0, p1) = (u64::from(a) * 0xd251_1f53, u64::from(c) * 0xcd9e_8d57);
            let next = [(p1 >> 32) as u32 ^ b ^ k0, p1 as u32, (p0 >> 32) as u32 ^ d ^ k1, p0 as u32];
            (0..4).for_each(|word| state[word][lane] = next[word]);
        }
        (k0, k1) = (k0.wrapping_add(0x9e37_79b9), k1.wrapping_add(0xbb67_ae85));
    }
    state.map(|word| word.map(uniform))
}

/// [`mvue::exact`] of sixteen groups.
#[inline(always)]
fn exact(x: &[Lanes<f32>; 4], u: &Lanes<f32>) -> Kept {
    let mut kept = Kept { low: [0.0; LANES], high: [0.0; LANES], nibble: [0; LANES] };
    for lane in 0..LANES {
        let group = [x[0][lane], x[1][lane], x[2][lane], x[3][lane]];
        (kept.low[lane], kept.high[lane], kept.nibble[lane]) = exact_group(group, u[lane]);
    }
    kept
}

/// [`mvue::exact`] without branches: the kept values in ascending order of index, and the nibble.
///
/// Elements that are certain add nothing to the running sums, so "the first drawn one with t < c" is the number of sums that are at most
/// t. Where nothing is certain every element is less than r, so t + r is at least the sum of the first drawn, and the second follows it.
#[inline(always)]
fn exact_group(x: [f32; 4], u: f32) -> (f32, f32, u32) {
    let least = |a: f32, b: f32| if a < b { a } else { b };
    let lower = |a: u32, b: u32| if a < b { a } else { b };
    let pick = |first: bool, a: u32, b: u32| if first { a } else { b };

    let magnitudes = x.map(f32::abs);
    let finite = magnitudes.iter().fold(true, |finite, &a| finite & (a < f32::INFINITY));
    let overflow = (magnitudes[0] + magnitudes[1]) + (magnitudes[2] + magnitudes[3]) == f32::INFINITY;
    let (shrink, grow) = if overflow { (0.25, 4.0) } else { (1.0, 1.0) };
    let a = magnitudes.map(|a| a * shrink);
    let (p01, p23) = (a[0] + a[1], a[2] + a[3]);
    let without_largest = least(least(a[1] + p23, a[0] + p23), least(a[3] + p01, a[2] + p01));
    let r = least((p01 + p23) * 0.5, without_largest);

    let certain = a.map(|a| a >= r);
    let drawn = a.map(|a| (a < r) & (a > 0.0));
    let weight: [f32; 4] = core::array::from_fn(|i| if drawn[i] { a[i] } else { 0.0 });
    let c1 = weight[0] + weight[1];
    let c2 = c1 + weight[2];
    let sums = [weight[0], c1, c2, c2 + weight[3]];
    let beyond = |t: f32| sums.iter().fold(0, |count, &sum| count + u32::from(t >= sum));
    let t = u * r;
    let (first, second) = (beyond(t), beyond(t + r));
    let last = pick(drawn[3], 3, pick(drawn[2], 2, pick(drawn[1], 1, 0)));
    let before_last = pick(drawn[3] & drawn[2], 2, pick((drawn[3] | drawn[2]) & drawn[1], 1, 0));

    let first_certain = pick(certain[0], 0, pick(certain[1], 1, pick(certain[2], 2, 3)));
    let second_certain = pick(certain[0] & certain[1], 1, pick((certain[0] | certain[1]) & certain[2], 2, 3));
    let any_certain = certain[0] | certain[1] | certain[2] | certain[3];
    let two_certain = (certain[0] & certain[1]) | ((certain[0] | certain[1]) & (certain[2] | certain[3])) | (certain[2] & certain[3]);
    let other = lower(first, last);
    let larger = |(at, most): (u32, f32), (i, a): (u32, f32)| if a > most { (i, a) } else { (at, most) };
    let (largest, _) = larger(larger(larger((0, a[0]), (1, a[1])), (2, a[2])), (3, a[3]));

    let mut low = pick(first < last, first, before_last);
    let mut high = lower(second, last);
    low = pick(any_certain, lower(first_certain, other), low);
    high = pick(any_certain, first_certain + other - lower(first_certain, other), high);
    low = pick(two_certain, first_certain, low);
    high = pick(two_certain, second_certain, high);
    low = pick(finite, pick(r == 0.0, largest & 2, low), 0);
    high = pick(finite, pick(r == 0.0, largest | 1, high), 1);

    let value: [f32; 4] = core::array::from_fn(|i| if certain[i] { x[i] } else { (r * grow).copysign(x[i]) });
    let low_value = if low == 0 { value[0] } else { if low == 1 { value[1] } else { value[2] } };
    let high_value = if high == 3 { value[3] } else { if high == 2 { value[2] } else { value[1] } };
    let keep = |value: f32| if finite { value } else { f32::NAN };
    (keep(low_value), keep(high_value), low | high << 2)
}

/// [`mvue::approximate`] of sixteen groups.
#[inline(always)]
fn approximate(x: &[Lanes<f32>; 4], u: &Lanes<f32>, v: &Lanes<f32>) -> Kept {
    let mut kept = Kept { low: [0.0; LANES], high: [0.0; LANES], nibble: [0; LANES] };
    for lane in 0..LANES {
        let one = mvue::approximate(x.map(|x| x[lane]), [u[lane], v[lane]]);
        ([kept.low[lane], kept.high[lane]], kept.nibble[lane]) = (one.values, u32::from(one.pattern().nibble()));
    }
    kept
}

//! The unbiased 2:4 estimate of dZ^T: compressed for a sparse product, or dense in dZ's own layout for a dense one.
//!
//! Lanes are features: four rows of tokens are a group a feature, and one Philox call of a lane serves sixteen tokens.
//! Bit-identical to [`sparse24_core::mvue`] at every SIMD level and for any number of threads. Deliberately absent: the derivation.

mod lanes;

use ndarray::{ArrayView1, ArrayView2, ArrayViewMut2, Axis, s};
use rayon::prelude::*;
use sparse24_core::{Element, compressed::Compressed24, mvue::Estimator, philox::Stream};

use self::lanes::{Sampler, WIDEST};
use crate::{
    Error, convert, shape,
    simd::{self, Available, Kernel, Vector},
    strips,
};

/// The estimate of dZ^T, compressed: `dz` is `[p, r]` as stored, `out` is `[r, p rounded up to a multiple of 4]`.
///
/// Draws and rounding as in [`sparse24_core::mvue::compress`]: the estimate is made in f32 and its two values are rounded to `T`.
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

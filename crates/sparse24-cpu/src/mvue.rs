//! The unbiased 2:4 estimate of dZ^T: compressed for a sparse product, or dense in dZ's own layout
//! for a dense one.
//!
//! Lanes are features: four rows of tokens are a group a feature, and one Philox call of a lane
//! serves sixteen tokens. Bit-identical to [`sparse24_core::mvue`] at every SIMD level and for any
//! number of threads. Deliberately absent: the derivation.

mod lanes;

use core::ops::Range;

use half::bf16;
use ndarray::{ArrayView2, ArrayViewMut2, Axis, s};
use rayon::prelude::*;
use sparse24_core::{Element, compressed::Compressed24, mvue::Estimator, philox::Stream};

use self::lanes::{Kept, Sampler, WIDEST};
use crate::{
    Error, convert, shape,
    simd::{self, Available, Kernel, Vector},
    strips,
};

/// The estimate of dZ^T, compressed: `dz` is `[p, r]` as stored, `out` is
/// `[r, p rounded up to a multiple of 4]`.
///
/// Draws and rounding as in [`sparse24_core::mvue::compress`]: the estimate is made in f32 and its
/// two values are rounded to `T`.
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
    let features =
        r.div_ceil(4 * rayon::current_num_threads()).next_multiple_of(WIDEST).min(FEATURES);
    let mut parts: Vec<_> = (0..r)
        .step_by(features)
        .zip(values.chunks_mut(features * 2 * groups))
        .zip(metadata.chunks_mut(features * stride))
        .map(|((first, values), metadata)| Compress {
            dz,
            first,
            sampler: Sampler { estimator, stream, p },
            values,
            metadata,
        })
        .collect();
    strips::for_chunks(&mut parts, 1, |_, parts| parts.iter_mut().for_each(|part| level.run(part)));
    Ok(())
}

/// The same estimate written densely where `dz` `[p, r]` has it: out = decode([`mvue_compress`])^T,
/// zero where pruned.
///
/// # Errors
/// [`Error::Shape`] unless `out` is `[p, r]`.
pub fn mvue_prune(
    dz: ArrayView2<'_, f32>,
    estimator: Estimator,
    stream: Stream,
    out: ArrayViewMut2<'_, f32>,
) -> Result<(), Error> {
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

/// Tokens whose metadata nibbles fill a word.
const NIBBLE_TOKENS: usize = 32;

/// Tokens of a panel.
const PANEL_TOKENS: usize = 256;

/// Most features of a task: as many rows of the output are written side by side, and as many
/// columns of dZ are read from a page.
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
        let p = self.dz.nrows();
        let mut panel = Panel {
            words: vec![[0; FEATURES]; PANEL_TOKENS / 2],
            nibbles: vec![[0; FEATURES]; PANEL_TOKENS / NIBBLE_TOKENS],
        };
        let mut staging = [[T::default(); FEATURES]; NIBBLE_TOKENS];
        let mut lines = [[0; PANEL_TOKENS / 2]; WIDEST];
        for token in (0..p).step_by(PANEL_TOKENS) {
            for at in (0..PANEL_TOKENS.min(p - token)).step_by(NIBBLE_TOKENS) {
                self.estimate(v, token + at, at, &mut staging, &mut panel);
            }
            self.write(v, token, &panel, &mut lines);
        }
    }
}

/// Estimates of some tokens, transposed once there are so many that a row of them fills cache
/// lines.
struct Panel {
    /// Two or four elements of a feature a group: [`convert::narrow_word`].
    words: Vec<[u32; FEATURES]>,
    nibbles: Vec<[u32; FEATURES]>,
}

impl<T: Element> Compress<'_, T> {
    /// Estimates the 32 tokens from `token` on, `at` in the panel.
    #[inline(always)]
    fn estimate<V: Vector>(
        &self,
        v: V,
        token: usize,
        at: usize,
        staging: &mut [[T; FEATURES]; NIBBLE_TOKENS],
        panel: &mut Panel,
    ) {
        let columns = self.first..self.first + self.features();
        let ahead = NIBBLE_TOKENS * self.dz.strides()[0] as usize;
        let rows = rows(self.dz, token, columns.clone(), staging);
        for offset in (0..columns.len()).step_by(V::LANES) {
            let mut nibbles = v.splat_u(0);
            for call in (0..NIBBLE_TOKENS / CALL_TOKENS).rev() {
                let draws = self.sampler.draw(v, self.first + offset, token + call * CALL_TOKENS);
                for word in (0..4).rev() {
                    let group = 4 * call + word;
                    let x = group_of(v, &rows[4 * group..], offset, ahead);
                    let kept = self.sampler.estimate(v, x, &draws, word);
                    nibbles = v.join_nibble(nibbles, kept.nibble);
                    store_pair::<V, T>(v, &kept, &mut panel.words, at / 4 + group, offset);
                }
            }
            v.store_u(nibbles, &mut panel.nibbles[at / NIBBLE_TOKENS][offset..]);
        }
    }

    /// Writes the panel whose first token is `token`.
    #[inline(always)]
    fn write<V: Vector>(
        &mut self,
        v: V,
        token: usize,
        panel: &Panel,
        lines: &mut [[u32; PANEL_TOKENS / 2]; WIDEST],
    ) {
        let (features, groups) = (self.features(), self.dz.nrows().div_ceil(4));
        let (present, stride) = ((PANEL_TOKENS / 4).min(groups - token / 4), groups.div_ceil(2));
        for offset in (0..features).step_by(V::LANES) {
            for at in (0..PANEL_TOKENS / 2 / convert::elements_a_word::<T>()).step_by(V::LANES) {
                let mut square = [v.splat_u(0); WIDEST];
                square
                    .iter_mut()
                    .zip(&panel.words[at..])
                    .take(V::LANES)
                    .for_each(|(row, words)| *row = v.load_u(&words[offset..]));
                v.transpose(&mut square);
                square
                    .iter()
                    .zip(&mut *lines)
                    .take(V::LANES)
                    .for_each(|(&row, line)| v.store_u(row, &mut line[at..]));
            }
            for (feature, line) in (offset..features).zip(&*lines).take(V::LANES) {
                let values = feature * 2 * groups + token / 2;
                for at in (0..=PANEL_TOKENS / 2).step_by(64 / size_of::<T>()) {
                    simd::prefetch(self.values, values + V::LANES * 2 * groups + at);
                }
                simd::deliver_words(line, &mut self.values[values..][..2 * present]);
                let metadata =
                    &mut self.metadata[feature * stride + token / 8..][..present.div_ceil(2)];
                for (bytes, nibbles) in metadata.chunks_mut(4).zip(&panel.nibbles) {
                    let nibbles = nibbles[feature].to_le_bytes();
                    match bytes.first_chunk_mut() {
                        Some(whole) => *whole = nibbles,
                        None => bytes.copy_from_slice(&nibbles[..bytes.len()]),
                    }
                }
                if present % 2 == 1 {
                    metadata[present / 2] &= 0xf;
                }
            }
        }
    }

    fn features(&self) -> usize {
        self.values.len() / (2 * self.dz.nrows().div_ceil(4))
    }
}

/// The kept pair of each lane as the bits of two elements, in one word or two.
#[inline(always)]
fn store_pair<V: Vector, T: Element>(
    v: V,
    kept: &Kept<V>,
    words: &mut [[u32; FEATURES]],
    group: usize,
    offset: usize,
) {
    if convert::is::<T, f32>() {
        v.store_u(v.bits(kept.low), &mut words[2 * group][offset..]);
        return v.store_u(v.bits(kept.high), &mut words[2 * group + 1][offset..]);
    }
    if convert::is::<T, bf16>() {
        return v.store_u(v.join_brains(kept.low, kept.high), &mut words[group][offset..]);
    }
    let mut pair = [[0.0; WIDEST]; 2];
    v.store(kept.low, &mut pair[0]);
    v.store(kept.high, &mut pair[1]);
    for lane in 0..V::LANES {
        let [low, high] = [pair[0][lane], pair[1][lane]].map(convert::narrow_word::<T>);
        if convert::elements_a_word::<T>() == 2 {
            words[group][offset + lane] = low | high << 16;
        } else {
            [words[2 * group][offset + lane], words[2 * group + 1][offset + lane]] = [low, high];
        }
    }
}

/// `LANES` features of four rows, which are as many elements further on asked for.
#[inline(always)]
fn group_of<V: Vector, T: Element>(
    v: V,
    rows: &[&[T; FEATURES]],
    offset: usize,
    ahead: usize,
) -> [V::F; 4] {
    let mut x = [v.splat(0.0); 4];
    for (x, row) in x.iter_mut().zip(rows) {
        let row = &row[offset..];
        simd::prefetch(row, ahead);
        *x = load(v, &row[..V::LANES]);
    }
    x
}

/// `LANES` elements as f32; any NaN is as good as another.
#[inline(always)]
fn load<V: Vector, T: Element>(v: V, row: &[T]) -> V::F {
    if let Some(row) = T::as_f32s(row) {
        return v.load(row);
    }
    let mut x = [0.0; WIDEST];
    for (x, &stored) in x.iter_mut().zip(row) {
        *x = if convert::is::<T, bf16>() {
            f32::from_bits(convert::carry(stored).to_bits() << 16)
        } else {
            stored.to_f32()
        };
    }
    v.load(&x)
}

/// Some columns of the tokens from `token` on: rows are copied where they do not lie so, padded
/// with zeros.
#[inline(always)]
fn rows<'a, T: Element, const TOKENS: usize>(
    dz: ArrayView2<'a, T>,
    token: usize,
    columns: Range<usize>,
    staging: &'a mut [[T; FEATURES]; TOKENS],
) -> [&'a [T; FEATURES]; TOKENS] {
    let stored = |at| (token + at < dz.nrows()).then(|| dz.index_axis_move(Axis(0), token + at));
    let in_place = |at| stored(at)?.to_slice()?[columns.start..].first_chunk();
    for (at, staged) in staging.iter_mut().enumerate().filter(|&(at, _)| in_place(at).is_none()) {
        *staged = [T::default(); FEATURES];
        match stored(at).map(|row| row.slice_move(s![columns.clone()])) {
            None => {}
            Some(row) => match row.to_slice() {
                Some(row) => staged[..row.len()].copy_from_slice(row),
                None => staged.iter_mut().zip(row).for_each(|(staged, &x)| *staged = x),
            },
        }
    }
    core::array::from_fn(|at| in_place(at).unwrap_or(&staging[at]))
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
        let [mut staging, mut estimate] = [[[0.0; FEATURES]; CALL_TOKENS]; 2];
        for at in (0..tokens).step_by(CALL_TOKENS) {
            for first in (0..r).step_by(FEATURES) {
                let columns = first..r.min(first + FEATURES);
                let rows = rows(self.dz, self.first + at, columns.clone(), &mut staging);
                for offset in (0..columns.len()).step_by(V::LANES) {
                    let draws = self.sampler.draw(v, first + offset, self.first + at);
                    for word in 0..4 {
                        let x = group_of(v, &rows[4 * word..], offset, V::LANES);
                        let kept = self.sampler.estimate(v, x, &draws, word);
                        for (dense, out) in kept.dense(v).into_iter().zip(&mut estimate[4 * word..])
                        {
                            v.store(dense, &mut out[offset..]);
                        }
                    }
                }
                let mut out =
                    self.out.slice_mut(s![at..tokens.min(at + CALL_TOKENS), columns.clone()]);
                for (mut out, estimate) in out.outer_iter_mut().zip(&estimate) {
                    match out.as_slice_mut() {
                        Some(out) => out.copy_from_slice(&estimate[..columns.len()]),
                        None => out.iter_mut().zip(estimate).for_each(|(out, &x)| *out = x),
                    }
                }
            }
        }
    }
}

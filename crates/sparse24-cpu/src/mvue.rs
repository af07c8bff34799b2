//! The unbiased 2:4 estimate of dZ^T, dense in dZ's own layout or compressed. Bit-identical to
//! [`sparse24_core::mvue`] at every SIMD level and for any number of threads.

mod lanes;

use core::ops::Range;

use ndarray::{ArrayView2, ArrayViewMut2, Axis, s};
use rayon::prelude::*;
use sparse24_core::{
    Element,
    compressed::Compressed24,
    mvue::{Estimator, call, estimate},
    philox::Stream,
};

use self::lanes::Sampler;
use crate::{
    Error, check, compressed,
    simd::{self, Available, Kernel, Vector},
    strips::Strips,
    tasks,
};

/// The estimate of dZ^T, compressed: `dz` is `[p, r]`, `out` is `[r, p rounded up to a multiple of
/// 4]`.
///
/// Draws and rounding are those of [`sparse24_core::mvue::compress`].
///
/// # Errors
/// [`Error::Shape`] unless `out` has that shape.
pub fn mvue_compress<T: Element>(
    dz: ArrayView2<'_, T>,
    estimator: Estimator,
    stream: Stream,
    out: &mut Compressed24<T>,
) -> Result<(), Error> {
    let (p, r) = dz.dim();
    check::shape("mvue compress", "out", [r, p.next_multiple_of(4)], out.shape())?;
    compressed::write(out, |row, group| {
        let token = |at| dz.get((4 * group + at, row)).map_or(0.0, |x| x.to_f32());
        let x = [token(0), token(1), token(2), token(3)];
        let kept = estimate(x, estimator, stream, call(p, row, group), group % 4);
        (kept.pattern(), kept.values.map(T::from_f32))
    });
    Ok(())
}

/// The same estimate, dense and transposed: out = decode([`mvue_compress`])^T, both `[p, r]`, zero
/// where pruned.
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

/// The same estimate as strips `[r, p]`. Parts of its transpose pass through `finish` first.
pub fn mvue_strips(
    dz: ArrayView2<'_, f32>,
    estimator: Estimator,
    stream: Stream,
    finish: impl Fn(ArrayViewMut2<'_, f32>) + Sync,
    out: &mut Strips,
) {
    let (p, r) = dz.dim();
    let sampler = Sampler { estimator, stream, p };
    out.pack_transposed([r, p], |features, tokens, mut out| {
        let (token, feature) = (tokens.start, features.start);
        Available::best().run(Prune { dz, token, feature, sampler, out: out.view_mut() });
        finish(out);
    });
}

/// [`mvue_prune`] at a given SIMD level, with the same result.
///
/// # Errors
/// Like [`mvue_prune`].
pub fn mvue_prune_at(
    level: Available,
    dz: ArrayView2<'_, f32>,
    estimator: Estimator,
    stream: Stream,
    mut out: ArrayViewMut2<'_, f32>,
) -> Result<(), Error> {
    let (p, r) = dz.dim();
    check::matrix("mvue prune", "out", &out, [p, r])?;
    let tokens = tasks::rows_per_task(r).next_multiple_of(CALL_TOKENS);
    let sampler = Sampler { estimator, stream, p };
    let parts = out.axis_chunks_iter_mut(Axis(0), tokens).into_par_iter().enumerate();
    parts.for_each(|(task, out)| {
        level.run(Prune { dz, token: task * tokens, feature: 0, sampler, out });
    });
    Ok(())
}

/// Tokens of a feature that one Philox call serves.
const CALL_TOKENS: usize = 16;

/// Features that are staged at a time.
const FEATURES: usize = 128;

/// The tokens of the output are those from `token` on, and its features those from `feature` on.
/// Lanes are features: four rows are a group per lane.
struct Prune<'a> {
    dz: ArrayView2<'a, f32>,
    token: usize,
    feature: usize,
    sampler: Sampler,
    out: ArrayViewMut2<'a, f32>,
}

type Rows = [[f32; FEATURES]; CALL_TOKENS];

impl Kernel for Prune<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(mut self, v: V) {
        let (tokens, r) = self.out.dim();
        let [mut staging, mut estimate]: [Rows; 2] = [[[0.0; FEATURES]; CALL_TOKENS]; 2];
        for at in (0..tokens).step_by(CALL_TOKENS) {
            for first in (0..r).step_by(FEATURES) {
                let columns = first..r.min(first + FEATURES);
                let features = self.feature + columns.start..self.feature + columns.end;
                let rows = rows(self.dz, self.token + at, features, &mut staging);
                for offset in (0..columns.len()).step_by(V::LANES) {
                    let feature = self.feature + first + offset;
                    let draws = self.sampler.draw(v, feature, self.token + at);
                    for word in 0..4 {
                        let mut x = [v.splat(0.0); 4];
                        for (x, row) in x.iter_mut().zip(&rows[4 * word..]) {
                            simd::prefetch(&row[offset..], V::LANES);
                            *x = v.load(&row[offset..]);
                        }
                        let kept = self.sampler.estimate(v, x, &draws, word);
                        for (kept, out) in kept.into_iter().zip(&mut estimate[4 * word..]) {
                            v.store(kept, &mut out[offset..]);
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

/// Some columns of the tokens from `token` on. Rows that are absent, short or not contiguous are
/// copied to `staging` and padded with zeros.
#[inline(always)]
fn rows<'a>(
    dz: ArrayView2<'a, f32>,
    token: usize,
    columns: Range<usize>,
    staging: &'a mut Rows,
) -> [&'a [f32; FEATURES]; CALL_TOKENS] {
    let stored = |at| (token + at < dz.nrows()).then(|| dz.index_axis_move(Axis(0), token + at));
    let in_place = |at| stored(at)?.to_slice()?[columns.start..].first_chunk();
    for (at, staged) in staging.iter_mut().enumerate().filter(|&(at, _)| in_place(at).is_none()) {
        *staged = [0.0; FEATURES];
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

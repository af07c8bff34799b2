//! Measures the instruments of masks and sampled gradients, and counts the flips of every tile.
//!
//! Invariant: nothing here changes training. The counts over the sampled steps are part of every
//! checkpoint, so a resumed run continues them exactly.

use std::collections::BTreeMap;

use sparse24_core::flip::tile_gap;

use super::{Instruments, LayerInstruments};
use crate::{
    Result,
    checkpoint::{NamedTensor, Values},
};
use sparse24_train::trainer::{GradientNoise, MaskChange, Trainer};

/// Number of tiles whose gap is computed, and of tiles that are recorded.
const GAPS: usize = 1 << 16;
const TILES: usize = 1 << 9;

/// Prefix of the counts among a checkpoint's auxiliary tensors.
const PREFIX: &str = "flips.";

/// The flips of every tile over the steps sampled so far.
#[derive(Debug, Default)]
pub(super) struct FlipCounts(Vec<Counts>);

#[derive(Debug)]
struct Counts {
    name: String,
    /// In tiles.
    shape: [usize; 2],
    flips: Vec<u32>,
}

impl FlipCounts {
    /// Reads the counts of a checkpoint.
    pub(super) fn of_checkpoint(auxiliary: &[NamedTensor<Values>]) -> Self {
        let counts = auxiliary.iter().filter_map(|tensor| {
            let (name, &[rows, columns], Values::U32(flips)) =
                (tensor.name.strip_prefix(PREFIX)?, tensor.shape.as_slice(), &tensor.values)
            else {
                return None;
            };
            Some(Counts { name: name.to_owned(), shape: [rows, columns], flips: flips.clone() })
        });
        Self(counts.collect())
    }

    /// The counts as tensors of a checkpoint.
    pub(super) fn tensors(&self) -> impl Iterator<Item = NamedTensor<Values>> {
        self.0.iter().map(|Counts { name, shape, flips }| NamedTensor {
            name: format!("{PREFIX}{name}"),
            shape: shape.to_vec(),
            values: Values::U32(flips.clone()),
        })
    }

    /// Counts the flips of the last step and measures its masks.
    ///
    /// # Errors
    /// Errors from the backend.
    pub(super) fn measure(
        &mut self,
        trainer: &mut Trainer,
        noise: &[GradientNoise],
    ) -> Result<Instruments> {
        let all = trainer.tiles();
        let (for_gap, written) = (all.div_ceil(GAPS).max(1), all.div_ceil(TILES).max(1));
        let mut total = Total::default();
        let (mut gaps, mut tiles, mut layers, mut before) =
            (Vec::new(), Vec::new(), BTreeMap::new(), 0);
        trainer.visit_masks(|change| {
            let flips = self.count(&change);
            let layer = Total::of(&change, flips);
            let mut own = Vec::new();
            for (tile, &count) in flips.iter().enumerate() {
                let number = before + tile;
                let (is_measured, is_written) =
                    (number.is_multiple_of(for_gap), number.is_multiple_of(written));
                if is_measured || is_written {
                    let gap = tile_gap(&values(&change, tile));
                    own.extend(is_measured.then_some(gap));
                    tiles.extend(is_written.then_some((gap, count)));
                }
            }
            before += flips.len();
            own.sort_by(f32::total_cmp);
            let noise = noise
                .iter()
                .find(|noise| noise.name == change.name)
                .and_then(|noise| ratio(noise.variance, noise.square));
            let of_layer = LayerInstruments {
                kept: layer.kept(),
                flips_per_tile: layer.flips(),
                gap: quantile(&own, 0.5),
                mvue_variance: noise,
            };
            layers.insert(change.name.to_owned(), of_layer);
            total.add(&layer);
            gaps.extend(own);
        })?;
        gaps.sort_by(f32::total_cmp);
        let sum = |of: fn(&GradientNoise) -> f64| noise.iter().map(of).sum();
        Ok(Instruments {
            kept: total.kept(),
            flips_per_tile: total.flips(),
            gap: [0.1, 0.25, 0.5, 0.75, 0.9].map(|share| quantile(&gaps, share)),
            mvue_variance: ratio(sum(|noise| noise.variance), sum(|noise| noise.square)),
            layers,
            tiles,
        })
    }

    /// Adds a change to the counts of its weight and returns them.
    fn count(&mut self, change: &MaskChange<'_>) -> &[u32] {
        let shape = change.shape.map(|length| length / 4);
        let at = self
            .0
            .iter()
            .position(|counts| counts.name == change.name && counts.shape == shape)
            .unwrap_or_else(|| {
                self.0.push(Counts {
                    name: change.name.to_owned(),
                    shape,
                    flips: vec![0; shape[0] * shape[1]],
                });
                self.0.len() - 1
            });
        let flips = &mut self.0[at].flips;
        for ((count, a), b) in flips.iter_mut().zip(change.before.tiles()).zip(change.after.tiles())
        {
            *count = count.saturating_add((a ^ b).count_ones());
        }
        flips
    }
}

/// Sums over the tiles of one weight, or of all.
#[derive(Default)]
struct Total {
    kept: f64,
    norm: f64,
    flips: u64,
    tiles: usize,
}

impl Total {
    fn of(change: &MaskChange<'_>, flips: &[u32]) -> Self {
        let [_, columns] = change.shape;
        let (mut kept, mut norm) = (0.0, 0.0);
        for (at, weight) in change.weight.iter().enumerate() {
            let magnitude = f64::from(weight.abs());
            norm += magnitude;
            kept += if change.after.keeps(at / columns, at % columns) { magnitude } else { 0.0 };
        }
        Self {
            kept,
            norm,
            flips: flips.iter().map(|count| u64::from(*count)).sum(),
            tiles: flips.len(),
        }
    }

    fn add(&mut self, other: &Self) {
        (self.kept, self.norm) = (self.kept + other.kept, self.norm + other.norm);
        (self.flips, self.tiles) = (self.flips + other.flips, self.tiles + other.tiles);
    }

    fn kept(&self) -> f64 {
        ratio(self.kept, self.norm).unwrap_or(1.0)
    }

    fn flips(&self) -> f64 {
        ratio(self.flips as f64, self.tiles as f64).unwrap_or(0.0)
    }
}

/// The weights of a tile, row-major.
fn values(change: &MaskChange<'_>, tile: usize) -> [f32; 16] {
    let [_, columns] = change.shape;
    let (row, column) = (4 * (tile / (columns / 4)), 4 * (tile % (columns / 4)));
    std::array::from_fn(|at| change.weight[(row + at / 4) * columns + column + at % 4])
}

/// The quotient, unless `whole` is 0 or the result is not finite.
fn ratio(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.0 && (part / whole).is_finite()).then(|| part / whole)
}

fn quantile(sorted: &[f32], share: f64) -> f32 {
    sorted
        .get(((sorted.len() as f64 * share) as usize).min(sorted.len().saturating_sub(1)))
        .copied()
        .unwrap_or(0.0)
}

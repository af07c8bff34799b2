//! What a run measures of its masks and its sampled gradients at some of its steps:
//! `run.instrument_every`.
//!
//! Deliberately absent: how it is measured.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// One sample.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Instruments {
    /// Kept L1 norm over L1 norm, of all sparsifiable weights together.
    pub kept: f64,
    /// Mask bits that flipped in a tile over the steps sampled so far, the mean over all tiles.
    pub flips_per_tile: f64,
    /// Quantiles of the tiles' L1-norm gap: 10, 25, 50, 75 and 90 %.
    pub gap: [f32; 5],
    /// E|MVUE(dZ) - dZ|^2 / |dZ|^2 over all sparsified layers of the first micro-batch, where
    /// gradients are sampled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mvue_variance: Option<f64>,
    /// The same of each sparsifiable weight, by its name.
    pub layers: BTreeMap<String, LayerInstruments>,
    /// Gap and flips of tiles evenly spaced over all weights.
    pub tiles: Vec<(f32, u32)>,
}

/// One weight's share of a sample; as [`Instruments`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerInstruments {
    /// Kept L1 norm over L1 norm.
    pub kept: f64,
    /// Mask bits that flipped in a tile.
    pub flips_per_tile: f64,
    /// The median gap.
    pub gap: f32,
    /// E|MVUE(dZ) - dZ|^2 / |dZ|^2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mvue_variance: Option<f64>,
}

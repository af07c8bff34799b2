//! When a run measures and saves, and when it stops early.

use serde::{Deserialize, Serialize};

/// When to measure and save, and when to stop early. An interval of 0 steps is never.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// Steps between evaluations on the validation split; there is always one at the end.
    pub eval_every: u32,
    /// Validation tokens of an evaluation, in evenly spaced sequences; 0 is all.
    #[serde(default)]
    pub eval_tokens: usize,
    /// Steps between samples of the flip rate.
    pub flip_every: u32,
    /// Steps between samples of the instruments: the norm that masks keep, gaps and flips of tiles,
    /// and the noise of sampled gradients.
    #[serde(default)]
    pub instrument_every: u32,
    /// Steps between checkpoints; there is always one at the end of a phase and of the run.
    pub checkpoint_every: u32,
    /// Newest checkpoints to keep, besides those at the end of a sparse phase.
    pub keep_last: usize,
    /// Checkpoints of multiples of this step are kept too.
    pub keep_every: u32,
    /// Whether an evaluation with a lower loss than all before it is followed by a checkpoint,
    /// which is kept until the next such one.
    #[serde(default)]
    pub keep_best: bool,
    /// Treatment of a loss or gradient that is not finite.
    pub on_nonfinite: OnNonFinite,
    /// Steps that may be skipped in the whole run.
    pub skip_limit: u32,
    /// A loss this many standard deviations above the mean of the previous ones ends the run; 0 is
    /// off.
    pub spike_z: f32,
    /// Number of those previous losses.
    pub spike_window: usize,
    /// Directory of a dense run of the same schedule whose flip rates are the reference; empty is
    /// none.
    #[serde(default)]
    pub flip_reference: String,
}

/// Treatment of a loss or gradient that is not finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnNonFinite {
    /// End the run.
    Stop,
    /// Skip the update of this step.
    Skip,
}

//! The memory that a run needs, and the disk space for its checkpoints.

use crate::{Result, config::Config};
use sparse24_train::{
    backend::Placement,
    estimate::{Estimate, estimate},
    method::{Ends, Method},
    trainer::Recipe,
};

/// Memory and disk space that a run needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// Bytes of main memory, see [`host_bytes`].
    pub memory: u64,
    /// Bytes of a checkpoint.
    pub checkpoint: u64,
    /// Largest number of checkpoints between two saves.
    pub kept: u64,
}

impl Needs {
    /// The needs of a run until a step.
    ///
    /// # Errors
    /// Errors of the estimate.
    pub fn of(config: &Config, recipe: &Recipe, until: u32) -> Result<Self> {
        let backend = config.backend_entry()?;
        let estimate = estimate(recipe, backend)?;
        // Four bytes per tile, for flip counts.
        let counts = if config.run.instrument_every > 0 { estimate.sparsifiable / 4 } else { 0 };
        Ok(Self {
            memory: host_bytes(&estimate, (backend.placement)(config.backend.gpu)),
            checkpoint: estimate.checkpoint_bytes.saturating_add(counts),
            kept: most_kept(config, &recipe.method, until),
        })
    }
}

/// Largest number of checkpoints between two saves until a step.
fn most_kept(config: &Config, method: &Method, until: u32) -> u64 {
    let Config { steps, run, .. } = config;
    let multiples = |every: u32| u64::from(until.checked_div(every).unwrap_or(0));
    let switches = method
        .last_sparse_steps(*steps, &Ends::new())
        .into_iter()
        .filter(|&step| step < until)
        .count() as u64;
    let best = u64::from(run.keep_best);
    let always = switches + multiples(run.keep_every) + best;
    // Besides the multiples, one at the end of each phase.
    (multiples(run.checkpoint_every) + method.phases.len() as u64 + best)
        .min(always.saturating_add(run.keep_last as u64))
}

/// Bytes of main memory that a run needs, besides its data: the copy of the state from which a
/// checkpoint is written, the buffers through which it arrives, and, where the backend computes in
/// main memory, all else.
#[must_use]
pub fn host_bytes(estimate: &Estimate, placement: Placement) -> u64 {
    let computing = match placement {
        Placement::Host => estimate.device_bytes(),
        Placement::Device => 0,
    };
    let copies = estimate.checkpoint_bytes.saturating_add(estimate.staging_bytes);
    copies.saturating_add(computing)
}

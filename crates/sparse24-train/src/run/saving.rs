//! When and where a run saves: beside its steps, with room on the disk for what it will hold.
//!
//! Invariant: the metrics of a checkpoint's steps are on the device before it has its name. Deliberately absent: how a checkpoint is
//! written ([`crate::checkpoint`]).

use std::{num::NonZeroUsize, path::Path};

use super::{Run, identity::identity, snapshot::snapshot, training::is_due};
use crate::{
    Error,
    checkpoint::{self, Retention},
    config::Config,
    disk,
    estimate::estimate,
    method::{Ends, Method},
    trainer::Recipe,
};

impl Run {
    /// Whether a checkpoint is made after this step.
    pub(super) fn saves_after(&self, step: u32) -> bool {
        step == self.config.steps || self.trainer.ends_phase() || is_due(self.config.run.checkpoint_every, step)
    }

    /// Begins to save the state as it is, unless that was saved already; waits for the save before it. What the last step measured so far
    /// is told first.
    pub(super) fn save(&mut self) -> Result<(), Error> {
        let step = self.trainer.step();
        if self.saved == Some(step) {
            return Ok(());
        }
        if let Some(pending) = &self.pending {
            self.metrics.append(pending)?;
        }
        self.settle()?;
        let mut state = identity(&self.config, &self.dataset, &self.trainer);
        state.method.extend((self.skipped > 0).then(|| (SKIPPED.to_owned(), u64::from(self.skipped))));
        let checkpoint = snapshot(&mut self.trainer, state, self.flip_counts.tensors().collect(), self.saver.spare())?;
        self.saver.begin(checkpoint, retention(&self.config, self.trainer.last_sparse_steps()), self.metrics.syncer()?)?;
        self.saved = Some(step);
        Ok(())
    }

    /// Waits for the save in flight, if there is one.
    pub(super) fn settle(&mut self) -> Result<(), Error> {
        match (self.saver.wait()?, self.saved) {
            (Some(path), Some(step)) => self.log.line(&format!("step {step}: saved {}", path.display())),
            _ => Ok(()),
        }
    }

    /// Learns of a save that has ended.
    pub(super) fn look_after_save(&mut self) -> Result<(), Error> {
        if self.saver.is_idle() { self.settle() } else { Ok(()) }
    }
}

/// The counter of skipped steps, among those of the checkpoint's state.
pub(super) const SKIPPED: &str = "skipped";

/// The 2:4 model that a sparse phase leaves stays, whatever comes after it.
fn retention(config: &Config, always: Vec<u32>) -> Retention {
    let last = NonZeroUsize::new(config.run.keep_last).unwrap_or(NonZeroUsize::MIN);
    Retention { last, every: config.run.keep_every, always }
}

/// Refuses a run whose checkpoints, those that it keeps and the one being written, will not fit beside what lies there now.
pub(super) fn check_room(config: &Config, recipe: &Recipe, run: &Path) -> Result<(), Error> {
    let checkpoints = run.join("checkpoints");
    let there = checkpoint::count(&checkpoints)? as u64;
    let most = most_kept(config, &recipe.method).saturating_add(1).saturating_sub(there).max(1);
    let estimate = estimate(recipe);
    // Four bytes a tile, which instruments count the flips of.
    let counts = if config.run.instrument_every > 0 { estimate.sparsifiable / 4 } else { 0 };
    let needed = (estimate.checkpoint_bytes + counts).saturating_mul(most);
    disk::check_room(run, needed, || format!("{most} more checkpoints, as run.keep_last, run.keep_every and the switch ask for,"))
}

/// How many checkpoints lie there between two saves, at most.
fn most_kept(config: &Config, method: &Method) -> u64 {
    let Config { steps, run, .. } = config;
    let multiples = |every: u32| u64::from(steps.checked_div(every).unwrap_or(0));
    let switches = method.last_sparse_steps(*steps, &Ends::new()).into_iter().filter(|step| step < steps).count() as u64;
    let always = switches + multiples(run.keep_every);
    // Besides the multiples: one at the end of each phase.
    (multiples(run.checkpoint_every) + method.phases.len() as u64).min(always.saturating_add(run.keep_last as u64))
}

//! Decides when a run saves, which checkpoints it keeps, and whether they fit on the disk.
//!
//! Invariant: the metrics of a checkpoint's steps are on disk before the checkpoint is.

use std::{num::NonZeroUsize, path::Path};

use super::{
    MetricsLog, Run, RunDirectory,
    directory::CHECKPOINTS,
    identity::{self, identity},
    needs::Needs,
    ranks::{Order, compare_states, order},
    snapshot::{ends, position, snapshot},
    training::is_due,
};
use crate::{
    Result,
    checkpoint::{self, Retention, State},
    config::Config,
    disk,
};
use sparse24_train::{
    method::PhaseKind,
    trainer::{Recipe, Trainer},
};

impl Run {
    /// Whether this step is followed by a checkpoint.
    pub(super) fn saves_after(&self, step: u32) -> bool {
        step == self.config.steps
            || self.trainer.ends_phase()
            || is_due(self.config.run.checkpoint_every, step)
    }

    /// Starts to save the current state, unless it was saved already, after waiting for the
    /// previous save. Pending metrics are appended first.
    pub(super) fn save(&mut self) -> Result {
        let step = self.trainer.step();
        if self.saved == Some(step) {
            return Ok(());
        }
        if let Some(pending) = &self.pending {
            self.metrics.append(pending)?;
        }
        self.settle()?;
        order(self.trainer.group(), &Order::Compare)?;
        compare_states(&mut self.trainer)?;
        let mut state = identity(&self.config, &self.data, position(&self.trainer));
        (state.skipped_steps, state.tokens_seen) = (self.skipped, self.tokens_seen);
        let checkpoint = snapshot(
            &mut self.trainer,
            state,
            self.flip_counts.tensors().collect(),
            self.saver.spare(),
        )?;
        let mut log = self.log.try_clone()?;
        let saved = move |path: &Path| log.line(&format!("step {step}: saved {}", path.display()));
        self.saver.begin(checkpoint, self.retention(), self.metrics.syncer()?, saved)?;
        self.saved = Some(step);
        // After the save began: it is completed in any case.
        self.metrics.check_place()
    }

    /// The last checkpoint of a sparse phase, its 2:4 model, is always kept.
    fn retention(&self) -> Retention {
        let last = NonZeroUsize::new(self.config.run.keep_last).unwrap_or(NonZeroUsize::MIN);
        let mut always = [self.trainer.last_sparse_steps(), self.former_ends.clone()].concat();
        if self.config.run.keep_best {
            always.extend(self.best.lowest.map(|(_, step)| step));
            always.extend(&self.best.former);
        }
        Retention { last, every: self.config.run.keep_every, always }
    }

    /// Waits for the save in flight, if there is one.
    pub(super) fn settle(&mut self) -> Result {
        self.saver.wait().map(drop)
    }

    /// Sets aside the checkpoint of the last step, if it has one, since its model is broken.
    pub(super) fn set_aside_last(&mut self) -> Result {
        self.settle()?;
        let before = self.trainer.step().saturating_sub(1);
        checkpoint::set_aside_after(&self.directory.checkpoints(), before).map(drop)
    }

    /// Reports the error of a save that has ended.
    pub(super) fn look_after_save(&mut self) -> Result {
        if self.saver.is_idle() { self.settle() } else { Ok(()) }
    }
}

/// Steps of checkpoints that no longer end a sparse phase, but did when they were saved, or were
/// followed by a dense step according to the metrics. Also the last checkpoint that was saved in a
/// sparse phase at a step that is dense now.
pub(super) fn former_ends(directory: &RunDirectory, trainer: &Trainer) -> Result<Vec<u32>> {
    let (metrics, mut was_sparse, mut switches) = (directory.metrics(), false, Vec::new());
    if disk::exists(&metrics)? {
        MetricsLog::salvage(&metrics, |metrics| {
            let is_sparse = metrics.phase == PhaseKind::Sparse;
            switches.extend((was_sparse && !is_sparse).then(|| metrics.step.saturating_sub(1)));
            was_sparse = is_sparse;
        })?;
    }
    let ended = |state: &State| {
        identity::method(state).is_ok_and(|method| {
            method.last_sparse_steps(state.total_steps, &ends(state)).contains(&state.step)
        })
    };
    let Recipe { method, steps, .. } = trainer.recipe();
    let is_dense = |step: u32| {
        method.phases[method.phase_at(step, *steps, &trainer.progress().ends)].kind()
            == PhaseKind::Dense
    };
    let states = checkpoint::states(&directory.checkpoints())?;
    let cut = states
        .iter()
        .rev()
        .find(|state| state.phase_kind == PhaseKind::Sparse && is_dense(state.step))
        .map(|state| state.step);
    let now = trainer.last_sparse_steps();
    let is_former = |state: &&State| {
        let step = state.step;
        !now.contains(&step) && (ended(state) || cut == Some(step) || switches.contains(&step))
    };
    Ok(states.iter().filter(is_former).map(|state| state.step).collect())
}

/// Refuses a run whose checkpoints, those that it keeps and the one being written, will not fit on
/// the disk. `former` earlier ones are kept too.
pub(super) fn check_space(config: &Config, recipe: &Recipe, former: usize, run: &Path) -> Result {
    let there = checkpoint::count(&run.join(CHECKPOINTS))? as u64;
    let Needs { checkpoint, kept, .. } = Needs::of(config, recipe, config.steps)?;
    let most = kept.saturating_add(former as u64).saturating_add(1).saturating_sub(there).max(1);
    disk::check_room(run, checkpoint.saturating_mul(most), || {
        format!("{most} more checkpoints (run.keep_last, run.keep_every, ends of sparse phases)")
    })
}

//! Decides when a run saves, which checkpoints it keeps, and whether they fit on the disk.
//!
//! Invariant: the metrics of a checkpoint's steps are on disk before the checkpoint is.

use std::{collections::BTreeMap, num::NonZeroUsize, path::Path};

use super::{
    MetricsLog, Run, RunDirectory, StepMetrics,
    directory::CHECKPOINTS,
    identity::{self, identity},
    needs::Needs,
    ranks::{Order, compare_states, order},
    snapshot::{ends, position, snapshot},
    training::is_due,
};
use crate::{
    Error,
    checkpoint::{self, Retention, State},
    config::Config,
    disk,
};
use sparse24_train::{
    method::{Ends, Method, PhaseKind},
    optim::AdamVariant,
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
    pub(super) fn save(&mut self) -> Result<(), Error> {
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
        always.extend(self.best.lowest.filter(|_| self.config.run.keep_best).map(|(_, step)| step));
        Retention { last, every: self.config.run.keep_every, always }
    }

    /// Waits for the save in flight, if there is one.
    pub(super) fn settle(&mut self) -> Result<(), Error> {
        self.saver.wait().map(drop)
    }

    /// Sets aside the checkpoint of the last step, if it has one, since its model is broken.
    pub(super) fn set_aside_last(&mut self) -> Result<(), Error> {
        self.settle()?;
        let before = self.trainer.step().saturating_sub(1);
        checkpoint::set_aside_after(&self.directory.checkpoints(), before).map(drop)
    }

    /// Reports the error of a save that has ended.
    pub(super) fn look_after_save(&mut self) -> Result<(), Error> {
        if self.saver.is_idle() { self.settle() } else { Ok(()) }
    }
}

/// Steps of checkpoints that no longer end a sparse phase, but did when they were saved, or were
/// followed by a dense step according to the metrics. Also the last checkpoint that was saved in a
/// sparse phase at a step that is dense now.
pub(super) fn former_ends(directory: &RunDirectory, trainer: &Trainer) -> Result<Vec<u32>, Error> {
    let (metrics, mut was_sparse, mut switches) = (directory.metrics(), false, Vec::new());
    if disk::exists(&metrics) {
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

/// A notice if a changed number of steps makes a resumed run sparse again.
pub(super) fn sparse_again(saved: &State, recipe: &Recipe, kept: &Ends) -> Option<String> {
    let (next, Recipe { method, steps, .. }) = (saved.step + 1, recipe);
    let phase = |of: &Method, steps: u32, ends: &Ends| of.phase_at(next.min(steps), steps, ends);
    let (before, now) = (identity::method(saved).ok()?, phase(method, *steps, kept));
    let was = phase(&before, saved.total_steps, &ends(saved));
    let was_dense = before.phases[was].kind() == PhaseKind::Dense;
    let moves = saved.total_steps != *steps
        && next <= *steps
        && was_dense
        && method.phases[now].kind() == PhaseKind::Sparse;
    moves.then(|| {
        format!(
            "sparse training continues until step {}: phases end at shares of the steps",
            method.last_step(now, *steps, kept)
        )
    })
}

/// Phase ends that apply to a resumed run: those in its checkpoint, though a phase that ends at a
/// share of the steps keeps its end only if no phase was changed. If Adam's variance is frozen and
/// no end is recorded for the phase that last updated it, that end is found and added.
pub(super) fn kept_ends(saved: &State, recipe: &Recipe, has_same_phases: bool) -> Ends {
    let (recorded, Recipe { method, steps, .. }) = (ends(saved), recipe);
    let mut kept = recorded.clone();
    kept.retain(|&phase, _| {
        method.keeps_end(phase) && (has_same_phases || method.phases[phase].watches())
    });
    // The phase that last updated v before `step`, if v is frozen in that step.
    let changed_last = |of: &Method, step: u32, steps: u32, ends: &Ends| {
        let is_frozen = |phase: usize| of.phases[phase].optimizer == AdamVariant::FrozenVariance;
        let phase = Some(of.phase_at(step, steps, ends)).filter(|&phase| is_frozen(phase))?;
        (0..phase).rev().find(|&phase| !is_frozen(phase) && of.has_steps(phase, steps, ends))
    };
    if let Ok(before) = identity::method(saved)
        && saved.step > 0
        && let Some(phase) = changed_last(method, saved.step + 1, *steps, &kept)
    {
        let frozen = changed_last(&before, saved.step, saved.total_steps, &recorded);
        let end = |phase| before.last_step(phase, saved.total_steps, &recorded);
        kept.entry(phase).or_insert(frozen.map_or(saved.step, end));
    }
    kept
}

/// The settings of the learning rate, besides the number of steps.
const OF_RATE: [&str; 7] = [
    "optimizer.learning_rate",
    "optimizer.min_learning_rate",
    "optimizer.warmup_learning_rate",
    "optimizer.warmup_steps",
    "optimizer.decay_steps",
    "optimizer.schedule",
    "optimizer.cooldown_steps",
];

/// A notice if changed settings raise the learning rate above that of the last step.
pub(super) fn raised_rate(
    last: &StepMetrics,
    changed: &BTreeMap<String, String>,
    recipe: &Recipe,
) -> Option<String> {
    let (was, is) = (last.lr, recipe.learning_rate(last.step + 1));
    let steps_change = changed.contains_key("steps") && last.step >= recipe.schedule.warmup_steps;
    let others_change = OF_RATE.iter().any(|&key| changed.contains_key(key));
    let reason = match others_change {
        true => String::new(),
        false => format!(", because the decay now ends with step {}", recipe.schedule.decay_steps),
    };
    let rises = last.step < recipe.steps && (steps_change || others_change) && is > was;
    rises.then(|| format!("the learning rate rises from {was:.2e} to {is:.2e}{reason}"))
}

/// Refuses a run whose checkpoints, those that it keeps and the one being written, will not fit on
/// the disk. Checkpoints of the steps `former` are kept too.
pub(super) fn check_space(
    config: &Config,
    recipe: &Recipe,
    former: &[u32],
    run: &Path,
) -> Result<(), Error> {
    let there = checkpoint::count(&run.join(CHECKPOINTS))? as u64;
    let Needs { checkpoint, kept, .. } = Needs::of(config, recipe, config.steps)?;
    let most =
        kept.saturating_add(former.len() as u64).saturating_add(1).saturating_sub(there).max(1);
    disk::check_room(run, checkpoint.saturating_mul(most), || {
        format!("{most} more checkpoints (run.keep_last, run.keep_every, ends of sparse phases)")
    })
}

//! The schedule of a resumed run: which phase ends it keeps, and how changed settings affect its
//! phases and its learning rate.

use super::{StepMetrics, identity, snapshot::ends};
use crate::checkpoint::State;
use sparse24_train::{
    method::{Ends, Method, PhaseKind},
    optim::AdamVariant,
    trainer::Recipe,
};

/// A notice if a changed number of steps makes a resumed run sparse again, or dense immediately.
pub(super) fn moved_switch(saved: &State, recipe: &Recipe, kept: &Ends) -> Option<String> {
    let (next, Recipe { method, steps, .. }) = (saved.step + 1, recipe);
    let phase = |steps: u32| method.phase_at(next.min(steps), steps, kept);
    let is_sparse = |phase: usize| method.phases[phase].kind() == PhaseKind::Sparse;
    let (was, now) = (phase(saved.total_steps), phase(*steps));
    let notice = match [is_sparse(was), is_sparse(now)] {
        [true, false] if *steps < saved.total_steps => {
            "dense training starts now, because the run was shortened".to_owned()
        }
        [false, true] if (0..was).any(is_sparse) => {
            format!("sparse training continues until step {}", method.last_step(now, *steps, kept))
        }
        _ => return None,
    };
    (next <= *steps).then(|| notice + " (phases end at shares of the steps)")
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

/// A notice if the settings in `changed`, which differ from the checkpoint's, raise the learning
/// rate above that of the last step. Each has its key first.
pub(super) fn raised_rate(
    last: &StepMetrics,
    changed: &[(String, String)],
    recipe: &Recipe,
) -> Option<String> {
    let (was, is) = (last.lr, recipe.learning_rate(last.step + 1));
    let changes = |key: &str| changed.iter().any(|(changed, _)| changed == key);
    let steps_change = changes("steps") && last.step >= recipe.schedule.warmup_steps;
    let others_change = OF_RATE.into_iter().any(changes);
    let reason = match others_change {
        true => String::new(),
        false => format!(", because the decay now ends with step {}", recipe.schedule.decay_steps),
    };
    let rises = last.step < recipe.steps && (steps_change || others_change) && is > was;
    rises.then(|| format!("the learning rate rises from {was:.2e} to {is:.2e}{reason}"))
}

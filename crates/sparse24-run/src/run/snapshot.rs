//! Converts the state of a trainer to a checkpoint and back.
//!
//! Invariant: a trainer restored from a snapshot continues with the same bits. [`snapshot`] is the
//! only place where training waits for a copy of its state.

use std::collections::{BTreeMap, HashMap};

use sparse24_core::Mask;

use crate::{
    Error, Result,
    checkpoint::{Checkpoint, DatasetIdentity, Fingerprint, NamedTensor, PhaseEnd, State, Values},
};
use sparse24_train::{
    method::Ends,
    model::ModelSpec,
    nn::ParameterSpec,
    trainer::{ParameterState, Progress, Trainer},
};

/// Names of auxiliary tensors; those of a weight continue with its name.
const SCALE: &str = "scale.";
const ROW_ORDER: &str = "row_order.";
const DGRAD_MASK: &str = "dgrad_mask.";
const AVERAGE: &str = "ema.";
const VARIANCE_CHANGES: &str = "variance_changes";

/// The ends of phases as a state records them.
pub(super) fn phase_ends(ends: &Ends) -> Vec<PhaseEnd> {
    ends.iter().map(|(&phase, &step)| PhaseEnd { phase: phase as u32, step }).collect()
}

/// The ends of phases that a state records.
pub(super) fn ends(state: &State) -> Ends {
    state.phase_ends.iter().map(|end| (end.phase as usize, end.step)).collect()
}

/// The scale of a weight's soft threshold, if the checkpoint has one.
pub(super) fn scale(checkpoint: &Checkpoint, weight: &str) -> Option<f32> {
    let tensor = checkpoint
        .auxiliary
        .iter()
        .find(|tensor| tensor.name.strip_prefix(SCALE) == Some(weight))?;
    first(&tensor.values)
}

/// Takes the moving average of a weight out of the checkpoint, if it has one.
pub(super) fn take_average(checkpoint: &mut Checkpoint, weight: &str) -> Option<Vec<f32>> {
    let is_average =
        |tensor: &NamedTensor<Values>| tensor.name.strip_prefix(AVERAGE) == Some(weight);
    let at = checkpoint.auxiliary.iter().position(is_average)?;
    floats(checkpoint.auxiliary.swap_remove(at).values)
}

fn floats(values: Values) -> Option<Vec<f32>> {
    if let Values::F32(values) = values { Some(values) } else { None }
}

fn first(values: &Values) -> Option<f32> {
    if let Values::F32(values) = values { values.first().copied() } else { None }
}

/// Stands for the absence of data or a tokenizer: the hash of no bytes.
pub(super) fn none() -> Fingerprint {
    Fingerprint::of(&[])
}

/// The identity of no data.
pub(super) fn no_dataset() -> DatasetIdentity {
    DatasetIdentity { fingerprint: none(), training_tokens: 0, held_out_tokens: 0, vocabulary: 0 }
}

/// The position of a trainer, without settings, data and tokenizer.
pub(super) fn position(trainer: &Trainer) -> State {
    let (step, recipe, progress) = (trainer.step(), trainer.recipe(), trainer.progress());
    State {
        step,
        total_steps: recipe.steps,
        phase: recipe.method.phase_at(step, recipe.steps, &progress.ends) as u32,
        phase_kind: trainer.phase().kind(),
        seed: recipe.seed,
        tokens_seen: recipe.tokens_before(step + 1),
        skipped_steps: 0,
        phase_ends: phase_ends(&progress.ends),
        plan: trainer.backend().plans(),
        config: BTreeMap::new(),
        dataset: no_dataset(),
        tokenizer: none(),
    }
}

/// Copies the state of a trainer that a loop of one's own drives into a checkpoint, for
/// [`checkpoint::save`](crate::checkpoint::save). Its `state` has no settings, data, tokenizer or
/// skipped steps; the caller may record them there.
///
/// # Errors
/// Errors from the backend.
pub fn checkpoint_of(trainer: &mut Trainer) -> Result<Checkpoint> {
    let state = position(trainer);
    snapshot(trainer, state, Vec::new(), None)?()
}

/// Copies the state of the trainer into a checkpoint with the given state and auxiliary tensors,
/// reusing the buffers of `spare`. The returned closure waits for the copies.
pub(super) fn snapshot(
    trainer: &mut Trainer,
    state: State,
    mut auxiliary: Vec<NamedTensor<Values>>,
    spare: Option<Checkpoint>,
) -> Result<impl FnOnce() -> Result<Checkpoint> + Send + use<>> {
    let changes = trainer.progress().variance_changes.clone();
    if !changes.is_empty() {
        let (name, shape) = (VARIANCE_CHANGES.to_owned(), vec![changes.len()]);
        auxiliary.push(NamedTensor { name, shape, values: Values::F32(changes) });
    }
    let buffers = spare.map(parameter_states).transpose()?.unwrap_or_default();
    let copied = trainer.copy_out(buffers)?;
    let has_second_moment = trainer.recipe().optimizer.rule.adam().is_some();
    Ok(move || Ok(assemble(has_second_moment, state, auxiliary, copied()?)))
}

fn assemble(
    has_second_moment: bool,
    state: State,
    auxiliary: Vec<NamedTensor<Values>>,
    states: Vec<ParameterState>,
) -> Checkpoint {
    let mut out = Checkpoint {
        state,
        weights: Vec::new(),
        first_moments: Vec::new(),
        second_moments: Vec::new(),
        masks: Vec::new(),
        auxiliary,
    };
    for of in states {
        let (name, [rows, columns]) = (of.name, of.shape);
        let shape = if rows == 1 { vec![columns] } else { vec![rows, columns] };
        let tensor = |values| NamedTensor { name: name.clone(), shape: shape.clone(), values };
        out.weights.push(tensor(of.weight));
        out.first_moments.push(tensor(of.first_moment));
        if has_second_moment {
            out.second_moments.push(tensor(of.second_moment));
        }
        let mut add = |prefix, shape, values| {
            out.auxiliary.push(NamedTensor { name: format!("{prefix}{name}"), shape, values });
        };
        if !of.average.is_empty() {
            add(AVERAGE, shape, Values::F32(of.average));
        }
        if let Some(scale) = of.scale {
            add(SCALE, vec![1], Values::F32(vec![scale]));
        }
        if let Some(order) = of.row_order {
            add(ROW_ORDER, vec![order.len()], Values::U32(order));
        }
        if let Some(mask) = of.dgrad_mask {
            let shape = vec![mask.rows() / 4, mask.columns() / 4];
            add(DGRAD_MASK, shape, Values::U16(mask.tiles().to_vec()));
        }
        out.masks.extend(of.mask.map(|mask| (name, mask)));
    }
    out
}

/// Compares weights with a model before anything of its size is allocated, because the settings of
/// a small checkpoint may describe a large model. Rejects a missing weight, unless `may_lack`
/// allows its name; a wrong shape, such as `[in, out]`, which is as large as `[out, in]`; and
/// values that are not finite. The trainer checks for unknown names.
pub(super) fn check_weights(
    model: &ModelSpec,
    weights: &[NamedTensor],
    may_lack: impl Fn(&str) -> bool,
) -> Result {
    // The first of a repeated name, as the trainer takes it.
    let weights: HashMap<_, _> =
        weights.iter().rev().map(|tensor| (&tensor.name, tensor)).collect();
    for ParameterSpec { name, shape: expected, .. } in model.parameters()? {
        let problem = match weights.get(&name) {
            None if may_lack(&name) => continue,
            None => "its weight is missing".to_owned(),
            // Checkpoints hold a single row as a vector.
            Some(found)
                if found.shape == expected || expected[0] == 1 && found.shape == expected[1..] =>
            {
                found.check()?;
                continue;
            }
            Some(NamedTensor { shape: found, .. }) => {
                let is_transposed = *found == [expected[1], expected[0]];
                let advice = if is_transposed { "; transpose it" } else { "" };
                format!("expected the shape {expected:?}, found {found:?}{advice}")
            }
        };
        return Err(Error::Parameter { name, problem });
    }
    Ok(())
}

/// Restores a trainer from a checkpoint of [`checkpoint_of`] or of a run. With the same recipe, it
/// continues with the same bits; on a device that times choices, they need
/// [`Trainer::use_plans`] with the checkpoint's `state.plan` first. Whether settings and data are
/// those of the checkpoint is not checked.
///
/// # Errors
/// [`Error::Setting`] for a step beyond those of the recipe, or ends that its phases cannot have;
/// [`Error::Parameter`] for a checkpoint that does not fit the trainer's model or method; errors
/// from the backend.
pub fn restore(trainer: &mut Trainer, checkpoint: Checkpoint) -> Result {
    let changes = checkpoint.auxiliary.iter().find_map(|tensor| match &tensor.values {
        Values::F32(changes) if tensor.name == VARIANCE_CHANGES => Some(changes.clone()),
        _ => None,
    });
    // Ends of another method's phases do not apply to this one.
    let mut ends = ends(&checkpoint.state);
    ends.retain(|&phase, _| trainer.recipe().method.keeps_end(phase));
    let progress = Progress {
        step: checkpoint.state.step,
        ends,
        variance_changes: changes.unwrap_or_default(),
    };
    Ok(trainer.restore(progress, &parameter_states(checkpoint)?)?)
}

fn parameter_states(checkpoint: Checkpoint) -> Result<Vec<ParameterState>> {
    fn by_name<V>(list: Vec<NamedTensor<V>>) -> HashMap<String, V> {
        list.into_iter().map(|tensor| (tensor.name, tensor.values)).collect()
    }
    let mut first_moments = by_name(checkpoint.first_moments);
    let mut second_moments = by_name(checkpoint.second_moments);
    let mut masks: HashMap<_, _> = checkpoint.masks.into_iter().collect();
    let mut auxiliary = by_name(checkpoint.auxiliary);
    let weights = checkpoint.weights.into_iter();
    weights
        .map(|NamedTensor { name, shape, values }| {
            let missing = |what| Error::Parameter {
                name: name.clone(),
                problem: format!("its {what} is missing"),
            };
            let first_moment =
                first_moments.remove(&name).ok_or_else(|| missing("first moment"))?;
            let second_moment = second_moments.remove(&name).unwrap_or_default();
            let shape =
                if let [rows, columns] = shape[..] { [rows, columns] } else { [1, values.len()] };
            let mut found = |prefix: &str| auxiliary.remove(&format!("{prefix}{name}"));
            let scale = found(SCALE).as_ref().and_then(first);
            let average = found(AVERAGE).and_then(floats).unwrap_or_default();
            let row_order = match found(ROW_ORDER) {
                Some(Values::U32(order)) => Some(order),
                _ => None,
            };
            let dgrad_mask = match found(DGRAD_MASK) {
                Some(Values::U16(tiles)) => Some(Mask::from_tiles(shape[0], shape[1], tiles)?),
                _ => None,
            };
            Ok(ParameterState {
                mask: masks.remove(&name),
                name,
                shape,
                weight: values,
                first_moment,
                second_moment,
                average,
                dgrad_mask,
                row_order,
                scale,
            })
        })
        .collect()
}

//! Converts the state of a trainer to a checkpoint and back.
//!
//! Invariant: a trainer restored from a snapshot continues with the same bits. [`snapshot`] is the
//! only place where training waits for a copy of its state.

use std::collections::HashMap;

use sparse24_core::Mask;

use crate::{
    Error,
    checkpoint::{Checkpoint, NamedTensor, PhaseEnd, State, Values},
};
use sparse24_train::{
    method::Ends,
    trainer::{ParameterState, Progress, Trainer},
};

/// Names of auxiliary tensors; those of a weight continue with its name.
const SCALE: &str = "scale.";
const ROW_ORDER: &str = "row_order.";
const DGRAD_MASK: &str = "dgrad_mask.";
const VARIANCE_CHANGES: &str = "variance_changes";

/// The ends of phases as a state records them.
pub(super) fn phase_ends(progress: &Progress) -> Vec<PhaseEnd> {
    let end = |(&phase, &step): (&usize, &u32)| PhaseEnd { phase: phase as u32, step };
    progress.ends.iter().map(end).collect()
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

fn first(values: &Values) -> Option<f32> {
    if let Values::F32(values) = values { values.first().copied() } else { None }
}

/// Copies the state of the trainer into a checkpoint with the given state and auxiliary tensors,
/// reusing the buffers of `spare`. The returned closure waits for the copies.
pub(super) fn snapshot(
    trainer: &mut Trainer,
    state: State,
    mut auxiliary: Vec<NamedTensor<Values>>,
    spare: Option<Checkpoint>,
) -> Result<impl FnOnce() -> Result<Checkpoint, Error> + Send + use<>, Error> {
    let changes = trainer.progress().variance_changes.clone();
    auxiliary
        .extend((!changes.is_empty()).then(|| {
            named(VARIANCE_CHANGES.to_owned(), vec![changes.len()], Values::F32(changes))
        }));
    let buffers = spare.map(parameter_states).transpose()?.unwrap_or_default();
    let copied = trainer.copy_out(buffers)?;
    Ok(move || Ok(assemble(state, auxiliary, copied()?)))
}

fn named(name: String, shape: Vec<usize>, values: Values) -> NamedTensor<Values> {
    NamedTensor { name, shape, values }
}

fn assemble(
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
    for ParameterState {
        name,
        shape,
        weight,
        first_moment,
        second_moment,
        mask,
        dgrad_mask,
        row_order,
        scale,
    } in states
    {
        let shape = if shape[0] == 1 { vec![shape[1]] } else { shape.to_vec() };
        let tensor = |values| NamedTensor { name: name.clone(), shape: shape.clone(), values };
        out.weights.push(tensor(weight));
        out.first_moments.push(tensor(first_moment));
        out.second_moments.push(tensor(second_moment));
        out.auxiliary.extend(
            scale.map(|scale| named(format!("{SCALE}{name}"), vec![1], Values::F32(vec![scale]))),
        );
        out.auxiliary.extend(row_order.map(|order| {
            named(format!("{ROW_ORDER}{name}"), vec![order.len()], Values::U32(order))
        }));
        out.auxiliary.extend(dgrad_mask.map(|mask| {
            let shape = vec![mask.rows() / 4, mask.columns() / 4];
            named(format!("{DGRAD_MASK}{name}"), shape, Values::U16(mask.tiles().to_vec()))
        }));
        out.masks.extend(mask.map(|mask| (name, mask)));
    }
    out
}

/// Restores a trainer of the same shape from a checkpoint.
pub(super) fn restore(trainer: &mut Trainer, checkpoint: Checkpoint) -> Result<(), Error> {
    let changes = checkpoint.auxiliary.iter().find_map(|tensor| match &tensor.values {
        Values::F32(changes) if tensor.name == VARIANCE_CHANGES => Some(changes.clone()),
        _ => None,
    });
    let progress = Progress {
        step: checkpoint.state.step,
        ends: ends(&checkpoint.state),
        variance_changes: changes.unwrap_or_default(),
    };
    Ok(trainer.restore(progress, &parameter_states(checkpoint)?)?)
}

fn parameter_states(checkpoint: Checkpoint) -> Result<Vec<ParameterState>, Error> {
    let Checkpoint { weights, first_moments, second_moments, mut masks, auxiliary, .. } =
        checkpoint;
    let mut means: Vec<_> = first_moments.into_iter().map(Some).collect();
    let mut squares: Vec<_> = second_moments.into_iter().map(Some).collect();
    let take = |list: &mut Vec<Option<NamedTensor>>, name: &str| {
        list.iter_mut()
            .find(|slot| slot.as_ref().is_some_and(|t| t.name == name))
            .and_then(Option::take)
            .map(|t| t.values)
    };
    let auxiliary: HashMap<_, _> =
        auxiliary.into_iter().map(|tensor| (tensor.name, tensor.values)).collect();
    weights
        .into_iter()
        .map(|NamedTensor { name, shape, values }| {
            let missing = |what| Error::Parameter {
                name: name.clone(),
                problem: format!("its {what} is missing"),
            };
            let first_moment = take(&mut means, &name).ok_or_else(|| missing("first moment"))?;
            let second_moment =
                take(&mut squares, &name).ok_or_else(|| missing("second moment"))?;
            let mask =
                masks.iter().position(|(of, _)| *of == name).map(|at| masks.swap_remove(at).1);
            let shape =
                if let [rows, columns] = shape[..] { [rows, columns] } else { [1, values.len()] };
            let found = |prefix: &str| auxiliary.get(&format!("{prefix}{name}"));
            let scale = found(SCALE).and_then(first);
            let row_order = match found(ROW_ORDER) {
                Some(Values::U32(order)) => Some(order.clone()),
                _ => None,
            };
            let dgrad_mask = match found(DGRAD_MASK) {
                Some(Values::U16(tiles)) => {
                    Some(Mask::from_tiles(shape[0], shape[1], tiles.clone())?)
                }
                _ => None,
            };
            Ok(ParameterState {
                name,
                shape,
                weight: values,
                first_moment,
                second_moment,
                mask,
                dgrad_mask,
                row_order,
                scale,
            })
        })
        .collect()
}

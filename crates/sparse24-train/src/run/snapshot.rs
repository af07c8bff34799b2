//! A trainer as a checkpoint, and back.
//!
//! Invariant: restoring a snapshot gives a trainer that continues with the same bits. [`snapshot`] is the one place where a run waits for
//! its state, as far as its backend cannot copy beside other work. Deliberately absent: files.

use crate::{
    Error,
    checkpoint::{Checkpoint, NamedTensor, State},
    trainer::{ParameterState, Trainer},
};

/// Everything that the trainer remembers now, in the room of an earlier checkpoint if there is one; the state says what it belongs to. What it
/// gives waits until all is copied.
pub(super) fn snapshot(
    trainer: &mut Trainer,
    state: State,
    spare: Option<Checkpoint>,
) -> Result<impl FnOnce() -> Result<Checkpoint, Error> + Send + use<>, Error> {
    let room = spare.map(parameter_states).transpose()?.unwrap_or_default();
    let copied = trainer.copy_out(room)?;
    Ok(move || Ok(assemble(state, copied()?)))
}

fn assemble(state: State, states: Vec<ParameterState>) -> Checkpoint {
    let mut out = Checkpoint {
        state,
        weights: Vec::new(),
        first_moments: Vec::new(),
        second_moments: Vec::new(),
        masks: Vec::new(),
        auxiliary: Vec::new(),
    };
    for ParameterState { name, shape, weight, first_moment, second_moment, mask } in states {
        let shape = if shape[0] == 1 { vec![shape[1]] } else { shape.to_vec() };
        let tensor = |values| NamedTensor { name: name.clone(), shape: shape.clone(), values };
        out.weights.push(tensor(weight));
        out.first_moments.push(tensor(first_moment));
        out.second_moments.push(tensor(second_moment));
        out.masks.extend(mask.map(|mask| (name, mask)));
    }
    out
}

/// Brings a trainer of the same shape to where the checkpoint was.
pub(super) fn restore(trainer: &mut Trainer, checkpoint: Checkpoint) -> Result<(), Error> {
    let step = checkpoint.state.step;
    trainer.restore(step, &parameter_states(checkpoint)?)
}

fn parameter_states(checkpoint: Checkpoint) -> Result<Vec<ParameterState>, Error> {
    let Checkpoint { weights, first_moments, second_moments, mut masks, .. } = checkpoint;
    let mut first: Vec<_> = first_moments.into_iter().map(Some).collect();
    let mut second: Vec<_> = second_moments.into_iter().map(Some).collect();
    let take = |list: &mut Vec<Option<NamedTensor>>, name: &str| {
        list.iter_mut().find(|slot| slot.as_ref().is_some_and(|t| t.name == name)).and_then(Option::take).map(|t| t.values)
    };
    weights
        .into_iter()
        .map(|NamedTensor { name, shape, values }| {
            let missing = |what| Error::Parameter { name: name.clone(), problem: format!("its {what} is missing") };
            let first_moment = take(&mut first, &name).ok_or_else(|| missing("first moment"))?;
            let second_moment = take(&mut second, &name).ok_or_else(|| missing("second moment"))?;
            let mask = masks.iter().position(|(of, _)| *of == name).map(|at| masks.swap_remove(at).1);
            let shape = if let [rows, columns] = shape[..] { [rows, columns] } else { [1, values.len()] };
            Ok(ParameterState { name, shape, weight: values, first_moment, second_moment, mask })
        })
        .collect()
}

//! The state of a run on the host: taken, restored, begun anew.
//!
//! Invariant: a trainer that is restored continues with the bits of the one that was taken.
//! Deliberately absent: files.

use std::mem;

use sparse24_core::Mask;

use super::{Memory, Refreshed, Trainer};
use crate::{
    Error,
    method::{Ends, KeptValues, WeightOperand},
    nn::Parameter,
};

/// The state of one parameter on the host.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ParameterState {
    /// Its name.
    pub name: String,
    /// `[rows, columns]`; vectors are `[1, n]`.
    pub shape: [usize; 2],
    /// w.
    pub weight: Vec<f32>,
    /// Adam's m.
    pub first_moment: Vec<f32>,
    /// Adam's v.
    pub second_moment: Vec<f32>,
    /// The mask that the next forward uses, in a sparse phase.
    pub mask: Option<Mask>,
    /// That of dgrad, where it has another.
    pub dgrad_mask: Option<Mask>,
    /// The order of rows in which the latter is 2:4.
    pub row_order: Option<Vec<u32>>,
    /// The scale of its soft threshold, once it is chosen.
    pub scale: Option<f32>,
}

/// What a run remembers besides its parameters.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Progress {
    /// Optimizer steps done.
    pub step: u32,
    /// Where phases that end by a criterion have ended.
    pub ends: Ends,
    /// How far Adam's second moment moved in the last steps of a phase that watches it.
    pub variance_changes: Vec<f32>,
}

impl From<u32> for Progress {
    /// After so many steps, nothing watched.
    fn from(step: u32) -> Self {
        Self { step, ..Self::default() }
    }
}

impl ParameterState {
    fn values(&mut self) -> [&mut Vec<f32>; 3] {
        [&mut self.weight, &mut self.first_moment, &mut self.second_moment]
    }
}

impl Trainer {
    /// The state of every parameter, in order. Together with the step it is all that a run
    /// remembers.
    pub fn parameter_states(&mut self) -> Result<Vec<ParameterState>, Error> {
        self.copy_out(Vec::new())?()
    }

    /// As [`Trainer::parameter_states`] now, in the room of earlier states; what it gives waits
    /// until they are copied, while the trainer can go on.
    pub fn copy_out(
        &mut self,
        mut states: Vec<ParameterState>,
    ) -> Result<impl FnOnce() -> Result<Vec<ParameterState>, Error> + Send + use<>, Error> {
        let sparse = self.phase().mask().is_some();
        let mut memories = self.memories.iter();
        let backend = &mut *self.backend;
        states.resize_with(self.allocated.parameters.iter().len(), ParameterState::default);
        let (mut from, mut room) = (Vec::new(), Vec::new());
        for (parameter, state) in self.allocated.parameters.iter().zip(&mut states) {
            state.name.clone_from(&parameter.spec.name);
            state.shape = parameter.weight.shape;
            let pruned = parameter.pruned;
            let memory = pruned.and_then(|_| memories.next());
            let in_force = pruned.filter(|_| sparse);
            state.mask = in_force.map(|pruned| backend.download_mask(pruned.mask)).transpose()?;
            state.dgrad_mask = in_force
                .and_then(|pruned| pruned.dgrad)
                .map(|(mask, _)| backend.download_mask(mask))
                .transpose()?;
            state.row_order = memory.filter(|_| sparse).and_then(|memory| memory.order.clone());
            state.scale = memory.and_then(|memory| memory.scale);
            from.extend([parameter.weight, parameter.first_moment, parameter.second_moment]);
            room.extend(state.values().map(mem::take));
        }
        let copied = backend.copy_out(&from, room)?;
        Ok(move || {
            let values = copied()?;
            states
                .iter_mut()
                .flat_map(ParameterState::values)
                .zip(values)
                .for_each(|(place, values)| *place = values);
            Ok(states)
        })
    }

    /// Continues from its progress and its parameter states. Where they are dense and the phase is
    /// not, masks are searched in the weights.
    ///
    /// # Errors
    /// [`Error::Operand`] where a parameter is missing or has another shape; a sparse phase needs
    /// of every parameter all that it has, or no mask of any.
    pub fn restore(
        &mut self,
        progress: impl Into<Progress>,
        states: &[ParameterState],
    ) -> Result<(), Error> {
        self.progress = progress.into();
        let masked = states.iter().any(|state| state.mask.is_some());
        let sparse = self.phase().mask().is_some() && masked;
        let scaled =
            matches!(self.phase().forward, WeightOperand::Pruned(_, KeptValues::SoftThreshold));
        let mut memories = self.memories.iter_mut();
        for parameter in self.allocated.parameters.iter() {
            let state = find(states, parameter)?;
            self.backend.upload(parameter.weight, &state.weight)?;
            self.backend.upload(parameter.first_moment, &state.first_moment)?;
            self.backend.upload(parameter.second_moment, &state.second_moment)?;
            let Some((pruned, memory)) =
                parameter.pruned.and_then(|pruned| Some((pruned, memories.next()?)))
            else {
                continue;
            };
            *memory = Memory { order: state.row_order.clone(), scale: state.scale };
            if !sparse {
                continue;
            }
            let mask = |mask: &Option<Mask>, what| {
                mask.as_ref().ok_or_else(|| missing(parameter, what)).cloned()
            };
            self.backend.upload_mask(pruned.mask, &mask(&state.mask, "mask")?)?;
            if let Some((id, _)) = pruned.dgrad {
                self.backend.upload_mask(id, &mask(&state.dgrad_mask, "mask of dgrad")?)?;
                check_order(parameter, state.row_order.as_deref())?;
            }
            if scaled && state.scale.is_none() {
                return Err(missing(parameter, "scale"));
            }
        }
        self.prepare_weights(if masked { Refreshed::None } else { Refreshed::All })
    }

    /// Begins from these named weights, row-major, instead of random ones; masks are searched in
    /// them.
    ///
    /// # Errors
    /// [`Error::Parameter`] where one is missing, has another size or belongs to no parameter.
    pub fn start_from(&mut self, weights: &[(&str, &[f32])]) -> Result<(), Error> {
        if let Some((name, _)) = weights.iter().find(|(name, _)| {
            self.allocated.parameters.iter().all(|parameter| parameter.spec.name != *name)
        }) {
            return Err(Error::Parameter {
                name: (*name).to_owned(),
                problem: "the model has no such parameter".to_owned(),
            });
        }
        for parameter in self.allocated.parameters.iter() {
            let (_, values) = weights
                .iter()
                .find(|(name, _)| *name == parameter.spec.name)
                .ok_or_else(|| missing(parameter, "weight"))?;
            if values.len() != parameter.weight.elements() {
                let problem = format!(
                    "expected {} values ({:?}), found {}",
                    parameter.weight.elements(),
                    parameter.weight.shape,
                    values.len()
                );
                return Err(Error::Parameter { name: parameter.spec.name.clone(), problem });
            }
            self.backend.upload(parameter.weight, values)?;
        }
        self.memories.fill(Memory::default());
        self.prepare_weights(Refreshed::All)
    }
}

fn missing(parameter: &Parameter, what: &str) -> Error {
    Error::Parameter {
        name: parameter.spec.name.clone(),
        problem: format!("its {what} is missing"),
    }
}

fn find<'a>(
    states: &'a [ParameterState],
    parameter: &Parameter,
) -> Result<&'a ParameterState, Error> {
    let state = states
        .iter()
        .find(|state| state.name == parameter.spec.name)
        .ok_or_else(|| missing(parameter, "state"))?;
    let (expected, found) = (parameter.weight.shape, state.shape);
    if expected == found {
        Ok(state)
    } else {
        Err(Error::Operand { operation: "restore", operand: "parameter", expected, found })
    }
}

/// An order must name each row once.
fn check_order(parameter: &Parameter, order: Option<&[u32]>) -> Result<(), Error> {
    let mut sorted = order.ok_or_else(|| missing(parameter, "order of rows"))?.to_vec();
    sorted.sort_unstable();
    if sorted.into_iter().eq(0..parameter.weight.shape[0] as u32) {
        return Ok(());
    }
    Err(Error::Parameter {
        name: parameter.spec.name.clone(),
        problem: "its order of rows does not name each once".to_owned(),
    })
}

//! The state of a run on the host: taken, restored, begun anew.
//!
//! Invariant: a trainer that is restored continues with the bits of the one that was taken. Deliberately absent: files.

use std::mem;

use sparse24_core::Mask;

use super::{Refreshed, Trainer};
use crate::{Error, nn::parameter::Parameter};

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
}

impl ParameterState {
    fn values(&mut self) -> [&mut Vec<f32>; 3] {
        [&mut self.weight, &mut self.first_moment, &mut self.second_moment]
    }
}

impl Trainer {
    /// The state of every parameter, in order. Together with the step it is all that a run remembers.
    ///
    /// # Errors
    /// Those of the downloads.
    pub fn parameter_states(&mut self) -> Result<Vec<ParameterState>, Error> {
        self.copy_out(Vec::new())?()
    }

    /// As [`Trainer::parameter_states`] now, in the room of earlier states; what it gives waits until they are copied, while the trainer can
    /// go on.
    ///
    /// # Errors
    /// Those of the downloads.
    pub fn copy_out(
        &mut self,
        mut states: Vec<ParameterState>,
    ) -> Result<impl FnOnce() -> Result<Vec<ParameterState>, Error> + Send + use<>, Error> {
        let sparse = self.phase().mask().is_some();
        let backend = &mut *self.backend;
        states.resize_with(self.parameters.iter().len(), ParameterState::default);
        let (mut from, mut room) = (Vec::new(), Vec::new());
        for (parameter, state) in self.parameters.iter().zip(&mut states) {
            state.name.clone_from(&parameter.name);
            state.shape = parameter.weight.shape;
            state.mask = parameter.mask.filter(|_| sparse).map(|mask| backend.download_mask(mask)).transpose()?;
            from.extend([parameter.weight, parameter.first_moment, parameter.second_moment]);
            room.extend(state.values().map(mem::take));
        }
        let copied = backend.copy_out(&from, room)?;
        Ok(move || {
            let values = copied()?;
            states.iter_mut().flat_map(ParameterState::values).zip(values).for_each(|(place, values)| *place = values);
            Ok(states)
        })
    }

    /// Continues after optimizer step `step` from its parameter states. Where they are dense and the phase is not, masks are searched in the
    /// weights.
    ///
    /// # Errors
    /// [`Error::Operand`] where a parameter is missing or has another shape; a sparse phase needs every mask or none.
    pub fn restore(&mut self, step: u32, states: &[ParameterState]) -> Result<(), Error> {
        self.step = step;
        let masked = states.iter().any(|state| state.mask.is_some());
        let sparse = self.phase().mask().is_some() && masked;
        for parameter in self.parameters.iter() {
            let state = find(states, parameter)?;
            self.backend.upload(parameter.weight, &state.weight)?;
            self.backend.upload(parameter.first_moment, &state.first_moment)?;
            self.backend.upload(parameter.second_moment, &state.second_moment)?;
            match (parameter.mask.filter(|_| sparse), &state.mask) {
                (Some(id), Some(mask)) => self.backend.upload_mask(id, mask)?,
                (Some(_), None) => return Err(missing(parameter, "mask")),
                (None, _) => {}
            }
        }
        self.prepare_weights(if masked { Refreshed::Kept } else { Refreshed::Anew })
    }

    /// Begins from these named weights, row-major, instead of random ones; masks are searched in them.
    ///
    /// # Errors
    /// [`Error::Parameter`] where one is missing, has another size or belongs to no parameter.
    pub fn start_from(&mut self, weights: &[(&str, &[f32])]) -> Result<(), Error> {
        if let Some((name, _)) = weights.iter().find(|(name, _)| self.parameters.iter().all(|parameter| parameter.name != *name)) {
            return Err(Error::Parameter { name: (*name).to_owned(), problem: "the model has no such parameter".to_owned() });
        }
        for parameter in self.parameters.iter() {
            let (_, values) = weights.iter().find(|(name, _)| *name == parameter.name).ok_or_else(|| missing(parameter, "weight"))?;
            if values.len() != parameter.weight.elements() {
                let problem =
                    format!("expected {} values ({:?}), found {}", parameter.weight.elements(), parameter.weight.shape, values.len());
                return Err(Error::Parameter { name: parameter.name.clone(), problem });
            }
            self.backend.upload(parameter.weight, values)?;
        }
        self.prepare_weights(Refreshed::Anew)
    }
}

fn missing(parameter: &Parameter, what: &str) -> Error {
    Error::Parameter { name: parameter.name.clone(), problem: format!("its {what} is missing") }
}

fn find<'a>(states: &'a [ParameterState], parameter: &Parameter) -> Result<&'a ParameterState, Error> {
    let state = states.iter().find(|state| state.name == parameter.name).ok_or_else(|| missing(parameter, "state"))?;
    let (expected, found) = (parameter.weight.shape, state.shape);
    if expected == found { Ok(state) } else { Err(Error::Operand { operation: "restore", operand: "parameter", expected, found }) }
}

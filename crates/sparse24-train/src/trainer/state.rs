//! The state of a run on the host: copied out, restored, started from weights. A restored trainer
//! continues with the same bits as the one that was copied.

use std::{collections::BTreeSet, mem};

use sparse24_core::{Mask, permute::is_permuted};

use super::{Memory, Recipe, Refreshed, Trainer};
use crate::{
    Error, Result,
    backend::MaskId,
    limits,
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
    /// w, row-major.
    pub weight: Vec<f32>,
    /// m.
    pub first_moment: Vec<f32>,
    /// v; empty if the update rule has none.
    pub second_moment: Vec<f32>,
    /// The moving average of w; empty if none is kept.
    pub average: Vec<f32>,
    /// In a sparse phase, the mask that the next forward pass uses.
    pub mask: Option<Mask>,
    /// The mask of dgrad, where it differs.
    pub dgrad_mask: Option<Mask>,
    /// The order of rows in which the mask of dgrad is 2:4.
    pub row_order: Option<Vec<u32>>,
    /// The scale of its soft threshold, once it is chosen.
    pub scale: Option<f32>,
}

/// The state of a run besides its parameters.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Progress {
    /// Optimizer steps taken.
    pub step: u32,
    /// Phase ends that stay fixed even if the run is extended.
    pub ends: Ends,
    /// The latest changes of Adam's second moment, in a phase that watches it.
    pub variance_changes: Vec<f32>,
}

impl From<u32> for Progress {
    /// After this many steps, with nothing watched.
    fn from(step: u32) -> Self {
        Self { step, ..Self::default() }
    }
}

impl ParameterState {
    /// w, m and, of v and the average of w, those that the recipe keeps.
    fn values(&mut self, [has_v, has_average]: [bool; 2]) -> impl Iterator<Item = &mut Vec<f32>> {
        let second = has_v.then_some(&mut self.second_moment);
        let average = has_average.then_some(&mut self.average);
        [&mut self.weight, &mut self.first_moment].into_iter().chain(second).chain(average)
    }
}

impl Trainer {
    /// The state of every parameter, in order. Together with [`Progress`] it is the whole state.
    ///
    /// # Errors
    /// Errors of [`Self::copy_out`].
    pub fn parameter_states(&mut self) -> Result<Vec<ParameterState>> {
        self.copy_out(Vec::new())?()
    }

    /// Fails if the state is between two steps or only partly loaded.
    pub(super) fn check_whole(&self) -> Result {
        let problem = "an update or a load did not finish; restore a state before you go on";
        let (name, problem) = ("the trainer".to_owned(), problem.to_owned());
        if self.is_torn { Err(Error::Parameter { name, problem }) } else { Ok(()) }
    }

    /// Refuses names of no parameter, and repeated ones.
    fn check_names<'a>(&self, mut names: impl Iterator<Item = &'a str>) -> Result {
        let parameters = self.allocated.parameters.iter();
        let mut left: BTreeSet<_> = parameters.map(|parameter| &*parameter.spec.name).collect();
        let Some(name) = names.find(|name| !left.remove(name)) else { return Ok(()) };
        let problem = "the model has no such parameter, or it is given twice".to_owned();
        Err(Error::Parameter { name: name.to_owned(), problem })
    }

    /// Starts to copy the present [`Trainer::parameter_states`] into the memory of earlier ones.
    /// The result waits for the copy; the trainer may go on before it is called.
    ///
    /// # Errors
    /// [`Error::Parameter`] after an update or a load that did not finish; errors of the downloads.
    pub fn copy_out(
        &mut self,
        mut states: Vec<ParameterState>,
    ) -> Result<impl FnOnce() -> Result<Vec<ParameterState>> + Send + use<>> {
        self.check_whole()?;
        let is_sparse = self.phase().mask().is_some();
        let kept = [self.recipe.optimizer.rule.adam().is_some(), self.recipe.ema_decay.is_some()];
        let mut memories = self.memories.iter();
        let (backend, parameters) = (&mut *self.backend, &self.allocated.parameters);
        let mut averages = self.allocated.averages.iter();
        states.resize_with(parameters.iter().len(), ParameterState::default);
        let (mut from, mut to, mut masks) = (Vec::new(), Vec::new(), Vec::new());
        for (parameter, state) in parameters.iter().zip(&mut states) {
            state.name.clone_from(&parameter.spec.name);
            state.shape = parameter.weight.shape;
            let memory = parameter.pruned.and_then(|_| memories.next());
            let used = parameter.pruned.filter(|_| is_sparse);
            let mut start =
                |mask: Option<MaskId>| mask.map(|id| backend.start_mask(id)).transpose();
            masks.push([
                start(used.map(|pruned| pruned.mask))?,
                start(used.and_then(|pruned| pruned.dgrad).map(|(id, _)| id))?,
            ]);
            state.row_order = memory.filter(|_| is_sparse).and_then(|memory| memory.order.clone());
            state.scale = memory.and_then(|memory| memory.scale);
            from.extend([parameter.weight, parameter.first_moment]);
            from.extend(parameter.second_moment.into_iter().chain(averages.next()));
            to.extend(state.values(kept).map(mem::take));
        }
        let copied = backend.copy_out(&from, to)?;
        Ok(move || {
            let values = copied()?;
            let places = states.iter_mut().flat_map(|state| state.values(kept));
            places.zip(values).for_each(|(place, values)| *place = values);
            for (state, masks) in states.iter_mut().zip(masks) {
                let [mask, dgrad] = masks.map(|mask| mask.map(|mask| mask()).transpose());
                (state.mask, state.dgrad_mask) = (mask?, dgrad?);
            }
            Ok(states)
        })
    }

    /// Continues from a state. If it has no masks and the phase is sparse, masks are searched. An
    /// average that it lacks starts at the weight.
    ///
    /// # Errors
    /// [`Error::Setting`] for more steps than the recipe has, or ends that its phases cannot have;
    /// [`Error::Parameter`] names one that is missing, unknown, repeated or incomplete, has another
    /// shape, a second moment that is negative or that no optimizer reads, or a mask that lacks the
    /// structure of the phase; with one mask, a sparse phase needs the masks of all. After these,
    /// the trainer is as it was; after an error of the device, it must be restored.
    pub fn restore(&mut self, progress: impl Into<Progress>, states: &[ParameterState]) -> Result {
        let (progress, Recipe { method, steps, .. }) = (progress.into(), &self.recipe);
        let expected = format!("at least the {} of the state", progress.step);
        limits::check("steps", progress.step <= *steps, &expected, steps)?;
        for (&phase, end) in &progress.ends {
            let is_end = method.keeps_end(phase) && (1..=progress.step).contains(end);
            let expected = "a step up to the state's, for a phase whose end can be kept";
            limits::check("phase_ends", is_end, expected, format_args!("{end} of phase {phase}"))?;
        }
        self.check_names(states.iter().map(|state| &*state.name))?;
        let phase = method.phases[method.phase_at(progress.step, *steps, &progress.ends)];
        let has_masks = states.iter().any(|state| state.mask.is_some());
        let forward = if has_masks { phase.forward } else { WeightOperand::Dense };
        let parameters = self.allocated.parameters.iter();
        let of = |parameter: &Parameter| whole(states, parameter, forward);
        let states = parameters.clone().map(of).collect::<Result<Vec<_>, _>>()?;
        (self.is_torn, self.progress) = (true, progress);
        let mut memories = self.memories.iter_mut();
        let mut averages = self.allocated.averages.iter();
        let backend = &mut self.backend;
        for (parameter, state) in parameters.zip(states) {
            backend.upload(parameter.weight, &state.weight)?;
            backend.upload(parameter.first_moment, &state.first_moment)?;
            if let Some(v) = parameter.second_moment {
                backend.upload(v, &state.second_moment)?;
            }
            if let Some(to) = averages.next() {
                let is_new = state.average.is_empty();
                backend.upload(to, if is_new { &state.weight } else { &state.average })?;
            }
            let memory = parameter.pruned.and_then(|_| memories.next());
            let Some((pruned, memory)) = parameter.pruned.zip(memory) else { continue };
            *memory = Memory { order: state.row_order.clone(), scale: state.scale };
            let dgrad = pruned.dgrad.map(|(id, _)| id).zip(state.dgrad_mask.as_ref());
            let masks = [Some(pruned.mask).zip(state.mask.as_ref()), dgrad];
            let used = masks.into_iter().flatten().filter(|_| forward != WeightOperand::Dense);
            for (id, mask) in used {
                backend.upload_mask(id, mask)?;
            }
        }
        self.prepare_weights(if has_masks { Refreshed::None } else { Refreshed::All })?;
        self.is_torn = false;
        Ok(())
    }

    /// Replaces the initial weights by these, given by name and row-major; masks are searched.
    ///
    /// # Errors
    /// [`Error::Setting`] after the first step; [`Error::Parameter`] where one is missing,
    /// repeated, of another size or of no parameter.
    pub fn start_from(&mut self, weights: &[(&str, &[f32])]) -> Result {
        self.check_names(weights.iter().map(|&(name, _)| name))?;
        self.start_partly_from(weights, |_| false)
    }

    /// Like [`Self::start_from`], for a model with another head: weights of no parameter are left
    /// out, and parameters whose name `is_new` says keep their initial values if they are missing.
    ///
    /// # Errors
    /// [`Error::Setting`] after the first step; [`Error::Parameter`] where another one is missing
    /// or one has another size.
    pub fn start_partly_from(
        &mut self,
        weights: &[(&str, &[f32])],
        is_new: impl Fn(&str) -> bool,
    ) -> Result {
        self.check_whole()?;
        limits::check("trainer", self.step() == 0, "one at step 0", self.step())?;
        let mut found = Vec::new();
        for parameter in self.allocated.parameters.iter() {
            let name = &parameter.spec.name;
            if let Some((_, values)) = weights.iter().find(|(given, _)| given == name) {
                sized(parameter, "a weight", &[values.len()])?;
                found.push((parameter.weight, *values));
            } else if !is_new(name) {
                return Err(missing(parameter, "weight"));
            }
        }
        self.is_torn = true;
        for (to, values) in found {
            self.backend.upload(to, values)?;
        }
        self.allocated.averages.start(&mut *self.backend, &self.allocated.parameters)?;
        self.memories.fill(Memory::default());
        self.prepare_weights(Refreshed::All)?;
        self.is_torn = false;
        Ok(())
    }
}

fn unfit(parameter: &Parameter, problem: impl Into<String>) -> Error {
    Error::Parameter { name: parameter.spec.name.clone(), problem: problem.into() }
}

fn missing(parameter: &Parameter, what: &str) -> Error {
    unfit(parameter, format!("its {what} is missing"))
}

/// Refuses a part of a state that is not of the size of the parameter.
fn sized(parameter: &Parameter, what: &str, found: &[usize]) -> Result {
    let (shape, elements) = (parameter.weight.shape, [parameter.weight.elements()]);
    let expected = if found.len() == 1 { &elements[..] } else { &shape };
    let problem = || format!("expected {what} of size {expected:?}, found {found:?}");
    if found == expected { Ok(()) } else { Err(unfit(parameter, problem())) }
}

/// The state of a parameter, if it has all that a phase with this operand of the forward reads.
fn whole<'a>(
    states: &'a [ParameterState],
    parameter: &Parameter,
    forward: WeightOperand,
) -> Result<&'a ParameterState> {
    let missing = |what: &str| missing(parameter, what);
    let state = states.iter().find(|state| state.name == parameter.spec.name);
    let state = state.ok_or_else(|| missing("state"))?;
    sized(parameter, "a state", &state.shape)?;
    let second = parameter.second_moment.map(|_| ("a second moment", &state.second_moment));
    let average = Some(("an average", &state.average)).filter(|(_, average)| !average.is_empty());
    let always = [("a weight", &state.weight), ("a first moment", &state.first_moment)];
    for (what, values) in always.into_iter().chain(second).chain(average) {
        sized(parameter, what, &[values.len()])?;
    }
    let fit = |is_fit, problem| if is_fit { Ok(()) } else { Err(unfit(parameter, problem)) };
    let (has_v, v) = (parameter.second_moment.is_some(), &state.second_moment);
    let is_fit = v.iter().all(|&v| has_v && v >= 0.0);
    fit(is_fit, "its second moment is negative, or not of this optimizer")?;
    let (WeightOperand::Pruned(kind, values), Some(pruned)) = (forward, parameter.pruned) else {
        return Ok(state);
    };
    let mask = state.mask.as_ref().ok_or_else(|| missing("mask"))?;
    sized(parameter, "a mask", &mask.shape())?;
    mask.check(kind).map_err(|error| unfit(parameter, error.to_string()))?;
    if pruned.dgrad.is_some() {
        let both = state.dgrad_mask.as_ref().ok_or_else(|| missing("mask of dgrad"))?;
        sized(parameter, "a mask of dgrad", &both.shape())?;
        let order = state.row_order.as_ref().ok_or_else(|| missing("order of rows"))?;
        let mut rows = order.clone();
        rows.sort_unstable();
        let names_each = rows.into_iter().eq(0..parameter.weight.shape[0] as u32);
        fit(names_each, "its order of rows does not name each row once")?;
        let is_fit = is_permuted(both, mask, order);
        fit(is_fit, "its mask of dgrad is not 2:4 within its mask and order")?;
    }
    match values {
        KeptValues::SoftThreshold if state.scale.is_none() => Err(missing("scale")),
        _ => Ok(state),
    }
}

//! A step over several replicas and ranks.
//!
//! The gradients of a step are a binary tree over its V replicas, `((g0 + g1) + (g2 + g3)) + ...`.
//! Each of N ranks computes a subtree of V/N replicas, and [`Backend::reduce`] adds those, so the
//! bits do not depend on N.

use std::{ops::Range, sync::atomic::Ordering};

use sparse24_core::{
    Mask,
    op::{Accumulate, NonFinite},
};

use super::{Allocated, ParameterState, Progress, Recipe, Trainer};
use crate::{
    Error, Result,
    backend::{
        Backend, DType, Op, PendingReport, Region, ShapeOnly, Stage, StepReport, Tensor,
        op::{Add, Copy},
        reduce::{received_elements, stages},
    },
    group::{Group, misfit},
    limits,
    nn::{Parameters, Pass},
    objective::Objective,
};

/// Requires a power of two of ranks that divides the replicas.
pub(super) fn check(recipe: &Recipe, world: usize) -> Result {
    limits::check("ranks", world.is_power_of_two(), "a power of two", world)?;
    let is_divided = (recipe.replicas.get() as usize).is_multiple_of(world);
    let expected = format!("a multiple of the number of ranks, {world}");
    limits::check("batch.replicas", is_divided, &expected, recipe.replicas)
}

/// The partial sums of one of `world` ranks.
pub(super) fn partial_sums(
    backend: &mut dyn Backend,
    parameters: &Parameters,
    recipe: &Recipe,
    world: usize,
) -> Result<Vec<Vec<Tensor>>> {
    let levels = (recipe.replicas.get() / world as u32).ilog2();
    (0..levels)
        .map(|_| parameters.beside(backend, "partial sum of gradients", Region::Gradients))
        .collect()
}

/// Memory for the gradients that each other rank sends.
pub(super) fn received(
    backend: &mut dyn Backend,
    parameters: &Parameters,
    world: usize,
) -> Result<Vec<Tensor>> {
    let gradients: Vec<_> = parameters.iter().map(|parameter| parameter.gradient).collect();
    let shape = [1, received_elements(&gradients, world)];
    (1..world)
        .map(|_| backend.alloc("received gradients", shape, DType::F32, Region::Gradients))
        .collect()
}

/// The exchange of gradients, as rank `own` sees it; none with one rank.
pub(super) fn exchange(
    Allocated { model, parameters, received, .. }: &Allocated,
    recipe: &Recipe,
    own: usize,
) -> Result<Vec<Stage>> {
    if received.is_empty() {
        return Ok(Vec::new());
    }
    let (mut shapes, mut written) = (ShapeOnly::weightless(), Vec::new());
    let mut watch = |_: &mut dyn Backend, op: &Op<'_>| {
        written.extend(op.gradients());
        Ok(())
    };
    let pass = recipe.pass(&mut shapes, &recipe.method.phases[0], recipe.batch);
    model.train(&mut Pass { watch: Some(&mut watch), ..pass })?;
    let gradients = parameters.iter().map(|parameter| parameter.gradient).collect();
    Ok(stages(gradients, &written, received, own))
}

/// Losses of all micro-steps of a step, from all ranks.
pub(super) struct Shared {
    losses: Vec<f32>,
}

impl Shared {
    pub(super) fn is_finite(&self) -> bool {
        self.losses.iter().all(|loss| loss.is_finite())
    }

    /// The report of this rank, with the losses of all: a loss that is not finite on one rank
    /// prevents the update on each.
    pub(super) fn report(self, own: PendingReport) -> PendingReport {
        Box::new(move |backend| {
            let own = own(backend)?;
            let non_finite = if self.is_finite() { own.non_finite } else { Some(NonFinite::Loss) };
            Ok(StepReport { losses: self.losses, non_finite, ..own })
        })
    }
}

impl Trainer {
    /// The micro-steps of a step that this rank computes.
    pub(super) fn share(&self, step: u32) -> Range<u32> {
        self.recipe.gradient_accumulation.share(step, self.group.rank(), self.group.world())
    }

    /// A signal must not end a step on one rank alone.
    pub(super) fn check_interrupt(&self) -> Result {
        let is_set = self.group.world() == 1 && self.interrupt.load(Ordering::Relaxed);
        if is_set { Err(Error::Interrupted) } else { Ok(()) }
    }

    /// Adds the partial sums that this rank's replica of this number completes to the gradients,
    /// and keeps the sum for a later one, unless it is the last.
    pub(super) fn end_replica(&mut self, replica: u32) -> Result {
        let Self { backend, allocated: Allocated { parameters, partial_sums, .. }, .. } = self;
        let complete = replica.trailing_ones() as usize;
        let (completed, further) = partial_sums.split_at(complete.min(partial_sums.len()));
        for sums in completed {
            for (parameter, &delta) in parameters.iter().zip(sums) {
                let gradient = parameter.gradient;
                backend.run(Add { x: gradient, delta, out: gradient })?;
            }
        }
        let kept = further.first().map_or(&[][..], Vec::as_slice);
        parameters
            .iter()
            .zip(kept)
            .try_for_each(|(parameter, &to)| backend.run(Copy { from: parameter.gradient, to }))
    }

    /// Prepares the exchange of gradients between the ranks; see [`Backend::connect`].
    ///
    /// # Errors
    /// Errors of [`Backend::connect`].
    pub fn connect(&mut self) -> Result<Option<String>> {
        self.backend.connect(&mut *self.group)
    }

    /// Whether the last micro-batch may start the exchange: the rank has no other replica.
    pub(super) fn overlaps(&self) -> bool {
        self.recipe.replicas.get() as usize == self.group.world() && self.backend.can_overlap()
    }

    /// Sums the gradients over all ranks, whose exchange has `started` or not, and gathers the
    /// losses of the micro-steps, of which the first `rows` are this rank's, and their `targets`;
    /// none with one rank.
    pub(super) fn reduce(
        &mut self,
        started: bool,
        rows: usize,
        targets: &mut Vec<usize>,
    ) -> Result<Option<Shared>> {
        let Self { backend, group, allocated: Allocated { losses, .. }, exchange, .. } = self;
        if group.world() == 1 {
            return Ok(None);
        }
        // Read while the gradients travel, so that the device need not wait for the host.
        let own = backend.copy_out(&[losses.first_rows(rows)], Vec::new())?;
        backend.reduce(if started { &[] } else { exchange }, &mut **group)?;
        let own = own()?.concat();
        let counts = targets.iter().map(|&targets| targets as f32);
        let own: Vec<f32> = own.into_iter().chain(counts).collect();
        let mut shared = Shared { losses: Vec::new() };
        targets.clear();
        for of_rank in group.all_gather_floats(&own)? {
            let (losses, counts) =
                of_rank.split_at_checked(rows).ok_or_else(|| misfit("losses"))?;
            shared.losses.extend(losses);
            targets.extend(counts.iter().map(|&targets| targets as usize));
        }
        Ok(Some(shared))
    }

    /// Times the choices of steps and evaluations in all phases, by a micro-batch of each kind, so
    /// that the other ranks can replay them. Leaves no trace but the plans.
    ///
    /// # Errors
    /// Errors from the objective and the backend.
    pub fn time_plans(&mut self, objective: &dyn Objective) -> Result {
        let step = self.step() + 1;
        for phase in self.recipe.method.phases.clone() {
            let shape = self.prepare_batch(objective, self.step_state(step))?;
            let Self { backend, allocated: Allocated { model, .. }, recipe, .. } = self;
            for accumulate in [Accumulate::Overwrite, Accumulate::Add] {
                let pass = recipe.pass(&mut **backend, &phase, shape);
                model.train(&mut Pass { accumulate, ..pass })?;
            }
            let pass = recipe.pass(&mut **backend, &phase, shape);
            model.evaluate(&mut Pass { dropout: 0.0, ..pass })?;
        }
        Ok(())
    }

    /// Replaces the state of every rank, parameters and [`Progress`], by that of rank 0.
    ///
    /// # Errors
    /// [`Error::Peer`] if a rank is gone; errors from the backend.
    pub fn take_state_of_rank_0(&mut self) -> Result {
        let mut states = self.parameter_states()?;
        let Progress { step, ends, variance_changes } = &self.progress;
        let ends = ends.iter().flat_map(|(&phase, &step)| [phase as u32, step]);
        let ends: Vec<u32> = [*step].into_iter().chain(ends).collect();
        let group = &mut *self.group;
        let [step, ends @ ..] = &words(group, Some(&ends))?.unwrap_or_default()[..] else {
            return Err(misfit("a state"));
        };
        let ends = ends.as_chunks().0.iter().map(|&[phase, step]| (phase as usize, step));
        let progress = Progress {
            step: *step,
            ends: ends.collect(),
            variance_changes: floats(group, variance_changes)?,
        };
        for state in &mut states {
            let ParameterState { weight, first_moment, second_moment, average, shape, .. } = state;
            for values in [weight, first_moment, second_moment, average] {
                *values = floats(group, values)?;
            }
            for mask in [&mut state.mask, &mut state.dgrad_mask] {
                let tiles = mask.as_ref().map(Mask::tiles);
                let tiles: Option<Vec<u32>> =
                    tiles.map(|tiles| tiles.iter().map(|&tile| tile.into()).collect());
                let tiles = words(group, tiles.as_deref())?;
                let tiles = tiles.map(|tiles| tiles.iter().map(|&tile| tile as u16).collect());
                let of = |tiles| Mask::from_tiles(shape[0], shape[1], tiles);
                *mask = tiles.map(of).transpose()?;
            }
            state.row_order = words(group, state.row_order.as_deref())?;
            let scale = state.scale.map(f32::to_bits);
            let scale = words(group, scale.as_ref().map(std::slice::from_ref))?;
            state.scale = scale.and_then(|bits| bits.first().copied()).map(f32::from_bits);
        }
        if self.group.rank() == 0 { Ok(()) } else { self.restore(progress, &states) }
    }
}

/// Words of a message at most, 64 MiB.
const LONGEST: usize = 1 << 24;

/// Rank 0's values.
fn floats(group: &mut dyn Group, values: &[f32]) -> Result<Vec<f32>> {
    let bits: Vec<u32> = values.iter().map(|value| value.to_bits()).collect();
    let bits = words(group, Some(&bits))?.unwrap_or_default();
    Ok(bits.into_iter().map(f32::from_bits).collect())
}

/// Rank 0's words, if it has any, in messages of at most [`LONGEST`]; a shorter one is the last.
fn words(group: &mut dyn Group, words: Option<&[u32]>) -> Result<Option<Vec<u32>>> {
    let has = group.broadcast(&[u8::from(words.is_some())])?;
    if has != [1] {
        return Ok(None);
    }
    let (mut left, mut all) = (words.unwrap_or_default(), Vec::new());
    loop {
        let (first, rest) = left.split_at(left.len().min(LONGEST));
        let bytes: Vec<u8> = first.iter().flat_map(|word| word.to_le_bytes()).collect();
        let bytes = group.broadcast(&bytes)?;
        let words = bytes.as_chunks().0;
        all.extend(words.iter().map(|&word| u32::from_le_bytes(word)));
        left = rest;
        if words.len() < LONGEST {
            return Ok(Some(all));
        }
    }
}

//! The training loop as a state machine: one optimizer step at a time, on any backend, for any
//! model, with any method.
//!
//! ```text
//! step t:  micro-batches (forward, backward) -> gradient norm -> update with masked decay -> w_t
//!          then: a phase that watches Adam's variance may end; in a sparse phase, masks are
//!          searched again when a refresh is due, and S(w_t) is rebuilt once
//! ```
//!
//! The state after step t is a function of (seed, recipe, data) alone.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use sparse24_core::{
    MaskKind,
    flip::flip_rate,
    op::{Accumulate, StepState},
};

use crate::{
    Error, Result,
    backend::{
        Backend, DType, GraphId, MaskId, PendingCount, PendingReport, Plans, Region, Stage,
        TableId, Tensor,
        op::{Copy, GradNorm, MaskSearch, OptimizerStep},
    },
    group::{Group, Solo},
    limits,
    method::{Phase, PhaseKind},
    model::Model,
    nn::{BatchShape, Builder, DecayTable, Parameter, Parameters, Pass},
    objective::{Batch, Objective},
};

use self::{
    averages::Averages,
    generation::Decoding,
    operands::{Memory, Refreshed},
    ranks::Shared,
    settling::Variances,
};

mod averages;
mod divergence;
mod evaluation;
mod generation;
mod instruments;
mod operands;
mod ranks;
mod recipe;
mod settling;
mod state;

pub use instruments::{GradientNoise, MaskChange};
pub use recipe::Recipe;
pub use state::{ParameterState, Progress};

/// Whether a step also samples the flip rate: two more mask searches per weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlipSampling {
    /// The flip rate is sampled.
    Sample,
    /// It is not.
    Skip,
}

/// The outcome of one optimizer step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepOutcome {
    /// t, from 1.
    pub step: u32,
    /// The kind of its phase.
    pub phase: PhaseKind,
    /// Mean over micro-batches of the mean loss per target (0 without targets) before the update,
    /// in nats.
    pub loss: f64,
    /// The learning rate.
    pub learning_rate: f32,
    /// L2 norm of the gradients, before clipping.
    pub grad_norm: f32,
    /// |m(w_t) - m(w_{t-1})|_1 of each sparsifiable weight, if sampled.
    pub flips: Option<Vec<Flips>>,
}

/// The mask flips of one weight in one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flips {
    /// Name of the parameter.
    pub name: String,
    /// Mask bits that changed.
    pub flips: u64,
    /// Mask bits.
    pub weights: u64,
}

/// A step whose work is queued, see [`Trainer::start_step`]. Once it is dropped, the trainer has to
/// be [restored](Trainer::restore).
#[must_use = "a started step has to be finished"]
pub struct StartedStep<'a> {
    trainer: &'a mut Trainer,
    objective: &'a dyn Objective,
    /// The index of its phase.
    phase: usize,
    learning_rate: f32,
    /// Targets of each micro-batch.
    targets: Vec<usize>,
    report: PendingReport,
    flips: Option<Vec<PendingCount>>,
}

/// The flip rate over all weights, see [`flip_rate`].
#[must_use]
pub fn overall_flip_rate(flips: &[Flips]) -> f64 {
    let sum = |part: fn(&Flips) -> u64| flips.iter().map(part).sum();
    flip_rate(sum(|layer| layer.flips), sum(|layer| layer.weights))
}

/// A model on a device with everything that its training allocates, its weights still zero.
pub(crate) struct Allocated {
    pub(crate) model: Box<dyn Model>,
    pub(crate) parameters: Parameters,
    pub(crate) losses: Tensor,
    flip_masks: Vec<[MaskId; 2]>,
    /// Sums of the gradients of 2^level replicas, by level; each has a tensor per parameter.
    partial_sums: Vec<Vec<Tensor>>,
    /// A tensor for what each other rank sends.
    received: Vec<Tensor>,
    variances: Variances,
    averages: Averages,
    pub(crate) sparse_table: TableId,
    dense_table: TableId,
}

impl Allocated {
    /// For one of `world` ranks.
    pub(crate) fn new(backend: &mut dyn Backend, recipe: &Recipe, world: usize) -> Result<Self> {
        let &Recipe { ref method, ref optimizer, batch, dropout, .. } = recipe;
        let mut builder = Builder::new(backend, method, &optimizer.rule, batch, dropout);
        let model = recipe.model.build(&mut builder, recipe.checkpointing)?;
        let parameters = builder.into_parameters();
        let losses = [recipe.gradient_accumulation.last.get() as usize, 1];
        let losses = backend.alloc("losses", losses, DType::F32, Region::Activations)?;
        let mut flip_masks = Vec::new();
        for parameter in parameters.sparsifiable() {
            let shape = parameter.weight.shape;
            flip_masks.push([backend.alloc_mask(shape)?, backend.alloc_mask(shape)?]);
        }
        let partial_sums = ranks::partial_sums(backend, &parameters, recipe, world)?;
        let received = ranks::received(backend, &parameters, world)?;
        let variances = Variances::new(backend, &parameters, &recipe.method)?;
        let averages = Averages::new(backend, &parameters, recipe)?;
        let Recipe { weight_decay, no_weight_decay, .. } = *recipe;
        let mut table = |masks| {
            let rows = parameters.optimizer_table(weight_decay, no_weight_decay, masks);
            backend.alloc_table(&rows)
        };
        let (sparse_table, dense_table) = (table(DecayTable::Masked)?, table(DecayTable::Dense)?);
        Ok(Self {
            model,
            parameters,
            losses,
            flip_masks,
            partial_sums,
            received,
            variances,
            averages,
            sparse_table,
            dense_table,
        })
    }
}

/// A run in memory. If an update or a load does not finish, a state must be restored first.
pub struct Trainer {
    backend: Box<dyn Backend>,
    group: Box<dyn Group>,
    allocated: Allocated,
    /// The exchange of gradients between the ranks.
    exchange: Vec<Stage>,
    recipe: Recipe,
    progress: Progress,
    memories: Vec<Memory>,
    batch: Batch,
    interrupt: Arc<AtomicBool>,
    /// Whether passes since the last report may have raised the flag that it lowers.
    is_unreported: bool,
    /// Whether an update or a load was started and did not finish.
    is_torn: bool,
    decoding: Decoding,
}

impl Trainer {
    /// A run at step 0: weights initialized, masks searched in w_0.
    ///
    /// # Errors
    /// [`Error::Setting`] for what the backend cannot train; errors of the allocations, among them
    /// sparsifiable shapes that do not consist of 4x4 tiles.
    pub fn new(backend: Box<dyn Backend>, recipe: Recipe) -> Result<Self> {
        Self::in_group(backend, recipe, Box::new(Solo))
    }

    /// Like [`Self::new`], for one rank of a group whose ranks all train the same recipe. From here
    /// on, all make the same calls to [`Self::train_step`], [`Self::skip_step`],
    /// [`Self::evaluate`], [`Self::predict`] and [`Self::take_state_of_rank_0`], in the same order,
    /// and have the same state and results after each: those of one rank.
    ///
    /// # Errors
    /// Errors of [`Self::new`]; [`Error::Setting`] unless the number of ranks is a power of two and
    /// at most [`Recipe::replicas`].
    pub fn in_group(
        mut backend: Box<dyn Backend>,
        recipe: Recipe,
        group: Box<dyn Group>,
    ) -> Result<Self> {
        let (capabilities, world) = (backend.capabilities(), group.world());
        recipe.check(&capabilities)?;
        ranks::check(&recipe, world)?;
        // What the device cannot hold is refused before it allocates anything.
        recipe.check_tensors(capabilities, world)?;
        let allocated = Allocated::new(&mut *backend, &recipe, world)?;
        let exchange = ranks::exchange(&allocated, &recipe, group.rank())?;
        allocated.parameters.initialize(&mut *backend, recipe.seed)?;
        allocated.averages.start(&mut *backend, &allocated.parameters)?;
        let mut trainer = Self {
            memories: vec![Memory::default(); allocated.parameters.pruned().count()],
            backend,
            group,
            allocated,
            exchange,
            recipe,
            progress: Progress::default(),
            batch: Batch::default(),
            interrupt: Arc::default(),
            is_unreported: false,
            is_torn: false,
            decoding: Decoding::default(),
        };
        trainer.prepare_weights(Refreshed::All)?;
        Ok(trainer)
    }

    /// Number of optimizer steps taken.
    #[must_use]
    pub fn step(&self) -> u32 {
        self.progress.step
    }

    /// Its state besides the parameters.
    #[must_use]
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// The recipe it was made from.
    #[must_use]
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// The device.
    #[must_use]
    pub fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// Replays the timed choices of another process from here on.
    ///
    /// # Errors
    /// Errors of [`Backend::use_plans`].
    pub fn use_plans(&mut self, plans: &Plans) -> Result {
        self.backend.use_plans(plans)
    }

    /// The phase of the last step taken, which the weights are in.
    #[must_use]
    pub fn phase(&self) -> &Phase {
        self.phase_of(self.step())
    }

    /// Whether the next step starts another phase.
    #[must_use]
    pub fn ends_phase(&self) -> bool {
        self.step() < self.recipe.steps
            && self.phase_index(self.step()) != self.phase_index(self.step() + 1)
    }

    /// The change of phase after the last step taken, in words, where there is
    /// [one](Self::ends_phase).
    #[must_use]
    pub fn transition(&self) -> &'static str {
        match (self.phase().kind(), self.phase_of(self.step() + 1).kind()) {
            (PhaseKind::Sparse, PhaseKind::Dense) => "sparse training ends, dense training starts",
            (PhaseKind::Dense, PhaseKind::Sparse) => "dense training ends, sparse training starts",
            _ => "the next phase starts",
        }
    }

    /// The last steps of the phases with a pruned forward pass, as far as they are decided: each
    /// leaves a 2:4 model.
    #[must_use]
    pub fn last_sparse_steps(&self) -> Vec<u32> {
        self.recipe.method.last_sparse_steps(self.recipe.steps, &self.progress.ends)
    }

    /// The ranks that train this model together.
    pub fn group(&mut self) -> &mut dyn Group {
        &mut *self.group
    }

    /// While this flag is set, a step or an evaluation under way ends before its next micro-batch
    /// with [`Error::Interrupted`]; not in a group of several ranks, where one must not end alone.
    pub fn interrupt_on(&mut self, flag: Arc<AtomicBool>) {
        self.interrupt = flag;
    }

    /// Whether the flag of [`Self::interrupt_on`] is set.
    #[must_use]
    pub fn is_interrupted(&self) -> bool {
        self.interrupt.load(Ordering::Relaxed)
    }

    /// One optimizer step.
    ///
    /// # Errors
    /// [`Error::NonFinite`] before any update if the loss or a gradient is not finite;
    /// [`Error::Interrupted`], which leaves the state as it was before the step;
    /// [`Error::Setting`] after the last step of the recipe; [`Error::Operand`] for a batch of
    /// another shape than the recipe's; errors from the backend. After an error or a panic once
    /// the update has started, [`Error::Parameter`] until [`Self::restore`].
    pub fn train_step(
        &mut self,
        objective: &dyn Objective,
        sampling: FlipSampling,
    ) -> Result<StepOutcome> {
        self.start_step(objective, sampling)?.finish()
    }

    /// Queues the work of one optimizer step, for a caller that must not wait: a browser's copies
    /// arrive before it calls [`StartedStep::finish`].
    ///
    /// # Errors
    /// Errors of [`Self::train_step`], except [`Error::NonFinite`].
    pub fn start_step<'a>(
        &'a mut self,
        objective: &'a dyn Objective,
        sampling: FlipSampling,
    ) -> Result<StartedStep<'a>> {
        self.check_unfinished()?;
        if self.is_unreported {
            drop(self.backend.start_report(self.allocated.losses)?);
        }
        let step = self.step() + 1;
        let index = self.phase_index(step);
        let phase = self.recipe.method.phases[index];
        let micro_steps = self.recipe.gradient_accumulation.of(step);
        let (optimizer, bias_corrections) = self.optimizer(index, step);
        let state = StepState {
            learning_rate: self.recipe.learning_rate(step),
            bias_corrections,
            ..self.step_state(step)
        };
        let mut targets = Vec::new();
        let of_replica = micro_steps / self.recipe.replicas;
        let (share, overlaps) = (self.share(step), self.overlaps());
        for (row, micro_step) in share.clone().enumerate() {
            self.check_interrupt()?;
            let shape = self.prepare_batch(objective, StepState { micro_step, ..state })?;
            targets.push(self.batch.counted);
            let Self { backend, allocated, exchange, recipe, .. } = self;
            let Allocated { model, losses, .. } = allocated;
            let is_last = micro_step + 1 == share.end;
            let stages = if overlaps && is_last { &exchange[..] } else { &[] };
            let (part, accumulate) = match (micro_step % of_replica, stages) {
                (0, []) => (Part::First, Accumulate::Overwrite),
                (0, _) => (Part::Only, Accumulate::Overwrite),
                (_, []) => (Part::Further, Accumulate::Add),
                _ => (Part::Last, Accumulate::Add),
            };
            let graph = part.of_phase(index, Some(shape).filter(|&shape| shape != recipe.batch));
            backend.graph(graph, &mut |backend| {
                let pass = recipe.pass(backend, &phase, shape);
                let mut pass = Pass { accumulate, stages, ..pass };
                model.train(&mut pass)?;
                pass.backend.start_reduce(pass.stages)
            })?;
            backend.run(Copy { from: model.loss(), to: losses.rows(row..row + 1) })?;
            let done = row as u32 + 1;
            if done.is_multiple_of(of_replica) {
                self.end_replica(done / of_replica - 1)?;
            }
        }
        let rows = targets.len();
        let shared = self.reduce(overlaps, rows, &mut targets)?;

        if sampling == FlipSampling::Sample {
            self.search_flips(0)?;
        }
        let Self { backend, allocated, is_torn, .. } = self;
        let Allocated { parameters, variances, averages, .. } = allocated;
        let table = match phase.kind() {
            PhaseKind::Sparse => allocated.sparse_table,
            PhaseKind::Dense => allocated.dense_table,
        };
        let decay = self.recipe.method.decay;
        if phase.watches() {
            variances.keep(&mut **backend, parameters)?;
        }
        if shared.as_ref().is_none_or(Shared::is_finite) {
            *is_torn = true;
            backend.graph(Part::Update.of_phase(index, None), &mut |backend| {
                backend.run(GradNorm { table })?;
                backend.run(OptimizerStep { table, optimizer: &optimizer, decay })?;
                averages.follow(backend, parameters)
            })?;
        }
        let losses = allocated.losses.first_rows(rows);
        let report = backend.start_report(losses)?;
        self.is_unreported = false;
        let report = match shared {
            Some(shared) => shared.report(report),
            None => report,
        };
        let is_sampled = sampling == FlipSampling::Sample;
        let flips = is_sampled.then(|| self.start_flip_counts()).transpose()?;
        let (trainer, learning_rate) = (self, state.learning_rate);
        Ok(StartedStep { trainer, objective, phase: index, learning_rate, targets, report, flips })
    }

    /// Advances to the next step without updating the weights. Used when a loss or gradient is not
    /// finite and the policy is to skip.
    ///
    /// # Errors
    /// [`Error::Setting`] after the last step of the recipe; errors from the backend.
    pub fn skip_step(&mut self) -> Result {
        self.check_unfinished()?;
        self.advance(self.phase_index(self.step() + 1))
    }

    /// Fails beyond the recipe's last step, whose schedule and phases are over, and after an update
    /// or a load that did not finish.
    fn check_unfinished(&self) -> Result {
        self.check_whole()?;
        let (done, steps) = (self.step(), self.recipe.steps);
        limits::check("steps", done < steps, &format!("more than the {done} done"), steps)
    }

    /// Advances the step counter and refreshes masks, whether the update was applied or skipped.
    fn advance(&mut self, phase: usize) -> Result {
        self.is_torn = true;
        self.progress.step += 1;
        self.settle(phase);
        self.prepare_weights(Refreshed::IfDue)?;
        self.is_torn = false;
        Ok(())
    }

    /// The declarations of all parameters, in order.
    #[must_use]
    pub fn parameters(&self) -> &Parameters {
        &self.allocated.parameters
    }

    fn phase_of(&self, step: u32) -> &Phase {
        &self.recipe.method.phases[self.phase_index(step)]
    }

    fn phase_index(&self, step: u32) -> usize {
        self.recipe.method.phase_at(step, self.recipe.steps, &self.progress.ends)
    }

    /// The step state of a step that updates nothing.
    fn step_state(&self, step: u32) -> StepState {
        StepState {
            seed: self.recipe.seed,
            step,
            bias_corrections: [1.0; 2],
            ..StepState::default()
        }
    }

    /// Makes a micro-batch and brings it to the device, with its step state; the loss is scaled to
    /// the mean over the targets of the micro-batch and over micro-batches. Returns its shape.
    fn prepare_batch(&mut self, objective: &dyn Objective, state: StepState) -> Result<BatchShape> {
        self.batch.clear();
        objective.fill(state.step, state.micro_step, &mut self.batch)?;
        let shape = self.upload_batch(self.recipe.batch)?;
        let micro_steps = f64::from(self.recipe.gradient_accumulation.of(state.step));
        let targets = self.batch.counted.max(1) as f64 * micro_steps;
        self.backend.set_step(StepState { loss_scale: (1.0 / targets) as f32, ..state })?;
        self.is_unreported = true;
        Ok(shape)
    }

    /// Brings the batch to the device. Returns its shape, which is at most this.
    fn upload_batch(&mut self, most: BatchShape) -> Result<BatchShape> {
        self.check_whole()?;
        self.decoding = Decoding::default();
        let Self { backend, allocated: Allocated { model, .. }, recipe, batch, .. } = self;
        let shape = batch.complete(most, recipe.model.inputs())?;
        model.upload(&mut **backend, batch)?;
        Ok(shape)
    }

    /// Searches m(w) of every sparsifiable weight, whatever the phase: before the update into the
    /// masks 0, after it into the masks 1.
    fn search_flips(&mut self, which: usize) -> Result {
        let Self { backend, allocated: Allocated { parameters, flip_masks, .. }, .. } = self;
        parameters.sparsifiable().zip(flip_masks).try_for_each(|(parameter, masks)| {
            let (w, mask) = (parameter.weight, masks[which]);
            backend.run(MaskSearch { w, kind: MaskKind::Transposable, mask })
        })
    }

    fn start_flip_counts(&mut self) -> Result<Vec<PendingCount>> {
        self.search_flips(1)?;
        let Self { backend, allocated: Allocated { flip_masks, .. }, .. } = self;
        flip_masks.iter().map(|&[a, b]| backend.start_flip_count(a, b)).collect()
    }
}

impl StartedStep<'_> {
    /// Waits for the step, and brings masks and S(w) in line with its weights.
    ///
    /// # Errors
    /// Errors of [`Trainer::train_step`].
    pub fn finish(self) -> Result<StepOutcome> {
        let Self { trainer, objective, phase: index, learning_rate, targets, report, flips } = self;
        let (step, phase) = (trainer.step() + 1, trainer.recipe.method.phases[index]);
        let Trainer { backend, allocated: Allocated { parameters, variances, .. }, .. } = trainer;
        let report = report(&mut **backend)?;
        if let Some(culprit) = report.non_finite {
            trainer.is_torn = false;
            return Err(Error::NonFinite { step, what: trainer.divergence(objective, culprit)? });
        }
        let of = |(parameter, count): (&Parameter, PendingCount)| -> Result<_> {
            let weights = parameter.weight.elements() as u64;
            Ok(Flips { name: parameter.spec.name.clone(), flips: count()?, weights })
        };
        let all = flips.map(|counts| parameters.sparsifiable().zip(counts).map(of).collect());
        let flips = all.transpose()?;
        if phase.watches() {
            let change = variances.change(&mut **backend, parameters)?;
            trainer.progress.variance_changes.push(change);
        }
        trainer.advance(index)?;
        let loss = mean_loss(&report.losses, &targets);
        let grad_norm = report.grad_norm;
        Ok(StepOutcome { step, phase: phase.kind(), loss, learning_rate, grad_norm, flips })
    }
}

/// The mean over micro-batches of the mean loss per target.
fn mean_loss(losses: &[f32], targets: &[usize]) -> f64 {
    let micro_steps = losses.len();
    let mean = |(&loss, &targets): (&f32, &usize)| {
        f64::from(loss) / (targets.max(1) as f64 * micro_steps as f64)
    };
    losses.iter().zip(targets).map(mean).sum()
}

/// The parts of a step that are the same every time in a phase.
#[derive(Debug, Clone, Copy)]
enum Part {
    /// Forward and backward of the first micro-batch.
    First,
    /// Forward and backward of a further micro-batch.
    Further,
    /// The last micro-batch, if it starts the exchange.
    Last,
    /// The first one, if it is the last and starts the exchange.
    Only,
    /// The gradient norm and the optimizer.
    Update,
    /// S(w), in all phases.
    Compress,
}

impl Part {
    const ALL: usize = 6;

    /// The part in a phase, for batches of a shape of their own.
    fn of_phase(self, phase: usize, shape: Option<BatchShape>) -> GraphId {
        let shape = shape.map(|BatchShape { size, sequence_length }| [size, sequence_length]);
        GraphId { part: Self::ALL * phase + self as usize, shape }
    }
}

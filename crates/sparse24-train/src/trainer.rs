//! The training loop as a state machine: one optimizer step at a time, on any backend, with any
//! method.
//!
//! ```text
//! step t:  micro-batches (forward, backward)  ->  gradient norm  ->  AdamW with masked decay  ->  w_t
//!          then: a phase that watches Adam's variance ends, or not; in a sparse phase masks are searched anew when due, and S(w_t) rebuilt once
//! ```
//!
//! The state after step t is a function of (seed, recipe, data) alone. Deliberately absent: files,
//! clocks, terminals.

use std::{
    num::NonZeroU32,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use sparse24_core::{MaskKind, flip::flip_rate};

use crate::{
    Error,
    backend::{Backend, Beta, DType, MaskId, Plans, Region, SegmentId, StepState, TableId, Tensor},
    method::{Method, Phase, PhaseKind, Until},
    model::gpt2::{BatchShape, Gpt2, Gpt2Shape, Recompute},
    nn::{
        Pass,
        parameter::{Masked, Parameter, Parameters},
    },
    optim::AdamW,
    schedule::Schedule,
};

use self::{
    operands::{Memory, Refreshed, pruned},
    settling::Variances,
};

mod divergence;
mod instruments;
mod operands;
mod sampler;
mod settling;
mod state;

pub use instruments::{GradientNoise, MaskChange};
pub use sampler::Sampler;
pub use state::{ParameterState, Progress};

/// All that determines a run, besides its data.
#[derive(Debug, Clone, PartialEq)]
pub struct Recipe {
    /// The model.
    pub model: Gpt2Shape,
    /// How it is trained.
    pub method: Method,
    /// Optimizer steps, T.
    pub steps: u32,
    /// A micro-batch.
    pub batch: BatchShape,
    /// What its backward pass computes again.
    pub recompute: Recompute,
    /// Micro-batches an optimizer step.
    pub accumulation: NonZeroU32,
    /// Probability of dropout.
    pub dropout: f32,
    /// The optimizer.
    pub optimizer: AdamW,
    /// Decoupled weight decay of matrices.
    pub weight_decay: f32,
    /// The learning rate.
    pub schedule: Schedule,
    /// Of everything random.
    pub seed: u64,
}

impl Recipe {
    /// Tokens of one optimizer step.
    #[must_use]
    pub fn tokens_per_step(&self) -> u64 {
        (self.batch.sequences * self.batch.context) as u64 * u64::from(self.accumulation.get())
    }
}

/// Where micro-batches come from: a pure function of (seed, step, micro-step).
pub trait Batches {
    /// Fills `[sequences * context]` inputs and their next tokens.
    fn fill(&self, step: u32, micro_step: u32, inputs: &mut Vec<u32>, targets: &mut Vec<u32>);
}

/// What is evaluated: windows of one context.
pub trait Windows {
    /// How many there are.
    fn count(&self) -> usize;
    /// Fills `[sequences, context]` inputs and targets from window `first` on; targets of
    /// [`crate::backend::HeadLoss::IGNORE`] do not count. Gives the number that do.
    fn fill(
        &self,
        first: usize,
        sequences: usize,
        inputs: &mut Vec<u32>,
        targets: &mut Vec<u32>,
    ) -> usize;
}

/// Whether a step also samples the flip rate: two more mask searches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlipSampling {
    /// It does.
    Sample,
    /// It does not.
    Skip,
}

/// What one optimizer step did.
#[derive(Debug, Clone, PartialEq)]
pub struct StepOutcome {
    /// t.
    pub step: u32,
    /// Of the phase.
    pub phase: PhaseKind,
    /// Mean loss a token, before the update.
    pub loss: f64,
    /// The learning rate.
    pub learning_rate: f32,
    /// L2 norm of the gradients, before clipping.
    pub grad_norm: f32,
    /// |m(w_t) - m(w_{t-1})|_1 by sparsifiable weight, if sampled.
    pub flips: Option<Vec<Flips>>,
}

/// The mask flips of one weight in one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flips {
    /// The parameter.
    pub name: String,
    /// Mask bits that changed.
    pub flips: u64,
    /// Mask bits.
    pub weights: u64,
}

/// The flip rate of all weights together.
#[must_use]
pub fn overall_flip_rate(flips: &[Flips]) -> f64 {
    flip_rate(
        flips.iter().map(|layer| layer.flips).sum(),
        flips.iter().map(|layer| layer.weights).sum(),
    )
}

/// A run in memory.
pub struct Trainer {
    backend: Box<dyn Backend>,
    model: Gpt2,
    parameters: Parameters,
    recipe: Recipe,
    progress: Progress,
    losses: Tensor,
    flip_masks: Vec<[MaskId; 2]>,
    memories: Vec<Memory>,
    variances: Variances,
    sparse_table: TableId,
    dense_table: TableId,
    inputs: Vec<u32>,
    targets: Vec<u32>,
    interrupt: Arc<AtomicBool>,
}

impl Trainer {
    /// A run at step 0: weights initialised, masks searched in w_0.
    ///
    /// # Errors
    /// [`Error::Setting`] for a method that this trainer or the backend does not run; those of the
    /// allocations, among them sparsified shapes that are not made of 4x4 tiles.
    pub fn new(mut backend: Box<dyn Backend>, recipe: Recipe) -> Result<Self, Error> {
        recipe.method.check(recipe.steps)?;
        backend.check(&recipe)?;
        let (model, parameters) =
            Gpt2::new(&mut *backend, recipe.model, recipe.batch, recipe.recompute, &recipe.method)?;
        parameters.initialise(&mut *backend, recipe.seed)?;
        let losses = backend.alloc(
            "losses",
            [recipe.accumulation.get() as usize, 1],
            DType::F32,
            Region::Activations,
        )?;
        let flip_masks = sparsifiable(&parameters)
            .map(|parameter| {
                Ok([
                    backend.alloc_mask(parameter.weight.shape)?,
                    backend.alloc_mask(parameter.weight.shape)?,
                ])
            })
            .collect::<Result<Vec<_>, Error>>()?;
        let variances = Variances::new(&mut *backend, &parameters, &recipe.method)?;
        let memories = vec![Memory::default(); pruned(&parameters).count()];
        let mut table =
            |masked| backend.alloc_table(&parameters.optimizer_table(recipe.weight_decay, masked));
        let (sparse_table, dense_table) = (table(Masked::Decayed)?, table(Masked::Untouched)?);
        let mut trainer = Self {
            backend,
            model,
            parameters,
            recipe,
            progress: Progress::default(),
            losses,
            flip_masks,
            memories,
            variances,
            sparse_table,
            dense_table,
            inputs: Vec::new(),
            targets: Vec::new(),
            interrupt: Arc::default(),
        };
        trainer.prepare_weights(Refreshed::Anew)?;
        Ok(trainer)
    }

    /// Optimizer steps done.
    #[must_use]
    pub fn step(&self) -> u32 {
        self.progress.step
    }

    /// What it remembers besides its parameters.
    #[must_use]
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// What it was made of.
    #[must_use]
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// The device.
    #[must_use]
    pub fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// Replays timed choices of another process from here on.
    ///
    /// # Errors
    /// Those of [`Backend::use_plans`].
    pub fn use_plans(&mut self, plans: &Plans) -> Result<(), Error> {
        self.backend.use_plans(plans)
    }

    /// The phase that the weights are in: that of the step done last.
    #[must_use]
    pub fn phase(&self) -> &Phase {
        &self.recipe.method.phases[self.phase_index(self.step())]
    }

    /// Whether another phase begins with the next step.
    #[must_use]
    pub fn ends_phase(&self) -> bool {
        self.step() < self.recipe.steps
            && self.phase_index(self.step()) != self.phase_index(self.step() + 1)
    }

    /// What the next step begins, in words, where it [begins another phase](Self::ends_phase).
    #[must_use]
    pub fn transition(&self) -> &'static str {
        let [ended, begun] =
            [0, 1].map(|ahead| self.recipe.method.phases[self.phase_index(self.step() + ahead)]);
        match (ended.kind(), begun.kind()) {
            (PhaseKind::Sparse, PhaseKind::Dense) => {
                "sparse training ends, dense fine-tuning begins"
            }
            (PhaseKind::Dense, PhaseKind::Sparse) => "dense training ends, sparse training begins",
            _ => "the next phase begins",
        }
    }

    /// The last steps of the phases whose forward is pruned, as far as that is decided: each leaves
    /// a 2:4 model.
    #[must_use]
    pub fn last_sparse_steps(&self) -> Vec<u32> {
        self.recipe.method.last_sparse_steps(self.recipe.steps, &self.progress.ends)
    }

    /// While this is set, a step or an evaluation under way ends before its next micro-batch with
    /// [`Error::Interrupted`].
    pub fn interrupt_on(&mut self, flag: Arc<AtomicBool>) {
        self.interrupt = flag;
    }

    /// One optimizer step.
    ///
    /// # Errors
    /// [`Error::NonFinite`] before any update if the loss or a gradient is not finite;
    /// [`Error::Interrupted`], which leaves the state as it was before the step; those of the
    /// operations.
    pub fn train_step(
        &mut self,
        batches: &dyn Batches,
        sampling: FlipSampling,
    ) -> Result<StepOutcome, Error> {
        let step = self.step() + 1;
        let index = self.phase_index(step);
        let phase = self.recipe.method.phases[index];
        let (accumulation, BatchShape { sequences, context }) =
            (self.recipe.accumulation.get(), self.recipe.batch);
        let tokens = self.recipe.tokens_per_step() as f64;
        let learning_rate = self.recipe.schedule.learning_rate(step);
        let Recipe { seed, dropout, .. } = self.recipe;
        let (rule, bias_corrections) = self.update_rule(index, step);
        let Self { backend, model, interrupt, .. } = self;
        for micro_step in 0..accumulation {
            go_on(interrupt)?;
            batches.fill(step, micro_step, &mut self.inputs, &mut self.targets);
            backend.set_step(StepState {
                seed,
                step,
                micro_step,
                learning_rate,
                bias_corrections,
                loss_scale: (1.0 / tokens) as f32,
            })?;
            model.upload(&mut **backend, &self.inputs, &self.targets)?;
            let (part, beta) = if micro_step == 0 {
                (Part::First, Beta::Overwrite)
            } else {
                (Part::Further, Beta::Accumulate)
            };
            backend.segment(part.of_phase(index), &mut |backend| {
                let mut pass =
                    Pass { backend, phase: &phase, sequences, context, dropout, beta, watch: None };
                model.train(&mut pass, (1.0 / tokens) as f32)
            })?;
            backend.copy(
                model.loss(),
                self.losses.rows(micro_step as usize..micro_step as usize + 1),
            )?;
        }

        if sampling == FlipSampling::Sample {
            search_flips(
                &mut **backend,
                &self.parameters,
                self.flip_masks.iter().map(|masks| masks[0]),
            )?;
        }
        let table = match phase.kind() {
            PhaseKind::Sparse => self.sparse_table,
            PhaseKind::Dense => self.dense_table,
        };
        let decay = self.recipe.method.decay;
        let watched = matches!(phase.until, Until::VarianceSettled { .. });
        if watched {
            self.variances.keep(&mut **backend, &self.parameters)?;
        }
        backend.segment(Part::Update.of_phase(index), &mut |backend| {
            backend.grad_norm(table)?;
            backend.optimizer_step(table, &rule, decay)
        })?;
        let report = self.backend.report(self.losses)?;
        if let Some(culprit) = report.non_finite {
            return Err(Error::NonFinite {
                step,
                what: self.divergence(batches, culprit)?,
                kept: None,
            });
        }

        if watched {
            let change = self.variances.change(&mut *self.backend, &self.parameters)?;
            self.progress.variance_changes.push(change);
        }
        self.advance(index)?;
        let flips = match sampling {
            FlipSampling::Sample => Some(self.count_flips()?),
            FlipSampling::Skip => None,
        };
        Ok(StepOutcome {
            step,
            phase: phase.kind(),
            loss: report.loss / tokens,
            learning_rate,
            grad_norm: report.grad_norm,
            flips,
        })
    }

    /// Does the next step without its update: what remains of one whose loss or gradients are not
    /// finite.
    ///
    /// # Errors
    /// Those of the operations.
    pub fn pass_over(&mut self) -> Result<(), Error> {
        self.advance(self.phase_index(self.step() + 1))
    }

    /// What follows an update in a phase, or its omission.
    fn advance(&mut self, phase: usize) -> Result<(), Error> {
        self.progress.step += 1;
        self.settle(phase);
        self.prepare_weights(Refreshed::AsDue)
    }

    /// Mean loss a token over all windows, with the weights of the current phase.
    ///
    /// # Errors
    /// [`Error::Interrupted`]; those of the operations.
    pub fn evaluate(&mut self, windows: &dyn Windows) -> Result<f64, Error> {
        self.evaluate_by(windows, self.recipe.batch.sequences)
    }

    /// As [`Trainer::evaluate`], so many windows at a time: at least one, at most as many as a
    /// batch has sequences.
    ///
    /// # Errors
    /// As [`Trainer::evaluate`].
    pub fn evaluate_by(&mut self, windows: &dyn Windows, sequences: usize) -> Result<f64, Error> {
        let (phase, context) = (*self.phase(), self.recipe.batch.context);
        let (mut sum, mut counted) = (0.0, 0);
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        for first in (0..windows.count()).step_by(sequences) {
            go_on(&self.interrupt)?;
            let taken = sequences.min(windows.count() - first);
            counted += windows.fill(first, taken, &mut inputs, &mut targets);
            self.model.upload(&mut *self.backend, &inputs, &targets)?;
            sum += f64::from(self.model.evaluate(&mut evaluation_pass(
                &mut *self.backend,
                &phase,
                taken,
                context,
            ))?);
        }
        Ok(sum / counted as f64)
    }

    /// Draws the next token after a non-empty prompt, of which the last context is read:
    /// softmax(logits / temperature) among the `top_k` likeliest; temperature 0 takes the
    /// likeliest. The draw is a function of (seed, position).
    ///
    /// # Errors
    /// Those of the operations.
    pub fn sample(&mut self, prompt: &[u32], sampler: &Sampler) -> Result<u32, Error> {
        let logits = self.next_logits(prompt)?;
        Ok(sampler.draw(&logits, prompt.len() as u32))
    }

    /// The logits after the last token of a non-empty prompt, of which the last context is read.
    ///
    /// # Errors
    /// Those of the operations.
    pub fn next_logits(&mut self, prompt: &[u32]) -> Result<Vec<f32>, Error> {
        let phase = *self.phase();
        let window = &prompt[prompt.len().saturating_sub(self.recipe.batch.context)..];
        let mut pass = evaluation_pass(&mut *self.backend, &phase, 1, window.len());
        self.model.next_logits(&mut pass, window)
    }

    /// Names and shapes of all parameters, in order.
    pub fn parameter_shapes(&self) -> impl Iterator<Item = (&str, [usize; 2])> {
        self.parameters.iter().map(|parameter| (parameter.name.as_str(), parameter.weight.shape))
    }

    fn phase_index(&self, step: u32) -> usize {
        self.recipe.method.phase_at(step, self.recipe.steps, &self.progress.ends)
    }

    fn count_flips(&mut self) -> Result<Vec<Flips>, Error> {
        search_flips(
            &mut *self.backend,
            &self.parameters,
            self.flip_masks.iter().map(|masks| masks[1]),
        )?;
        sparsifiable(&self.parameters)
            .zip(&self.flip_masks)
            .map(|(parameter, &[before, after])| {
                let (name, weights) = (parameter.name.clone(), parameter.weight.elements() as u64);
                Ok(Flips { name, flips: self.backend.flip_count(before, after)?, weights })
            })
            .collect()
    }
}

/// The parts of a step that are the same every time in a phase.
#[derive(Debug, Clone, Copy)]
enum Part {
    /// Forward and backward of the first micro-batch.
    First,
    /// Of each further one.
    Further,
    /// The gradient norm and the optimizer.
    Update,
    /// S(w), in all phases.
    Compress,
}

impl Part {
    const ALL: usize = 4;

    fn of_phase(self, phase: usize) -> SegmentId {
        SegmentId(Self::ALL * phase + self as usize)
    }
}

fn go_on(interrupt: &AtomicBool) -> Result<(), Error> {
    if interrupt.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
}

fn evaluation_pass<'a>(
    backend: &'a mut dyn Backend,
    phase: &'a Phase,
    sequences: usize,
    context: usize,
) -> Pass<'a> {
    Pass { backend, phase, sequences, context, dropout: 0.0, beta: Beta::Overwrite, watch: None }
}

fn sparsifiable(parameters: &Parameters) -> impl Iterator<Item = &Parameter> {
    parameters.iter().filter(|parameter| parameter.is_sparsifiable())
}

/// Searches m(w) of every sparsifiable weight into its mask, whatever the phase.
fn search_flips(
    backend: &mut dyn Backend,
    parameters: &Parameters,
    masks: impl Iterator<Item = MaskId>,
) -> Result<(), Error> {
    sparsifiable(parameters).zip(masks).try_for_each(|(parameter, mask)| {
        backend.mask_search(parameter.weight, MaskKind::Transposable, mask)
    })
}

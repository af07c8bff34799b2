//! The recipe of a run, and what it means for a step.

use std::num::NonZeroU32;

use sparse24_core::op::Accumulate;

use super::Allocated;
use crate::{
    Error, Result,
    backend::{Backend, Capabilities, ShapeOnly},
    limits::{self, MOST, MOST_GROWN},
    method::{Method, Phase},
    model::{ActivationCheckpointing, ModelSpec},
    nn::{BatchShape, NoWeightDecay, Pass},
    optim::{AdamVariant, Optimizer},
    schedule::{Decay, GradientAccumulation, Schedule},
};

/// Everything that determines a run, besides its data.
#[derive(Debug, Clone, PartialEq)]
pub struct Recipe {
    /// The model.
    pub model: ModelSpec,
    /// How it is trained.
    pub method: Method,
    /// Optimizer steps, T.
    pub steps: u32,
    /// The shape of a micro-batch.
    pub batch: BatchShape,
    /// The activations that the backward pass computes again.
    pub checkpointing: ActivationCheckpointing,
    /// Micro-batches per optimizer step.
    pub gradient_accumulation: GradientAccumulation,
    /// Equal parts of the micro-batches of a step, V, a power of two: the gradients of a part are
    /// summed in order, and the parts as a binary tree, `((g0 + g1) + (g2 + g3)) + ...`. Up to V
    /// ranks give the same bits.
    pub replicas: NonZeroU32,
    /// Probability of dropout, in `[0, 1)`.
    pub dropout: f32,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// Weight decay, decoupled from the gradient or not as the optimizer has it.
    pub weight_decay: f32,
    /// The parameters that it leaves out.
    pub no_weight_decay: NoWeightDecay,
    /// Decay rate of the moving average of the weights, in `[0, 1)`, if one is kept.
    pub ema_decay: Option<f32>,
    /// The learning rate.
    pub schedule: Schedule,
    /// Seed for all random draws.
    pub seed: u64,
}

impl Recipe {
    /// Tokens of optimizer step t.
    #[must_use]
    pub fn tokens_of(&self, step: u32) -> u64 {
        (self.batch.tokens() as u64).saturating_mul(self.gradient_accumulation.of(step).into())
    }

    /// Tokens before optimizer step t.
    #[must_use]
    pub fn tokens_before(&self, step: u32) -> u64 {
        (self.batch.tokens() as u64).saturating_mul(self.gradient_accumulation.before(step))
    }

    /// Tokens of one optimizer step, the mean over the run rounded down.
    #[must_use]
    pub fn tokens_per_step(&self) -> u64 {
        self.tokens_before(self.steps.saturating_add(1)) / u64::from(self.steps.max(1))
    }

    /// The learning rate of optimizer step t.
    #[must_use]
    pub fn learning_rate(&self, step: u32) -> f32 {
        let before = |step: u32| self.gradient_accumulation.before(step.saturating_add(1)) as f64;
        self.schedule.learning_rate(step, (before(step) - 1.0) / before(self.steps))
    }

    /// A pass over a micro-batch of this shape, with gradients overwritten.
    pub(crate) fn pass<'a>(
        &self,
        backend: &'a mut dyn Backend,
        phase: &'a Phase,
        batch: BatchShape,
    ) -> Pass<'a> {
        let (dropout, accumulate) = (self.dropout, Accumulate::Overwrite);
        let (watch, written, stages) = (None, 0, &[]);
        Pass { backend, phase, batch, dropout, accumulate, watch, written, stages }
    }

    /// Whether a backend with these capabilities can train it.
    ///
    /// # Errors
    /// [`Error::Setting`] names the first key that is wrong.
    pub fn check(&self, capabilities: &Capabilities) -> Result {
        self.model.check(self.batch.sequence_length, self.checkpointing)?;
        limits::check("steps", self.steps > 0, "at least 1", self.steps)?;
        limits::check("batch.size", self.batch.size > 0, "at least 1", self.batch.size)?;
        limits::size("batch.size", self.batch.size, MOST)?;
        limits::share("model.dropout", self.dropout)?;
        limits::share("optimizer.ema_decay", self.ema_decay.unwrap_or(0.0))?;
        let Schedule { peak, floor, warmup_start, decay, cooldown_steps, .. } = self.schedule;
        let has_cooldown = decay != Decay::Wsd || cooldown_steps > 0;
        limits::check("optimizer.cooldown_steps", has_cooldown, "at least 1", cooldown_steps)?;
        limits::magnitude("method.lambda", self.method.decay.lambda().unwrap_or(0.0))?;
        limits::magnitude("optimizer.learning_rate", peak)?;
        limits::magnitude("optimizer.min_learning_rate", floor)?;
        limits::magnitude("optimizer.warmup_learning_rate", warmup_start)?;
        limits::magnitude("optimizer.weight_decay", self.weight_decay)?;
        let Optimizer { rule, clip } = &self.optimizer;
        limits::check("optimizer.max_grad_norm", *clip > 0.0, "a number above 0", clip)?;
        limits::rule(rule)?;
        let GradientAccumulation { first, last, steps } = self.gradient_accumulation;
        let grows = first < last && last.get() as usize <= MOST_GROWN;
        let (key, expected) =
            ("batch.final_gradient_accumulation_steps", format!("{first} to {MOST_GROWN}"));
        limits::check(key, first == last || grows, &expected, last)?;
        let is_divided = first == last && first.get().is_multiple_of(self.replicas.get());
        if self.replicas.get() > 1 && !(is_divided && self.replicas.is_power_of_two()) {
            let problem = format!(
                "expected a power of two that divides the number of micro-batches of every step \
                    ({first}{}), found {} (by default, the number of ranks); set \
                    batch.gradient_accumulation_steps to a multiple of it",
                if first == last { String::new() } else { format!(" to {last}") },
                self.replicas
            );
            return Err(Error::setting("batch.replicas", problem));
        }
        let expected = format!("{steps}, over which the gradient accumulation grows");
        limits::check("steps", first == last || steps == self.steps, &expected, self.steps)?;
        self.method.check(self.steps)?;
        let uses_variance =
            |phase: &Phase| phase.optimizer == AdamVariant::FrozenVariance || phase.watches();
        if self.optimizer.rule.adam().is_none() && self.method.phases.iter().any(uses_variance) {
            let problem = "expected \"adamw\" or \"adam\" for phases that watch or freeze Adam's \
                variance";
            return Err(Error::setting("optimizer.name", problem));
        }
        let requirements = self.model.requirements(self.batch, self.dropout);
        requirements.iter().try_for_each(|requirement| capabilities.check(requirement))
    }

    /// Whether a device with these capabilities can hold its tensors on one of `world` ranks.
    ///
    /// # Errors
    /// [`Error::Setting`] names the key that shrinks the first tensor that is too large.
    pub fn check_tensors(&self, capabilities: Capabilities, world: usize) -> Result {
        Allocated::new(&mut ShapeOnly::within(capabilities), self, world).map(drop)
    }
}

//! The section `[optimizer]`: the update rule, the learning rate and weight decay.

use serde::{Deserialize, Serialize};

use super::unknown::refuse;
use crate::Result;
use sparse24_train::{
    limits,
    nn::NoWeightDecay,
    optim::{Adam, Optimizer, UpdateRule},
    schedule::{Decay, Schedule},
};

/// The optimizer and the learning rate: linear warm-up, then decay.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerConfig {
    /// How gradients change weights; decides which of the other keys have an effect.
    #[serde(default)]
    pub name: OptimizerName,
    /// Peak learning rate.
    pub learning_rate: f32,
    /// Learning rate at the end of the decay.
    pub min_learning_rate: f32,
    /// The way from one to the other, after the warm-up.
    #[serde(default)]
    pub schedule: Decay,
    /// Steps of linear warm-up.
    pub warmup_steps: u32,
    /// Learning rate of the first step of the warm-up; 0 is a share of the peak.
    #[serde(default)]
    pub warmup_learning_rate: f32,
    /// Last step of the decay; 0 is the last step.
    pub decay_steps: u32,
    /// Steps of decay of `wsd`; 0 is a tenth of those before the decay ends.
    #[serde(default)]
    pub cooldown_steps: u32,
    /// Decay rate of the sum of gradients of `sgd`, in [0, 1).
    #[serde(default = "OptimizerConfig::momentum")]
    pub momentum: f32,
    /// Decay rate of the mean of gradients, in [0, 1); of `lion`, its share in the step.
    pub beta1: f32,
    /// Decay rate of the mean of squared gradients, in [0, 1); of `lion`, that of the mean of
    /// gradients.
    pub beta2: f32,
    /// Added to the root of the second moment; above 0.
    pub epsilon: f32,
    /// Weight decay.
    pub weight_decay: f32,
    /// Parameters that weight decay leaves out.
    #[serde(default)]
    pub no_weight_decay: NoWeightDecay,
    /// Largest gradient norm; 0 disables clipping.
    pub max_grad_norm: f32,
    /// Decay rate of the moving average of the weights, in [0, 1); 0 keeps none.
    #[serde(default)]
    pub ema_decay: f32,
}

impl OptimizerConfig {
    /// The momentum of PyTorch's examples; its `SGD` has 0 as default.
    const fn momentum() -> f32 {
        0.9
    }

    /// Checks the keys of the section against each other, and shares against their ranges.
    pub(super) fn check(&self) -> Result {
        // These have all numbers of the rules, the one that is used and the others.
        for name in [OptimizerName::AdamW, OptimizerName::Sgd] {
            limits::rule(&self.rule(name))?;
        }
        limits::share("optimizer.ema_decay", self.ema_decay)?;
        let &Self { schedule, warmup_steps, decay_steps, cooldown_steps, .. } = self;
        if (1..=warmup_steps).contains(&decay_steps) {
            let expected =
                format!("more than optimizer.warmup_steps {warmup_steps}, or 0 for the last step");
            return refuse("optimizer.decay_steps", &expected, decay_steps);
        }
        if !schedule.ends() && decay_steps > 0 {
            let expected = "0, as optimizer.schedule goes on to the last step";
            return refuse("optimizer.decay_steps", expected, decay_steps);
        }
        if schedule == Decay::Triangle && warmup_steps > 0 {
            let expected = "0, as optimizer.schedule \"triangle\" is its own warm-up";
            return refuse("optimizer.warmup_steps", expected, warmup_steps);
        }
        if schedule == Decay::InverseSqrt && warmup_steps == 0 {
            let expected = "at least 1, the scale of optimizer.schedule \"inverse-sqrt\"";
            return refuse("optimizer.warmup_steps", expected, warmup_steps);
        }
        if warmup_steps == 0 && self.warmup_learning_rate > 0.0 {
            let expected = "0, as optimizer.warmup_steps is 0";
            return refuse("optimizer.warmup_learning_rate", expected, self.warmup_learning_rate);
        }
        if cooldown_steps > 0 && schedule != Decay::Wsd {
            let expected = "0, unless optimizer.schedule is \"wsd\"";
            return refuse("optimizer.cooldown_steps", expected, cooldown_steps);
        }
        Ok(())
    }

    fn rule(&self, name: OptimizerName) -> UpdateRule {
        let &Self { beta1, beta2, epsilon, momentum, .. } = self;
        match name {
            OptimizerName::AdamW => UpdateRule::AdamW(Adam { beta1, beta2, epsilon }),
            OptimizerName::Adam => UpdateRule::Adam(Adam { beta1, beta2, epsilon }),
            OptimizerName::Sgd => UpdateRule::Sgd { momentum },
            OptimizerName::Lion => UpdateRule::Lion { beta1, beta2 },
        }
    }

    /// The optimizer as a value.
    pub(super) fn optimizer(&self) -> Optimizer {
        let clip = if self.max_grad_norm == 0.0 { f32::INFINITY } else { self.max_grad_norm };
        Optimizer { rule: self.rule(self.name), clip }
    }

    /// The learning rate of a run of `steps` as a value.
    pub(crate) fn schedule(&self, steps: u32) -> Schedule {
        let or = |value: u32, otherwise| if value == 0 { otherwise } else { value };
        let decay_steps = or(self.decay_steps, steps);
        Schedule {
            peak: self.learning_rate,
            floor: self.min_learning_rate,
            warmup_start: self.warmup_learning_rate,
            warmup_steps: self.warmup_steps,
            decay_steps,
            decay: self.schedule,
            cooldown_steps: or(self.cooldown_steps, decay_steps.div_ceil(10)),
        }
    }
}

/// An optimizer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerName {
    /// Adam with decoupled weight decay.
    #[default]
    AdamW,
    /// Adam with L2 regularization.
    Adam,
    /// Stochastic gradient descent with momentum and L2 regularization.
    Sgd,
    /// Lion, with decoupled weight decay.
    Lion,
}

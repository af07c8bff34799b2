//! Plain records of dense operations and of an optimizer step, shared by every backend.
//!
//! A record holds numbers only: no pointers, no views, no device handles.

use crate::philox::{Site, Stream};

/// The nonlinearity of a feed-forward layer, H = act(Z).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum Activation {
    /// GELU in its tanh form: `z/2 (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3)))`.
    Gelu,
    /// GELU: `z/2 (1 + erf(z / sqrt(2)))`.
    GeluErf,
    /// GELU_tanh(first half of the columns) times the second half.
    Geglu,
    /// SiLU(first half of the columns) times the second half.
    Swiglu,
    /// `tanh(z)`.
    Tanh,
    /// `max(z, 0)`, with slope 0 at 0; NaN has slope NaN.
    Relu,
}

impl Activation {
    /// Every activation.
    pub const ALL: [Self; 6] =
        [Self::Gelu, Self::GeluErf, Self::Geglu, Self::Swiglu, Self::Tanh, Self::Relu];

    /// Columns of Z per column of H: 2 for the gated activations, 1 for the others.
    #[must_use]
    pub const fn columns_in(self) -> usize {
        match self {
            Self::Gelu | Self::GeluErf | Self::Tanh | Self::Relu => 1,
            Self::Geglu | Self::Swiglu => 2,
        }
    }
}

/// Which keys a query attends to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionMask {
    /// Query i attends to keys `0..=i + (keys - queries)`.
    Causal,
    /// Every query attends to every key.
    Full,
}

/// The geometry of multi-head attention. Queries and outputs are `[batch * queries, heads *
/// head_dim]`, keys and values `[batch * keys, heads * head_dim]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: usize,
    /// Attention heads.
    pub heads: usize,
    /// Queries per sequence.
    pub queries: usize,
    /// Keys per sequence.
    pub keys: usize,
    /// Which keys a query attends to.
    pub mask: AttentionMask,
}

impl AttentionShape {
    /// 32-bit words with a bit for each query and key of a head, in tiles of 64 by 64.
    #[must_use]
    pub const fn tile_words(self) -> usize {
        self.queries.div_ceil(64) * self.keys.div_ceil(64) * (64 * 64 / 32)
    }
}

/// Inverted dropout (Srivastava et al., JMLR 15, 2014): element e is kept when its uniform is at
/// least `p`, and then scaled by `1 / (1 - p)`.
///
/// The uniform is word `e % 4` of call `e / 4` of the stream at `site`, so a backward pass can draw
/// the same numbers again. At most 2^34 elements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// Probability of zero, in `[0, 1)`; from 1 on, results are not finite.
    pub p: f32,
    /// Which random stream the uniforms come from.
    pub site: Site,
}

impl Dropout {
    /// Elements whose `word >> 8` is at least this are kept; 0, which keeps all, unless `p < 1`.
    #[must_use]
    pub fn least(&self) -> u32 {
        // The product with a power of two is exact.
        let least = if self.p < 1.0 { self.p * (1 << 24) as f32 } else { 0.0 };
        least as u32 + u32::from((least as u32 as f32) < least)
    }

    /// The factor that kept elements are multiplied by; infinite unless `p < 1`.
    #[must_use]
    pub fn scale(&self) -> f32 {
        if self.p < 1.0 { 1.0 / (1.0 - self.p) } else { f32::INFINITY }
    }
}

/// Whether a result replaces what the output holds or is added to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accumulate {
    /// The output is overwritten and never read.
    Overwrite,
    /// The result is added to the output.
    Add,
}

/// An optimizer with global-norm clipping.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Optimizer {
    /// How a gradient changes a weight.
    pub rule: UpdateRule,
    /// Largest gradient norm: gradients are scaled by `min(1, clip / (norm + 1e-6))`. Infinity
    /// never clips.
    pub clip: f32,
}

/// How a gradient g, clipped and with masked decay added, changes a weight w. A rule with coupled
/// weight decay adds `weight_decay w` to g; one with decoupled weight decay subtracts
/// `lr weight_decay w` from w.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum UpdateRule {
    /// [`Adam`] with decoupled weight decay (Loshchilov and Hutter, "Decoupled weight decay
    /// regularization", ICLR 2019).
    AdamW(Adam),
    /// [`Adam`] with coupled weight decay, L2 regularization.
    Adam(Adam),
    /// Stochastic gradient descent with momentum and coupled weight decay, as in PyTorch, without
    /// dampening and without Nesterov's variant: `m = momentum m + g`, `w = w - lr m`.
    Sgd {
        /// Decay rate of the sum of gradients, in `[0, 1)`.
        momentum: f32,
    },
    /// Lion with decoupled weight decay (Chen et al., "Symbolic discovery of optimization
    /// algorithms", NeurIPS 2023, arXiv 2302.06675): `w = w - lr sign(beta1 m + (1 - beta1) g)`,
    /// then `m = beta2 m + (1 - beta2) g`. The sign of 0 is 0.
    Lion {
        /// The share of m in the step, in `[0, 1)`.
        beta1: f32,
        /// Decay rate of m, in `[0, 1)`.
        beta2: f32,
    },
}

/// The hyperparameters of Adam (Kingma and Ba, "Adam: a method for stochastic optimization", ICLR
/// 2015).
///
/// ```text
/// m = beta1 m + (1 - beta1) g
/// v = beta2 v + (1 - beta2) g^2
/// w = w - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon)
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adam {
    /// Decay rate of the first moment, in `[0, 1)`.
    pub beta1: f32,
    /// Decay rate of the second moment, in `[0, 1)`; 1 freezes one that is not zero.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
}

impl UpdateRule {
    /// The hyperparameters of a rule that keeps a second moment.
    #[must_use]
    pub const fn adam(&self) -> Option<Adam> {
        match *self {
            Self::AdamW(adam) | Self::Adam(adam) => Some(adam),
            Self::Sgd { .. } | Self::Lion { .. } => None,
        }
    }

    /// A factor of weight decay as the term of w in the gradient, and as the one beside the step.
    #[must_use]
    pub const fn placed(&self, weight_decay: f32) -> [f32; 2] {
        match self {
            Self::AdamW(_) | Self::Lion { .. } => [0.0, weight_decay],
            Self::Adam(_) | Self::Sgd { .. } => [weight_decay, 0.0],
        }
    }
}

impl Optimizer {
    /// The factor that clips gradients of this norm.
    #[must_use]
    pub fn gradient_scale(&self, norm: f32) -> f32 {
        (self.clip / (norm + 1e-6)).min(1.0)
    }
}

/// Where pruned weights are pulled towards zero, and the decay factor lambda.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MaskedDecay {
    /// No masked decay.
    None,
    /// `g + lambda (1 - mask) w`, after clipping and before the moments, so Adam normalizes it (the
    /// paper's equation 10).
    OnGradients(f32),
    /// `w - lr lambda (1 - mask) w`, beside the optimizer's step.
    OnWeights(f32),
}

impl MaskedDecay {
    /// lambda, if there is masked decay.
    #[must_use]
    pub const fn lambda(self) -> Option<f32> {
        match self {
            Self::None => None,
            Self::OnGradients(lambda) | Self::OnWeights(lambda) => Some(lambda),
        }
    }

    /// lambda as the term of a pruned w in the gradient, and as the one beside the step.
    #[must_use]
    pub const fn placed(self) -> [f32; 2] {
        match self {
            Self::None => [0.0, 0.0],
            Self::OnGradients(lambda) => [lambda, 0.0],
            Self::OnWeights(lambda) => [0.0, lambda],
        }
    }
}

/// The numbers that change from step to step. On a device they live in device memory, so a captured
/// CUDA graph can be replayed with new values.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepState {
    /// Seed of the run.
    pub seed: u64,
    /// The current optimizer step, from 1.
    pub step: u32,
    /// The global micro-step within the optimizer step, from 0.
    pub micro_step: u32,
    /// Learning rate of this optimizer step.
    pub learning_rate: f32,
    /// Adam's `1 - beta^step`, for the first and the second moment. Adam divides by them: with the
    /// default, 0, weights become NaN.
    pub bias_corrections: [f32; 2],
    /// Factor on the summed loss of the micro-batch before its gradient is taken.
    pub loss_scale: f32,
}

impl StepState {
    /// The random stream of a site in this step.
    #[must_use]
    pub const fn stream(&self, site: Site) -> Stream {
        Stream::new(self.seed, site, self.micro_step, self.step)
    }
}

/// The quantity in a training step that was not finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NonFinite {
    /// The loss of a micro-batch.
    Loss,
    /// A gradient: the first row of the optimizer's table that has one.
    Gradient(usize),
    /// The norm of all gradients, although every gradient is finite.
    Norm,
}

#[cfg(test)]
mod tests {
    use super::Dropout;
    use crate::philox::{Purpose, Site, uniform};

    #[test]
    fn the_least_kept_word_and_the_factor_of_dropout() {
        let of = |p| Dropout { p, site: Site::new(Purpose::Dropout, 0) };
        for p in [0.0, f32::MIN_POSITIVE, 1e-9, 0.1, 0.25, 0.625, 1.0 - f32::EPSILON] {
            let least = of(p).least();
            assert!(uniform(least << 8) >= p, "{p}");
            assert!(least == 0 || uniform((least - 1) << 8) < p, "{p}");
            assert_eq!(of(p).scale(), 1.0 / (1.0 - p));
        }
        for p in [1.0, 1.5, f32::INFINITY, f32::NAN] {
            assert_eq!((of(p).least(), of(p).scale()), (0, f32::INFINITY), "{p}");
        }
    }
}

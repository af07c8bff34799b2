//! What a run costs before it runs: parameters, memory and floating-point operations, from its recipe alone.
//!
//! Invariant: memory is what the CPU backend allocates, to the byte (a test compares them). Deliberately absent: speeds.

use crate::{
    method::Method,
    model::gpt2::{Gpt2Shape, HEAD_ROWS, Sparsify},
    nn::linear24::Bias,
    trainer::Recipe,
};

/// The cost of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "run", derive(serde::Serialize))]
pub struct Estimate {
    /// All parameters.
    pub parameters: u64,
    /// Those that masks prune.
    pub sparsifiable: u64,
    /// Bytes of weights.
    pub weight_bytes: u64,
    /// Bytes of gradients.
    pub gradient_bytes: u64,
    /// Bytes of Adam's moments.
    pub moment_bytes: u64,
    /// Bytes of masks and pruned operands.
    pub sparse_bytes: u64,
    /// Bytes of activations and scratch for one micro-batch.
    pub activation_bytes: u64,
    /// Tokens of one optimizer step.
    pub tokens_per_step: u64,
    /// Multiply-adds counted twice, of the products of one optimizer step, all dense.
    pub flops_per_step: f64,
    /// The share of them whose operand is 2:4 in a sparse phase.
    pub sparse_share: f64,
    /// Bytes of one checkpoint.
    pub checkpoint_bytes: u64,
}

impl Estimate {
    /// Bytes on the device, together.
    #[must_use]
    pub fn device_bytes(&self) -> u64 {
        self.weight_bytes + self.gradient_bytes + self.moment_bytes + self.sparse_bytes + self.activation_bytes
    }
}

/// The cost of a recipe.
#[must_use]
pub fn estimate(recipe: &Recipe) -> Estimate {
    let Gpt2Shape { layers, heads, width: d, ffn_width: f, context, vocabulary, activation, bias, sparsify } = recipe.model;
    let z = f * activation.width();
    let p = recipe.batch.sequences * recipe.batch.context;
    let vector = if bias == Bias::Present { 1 } else { 0 };

    let ffn = z * d + d * f;
    let projections = 4 * d * d;
    let vectors = 2 * d * (1 + vector) + (z + d + 4 * d) * vector;
    let parameters = layers * (ffn + projections + vectors) + (vocabulary + context) * d + d * (1 + vector);
    let sparsifiable = layers
        * match sparsify {
            Sparsify::Ffn => ffn,
            Sparsify::FfnAndAttention => ffn + projections,
        };

    let gradients24 = p * (z + d) + if sparsify == Sparsify::FfnAndAttention { 3 * p * d } else { 0 };
    // A mask and two for the flip rate, an eighth of a byte an element each; S(W).
    let sparse = 3 * sparsifiable / 8 + 4 * (sparsifiable + gradients24);
    let norm = 2 * p * d + 2 * p;
    let kept = layers * (2 * norm + 4 * p * d + heads * p + p * (z + f));
    let shared = norm + p * (9 * d + z) + 2 * p + 1 + recipe.accumulation.get() as usize + p.min(HEAD_ROWS) * vocabulary;

    let tokens = p as f64 * f64::from(recipe.accumulation.get());
    // Forward, dgrad and wgrad of each product; causal attention is half of 2 T d multiply-adds forward and 2.5 times that backward.
    let linear = 6.0 * (layers * (ffn + projections) + vocabulary * d) as f64;
    let attention = 7.0 * (layers * context * d) as f64;
    let flops = tokens * (linear + attention);
    Estimate {
        parameters: parameters as u64,
        sparsifiable: sparsifiable as u64,
        weight_bytes: 4 * parameters as u64,
        gradient_bytes: 4 * parameters as u64,
        moment_bytes: 8 * parameters as u64,
        sparse_bytes: sparse as u64,
        activation_bytes: 4 * (kept + shared) as u64,
        tokens_per_step: tokens as u64,
        flops_per_step: flops,
        sparse_share: if is_sparse(&recipe.method) { tokens * 6.0 * sparsifiable as f64 / flops } else { 0.0 },
        checkpoint_bytes: (12 * parameters + sparsifiable / 8) as u64,
    }
}

fn is_sparse(method: &Method) -> bool {
    method.phases.iter().any(|phase| phase.mask().is_some())
}

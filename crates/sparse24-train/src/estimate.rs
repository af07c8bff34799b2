//! What a run costs before it runs: parameters, memory and floating-point operations, from its
//! recipe alone.
//!
//! Invariant: memory is what the CPU backend allocates, to the byte (a test compares them).
//! Deliberately absent: speeds.

use sparse24_core::MaskKind;

use crate::{
    method::{DgradOperand, GradientOperand, Phase, PrunedOperands},
    model::gpt2::{Gpt2Shape, HEAD_ROWS, Recompute, Sparsify},
    nn::linear24::Bias,
    trainer::Recipe,
};

/// The cost of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
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
    /// The share of them whose operand is 2:4 in a sparse phase, on a device that multiplies so.
    pub sparse_share: f64,
    /// Bytes of one checkpoint's tensors, but for a few numbers.
    pub checkpoint_bytes: u64,
}

impl Estimate {
    /// Bytes on the device, together.
    #[must_use]
    pub fn device_bytes(&self) -> u64 {
        [self.gradient_bytes, self.moment_bytes, self.sparse_bytes, self.activation_bytes]
            .into_iter()
            .fold(self.weight_bytes, u64::saturating_add)
    }
}

/// The cost of a recipe.
#[must_use]
pub fn estimate(recipe: &Recipe) -> Estimate {
    let Gpt2Shape { activation, bias, sparsify, .. } = recipe.model;
    let Gpt2Shape { layers, heads, width, ffn_width, context, vocabulary, .. } = recipe.model;
    // Wide enough for products of three lengths of any configuration.
    let [layers, heads, d, f, context, vocabulary] =
        [layers, heads, width, ffn_width, context, vocabulary].map(|n| n as u128);
    let (sequences, accumulation) =
        (recipe.batch.sequences as u128, u128::from(recipe.accumulation.get()));
    let z = f * activation.width() as u128;
    let p = sequences * recipe.batch.context as u128;
    let vector = if bias == Bias::Present { 1 } else { 0 };

    let ffn = z * d + d * f;
    let projections = 4 * d * d;
    let vectors = 2 * d * (1 + vector) + (z + d + 4 * d) * vector;
    let parameters =
        layers * (ffn + projections + vectors) + (vocabulary + context) * d + d * (1 + vector);
    let (of_layer, rows) = match sparsify {
        Sparsify::Ffn => (ffn, z + d),
        Sparsify::FfnAndAttention => (ffn + projections, z + d + 4 * d),
    };
    let sparsifiable = layers * of_layer;

    let gradients24 =
        p * (z + d) + if sparsify == Sparsify::FfnAndAttention { 3 * p * d } else { 0 };
    let sampled = if recipe.method.samples() { gradients24 } else { 0 };
    // A mask is an eighth of a byte an element: two for the flip rate, and one for each S(W).
    let operands = recipe.method.pruned_operands() as u128;
    let sparse = (2 + operands) * sparsifiable / 8 + 4 * (operands * sparsifiable + sampled);
    // Two bytes per tile of a mask, and four per row for the order of dgrad's.
    let kept_masks = match recipe.method.pruned_operands() {
        PrunedOperands::None => 0,
        PrunedOperands::One => sparsifiable / 8,
        PrunedOperands::Two => 2 * (sparsifiable / 8) + 4 * layers * rows,
    };
    let watched = if recipe.method.watches_variance() { parameters } else { 0 };
    let norm = 2 * p * d + 2 * p;
    let block = 2 * norm + 4 * p * d + heads * p + p * (z + f);
    let kept = match recipe.recompute {
        Recompute::None => layers * block,
        Recompute::Blocks => layers * p * d + block,
    };
    let shared =
        norm + p * (9 * d + z) + 2 * p + 1 + accumulation + p.min(HEAD_ROWS as u128) * vocabulary;

    let tokens = (p * accumulation) as f64;
    // Forward, dgrad and wgrad of each product; causal attention is half of 2 T d multiply-adds
    // forward and 2.5 times that backward.
    let linear = 6.0 * (layers * (ffn + projections) + vocabulary * d) as f64;
    let attention = 7.0 * (layers * context * d) as f64;
    // Of a block, once more, all forward products but the last; of the last block nothing.
    let again = if recipe.recompute == Recompute::Blocks { layers - 1 } else { 0 };
    let recomputed = 2.0 * (again * (z * d + projections + context * d)) as f64;
    let flops = tokens * (linear + attention + recomputed);
    let recomputed_sparse = match sparsify {
        Sparsify::Ffn => again * z * d,
        Sparsify::FfnAndAttention => again * (z * d + projections),
    };
    let phase = recipe.method.sparse_phase();
    let [forward, dgrad, wgrad] =
        sparse_products(&phase).map(|is_sparse| if is_sparse { 2.0 } else { 0.0 });
    let sparse_flops = tokens
        * ((forward + dgrad + wgrad) * sparsifiable as f64 + forward * recomputed_sparse as f64);
    let narrow = |count: u128| u64::try_from(count).unwrap_or(u64::MAX);
    Estimate {
        parameters: narrow(parameters),
        sparsifiable: narrow(sparsifiable),
        weight_bytes: narrow(4 * parameters),
        gradient_bytes: narrow(4 * parameters),
        moment_bytes: narrow(8 * parameters + 4 * watched),
        sparse_bytes: narrow(sparse),
        activation_bytes: narrow(4 * (kept + shared)),
        tokens_per_step: narrow(p * accumulation),
        flops_per_step: flops,
        sparse_share: sparse_flops / flops,
        checkpoint_bytes: narrow(12 * parameters + kept_masks),
    }
}

/// Whether forward, dgrad and wgrad of a phase have a 2:4 operand.
fn sparse_products(phase: &Phase) -> [bool; 3] {
    let dgrad = match phase.dgrad {
        DgradOperand::Dense => false,
        DgradOperand::AsForward => phase.mask() == Some(MaskKind::Transposable),
        DgradOperand::Permuted => true,
    };
    [phase.mask().is_some(), dgrad, matches!(phase.wgrad, GradientOperand::Mvue(_))]
}

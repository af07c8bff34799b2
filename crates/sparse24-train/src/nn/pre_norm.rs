//! A transformer block whose half blocks normalize their input.
//!
//! ```text
//! x = x + drop(attention(norm_1(x)));  x = x + drop(ffn(norm_2(x)))
//! ```
//!
//! The residual stream stays in the norms: each adds the output of the half block before it.

use sparse24_core::{
    op::{Accumulate, Activation, AttentionMask, Dropout},
    philox::Site,
};

use super::{
    Attention, AttentionActivations, AttentionOperands, AttentionSpec, Bias, Builder, Ffn,
    FfnActivations, FfnSpec, Init, Norm, NormActivations, Pass, ProbabilityDropout, Sparsity,
    Streams,
};
use crate::{
    Result,
    backend::{DType, Region, Tensor},
};

/// Attention and a feed-forward block, each behind a norm.
#[derive(Debug)]
pub struct PreNormBlock {
    norms: [Norm; 2],
    attention: Attention,
    ffn: Ffn,
    /// Dropout of the outputs of attention and ffn.
    dropouts: [Site; 2],
    kept: PreNormActivations,
    is_recomputed: bool,
}

/// The declaration of the [`PreNormBlock`]s of a model.
#[derive(Debug, Clone, Copy)]
pub struct PreNormSpec {
    /// The beginning of all names, before the number of the block.
    pub prefix: &'static str,
    /// Names within a block: first norm, joint projection, projection back, second norm, the two
    /// feed-forward layers.
    pub names: [&'static str; 6],
    /// Features of the residual stream.
    pub d_model: usize,
    /// Attention heads; they divide d_model.
    pub heads: usize,
    /// Features between the feed-forward layers, after a gate.
    pub d_ff: usize,
    /// Between the feed-forward layers.
    pub activation: Activation,
    /// Which keys a query attends to.
    pub mask: AttentionMask,
    /// Biases of the norms, and of the linear layers.
    pub biases: [Bias; 2],
    /// Added to the variances of norms.
    pub epsilon: f32,
    /// The initial weights of layers that read a norm, and of layers whose output is added to the
    /// residual stream.
    pub init: [Init; 2],
    /// Whether masks may prune the projections of attention.
    pub sparsity: Sparsity,
}

impl PreNormSpec {
    fn attention<'a>(&self, names: &'a [String]) -> AttentionSpec<'a> {
        let &Self { d_model, heads, mask, biases: [_, bias], init, sparsity, .. } = self;
        let dropout = ProbabilityDropout::Present;
        AttentionSpec { names, d_model, heads, mask, bias, init, sparsity, dropout }
    }
}

/// Activations that a block keeps for its backward pass.
#[derive(Debug, Clone, Copy)]
pub struct PreNormActivations {
    norms: [NormActivations; 2],
    attention: AttentionActivations,
    ffn: FfnActivations,
}

/// Gradients of activations; all blocks of a model share them.
#[derive(Debug, Clone, Copy)]
pub struct PreNormGradients {
    /// The residual stream's.
    pub residual: Tensor,
    /// A norm output's.
    pub y: Tensor,
    /// That of a half block's output, where dropout makes it differ from the residual stream's.
    delta: Tensor,
    attention: AttentionOperands,
    ffn: FfnActivations,
}

/// The inputs of a block besides its stream.
#[derive(Debug, Clone, Copy, Default)]
pub struct BlockInputs {
    /// Tokens of each sequence that are no padding, u32 `[batch, 1]`.
    pub lengths: Option<Tensor>,
    /// Stochastic depth of the two half blocks.
    pub paths: [Option<Dropout>; 2],
}

impl PreNormActivations {
    /// Allocates them for a block that reads `x`.
    pub fn new(
        builder: &mut Builder<'_>,
        name: &str,
        spec: &PreNormSpec,
        x: Tensor,
    ) -> Result<Self> {
        let &PreNormSpec { d_model, d_ff, activation, .. } = spec;
        let of = |part: &str| format!("{name}.{part}");
        let names = ["joint", "back"].map(str::to_owned);
        let attention = spec.attention(&names);
        let norm_1 = NormActivations::new(builder, &of("norm_1"), x)?;
        let attention = AttentionActivations::new(builder, &of("attention"), &attention)?;
        let middle = builder.activation(&of("norm_2 x"), d_model)?;
        let norm_2 = NormActivations::new(builder, &of("norm_2"), middle)?;
        let ffn = FfnActivations::new(builder, &of("ffn"), d_ff, activation)?;
        Ok(Self { norms: [norm_1, norm_2], attention, ffn })
    }

    fn rows(self, pass: &Pass<'_>) -> Self {
        let norms = self.norms.map(|norm| norm.rows(pass));
        Self { norms, attention: self.attention.rows(pass), ffn: self.ffn.rows(pass) }
    }
}

impl PreNormGradients {
    /// Allocates them.
    pub fn new(builder: &mut Builder<'_>, spec: &PreNormSpec) -> Result<Self> {
        let &PreNormSpec { d_model: d, d_ff, activation, .. } = spec;
        let mut gradient = |(name, columns)| builder.activation(name, columns);
        let (residual, y, delta) =
            (gradient(("dresidual", d))?, gradient(("dy", d))?, gradient(("ddelta", d))?);
        let (q, o) = (gradient(("dqkv", 3 * d))?, gradient(("do", d))?);
        let z = gradient(("dz", d_ff * activation.columns_in()))?;
        let h = [builder.batch().tokens(), d_ff];
        let h = builder.tensor("dh", h, DType::Activation, Region::Scratch)?;
        let attention = AttentionOperands { q, kv: None, o };
        Ok(Self { residual, y, delta, attention, ffn: FfnActivations { z, h } })
    }
}

impl PreNormBlock {
    /// Allocates the parameters of block `layer`, which reads `x`, and its activations, unless it
    /// shares them with other blocks.
    pub fn new(
        builder: &mut Builder<'_>,
        spec: &PreNormSpec,
        layer: usize,
        x: Tensor,
        shared: Option<PreNormActivations>,
    ) -> Result<Self> {
        let &PreNormSpec { prefix, d_model, d_ff, activation, epsilon, init, .. } = spec;
        let [norm_bias, bias] = spec.biases;
        let [norm_1, joint, back, norm_2, up, down] =
            spec.names.map(|part| format!("{prefix}.{layer}.{part}"));
        let norm_1 = Norm::new(builder, &norm_1, d_model, norm_bias, epsilon)?;
        let attention = Attention::new(builder, &spec.attention(&[joint, back]))?;
        let norm_2 = Norm::new(builder, &norm_2, d_model, norm_bias, epsilon)?;
        let ffn = FfnSpec { names: [up, down], d_model, d_ff, activation, bias, init };
        let ffn = Ffn::new(builder, ffn)?;
        let dropouts = [builder.dropout_site(), builder.dropout_site()];
        let kept = match shared {
            None => PreNormActivations::new(builder, &format!("{prefix}.{layer}"), spec, x)?,
            Some(PreNormActivations { norms: [norm_1, norm_2], attention, ffn }) => {
                let norms = [NormActivations { x, ..norm_1 }, norm_2];
                PreNormActivations { norms, attention, ffn }
            }
        };
        Ok(Self { norms: [norm_1, norm_2], attention, ffn, dropouts, kept, is_recomputed: false })
    }

    /// A block of whose activations later blocks overwrite all but its input, so that the backward
    /// pass computes them again.
    #[must_use]
    pub fn recomputed(self) -> Self {
        Self { is_recomputed: true, ..self }
    }

    /// Leaves the block's output in `delta`, to be added to the stream that it returns. `stream` is
    /// the stream before `delta` is added; none for a first block that nothing is added to.
    pub fn forward(
        &self,
        pass: &mut Pass<'_>,
        stream: Option<Tensor>,
        delta: Tensor,
        inputs: BlockInputs,
    ) -> Result<Tensor> {
        let kept = self.kept.rows(pass);
        self.forward_kept(pass, stream, delta, inputs)?;
        self.ffn.forward_down(pass, kept.ffn, delta)?;
        self.drop(pass, 1, delta, inputs)?;
        Ok(kept.norms[1].x)
    }

    /// Everything that the backward pass reads.
    fn forward_kept(
        &self,
        pass: &mut Pass<'_>,
        stream: Option<Tensor>,
        delta: Tensor,
        inputs: BlockInputs,
    ) -> Result {
        let PreNormActivations { norms: [kept_1, kept_2], attention, ffn } = self.kept.rows(pass);
        let [norm_1, norm_2] = &self.norms;
        match stream {
            None => norm_1.forward(pass, kept_1)?,
            Some(stream) => norm_1.forward_residual(pass, stream, delta, kept_1)?,
        }
        let streams = Streams { x: kept_1.y, memory: None, lengths: inputs.lengths };
        self.attention.forward(pass, streams, attention, delta)?;
        self.drop(pass, 0, delta, inputs)?;
        norm_2.forward_residual(pass, kept_1.x, delta, kept_2)?;
        self.ffn.forward_up(pass, kept_2.y, ffn)
    }

    /// Turns the gradient of the residual stream from that of the block's output into that of its
    /// input. `delta` is overwritten.
    pub fn backward(
        &self,
        pass: &mut Pass<'_>,
        gradients: &PreNormGradients,
        delta: Tensor,
        inputs: BlockInputs,
    ) -> Result {
        if self.is_recomputed {
            self.forward_kept(pass, None, delta, inputs)?;
        }
        let PreNormActivations { norms: [kept_1, kept_2], attention, ffn } = self.kept.rows(pass);
        let [norm_1, norm_2] = &self.norms;
        let [dresidual, dy] = [gradients.residual, gradients.y].map(|buffer| pass.rows(buffer));
        let dffn = self.before_drop(pass, 1, gradients, inputs)?;
        self.ffn.backward(pass, kept_2.y, ffn, dffn, gradients.ffn.rows(pass), dy)?;
        norm_2.backward(pass, dy, kept_2, dresidual, Accumulate::Add)?;
        let dattention = self.before_drop(pass, 0, gradients, inputs)?;
        let attention = (attention, gradients.attention.rows(pass));
        let streams = Streams { x: kept_1.y, memory: None, lengths: inputs.lengths };
        self.attention.backward(pass, streams, attention, dattention, dy, None)?;
        norm_1.backward(pass, dy, kept_1, dresidual, Accumulate::Add)
    }

    /// Drops elements, then sequences, of the output of a half block.
    fn drop(&self, pass: &mut Pass<'_>, half: usize, delta: Tensor, inputs: BlockInputs) -> Result {
        pass.drop_in_place(delta, self.dropouts[half])?;
        inputs.paths[half].map_or(Ok(()), |path| pass.drop_sequences(delta, delta, path))
    }

    /// The gradient of a half block's output before what is dropped of it.
    fn before_drop(
        &self,
        pass: &mut Pass<'_>,
        half: usize,
        gradients: &PreNormGradients,
        inputs: BlockInputs,
    ) -> Result<Tensor> {
        let [d, ddelta] = [gradients.residual, gradients.delta].map(|buffer| pass.rows(buffer));
        let Some(path) = inputs.paths[half] else {
            return pass.before_dropout(d, ddelta, self.dropouts[half]);
        };
        pass.drop_sequences(d, ddelta, path)?;
        pass.drop_in_place(ddelta, self.dropouts[half])?;
        Ok(ddelta)
    }
}

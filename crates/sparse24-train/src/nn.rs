//! Layers: forward and backward written out, no tape.
//!
//! A layer holds handles to its parameters; a [`Pass`] says how it runs. Data flows one way: a
//! layer reads activations that its caller owns and writes activations that its caller owns.
//! Allocations and operations return the errors of the backend.

use sparse24_core::{
    op::{Accumulate, Dropout},
    philox::Site,
};

use crate::{
    Result,
    backend::{
        Backend, Op, Stage, Tensor,
        op::{DropSequences, DropoutOp},
    },
    method::Phase,
};

mod attention;
mod builder;
mod embedding;
mod ffn;
mod head;
mod linear24;
mod norm;
mod parameter;
mod patch_embedding;
mod pre_norm;
mod sequence_head;
mod sinusoids;
mod span_head;
mod target_rows;

pub use attention::{
    Attention, AttentionActivations, AttentionOperands, AttentionSpec, ProbabilityDropout, Streams,
};
pub use builder::{BatchShape, Builder};
pub use embedding::{Embedding, Sharing};
pub use ffn::{Ffn, FfnActivations, FfnSpec};
pub(crate) use head::no_text;
pub use head::{Head, HeadBuffers, Prediction, PredictionHead};
pub use linear24::{Linear24, LinearSpec, Through};
pub use norm::{Norm, NormActivations};
pub use parameter::{
    Bias, ConstantValue, DecayTable, Handle, Init, NoWeightDecay, Parameter, ParameterSpec,
    Parameters, Pruned, Role, Sparsity,
};
pub use patch_embedding::{PatchEmbedding, Patches};
pub use pre_norm::{BlockInputs, PreNormActivations, PreNormBlock, PreNormGradients, PreNormSpec};
pub use sequence_head::{SequenceHead, SequenceHeadSpec};
pub use sinusoids::{ScaledSinusoids, fixed_sinusoid};
pub use span_head::SpanHead;
pub use target_rows::TargetRows;

/// How a forward or backward pass runs.
pub struct Pass<'a> {
    /// The device.
    pub backend: &'a mut dyn Backend,
    /// The operands of the products.
    pub phase: &'a Phase,
    /// Size of the batch.
    pub batch: BatchShape,
    /// Probability of dropout; 0 when evaluating.
    pub dropout: f32,
    /// Whether parameter gradients are overwritten or added to.
    pub accumulate: Accumulate,
    /// Called after every operation; absent while a graph is captured.
    pub watch: Option<&'a mut Watch<'a>>,
    /// The gradients that the pass has [written](Op::gradients).
    pub written: usize,
    /// The stages of the exchange of gradients that it will [start](Backend::start_reduce).
    pub stages: &'a [Stage],
}

/// Called after an operation, with the backend to look at its operands.
pub type Watch<'a> = dyn FnMut(&mut dyn Backend, &Op<'_>) -> Result + 'a;

impl Pass<'_> {
    /// p: tokens in the batch.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.batch.tokens()
    }

    /// The rows of a buffer that this batch uses.
    #[must_use]
    pub fn rows(&self, buffer: Tensor) -> Tensor {
        buffer.first_rows(self.tokens())
    }

    /// Executes one operation.
    pub fn run<'op>(&mut self, op: impl Into<Op<'op>>) -> Result {
        self.sequence(&[op.into()])
    }

    /// Executes operations that a backend may fuse, see [`Backend::sequence`].
    pub fn sequence(&mut self, ops: &[Op<'_>]) -> Result {
        match &mut self.watch {
            None => self.backend.sequence(ops)?,
            Some(watch) => ops.iter().try_for_each(|op| {
                self.backend.execute(op)?;
                watch(self.backend, op)
            })?,
        }
        self.written += ops.iter().flat_map(Op::gradients).count();
        let due = self.stages.iter().take_while(|stage| stage.after <= self.written).count();
        let due = self.stages.split_off(..due).expect("a part");
        if due.is_empty() { Ok(()) } else { self.backend.start_reduce(due) }
    }

    /// The dropout at a site; none when its probability is 0.
    #[must_use]
    pub fn dropout_at(&self, site: Site) -> Option<Dropout> {
        (self.dropout > 0.0).then_some(Dropout { p: self.dropout, site })
    }

    /// The gradient before a dropout, for a gradient `d` that also flows past it: `d` itself
    /// without dropout, else `out`.
    pub fn before_dropout(&mut self, d: Tensor, out: Tensor, site: Site) -> Result<Tensor> {
        let Some(dropout) = self.dropout_at(site) else { return Ok(d) };
        self.run(DropoutOp { x: d, out, dropout })?;
        Ok(out)
    }

    /// Drops elements of `x`, or of its gradient, in place.
    pub fn drop_in_place(&mut self, x: Tensor, site: Site) -> Result {
        match self.dropout_at(site) {
            Some(dropout) => self.run(DropoutOp { x, out: x, dropout }),
            None => Ok(()),
        }
    }

    /// out = `x`, or its gradient, without the whole sequences that are dropped.
    pub fn drop_sequences(&mut self, x: Tensor, out: Tensor, dropout: Dropout) -> Result {
        let sequence_length = self.batch.sequence_length;
        self.run(DropSequences { x, out, sequence_length, dropout })
    }
}

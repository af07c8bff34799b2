//! DeiT (Touvron et al. 2021, arXiv 2012.12877), a vision transformer without a distillation token:
//! pre-LN blocks over patches, a class token, learned positions.
//!
//! ```text
//! x = (class token, patches W^T + b) + positions
//! per block:  x = x + path(attention(norm_1(x)));  x = x + path(mlp(norm_2(x)))
//! logits = norm(class token of x) head^T + bias
//! ```
//!
//! `path` is stochastic depth: it keeps or drops whole images, at rates that grow linearly from 0
//! in the first block to `drop_path` in the last. The loss is that of two mixed targets, smoothed;
//! an evaluation has the plain cross-entropy. Parameter names are timm's, but the class token and
//! the bias of the patches are one table, see [`PatchEmbedding`].

use sparse24_core::{
    op::{Accumulate, Activation, AttentionMask, Dropout},
    philox::Site,
};

use super::{Extents, Model, Sparsify};
use crate::{
    Result,
    backend::{Backend, Tensor},
    limits,
    nn::{
        Bias, BlockInputs, Builder, Init, Norm, NormActivations, Pass, PatchEmbedding, Patches,
        PreNormBlock, PreNormGradients, PreNormSpec, Prediction, PredictionHead, SequenceHead,
        SequenceHeadSpec,
    },
    objective::Batch,
};

/// The size of a DeiT, and its regularization.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeitSpec {
    /// Blocks.
    pub layers: usize,
    /// Attention heads; they divide d_model.
    pub heads: usize,
    /// Features of the residual stream.
    pub d_model: usize,
    /// Features between the feed-forward layers, after a gate.
    pub d_ff: usize,
    /// Pixels of a side of an image.
    pub image_size: usize,
    /// Pixels of a side of a patch; they divide those of an image.
    pub patch_size: usize,
    /// Classes.
    pub classes: usize,
    /// Between the feed-forward layers.
    pub activation: Activation,
    /// Which linear layers masks may prune.
    pub sparsify: Sparsify,
    /// Probability in `[0, 1)` that the last block drops a half block of an image.
    pub drop_path: f32,
    /// Label smoothing of the training loss, in `[0, 1)`.
    pub label_smoothing: f32,
}

/// The parameter whose rows are the classes.
pub const CLASS_TABLE: &str = "head.weight";

/// The initial weights.
const INIT: Init = Init::Normal(0.02);

/// Added to the variances of norms.
const EPSILON: f32 = 1e-6;

impl DeitSpec {
    /// How images are cut.
    #[must_use]
    pub fn patches(&self) -> Patches {
        let Self { image_size, patch_size, .. } = *self;
        let side = image_size.checked_div(patch_size).unwrap_or(0);
        let [count, pixels] = [side, patch_size].map(|side| side.saturating_mul(side));
        Patches { count, pixels }
    }

    pub(super) fn extents(&self) -> Extents {
        let &Self { layers, heads, d_model, d_ff, activation, .. } = self;
        let longest = self.patches().count.saturating_add(1);
        Extents { layers, heads, d_model, d_ff, longest, activation, bias: Bias::Present }
    }

    /// Refuses images that are no whole patches, sequences of another length, and rates that are
    /// none.
    pub(super) fn check(&self, sequence_length: usize) -> Result {
        let &Self { image_size, patch_size, drop_path, label_smoothing, .. } = self;
        let longest = self.patches().count.saturating_add(1);
        let is_divided = patch_size > 0 && image_size > 0 && image_size.is_multiple_of(patch_size);
        let expected = format!("a divisor of model.image_size {image_size}");
        limits::check("model.patch_size", is_divided, &expected, patch_size)?;
        let is_whole = sequence_length == longest;
        let expected = format!("{longest}, a class token and the patches of an image");
        limits::check("model.sequence_length", is_whole, &expected, sequence_length)?;
        limits::share("model.drop_path", drop_path)?;
        limits::share("model.label_smoothing", label_smoothing)
    }

    fn block(&self) -> PreNormSpec {
        let &Self { d_model, heads, d_ff, activation, .. } = self;
        PreNormSpec {
            prefix: "blocks",
            names: ["norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2"],
            d_model,
            heads,
            d_ff,
            activation,
            mask: AttentionMask::Full,
            biases: [Bias::Present; 2],
            epsilon: EPSILON,
            init: [INIT; 2],
            sparsity: self.sparsify.attention(),
        }
    }
}

/// The model with its activations.
#[derive(Debug)]
pub struct Deit {
    embedding: PatchEmbedding,
    blocks: Vec<PreNormBlock>,
    /// Stochastic depth of the two half blocks of each block.
    paths: Vec<[Dropout; 2]>,
    norm: Norm,
    head: SequenceHead,
    /// The first part of the embedded tokens.
    embedded: Tensor,
    /// Output of a half block, until the next norm adds it.
    delta: Tensor,
    last: NormActivations,
    dropout: Site,
    gradients: PreNormGradients,
}

/// Whether half blocks of an image may be dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Depth {
    /// In training.
    Stochastic,
    /// In an evaluation.
    Full,
}

impl Deit {
    /// Allocates parameters and activations.
    ///
    /// # Errors
    /// Sparsifiable shapes must consist of 4x4 tiles.
    pub fn new(builder: &mut Builder<'_>, spec: DeitSpec) -> Result<Self> {
        let d_model = spec.d_model;
        let embedding = PatchEmbedding::new(builder, spec.patches(), d_model, INIT)?;
        let dropout = builder.dropout_site();
        let [embedded, delta] = ["embedded", "delta"].map(|name| builder.activation(name, d_model));
        let (embedded, delta) = (embedded?, delta?);
        let blocks = (0..spec.layers).map(|layer| {
            let x = builder.activation(&format!("blocks.{layer}.x"), d_model)?;
            PreNormBlock::new(builder, &spec.block(), layer, x, None)
        });
        let blocks = blocks.collect::<Result<Vec<_>, _>>()?;
        let norm = Norm::new(builder, "norm", d_model, Bias::Present, EPSILON)?;
        let x = builder.activation("norm x", d_model)?;
        let last = NormActivations::new(builder, "norm", x)?;
        let head = SequenceHeadSpec {
            name: "head",
            bias: Bias::Present,
            pooler: None,
            d_model,
            init: INIT,
            prediction: Prediction::Class(spec.classes),
        };
        let head = SequenceHead::new(builder, head)?.mixed(builder, spec.label_smoothing)?;
        let steps = spec.layers.saturating_sub(1).max(1) as f32;
        let paths = (0..spec.layers).map(|layer| {
            let p = spec.drop_path * layer as f32 / steps;
            [0, 1].map(|_| Dropout { p, site: builder.dropout_site() })
        });
        let paths = paths.collect();
        let gradients = PreNormGradients::new(builder, &spec.block())?;
        Ok(Self { embedding, blocks, paths, norm, head, embedded, delta, last, dropout, gradients })
    }

    /// The inputs of every block besides its stream: its stochastic depth.
    fn inputs(
        &self,
        depth: Depth,
    ) -> impl DoubleEndedIterator<Item = BlockInputs> + ExactSizeIterator {
        self.paths.iter().map(move |paths| BlockInputs {
            lengths: None,
            paths: paths.map(|path| (depth == Depth::Stochastic && path.p > 0.0).then_some(path)),
        })
    }

    /// The output of the final norm.
    fn at_depth(&self, pass: &mut Pass<'_>, depth: Depth) -> Result<Tensor> {
        let [embedded, delta] = [self.embedded, self.delta].map(|buffer| pass.rows(buffer));
        self.embedding.forward(pass, embedded, delta)?;
        let mut stream = embedded;
        if pass.dropout_at(self.dropout).is_some() {
            pass.drop_in_place(embedded, self.dropout)?;
            pass.drop_in_place(delta, self.dropout)?;
        }
        for (block, inputs) in self.blocks.iter().zip(self.inputs(depth)) {
            stream = block.forward(pass, Some(stream), delta, inputs)?;
        }
        let last = self.last.rows(pass);
        self.norm.forward_residual(pass, stream, delta, last)?;
        Ok(last.y)
    }
}

impl Model for Deit {
    fn upload(&self, backend: &mut dyn Backend, batch: &Batch) -> Result {
        let tokens = self.embedding.tokens();
        self.embedding.upload(backend, batch.targets.len() / tokens, &batch.pixels)?;
        self.head.upload_mixed(backend, &batch.second_targets, &batch.shares)?;
        self.head.upload(backend, &batch.targets, &[])
    }

    fn train(&self, pass: &mut Pass<'_>) -> Result {
        let x = self.at_depth(pass, Depth::Stochastic)?;
        let PreNormGradients { residual, y, .. } = self.gradients;
        let [dx, dy] = [residual, y].map(|buffer| pass.rows(buffer));
        self.head.loss_and_gradient(pass, x, dy)?;
        self.norm.backward(pass, dy, self.last.rows(pass), dx, Accumulate::Overwrite)?;
        for (block, inputs) in self.blocks.iter().zip(self.inputs(Depth::Stochastic)).rev() {
            block.backward(pass, &self.gradients, pass.rows(self.delta), inputs)?;
        }
        pass.drop_in_place(dx, self.dropout)?;
        self.embedding.backward(pass, dx)
    }

    fn forward(&self, pass: &mut Pass<'_>) -> Result<Tensor> {
        self.at_depth(pass, Depth::Full)
    }

    fn head(&self) -> &dyn PredictionHead {
        &self.head
    }
}

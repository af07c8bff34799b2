//! Models: layers of [`crate::nn`] in an order, forward and backward.
//!
//! A new model is one file here, one variant of [`ModelSpec`], and a table of names in the crate
//! that imports and exports weights.

use sparse24_core::op::Activation;

use crate::{
    Error, Result,
    backend::{Backend, Extent, Requirement, ShapeOnly, Tensor},
    limits::{self, MOST, MOST_LAYERS, share},
    method::Method,
    nn::{
        BatchShape, Bias, Builder, ParameterSpec, Pass, Prediction, PredictionHead, Sparsity,
        no_text,
    },
    objective::{Batch, Inputs},
    optim::UpdateRule,
};

mod add_norm;
pub mod bert;
pub mod crammed_bert;
pub mod deit;
pub mod gpt2;
mod masked_head;
pub mod transformer;

pub use bert::BertSpec;
pub use deit::DeitSpec;
pub use gpt2::Gpt2Spec;
pub use transformer::{DecodingStep, TransformerSpec};

/// A model on a device. Parameters are declared when it is built, see [`Builder::parameter`].
pub trait Model: Send {
    /// Copies a [complete](Batch::complete) batch to the device, for the calls that follow.
    fn upload(&self, backend: &mut dyn Backend, batch: &Batch) -> Result;

    /// Forward and backward of the uploaded batch: [`Model::loss`], and the gradients of the step's
    /// loss scale times it.
    fn train(&self, pass: &mut Pass<'_>) -> Result;

    /// Forward of the uploaded batch up to its head, which reads the result `[p, d]`; not that of
    /// training, if it differs.
    fn forward(&self, pass: &mut Pass<'_>) -> Result<Tensor>;

    /// The head.
    fn head(&self) -> &dyn PredictionHead;

    /// Forward of the uploaded batch: [`Model::loss`].
    fn evaluate(&self, pass: &mut Pass<'_>) -> Result {
        let x = self.forward(pass)?;
        self.head().evaluate(pass, x)
    }

    /// The summed loss of the last batch `[1, 1]`.
    fn loss(&self) -> Tensor {
        self.head().loss()
    }

    /// The logits after the last token of one sequence.
    ///
    /// # Errors
    /// [`Error::Setting`] for a model that does not generate text; errors from the backend.
    fn next_logits(&self, _: &mut Pass<'_>, _: &[u32]) -> Result<Tensor> {
        Err(no_text())
    }

    /// Encodes the sources of the uploaded batch, for [`Model::decode`].
    ///
    /// # Errors
    /// [`Error::Setting`] for a model that does not translate; errors from the backend.
    fn encode(&self, _: &mut Pass<'_>) -> Result {
        Err(no_translation())
    }

    /// The logits `[hypotheses, V]` after one more token of each hypothesis.
    ///
    /// # Errors
    /// Errors of [`Model::encode`].
    fn decode(&self, _: &mut Pass<'_>, _: &DecodingStep<'_>) -> Result<Vec<f32>> {
        Err(no_translation())
    }

    /// The outputs of a fine-tuned model for the batch that was evaluated last: `[size, outputs]`,
    /// or `[p, 2]` of spans.
    ///
    /// # Errors
    /// [`Error::Setting`] for a model that is not fine-tuned; errors from the backend.
    fn outputs(&self, pass: &mut Pass<'_>) -> Result<Vec<f32>> {
        self.head().outputs(pass)
    }
}

pub(crate) fn no_translation() -> Error {
    Error::setting("model.kind", "this model does not translate")
}

/// A model as numbers: what a recipe holds.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum ModelSpec {
    /// GPT-2.
    Gpt2(Gpt2Spec),
    /// BERT.
    Bert(BertSpec),
    /// The crammed BERT.
    CrammedBert(BertSpec),
    /// DeiT.
    Deit(DeitSpec),
    /// The encoder-decoder Transformer.
    Transformer(TransformerSpec),
}

impl ModelSpec {
    /// Allocates parameters and activations.
    ///
    /// # Errors
    /// [`Error::Setting`] for a size beyond [`limits`]; errors of the allocations; sparsifiable
    /// shapes must consist of 4x4 tiles.
    pub fn build(
        &self,
        builder: &mut Builder<'_>,
        checkpointing: ActivationCheckpointing,
    ) -> Result<Box<dyn Model>> {
        self.check_sizes()?;
        match self {
            Self::Gpt2(spec) => Ok(Box::new(gpt2::Gpt2::new(builder, *spec, checkpointing)?)),
            Self::Bert(spec) => Ok(Box::new(bert::Bert::new(builder, *spec)?)),
            Self::CrammedBert(spec) => {
                Ok(Box::new(crammed_bert::CrammedBert::new(builder, *spec)?))
            }
            Self::Deit(spec) => Ok(Box::new(deit::Deit::new(builder, *spec)?)),
            Self::Transformer(spec) => Ok(Box::new(transformer::Transformer::new(builder, *spec)?)),
        }
    }

    /// Token ids; of a model of images, the classes.
    #[must_use]
    pub fn vocabulary(&self) -> usize {
        match self {
            Self::Deit(spec) => spec.classes,
            Self::Gpt2(spec) => spec.vocabulary,
            Self::Bert(spec) | Self::CrammedBert(spec) => spec.vocabulary,
            Self::Transformer(spec) => spec.vocabulary,
        }
    }

    /// The inputs that it reads.
    #[must_use]
    pub fn inputs(&self) -> Inputs {
        match self {
            Self::Gpt2(spec) if spec.prediction.is_none() => Inputs::Tokens,
            Self::Bert(_) => Inputs::Segments,
            Self::Gpt2(_) | Self::CrammedBert(_) => Inputs::Sequences,
            Self::Deit(DeitSpec { image_size: n, .. }) => {
                Inputs::Images(n.saturating_mul(*n).saturating_mul(3))
            }
            Self::Transformer(_) => Inputs::Translation,
        }
    }

    /// Whether it continues a text, see [`Model::next_logits`].
    #[must_use]
    pub fn generates(&self) -> bool {
        matches!(self, Self::Gpt2(spec) if spec.prediction.is_none())
    }

    /// The prediction that it is fine-tuned for, if it is; DeiT always has its classes.
    #[must_use]
    pub fn prediction(&self) -> Option<Prediction> {
        match self {
            Self::Gpt2(spec) => spec.prediction,
            Self::Deit(spec) => Some(Prediction::Class(spec.classes)),
            Self::Bert(spec) | Self::CrammedBert(spec) => spec.prediction,
            Self::Transformer(_) => None,
        }
    }

    /// Refuses sizes that are too large to count the model's memory.
    fn check_sizes(&self) -> Result {
        let Extents { layers, heads, d_model, d_ff, longest, .. } = self.extents();
        limits::size("model.layers", layers, MOST_LAYERS)?;
        limits::size("model.heads", heads, MOST)?;
        limits::size("model.d_model", d_model, MOST)?;
        limits::size("model.d_ff", d_ff, MOST)?;
        limits::size("model.sequence_length", longest, MOST)?;
        limits::size("the vocabulary", self.vocabulary(), u32::MAX as usize)
    }

    /// Refuses sizes of which no model can be built, for sequences of this length, and activation
    /// checkpointing that the model lacks.
    pub(crate) fn check(
        &self,
        sequence_length: usize,
        checkpointing: ActivationCheckpointing,
    ) -> Result {
        if !matches!(self, Self::Gpt2(_)) && checkpointing != ActivationCheckpointing::None {
            let problem = "this model keeps all activations; use \"none\"";
            return Err(Error::setting("model.activation_checkpointing", problem));
        }
        self.check_sizes()?;
        match self {
            Self::Deit(spec) => spec.check(sequence_length)?,
            Self::Transformer(spec) => share("model.label_smoothing", spec.label_smoothing)?,
            _ => {}
        }
        let Extents { d_model, heads, d_ff, longest, .. } = self.extents();
        let is_tiled = |size: usize| size > 0 && size.is_multiple_of(4);
        limits::check("model.heads", heads > 0, "at least 1", heads)?;
        let expected = format!("{TILED}, and of model.heads {heads}");
        limits::check("model.d_model", is_tiled(d_model), &expected, d_model)?;
        limits::check("model.d_ff", is_tiled(d_ff), TILED, d_ff)?;
        let expected = format!("a divisor of model.d_model {d_model}");
        limits::check("model.heads", d_model.is_multiple_of(heads), &expected, heads)?;
        let is_held = (1..=longest).contains(&sequence_length);
        let expected = format!("at least 1 and at most the model's {longest}");
        limits::check("model.sequence_length", is_held, &expected, sequence_length)?;
        let classes = self.prediction().map_or(1, Prediction::outputs);
        limits::check("the classes", classes > 0, "at least 1", classes)?;
        limits::check("the vocabulary", self.vocabulary() > 0, "an id", self.vocabulary())
    }

    /// The same model with another prediction, or with the head that it is pre-trained with.
    #[must_use]
    pub fn predicting(self, prediction: Option<Prediction>) -> Self {
        match self {
            Self::Gpt2(spec) => Self::Gpt2(Gpt2Spec { prediction, ..spec }),
            Self::Bert(spec) => Self::Bert(BertSpec { prediction, ..spec }),
            Self::CrammedBert(spec) => Self::CrammedBert(BertSpec { prediction, ..spec }),
            Self::Deit(spec) => match prediction {
                Some(Prediction::Class(classes)) => Self::Deit(DeitSpec { classes, ..spec }),
                _ => self,
            },
            Self::Transformer(spec) => Self::Transformer(spec),
        }
    }

    /// Its sizes.
    #[must_use]
    pub fn extents(&self) -> Extents {
        match self {
            Self::Gpt2(spec) => spec.extents(),
            Self::Deit(spec) => spec.extents(),
            Self::Bert(spec) | Self::CrammedBert(spec) => spec.extents(),
            Self::Transformer(spec) => spec.extents(),
        }
    }

    /// The declarations of all parameters, in order.
    ///
    /// # Errors
    /// [`Error::Semantics`] for a sparsifiable shape that does not consist of 4x4 tiles.
    pub fn parameters(&self) -> Result<Vec<ParameterSpec>> {
        let (mut backend, method) = (ShapeOnly::weightless(), Method::dense());
        let shape = BatchShape { size: 1, sequence_length: 1 };
        let rule = UpdateRule::Sgd { momentum: 0.0 };
        let mut builder = Builder::new(&mut backend, &method, &rule, shape, 0.0);
        self.build(&mut builder, ActivationCheckpointing::None)?;
        let parameters = builder.into_parameters();
        Ok(parameters.iter().map(|parameter| parameter.spec.clone()).collect())
    }

    /// Name and elements of every parameter that masks may prune, in order.
    ///
    /// # Errors
    /// Errors of [`Self::parameters`].
    pub fn sparsifiable(&self) -> Result<Vec<(String, u64)>> {
        let parameters = self.parameters()?.into_iter();
        let sparsifiable = parameters.filter(|spec| spec.sparsity == Sparsity::Sparsifiable);
        Ok(sparsifiable
            .map(|spec| (spec.name, spec.shape.map(|n| n as u64).iter().product()))
            .collect())
    }

    /// The sizes that a backend may limit, for batches of this shape.
    #[must_use]
    pub fn requirements(&self, batch: BatchShape, dropout: f32) -> Vec<Requirement> {
        let Extents { d_model, heads, d_ff, activation, .. } = self.extents();
        let product = |sizes: &[usize]| sizes.iter().fold(1_usize, |p, &n| p.saturating_mul(n));
        let tokens = product(&[batch.size, batch.sequence_length]);
        let columns_in = activation.columns_in();
        let gated = if columns_in > 1 { product(&[tokens, d_ff]) } else { 0 };
        let dropped = |sizes: &[usize]| if dropout > 0.0 { product(sizes) } else { 0 };
        let (stream, scores) =
            (dropped(&[tokens, d_model]), dropped(&[tokens, batch.sequence_length, heads]));
        let rows = [
            (Extent::NormWidth, "model.d_model", "the width of norms", d_model),
            (
                Extent::HeadDim,
                "model.heads",
                "the head dimension, model.d_model / model.heads,",
                d_model / heads.max(1),
            ),
            (Extent::RowWidth, "model.d_ff", "the feed-forward width", d_ff),
            (
                Extent::ProductColumns,
                "model.d_ff",
                "the number of columns into the activation",
                d_ff.saturating_mul(columns_in),
            ),
            (Extent::ProductColumns, "batch.size", "the tokens of a micro-batch", tokens),
            (Extent::GatedElements, "batch.size", "the gated activations of a micro-batch", gated),
            (Extent::DropoutElements, "batch.size", "the residual stream under dropout", stream),
            (Extent::DropoutElements, "batch.size", "the attention scores under dropout", scores),
        ];
        let of_patches = match self {
            Self::Deit(spec) => {
                let patches = product(&[batch.size, spec.patches().count]);
                let pixels = spec.patches().pixels.saturating_mul(3);
                vec![
                    (Extent::RowWidth, "model.patch_size", "the values of a patch", pixels),
                    (Extent::ProductColumns, "batch.size", "the patches of a micro-batch", patches),
                ]
            }
            _ => Vec::new(),
        };
        let rows = rows.into_iter().chain(of_patches);
        rows.map(|(extent, key, what, value)| Requirement { extent, key, what, value }).collect()
    }
}

/// The sizes of a transformer, whatever its architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extents {
    /// Blocks.
    pub layers: usize,
    /// Attention heads; they divide d_model.
    pub heads: usize,
    /// Features of the residual stream.
    pub d_model: usize,
    /// Features between the feed-forward layers, after a gate.
    pub d_ff: usize,
    /// Longest sequence.
    pub longest: usize,
    /// Between the feed-forward layers.
    pub activation: Activation,
    /// Biases of linear layers and norms.
    pub bias: Bias,
}

const TILED: &str = "a multiple of 4, for 4x4 tiles";

/// Which linear layers masks may prune.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "kebab-case"))]
pub enum Sparsify {
    /// The feed-forward layers.
    Ffn,
    /// The feed-forward layers and the attention projections.
    FfnAndAttention,
}

impl Sparsify {
    /// Whether masks may prune the attention projections.
    pub(crate) fn attention(self) -> Sparsity {
        match self {
            Self::Ffn => Sparsity::Dense,
            Self::FfnAndAttention => Sparsity::Sparsifiable,
        }
    }
}

/// Activation checkpointing: what the backward pass computes again instead of keeping it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "kebab-case"))]
pub enum ActivationCheckpointing {
    /// Nothing.
    #[default]
    None,
    /// A block's activations, from its input: a fifth to a third more arithmetic per step, the same
    /// bits, and the memory of one block instead of all.
    Blocks,
}

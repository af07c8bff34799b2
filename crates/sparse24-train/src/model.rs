//! Models: layers of [`crate::nn`] in an order, forward and backward.
//!
//! A new model is one file here, one variant of [`ModelSpec`], and a table of names in the crate
//! that imports and exports weights.

use crate::{
    Error,
    backend::{Backend, Requirement, ShapeOnly, Tensor},
    method::Method,
    nn::{BatchShape, Builder, ParameterSpec, Pass, Sparsity},
    objective::Batch,
};

pub mod gpt2;

pub use gpt2::Gpt2Spec;

/// A model on a device. Parameters are declared when it is built, see [`Builder::parameter`].
pub trait Model: Send {
    /// Copies a batch to the device, for the calls that follow.
    ///
    /// # Errors
    /// Errors of the uploads.
    fn upload(&self, backend: &mut dyn Backend, batch: &Batch) -> Result<(), Error>;

    /// Forward and backward of the uploaded batch: [`Model::loss`], and the gradients of the step's
    /// loss scale times it.
    ///
    /// # Errors
    /// Errors from the backend.
    fn train(&self, pass: &mut Pass<'_>) -> Result<(), Error>;

    /// Forward of the uploaded batch: [`Model::loss`].
    ///
    /// # Errors
    /// Errors from the backend.
    fn evaluate(&self, pass: &mut Pass<'_>) -> Result<(), Error>;

    /// The summed loss of the last batch `[1, 1]`.
    fn loss(&self) -> Tensor;

    /// The logits after the last token of one sequence.
    ///
    /// # Errors
    /// [`Error::Setting`] for a model that does not generate text; errors from the backend.
    fn next_logits(&self, _: &mut Pass<'_>, _: &[u32]) -> Result<Vec<f32>, Error> {
        Err(Error::Setting {
            key: "model.kind".to_owned(),
            problem: "this model does not generate text".to_owned(),
        })
    }
}

/// A model as numbers: what a recipe holds.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum ModelSpec {
    /// GPT-2.
    Gpt2(Gpt2Spec),
}

impl ModelSpec {
    /// Allocates parameters and activations.
    ///
    /// # Errors
    /// Errors of the allocations; sparsifiable shapes must consist of 4x4 tiles.
    pub fn build(
        &self,
        builder: &mut Builder<'_>,
        checkpointing: ActivationCheckpointing,
    ) -> Result<Box<dyn Model>, Error> {
        match self {
            Self::Gpt2(spec) => Ok(Box::new(gpt2::Gpt2::new(builder, *spec, checkpointing)?)),
        }
    }

    /// Token ids.
    #[must_use]
    pub fn vocabulary(&self) -> usize {
        match self {
            Self::Gpt2(spec) => spec.vocabulary,
        }
    }

    /// The declarations of all parameters, in order.
    ///
    /// # Errors
    /// [`Error::Semantics`] for a sparsifiable shape that does not consist of 4x4 tiles.
    pub fn parameters(&self) -> Result<Vec<ParameterSpec>, Error> {
        let (mut backend, method) = (ShapeOnly::weightless(), Method::dense());
        let shape = BatchShape { size: 1, sequence_length: 1 };
        let mut builder = Builder::new(&mut backend, &method, shape);
        self.build(&mut builder, ActivationCheckpointing::None)?;
        let parameters = builder.into_parameters();
        Ok(parameters.iter().map(|parameter| parameter.spec.clone()).collect())
    }

    /// Name and elements of every parameter that masks may prune, in order.
    ///
    /// # Errors
    /// Errors of [`Self::parameters`].
    pub fn sparsifiable(&self) -> Result<Vec<(String, u64)>, Error> {
        let parameters = self.parameters()?.into_iter();
        let sparsifiable = parameters.filter(|spec| spec.sparsity == Sparsity::Sparsifiable);
        Ok(sparsifiable
            .map(|spec| (spec.name, spec.shape.map(|n| n as u64).iter().product()))
            .collect())
    }

    /// The sizes that a backend may limit, for batches of this shape.
    #[must_use]
    pub fn requirements(&self, batch: BatchShape, dropout: f32) -> Vec<Requirement> {
        match self {
            Self::Gpt2(spec) => spec.requirements(batch, dropout),
        }
    }
}

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

//! Allocates parameters, activations and random sites for layers, in the order of the model.

use sparse24_core::philox::{Purpose, Site};

use super::parameter::{Bias, ConstantValue, Handle, ParameterSpec, Parameters};
use crate::{
    Result,
    backend::{Backend, DType, Gradient24, Region, Tensor},
    method::Method,
    optim::UpdateRule,
};

/// The size of a batch, or the most that buffers hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchShape {
    /// Sequences.
    pub size: usize,
    /// Tokens per sequence.
    pub sequence_length: usize,
}

impl BatchShape {
    /// p: tokens.
    #[must_use]
    pub const fn tokens(self) -> usize {
        self.size.saturating_mul(self.sequence_length)
    }
}

/// Allocates what a model needs. Parameters and sites are numbered in the order in which they are
/// asked for; the numbers address random streams, so a model asks in a fixed order.
pub struct Builder<'a> {
    backend: &'a mut dyn Backend,
    method: &'a Method,
    rule: &'a UpdateRule,
    batch: BatchShape,
    dropout: f32,
    parameters: Parameters,
    /// Sampled gradients by `[p, r]`: one lives until its product, so layers of a shape share it.
    sampled: Vec<([usize; 2], Gradient24)>,
    dropout_sites: u32,
}

impl<'a> Builder<'a> {
    /// A builder for batches of at most this shape, trained by this method and update rule with
    /// this probability of dropout.
    pub fn new(
        backend: &'a mut dyn Backend,
        method: &'a Method,
        rule: &'a UpdateRule,
        batch: BatchShape,
        dropout: f32,
    ) -> Self {
        let (parameters, sampled) = (Parameters::default(), Vec::new());
        Self { backend, method, rule, batch, dropout, parameters, sampled, dropout_sites: 0 }
    }

    /// The largest batch.
    #[must_use]
    pub fn batch(&self) -> BatchShape {
        self.batch
    }

    /// The probability of dropout.
    #[must_use]
    pub fn dropout(&self) -> f32 {
        self.dropout
    }

    /// Whether the backend [reads](crate::backend::Capabilities::reads_kept) what dropout kept.
    pub(super) fn reads_kept(&self) -> bool {
        self.backend.capabilities().reads_kept
    }

    /// The parameters so far, at the end those of the model.
    #[must_use]
    pub fn into_parameters(self) -> Parameters {
        self.parameters
    }

    /// A parameter with gradient, moments and, if it is sparsifiable, what the method multiplies.
    ///
    /// # Errors
    /// Errors of the allocations; a sparsifiable shape must consist of 4x4 tiles.
    pub fn parameter(&mut self, spec: ParameterSpec) -> Result<Handle> {
        self.parameters.add(self.backend, spec, self.method.pruned_operands(), self.rule)
    }

    /// The biases of a layer, which start at 0, if it has them.
    pub fn bias(&mut self, bias: Bias, name: &str, n: usize) -> Result<Option<Handle>> {
        let mut make = || self.parameter(ParameterSpec::bias(format!("{name}.bias"), n));
        if bias == Bias::Present { make().map(Some) } else { Ok(None) }
    }

    /// Memory for the sampled gradient of a layer with r outputs, if the method samples any.
    pub fn sampled_gradient(&mut self, r: usize) -> Result<Option<Gradient24>> {
        let shape = [self.batch.tokens(), r];
        if !self.method.samples() {
            return Ok(None);
        }
        if let Some(&(_, known)) = self.sampled.iter().find(|(known, _)| *known == shape) {
            return Ok(Some(known));
        }
        let made = self.backend.alloc_gradient24(shape)?;
        self.sampled.push((shape, made));
        Ok(Some(made))
    }

    /// An activation `[p, columns]`.
    pub fn activation(&mut self, name: &str, columns: usize) -> Result<Tensor> {
        self.tensor(name, [self.batch.tokens(), columns], DType::Activation, Region::Activations)
    }

    /// Any other buffer.
    pub fn tensor(
        &mut self,
        name: &str,
        shape: [usize; 2],
        dtype: DType,
        region: Region,
    ) -> Result<Tensor> {
        self.backend.alloc(name, shape, dtype, region)
    }

    /// An f32 matrix of values that are never trained, uploaded with the initial weights.
    pub fn constant(
        &mut self,
        name: &str,
        shape: [usize; 2],
        value: ConstantValue,
    ) -> Result<Tensor> {
        let to = self.tensor(name, shape, DType::F32, Region::Activations)?;
        self.parameters.add_constant(to, value);
        Ok(to)
    }

    /// The random stream of the next dropout.
    pub fn dropout_site(&mut self) -> Site {
        self.dropout_sites += 1;
        Site::new(Purpose::Dropout, self.dropout_sites - 1)
    }
}

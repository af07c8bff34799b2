//! The capabilities of a backend, as data: the trainer compares them with a recipe before anything
//! is allocated.

use super::{Arithmetic, Region};
use crate::{Error, Result};

/// The sizes that a backend can train.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Capabilities {
    /// The name of the backend.
    pub backend: &'static str,
    /// Limits of sizes; an extent without a row is unlimited.
    pub limits: &'static [(Extent, Limit)],
    /// The largest number of elements in a tensor. An opened device may lower it.
    pub most_elements: usize,
    /// Whether attention's backward pass reads which probabilities dropout kept, instead of drawing
    /// them again.
    pub reads_kept: bool,
    /// The arithmetic that it does not have.
    pub lacks: Option<Arithmetic>,
}

/// A size that a kernel may limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// Features of a norm: d_model.
    NormWidth,
    /// Features of an attention head.
    HeadDim,
    /// Features of any activation that is a row of a product.
    RowWidth,
    /// Columns of a product: the tokens of a micro-batch, or the input features of an activation.
    ProductColumns,
    /// Elements of a gated activation in a micro-batch.
    GatedElements,
    /// Elements that one dropout covers in a micro-batch.
    DropoutElements,
}

/// A condition on an extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit {
    /// The extent must be a multiple of this.
    pub multiple_of: usize,
    /// The largest extent.
    pub at_most: usize,
}

/// An extent of a recipe, and the setting that decides it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Requirement {
    /// The kind of size.
    pub extent: Extent,
    /// The dotted key of the setting to change.
    pub key: &'static str,
    /// The size in words, for the error.
    pub what: &'static str,
    /// The size.
    pub value: usize,
}

impl Capabilities {
    /// A backend without limits but that of any allocation, `isize::MAX` bytes.
    #[must_use]
    pub const fn unlimited(backend: &'static str) -> Self {
        let most_elements = isize::MAX as usize / size_of::<f32>();
        Self { backend, limits: &[], most_elements, reads_kept: true, lacks: None }
    }

    /// Refuses the arithmetic that the backend does not have.
    ///
    /// # Errors
    /// [`Error::Setting`] names the one that it has.
    pub fn check_arithmetic(&self, arithmetic: Arithmetic) -> Result {
        if self.lacks != Some(arithmetic) {
            return Ok(());
        }
        let own = if arithmetic == Arithmetic::Bf16 { "f32" } else { "bf16" };
        let problem = format!("the backend {} computes in {own}; use \"native\"", self.backend);
        Err(Error::setting("backend.arithmetic", problem))
    }

    /// Compares a tensor with the device's limit.
    ///
    /// # Errors
    /// [`Error::Setting`] names the key that shrinks tensors of this region, and the limit.
    pub fn check_tensor(&self, name: &str, shape: [usize; 2], region: Region) -> Result {
        let elements = shape[0].saturating_mul(shape[1]);
        if elements <= self.most_elements {
            return Ok(());
        }
        let key = match region {
            Region::Activations | Region::Scratch => "batch.size",
            _ => "model.d_model",
        };
        let Self { backend, most_elements: most, .. } = self;
        let problem = format!(
            "expected tensors of at most {most} elements on this device of the backend {backend}, \
             found {elements} in {name}"
        );
        Err(Error::setting(key, problem))
    }

    /// Compares a size with the limits.
    ///
    /// # Errors
    /// [`Error::Setting`] names the key, the limit and the size found.
    pub fn check(&self, requirement: &Requirement) -> Result {
        let &Requirement { extent, key, what, value } = requirement;
        let broken =
            |limit: &Limit| value > limit.at_most || !value.is_multiple_of(limit.multiple_of);
        match self.limits.iter().find(|(of, limit)| *of == extent && broken(limit)) {
            None => Ok(()),
            Some((_, Limit { multiple_of, at_most })) => {
                let limit = match (multiple_of, at_most) {
                    (1, most) => format!("at most {most}"),
                    (n, &usize::MAX) => format!("a multiple of {n}"),
                    (n, most) => format!("a multiple of {n}, at most {most}"),
                };
                let backend = self.backend;
                let problem = format!(
                    "expected {what} to be {limit} on the backend {backend}, found {value}"
                );
                Err(Error::setting(key, problem))
            }
        }
    }
}

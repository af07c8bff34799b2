//! Tensors of a checkpoint in host memory.

use crate::{Error, Result};

/// A named host tensor, row-major: f32, or with [`Values`] of any stored type.
#[derive(Debug, Clone, PartialEq)]
pub struct NamedTensor<V = Vec<f32>> {
    /// Unique in its list.
    pub name: String,
    /// `[length]` or `[rows, columns]`.
    pub shape: Vec<usize>,
    /// One value per element of the shape.
    pub values: V,
}

/// Whether a shape has as many elements as there are values.
pub(super) fn fills(shape: &[usize], values: usize) -> bool {
    shape.iter().try_fold(1, |all: usize, &length| all.checked_mul(length)) == Some(values)
}

impl NamedTensor {
    /// Refuses values that do not fill their shape.
    pub(crate) fn check_length(&self) -> Result {
        if fills(&self.shape, self.values.len()) {
            return Ok(());
        }
        let problem = format!("has shape {:?} and {} values", self.shape, self.values.len());
        Err(Error::Parameter { name: self.name.clone(), problem })
    }

    /// Refuses weights that are given to a model and do not fill their shape, or are not finite.
    pub(crate) fn check(&self) -> Result {
        self.check_length()?;
        let Some(at) = self.values.iter().position(|value| !value.is_finite()) else {
            return Ok(());
        };
        let problem = format!("holds {} at element {at}, expected finite values", self.values[at]);
        Err(Error::Parameter { name: self.name.clone(), problem })
    }
}

/// Values of one of the types that a checkpoint stores.
#[derive(Debug, Clone, PartialEq)]
pub enum Values {
    /// Real numbers, all finite.
    F32(Vec<f32>),
    /// Counts and indices.
    U32(Vec<u32>),
    /// Tiles of masks, one bit per element.
    U16(Vec<u16>),
}

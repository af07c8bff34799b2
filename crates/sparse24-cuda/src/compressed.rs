//! A compressed matrix on a device, in the hardware order of [`layout`](crate::layout).
//!
//! Invariant: values and metadata have as many blocks as cover the shape.

use half::bf16;

use crate::{
    Device, Error, Matrix, Result,
    device::Checks,
    layout::{BLOCK_METADATA, BLOCK_VALUES, Fragments, blocks},
};

/// A handle to the values and metadata of a matrix `[m, k]` that is 2:4 along its rows. A row of
/// each is a block of 64x64.
#[derive(Debug, Clone, Copy)]
pub struct Compressed {
    /// `[blocks, BLOCK_VALUES]`, in [`FragmentMajor`](crate::layout::FragmentMajor) order.
    pub values: Matrix<bf16>,
    /// `[blocks, BLOCK_METADATA]`, in [`LaneMajor`](crate::layout::LaneMajor) order.
    pub metadata: Matrix<u32>,
    shape: [usize; 2],
}

impl Compressed {
    /// Allocates a matrix `[m, k]`, all zero, which is not yet valid metadata.
    ///
    /// # Errors
    /// [`Error::Semantics`] unless k is a multiple of 4; [`Error::OutOfMemory`]; [`Error::Driver`].
    pub fn alloc(device: &mut Device, name: &str, shape: [usize; 2]) -> Result<Self> {
        if !shape[1].is_multiple_of(4) {
            return Err(sparse24_core::Error::NotGrouped {
                operation: "compressed matrix",
                length: shape[1],
            }
            .into());
        }
        let count = blocks(shape).into_iter().product();
        let values = device.alloc(name, [count, BLOCK_VALUES])?;
        let metadata = device.alloc(name, [count, BLOCK_METADATA])?;
        Ok(Self { values, metadata, shape })
    }

    /// Shape of the dense matrix: `[m, k]`.
    #[must_use]
    pub const fn shape(self) -> [usize; 2] {
        self.shape
    }

    /// The memory of this matrix for a matrix `[m, k]` with fewer columns.
    ///
    /// # Panics
    /// If this one has other rows or fewer columns.
    #[must_use]
    pub fn narrowed(self, k: usize) -> Self {
        let [m, most] = self.shape;
        assert!(k <= most, "{k} columns in the memory of {most}");
        let count = blocks([m, k]).into_iter().product();
        let (values, metadata) = (self.values.rows(0..count), self.metadata.rows(0..count));
        Self { values, metadata, shape: [m, k] }
    }

    /// Waits for all queued work and returns all blocks.
    ///
    /// # Errors
    /// See [`Device::download`].
    pub fn download(self, device: &mut Device) -> Result<Fragments> {
        Ok(Fragments {
            values: device.download(self.values)?,
            metadata: device.download(self.metadata)?,
        })
    }

    /// Overwrites all blocks.
    ///
    /// # Errors
    /// See [`Device::upload`].
    pub fn upload(self, device: &mut Device, from: &Fragments) -> Result {
        device.upload(self.values, &from.values)?;
        device.upload(self.metadata, &from.metadata)
    }

    /// Checks an output of this shape, with 16-byte alignment.
    pub(crate) fn check_output(
        self,
        checks: &mut Checks<'_>,
        operation: &'static str,
        operand: &'static str,
        expected: [usize; 2],
    ) -> Result {
        let count = self.block_count(operation, operand, expected)?;
        checks.output(operand, self.values, [count, BLOCK_VALUES], 16)?;
        checks.output(operand, self.metadata, [count, BLOCK_METADATA], 16).map(drop)
    }

    /// Checks an input of this shape, with 16-byte alignment.
    pub(crate) fn check_input(
        self,
        checks: &mut Checks<'_>,
        operation: &'static str,
        operand: &'static str,
        expected: [usize; 2],
    ) -> Result {
        let count = self.block_count(operation, operand, expected)?;
        checks.input(operand, self.values, [count, BLOCK_VALUES], 16)?;
        checks.input(operand, self.metadata, [count, BLOCK_METADATA], 16).map(drop)
    }

    /// The blocks of a matrix that must have this shape.
    fn block_count(
        self,
        operation: &'static str,
        operand: &'static str,
        expected: [usize; 2],
    ) -> Result<usize> {
        if self.shape == expected {
            return Ok(blocks(expected).into_iter().product());
        }
        Err(Error::Shape { operation, operand, expected, found: self.shape })
    }
}

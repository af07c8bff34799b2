//! A compressed matrix on a device, in the hardware order of [`layout`](crate::layout).
//!
//! Invariant: values and metadata are as many blocks as cover the shape. Deliberately absent: what
//! fills them, and what multiplies them.

use half::bf16;

use crate::{
    Device, Error, Matrix,
    layout::{BLOCK_METADATA, BLOCK_VALUES, Fragments, blocks},
    operand::check_packed,
};

/// Values and metadata of a matrix `[m, k]` that is 2:4 along its rows: a plain handle, a row of
/// each matrix a block of 64x64.
#[derive(Debug, Clone, Copy)]
pub struct Compressed {
    /// `[blocks, BLOCK_VALUES]`, in [`FragmentMajor`](crate::layout::FragmentMajor) order.
    pub values: Matrix<bf16>,
    /// `[blocks, BLOCK_METADATA]`, in [`LaneMajor`](crate::layout::LaneMajor) order.
    pub metadata: Matrix<u32>,
    shape: [usize; 2],
}

impl Compressed {
    /// Memory for a matrix `[m, k]`; all zero, which is no metadata yet.
    ///
    /// # Errors
    /// [`Error::Semantics`] unless k is a multiple of 4; [`Error::OutOfMemory`]; [`Error::Driver`].
    pub fn alloc(device: &mut Device, name: &str, shape: [usize; 2]) -> Result<Self, Error> {
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

    /// `[m, k]` of the dense matrix.
    #[must_use]
    pub const fn shape(self) -> [usize; 2] {
        self.shape
    }

    /// All blocks, once all that was queued is done.
    ///
    /// # Errors
    /// As [`Device::download`].
    pub fn download(self, device: &mut Device) -> Result<Fragments, Error> {
        Ok(Fragments {
            values: device.download(self.values)?,
            metadata: device.download(self.metadata)?,
        })
    }

    /// Overwrites all blocks.
    ///
    /// # Errors
    /// As [`Device::upload`].
    pub fn upload(self, device: &mut Device, from: &Fragments) -> Result<(), Error> {
        device.upload(self.values, &from.values)?;
        device.upload(self.metadata, &from.metadata)
    }

    /// The handles are live, of this shape, and begin where 16-byte accesses may.
    pub(crate) fn check(
        self,
        device: &Device,
        operation: &'static str,
        operand: &'static str,
        expected: [usize; 2],
    ) -> Result<(), Error> {
        if self.shape != expected {
            return Err(Error::Shape { operation, operand, expected, found: self.shape });
        }
        let count = blocks(expected).into_iter().product();
        check_packed(device, operation, operand, self.values, [count, BLOCK_VALUES], 16)?;
        check_packed(device, operation, operand, self.metadata, [count, BLOCK_METADATA], 16)
    }
}

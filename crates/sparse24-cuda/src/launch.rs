//! How a kernel is launched: its grid, and arguments that are checked against its parameters.

use std::ffi::c_void;

use cudarc::driver::sys::CUtensorMap;

use crate::{Matrix, Scalar};

/// Blocks, threads a block, and bytes of shared memory asked for at the launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Grid {
    pub(crate) blocks: [u32; 3],
    pub(crate) threads: u32,
    pub(crate) shared: u32,
}

impl Grid {
    /// One dimension of blocks.
    pub(crate) fn line(blocks: usize, threads: u32) -> Self {
        Self::plane([blocks, 1], threads)
    }

    /// Two dimensions of blocks.
    pub(crate) fn plane(blocks: [usize; 2], threads: u32) -> Self {
        let [x, y] =
            blocks.map(|blocks| u32::try_from(blocks).expect("grids are counted in 32 bits"));
        Self { blocks: [x, y, 1], threads, shared: 0 }
    }
}

/// An argument of a kernel.
#[derive(Clone, Copy)]
pub(crate) enum Argument {
    Address(u64),
    U64(u64),
    U32(u32),
    F32(f32),
    TensorMap(CUtensorMap),
}

impl Argument {
    /// Where its bytes are.
    pub(crate) fn pointer(&self) -> *mut c_void {
        let at: *const c_void = match self {
            Self::Address(x) | Self::U64(x) => (&raw const *x).cast(),
            Self::U32(x) => (&raw const *x).cast(),
            Self::F32(x) => (&raw const *x).cast(),
            Self::TensorMap(x) => (&raw const *x).cast(),
        };
        at.cast_mut()
    }

    /// Its bytes.
    pub(crate) const fn size(&self) -> usize {
        match self {
            Self::Address(_) | Self::U64(_) => size_of::<u64>(),
            Self::U32(_) | Self::F32(_) => 4,
            Self::TensorMap(_) => size_of::<CUtensorMap>(),
        }
    }
}

impl<T: Scalar> From<Matrix<T>> for Argument {
    fn from(matrix: Matrix<T>) -> Self {
        Self::Address(matrix.address)
    }
}

impl<T: Scalar> From<Option<Matrix<T>>> for Argument {
    /// A null pointer for none.
    fn from(matrix: Option<Matrix<T>>) -> Self {
        Self::Address(matrix.map_or(0, |matrix| matrix.address))
    }
}

impl From<f32> for Argument {
    fn from(x: f32) -> Self {
        Self::F32(x)
    }
}

impl From<u32> for Argument {
    fn from(x: u32) -> Self {
        Self::U32(x)
    }
}

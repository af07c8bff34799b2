//! Grids, and kernel arguments that are checked against the kernel's parameters.

use std::ffi::c_void;

use cudarc::driver::sys::CUtensorMap;

use crate::{Matrix, Scalar};

/// Blocks, threads per block, and bytes of dynamic shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Grid {
    pub(crate) blocks: [u32; 3],
    pub(crate) threads: u32,
    pub(crate) shared: u32,
}

impl Grid {
    pub(crate) fn line(blocks: usize, threads: u32) -> Self {
        Self::plane([blocks, 1], threads)
    }

    pub(crate) fn plane(blocks: [usize; 2], threads: u32) -> Self {
        let [x, y] = blocks.map(|blocks| u32::try_from(blocks).expect("a grid below 2^32"));
        Self { blocks: [x, y, 1], threads, shared: 0 }
    }
}

/// An argument of a kernel.
#[derive(Clone, Copy)]
pub(crate) enum Argument {
    U64(u64),
    U32(u32),
    F32(f32),
    TensorMap(CUtensorMap),
}

/// Kernel arguments from matrices (optional ones become null pointers) and numbers.
macro_rules! arguments {
    ($($argument:expr),* $(,)?) => { [$($crate::launch::Argument::from($argument)),*] };
}
pub(crate) use arguments;

impl Argument {
    pub(crate) fn pointer(&self) -> *mut c_void {
        let at: *const c_void = match self {
            Self::U64(x) => (&raw const *x).cast(),
            Self::U32(x) => (&raw const *x).cast(),
            Self::F32(x) => (&raw const *x).cast(),
            Self::TensorMap(x) => (&raw const *x).cast(),
        };
        at.cast_mut()
    }

    /// Size in bytes.
    pub(crate) const fn size(&self) -> usize {
        match self {
            Self::U64(_) => 8,
            Self::U32(_) | Self::F32(_) => 4,
            Self::TensorMap(_) => size_of::<CUtensorMap>(),
        }
    }
}

impl<T: Scalar> From<Matrix<T>> for Argument {
    fn from(matrix: Matrix<T>) -> Self {
        Self::U64(matrix.address)
    }
}

impl<T: Scalar> From<Option<Matrix<T>>> for Argument {
    fn from(matrix: Option<Matrix<T>>) -> Self {
        Self::U64(matrix.map_or(0, |matrix| matrix.address))
    }
}

impl From<CUtensorMap> for Argument {
    fn from(map: CUtensorMap) -> Self {
        Self::TensorMap(map)
    }
}

impl From<u64> for Argument {
    fn from(x: u64) -> Self {
        Self::U64(x)
    }
}

impl From<u32> for Argument {
    fn from(x: u32) -> Self {
        Self::U32(x)
    }
}

impl From<f32> for Argument {
    fn from(x: f32) -> Self {
        Self::F32(x)
    }
}

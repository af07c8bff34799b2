//! The dense buffers of the adaptor, and its scratch memory.

use sparse24_wgpu::{Device, Matrix};

use crate::{DType, Region, Result, Tensor};

/// All dense buffers, in the order of allocation.
#[derive(Default)]
pub(super) struct Buffers(Vec<Buffer>);

struct Buffer {
    name: String,
    dtype: DType,
    whole: Matrix,
}

/// Scratch memory of operations, which grows in the first step only.
#[derive(Default)]
pub(super) struct Scratch {
    /// Losses of rows, which must survive operations that use [`Self::sums`].
    pub(super) losses: Option<Matrix>,
    pub(super) sums: Option<Matrix>,
}

/// Returns a row of at least as many elements, with unspecified contents. Scratch never shrinks.
pub(super) fn grown(
    gpu: &mut Device,
    scratch: &mut Option<Matrix>,
    elements: usize,
) -> Result<Matrix> {
    let (name, shape) = ("scratch of operations", [1, elements]);
    let whole = match *scratch {
        Some(whole) if whole.elements() >= elements => whole,
        Some(less) => gpu.realloc(less, name, shape)?,
        None => gpu.alloc(name, shape, Region::Scratch.name())?,
    };
    Ok(*scratch.insert(whole))
}

impl Buffers {
    /// Allocates a zeroed buffer. A buffer of ids has space for their order behind them.
    pub(super) fn alloc(
        &mut self,
        gpu: &mut Device,
        name: &str,
        shape: [usize; 2],
        dtype: DType,
        region: Region,
    ) -> Result<Tensor> {
        let held = match dtype {
            DType::U32 => [2, shape[0] * shape[1]],
            DType::F32 | DType::Activation => shape,
        };
        let whole = gpu.alloc(name, held, region.name())?;
        self.0.push(Buffer { name: name.to_owned(), dtype, whole });
        Ok(Tensor { buffer: self.0.len() - 1, offset: 0, shape, stride: shape[1], dtype })
    }

    /// The part of a buffer that holds a tensor, of any type.
    pub(super) fn matrix(&self, t: Tensor) -> Matrix {
        let Tensor { offset, shape, stride, .. } = t;
        Matrix { offset, shape, stride, ..self.0[t.buffer].whole }
    }

    /// The ids of a tensor and their order, `[2, p]`, which are uploaded together.
    pub(super) fn ordered(&self, t: Tensor) -> Matrix {
        let Buffer { name, dtype, whole } = &self.0[t.buffer];
        assert!(*dtype == DType::U32 && t.shape[1] == t.stride, "{name} does not hold ids");
        Matrix { offset: t.offset, shape: [2, t.elements()], ..*whole }
    }
}

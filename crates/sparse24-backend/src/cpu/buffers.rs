//! The dense buffers of the CPU adaptor, and how operations borrow them.
//!
//! While an operation runs, the buffers of its outputs are taken out, so that an input that aliases
//! an output panics instead of being corrupted.

use std::mem;

use ndarray::{ArrayView1, ArrayView2, ArrayViewMut2, ShapeBuilder};

use crate::{DType, Region, Result, Tensor, bytes, zeros};

/// All dense buffers, in the order of allocation.
#[derive(Default)]
pub(super) struct Buffers(Vec<Buffer>);

/// One allocation.
struct Buffer {
    name: String,
    region: Region,
    data: Data,
}

enum Data {
    F32(Vec<f32>),
    U32(Vec<u32>),
}

impl Buffers {
    pub(super) fn floats(&self, t: Tensor) -> &[f32] {
        let buffer = &self.0[t.buffer];
        match &buffer.data {
            Data::F32(data) => {
                assert!(
                    !data.is_empty() || t.elements() == 0,
                    "{} is an input and an output of one operation",
                    buffer.name
                );
                &data[t.offset..]
            }
            Data::U32(_) => panic!("{} holds ids, not floats", buffer.name),
        }
    }

    pub(super) fn view(&self, t: Tensor) -> ArrayView2<'_, f32> {
        if t.elements() == 0 {
            return ArrayView2::from_shape(t.shape, &[]).expect("no elements");
        }
        ArrayView2::from_shape((t.shape[0], t.shape[1]).strides((t.stride, 1)), self.floats(t))
            .expect("a handle lies within its buffer")
    }

    pub(super) fn row(&self, t: Tensor) -> ArrayView1<'_, f32> {
        ArrayView1::from(&self.floats(t)[..t.elements()])
    }

    pub(super) fn ids(&self, t: Tensor) -> &[u32] {
        let buffer = &self.0[t.buffer];
        match &buffer.data {
            Data::U32(data) => &data[t.offset..t.offset + t.elements()],
            Data::F32(_) => panic!("{} holds floats, not ids", buffer.name),
        }
    }

    /// Takes the buffer of an output; reading it panics until [`Self::put`].
    pub(super) fn take(&mut self, t: Tensor) -> Vec<f32> {
        let buffer = &mut self.0[t.buffer];
        match &mut buffer.data {
            Data::F32(data) => {
                assert!(
                    !data.is_empty() || t.elements() == 0,
                    "{} is two outputs of one operation",
                    buffer.name
                );
                mem::take(data)
            }
            Data::U32(_) => panic!("{} holds ids, not floats", buffer.name),
        }
    }

    pub(super) fn put(&mut self, t: Tensor, data: Vec<f32>) {
        self.0[t.buffer].data = Data::F32(data);
    }

    /// Takes a buffer of words, to be written; [`Self::put_words`] brings it back.
    pub(super) fn take_words(&mut self, t: Tensor) -> Vec<u32> {
        match &mut self.0[t.buffer].data {
            Data::U32(data) => mem::take(data),
            Data::F32(_) => panic!("{} holds floats, not words", self.0[t.buffer].name),
        }
    }

    pub(super) fn put_words(&mut self, t: Tensor, data: Vec<u32>) {
        self.0[t.buffer].data = Data::U32(data);
    }

    pub(super) fn ids_mut(&mut self, t: Tensor) -> &mut [u32] {
        let buffer = &mut self.0[t.buffer];
        match &mut buffer.data {
            Data::U32(data) => &mut data[t.offset..t.offset + t.elements()],
            Data::F32(_) => panic!("{} holds floats, not ids", buffer.name),
        }
    }

    /// A zeroed buffer.
    pub(super) fn alloc(
        &mut self,
        name: &str,
        shape: [usize; 2],
        dtype: DType,
        region: Region,
    ) -> Result<Tensor> {
        let data = match dtype {
            DType::F32 | DType::Activation => Data::F32(zeros(name, shape, region)?),
            DType::U32 => Data::U32(zeros(name, shape, region)?),
        };
        self.0.push(Buffer { name: name.to_owned(), region, data });
        Ok(Tensor { buffer: self.0.len() - 1, offset: 0, shape, stride: shape[1], dtype })
    }

    /// Bytes held for a region.
    pub(super) fn bytes(&self, region: Region) -> usize {
        self.0.iter().filter(|buffer| buffer.region == region).map(Buffer::bytes).sum()
    }
}

pub(super) fn view_mut(t: Tensor, data: &mut [f32]) -> ArrayViewMut2<'_, f32> {
    if t.elements() == 0 {
        return ArrayViewMut2::from_shape(t.shape, &mut []).expect("no elements");
    }
    ArrayViewMut2::from_shape(
        (t.shape[0], t.shape[1]).strides((t.stride, 1)),
        &mut data[t.offset..],
    )
    .expect("a handle lies within its buffer")
}

/// A `[rows, columns]` view of scratch, which only grows; its contents are unspecified.
pub(super) fn scratch_view(
    scratch: &mut Vec<f32>,
    (rows, columns): (usize, usize),
) -> Result<ArrayViewMut2<'_, f32>, sparse24_cpu::Error> {
    let more = (rows * columns).saturating_sub(scratch.len());
    let bytes = bytes([rows, columns], 4);
    scratch.try_reserve_exact(more).map_err(|_| sparse24_cpu::Error::Memory { bytes })?;
    scratch.resize(scratch.len() + more, 0.0);
    Ok(ArrayViewMut2::from_shape((rows, columns), &mut scratch[..rows * columns])
        .expect("the scratch was grown"))
}

impl Buffer {
    fn bytes(&self) -> usize {
        match &self.data {
            Data::F32(data) => 4 * data.len(),
            Data::U32(data) => 4 * data.len(),
        }
    }
}

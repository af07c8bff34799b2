//! The dense buffers of the CUDA adaptor: the matrix of each handle, and its type.
//!
//! Activations are bf16. Weights, gradients and moments are f32, and a weight has a bf16 copy that
//! products read. Rows and columns are padded to what tensor cores need; the padding is zero and
//! never reaches the host.

use half::bf16;
use rayon::prelude::*;
use sparse24_cuda::{Device, Matrix};

use crate::{DType, Region, Result, Tensor};

/// All dense buffers, in the order of allocation.
#[derive(Default)]
pub(super) struct Buffers(Vec<Buffer>);

struct Buffer {
    name: String,
    data: Data,
}

enum Data {
    F32(Matrix<f32>),
    Weight { values: Matrix<f32>, copy: Matrix<bf16> },
    Activation(Matrix<bf16>),
    Ids(Matrix<u32>),
}

/// Rows of tables and columns of activations that are not a multiple of 8 are padded to a multiple
/// of this.
const PADDED: usize = 64;

pub(super) fn padded(length: usize) -> usize {
    if length.is_multiple_of(8) { length } else { length.next_multiple_of(PADDED) }
}

impl Buffers {
    /// A zeroed buffer.
    pub(super) fn alloc(
        &mut self,
        device: &mut Device,
        name: &str,
        [rows, columns]: [usize; 2],
        dtype: DType,
        region: Region,
    ) -> Result<Tensor> {
        device.set_purpose(region.name());
        let tall = if rows == 1 { 1 } else { padded(rows) };
        // A bias of the logits is added to their padding too.
        let wide = if rows == 1 { padded(columns) } else { columns };
        let (data, stride) = match (dtype, region) {
            (DType::U32, _) => (Data::Ids(device.alloc(name, [rows, columns])?), columns),
            (DType::Activation, _) => {
                (Data::Activation(device.alloc(name, [rows, padded(columns)])?), padded(columns))
            }
            (DType::F32, Region::Parameters) => {
                let (values, copy) =
                    (device.alloc(name, [tall, columns])?, device.alloc(name, [tall, wide])?);
                (Data::Weight { values, copy }, columns)
            }
            (DType::F32, Region::Gradients) => {
                (Data::F32(device.alloc(name, [tall, columns])?), columns)
            }
            (DType::F32, _) => (Data::F32(device.alloc(name, [rows, columns])?), columns),
        };
        self.0.push(Buffer { name: name.to_owned(), data });
        Ok(Tensor { buffer: self.0.len() - 1, offset: 0, shape: [rows, columns], stride, dtype })
    }

    /// f32: weights, gradients, moments, statistics.
    pub(super) fn floats(&self, t: Tensor) -> Matrix<f32> {
        match &self.0[t.buffer].data {
            Data::F32(whole) | Data::Weight { values: whole, .. } => {
                whole.rectangle(t.offset, t.shape, t.stride)
            }
            _ => panic!("{} is not held in f32", self.0[t.buffer].name),
        }
    }

    /// A table's gradient, with its padding rows.
    pub(super) fn tall_floats(&self, t: Tensor) -> Matrix<f32> {
        match &self.0[t.buffer].data {
            Data::F32(whole) => *whole,
            _ => panic!("{} is not a gradient", self.0[t.buffer].name),
        }
    }

    /// The copy of a weight that products read.
    pub(super) fn copy_of(&self, t: Tensor) -> Matrix<bf16> {
        self.tall_copy_of(t).rectangle(t.offset, t.shape, t.stride)
    }

    /// The bf16 copy of a table or vector, with its padding.
    pub(super) fn tall_copy_of(&self, t: Tensor) -> Matrix<bf16> {
        match &self.0[t.buffer].data {
            Data::Weight { copy, .. } => *copy,
            _ => panic!("{} is not a weight", self.0[t.buffer].name),
        }
    }

    pub(super) fn activations(&self, t: Tensor) -> Matrix<bf16> {
        match &self.0[t.buffer].data {
            Data::Activation(whole) => whole.rectangle(t.offset, t.shape, t.stride),
            _ => panic!("{} holds no activations", self.0[t.buffer].name),
        }
    }

    /// Whole rows, with their padding columns.
    pub(super) fn wide_activations(&self, t: Tensor) -> Matrix<bf16> {
        self.activations(Tensor { shape: [t.shape[0], t.stride], ..t })
    }

    pub(super) fn ids(&self, t: Tensor) -> Matrix<u32> {
        match &self.0[t.buffer].data {
            Data::Ids(whole) => whole.rectangle(t.offset, t.shape, t.stride),
            _ => panic!("{} holds no ids", self.0[t.buffer].name),
        }
    }

    /// Host to device; a weight's copy follows.
    pub(super) fn upload(&self, device: &mut Device, to: Tensor, from: &[f32]) -> Result {
        match &self.0[to.buffer].data {
            Data::Activation(_) => upload_rounded(device, self.activations(to), from),
            Data::Weight { .. } => {
                upload_rounded(device, self.copy_of(to), from)?;
                Ok(device.upload(self.floats(to), from)?)
            }
            _ => Ok(device.upload(self.floats(to), from)?),
        }
    }

    /// Device to host, rows packed.
    pub(super) fn download(&self, device: &mut Device, from: Tensor) -> Result<Vec<f32>> {
        match &self.0[from.buffer].data {
            Data::Activation(_) => {
                Ok(device.download(self.activations(from))?.into_iter().map(f32::from).collect())
            }
            _ => Ok(device.download(self.floats(from))?),
        }
    }

    /// On the device; a weight's copy follows.
    pub(super) fn copy(&self, device: &mut Device, from: Tensor, to: Tensor) -> Result {
        match (&self.0[from.buffer].data, &self.0[to.buffer].data) {
            (_, Data::Activation(_)) => {
                return Ok(device.copy(self.activations(from), self.activations(to))?);
            }
            (Data::Weight { .. }, Data::Weight { .. }) => {
                device.copy(self.copy_of(from), self.copy_of(to))?
            }
            // There is no kernel that only rounds.
            (_, Data::Weight { .. }) => {
                let values = device.download(self.floats(from))?;
                return self.upload(device, to, &values);
            }
            _ => {}
        }
        Ok(device.copy(self.floats(from), self.floats(to))?)
    }

    /// Zeroes a tensor, and the copy of a weight.
    pub(super) fn clear(&self, device: &mut Device, t: Tensor) -> Result {
        match &self.0[t.buffer].data {
            Data::Activation(_) => return Ok(device.fill_bytes(self.activations(t), 0)?),
            Data::Weight { .. } => device.fill_bytes(self.copy_of(t), 0)?,
            _ => {}
        }
        Ok(device.fill_bytes(self.floats(t), 0)?)
    }
}

fn upload_rounded(device: &mut Device, to: Matrix<bf16>, from: &[f32]) -> Result {
    /// Values that a task rounds.
    const RUN: usize = 1 << 14;
    Ok(device.upload_with(to, from.len(), |staged| {
        staged.par_chunks_mut(RUN).zip(from.par_chunks(RUN)).for_each(|(staged, from)| {
            staged.iter_mut().zip(from).for_each(|(to, &x)| *to = bf16::from_f32(x));
        });
    })?)
}

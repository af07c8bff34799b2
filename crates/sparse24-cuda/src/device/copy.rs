//! Copies between host and device and within the device, and fills.
//!
//! Invariant: when a call returns, host memory that it reads has been copied aside, and host memory
//! that it writes is complete.

use cudarc::driver::{CudaStream, sys};

use super::Device;
use crate::{Error, Matrix, Scalar, profile::Work};

impl Device {
    /// to = from, row by row. The host slice may be reused at once.
    ///
    /// # Errors
    /// [`Error::Shape`] if the lengths differ; [`Error::Stale`], [`Error::Capturing`],
    /// [`Error::Driver`].
    pub fn upload<T: Scalar>(&mut self, to: Matrix<T>, from: &[T]) -> Result<(), Error> {
        self.upload_with(to, from.len(), |staged| staged.copy_from_slice(from))
    }

    /// Waits for all queued work and returns the elements, row by row.
    ///
    /// # Errors
    /// [`Error::Stale`], [`Error::Capturing`]; [`Error::Driver`], also for an earlier operation
    /// that failed.
    pub fn download<T: Scalar>(&mut self, from: Matrix<T>) -> Result<Vec<T>, Error> {
        self.refuse_in_capture("download")?;
        self.check_live("download", "the matrix", from)?;
        let mut to = vec![T::default(); from.elements()];
        let host = Side::on_host(to.as_mut_ptr(), from.shape[1]);
        self.queue_copy::<T>("download", from.shape, Side::on_device(from), host)?;
        self.synchronize()?;
        Ok(to)
    }

    /// to = from.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Alias`], [`Error::Stale`], [`Error::Driver`].
    pub fn copy<T: Scalar>(&mut self, from: Matrix<T>, to: Matrix<T>) -> Result<(), Error> {
        self.checks("copy")
            .strided("from", from, from.shape, 1)?
            .strided_output("to", to, from.shape, 1)?;
        self.queue_copy::<T>("copy", from.shape, Side::on_device(from), Side::on_device(to))
    }

    /// Sets every byte of the matrix to `byte`.
    ///
    /// # Errors
    /// [`Error::Stale`], [`Error::Driver`].
    pub fn fill_bytes<T: Scalar>(&mut self, to: Matrix<T>, byte: u8) -> Result<(), Error> {
        self.check_live("fill", "the matrix", to)?;
        if to.elements() == 0 {
            return Ok(());
        }
        self.bind()?;
        let [pitch, width] = [to.stride.max(to.shape[1]), to.shape[1]].map(|n| n * size_of::<T>());
        self.profiled(Work::Copy, || {
            // SAFETY: the rows lie within an allocation of this device.
            unsafe {
                let (rows, stream) = (to.shape[0], self.stream());
                sys::cuMemsetD2D8Async(to.address, pitch, byte, width, rows, stream)
            }
            .result()
            .map_err(|error| self.failed("fill", error))
        })
    }

    pub(super) fn queue_copy<T: Scalar>(
        &self,
        what: &'static str,
        shape: [usize; 2],
        from: Side,
        to: Side,
    ) -> Result<(), Error> {
        self.profiled(Work::Copy, || self.copy_rows::<T>(&self.stream, what, shape, from, to))
    }

    /// Queues a copy on a stream.
    pub(super) fn copy_rows<T: Scalar>(
        &self,
        stream: &CudaStream,
        what: &'static str,
        shape: [usize; 2],
        from: Side,
        to: Side,
    ) -> Result<(), Error> {
        if shape[0] * shape[1] == 0 {
            return Ok(());
        }
        self.bind()?;
        let size = size_of::<T>();
        let copy = sys::CUDA_MEMCPY2D_st {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: from.memory,
            srcHost: from.host,
            srcDevice: from.device,
            srcArray: std::ptr::null_mut(),
            srcPitch: from.pitch.max(shape[1]) * size,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: to.memory,
            dstHost: to.host,
            dstDevice: to.device,
            dstArray: std::ptr::null_mut(),
            dstPitch: to.pitch.max(shape[1]) * size,
            WidthInBytes: shape[1] * size,
            Height: shape[0],
        };
        // SAFETY: device rows lie within an allocation of this device, host rows within memory of
        // the caller. The driver copies pageable source memory aside before it returns, `staging`
        // reuses pinned memory after the copy, and whoever reads the destination waits for it.
        unsafe { sys::cuMemcpy2DAsync_v2(&copy, stream.cu_stream()) }
            .result()
            .map_err(|error| self.failed(what, error))
    }
}

/// One side of a copy; the pitch is in elements.
pub(super) struct Side {
    memory: sys::CUmemorytype,
    host: *mut std::ffi::c_void,
    device: u64,
    pitch: usize,
}

impl Side {
    pub(super) fn on_device<T: Scalar>(matrix: Matrix<T>) -> Self {
        let memory = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
        Self { memory, host: std::ptr::null_mut(), device: matrix.address, pitch: matrix.stride }
    }

    pub(super) fn on_host<T: Scalar>(first: *mut T, pitch: usize) -> Self {
        Self { memory: sys::CUmemorytype::CU_MEMORYTYPE_HOST, host: first.cast(), device: 0, pitch }
    }
}

//! Copies between host and device, on the device, and fills.
//!
//! Invariant: what of the host is read was copied aside when a call returns, and what is written is
//! whole then. Deliberately absent: memory of either.

use cudarc::driver::{CudaStream, sys};

use crate::{Device, Error, Matrix, Scalar, profile::Work};

impl Device {
    /// to = from, row after row; the host's slice may be used again at once.
    ///
    /// # Errors
    /// [`Error::Shape`] unless there is one element for each of the matrix; [`Error::Stale`];
    /// [`Error::Driver`].
    pub fn upload<T: Scalar>(&mut self, to: Matrix<T>, from: &[T]) -> Result<(), Error> {
        self.refuse_while_recording("upload")?;
        self.check_length("upload", to, from.len())?;
        let host = Side::on_host(from.as_ptr().cast_mut(), to.shape[1]);
        self.noted_copy::<T>("upload", to.shape, host, Side::on_device(to))
    }

    /// The elements, row after row, once all that was queued is done.
    ///
    /// # Errors
    /// [`Error::Stale`]; [`Error::Driver`], also of an earlier operation.
    pub fn download<T: Scalar>(&mut self, from: Matrix<T>) -> Result<Vec<T>, Error> {
        self.refuse_while_recording("download")?;
        self.check_live("download", "the matrix", from)?;
        let mut to = vec![T::default(); from.elements()];
        let host = Side::on_host(to.as_mut_ptr(), from.shape[1]);
        self.noted_copy::<T>("download", from.shape, Side::on_device(from), host)?;
        self.synchronize()?;
        Ok(to)
    }

    /// to = from.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Alias`], [`Error::Stale`], [`Error::Driver`].
    pub fn copy<T: Scalar>(&mut self, from: Matrix<T>, to: Matrix<T>) -> Result<(), Error> {
        self.check("copy", "to", to, from.shape)?;
        self.check_live("copy", "from", from)?;
        self.check_apart("copy", ("to", to.span()), &[("from", from.span())])?;
        self.noted_copy::<T>("copy", from.shape, Side::on_device(from), Side::on_device(to))
    }

    /// Every byte = `byte`.
    ///
    /// # Errors
    /// [`Error::Stale`], [`Error::Driver`].
    pub fn fill_bytes<T: Scalar>(&mut self, to: Matrix<T>, byte: u8) -> Result<(), Error> {
        self.check_live("fill", "the matrix", to)?;
        let (pitch, width) = (to.stride * size_of::<T>(), to.shape[1] * size_of::<T>());
        if to.elements() == 0 {
            return Ok(());
        }
        self.bind()?;
        self.noted(Work::Copy, || {
            // SAFETY: the rows lie within an allocation of this device.
            let done = unsafe {
                sys::cuMemsetD2D8Async(
                    to.address,
                    pitch.max(width),
                    byte,
                    width,
                    to.shape[0],
                    self.stream.cu_stream(),
                )
            };
            done.result().map_err(|error| self.refused("fill".into(), error))
        })
    }

    fn check_length<T: Scalar>(
        &self,
        operation: &'static str,
        matrix: Matrix<T>,
        length: usize,
    ) -> Result<(), Error> {
        self.check_live(operation, "the matrix", matrix)?;
        if length == matrix.elements() {
            Ok(())
        } else {
            Err(Error::Shape {
                operation,
                operand: "the host's elements",
                expected: [1, matrix.elements()],
                found: [1, length],
            })
        }
    }

    /// Queues a copy among all other operations.
    fn noted_copy<T: Scalar>(
        &self,
        what: &'static str,
        shape: [usize; 2],
        from: Side,
        to: Side,
    ) -> Result<(), Error> {
        self.bind()?;
        self.noted(Work::Copy, || self.copy_rows::<T>(&self.stream, what, shape, from, to))
    }

    /// Queues a copy on a stream.
    pub(crate) fn copy_rows<T: Scalar>(
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
        // SAFETY: device rows lie within an allocation of this device. Host rows lie within memory
        // of the caller's: those read were copied aside when the call returns, as the driver
        // promises for pageable memory, and who has some written waits.
        unsafe { sys::cuMemcpy2DAsync_v2(&copy, stream.cu_stream()) }
            .result()
            .map_err(|error| self.refused(what.into(), error))
    }
}

/// One side of a copy; a pitch is in elements.
pub(crate) struct Side {
    memory: sys::CUmemorytype,
    host: *mut std::ffi::c_void,
    device: u64,
    pitch: usize,
}

impl Side {
    pub(crate) fn on_device<T: Scalar>(matrix: Matrix<T>) -> Self {
        let memory = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
        Self { memory, host: std::ptr::null_mut(), device: matrix.address, pitch: matrix.stride }
    }

    pub(crate) fn on_host<T: Scalar>(first: *mut T, pitch: usize) -> Self {
        Self { memory: sys::CUmemorytype::CU_MEMORYTYPE_HOST, host: first.cast(), device: 0, pitch }
    }
}

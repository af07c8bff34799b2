//! Asynchronous device-to-host copies into pinned memory, on a stream of their own.
//!
//! Invariant: a copy reads what was queued before it. Work that overwrites its source must be
//! queued after [`Device::wait_for_copies`]. Pinned memory is neither freed nor reused before the
//! copy into it has ended; since pinning is slow, it is kept for the next copy.

use std::{
    ffi::c_void,
    mem,
    sync::{Arc, Mutex, PoisonError},
};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result, sys};

use super::{Device, copy::Side};
use crate::{Error, Matrix, Result, error::driver_error};

const OPERATION: &str = "a copy to the host";

/// The copy stream of a device.
#[derive(Default)]
pub(super) struct Copies {
    stream: Option<Arc<CudaStream>>,
    /// The end of the last copy, until work waits for it.
    copied: Option<Arc<CudaEvent>>,
    spare: Arc<Mutex<Option<Pinned>>>,
}

/// Matrices on their way to the host.
#[must_use]
pub struct HostCopy {
    /// Taken on drop.
    pinned: Option<Pinned>,
    copied: Arc<CudaEvent>,
    /// Elements of each matrix.
    elements: Vec<usize>,
    spare: Arc<Mutex<Option<Pinned>>>,
}

/// Pinned host memory.
pub(super) struct Pinned {
    address: *mut c_void,
    bytes: usize,
    context: Arc<CudaContext>,
}

// SAFETY: the memory belongs to the process and has one owner; calls about it bind the context.
unsafe impl Send for Pinned {}

impl Device {
    /// Starts copying these matrices once all queued work is done, beside work that is queued
    /// later. Returns `None` if the host cannot pin enough memory.
    ///
    /// # Errors
    /// [`Error::Stale`], [`Error::Capturing`], [`Error::Driver`].
    pub fn copy_to_host(&mut self, from: &[Matrix<f32>]) -> Result<Option<HostCopy>> {
        self.refuse_in_capture(OPERATION)?;
        from.iter().try_for_each(|&matrix| self.check_live(OPERATION, "a matrix", matrix))?;
        self.bind()?;
        let elements: Vec<usize> = from.iter().map(|matrix| matrix.elements()).collect();
        let Some(pinned) = self.pinned(elements.iter().sum::<usize>() * size_of::<f32>())? else {
            return Ok(None);
        };
        let stream = match &self.copies.stream {
            Some(stream) => Arc::clone(stream),
            None => Arc::clone(
                self.copies.stream.insert(self.context.new_stream().map_err(copy_error)?),
            ),
        };
        let copied = match self.queue_copies(&stream, from, &pinned) {
            Ok(copied) => Arc::new(copied),
            Err(error) => {
                pinned.free_when_idle();
                return Err(error);
            }
        };
        self.copies.copied = Some(Arc::clone(&copied));
        let spare = Arc::clone(&self.copies.spare);
        Ok(Some(HostCopy { pinned: Some(pinned), copied, elements, spare }))
    }

    /// Copies matrices one after another into memory that is large enough for all.
    fn queue_copies(
        &self,
        stream: &CudaStream,
        from: &[Matrix<f32>],
        to: &Pinned,
    ) -> Result<CudaEvent> {
        let queued = self.stream.record_event(None).map_err(copy_error)?;
        stream.wait(&queued).map_err(copy_error)?;
        let mut offset = 0;
        for &matrix in from {
            let first = to.address.cast::<f32>().wrapping_add(offset);
            let sides = (Side::on_device(matrix), Side::on_host(first, matrix.shape[1]));
            self.copy_rows::<f32>(stream, OPERATION, matrix.shape, sides.0, sides.1)?;
            offset += matrix.elements();
        }
        // Waiting for it blocks the thread instead of spinning.
        stream.record_event(Some(sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC)).map_err(copy_error)
    }

    /// Makes work that is queued from now on wait for the copies to the host. Call this before
    /// queueing work that overwrites their sources.
    ///
    /// # Errors
    /// [`Error::Capturing`], [`Error::Driver`].
    pub fn wait_for_copies(&mut self) -> Result {
        let Some(copied) = &self.copies.copied else { return Ok(()) };
        self.refuse_in_capture("waiting for copies")?;
        self.stream.wait(copied).map_err(copy_error)?;
        self.copies.copied = None;
        Ok(())
    }

    /// Pinned memory of at least this size: the spare one if it is large enough.
    fn pinned(&self, bytes: usize) -> Result<Option<Pinned>> {
        let spare =
            mem::take(&mut *self.copies.spare.lock().unwrap_or_else(PoisonError::into_inner));
        if let Some(pinned) = spare.filter(|pinned| pinned.bytes >= bytes) {
            return Ok(Some(pinned));
        }
        Pinned::new(&self.context, bytes)
    }
}

impl HostCopy {
    /// Waits for the copy and returns the elements of each matrix, reusing the vectors of `to`.
    ///
    /// # Errors
    /// [`Error::Driver`], also for an earlier operation that failed.
    pub fn read(self, mut to: Vec<Vec<f32>>) -> Result<Vec<Vec<f32>>> {
        self.copied.synchronize().map_err(copy_error)?;
        let pinned = self.pinned.as_ref().expect("taken only on drop");
        // SAFETY: the memory is page-aligned and holds this many floats, all written by the copy,
        // which has ended.
        let mut rest = unsafe {
            std::slice::from_raw_parts(pinned.address.cast::<f32>(), self.elements.iter().sum())
        };
        to.resize_with(self.elements.len(), Vec::new);
        for (to, elements) in to.iter_mut().zip(&self.elements) {
            to.clear();
            to.extend_from_slice(rest.split_off(..*elements).expect("the sum of all"));
        }
        Ok(to)
    }
}

impl Drop for HostCopy {
    fn drop(&mut self) {
        let Some(pinned) = self.pinned.take() else { return };
        if self.copied.synchronize().is_ok() {
            *self.spare.lock().unwrap_or_else(PoisonError::into_inner) = Some(pinned);
        } else {
            pinned.free_when_idle();
        }
    }
}

impl Pinned {
    /// Memory of this size, for the context that is bound; `None` if the host cannot pin so much.
    pub(super) fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Option<Self>> {
        // SAFETY: the context is bound. No flags: the host reads the memory, so it must be cached.
        match unsafe { result::malloc_host(bytes.max(1), 0) } {
            Ok(address) => Ok(Some(Self { address, bytes, context: Arc::clone(context) })),
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => Ok(None),
            Err(error) => Err(copy_error(error)),
        }
    }

    pub(super) fn first(&self) -> *mut u8 {
        self.address.cast()
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Frees memory that a copy may still write to. An error of the GPU ends its copies as well.
    fn free_when_idle(self) {
        let _ = self.context.synchronize();
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.context.bind_to_thread();
        // SAFETY: it was allocated once and is freed once, and no copy uses it any more: either the
        // copy was awaited, or the context was.
        let _ = unsafe { result::free_host(self.address) };
    }
}

fn copy_error(error: DriverError) -> Error {
    driver_error(OPERATION, error)
}

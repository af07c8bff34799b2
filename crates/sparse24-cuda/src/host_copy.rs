//! Copies to the host beside the work that goes on, into page-locked memory.
//!
//! Invariant: a copy reads what was queued before it, and nothing after it; what would overwrite
//! its source is queued after [`Device::wait_for_copies`]. Host memory is neither freed nor used
//! again before the copy into it has ended. It is slow to get, so it is kept for the next copy.
//! Deliberately absent: which work overwrites what.

use std::{
    ffi::c_void,
    mem,
    sync::{Arc, Mutex, PoisonError},
};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result, sys};

use crate::{Device, Error, Matrix, copy::Side, device::driver_error};

/// A device's side of its copies.
#[derive(Default)]
pub(crate) struct Copies {
    stream: Option<Arc<CudaStream>>,
    /// Of the last copy, until work was told to wait for it.
    copied: Option<Arc<CudaEvent>>,
    spare: Arc<Mutex<Option<Pinned>>>,
}

/// Matrices on their way to the host.
#[must_use]
pub struct HostCopy {
    /// There until this is dropped.
    pinned: Option<Pinned>,
    copied: Arc<CudaEvent>,
    /// Of each matrix.
    elements: Vec<usize>,
    spare: Arc<Mutex<Option<Pinned>>>,
}

/// Page-locked memory of the host.
struct Pinned {
    address: *mut c_void,
    bytes: usize,
    context: Arc<CudaContext>,
}

// SAFETY: it is memory of the process, owned by one at a time; every call about it binds the
// context.
unsafe impl Send for Pinned {}

impl Device {
    /// Begins to copy what these matrices hold once all that was queued is done, beside what is
    /// queued next. None if the host has not so much memory to lock.
    ///
    /// # Errors
    /// [`Error::Stale`], [`Error::Recording`], [`Error::Driver`].
    pub fn copy_to_host(&mut self, from: &[Matrix<f32>]) -> Result<Option<HostCopy>, Error> {
        self.refuse_while_recording("a copy to the host")?;
        from.iter()
            .try_for_each(|&matrix| self.check_live("a copy to the host", "a matrix", matrix))?;
        self.bind()?;
        let elements: Vec<usize> = from.iter().map(|matrix| matrix.elements()).collect();
        let Some(pinned) = self.pinned(elements.iter().sum::<usize>() * size_of::<f32>())? else {
            return Ok(None);
        };
        let stream = match &self.copies.stream {
            Some(stream) => Arc::clone(stream),
            None => Arc::clone(self.copies.stream.insert(self.context.new_stream().map_err(said)?)),
        };
        let copied = match self.queue_copies(&stream, from, &pinned) {
            Ok(copied) => Arc::new(copied),
            Err(error) => {
                pinned.free_after_all();
                return Err(error);
            }
        };
        self.copies.copied = Some(Arc::clone(&copied));
        Ok(Some(HostCopy {
            pinned: Some(pinned),
            copied,
            elements,
            spare: Arc::clone(&self.copies.spare),
        }))
    }

    /// Copies matrices one after the other into memory that has room for all, once all that was
    /// queued is done.
    fn queue_copies(
        &self,
        stream: &CudaStream,
        from: &[Matrix<f32>],
        to: &Pinned,
    ) -> Result<CudaEvent, Error> {
        let queued = self.stream.record_event(None).map_err(said)?;
        stream.wait(&queued).map_err(said)?;
        let mut offset = 0;
        for &matrix in from {
            // Within the memory, since all elements are.
            let host =
                Side::on_host(to.address.cast::<f32>().wrapping_add(offset), matrix.shape[1]);
            self.copy_rows::<f32>(
                stream,
                "a copy to the host",
                matrix.shape,
                Side::on_device(matrix),
                host,
            )?;
            offset += matrix.elements();
        }
        // Who waits for it sleeps.
        stream.record_event(Some(sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC)).map_err(said)
    }

    /// What is queued from now on begins after the copies to the host have ended. To be called
    /// before something overwrites what they read.
    ///
    /// # Errors
    /// [`Error::Recording`], [`Error::Driver`].
    pub fn wait_for_copies(&mut self) -> Result<(), Error> {
        let Some(copied) = &self.copies.copied else { return Ok(()) };
        self.refuse_while_recording("a wait for copies")?;
        self.stream.wait(copied).map_err(said)?;
        self.copies.copied = None;
        Ok(())
    }

    /// So much memory, that of an earlier copy if it is enough.
    fn pinned(&self, bytes: usize) -> Result<Option<Pinned>, Error> {
        let spare =
            mem::take(&mut *self.copies.spare.lock().unwrap_or_else(PoisonError::into_inner));
        if let Some(pinned) = spare.filter(|pinned| pinned.bytes >= bytes) {
            return Ok(Some(pinned));
        }
        // Cached, unlike what the driver is for: the host reads it. SAFETY: the context is bound.
        match unsafe { result::malloc_host(bytes.max(1), 0) } {
            Ok(address) => Ok(Some(Pinned { address, bytes, context: Arc::clone(&self.context) })),
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => Ok(None),
            Err(error) => Err(said(error)),
        }
    }
}

impl HostCopy {
    /// Waits for the copy and gives the elements of each matrix, in vectors that are filled anew as
    /// far as there are some.
    ///
    /// # Errors
    /// [`Error::Driver`], also of an operation that was queued before.
    pub fn read(self, mut to: Vec<Vec<f32>>) -> Result<Vec<Vec<f32>>, Error> {
        self.copied.synchronize().map_err(said)?;
        let pinned = self.pinned.as_ref().expect("there until this is dropped");
        // SAFETY: the memory has as many floats, aligned to pages, and the copy that has ended
        // wrote them all.
        let mut rest = unsafe {
            std::slice::from_raw_parts(pinned.address.cast::<f32>(), self.elements.iter().sum())
        };
        to.resize_with(self.elements.len(), Vec::new);
        for (to, elements) in to.iter_mut().zip(&self.elements) {
            let these = rest.split_off(..*elements).expect("the sum of all");
            to.clear();
            to.extend_from_slice(these);
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
            pinned.free_after_all();
        }
    }
}

impl Pinned {
    /// Frees what may still be written to. An error of the GPU ends its copies as well; a recording
    /// under way would be lost.
    fn free_after_all(self) {
        let _ = self.context.synchronize();
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.context.bind_to_thread();
        // SAFETY: it was allocated once and is freed once. Nothing writes to it any more: copies
        // into it have ended, or this comes from `free_after_all`.
        let _ = unsafe { result::free_host(self.address) };
    }
}

fn said(error: DriverError) -> Error {
    driver_error("a copy to the host".into(), error)
}

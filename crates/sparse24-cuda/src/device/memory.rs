//! Device memory, accounted by purpose.
//!
//! Invariant: memory is freed all at once, and every handle becomes stale then.

use std::marker::PhantomData;

use cudarc::driver::{DriverError, result, sys};

use super::{Device, STATE_WORDS, next_mark};
use crate::{Error, Matrix, Result, Scalar, error::driver_error};

/// Allocations, in order.
pub(super) struct Memory {
    allocations: Vec<Allocation>,
    purpose: &'static str,
}

struct Allocation {
    purpose: &'static str,
    address: u64,
    bytes: usize,
}

/// The purpose of allocations before [`Device::set_purpose`].
const SCRATCH: &str = "scratch";

impl Default for Memory {
    fn default() -> Self {
        Self { allocations: Vec::new(), purpose: SCRATCH }
    }
}

impl Device {
    /// Sets the purpose of the following allocations, by which [`Device::held`] and errors group.
    pub fn set_purpose(&mut self, purpose: &'static str) {
        self.memory.purpose = purpose;
    }

    /// Allocated bytes by purpose, in the order of the first allocation of each.
    #[must_use]
    pub fn held(&self) -> Vec<(&'static str, usize)> {
        let mut held: Vec<(&'static str, usize)> = Vec::new();
        for Allocation { purpose, bytes, .. } in &self.memory.allocations {
            match held.iter_mut().find(|(known, _)| known == purpose) {
                Some((_, sum)) => *sum += bytes,
                None => held.push((purpose, *bytes)),
            }
        }
        held
    }

    /// Allocates a zeroed matrix, 256-byte aligned. Errors name it `name`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Capturing`], [`Error::Driver`].
    pub fn alloc<T: Scalar>(&mut self, name: &str, shape: [usize; 2]) -> Result<Matrix<T>> {
        let matrix = self.alloc_undefined(name, shape)?;
        let bytes = matrix.elements() * size_of::<T>();
        // SAFETY: the allocation has this many bytes.
        unsafe { result::memset_d8_async(matrix.address, 0, bytes, self.stream()) }
            .map_err(|error| self.failed(format!("zeroing {name}"), error))?;
        Ok(matrix)
    }

    /// Like [`Device::alloc`], but uninitialized. Use it for memory that is written before it is
    /// read, so that `compute-sanitizer` can check that.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Capturing`], [`Error::Driver`].
    pub fn alloc_undefined<T: Scalar>(
        &mut self,
        name: &str,
        shape: [usize; 2],
    ) -> Result<Matrix<T>> {
        self.refuse_in_capture("an allocation")?;
        self.bind()?;
        let bytes = shape[0]
            .checked_mul(shape[1])
            .and_then(|elements| elements.checked_mul(size_of::<T>()));
        let Some(bytes) = bytes.filter(|&bytes| bytes <= isize::MAX as usize) else {
            return Err(self.out_of_memory(name, None));
        };
        let bytes = bytes.max(1);
        // Kernels that copy 16 bytes at a time may read up to the next multiple.
        let readable = bytes.next_multiple_of(16);
        // SAFETY: the context is bound.
        let address = unsafe { result::malloc_sync(readable) }.map_err(|error| match error {
            DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY) => {
                self.out_of_memory(name, Some(bytes))
            }
            error => driver_error(format!("allocating {name}"), error),
        })?;
        self.memory.allocations.push(Allocation { purpose: self.memory.purpose, address, bytes });
        Ok(Matrix { mark: self.mark, address, shape, stride: shape[1], element: PhantomData })
    }

    /// Frees all memory; every handle and captured graph becomes stale.
    ///
    /// # Errors
    /// [`Error::Capturing`]; [`Error::Driver`], also for an earlier operation that failed.
    pub fn reset(&mut self) -> Result {
        self.wait_for_copies()?;
        self.join()?;
        self.synchronize()?;
        self.free_all();
        self.memory.purpose = SCRATCH;
        self.mark = next_mark();
        self.state = self.alloc("step state", [1, STATE_WORDS])?;
        Ok(())
    }

    /// Frees all memory; no queued work may still use it.
    pub(super) fn free_all(&mut self) {
        for Allocation { address, .. } in self.memory.allocations.drain(..) {
            // SAFETY: it was allocated once, is freed once, and no queued work uses it.
            let _ = unsafe { result::free_sync(address) };
        }
    }

    /// The error of a driver call, with the holders of memory if memory ran out: loading kernels
    /// and instantiating graphs allocate too.
    pub(super) fn failed(&self, what: impl Into<String>, error: DriverError) -> Error {
        match error {
            DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY) => {
                self.out_of_memory(&what.into(), None)
            }
            error => driver_error(what, error),
        }
    }

    fn out_of_memory(&self, name: &str, asked: Option<usize>) -> Error {
        let (free, total) = result::mem_get_info().unwrap_or((0, 0));
        let (name, purpose) = (name.to_owned(), self.memory.purpose);
        Error::OutOfMemory { name, purpose, asked, free, total, held: self.held() }
    }
}

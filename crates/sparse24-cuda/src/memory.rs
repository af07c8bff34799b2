//! The memory that a device holds, and what for.
//!
//! Invariant: memory is given back all at once, so that no handle outlives it unnoticed.
//! Deliberately absent: what it holds.

use std::marker::PhantomData;

use cudarc::driver::{DriverError, result, sys};

use crate::{
    Device, Error, Matrix, Scalar,
    device::{driver_error, next_mark},
    step::StepState,
};

/// What is allocated, in order.
pub(crate) struct Memory {
    allocations: Vec<Allocation>,
    purpose: &'static str,
}

struct Allocation {
    purpose: &'static str,
    address: u64,
    bytes: usize,
}

/// The purpose of what is allocated before one was named.
const SCRATCH: &str = "scratch";

impl Default for Memory {
    fn default() -> Self {
        Self { allocations: Vec::new(), purpose: SCRATCH }
    }
}

impl Device {
    /// What the following allocations are for: [`Device::held`] and errors group by it.
    pub fn set_purpose(&mut self, purpose: &'static str) {
        self.memory.purpose = purpose;
    }

    /// Bytes that are allocated, by purpose in the order of their first.
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

    /// A zeroed matrix, 256-byte aligned; `name` appears in errors.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] with what holds the rest; [`Error::Driver`].
    pub fn alloc<T: Scalar>(&mut self, name: &str, shape: [usize; 2]) -> Result<Matrix<T>, Error> {
        let matrix = self.alloc_undefined(name, shape)?;
        // SAFETY: the allocation has that many bytes.
        unsafe {
            result::memset_d8_async(
                matrix.address,
                0,
                matrix.elements() * size_of::<T>(),
                self.stream.cu_stream(),
            )
        }
        .map_err(|error| self.refused(format!("zeroing {name}"), error))?;
        Ok(matrix)
    }

    /// As [`Device::alloc`], with whatever bits were there: for what is written before it is read,
    /// which `compute-sanitizer` then checks.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] with what holds the rest; [`Error::Driver`].
    pub fn alloc_undefined<T: Scalar>(
        &mut self,
        name: &str,
        shape: [usize; 2],
    ) -> Result<Matrix<T>, Error> {
        self.refuse_while_recording("an allocation")?;
        self.bind()?;
        let bytes = shape[0]
            .checked_mul(shape[1])
            .and_then(|elements| elements.checked_mul(size_of::<T>()));
        let Some(bytes) = bytes.filter(|&bytes| bytes <= isize::MAX as usize) else {
            return Err(self.out_of_memory(name, None));
        };
        let bytes = bytes.max(1);
        // SAFETY: the context is bound.
        let address = match unsafe { result::malloc_sync(bytes) } {
            Ok(address) => address,
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                return Err(self.out_of_memory(name, Some(bytes)));
            }
            Err(error) => return Err(driver_error(format!("allocating {name}"), error)),
        };
        self.memory.allocations.push(Allocation { purpose: self.memory.purpose, address, bytes });
        Ok(Matrix { mark: self.mark, address, shape, stride: shape[1], element: PhantomData })
    }

    /// Gives all memory back; every handle becomes stale.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn reset(&mut self) -> Result<(), Error> {
        self.wait_for_copies()?;
        self.synchronize()?;
        self.free_all();
        self.memory.purpose = SCRATCH;
        self.mark = next_mark();
        self.state = self.alloc("step state", [1, StepState::WORDS])?;
        Ok(())
    }

    /// Nothing that was queued may use it any more.
    pub(crate) fn free_all(&mut self) {
        for Allocation { address, .. } in self.memory.allocations.drain(..) {
            // SAFETY: it was allocated once and is freed once; nothing that was queued still uses
            // it.
            let _ = unsafe { result::free_sync(address) };
        }
    }

    /// What the driver refuses: for want of memory, which also kernels and recordings take, with
    /// who holds it.
    pub(crate) fn refused(&self, what: String, error: DriverError) -> Error {
        match error {
            DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY) => self.out_of_memory(&what, None),
            error => driver_error(what, error),
        }
    }

    fn out_of_memory(&self, name: &str, asked: Option<usize>) -> Error {
        let (free, total) = result::mem_get_info().unwrap_or((0, 0));
        Error::OutOfMemory {
            name: name.to_owned(),
            purpose: self.memory.purpose,
            asked,
            free,
            total,
            held: self.held(),
        }
    }
}

//! Pinned memory for copies to the device, which are then queued without waiting for the GPU: a
//! copy from other memory of more than 64 KiB waits for all work before it.
//!
//! Invariant: a range is written again only after the copies from all ranges have ended.

use cudarc::driver::CudaEvent;

use super::{Device, copy::Side, host_copy::Pinned};
use crate::{Error, Matrix, Result, Scalar, error::driver_error};

/// Ranges are handed out from the front to the back, then from the front again.
#[derive(Default)]
pub(super) struct Staging {
    pinned: Option<Pinned>,
    used: usize,
    /// The end of the last copy.
    copied: Option<CudaEvent>,
}

const OPERATION: &str = "upload";
/// Larger copies are rare, and wait.
const LARGEST: usize = 128 << 20;
/// The memory is for this many of the largest copy so far: what the device reads, what comes next,
/// and smaller copies between them.
const COPIES: usize = 3;
const ALIGNMENT: usize = 256;

impl Device {
    /// Copies to the device, row by row, what `write` puts into a slice of `elements`. `write` is
    /// called at most once. Does not wait for earlier work, unless the copy is large.
    ///
    /// # Errors
    /// [`Error::Shape`] unless the matrix has this many elements; [`Error::Stale`],
    /// [`Error::Capturing`], [`Error::Driver`].
    pub fn upload_with<T: Scalar>(
        &mut self,
        to: Matrix<T>,
        elements: usize,
        write: impl FnOnce(&mut [T]),
    ) -> Result {
        self.refuse_in_capture(OPERATION)?;
        self.check_live(OPERATION, "the matrix", to)?;
        if elements != to.elements() {
            return Err(Error::Shape {
                operation: OPERATION,
                operand: "the host's slice",
                expected: [1, to.elements()],
                found: [1, elements],
            });
        }
        let mut pageable = Vec::new();
        let values = if let Some(first) = self.stage(elements * size_of::<T>())? {
            // SAFETY: the range is aligned, lies within the pinned memory, was zeroed when that was
            // allocated, no copy reads it any more, and all bits are valid for a `Scalar`.
            unsafe { std::slice::from_raw_parts_mut(first.cast::<T>(), elements) }
        } else {
            pageable.resize(elements, T::default());
            &mut pageable[..]
        };
        write(values);
        let host = Side::on_host(values.as_mut_ptr(), to.shape[1]);
        self.queue_copy::<T>(OPERATION, to.shape, host, Side::on_device(to))?;
        match self.stream.record_event(None) {
            Ok(copied) => self.staging.copied = Some(copied),
            // The end of this copy cannot be asked for later.
            Err(error) => {
                self.synchronize()?;
                return Err(driver_error(OPERATION, error));
            }
        }
        Ok(())
    }

    /// Pinned memory of this size; `None` if it is too large or cannot be pinned.
    fn stage(&mut self, bytes: usize) -> Result<Option<*mut u8>> {
        if bytes > LARGEST {
            return Ok(None);
        }
        self.bind()?;
        let there = self.staging.pinned.as_ref().map_or(0, Pinned::bytes);
        if self.staging.used + bytes > there {
            if let Some(copied) = &self.staging.copied {
                copied.synchronize().map_err(|error| driver_error(OPERATION, error))?;
            }
            self.staging.used = 0;
            if COPIES * bytes > there {
                self.staging.pinned = None;
                let bytes = (COPIES * bytes).next_multiple_of(ALIGNMENT);
                let Some(pinned) = Pinned::new(&self.context, bytes)? else { return Ok(None) };
                // SAFETY: the memory has this size.
                unsafe { pinned.first().write_bytes(0, bytes) };
                self.staging.pinned = Some(pinned);
            }
        }
        let first = self.staging.pinned.as_ref().map(Pinned::first);
        let range = first.map(|first| first.wrapping_add(self.staging.used));
        self.staging.used += bytes.next_multiple_of(ALIGNMENT);
        Ok(range)
    }
}

//! Where the GPU's time goes: the duration of every queued operation, and what it is for.
//!
//! Two events bracket each operation while a profile is taken. They cost about a microsecond, and
//! prevent operations from overlapping, so a profiled step takes slightly longer. Asynchronous
//! copies to the host ([`crate::HostCopy`]) are not included.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use cudarc::driver::{CudaEvent, CudaStream, DriverError, sys};

pub use crate::kernels::Kind;
use crate::{Error, Result, error::driver_error, kernels};

/// A queued operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Work {
    /// A kernel of this crate.
    Kernel(&'static str),
    /// A dense product of a linear layer.
    Product {
        /// `forward`, `dgrad` or `wgrad`.
        pass: &'static str,
        /// Rows of the activations.
        tokens: usize,
        /// Shape of the weight: `[out, in]`.
        weight: [usize; 2],
    },
    /// A kernel of a sparse product, see [`Profile::set_product`].
    SparseProduct {
        /// `forward`, `dgrad` or `wgrad`.
        pass: &'static str,
        /// Shape of the weight: `[out, in]`.
        weight: [usize; 2],
    },
    /// A copy or a fill.
    Copy,
}

impl Work {
    /// The purpose of the operation.
    ///
    /// # Panics
    /// For a kernel that is not in the table of kernels.
    #[must_use]
    pub fn kind(self) -> Kind {
        match self {
            Self::Product { .. } => Kind::DenseProduct,
            Self::SparseProduct { .. } => Kind::SparseProduct,
            Self::Copy => Kind::Copy,
            Self::Kernel(entry) => {
                kernels::source_of(entry)
                    .unwrap_or_else(|| panic!("{entry} is not in the table of kernels"))
                    .kind
            }
        }
    }
}

/// An operation and its duration.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    /// The operation.
    pub work: Work,
    /// Milliseconds on the GPU.
    pub ms: f32,
}

/// A handle to a device's profile, which is off at first.
#[derive(Clone, Default)]
pub struct Profile(Arc<Record>);

#[derive(Default)]
struct Record {
    on: AtomicBool,
    spans: Mutex<Vec<(Work, CudaEvent, CudaEvent)>>,
    product: Mutex<Option<(&'static str, [usize; 2])>>,
}

impl Profile {
    /// Times every operation that is queued from now on.
    pub fn start(&self) {
        self.0.on.store(true, Ordering::Relaxed);
    }

    /// Whether operations are being timed.
    #[must_use]
    pub fn is_taken(&self) -> bool {
        self.0.on.load(Ordering::Relaxed)
    }

    /// Stops timing, waits for the operations, and returns them in order.
    ///
    /// # Errors
    /// [`Error::Driver`], also for an earlier operation that failed.
    pub fn finish(&self) -> Result<Vec<Span>> {
        self.0.on.store(false, Ordering::Relaxed);
        let spans =
            std::mem::take(&mut *self.0.spans.lock().unwrap_or_else(PoisonError::into_inner));
        let span = |(work, start, end): (Work, CudaEvent, CudaEvent)| {
            Ok(Span { work, ms: start.elapsed_ms(&end).map_err(failed)? })
        };
        spans.into_iter().map(span).collect()
    }

    /// Names the pass and the weight's shape of the sparse products that are queued from now on.
    pub fn set_product(&self, product: Option<(&'static str, [usize; 2])>) {
        *self.0.product.lock().unwrap_or_else(PoisonError::into_inner) = product;
    }

    /// The work, with a sparse product under its name.
    fn named(&self, work: Work) -> Work {
        let product = *self.0.product.lock().unwrap_or_else(PoisonError::into_inner);
        match product.filter(|_| work.kind() == Kind::SparseProduct) {
            Some((pass, weight)) => Work::SparseProduct { pass, weight },
            None => work,
        }
    }

    pub(crate) fn begin(&self, stream: &CudaStream) -> Result<Option<CudaEvent>> {
        self.is_taken().then(|| event(stream)).transpose()
    }

    pub(crate) fn end(&self, work: Work, start: Option<CudaEvent>, stream: &CudaStream) -> Result {
        if let Some(start) = start {
            let (end, work) = (event(stream)?, self.named(work));
            self.0.spans.lock().unwrap_or_else(PoisonError::into_inner).push((work, start, end));
        }
        Ok(())
    }
}

fn event(stream: &CudaStream) -> Result<CudaEvent> {
    stream.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).map_err(failed)
}

fn failed(error: DriverError) -> Error {
    driver_error("a profile", error)
}

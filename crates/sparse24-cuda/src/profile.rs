//! Where a GPU's time goes: everything that is queued, each with its span on the GPU's clock, and
//! sums by kind of work.
//!
//! Two events stand around whatever is queued while a profile is taken. They cost about a
//! microsecond each, and what they measure does not overlap: a step under a profile takes a little
//! longer than one without, which is what shares should be told of. Deliberately absent: copies to
//! the host that go on beside the work ([`crate::HostCopy`]), which are no part of a step's time.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use cudarc::driver::{CudaEvent, CudaStream, DriverError, sys};

use crate::{Error, device::driver_error, kernels};

/// What was queued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Work {
    /// A kernel of this crate.
    Kernel(&'static str),
    /// A dense product.
    Product {
        /// `forward`, `dgrad` or `wgrad`.
        pass: &'static str,
        /// p.
        tokens: usize,
        /// `[r, q]`.
        weight: [usize; 2],
    },
    /// A copy or a fill.
    Copy,
}

/// What work is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// spmm24.
    SparseProduct,
    /// cuBLASLt's.
    DenseProduct,
    /// Forward and backward.
    Attention,
    /// Estimates of dZ^T, compressed.
    Mvue,
    /// Mask search, compression of weights, flips.
    Mask,
    /// LayerNorm with its residual.
    Norm,
    /// GELU, GEGLU, SwiGLU.
    Activation,
    /// Cross-entropy.
    Loss,
    /// Gradient norm and AdamW.
    Optimizer,
    /// Gradients of biases.
    Bias,
    /// Embeddings.
    Embedding,
    /// Dropout outside of attention.
    Dropout,
    /// Copies and fills.
    Copy,
}

/// What each file of kernels is for.
const KINDS: &[(&str, Kind)] = &[
    ("activation", Kind::Activation),
    ("adamw", Kind::Optimizer),
    ("attention_backward", Kind::Attention),
    ("attention_forward", Kind::Attention),
    ("bias_grad", Kind::Bias),
    ("compress_weight", Kind::Mask),
    ("dropout", Kind::Dropout),
    ("embedding", Kind::Embedding),
    ("flip_count", Kind::Mask),
    ("grad_norm", Kind::Optimizer),
    ("loss", Kind::Loss),
    ("mask_search", Kind::Mask),
    ("mvue_compress", Kind::Mvue),
    ("norm", Kind::Norm),
    ("spmm24_mma", Kind::SparseProduct),
    ("spmm24_sm90", Kind::SparseProduct),
];

impl Kind {
    /// In the words of a report.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::SparseProduct => "sparse products",
            Self::DenseProduct => "dense products",
            Self::Attention => "attention",
            Self::Mvue => "mvue",
            Self::Mask => "masks and compression",
            Self::Norm => "norm",
            Self::Activation => "activation",
            Self::Loss => "loss",
            Self::Optimizer => "optimizer",
            Self::Bias => "bias gradients",
            Self::Embedding => "embedding",
            Self::Dropout => "dropout",
            Self::Copy => "copies and fills",
        }
    }
}

impl Work {
    /// What it is for.
    ///
    /// # Panics
    /// For a kernel whose file has no row in the table of kinds.
    #[must_use]
    pub fn kind(self) -> Kind {
        match self {
            Self::Product { .. } => Kind::DenseProduct,
            Self::Copy => Kind::Copy,
            Self::Kernel(entry) => {
                let kind = kernels::source_of(entry)
                    .and_then(|source| KINDS.iter().find(|(name, _)| *name == source.name));
                kind.unwrap_or_else(|| panic!("{entry} has no row in the table of kinds")).1
            }
        }
    }
}

/// Something that was queued, and how long the GPU took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    /// What.
    pub work: Work,
    /// Milliseconds.
    pub ms: f32,
}

/// A handle to a device's record of time; off at first.
#[derive(Clone, Default)]
pub struct Profile(Arc<Record>);

#[derive(Default)]
struct Record {
    taken: AtomicBool,
    spans: Mutex<Vec<(Work, CudaEvent, CudaEvent)>>,
}

impl Profile {
    /// From now on everything queued is noted.
    pub fn start(&self) {
        self.0.taken.store(true, Ordering::Relaxed);
    }

    /// Whether everything queued is noted.
    #[must_use]
    pub fn is_taken(&self) -> bool {
        self.0.taken.load(Ordering::Relaxed)
    }

    /// Ends it, waits for what was noted, and gives it in the order in which it was queued.
    ///
    /// # Errors
    /// [`Error::Driver`], also of an earlier operation.
    pub fn finish(&self) -> Result<Vec<Span>, Error> {
        self.0.taken.store(false, Ordering::Relaxed);
        let spans =
            std::mem::take(&mut *self.0.spans.lock().unwrap_or_else(PoisonError::into_inner));
        let span = |(work, began, ended): (Work, CudaEvent, CudaEvent)| {
            Ok(Span { work, ms: began.elapsed_ms(&ended).map_err(said)? })
        };
        spans.into_iter().map(span).collect()
    }

    pub(crate) fn begin(&self, stream: &CudaStream) -> Result<Option<CudaEvent>, Error> {
        self.is_taken().then(|| event(stream)).transpose()
    }

    pub(crate) fn end(
        &self,
        work: Work,
        began: Option<CudaEvent>,
        stream: &CudaStream,
    ) -> Result<(), Error> {
        if let Some(began) = began {
            let ended = event(stream)?;
            self.0.spans.lock().unwrap_or_else(PoisonError::into_inner).push((work, began, ended));
        }
        Ok(())
    }
}

fn event(stream: &CudaStream) -> Result<CudaEvent, Error> {
    stream.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).map_err(said)
}

fn said(error: DriverError) -> Error {
    driver_error("a profile".into(), error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_kernels_has_a_kind_and_no_other_has() {
        for source in kernels::SOURCES {
            let kinds = KINDS.iter().filter(|(name, _)| *name == source.name).count();
            assert_eq!(kinds, 1, "rows of {} in KINDS", source.name);
            source.entries.iter().for_each(|entry| _ = Work::Kernel(entry).kind());
        }
        assert_eq!(KINDS.len(), kernels::SOURCES.len());
    }
}

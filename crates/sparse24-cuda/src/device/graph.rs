//! Captures a sequence of launches as a CUDA graph and replays it.
//!
//! Invariant: a replay launches the captured kernels with the captured arguments, so it produces
//! the same bits; only the contents of device memory, including the step state, may differ. Host
//! reads and writes, allocations and synchronization are rejected during capture.

use std::{
    ptr::null_mut,
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

use cudarc::driver::{CudaContext, sys};

use super::Device;
use crate::{Error, Result};

/// A captured CUDA graph. It becomes stale when its device is reset.
#[derive(Debug)]
pub struct Graph {
    executable: sys::CUgraphExec,
    mark: u64,
    context: Arc<CudaContext>,
}

// SAFETY: the graph belongs to the context, which any thread may use once it is bound there; every
// use binds it.
unsafe impl Send for Graph {}

/// Held by threads that capture, and alone by what invalidates the captures of all threads. No
/// thread may wait for another while it holds this.
static CAPTURES: RwLock<()> = RwLock::new(());

/// Keeps other threads from opening or closing cuBLASLt, which invalidates captures, until this is
/// dropped.
pub fn capturing() -> RwLockReadGuard<'static, ()> {
    CAPTURES.read().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until no thread captures; none starts before this is dropped.
pub(crate) fn without_captures() -> RwLockWriteGuard<'static, ()> {
    CAPTURES.write().unwrap_or_else(PoisonError::into_inner)
}

impl Device {
    /// Captures work from now on, instead of running it. Every kernel must have been launched
    /// before, since loading a kernel cannot be captured. If other threads open devices, hold
    /// [`capturing`] until the capture ends.
    ///
    /// # Errors
    /// [`Error::Capturing`] if a capture is in progress; [`Error::OutOfMemory`], [`Error::Driver`].
    pub fn start_capture(&mut self) -> Result {
        self.refuse_in_capture("a capture")?;
        self.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive, and nothing else uses it.
        unsafe { sys::cuStreamBeginCapture_v2(self.stream(), mode) }
            .result()
            .map_err(|error| self.failed("starting a capture", error))?;
        self.capturing = true;
        Ok(())
    }

    /// Ends the capture and returns its graph. Call this also if a captured operation failed.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Driver`], also if the work cannot be captured.
    pub fn end_capture(&mut self) -> Result<Graph> {
        self.capturing = false;
        self.bind()?;
        let (mut graph, mut executable) = (null_mut(), null_mut());
        // SAFETY: the stream is alive, and the driver writes a pointer.
        unsafe { sys::cuStreamEndCapture(self.stream(), &mut graph) }
            .result()
            .map_err(|error| self.failed("ending a capture", error))?;
        // SAFETY: the graph is complete, and the driver writes a pointer.
        let instantiated = unsafe { sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0) };
        // SAFETY: it was created once and is destroyed once; the executable does not need it.
        let _ = unsafe { sys::cuGraphDestroy(graph) };
        instantiated.result().map_err(|error| self.failed("instantiating a graph", error))?;
        Ok(Graph { executable, mark: self.mark, context: Arc::clone(&self.context) })
    }

    /// Queues a captured graph.
    ///
    /// # Errors
    /// [`Error::Stale`] if the graph belongs to another device, or memory was freed since its
    /// capture; [`Error::Capturing`], [`Error::OutOfMemory`], [`Error::Driver`].
    pub fn replay(&mut self, graph: &Graph) -> Result {
        if graph.mark != self.mark {
            return Err(Error::Stale { operation: "replay", operand: "the graph" });
        }
        self.refuse_in_capture("replay")?;
        self.bind()?;
        // SAFETY: the graph is alive, and its memory is held, since its mark is the device's.
        unsafe { sys::cuGraphLaunch(graph.executable, self.stream()) }
            .result()
            .map_err(|error| self.failed("replay", error))
    }

    /// Refuses an operation that cannot be captured.
    pub(crate) fn refuse_in_capture(&self, operation: &'static str) -> Result {
        if self.capturing { Err(Error::Capturing { operation }) } else { Ok(()) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: it was created once and is destroyed once; the driver keeps what a running
            // launch needs.
            let _ = unsafe { sys::cuGraphExecDestroy(self.executable) };
        }
    }
}

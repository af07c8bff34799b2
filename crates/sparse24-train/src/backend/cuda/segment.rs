//! Segments of the CUDA adaptor: queued once, then recorded, then replayed as one launch.
//!
//! Invariant: what overwrites parameters is queued after the copies of them that were begun before.
//! Deliberately absent: what a segment does.

use sparse24_cuda::Graph;

use super::CudaBackend;
use crate::{
    Error,
    backend::{Backend, Launches, SegmentId},
};

/// A segment that was done once: its plans are chosen, its kernels loaded, its scratch is there.
pub(super) struct Segment {
    graph: Option<Graph>,
    writes: Writes,
}

/// What work writes to.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Writes {
    /// No parameter and no moment.
    Other,
    Parameters,
}

impl CudaBackend {
    /// See [`Backend::segment`].
    pub(super) fn run_segment(
        &mut self,
        segment: SegmentId,
        work: &mut dyn FnMut(&mut dyn Backend) -> Result<(), Error>,
    ) -> Result<(), Error> {
        // A replay is one launch: where each is timed, they are queued.
        if self.gpu.profile().is_taken() {
            return work(self);
        }
        let known = self.segments.get(&segment);
        // A wait cannot be recorded.
        if known.is_some_and(|known| known.writes == Writes::Parameters) {
            self.gpu.wait_for_copies()?;
        }
        if let Some(graph) = known.and_then(|known| known.graph.as_ref()) {
            return Ok(self.gpu.replay(graph)?);
        }
        let is_first = known.is_none();
        self.writes = Writes::Other;
        let graph = if self.launches == Launches::Queued || is_first {
            work(self)?;
            None
        } else {
            self.gpu.start_capture()?;
            let queued = work(self);
            let recorded = self.gpu.end_capture();
            queued?;
            let graph = recorded?;
            self.gpu.replay(&graph)?;
            Some(graph)
        };
        self.segments.insert(segment, Segment { graph, writes: self.writes });
        Ok(())
    }
}

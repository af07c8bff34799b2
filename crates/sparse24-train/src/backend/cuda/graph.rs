//! CUDA graphs of the repeated parts of a step: launched one by one the first time, captured the
//! second time, then replayed.
//!
//! Invariant: what overwrites parameters is queued after copies of them that were started before.

use sparse24_cuda::Graph;

use super::CudaBackend;
use crate::{
    Error,
    backend::{Backend, GraphId, Launches},
};

/// A part that ran once: its plans are chosen, its kernels loaded, its scratch allocated.
pub(super) struct Captured {
    graph: Option<Graph>,
    writes: Writes,
}

/// The memory that a part of a step writes.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Writes {
    /// No parameters and no moments.
    Other,
    Parameters,
}

impl CudaBackend {
    /// See [`Backend::graph`].
    pub(super) fn run_graph(
        &mut self,
        id: GraphId,
        work: &mut dyn FnMut(&mut dyn Backend) -> Result<(), Error>,
    ) -> Result<(), Error> {
        // A replay is one launch: to time each kernel, they are launched one by one.
        if self.gpu.profile().is_taken() {
            return work(self);
        }
        let known = self.graphs.get(&id);
        // A wait cannot be captured.
        if known.is_some_and(|known| known.writes == Writes::Parameters) {
            self.gpu.wait_for_copies()?;
        }
        if let Some(graph) = known.and_then(|known| known.graph.as_ref()) {
            return Ok(self.gpu.replay(graph)?);
        }
        let is_first = known.is_none();
        self.writes = Writes::Other;
        let graph = if self.launches == Launches::Eager || is_first {
            work(self)?;
            None
        } else {
            self.gpu.start_capture()?;
            let queued = work(self);
            let captured = self.gpu.end_capture();
            queued?;
            let graph = captured?;
            self.gpu.replay(&graph)?;
            Some(graph)
        };
        self.graphs.insert(id, Captured { graph, writes: self.writes });
        Ok(())
    }
}

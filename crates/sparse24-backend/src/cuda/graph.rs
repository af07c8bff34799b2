//! CUDA graphs of the repeated parts of a step: launched one by one the first time, captured the
//! second time, then replayed. Where an exchange of gradients starts, a graph is cut into segments.
//!
//! Invariant: what overwrites parameters is queued after copies of them that were started before.

use sparse24_cuda::{Graph, capturing};

use super::{CudaBackend, exchange};
use crate::{Backend, Error, GraphId, Launches, Stage};

/// A part that ran once: its plans are chosen, its kernels loaded, its scratch allocated.
pub(super) struct Captured {
    /// Empty before the capture.
    segments: Vec<Segment>,
    writes: Writes,
}

/// A piece of a part, and the stages of the exchange that start after it.
pub(super) struct Segment(Graph, Vec<Stage>);

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
        if let Some(known) = known.filter(|known| !known.segments.is_empty()) {
            return known.segments.iter().try_for_each(|Segment(graph, stages)| {
                self.gpu.replay(graph)?;
                exchange::start(&mut self.communicator, &mut self.gpu, &self.buffers, stages)
            });
        }
        let is_first = known.is_none();
        self.writes = Writes::Other;
        let segments = if self.launches == Launches::Eager || is_first {
            work(self)?;
            Vec::new()
        } else {
            let _capturing = capturing();
            self.gpu.start_capture()?;
            self.capture = Some(Vec::new());
            let queued = work(self).and_then(|()| self.end_segment(&[]));
            let segments = self.capture.take().unwrap_or_default();
            if queued.is_err() {
                // Discards the incomplete capture.
                let _ = self.gpu.end_capture();
            }
            queued?;
            segments
        };
        self.graphs.insert(id, Captured { segments, writes: self.writes });
        Ok(())
    }

    /// Starts stages of the exchange, between two segments if a graph is being captured.
    pub(super) fn cut_graph(&mut self, stages: &[Stage]) -> Result<(), Error> {
        if self.capture.is_none() || stages.is_empty() {
            let Self { communicator, gpu, buffers, .. } = self;
            return exchange::start(communicator, gpu, buffers, stages);
        }
        self.end_segment(stages)?;
        Ok(self.gpu.start_capture()?)
    }

    /// Queues what was captured, and starts stages of the exchange.
    fn end_segment(&mut self, stages: &[Stage]) -> Result<(), Error> {
        let Self { communicator, gpu, buffers, capture, .. } = self;
        let graph = gpu.end_capture()?;
        gpu.replay(&graph)?;
        exchange::start(communicator, gpu, buffers, stages)?;
        capture.get_or_insert_default().push(Segment(graph, stages.to_vec()));
        Ok(())
    }
}

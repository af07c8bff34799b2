//! The queue of work for the device, and its recording.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::Device;
use crate::{Error, Matrix, Result};

/// Maximum commands per submission: a driver may end a submission that takes seconds.
pub(super) const SUBMITTED: usize = 128;

/// One piece of work.
#[derive(Clone)]
pub(super) enum Command {
    Run {
        pipeline: wgpu::ComputePipeline,
        bindings: wgpu::BindGroup,
        /// Offset of the constants in bytes.
        constants: u32,
        grid: [u32; 2],
    },
    Copy {
        from: wgpu::Buffer,
        to: wgpu::Buffer,
        /// Offsets and length in bytes.
        from_offset: u64,
        to_offset: u64,
        length: u64,
    },
}

/// Recorded work, which can be queued again: the same kernels, constants and buffers.
pub struct Recorded(Vec<Command>);

/// Calls [`wgpu::Device::poll`], which panics if the device is lost while it waits.
pub(super) fn waited(poll: impl FnOnce() -> Result<wgpu::PollStatus, wgpu::PollError>) -> Result {
    match catch_unwind(AssertUnwindSafe(poll)) {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(Error::Lost(error.to_string())),
        Err(panic) => {
            let message = panic.downcast_ref::<String>().map_or("while waiting for it", |s| s);
            Err(Error::Lost(message.to_owned()))
        }
    }
}

impl Device {
    pub(super) fn push(&mut self, command: Command) -> Result {
        if let Some(recording) = &mut self.recording {
            recording.push(command.clone());
        }
        self.pending.push(command);
        if self.pending.len() >= SUBMITTED { self.submit() } else { Ok(()) }
    }

    /// Submits the pending work.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Driver`] or [`Error::Invalid`] of this or earlier work.
    pub fn submit(&mut self) -> Result {
        if self.pending.is_empty() {
            return self.check();
        }
        self.constants.write(&self.queue);
        let mut encoder = self.device.create_command_encoder(&Default::default());
        let mut rest = &self.pending[..];
        while let Some(first) = rest.first() {
            if let Command::Copy { from, to, from_offset, to_offset, length } = first {
                encoder.copy_buffer_to_buffer(from, *from_offset, to, *to_offset, *length);
                rest = &rest[1..];
                continue;
            }
            let mut pass = encoder.begin_compute_pass(&Default::default());
            while let Some((Command::Run { pipeline, bindings, constants, grid: [x, y] }, others)) =
                rest.split_first()
            {
                pass.set_pipeline(pipeline);
                pass.set_bind_group(0, bindings, &[*constants]);
                pass.dispatch_workgroups(*x, *y, 1);
                rest = others;
            }
        }
        self.queue.submit([encoder.finish()]);
        self.pending.clear();
        self.check()
    }

    /// Waits for all work.
    ///
    /// # Errors
    /// Like [`Self::submit`].
    pub fn wait(&mut self) -> Result {
        self.submit()?;
        let waited = waited(|| self.device.poll(wgpu::PollType::wait_indefinitely()));
        self.check()?;
        waited
    }

    /// Starts to record the work that follows. It is also executed.
    pub fn start_recording(&mut self) {
        self.recording = Some(Vec::new());
    }

    /// The work since [`Self::start_recording`].
    ///
    /// # Panics
    /// If nothing was being recorded.
    pub fn end_recording(&mut self) -> Recorded {
        Recorded(self.recording.take().expect("a recording was started"))
    }

    /// Queues recorded work again.
    ///
    /// # Errors
    /// Like [`Self::submit`].
    pub fn replay(&mut self, recorded: &Recorded) -> Result {
        recorded.0.iter().try_for_each(|command| self.push(command.clone()))
    }

    /// Copies a contiguous matrix to another buffer.
    pub(crate) fn copy_contiguous(&mut self, from: Matrix, to: Matrix) -> Result {
        let [source, target] = [from, to].map(|m| self.buffers[m.buffer].memory.clone());
        self.push(Command::Copy {
            from: source,
            to: target,
            from_offset: 4 * from.offset as u64,
            to_offset: 4 * to.offset as u64,
            length: 4 * from.elements() as u64,
        })
    }
}

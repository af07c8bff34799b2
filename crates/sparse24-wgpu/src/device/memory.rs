//! Allocation, and copies from and to the host.

use std::{ops::Range, sync::mpsc};

use sparse24_core::Mask;
use wgpu::BufferUsages;

use super::{Device, Failed, Failure, queue::waited};
use crate::{Error, Matrix, Result, Tiles, error::check_shape};

/// One allocation.
pub(super) struct Buffer {
    purpose: &'static str,
    pub(super) memory: wgpu::Buffer,
}

impl Buffer {
    pub(super) fn binding(&self) -> wgpu::BindingResource<'_> {
        self.memory.as_entire_binding()
    }
}

/// A copy to the host that has been started.
pub struct Copied {
    device: wgpu::Device,
    failure: Failed,
    /// Bytes that were allocated when the copy started.
    held: u64,
    stages: Vec<Stage>,
    submission: Option<wgpu::SubmissionIndex>,
    /// The matrices in order.
    parts: Vec<Matrix>,
}

/// Memory that the host can read.
struct Stage {
    memory: wgpu::Buffer,
    arrival: mpsc::Receiver<Result<(), wgpu::BufferAsyncError>>,
    pieces: Vec<Piece>,
}

/// A range of a matrix's words.
#[derive(Debug, Clone, PartialEq)]
struct Piece {
    matrix: usize,
    words: Range<usize>,
}

/// Maximum words of a staging buffer: the state of a run may exceed what one buffer can hold.
const STAGE: usize = 64 << 20;

/// Maximum words of uploads that wait in the driver's memory.
const UPLOADS: usize = 16 << 20;

/// Little-endian bytes.
pub(super) fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Number of elements from the first to the last of a matrix, including the gaps between rows.
fn span(m: Matrix) -> usize {
    if m.elements() == 0 { 0 } else { (m.shape[0] - 1) * m.stride + m.shape[1] }
}

/// Cuts matrices of these lengths into stages of at most `most` words.
fn stages(lengths: &[usize], most: usize) -> Vec<Vec<Piece>> {
    let (mut stages, mut free) = (Vec::<Vec<Piece>>::new(), 0);
    for (matrix, &length) in lengths.iter().enumerate() {
        let mut start = 0;
        while start < length {
            if free == 0 {
                stages.push(Vec::new());
                free = most;
            }
            let end = length.min(start + free);
            let piece = Piece { matrix, words: start..end };
            stages.last_mut().expect("one was pushed").push(piece);
            free -= end - start;
            start = end;
        }
    }
    stages
}

impl Copied {
    /// Waits for the values and returns the bits of each matrix, with its rows packed. In a
    /// browser, the values must have [arrived](super::Arrivals::all) already.
    ///
    /// # Errors
    /// Failures of earlier work; in a browser, [`Error::Driver`] if values are missing.
    pub fn read(self) -> Result<Vec<Vec<u32>>> {
        let Self { device, failure, held, stages, submission, parts } = self;
        if stages.is_empty() {
            return Ok(vec![Vec::new(); parts.len()]);
        }
        let lost = |error: &dyn std::error::Error| Error::Lost(error.to_string());
        let wait = wgpu::PollType::Wait { submission_index: submission, timeout: None };
        let waited = waited(|| device.poll(wait));
        // A failure that was reported earlier is more specific than that of the wait.
        failure.check(|| held)?;
        waited?;
        let mut read: Vec<_> = parts.iter().map(|&m| Vec::with_capacity(span(m))).collect();
        for Stage { memory, arrival, pieces } in stages {
            let mapped = if cfg!(target_family = "wasm") {
                let early = |_| Error::Driver("a copy was read before it arrived".to_owned());
                arrival.try_recv().map_err(early)?
            } else {
                arrival.recv().map_err(|error| lost(&error))?
            };
            mapped.map_err(|error| lost(&error))?;
            let view = memory.get_mapped_range(..).map_err(|error| lost(&error))?;
            let mut words = view.as_chunks::<4>().0.iter().map(|&word| u32::from_le_bytes(word));
            for Piece { matrix, words: range } in pieces {
                read[matrix].extend(words.by_ref().take(range.len()));
            }
        }
        for (m, words) in parts.iter().zip(&mut read).filter(|(m, _)| !m.is_contiguous()) {
            let rows = words.chunks(m.stride.max(1));
            *words = rows.flat_map(|row| &row[..m.shape[1]]).copied().collect();
        }
        Ok(read)
    }
}

impl Device {
    /// A zeroed matrix; `name` appears in errors, `purpose` in [`Self::held`].
    ///
    /// # Errors
    /// [`Error::TooLarge`]; [`Error::OutOfMemory`].
    pub fn alloc(
        &mut self,
        name: &str,
        shape: [usize; 2],
        purpose: &'static str,
    ) -> Result<Matrix> {
        let bytes = shape.map(|n| n as u64);
        let bytes = bytes[0].saturating_mul(bytes[1]).saturating_mul(4).max(4);
        let (limit, name) = (self.largest(), name.to_owned());
        if bytes > limit {
            return Err(Error::TooLarge { name, bytes, limit });
        }
        let usage = BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST;
        let memory = self.create(&name, bytes, usage)?;
        self.buffers.push(Buffer { purpose, memory });
        Ok(Matrix { buffer: self.buffers.len() - 1, offset: 0, shape, stride: shape[1] })
    }

    /// Replaces the whole buffer of a matrix by a zeroed one of another shape; queued and recorded
    /// work keeps the former memory.
    ///
    /// # Errors
    /// Errors of [`Self::alloc`].
    pub fn realloc(&mut self, m: Matrix, name: &str, shape: [usize; 2]) -> Result<Matrix> {
        let other = self.alloc(name, shape, self.buffers[m.buffer].purpose)?;
        self.buffers.swap_remove(m.buffer);
        Ok(Matrix { buffer: m.buffer, ..other })
    }

    /// A buffer, or [`Error::OutOfMemory`].
    fn create(&self, name: &str, size: u64, usage: BufferUsages) -> Result<wgpu::Buffer> {
        self.check()?;
        let label = Some(name);
        let descriptor = wgpu::BufferDescriptor { label, size, usage, mapped_at_creation: false };
        let buffer = self.device.create_buffer(&descriptor);
        // Only this buffer was refused, so the device can still be used.
        let refused = |failure: &mut Failure| matches!(failure, Failure::Memory);
        if self.failure.0.lock().expect("no holder panics").take_if(refused).is_some() {
            let held = self.held_by_all();
            return Err(Error::OutOfMemory { what: format!("{name} needs {size} bytes"), held });
        }
        self.check()?;
        Ok(buffer)
    }

    /// An empty mask of a `[rows, columns]` matrix.
    ///
    /// # Errors
    /// [`Error::Semantics`] unless 4 divides both sizes; those of [`Self::alloc`].
    pub fn alloc_tiles(&mut self, shape: [usize; 2], purpose: &'static str) -> Result<Tiles> {
        let tiles = Mask::empty(shape[0], shape[1])?.tiles().len();
        let words = self.alloc("mask", [1, tiles.div_ceil(2)], purpose)?;
        Ok(Tiles { words, shape })
    }

    pub(super) fn held_by_all(&self) -> u64 {
        self.buffers.iter().map(|buffer| buffer.memory.size()).sum()
    }

    /// Bytes held for a purpose.
    #[must_use]
    pub fn held(&self, purpose: &str) -> u64 {
        let of_purpose = self.buffers.iter().filter(|buffer| buffer.purpose == purpose);
        of_purpose.map(|buffer| buffer.memory.size()).sum()
    }

    /// Copies bits from the host, with packed rows.
    ///
    /// # Errors
    /// [`Error::Shape`] unless there are as many words as elements; failures of earlier work.
    pub fn upload(&mut self, to: Matrix, from: &[u32]) -> Result {
        if from.len() != to.elements() {
            let host = Matrix { shape: [1, from.len()], ..to };
            return check_shape("upload", "host data", to.shape, host);
        }
        self.submit()?;
        let [length, step] = match to.is_contiguous() {
            true => [UPLOADS; 2],
            false => [to.shape[1], to.stride],
        };
        let buffer = self.buffers[to.buffer].memory.clone();
        for (i, words) in from.chunks(length.max(1)).enumerate() {
            self.queue.write_buffer(&buffer, 4 * (to.offset + i * step) as u64, &bytes(words));
            self.uploaded += words.len();
            if self.uploaded >= UPLOADS {
                self.uploaded = 0;
                // The driver frees uploads only once a later submission is done.
                self.queue.submit([]);
                self.wait()?;
            }
        }
        self.check()
    }

    /// Starts to copy matrices to the host, with the values that they have after the work queued so
    /// far.
    ///
    /// # Errors
    /// Failures of earlier work.
    pub fn copy_out(&mut self, from: &[Matrix]) -> Result<Copied> {
        self.submit()?;
        let lengths: Vec<_> = from.iter().map(|&m| span(m)).collect();
        let mut encoder = self.device.create_command_encoder(&Default::default());
        let mut copied = Vec::new();
        for pieces in stages(&lengths, STAGE) {
            let words: usize = pieces.iter().map(|piece| piece.words.len()).sum();
            let usage = BufferUsages::COPY_DST | BufferUsages::MAP_READ;
            let memory = self.create("the copy to the host", 4 * words as u64, usage)?;
            let mut at = 0;
            for Piece { matrix, words } in &pieces {
                let m = from[*matrix];
                let (source, first) = (&self.buffers[m.buffer].memory, m.offset + words.start);
                let bytes = 4 * words.len() as u64;
                encoder.copy_buffer_to_buffer(source, 4 * first as u64, &memory, at, bytes);
                at += bytes;
            }
            copied.push((memory, pieces));
        }
        let submission = Some(self.queue.submit([encoder.finish()]));
        self.check()?;
        let staged = |(memory, pieces): (wgpu::Buffer, _)| {
            let (sender, arrival) = mpsc::channel();
            memory.map_async(wgpu::MapMode::Read, .., move |mapped| {
                // The receiver is gone after a failed poll.
                let _ = sender.send(mapped);
            });
            Stage { memory, arrival, pieces }
        };
        let stages = copied.into_iter().map(staged).collect();
        let (device, failure) = (self.device.clone(), self.failure.clone());
        let (held, parts) = (self.held_by_all(), from.to_vec());
        Ok(Copied { device, failure, held, stages, submission, parts })
    }

    /// Copies bits to the host, with packed rows.
    ///
    /// # Errors
    /// Failures of this or earlier work.
    pub fn download(&mut self, from: Matrix) -> Result<Vec<u32>> {
        Ok(self.copy_out(&[from])?.read()?.swap_remove(0))
    }

    /// Copies a mask from the host.
    ///
    /// # Errors
    /// [`Error::Shape`] unless the mask has the shape; those of [`Self::upload`].
    pub fn upload_mask(&mut self, to: Tiles, from: &Mask) -> Result {
        let host = Matrix { shape: from.shape(), ..to.words };
        check_shape("upload", "mask", to.shape, host)?;
        let words = from.tiles().chunks(2);
        let words =
            words.map(|two| two.iter().rev().fold(0, |word, &bits| word << 16 | u32::from(bits)));
        self.upload(to.words, &words.collect::<Vec<_>>())
    }

    /// Copies a mask to the host.
    ///
    /// # Errors
    /// Errors of [`Self::download`].
    pub fn download_mask(&mut self, from: Tiles) -> Result<Mask> {
        let words = self.download(from.words)?;
        Ok(from.mask(&words)?)
    }
}

#[cfg(test)]
mod tests {
    use super::{Piece, stages};

    #[test]
    fn matrices_are_cut_into_stages() {
        let piece = |matrix, words| Piece { matrix, words };
        assert_eq!(stages(&[], 4), [[]; 0]);
        assert_eq!(stages(&[0, 4, 0], 4), [[piece(1, 0..4)]]);
        let cut = [
            vec![piece(0, 0..3), piece(1, 0..1)],
            vec![piece(1, 1..5)],
            vec![piece(1, 5..6), piece(2, 0..2)],
        ];
        assert_eq!(stages(&[3, 6, 2], 4), cut);
    }
}

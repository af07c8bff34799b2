//! Allocation, and copies from and to the host.

use std::sync::mpsc;

use sparse24_core::Mask;

use super::{Device, Failure};
use crate::{Error, Matrix, Tiles, error::check_shape};

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

/// Values on their way to the host.
pub struct Copied {
    device: wgpu::Device,
    staging: Option<(wgpu::Buffer, Arrival)>,
    submission: Option<wgpu::SubmissionIndex>,
    /// Rows, columns and stride of each matrix, in order.
    parts: Vec<Matrix>,
}

type Arrival = mpsc::Receiver<Result<(), wgpu::BufferAsyncError>>;

/// Little-endian bytes.
pub(super) fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// The elements from the first to the last of a matrix, gaps included.
fn span(m: Matrix) -> usize {
    if m.elements() == 0 { 0 } else { (m.shape[0] - 1) * m.stride + m.shape[1] }
}

impl Copied {
    /// Waits for the values: bits, rows packed. A browser must have
    /// [delivered](super::Arrivals::all) them.
    ///
    /// # Errors
    /// [`Error::Lost`] if the device is gone; [`Error::Driver`] in a browser, before they arrived.
    pub fn read(self) -> Result<Vec<Vec<u32>>, Error> {
        let Some((staging, arrival)) = self.staging else {
            return Ok(vec![Vec::new(); self.parts.len()]);
        };
        let lost = |error: &dyn std::error::Error| Error::Lost(error.to_string());
        let submission_index = self.submission;
        self.device
            .poll(wgpu::PollType::Wait { submission_index, timeout: None })
            .map_err(|error| lost(&error))?;
        let mapped = if cfg!(target_family = "wasm") {
            let early = |_| Error::Driver("a copy was read before it arrived".to_owned());
            arrival.try_recv().map_err(early)?
        } else {
            arrival.recv().map_err(|error| lost(&error))?
        };
        mapped.map_err(|error| lost(&error))?;
        let view = staging.get_mapped_range(..).map_err(|error| lost(&error))?;
        let words = view.as_chunks::<4>().0;
        let mut at = 0;
        let read = |part: &Matrix| {
            let of_part = &words[at..at + span(*part)];
            at += of_part.len();
            let rows = of_part.chunks(part.stride.max(1));
            let rows = rows.flat_map(|row| &row[..part.shape[1]]);
            rows.map(|&word| u32::from_le_bytes(word)).collect()
        };
        Ok(self.parts.iter().map(read).collect())
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
    ) -> Result<Matrix, Error> {
        let bytes = shape.map(|n| n as u64);
        let bytes = bytes[0].saturating_mul(bytes[1]).saturating_mul(4).max(4);
        let (limit, name) = (self.largest(), name.to_owned());
        if bytes > limit {
            return Err(Error::TooLarge { name, bytes, limit });
        }
        let memory = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some(&name),
            size: bytes,
            usage: wgpu::BufferUsages::STORAGE
                | wgpu::BufferUsages::COPY_SRC
                | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let mut failure = self.failure.lock().expect("no holder panics");
        if matches!(*failure, Some(Failure::Memory)) {
            *failure = None;
            let held = self.buffers.iter().map(|buffer| buffer.memory.size()).sum();
            return Err(Error::OutOfMemory { name, bytes, held });
        }
        drop(failure);
        self.check()?;
        self.buffers.push(Buffer { purpose, memory });
        Ok(Matrix { buffer: self.buffers.len() - 1, offset: 0, shape, stride: shape[1] })
    }

    /// An empty mask of a `[rows, columns]` matrix.
    ///
    /// # Errors
    /// [`Error::Semantics`] unless it consists of tiles; those of [`Self::alloc`].
    pub fn alloc_tiles(
        &mut self,
        shape: [usize; 2],
        purpose: &'static str,
    ) -> Result<Tiles, Error> {
        let tiles = Mask::empty(shape[0], shape[1])?.tiles().len();
        let words = self.alloc("mask", [1, tiles.div_ceil(2)], purpose)?;
        Ok(Tiles { words, shape })
    }

    /// Bytes held for a purpose.
    #[must_use]
    pub fn held(&self, purpose: &str) -> u64 {
        let of_purpose = self.buffers.iter().filter(|buffer| buffer.purpose == purpose);
        of_purpose.map(|buffer| buffer.memory.size()).sum()
    }

    /// Host to device: bits, rows packed.
    ///
    /// # Errors
    /// [`Error::Shape`] unless there are as many words as elements; failures of earlier work.
    pub fn upload(&mut self, to: Matrix, from: &[u32]) -> Result<(), Error> {
        if from.len() != to.elements() {
            let host = Matrix { shape: [1, from.len()], ..to };
            return check_shape("upload", "host data", to.shape, host);
        }
        self.submit()?;
        let rows = if to.is_contiguous() { from.len() } else { to.shape[1] };
        let buffer = &self.buffers[to.buffer].memory;
        for (i, row) in from.chunks(rows.max(1)).enumerate() {
            let offset = 4 * (to.offset + i * to.stride) as u64;
            self.queue.write_buffer(buffer, offset, &bytes(row));
        }
        Ok(())
    }

    /// Starts to copy matrices to the host as they are after the work so far.
    ///
    /// # Errors
    /// Failures of earlier work.
    pub fn copy_out(&mut self, from: &[Matrix]) -> Result<Copied, Error> {
        let length: usize = from.iter().map(|&m| span(m)).sum();
        let parts = from.to_vec();
        if length == 0 {
            let device = self.device.clone();
            return Ok(Copied { device, staging: None, submission: None, parts });
        }
        self.submit()?;
        let staging = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("copy to the host"),
            size: 4 * length as u64,
            usage: wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::MAP_READ,
            mapped_at_creation: false,
        });
        let mut encoder = self.device.create_command_encoder(&Default::default());
        let mut at = 0;
        for &m in from.iter().filter(|m| m.elements() > 0) {
            let (source, length) = (&self.buffers[m.buffer].memory, 4 * span(m) as u64);
            encoder.copy_buffer_to_buffer(source, 4 * m.offset as u64, &staging, at, length);
            at += length;
        }
        let submission = Some(self.queue.submit([encoder.finish()]));
        self.check()?;
        let (sender, arrival) = mpsc::channel();
        staging.map_async(wgpu::MapMode::Read, .., move |mapped| {
            // Nobody listens after a failed poll.
            let _ = sender.send(mapped);
        });
        Ok(Copied {
            device: self.device.clone(),
            staging: Some((staging, arrival)),
            submission,
            parts,
        })
    }

    /// Device to host: bits, rows packed.
    ///
    /// # Errors
    /// Failures of this or earlier work.
    pub fn download(&mut self, from: Matrix) -> Result<Vec<u32>, Error> {
        let copied = self.copy_out(&[from])?.read();
        self.check()?;
        Ok(copied?.swap_remove(0))
    }

    /// Host to device.
    ///
    /// # Errors
    /// [`Error::Shape`] unless the mask has the shape; those of [`Self::upload`].
    pub fn upload_mask(&mut self, to: Tiles, from: &Mask) -> Result<(), Error> {
        let host = Matrix { shape: from.shape(), ..to.words };
        check_shape("upload", "mask", to.shape, host)?;
        let words = from.tiles().chunks(2);
        let words =
            words.map(|two| two.iter().rev().fold(0, |word, &bits| word << 16 | u32::from(bits)));
        self.upload(to.words, &words.collect::<Vec<_>>())
    }

    /// Device to host.
    ///
    /// # Errors
    /// Errors of [`Self::download`].
    pub fn download_mask(&mut self, from: Tiles) -> Result<Mask, Error> {
        let words = self.download(from.words)?;
        Ok(from.mask(&words)?)
    }
}

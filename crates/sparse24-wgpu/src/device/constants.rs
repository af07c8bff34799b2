//! The constants of kernel calls: each call has a slot in a uniform buffer, a page.
//!
//! Invariant: a slot of the first page belongs to one call until the next submission; slots of the
//! other pages belong to recorded calls and are never freed.

use std::ops::Range;

use super::{memory::bytes, queue::SUBMITTED};

/// Bytes of a slot: the alignment that every device accepts.
pub(super) const SLOT: u64 = 256;
/// Slots of a page: enough for one submission.
const SLOTS: usize = 512;
const _: () = assert!(SUBMITTED <= SLOTS);

/// The pages of slots.
pub(super) struct Constants(Vec<Page>);

struct Page {
    buffer: wgpu::Buffer,
    /// The contents of the buffer, now or after the next submission.
    bytes: Vec<u8>,
    used: usize,
    /// Slots that are not written yet.
    fresh: Range<usize>,
}

/// The place of one call's constants.
#[derive(Clone, Copy)]
pub(super) struct Slot {
    page: usize,
    /// In bytes.
    pub(super) offset: u32,
}

impl Page {
    fn new(device: &wgpu::Device) -> Self {
        let size = SLOTS as u64 * SLOT;
        let buffer = device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("constants"),
            size,
            usage: wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        Self { buffer, bytes: vec![0; size as usize], used: 0, fresh: 0..0 }
    }
}

impl Constants {
    pub(super) fn new(device: &wgpu::Device) -> Self {
        Self(vec![Page::new(device)])
    }

    /// A slot with these constants.
    pub(super) fn take(
        &mut self,
        device: &wgpu::Device,
        constants: &[u32],
        recorded: bool,
    ) -> Slot {
        let last = self.0.len() - 1;
        let page = match recorded {
            false => 0,
            true if last > 0 && self.0[last].used < SLOTS => last,
            true => {
                self.0.push(Page::new(device));
                last + 1
            }
        };
        let of = &mut self.0[page];
        let offset = of.used * SLOT as usize;
        let constants = bytes(constants);
        assert!(constants.len() <= SLOT as usize, "constants fit a slot");
        of.bytes[offset..offset + constants.len()].copy_from_slice(&constants);
        of.used += 1;
        of.fresh.end = of.used;
        Slot { page, offset: offset as u32 }
    }

    pub(super) fn page(&self, slot: Slot) -> &wgpu::Buffer {
        &self.0[slot.page].buffer
    }

    /// Writes new constants, before a submission, and frees the slots of the first page.
    pub(super) fn write(&mut self, queue: &wgpu::Queue) {
        for (number, page) in self.0.iter_mut().enumerate() {
            let Range { start, end } = page.fresh;
            if start < end {
                let range = start * SLOT as usize..end * SLOT as usize;
                queue.write_buffer(&page.buffer, range.start as u64, &page.bytes[range]);
            }
            if number == 0 {
                page.used = 0;
            }
            page.fresh = page.used..page.used;
        }
    }
}

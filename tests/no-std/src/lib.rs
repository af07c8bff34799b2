//! Proof that core needs no std: a static library with its own panic handler and allocator that
//! calls into every part of it.
//!
//! It fails to build as soon as std comes in, for then there are two panic handlers. Deliberately
//! absent: anything that runs.
#![no_std]

extern crate alloc;

use core::alloc::{GlobalAlloc, Layout};

use ndarray::Array2;
use sparse24_core::{
    Error, MaskKind,
    compressed::Compressed24,
    decay, flip, lambda, mvue,
    phase::Fraction,
    philox::{Philox4x32, Purpose, Site, Stream},
    prune, search,
};

struct NoMemory;

// SAFETY: a null pointer says that there is no memory, which every layout allows; nothing was
// allocated, so there is nothing to free.
unsafe impl GlobalAlloc for NoMemory {
    unsafe fn alloc(&self, _: Layout) -> *mut u8 {
        core::ptr::null_mut()
    }
    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
}

#[global_allocator]
static ALLOCATOR: NoMemory = NoMemory;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// The bits of the tile's pattern.
// SAFETY: the name is this library's own.
#[unsafe(no_mangle)]
pub extern "C" fn sparse24_search(tile: &[f32; 16]) -> u16 {
    search::transposable(tile).bits() ^ search::greedy(tile).bits()
}

/// A kept value of either estimator.
// SAFETY: the name is this library's own.
#[unsafe(no_mangle)]
pub extern "C" fn sparse24_mvue(group: &[f32; 4], seed: u64) -> f32 {
    let [word, ..] = Philox4x32::new(seed).block([0; 4]);
    let u = sparse24_core::philox::uniform(word);
    mvue::exact(*group, u).values[0] + mvue::approximate(*group, [u, u]).values[1]
}

/// A matrix through pruning, compression, estimate, decay and flips; -1 on an error.
// SAFETY: the name is this library's own.
#[unsafe(no_mangle)]
pub extern "C" fn sparse24_matrix(rows: usize, columns: usize) -> f64 {
    through(rows, columns).unwrap_or(-1.0)
}

fn through(rows: usize, columns: usize) -> Result<f64, Error> {
    let w = Array2::<f32>::ones((rows, columns));
    let mask = search::mask_search(w.view(), MaskKind::Transposable)?;
    let mut dense = Compressed24::encode(w.view(), &mask)?.decode();
    let stream = Stream::new(0, Site::new(Purpose::Mvue, 0), 0, 0);
    let gradient =
        mvue::compress(prune::masked(w.view(), &mask)?.view(), mvue::Estimator::Exact, stream)?;
    decay::masked_decay(dense.view_mut(), w.view(), &mask, lambda::GRID[0] as f32)?;
    let flips = flip::flip_count(&mask, &mask.transpose())?;
    let steps = Fraction::FIVE_SIXTHS.of(gradient.metadata().len() as u32);
    Ok(flip::flip_rate(flips, mask.count_kept()) + f64::from(steps) + f64::from(dense.sum()))
}

//! Proof that core needs no std: a static library with its own panic handler and allocator.
//!
//! It fails to build as soon as std comes in, for then there are two panic handlers. Nothing here
//! runs.
#![no_std]

use core::alloc::{GlobalAlloc, Layout};

use sparse24_core as _;

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

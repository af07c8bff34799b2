//! Kernels with a defect each, which show that `compute-sanitizer` would find one in ours:
//! `run.sh sanitize` of the GPU bundle runs each under its tool and expects a complaint. Without
//! the sanitizer they pass.

use std::{ffi::CString, ptr};

use cudarc::driver::{CudaContext, result};
use sparse24_cuda::{
    Architecture, Device, Settings, compile,
    kernels::{Contraction, Kind, Source},
};

const PLANTED: Source = Source {
    name: "planted",
    kind: Kind::Copy,
    text: include_str!("planted.cu"),
    entries: &["planted_memcheck", "planted_racecheck", "planted_initcheck", "planted_synccheck"],
    serves: &Architecture::ALL,
    contraction: Contraction::Off,
    instructions: &[],
    local_memory: 0,
};

#[test]
#[ignore = "a write out of bounds"]
fn memcheck() {
    launch("planted_memcheck");
}

#[test]
#[ignore = "a race in shared memory"]
fn racecheck() {
    launch("planted_racecheck");
}

#[test]
#[ignore = "a read of uninitialized memory"]
fn initcheck() {
    launch("planted_initcheck");
}

#[test]
#[ignore = "a barrier that only part of a warp reaches"]
fn synccheck() {
    launch("planted_synccheck");
}

fn launch(kernel: &str) {
    const THREADS: u32 = 64;
    let architecture = Device::open(&Settings::default()).expect("a GPU").architecture();
    let cubin = compile(&PLANTED, architecture).expect("the planted kernels compile").cubin;
    let context = CudaContext::new(0).expect("the GPU that was open");
    context.bind_to_thread().expect("bound");
    // SAFETY: the context is bound, and the image is the compiler's. The kernel takes one pointer,
    // to as many floats as it has threads; what it does beyond is the defect: at most four bytes
    // behind an allocation, which lie within the same page.
    unsafe {
        let module = result::module::load_data(cubin.as_ptr().cast()).expect("loaded");
        let function = result::module::get_function(module, CString::new(kernel).expect("no NUL"))
            .expect("found");
        let mut address = result::malloc_sync(4 * THREADS as usize).expect("memory");
        let mut arguments = [(&raw mut address).cast()];
        result::launch_kernel(
            function,
            (1, 1, 1),
            (THREADS, 1, 1),
            0,
            ptr::null_mut(),
            &mut arguments,
        )
        .expect("launched");
    }
    // The sanitizer may have stopped the kernel.
    let _ = context.synchronize();
}

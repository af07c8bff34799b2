//! The CUDA backend conforms. Without a GPU its tests are skipped, which fails where
//! `SPARSE24_REQUIRE_GPU` is set.
#![cfg(feature = "cuda")]

use std::env;

use sparse24_train::backend::{Backend, BackendSettings, cuda::CudaBackend};

fn open() -> Option<Box<dyn Backend>> {
    match CudaBackend::open(BackendSettings::default()) {
        Ok(backend) => Some(Box::new(backend)),
        Err(error) if env::var_os("SPARSE24_REQUIRE_GPU").is_none() => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("this run requires a GPU: {error}"),
    }
}

sparse24_tests::conformance!(cuda, crate::open);

//! The wgpu backend conforms. Without an adapter its tests are skipped, which fails where
//! `SPARSE24_REQUIRE_WGPU` is set.
#![cfg(feature = "wgpu")]

use std::env;

use sparse24_train::backend::{Backend, BackendSettings, wgpu::WgpuBackend};

fn open() -> Option<Box<dyn Backend>> {
    match WgpuBackend::open(BackendSettings::default()) {
        Ok(backend) => Some(Box::new(backend)),
        Err(error) if env::var_os("SPARSE24_REQUIRE_WGPU").is_none() => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("this run requires an adapter: {error}"),
    }
}

sparse24_tests::conformance!(wgpu, crate::open);

//! The wgpu backend conforms. Without an adapter its tests are skipped, which fails where
//! `SPARSE24_REQUIRE_WGPU` is set.
#![cfg(feature = "wgpu")]

sparse24_tests::conformance!(wgpu, sparse24_tests::wgpu);

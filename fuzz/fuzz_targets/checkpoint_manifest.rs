//! The fuzzer of target `checkpoint_manifest`.

#![no_main]

sparse24_fuzz::fuzz!("checkpoint_manifest");

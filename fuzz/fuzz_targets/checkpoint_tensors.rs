//! The fuzzer of target `checkpoint_tensors`.

#![no_main]

sparse24_fuzz::fuzz!("checkpoint_tensors");

//! The fuzzer of target `checkpoint_masks`.

#![no_main]

sparse24_fuzz::fuzz!("checkpoint_masks");

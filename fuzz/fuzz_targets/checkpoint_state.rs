//! The fuzzer of target `checkpoint_state`.

#![no_main]

sparse24_fuzz::fuzz!("checkpoint_state");

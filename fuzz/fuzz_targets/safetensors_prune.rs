//! The fuzzer of target `safetensors_prune`.

#![no_main]

sparse24_fuzz::fuzz!("safetensors_prune");

//! The fuzzer of target `safetensors_import`.

#![no_main]

sparse24_fuzz::fuzz!("safetensors_import");

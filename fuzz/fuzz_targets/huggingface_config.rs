//! The fuzzer of target `huggingface_config`.

#![no_main]

sparse24_fuzz::fuzz!("huggingface_config");

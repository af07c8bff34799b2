//! The fuzzer of target `token_folder`.

#![no_main]

sparse24_fuzz::fuzz!("token_folder");

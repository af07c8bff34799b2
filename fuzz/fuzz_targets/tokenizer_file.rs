//! The fuzzer of target `tokenizer_file`.

#![no_main]

sparse24_fuzz::fuzz!("tokenizer_file");

//! The fuzzer of target `corpus_text`.

#![no_main]

sparse24_fuzz::fuzz!("corpus_text");

//! The fuzzer of target `config_document`.

#![no_main]

sparse24_fuzz::fuzz!("config_document");

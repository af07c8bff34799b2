//! The fuzzer of target `config_settings`.

#![no_main]

sparse24_fuzz::fuzz!("config_settings");

//! The fuzzer of target `metrics_log`.

#![no_main]

sparse24_fuzz::fuzz!("metrics_log");

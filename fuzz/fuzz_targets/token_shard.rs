//! The fuzzer of target `token_shard`.

#![no_main]

sparse24_fuzz::fuzz!("token_shard");

//! The fuzzer of the target that the environment names in `SPARSE24_FUZZ_TARGET`: one program to
//! carry to another machine.

#![no_main]

use std::sync::LazyLock;

static NAME: LazyLock<String> = LazyLock::new(|| {
    std::env::var("SPARSE24_FUZZ_TARGET").expect("SPARSE24_FUZZ_TARGET names a target")
});

sparse24_fuzz::fuzz!(&NAME);

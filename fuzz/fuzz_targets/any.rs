//! Fuzzes the target of `sparse24_tests::hardening` that `SPARSE24_FUZZ_TARGET` names, with its
//! memory counted. `docs/reliability.md` has the commands.

#![no_main]

use std::{env, sync::LazyLock};

use libfuzzer_sys::fuzz_target;
use sparse24_tests::hardening::{TARGETS, Target, memory_bound};

static TARGET: LazyLock<&Target> = LazyLock::new(|| {
    let name = env::var("SPARSE24_FUZZ_TARGET").expect("SPARSE24_FUZZ_TARGET names a target");
    TARGETS.iter().find(|target| target.name == name).expect("a known target")
});

fn try_input(bytes: &[u8]) {
    let used = allocation_counter::measure(|| _ = (TARGET.check)(bytes)).bytes_max;
    let bound = memory_bound(bytes.len());
    assert!(used <= bound, "held {used} bytes, at most {bound} are allowed");
}

fuzz_target!(
    // Data that is loaded once, such as a vocabulary, counts for no input.
    init: (TARGET.seeds)().iter().for_each(|seed| try_input(seed)),
    |bytes: &[u8]| try_input(bytes)
);

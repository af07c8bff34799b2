//! One input for one target, with its memory counted.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use sparse24_tests::hardening::{Target, memory_bound};

/// Panics, with the input to repeat it by, if the target does or holds too much memory.
pub(super) fn try_input(target: &Target, bytes: &[u8]) {
    let mut outcome = Ok(());
    let used = allocation_counter::measure(|| {
        outcome = catch_unwind(AssertUnwindSafe(|| (target.check)(bytes)))
    });
    let input = || {
        format!(
            "target {}, input b\"{}\"",
            target.name,
            bytes[..bytes.len().min(4096)].escape_ascii()
        )
    };
    if let Err(panic) = outcome {
        eprintln!("{}", input());
        resume_unwind(panic);
    }
    let bound = memory_bound(bytes.len());
    assert!(
        used.bytes_max <= bound,
        "held {} bytes, promised are {bound}: {}",
        used.bytes_max,
        input()
    );
}

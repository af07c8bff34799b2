//! The targets of `sparse24_tests::hardening` under libFuzzer, with their memory counted. Begin
//! with `campaign.sh`.

#[doc(hidden)]
pub use libfuzzer_sys::fuzz_target;
use sparse24_tests::hardening::{memory_bound, target};

/// The fuzzer of one target.
#[macro_export]
macro_rules! fuzz {
    ($name:expr) => {
        $crate::fuzz_target!(init: $crate::try_seeds($name), |bytes: &[u8]| $crate::try_input($name, bytes));
    };
}

/// Before the clock runs: what is read once, such as a vocabulary, counts for no input.
pub fn try_seeds(name: &str) {
    (target(name).seeds)().iter().for_each(|seed| try_input(name, seed));
}

/// Panics if the target does, or holds more memory than is promised.
pub fn try_input(name: &str, bytes: &[u8]) {
    let target = target(name);
    let used = allocation_counter::measure(|| (target.check)(bytes)).bytes_max;
    let bound = memory_bound(bytes.len());
    assert!(used <= bound, "held {used} bytes, promised are {bound}");
}

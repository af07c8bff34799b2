//! Loaders of files from outside, under the targets of the fuzzer (`sparse24_tests::hardening`): a
//! bounded part of what `fuzz/` does without end.
//!
//! Invariant: every run tries the same inputs. Deliberately absent: the clock; a hang shows as a
//! test that does not end.

mod hardening {
    mod memory;
    mod mutation;
    mod no_file;
    mod random;
    mod refusals;
    mod trial;
}

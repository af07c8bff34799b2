//! Loaders of files from outside, attacked through the fuzzer's targets
//! (`sparse24_tests::hardening`) and as users call them. Every run tries the same inputs.

mod hardening {
    mod loaders;
    mod memory;
    mod mutation;
    mod no_file;
    mod refusals;
}

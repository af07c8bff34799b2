//! Kills the command and fails its file operations, resumes it, and compares the end with that of
//! an undisturbed run.
//!
//! `cargo test --release -p sparse24 --test crash -- --nocapture` prints the counts.
//! `SPARSE24_CRASHES` sets the number of runs killed at random, and `SPARSE24_CRASH_BACKEND=wgpu`
//! runs them on another backend, except those with several ranks. A preloaded library ([`shim`])
//! acts on chosen file operations, so the shipped binary is tested. Linux only: needs `LD_PRELOAD`
//! and the C compiler that Rust links with.
#![cfg(target_os = "linux")]

mod faults;
mod full;
mod kills;
mod lost;
mod prepare;
mod ranks;
mod run;
mod runs;
mod shim;
#[path = "../cli/support.rs"]
#[expect(dead_code, reason = "the tests in `cli` use the rest")]
mod support;

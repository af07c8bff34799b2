//! The command, killed and failed at every turn: what it leaves is resumed to its end and compared
//! with a run that nothing befell.
//!
//! `cargo test --release -p sparse24 --test crash -- --nocapture` tells how many times and where;
//! `cargo xtask crash` kills a thousand times. A shim between the command and the kernel ([`shim`])
//! chooses points by the index of a file operation, so the binary that is shipped is the one that
//! is tested. Linux only: it takes `LD_PRELOAD`, and a C compiler, which Rust needs there for
//! linking.
#![cfg(target_os = "linux")]

mod faults;
mod full;
mod kills;
mod prepare;
mod run;
mod runs;
mod shim;
#[path = "../cli/support.rs"]
#[expect(dead_code, reason = "the tests of the command need more of it")]
mod support;

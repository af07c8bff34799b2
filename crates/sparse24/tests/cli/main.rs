//! `sparse24` as its user meets it: every command on configurations of a second, and every way in
//! which each refuses.
//!
//! `prepare`, `prune` and `verify` have their own files beside this folder.

mod bench;
mod configuration;
mod divergence;
mod evaluation;
mod format;
#[cfg(all(target_os = "linux", feature = "cuda"))]
mod gpus;
mod interchange;
mod interruption;
mod methods;
mod refusals;
mod report;
mod reports;
mod search;
mod signals;
mod study;
mod support;
mod tensorboard;
mod training;

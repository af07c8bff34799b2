//! Tests of the `sparse24` binary: each command on configurations that train in a second, and its
//! refusals. `prepare`, `prune` and `verify` have files of their own beside this folder.

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

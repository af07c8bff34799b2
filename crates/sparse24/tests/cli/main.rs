//! Tests of the `sparse24` binary: each command on configurations that train in a second, and its
//! refusals.

mod bench;
mod bert;
mod configuration;
mod divergence;
mod evaluation;
mod finetune;
mod format;
#[cfg(all(target_os = "linux", feature = "cuda"))]
mod gpus;
#[cfg(unix)]
mod hostile;
mod images;
mod interchange;
mod interruption;
mod methods;
mod prepare;
mod prune;
#[cfg(unix)]
mod ranks;
mod refusals;
mod report;
mod reports;
mod running;
mod search;
mod signals;
mod study;
mod support;
mod tensorboard;
mod training;
mod translation;
mod watch;

//! One training run: its directory, and the driver that trains in it or reads a model from it.
//!
//! [`Run`] starts or resumes a run and trains it to its end; [`Model`] is what a run left, to
//! evaluate, sample or export; [`adopt`] makes a run of weights from elsewhere. What the directory
//! holds:
//!
//! | entry | holds |
//! | --- | --- |
//! | `lock` | the process that writes here; held as a file lock, so that it ends with the process |
//! | `config.toml` | the resolved configuration |
//! | `provenance.json` | what ran, where and how: one object a start ([`Provenance`]) |
//! | `tokenizer.json` | the tokenizer |
//! | `plans.json` | timed choices, on a device that has any |
//! | `metrics.jsonl` | one object a step ([`StepMetrics`]) |
//! | `checkpoints/` | [`crate::checkpoint`] |
//! | `log.txt` | what was said, line by line ([`Log`]) |
//! | `lambda-search/` | the search for its lambda, where it was made for this run ([`sparse24_lab::search`]) |
//!
//! Invariant: a [`RunDirectory`] holds the lock; two processes never write one run directory.
//! Deliberately absent: the loop itself ([`sparse24_train::trainer`]), and terminals.

mod adopt;
mod directory;
mod identity;
mod instruments;
mod log;
mod measure;
mod metrics;
mod model;
mod opening;
mod plans;
mod provenance;
mod reference;
mod saving;
mod setup;
mod snapshot;
mod spikes;
mod training;

#[cfg(test)]
mod tests;

pub use adopt::adopt;
pub use directory::RunDirectory;
pub use directory::lock;
pub use identity::of_dataset;
pub use instruments::{Instruments, LayerInstruments};
pub use log::{Log, timestamp};
pub use metrics::{Cut, MetricsLog, StepMetrics};
pub use model::Model;
pub use opening::{Damaged, Given, Resume};
pub use provenance::{Initial, LambdaOrigin, Provenance};
pub use setup::{open_dataset, run_config};
pub use training::{Asked, Ended, Observer, Run, Summary};

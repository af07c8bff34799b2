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
//! | `lambda-search/` | the search for its lambda, where it was made for this run ([`crate::search`]) |
//!
//! Invariant: a [`RunDirectory`] holds the lock; two processes never write one run directory.
//! Deliberately absent: the loop itself ([`crate::trainer`]), and terminals.

#[cfg(feature = "cpu")]
mod adopt;
mod directory;
#[cfg(feature = "cpu")]
mod identity;
mod instruments;
mod log;
#[cfg(feature = "cpu")]
mod measure;
mod metrics;
#[cfg(feature = "cpu")]
mod model;
#[cfg(feature = "cpu")]
mod opening;
#[cfg(feature = "cpu")]
mod plans;
mod provenance;
#[cfg(feature = "cpu")]
mod reference;
#[cfg(feature = "cpu")]
mod saving;
#[cfg(feature = "cpu")]
mod setup;
#[cfg(feature = "cpu")]
mod snapshot;
#[cfg(feature = "cpu")]
mod spikes;
#[cfg(feature = "cpu")]
mod training;

#[cfg(test)]
mod tests;

#[cfg(feature = "cpu")]
pub use adopt::adopt;
pub use directory::RunDirectory;
pub(crate) use directory::lock;
#[cfg(feature = "cpu")]
pub(crate) use identity::{decisive, of_dataset};
pub use instruments::{Instruments, LayerInstruments};
pub use log::{Log, timestamp};
pub use metrics::{Cut, MetricsLog, StepMetrics};
#[cfg(feature = "cpu")]
pub use model::Model;
#[cfg(feature = "cpu")]
pub use opening::{Damaged, Given, Resume};
pub use provenance::{Initial, LambdaOrigin, Provenance};
#[cfg(feature = "cpu")]
pub use setup::{open_dataset, run_config};
#[cfg(feature = "cpu")]
pub use training::{Asked, Ended, Observer, Run, Summary};

//! The run directory: what one training run writes, and who may write it.
//!
//! | entry | holds |
//! | --- | --- |
//! | `lock` | the process that writes here; held as a file lock, so that it ends with the process |
//! | `config.toml` | the resolved configuration |
//! | `provenance.json` | what ran, where and how: one object a start ([`Provenance`]) |
//! | `tokenizer.json` | the tokenizer |
//! | `metrics.jsonl` | one object a step ([`StepMetrics`]) |
//! | `checkpoints/` | [`crate::checkpoint`] |
//! | `log.txt` | what was said, line by line ([`Log`]) |
//!
//! Invariant: a [`RunDirectory`] holds the lock; two processes never write one run directory. Deliberately absent: training, and
//! the meaning of the configuration.

mod directory;
mod log;
mod metrics;
mod provenance;

#[cfg(test)]
mod tests;

pub use directory::RunDirectory;
pub use log::{Log, timestamp};
pub use metrics::{Cut, MetricsLog, StepMetrics};
pub use provenance::Provenance;

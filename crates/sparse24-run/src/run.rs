//! One training run: its directory, and the driver that trains in it or reads a model from it.
//!
//! [`Run`] starts or resumes a run and trains it to its end; [`Model`] reads a finished or
//! interrupted run to evaluate, sample or export it; [`save_imported`] makes a run of given
//! weights.
//!
//! | entry of the directory | contents |
//! | --- | --- |
//! | `lock` | file lock of the process that writes here; ends with the process |
//! | `config.toml` | the resolved configuration |
//! | `provenance.json` | one object per start ([`Provenance`]) |
//! | `tokenizer.json` | the tokenizer |
//! | `data.json` | scan of shards made by another program, so that a resume need not repeat it |
//! | `plans.json` | timed choices, on a device that has any |
//! | `metrics.jsonl` | one object per step ([`StepMetrics`]) |
//! | `checkpoints/` | [`crate::checkpoint`] |
//! | `log.txt` | messages, line by line ([`Log`]) |
//! | `lambda-search/` | the search for its lambda, if made for this run |
//! | `report.html` | the report, which `sparse24` writes |
//!
//! [`checkpoint_of`] and [`restore`] serve a loop of one's own around the trainer.
//!
//! A thread that starts or trains a run needs a stack of more than 192 KiB; Rust's own default is
//! 2 MiB.
//!
//! Invariant: a [`RunDirectory`] holds the lock; two processes never write one run directory.

mod components;
mod directory;
mod flip_reference;
mod identity;
mod imported;
mod instruments;
mod log;
mod loss_spikes;
mod metrics;
mod model;
mod needs;
mod observer;
mod plans;
mod provenance;
mod ranks;
mod rescheduling;
mod sampler;
mod saving;
mod snapshot;
mod start;
mod tokenizer;
mod training;
mod weak_decay;

#[cfg(test)]
mod tests;

pub use components::{
    Batches, CausalLm, RunData, Scores, check_tensors, data_source, masked_lm, open_data,
    open_data_with, run_config,
};
pub use directory::{Lock, REPORT, RunDirectory, has_config, lock};
pub use identity::{covers, of_data, of_same_data};
pub use imported::save_imported;
pub use log::{Log, timestamp};
pub use metrics::{Cut, Instruments, LayerInstruments, MetricsLog, Salvage, StepMetrics};
pub use model::Model;
pub use needs::{Needs, host_bytes};
pub use observer::{Asked, Observer, Part};
pub use provenance::{Initial, LambdaOrigin, Provenance, fingerprint};
pub use ranks::{Followed, Follower, facts};
pub use sampler::Sampler;
pub use snapshot::{checkpoint_of, restore};
pub use start::{Damaged, Given, Resume};
pub use training::{Ended, Run, Summary};

//! One training run: configuration, data, checkpoints, metrics and files around the trainer of
//! [`sparse24_train`].
//!
//! | module | contents |
//! | --- | --- |
//! | [`config`] | the configuration document, presets and settings |
//! | [`data`] | corpora, tokenizers, token shards and batches |
//! | [`run`] | the run directory, and the driver that trains in it |
//! | [`ranks`] | the ranks of a run as processes: launchers, connections |
//! | [`task`] | fine-tuning: labelled sentences, and the scores of predictions |
//! | [`translation`] | pairs of sentences, beam search and BLEU |
//! | [`checkpoint`] | the checkpoint format and its store |
//! | [`interchange`] | import from and export to Hugging Face |
//! | [`pruning`] | prune and verify any safetensors file |
//! | [`machine`] | the memory of this machine, and the limits of this process |
//! | [`processor`] | its threads, SIMD level and measured speed |

#[macro_use]
mod error;

pub mod checkpoint;
pub mod config;
pub mod data;
pub mod disk;
pub mod images;
pub mod interchange;
pub mod json;
pub mod machine;
pub mod processor;
pub mod pruning;
pub mod ranks;
pub mod run;
pub mod task;
mod tensors;
pub mod translation;
mod word;

pub use error::Error;
pub use sparse24_train::ErrorKind;
pub use word::word;

/// A `Result` that defaults to no value and to this crate's error.
type Result<T = (), E = Error> = core::result::Result<T, E>;

//! Corpus -> tokens -> shards -> batches.
//!
//! | step | type |
//! | --- | --- |
//! | text, split in two | [`Corpus`] |
//! | text to token ids and back | [`Tokenizer`] |
//! | token ids in a file | [`shard`] |
//! | the two token sequences of a run | [`Dataset`] |
//! | what an optimizer step sees | [`Dataset::batch`], a pure function of (seed, step, micro-step) |
//! | what an evaluation sees | [`EvaluationWindows`]: every held-out token once |
//!
//! Deliberately absent: iterators with state. A resume needs no position in the data, only the
//! step.

mod batch;
mod corpus;
mod dataset;
mod prepare;
pub mod shard;
mod tokenizer;
mod tokens;

pub use batch::{Draw, EvaluationWindows};
pub use corpus::{Corpus, VALIDATION_FRACTION};
pub use dataset::Dataset;
pub use prepare::prepare;
pub use tokenizer::{Tokenizer, TokenizerKind};
pub use tokens::Tokens;

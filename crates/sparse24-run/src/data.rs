//! From a corpus to tokens, shards and batches.
//!
//! | step | type |
//! | --- | --- |
//! | text, split in two | [`Corpus`] |
//! | text to token ids and back | [`Tokenizer`] |
//! | token ids in a file | [`shard`] |
//! | the two token sequences of a run | [`Dataset`] |
//! | the batch of a step | [`Dataset::batch`], a pure function of (seed, step, micro-step) |
//! | the windows of an evaluation | [`EvaluationWindows`]: every validation token once |
//!
//! There are no iterators with state: a resume needs only the step, not a position in the data.

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

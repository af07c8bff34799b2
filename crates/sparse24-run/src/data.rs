//! From a corpus to tokens, shards and batches.
//!
//! | step | type |
//! | --- | --- |
//! | text, split in two | [`Corpus`] |
//! | documents of any number and size, to shards | [`Preparation`] |
//! | text to token ids and back | [`Tokenizer`] |
//! | token ids in memory | [`Tokens`] |
//! | token ids in a file | [`shard`] |
//! | a sequence of either | [`Split`] |
//! | the two sequences of a run | [`Dataset`] |
//! | the batch of a step | [`Dataset::batch`], a pure function of (seed, step, micro-step) |
//! | the next batch, on a thread | [`ReadAhead`] |
//! | the windows of an evaluation | [`EvaluationWindows`]: every validation token once |
//!
//! There are no iterators with state: a resume needs only the step, not a position in the data.

mod ahead;
mod batch;
mod corpus;
mod dataset;
mod documents;
mod encoding;
mod files;
mod fingerprint;
mod folder;
mod prepare;
pub mod shard;
mod split;
mod tokenizer;
mod tokens;

pub(crate) use ahead::Ahead;
pub use ahead::ReadAhead;
pub use batch::{Draw, EvaluationWindows};
pub use corpus::{Corpus, VALIDATION_FRACTION};
pub use dataset::{Dataset, Source};
pub(crate) use files::list as list_files;
pub use fingerprint::Progress;
pub use folder::{Opening, Scan, is_shards, tokenizer_of};
pub use prepare::{HeldOut, Preparation};
pub use split::Split;
#[cfg(feature = "tokenizers")]
pub use tokenizer::{Bpe, Dictionary, Merged, Vocabulary, WordPiece};
pub use tokenizer::{DEFAULT_PIECES, END, FEWEST, Tokenizer, TokenizerKind, TokenizerSource};
pub(crate) use tokenizer::{PADDING, config_beside};
pub use tokens::Tokens;

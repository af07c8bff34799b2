//! Translation: pairs of sentences, batches of like length, beam search, and BLEU.
//!
//! | step | type |
//! | --- | --- |
//! | the files of a folder to pairs of tokens | [`Pairs`] |
//! | the batch of a step, and an evaluation | [`TranslationBatches`], [`TranslationEvaluation`] |
//! | a sentence to its most probable translation | [`BeamSearch`] |
//! | translations to a score | [`Bleu`] |

mod batch;
mod beam;
mod bleu;
mod epoch;
mod pairs;

pub use batch::{TranslationBatches, TranslationEvaluation};
pub use beam::{BeamSearch, Decoder, LONGER, Translation};
pub use bleu::{Bleu, tokenized_13a};
pub use epoch::LENGTHS;
pub use pairs::{PairSource, PairSplit, Pairs, words};

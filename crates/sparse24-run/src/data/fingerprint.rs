//! Fingerprints of data: equal ones mean equal tokens under the same tokenizer.
//! [`Dataset::fingerprint`](super::Dataset::fingerprint) has the formulas.

use blake3::{Hash, Hasher};

use super::{Split, Tokenizer};
use crate::Result;

/// Shows tokens read and tokens in all; an error ends the reading.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64) -> Result;

/// A hash of what the vocabulary and the tokenizer mean.
fn begun(vocabulary: u32, tokenizer: Option<&Tokenizer>, mut hasher: Hasher) -> Hasher {
    hasher.update(&vocabulary.to_le_bytes());
    hasher.update(tokenizer.map_or([0; 32], |t| *t.fingerprint().as_bytes()).as_slice());
    hasher
}

/// The fingerprint of all tokens; `progress` is called with tokens read and tokens in all.
pub(super) fn content(
    vocabulary: u32,
    tokenizer: Option<&Tokenizer>,
    splits: &[Split; 2],
    mut progress: Option<Progress<'_>>,
) -> Result<Hash> {
    let mut hasher = begun(vocabulary, tokenizer, Hasher::new());
    let all = splits.iter().map(|split| split.len() as u64).sum();
    let (mut done, mut bytes) = (0, Vec::new());
    for split in splits {
        hasher.update(&(split.len() as u64).to_le_bytes());
        split.for_each_piece(|ids| {
            bytes.clear();
            bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
            hasher.update(&bytes);
            done += ids.len() as u64;
            progress.as_mut().map_or(Ok(()), |progress| progress(done, all))
        })?;
    }
    Ok(hasher.finalize())
}

/// The fingerprint of prepared shards, from their headers.
pub(super) fn prepared(
    vocabulary: u32,
    tokenizer: Option<&Tokenizer>,
    splits: &[Split; 2],
) -> Hash {
    let mut start = Hasher::new();
    start.update(b"sparse24 shards");
    let mut hasher = begun(vocabulary, tokenizer, start);
    for split in splits {
        hasher.update(&(split.shards().len() as u64).to_le_bytes());
        for shard in split.shards() {
            hasher.update(&(shard.len() as u64).to_le_bytes());
            hasher.update(shard.ids_hash().expect("a prepared shard").as_bytes());
        }
    }
    hasher.finalize()
}

//! The tokens of a split: in memory, or in any number of shards, which stay on disk.
//!
//! Invariant: shards are one sequence, in their order; where one ends does not show.

use std::{path::PathBuf, sync::Arc};

use super::{Tokens, shard::Shard};
use crate::Result;

/// Ids that are read at a time.
const PIECE: usize = 1 << 16;

/// Token ids for training or for validation. A clone shares them.
#[derive(Debug, Clone)]
pub struct Split(Storage);

#[derive(Debug, Clone)]
enum Storage {
    Memory(Arc<Tokens>),
    Shards(Arc<Shards>),
}

#[derive(Debug)]
struct Shards {
    shards: Vec<Shard>,
    /// The position after the last token of each.
    ends: Vec<usize>,
}

impl From<Tokens> for Split {
    fn from(tokens: Tokens) -> Self {
        Self(Storage::Memory(Arc::new(tokens)))
    }
}

impl Split {
    /// A split in these files.
    ///
    /// # Errors
    /// Like [`Shard::open`]; [`Error::File`] if there are too many tokens to count.
    pub(super) fn open(paths: &[PathBuf], vocabulary: Option<u32>) -> Result<Self> {
        let (mut shards, mut ends, mut end) = (Vec::new(), Vec::new(), 0_usize);
        for path in paths {
            let shard = Shard::open(path, vocabulary)?;
            let Some(sum) = end.checked_add(shard.len()) else {
                bail!(path, "has more tokens than this machine can address");
            };
            end = sum;
            ends.push(end);
            shards.push(shard);
        }
        Ok(Self(Storage::Shards(Arc::new(Shards { shards, ends }))))
    }

    /// The files, if the tokens are not in memory.
    #[must_use]
    pub fn shards(&self) -> &[Shard] {
        match &self.0 {
            Storage::Memory(_) => &[],
            Storage::Shards(shards) => &shards.shards,
        }
    }

    /// Checks ids of the shards against this vocabulary from now on.
    ///
    /// # Panics
    /// If the split was cloned.
    pub(super) fn limit(&mut self, vocabulary: u32) {
        if let Storage::Shards(shards) = &mut self.0 {
            let shards = Arc::get_mut(shards).expect("not shared yet");
            shards.shards.iter_mut().for_each(|shard| shard.limit(vocabulary));
        }
    }

    /// Number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        match &self.0 {
            Storage::Memory(tokens) => tokens.len(),
            Storage::Shards(shards) => shards.ends.last().copied().unwrap_or(0),
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends `count` ids from position `start` on to `out`.
    ///
    /// # Errors
    /// Like [`Shard::copy_to`].
    ///
    /// # Panics
    /// Outside of the split.
    pub fn copy_to(&self, start: usize, count: usize, out: &mut Vec<u32>) -> Result {
        let Shards { shards, ends } = match &self.0 {
            Storage::Memory(tokens) => {
                tokens.copy_to(start, count, out);
                return Ok(());
            }
            Storage::Shards(shards) => &**shards,
        };
        let (mut at, end) = (start, start + count);
        assert!(end <= self.len(), "tokens {start}..{end} of {}", self.len());
        while at < end {
            let which = ends.partition_point(|&end| end <= at);
            let begin = ends[which] - shards[which].len();
            let until = end.min(ends[which]);
            shards[which].copy_to(at - begin, until - at, out)?;
            at = until;
        }
        Ok(())
    }

    /// All ids, piece by piece.
    ///
    /// # Errors
    /// Like [`Shard::copy_to`]; errors from `piece`.
    pub fn for_each_piece(&self, mut piece: impl FnMut(&[u32]) -> Result) -> Result {
        let mut ids = Vec::new();
        for start in (0..self.len()).step_by(PIECE) {
            ids.clear();
            self.copy_to(start, PIECE.min(self.len() - start), &mut ids)?;
            piece(&ids)?;
        }
        Ok(())
    }
}

//! The plan of an epoch: which pairs are in which batch, and the order of the batches.

use sparse24_core::philox::{Purpose, Site, Stream};
use sparse24_train::nn::BatchShape;

/// Lengths of batches are multiples of it, so that there are few shapes.
pub const LENGTHS: usize = 8;

/// The batches of an epoch.
#[derive(Debug)]
pub(super) struct Epoch {
    pub(super) seed: u64,
    pub(super) most: BatchShape,
    pub(super) number: u32,
    pub(super) batches: Vec<Planned>,
}

/// A batch of an epoch.
#[derive(Debug)]
pub(super) struct Planned {
    pub(super) shape: BatchShape,
    /// Numbers of pairs, at most `shape.size`.
    pub(super) pairs: Vec<u32>,
}

impl Epoch {
    /// The batches of an epoch e, each with at most the tokens of `most` in each language, of pairs
    /// whose longer sentences have these lengths.
    ///
    /// A pair is in the bucket of its length, rounded up to a multiple L of [`LENGTHS`]. The
    /// bucket's n pairs, sorted by word 0 of call i of the stream (seed, data order 3, 0, e), where
    /// i is the pair's number, and equal words by i, are divided into batches of ceil(n / c) pairs,
    /// the last of fewer, where c = ceil(n / floor(tokens / L)). Batches, numbered j by ascending
    /// L, are sorted by word 1 of call j of that stream, and equal words by j.
    pub(super) fn new(
        lengths: impl Iterator<Item = usize>,
        seed: u64,
        most: BatchShape,
        number: u32,
    ) -> Self {
        let stream = Stream::new(seed, Site::new(Purpose::DataOrder, 3), 0, number);
        let mut buckets = vec![Vec::new(); most.sequence_length.div_ceil(LENGTHS) + 1];
        for (pair, length) in (0..).zip(lengths) {
            buckets[length.div_ceil(LENGTHS)].push(pair);
        }
        let mut batches = Vec::new();
        for (bucket, mut pairs) in buckets.into_iter().enumerate() {
            if pairs.is_empty() {
                continue;
            }
            pairs.sort_by_cached_key(|&pair| (stream.words(pair)[0], pair));
            let sequence_length = bucket * LENGTHS;
            let count = pairs.len().div_ceil((most.tokens() / sequence_length).max(1));
            let size = pairs.len().div_ceil(count);
            let shape = BatchShape { size, sequence_length };
            batches.extend(pairs.chunks(size).map(|pairs| Planned { shape, pairs: pairs.into() }));
        }
        let mut order: Vec<(u32, Planned)> = (0..).zip(batches).collect();
        order.sort_by_cached_key(|&(j, _)| (stream.words(j)[1], j));
        let batches = order.into_iter().map(|(_, batch)| batch).collect();
        Self { seed, most, number, batches }
    }
}

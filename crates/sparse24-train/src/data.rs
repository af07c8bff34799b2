//! Corpus -> tokens -> shards -> batches.

//! Models: the layers of [`crate::nn`] in an order, with names that checkpoints keep.

pub mod gpt2;

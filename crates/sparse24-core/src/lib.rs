//! The semantics of 2:4 sparse pre-training, to the bit.
//!
//! | word | meaning |
//! | --- | --- |
//! | *group* | four consecutive elements along the contraction dimension ([`group`]) |
//! | *pattern* | the kept pair in a group, one of 6 ([`group::Pattern`]) |
//! | *tile* | 4x4 elements ([`tile`]) |
//! | *mask* | one bit per element, 1 = kept ([`mask::Mask`]) |
//! | *transposable* | two in every row and column of a tile: 90 patterns ([`tile::TilePattern`]) |
//! | *search* | the transposable pattern of largest kept L1 norm ([`search`]) |
//! | *values, metadata* | kept `[m, k/2]`, two bits each ([`compressed::Compressed24`]) |
//! | *MVUE* | minimum-variance unbiased 2:4 estimator ([`mvue::exact`], [`mvue::approximate`]) |
//! | *permuted mask* | a column-wise mask of masked weights with permuted rows ([`permute`]) |
//! | *masked decay* | pulls pruned weights towards zero through their gradients ([`decay`]) |
//! | *flip rate* | the share of mask bits that change in one optimizer step ([`flip`]) |
//! | *phase, refresh* | when training is sparse, and when masks are searched again ([`phase`]) |
//! | *site, stream* | the address of a random number ([`philox`]) |
//! | *operation* | the records that describe dense operations and optimizer steps ([`op`]) |
//!
//! Matrices are views of [`ndarray`] of [`Element`] types: f32, and f16 and bf16 of [`half`]; both
//! crates are re-exported here.
//! Shapes: tokens p, in-features q, out-features r; X `[p, q]`, W `[r, q]`, Z = X W^T `[p, r]`.
//!
//! Everything here is `no_std` and single-threaded: the reference that faster backends are compared
//! with, bit for bit.
//!
//! Source: Hu et al., "Accelerating Transformer Pre-training with 2:4 Sparsity", ICML 2024, arXiv
//! 2404.01847 ("the paper").
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod compressed;
pub mod decay;
mod element;
mod error;
pub mod flip;
pub mod group;
pub mod lambda;
pub mod mask;
pub mod mvue;
pub mod op;
pub mod permute;
pub mod phase;
pub mod philox;
pub mod prune;
pub mod search;
pub mod tile;

pub use element::Element;
pub use error::Error;
pub use half;
pub use mask::Mask;
pub use ndarray;
pub use tile::MaskKind;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

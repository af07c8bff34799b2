//! Pre-training transformers with 2:4 sparsity: everything between the semantics of
//! [`sparse24_core`] and a command line.
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`backend`] | the contract with a device, and one adaptor a device |
//! | [`nn`], [`model`] | layers with forward and backward written out; models that order them |
//! | [`method`], [`optim`], [`schedule`] | a training method, an optimizer, a learning rate: values |
//! | [`trainer`] | the loop as a state machine, one optimizer step at a time |
//! | [`estimate`] | what a run costs before it runs |
//! | `report` | one offline page of what happened in runs (features `run` and `cpu`) |
//! | `data`, `config`, `checkpoint`, `run`, `interchange`, `pruning`, `machine` | corpora, settings, files and memory (feature `run`) |
//! | `series`, `search`, `study`, `statistics` | many runs: the search for lambda, and comparisons (feature `run`) |
//!
//! Without default features there are no files, tokenizers, clocks or threads: implement
//! [`backend::Backend`] and embed the rest.

pub mod backend;
#[cfg(feature = "run")]
pub mod checkpoint;
#[cfg(all(feature = "run", feature = "cpu"))]
pub mod config;
#[cfg(feature = "run")]
pub mod data;
#[cfg(feature = "run")]
mod disk;
mod error;
pub mod estimate;
#[cfg(feature = "run")]
pub mod interchange;
#[cfg(feature = "run")]
pub mod machine;
pub mod method;
pub mod model;
pub mod nn;
pub mod optim;
#[cfg(feature = "run")]
pub mod pruning;
#[cfg(all(feature = "run", feature = "cpu"))]
pub mod report;
#[cfg(feature = "run")]
pub mod run;
pub mod schedule;
#[cfg(all(feature = "run", feature = "cpu"))]
pub mod search;
#[cfg(all(feature = "run", feature = "cpu"))]
pub mod series;
#[cfg(feature = "run")]
pub mod statistics;
#[cfg(all(feature = "run", feature = "cpu"))]
pub mod study;
#[cfg(feature = "run")]
mod tensors;
pub mod trainer;

pub use error::{Error, ErrorKind};

#[cfg(all(doctest, feature = "cpu"))]
#[doc = include_str!("../README.md")]
struct Readme;

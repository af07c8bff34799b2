//! The subject of sparse24: how a transformer is trained with 2:4 sparsity.
//!
//! | module | contents |
//! | --- | --- |
//! | [`backend`] | the contract with a device, and its adaptors, from `sparse24-backend` |
//! | [`nn`], [`model`] | layers with forward and backward written out, and models made of them |
//! | [`objective`] | batches, as a pure function of (seed, step, micro-step), and metrics |
//! | [`method`], [`optim`], [`schedule`] | a method, an optimizer, a learning rate, as values |
//! | [`trainer`] | the training loop as a state machine, one optimizer step at a time |
//! | [`group`] | the ranks that train one model together |
//! | [`estimate`] | the cost of a run before it runs |
//!
//! This crate has no files, clocks, JSON or terminals. Runs are in `sparse24-run`.

pub mod estimate;
pub mod method;
pub mod model;
pub mod nn;
pub mod objective;
pub mod optim;
pub mod schedule;
pub mod trainer;

pub use sparse24_backend::{self as backend, Error, ErrorKind, group, limits};

/// A `Result` that defaults to no value and to this crate's error.
type Result<T = (), E = Error> = core::result::Result<T, E>;

#[cfg(all(doctest, feature = "cpu"))]
#[doc = include_str!("../README.md")]
struct Readme;

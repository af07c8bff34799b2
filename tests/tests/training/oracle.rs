//! Sparse training restated in f64 and naive loops: what every step of the trainer must compute.
//!
//! Nothing here comes from the code under test, apart from plain descriptions (shapes, settings)
//! and the Philox block function, whose known answers core checks.

pub(super) mod fst;
mod models;
pub(super) mod pass;
mod sequence;
mod sublayer;
pub(super) mod transformer;

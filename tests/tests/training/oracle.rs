//! Fully sparse training once more, in f64 and naive loops: what every step of the trainer must
//! compute.
//!
//! Invariant: nothing here comes from the code under test but descriptions (shapes, settings) and
//! the Philox block function, whose known answers core checks. Deliberately absent: speed.

pub(super) mod arithmetic;
pub(super) mod fst;
pub(super) mod gpt2;
pub(super) mod layers;

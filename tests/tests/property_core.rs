//! Properties of core for any bits: search, pruning, compression, the estimators, decay, flips,
//! phases.
//!
//! Invariant: what is expected comes from naive loops or `sparse24_tests::oracle`; each bound is
//! derived where it stands.

mod property_core {
    mod input;
    mod matrix;
    mod mvue;
    mod schedule;
    mod search;
}

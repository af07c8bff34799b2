//! Properties of core on arbitrary bits: search, pruning, compression, MVUE, decay, flips, phases.
//!
//! Expected values come from naive loops or `sparse24_tests::oracle`; each bound is derived next to
//! its use.

mod property_core {
    mod input;
    mod matrix;
    mod mvue;
    mod schedule;
    mod search;
}

//! Training against a straight f64 re-computation, and against itself: repeated, interrupted, on
//! other numbers of threads.
//!
//! Invariant: what is expected comes from `training::oracle`, whose own gradients are checked by
//! finite differences.

mod training {
    mod differences;
    mod fixture;
    mod layers;
    mod oracle;
    mod repeat;
    mod rounding;
    mod semantics;
    mod spy;
    mod step;
}

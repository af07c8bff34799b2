//! Training against an independent f64 computation, and against itself: repeated, interrupted, on
//! other numbers of threads.
//!
//! Expected values come from `training::oracle`, whose own gradients are checked by finite
//! differences.

mod training {
    mod differences;
    mod fixture;
    mod methods;
    mod optimizers;
    mod oracle;
    mod phases;
    #[cfg(feature = "wgpu")]
    mod portable;
    mod ranks;
    mod recipes;
    mod repeat;
    mod semantics;
    mod spy;
    mod step;
    mod translation;
}

//! What becomes of what an output holds.

/// What becomes of the values that an output already holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Beta {
    /// They are never read.
    Overwrite,
    /// The result is added to them.
    Accumulate,
}

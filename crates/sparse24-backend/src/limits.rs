//! The ranges of settings, for recipes and for the configurations that they are made from.
//!
//! Every check returns [`Error::Setting`] with the key.

use core::fmt::Display;

use sparse24_core::op::{Adam, UpdateRule};

use crate::{Error, Result};

/// Largest size of anything but layers.
pub const MOST: usize = 1 << 24;
/// Most layers: an estimate makes each one.
pub const MOST_LAYERS: usize = 1 << 12;
/// Most micro-batches that a step grows to: the number of each step is found by a walk over all
/// numbers below.
pub const MOST_GROWN: usize = 1 << 12;

/// Refuses a value that is not what is expected.
pub fn check(key: &str, is_fine: bool, expected: &str, found: impl Display) -> Result {
    let error = || Error::setting(key, format!("expected {expected}, found {found}"));
    if is_fine { Ok(()) } else { Err(error()) }
}

/// Refuses a size above `most`.
pub fn size(key: &str, size: usize, most: usize) -> Result {
    check(key, size <= most, &format!("at most {most}"), size)
}

/// Refuses a probability or decay rate outside [0, 1).
pub fn share(key: &str, share: f32) -> Result {
    check(key, (0.0..1.0).contains(&share), "a number in [0, 1)", share)
}

/// Refuses a rate or factor that is negative or not finite.
pub fn magnitude(key: &str, magnitude: f32) -> Result {
    let is_fine = magnitude.is_finite() && magnitude >= 0.0;
    check(key, is_fine, "a finite number of at least 0", magnitude)
}

/// Refuses decay rates outside [0, 1), and an epsilon that is not finite and above 0.
pub fn rule(rule: &UpdateRule) -> Result {
    let [first, second] = match *rule {
        UpdateRule::AdamW(Adam { beta1, beta2, .. })
        | UpdateRule::Adam(Adam { beta1, beta2, .. })
        | UpdateRule::Lion { beta1, beta2 } => {
            [("optimizer.beta1", beta1), ("optimizer.beta2", beta2)]
        }
        UpdateRule::Sgd { momentum } => [("optimizer.momentum", momentum); 2],
    };
    share(first.0, first.1)?;
    share(second.0, second.1)?;
    // Adam divides 0 by it where a gradient was always 0.
    let epsilon = rule.adam().map_or(1.0, |adam| adam.epsilon);
    let is_fine = epsilon.is_finite() && epsilon > 0.0;
    check("optimizer.epsilon", is_fine, "a finite number above 0", epsilon)
}

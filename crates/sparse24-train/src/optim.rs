//! The optimizer as numbers: AdamW, and what a phase does to it. Backends apply it.

pub use sparse24_core::op::{AdamW, MaskedDecay};

/// Adam's `1 - beta^step` for both moments, computed in f64.
#[must_use]
pub fn bias_corrections(rule: &AdamW, step: u32) -> [f32; 2] {
    [rule.beta1, rule.beta2].map(|beta| (1.0 - libm::pow(f64::from(beta), f64::from(step))) as f32)
}

/// The effect of a phase on Adam.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AdamVariant {
    /// None.
    #[default]
    Standard,
    /// v keeps the value it had when the phase started (STEP).
    FrozenVariance,
}

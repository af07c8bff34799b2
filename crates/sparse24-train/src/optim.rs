//! The optimizer as numbers, and what a phase does to it. Backends apply it.

pub use sparse24_core::op::{Adam, MaskedDecay, Optimizer, UpdateRule};

/// Adam's `1 - beta^step` for both moments, computed in f64; 1 for a rule without a second moment,
/// which does not read them.
#[must_use]
pub fn bias_corrections(rule: &UpdateRule, step: u32) -> [f32; 2] {
    let betas = rule.adam().map_or([0.0; 2], |adam| [adam.beta1, adam.beta2]);
    betas.map(|beta| (1.0 - libm::pow(f64::from(beta), f64::from(step))) as f32)
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

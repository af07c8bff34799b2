//! The optimizer as numbers: AdamW, clipping, and where masked decay enters. Backends apply it.

/// AdamW with global-norm clipping (Loshchilov and Hutter, "Decoupled weight decay regularization",
/// ICLR 2019).
///
/// With g clipped and masked decay added, m = b1 m + (1-b1) g, v = b2 v + (1-b2) g^2,
/// w = w - lr * (m/(1-b1^t) / (sqrt(v/(1-b2^t)) + eps) + weight_decay * w).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// b1.
    pub beta1: f32,
    /// b2.
    pub beta2: f32,
    /// eps.
    pub epsilon: f32,
    /// Gradients are scaled by min(1, clip / (norm + 1e-6)); infinity never clips.
    pub clip: f32,
}

impl AdamW {
    /// 1 - beta^step, both, computed in f64.
    #[must_use]
    pub fn bias_corrections(&self, step: u32) -> [f32; 2] {
        [self.beta1, self.beta2]
            .map(|beta| (1.0 - libm::pow(f64::from(beta), f64::from(step))) as f32)
    }

    /// The factor that clips gradients of this norm.
    #[must_use]
    pub fn gradient_scale(&self, norm: f32) -> f32 {
        (self.clip / (norm + 1e-6)).min(1.0)
    }
}

/// What a phase does to Adam.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AdamVariant {
    /// Nothing.
    #[default]
    Standard,
    /// v stays as it was when the phase began (STEP).
    FrozenVariance,
}

/// Where the pull of pruned weights to zero enters, and its factor lambda.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MaskedDecay {
    /// Nowhere.
    None,
    /// g + lambda (1-m) w, before the moments: Adam normalises it (FST).
    OnGradients(f32),
    /// w - lr lambda (1-m) w, beside Adam's step (SR-STE).
    OnWeights(f32),
}

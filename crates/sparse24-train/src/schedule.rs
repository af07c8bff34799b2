//! The learning rate of a step: linear warm-up, then decay.

use core::f64::consts::PI;

/// Warm-up and decay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// The rate of the step after the warm-up.
    pub peak: f32,
    /// The rate after step `decay_steps`.
    pub floor: f32,
    /// Steps of linear warm-up.
    pub warmup_steps: u32,
    /// The last step of the decay; the step after it has the floor.
    pub decay_steps: u32,
    /// The way from peak to floor.
    pub decay: Decay,
    /// Steps from the last at the peak to the first at the floor of [`Decay::Wsd`], c; at least 1.
    pub cooldown_steps: u32,
}

/// The factor f of peak - floor, with n = t - 1 - warmup and N = `decay_steps` - warmup.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
pub enum Decay {
    /// f = (1 + cos(pi n / N)) / 2 (Loshchilov and Hutter, "SGDR", ICLR 2017).
    #[default]
    Cosine,
    /// f = 1 - n / N.
    Linear,
    /// Warm-up, stable, decay (Hu et al., "MiniCPM", arXiv 2404.06395), with the linear cooldown of
    /// Haegele et al., arXiv 2405.18392: f = min(1, (N - n) / c).
    Wsd,
}

impl Schedule {
    /// The rate of optimizer step t = 1, 2, ...: `peak * t / (warmup+1)` up to the warm-up's end,
    /// then `floor + (peak - floor) * f` with the factor of [`Decay`], computed in f64.
    #[must_use]
    pub fn learning_rate(&self, step: u32) -> f32 {
        let (done, warmup, end) =
            (f64::from(step) - 1.0, f64::from(self.warmup_steps), f64::from(self.decay_steps));
        let (peak, floor) = (f64::from(self.peak), f64::from(self.floor));
        if done < warmup {
            return (peak * (done + 1.0) / (warmup + 1.0)) as f32;
        }
        if done > end {
            return self.floor;
        }
        let progress = if end > warmup { (done - warmup) / (end - warmup) } else { 0.0 };
        let factor = match self.decay {
            Decay::Cosine => 0.5 * (1.0 + libm::cos(PI * progress)),
            Decay::Linear => 1.0 - progress,
            Decay::Wsd => ((end - done) / f64::from(self.cooldown_steps)).min(1.0),
        };
        (floor + (peak - floor) * factor) as f32
    }
}

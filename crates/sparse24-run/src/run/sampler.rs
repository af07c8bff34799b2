//! Draws the next token from its logits.

use sparse24_core::philox::{Purpose, Site, Stream, uniform};

/// Top-k sampling with a temperature.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampler {
    /// Divides the logits; 0 takes the likeliest token. Not negative.
    pub temperature: f32,
    /// Number of likeliest tokens to draw from.
    pub top_k: usize,
    /// Seed for the draws.
    pub seed: u64,
}

impl Sampler {
    /// The token drawn at this position from logits without a NaN; equal ones are ordered lowest id
    /// first. If some are infinity, the first of them is drawn; minus infinity only if all are.
    ///
    /// # Panics
    /// Without logits, and for a temperature that is negative or NaN.
    #[must_use]
    pub fn draw(&self, logits: &[f32], position: u32) -> u32 {
        assert!(!logits.is_empty(), "a token is drawn from at least one logit");
        assert!(self.temperature >= 0.0, "temperature {}: below 0 or NaN", self.temperature);
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        // Turns -0.0 into 0.0, which `total_cmp` would rank higher.
        let logit = |id: u32| logits[id as usize] + 0.0;
        order.sort_by(|&a, &b| logit(b).total_cmp(&logit(a)));
        if self.temperature == 0.0 || logits[order[0] as usize] == f32::INFINITY {
            return order[0];
        }
        order.truncate(self.top_k.max(1));
        let most = f64::from(logits[order[0] as usize]);
        let weights: Vec<f64> = order
            .iter()
            .map(|&id| match f64::from(logits[id as usize]) {
                f64::NEG_INFINITY => 0.0,
                logit => libm::exp((logit - most) / f64::from(self.temperature)),
            })
            .collect();
        let [word, ..] =
            Stream::new(self.seed, Site::new(Purpose::Sampling, 0), 0, 0).words(position);
        let mut left = f64::from(uniform(word)) * weights.iter().sum::<f64>();
        let drawn = weights.iter().position(|&weight| {
            left -= weight;
            left < 0.0
        });
        let last = || weights.iter().rposition(|&weight| weight > 0.0);
        order[drawn.or_else(last).unwrap_or(0)]
    }
}

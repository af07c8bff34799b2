//! Detects loss spikes. The result depends only on the losses, so a resumed run finds the same.

use std::collections::VecDeque;

/// The losses of the last steps.
#[derive(Debug)]
pub(super) struct Spikes {
    /// Standard deviations above the mean; 0 disables detection.
    threshold: f64,
    window: usize,
    losses: VecDeque<f64>,
}

/// A loss far above the previous ones.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Spike {
    /// Standard deviations above the mean.
    pub(super) z: f64,
    /// Mean of the previous losses.
    pub(super) mean: f64,
}

impl Spikes {
    /// Starts with an empty window.
    pub(super) fn new(threshold: f32, window: usize) -> Self {
        Self { threshold: f64::from(threshold), window, losses: VecDeque::new() }
    }

    /// Whether the next loss is a spike: z = (loss - mean) / deviation over a full window of finite
    /// losses before it. Equal losses have no deviation, so nothing spikes after them.
    pub(super) fn next(&mut self, loss: f32) -> Option<Spike> {
        let count = self.losses.len() as f64;
        let mean = self.losses.iter().sum::<f64>() / count;
        let deviation =
            (self.losses.iter().map(|loss| (loss - mean).powi(2)).sum::<f64>() / count).sqrt();
        let z = (f64::from(loss) - mean) / deviation;
        let full = self.threshold > 0.0 && self.losses.len() == self.window;
        self.push(loss);
        (full && deviation > 0.0 && z >= self.threshold).then_some(Spike { z, mean })
    }

    /// Adds the next loss.
    pub(super) fn push(&mut self, loss: f32) {
        if self.threshold > 0.0 && loss.is_finite() {
            self.losses.push_back(f64::from(loss));
            if self.losses.len() > self.window {
                self.losses.pop_front();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Spike, Spikes};

    fn after<const N: usize>(threshold: f32, window: usize, losses: [f32; N]) -> Spikes {
        let mut spikes = Spikes::new(threshold, window);
        losses.into_iter().for_each(|loss| spikes.push(loss));
        spikes
    }

    #[test]
    fn a_spike_is_far_above_a_full_window() {
        let mut spikes = after(3.0, 4, [9.0, 1.0, 3.0]);
        assert_eq!(spikes.next(1.0), None, "three losses are no window");
        assert_eq!(spikes.next(3.0), None, "the first of five is forgotten");
        // Mean 2, deviation 1.
        assert_eq!(spikes.next(f32::NAN), None);
        assert_eq!(after(3.0, 4, [1.0, 3.0, 1.0, 3.0]).next(4.9), None);
        assert_eq!(spikes.next(5.0), Some(Spike { z: 3.0, mean: 2.0 }));
        assert_eq!(spikes.next(-9.0), None, "a low loss is welcome");
    }

    #[test]
    fn nothing_spikes_when_off_or_after_equal_losses() {
        assert_eq!(after(0.0, 2, [1.0, 3.0]).next(1e9), None);
        assert_eq!(after(3.0, 2, [1.0, 1.0]).next(2.0), None);
    }
}

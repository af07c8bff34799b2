//! Learning rate and batch of a step as functions of its number: linear warm-up, then decay; and
//! micro-batches, as many in every step or growing.

use core::{f64::consts::PI, num::NonZeroU32, ops::Range};

use sparse24_core::phase::Fraction;

/// Warm-up and decay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// The rate of the step after the warm-up.
    pub peak: f32,
    /// The rate after step `decay_steps`.
    pub floor: f32,
    /// The rate of the first step of the warm-up; 0 for `peak / (warmup+1)`.
    pub warmup_start: f32,
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
#[cfg_attr(feature = "serde", serde(rename_all = "kebab-case"))]
pub enum Decay {
    /// f = (1 + cos(pi n / N)) / 2 (Loshchilov and Hutter, "SGDR", ICLR 2017).
    #[default]
    Cosine,
    /// f = 1 - n / N.
    Linear,
    /// Warm-up, stable, decay (Hu et al., "MiniCPM", arXiv 2404.06395), with the linear cooldown of
    /// Haegele et al., arXiv 2405.18392: f = min(1, (N - n) / c).
    Wsd,
    /// f = sqrt(warmup / (t - 1)), and 1 up to the end of the warm-up (Vaswani et al., "Attention
    /// is all you need", NeurIPS 2017, as fairseq counts steps). It does not end: `decay_steps` has
    /// no effect.
    InverseSqrt,
    /// f = min(1/4 + x, 4 - 4x), with x the share of the run's micro-steps before the last one of
    /// step t (Geiping and Goldstein, "Cramming", arXiv 2212.14034). It is its own warm-up:
    /// `warmup_steps` and `decay_steps` have no effect.
    Triangle,
}

impl Decay {
    /// Whether the decay has an end that `decay_steps` sets.
    #[must_use]
    pub const fn ends(self) -> bool {
        !matches!(self, Self::InverseSqrt | Self::Triangle)
    }
}

impl Schedule {
    /// The rate of optimizer step t = 1, 2, ..., where `x` is the share of the run's micro-steps
    /// before the last one of the step. Up to the warm-up's end it is `peak * t / (warmup+1)`, or
    /// with a start s above 0, `s + (peak - s) * (t - 1) / warmup`; then
    /// `floor + (peak - floor) * f` with the factor of [`Decay`]. Computed in f64.
    #[must_use]
    pub fn learning_rate(&self, step: u32, x: f64) -> f32 {
        let (done, warmup, end) =
            (f64::from(step) - 1.0, f64::from(self.warmup_steps), f64::from(self.decay_steps));
        let [peak, floor, start] = [self.peak, self.floor, self.warmup_start].map(f64::from);
        if done < warmup && self.decay != Decay::Triangle {
            let rate = if start > 0.0 {
                start + (peak - start) * done / warmup
            } else {
                peak * (done + 1.0) / (warmup + 1.0)
            };
            return rate as f32;
        }
        if done > end && self.decay.ends() {
            return self.floor;
        }
        let progress = if end > warmup { (done - warmup) / (end - warmup) } else { 0.0 };
        let factor = match self.decay {
            Decay::Cosine => 0.5 * (1.0 + libm::cos(PI * progress)),
            Decay::Linear => 1.0 - progress,
            Decay::Wsd => ((end - done) / f64::from(self.cooldown_steps)).min(1.0),
            Decay::InverseSqrt => libm::sqrt(warmup.max(1.0) / done.max(1.0)),
            Decay::Triangle => (0.25 + x).min(4.0 - 4.0 * x),
        };
        (floor + (peak - floor) * factor) as f32
    }
}

/// Micro-batches per optimizer step: a in every step, or growing linearly over the micro-steps of a
/// run of T steps, from a to b (as Geiping and Goldstein, arXiv 2212.14034, grow the batch).
///
/// Step t, which starts after s micro-steps, has `min(b, a + floor(s (b - a + 1) / M))` of them,
/// where `M = round(T (b - a + 1) / (1/a + ... + 1/b))`, the number of micro-steps of the run but
/// for rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GradientAccumulation {
    /// Micro-batches of the first step, a.
    pub first: NonZeroU32,
    /// Micro-batches that the steps grow to, b; at least a.
    pub last: NonZeroU32,
    /// Optimizer steps of the run, T.
    pub steps: u32,
}

impl GradientAccumulation {
    /// The same number in every step.
    #[must_use]
    pub const fn constant(micro_steps: NonZeroU32) -> Self {
        Self { first: micro_steps, last: micro_steps, steps: 1 }
    }

    /// Micro-steps of step t = 1, 2, ....
    #[must_use]
    pub fn of(&self, step: u32) -> u32 {
        self.at(step).1
    }

    /// Micro-steps before step t.
    #[must_use]
    pub fn before(&self, step: u32) -> u64 {
        self.at(step).0
    }

    /// The micro-steps of step t that a rank computes.
    #[must_use]
    pub fn share(&self, step: u32, rank: usize, world: usize) -> Range<u32> {
        let of_rank = self.of(step) / world as u32;
        rank as u32 * of_rank..(rank as u32 + 1) * of_rank
    }

    /// The share of the run's steps that ends with the last step within a share of its micro-steps.
    #[must_use]
    pub fn share_of_steps(&self, share: Fraction) -> Fraction {
        if self.first == self.last {
            return share;
        }
        let done = |step: u32| u128::from(self.before(step.saturating_add(1)));
        let most = done(self.steps) * u128::from(share.numerator());
        let (mut low, mut high) = (0, self.steps);
        while low < high {
            let middle = high - (high - low) / 2;
            if done(middle) * u128::from(share.denominator()) <= most {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        let whole = low == self.steps;
        if whole { Fraction::ONE } else { Fraction::new(low, self.steps).unwrap_or(share) }
    }

    /// Micro-steps before step t, and of it: walks the stretches of steps of equal size.
    fn at(&self, step: u32) -> (u64, u32) {
        let (first, last) = (self.first.get(), self.last.get());
        let (mut before, mut steps) = (0, u64::from(step.saturating_sub(1)));
        if first < last {
            let sizes = f64::from(last - first) + 1.0;
            let inverses: f64 = (first..=last).map(|size| 1.0 / f64::from(size)).sum();
            let all = (f64::from(self.steps) * sizes / inverses).round() as u128;
            for size in first..last {
                let share = u128::from(size - first + 1) * all;
                let end = share.div_ceil(u128::from(last - first + 1)) as u64;
                let of_size = end.saturating_sub(before).div_ceil(size.into());
                if steps < of_size {
                    return (before + steps * u64::from(size), size);
                }
                before += of_size * u64::from(size);
                steps -= of_size;
            }
        }
        (before + steps * u64::from(last), last)
    }
}

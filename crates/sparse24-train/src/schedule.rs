//! The learning rate of a step: linear warm-up, then cosine decay (Loshchilov and Hutter, "SGDR",
//! ICLR 2017).

use core::f64::consts::PI;

/// Warm-up and cosine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// The rate at the end of the warm-up.
    pub peak: f32,
    /// The rate from `decay_steps` on.
    pub floor: f32,
    /// Steps of linear warm-up.
    pub warmup_steps: u32,
    /// The step at which the floor is reached.
    pub decay_steps: u32,
}

impl Schedule {
    /// The rate of optimizer step t = 1, 2, ...: `peak * t / (warmup+1)` up to the warm-up's end,
    /// then `floor + (peak - floor) * (1 + cos(pi * (t - 1 - warmup) / (decay - warmup))) / 2`,
    /// computed in f64.
    #[must_use]
    pub fn learning_rate(&self, step: u32) -> f32 {
        let (done, warmup, decay) =
            (f64::from(step) - 1.0, f64::from(self.warmup_steps), f64::from(self.decay_steps));
        let (peak, floor) = (f64::from(self.peak), f64::from(self.floor));
        if done < warmup {
            return (peak * (done + 1.0) / (warmup + 1.0)) as f32;
        }
        if done > decay {
            return self.floor;
        }
        let progress = if decay > warmup { (done - warmup) / (decay - warmup) } else { 0.0 };
        (floor + (peak - floor) * 0.5 * (1.0 + libm::cos(PI * progress))) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::Schedule;

    #[test]
    fn rises_linearly_and_falls_to_the_floor() {
        let schedule = Schedule { peak: 1.0, floor: 0.1, warmup_steps: 4, decay_steps: 24 };
        let rates: Vec<f32> =
            [1, 4, 5, 15, 25, 26, 1000].iter().map(|&t| schedule.learning_rate(t)).collect();
        assert_eq!(rates, [0.2, 0.8, 1.0, 0.55, 0.1, 0.1, 0.1]);
    }
}

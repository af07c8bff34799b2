//! What changes every step, as it lies on the device.

/// Seed and counters of random numbers, and the numbers of the optimizer. Mirrors `StepState` of
/// `kernels/philox.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepState {
    /// The run's seed.
    pub seed: u64,
    /// The optimizer step under way, from 1.
    pub step: u32,
    /// The global micro-step within it, from 0.
    pub micro_step: u32,
    /// The learning rate of this step.
    pub learning_rate: f32,
    /// 1 - beta1^step.
    pub bias_correction1: f32,
    /// 1 - beta2^step.
    pub bias_correction2: f32,
}

impl StepState {
    /// 32-bit words on the device.
    pub(crate) const WORDS: usize = 8;

    pub(crate) fn words(&self) -> [u32; Self::WORDS] {
        let numbers =
            [self.learning_rate, self.bias_correction1, self.bias_correction2].map(f32::to_bits);
        [
            self.seed as u32,
            (self.seed >> 32) as u32,
            self.step,
            self.micro_step,
            numbers[0],
            numbers[1],
            numbers[2],
            0,
        ]
    }
}

//! Philox4x32-10 and the addresses of random numbers: the same stream on every device, whatever the
//! thread or block count.
//!
//! A random number has no history: it is a function of (seed, site, micro-step, optimizer step,
//! call). Deliberately absent: a generator with state.
//!
//! Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

/// The block function with its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Philox4x32 {
    key: [u32; 2],
}

/// The multipliers of each round, for kernels that run the rounds themselves.
pub const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
/// What the key grows by after each round.
pub const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
/// Rounds of a block.
pub const ROUNDS: usize = 10;

impl Philox4x32 {
    /// Key = [seed low, seed high].
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { key: [seed as u32, (seed >> 32) as u32] }
    }

    /// Four uniform words for one counter.
    #[must_use]
    pub const fn block(self, counter: [u32; 4]) -> [u32; 4] {
        let ([mut a, mut b, mut c, mut d], [mut k0, mut k1]) = (counter, self.key);
        let mut round = 0;
        while round < ROUNDS {
            let (p0, p1) = (a as u64 * MULTIPLIERS[0] as u64, c as u64 * MULTIPLIERS[1] as u64);
            (a, b, c, d) =
                ((p1 >> 32) as u32 ^ b ^ k0, p1 as u32, (p0 >> 32) as u32 ^ d ^ k1, p0 as u32);
            (k0, k1) = (k0.wrapping_add(WEYL[0]), k1.wrapping_add(WEYL[1]));
            round += 1;
        }
        [a, b, c, d]
    }

    /// The key words, for kernels that run the rounds themselves.
    #[must_use]
    pub const fn key(self) -> [u32; 2] {
        self.key
    }
}

/// What randomness is for. The discriminant is part of every stream: never reuse or renumber one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Purpose {
    /// Initial weights.
    Initialisation = 1,
    /// Which windows of the corpus make up a batch.
    DataOrder = 2,
    /// Dropout masks.
    Dropout = 3,
    /// The uniform of the exact MVUE and the first of the approximate one.
    Mvue = 4,
    /// The second uniform of the approximate MVUE.
    MvueSecond = 5,
    /// Text generation.
    Sampling = 6,
    /// Bootstrap intervals.
    Bootstrap = 7,
    /// Orders of rows among which Bi-Mask chooses.
    Permutation = 8,
}

/// Where randomness is used: the purpose in the top byte, a tensor's number below.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Site(u32);

impl Site {
    /// The site of one purpose at one tensor.
    ///
    /// # Panics
    /// If `tensor` needs more than 24 bits.
    #[must_use]
    pub const fn new(purpose: Purpose, tensor: u32) -> Self {
        assert!(tensor < 1 << 24, "a tensor number has 24 bits");
        Self((purpose as u32) << 24 | tensor)
    }

    /// The same tensor, used for another purpose.
    #[must_use]
    pub const fn with_purpose(self, purpose: Purpose) -> Self {
        Self((purpose as u32) << 24 | self.0 & 0xff_ffff)
    }

    /// The counter word.
    #[must_use]
    pub const fn word(self) -> u32 {
        self.0
    }
}

/// All random words of one site in one micro-step: counter = [call, site, micro-step, step].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    philox: Philox4x32,
    site: Site,
    micro_step: u32,
    step: u32,
}

impl Stream {
    /// The stream of `site` at a global micro-step (`rank * accumulation + local`, so that ranks
    /// never share draws) of an optimizer step.
    #[must_use]
    pub const fn new(seed: u64, site: Site, micro_step: u32, step: u32) -> Self {
        Self { philox: Philox4x32::new(seed), site, micro_step, step }
    }

    /// The four words of one call.
    #[must_use]
    pub const fn words(self, call: u32) -> [u32; 4] {
        self.philox.block([call, self.site.word(), self.micro_step, self.step])
    }

    /// The four uniforms of one call, each in [0, 1).
    #[must_use]
    pub fn uniforms(self, call: u32) -> [f32; 4] {
        self.words(call).map(uniform)
    }

    /// The same place, used for another purpose.
    #[must_use]
    pub const fn with_purpose(self, purpose: Purpose) -> Self {
        Self { site: self.site.with_purpose(purpose), ..self }
    }

    /// The key and the counter words after the call, for kernels that run the rounds themselves:
    /// `[site, micro-step, step]`.
    #[must_use]
    pub const fn address(self) -> ([u32; 2], [u32; 3]) {
        (self.philox.key(), [self.site.word(), self.micro_step, self.step])
    }
}

/// The uniform of one word: `(word >> 8) * 2^-24`, in [0, 1), exact in f32.
#[must_use]
pub fn uniform(word: u32) -> f32 {
    const SCALE: f32 = 1.0 / (1 << 24) as f32;
    (word >> 8) as f32 * SCALE
}

#[cfg(test)]
mod tests {
    use super::{Philox4x32, Purpose, Site, Stream, uniform};

    /// The known-answer vectors of Random123 1.09 (`kat_vectors`, philox4x32 10): zeros, ones,
    /// digits of pi.
    #[test]
    fn published_known_answers() {
        let answer = |seed, counter| Philox4x32::new(seed).block(counter);
        assert_eq!(answer(0, [0; 4]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            answer(u64::MAX, [u32::MAX; 4]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(
            answer(0x299f_31d0_a409_3822, pi),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn a_stream_addresses_the_counter() {
        let stream =
            Stream::new(0x1234_5678_9abc_def0, Site::new(Purpose::Mvue, 0x00ab_cdef), 3, 4);
        assert_eq!(
            stream.words(2),
            Philox4x32::new(0x1234_5678_9abc_def0).block([2, 0x04ab_cdef, 3, 4])
        );
        assert_eq!(stream.address(), ([0x9abc_def0, 0x1234_5678], [0x04ab_cdef, 3, 4]));
        assert_eq!(stream.with_purpose(Purpose::MvueSecond).address().1, [0x05ab_cdef, 3, 4]);
        assert_eq!(stream.uniforms(2), stream.words(2).map(uniform));
    }

    #[test]
    fn uniforms_lie_below_one() {
        assert_eq!(
            [0, 0xff, 0x100, u32::MAX].map(uniform),
            [0.0, 0.0, f32::EPSILON / 2.0, 1.0 - f32::EPSILON / 2.0]
        );
    }

    #[test]
    #[should_panic(expected = "a tensor number has 24 bits")]
    fn a_tensor_number_does_not_reach_the_purpose() {
        let _ = Site::new(Purpose::Mvue, 1 << 24);
    }
}

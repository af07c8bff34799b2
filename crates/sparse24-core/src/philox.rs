//! Philox4x32-10, and the addresses of random numbers.
//!
//! A random number is a function of (seed, site, micro-step, optimizer step, call), not of a
//! generator's state, so every device draws the same stream with any number of threads or blocks.
//!
//! Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

/// The block function with its key.
///
/// ```
/// use sparse24_core::philox::Philox4x32;
///
/// assert_eq!(Philox4x32::new(0).block([0; 4])[0], 0x6627_e8d5);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Philox4x32 {
    key: [u32; 2],
}

/// The multipliers of a round, for kernels that implement the rounds themselves.
pub const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
/// The increments of the key after each round.
pub const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
/// Number of rounds of a block.
pub const ROUNDS: usize = 10;

impl Philox4x32 {
    /// The key `[low word, high word]` of the seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { key: [seed as u32, (seed >> 32) as u32] }
    }

    /// The four random words of a counter.
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

    /// The key, for kernels that implement the rounds themselves.
    #[must_use]
    pub const fn key(self) -> [u32; 2] {
        self.key
    }
}

/// The use of a random number. The discriminant is part of every stream: never reuse or renumber
/// one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Purpose {
    /// Initial weights.
    Initialization = 1,
    /// The windows of the corpus in a batch.
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
    /// Bi-Mask's candidate orders of rows.
    Permutation = 8,
    /// The augmentation of images.
    Augmentation = 9,
}

/// The place where a random number is used: the purpose in the top byte, a tensor's number below.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Site(u32);

impl Site {
    /// The site of a purpose at a tensor.
    ///
    /// # Panics
    /// If `tensor` needs more than 24 bits.
    #[must_use]
    pub const fn new(purpose: Purpose, tensor: u32) -> Self {
        assert!(tensor < 1 << 24, "a tensor number has 24 bits");
        Self((purpose as u32) << 24 | tensor)
    }

    /// The same tensor with another purpose.
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

/// The random words of a site in a micro-step: counter = `[call, site, micro-step, step]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    philox: Philox4x32,
    site: Site,
    micro_step: u32,
    step: u32,
}

impl Stream {
    /// The stream of `site` in a micro-step of an optimizer step. Micro-steps are numbered globally
    /// (`rank * gradient accumulation steps + local`), so that ranks never share draws.
    #[must_use]
    pub const fn new(seed: u64, site: Site, micro_step: u32, step: u32) -> Self {
        Self { philox: Philox4x32::new(seed), site, micro_step, step }
    }

    /// The four words of a call.
    #[must_use]
    pub const fn words(self, call: u32) -> [u32; 4] {
        self.philox.block([call, self.site.word(), self.micro_step, self.step])
    }

    /// The four uniforms of a call, each in [0, 1).
    #[must_use]
    pub fn uniforms(self, call: u32) -> [f32; 4] {
        self.words(call).map(uniform)
    }

    /// The same stream with another purpose.
    #[must_use]
    pub const fn with_purpose(self, purpose: Purpose) -> Self {
        Self { site: self.site.with_purpose(purpose), ..self }
    }

    /// The key and the counter words after the call (`[site, micro-step, step]`), for kernels that
    /// implement the rounds themselves.
    #[must_use]
    pub const fn address(self) -> ([u32; 2], [u32; 3]) {
        (self.philox.key(), [self.site.word(), self.micro_step, self.step])
    }
}

/// The uniform of a word: `(word >> 8) * 2^-24`, in [0, 1), exact in f32.
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
    fn addresses_of_a_stream() {
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
    fn uniforms_are_below_one() {
        assert_eq!(
            [0, 0xff, 0x100, u32::MAX].map(uniform),
            [0.0, 0.0, f32::EPSILON / 2.0, 1.0 - f32::EPSILON / 2.0]
        );
    }

    #[test]
    #[should_panic(expected = "a tensor number has 24 bits")]
    fn tensor_numbers_have_24_bits() {
        let _ = Site::new(Purpose::Mvue, 1 << 24);
    }
}

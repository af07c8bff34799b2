//! The gradient norm and the flag for numbers that are not finite, as kernels leave them.

use sparse24_core::op::NonFinite;

/// The contents of a `[1, WORDS]` matrix, which must be zeroed before its first use.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Health {
    /// The L2 norm of all gradients.
    pub grad_norm: f32,
    /// The cause of the flag, if it is up. Only the host lowers it, by writing 0.
    pub non_finite: Option<NonFinite>,
}

/// The flag of a loss that is not finite: `LOSS` in `kernels/health.cuh`.
const LOSS: u32 = u32::MAX - 1;

impl Health {
    /// 32-bit words: the norm and the flag.
    pub const WORDS: usize = 2;

    /// Decodes downloaded words.
    #[must_use]
    pub const fn of_words([norm, flag]: [u32; Self::WORDS]) -> Self {
        let non_finite = match flag {
            0 => None,
            u32::MAX => Some(NonFinite::Norm),
            LOSS => Some(NonFinite::Loss),
            row => Some(NonFinite::Gradient(row as usize - 1)),
        };
        Self { grad_norm: f32::from_bits(norm), non_finite }
    }
}

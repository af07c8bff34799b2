//! The gradient norm and the flag for numbers that are not finite, as kernels write them.

use sparse24_core::op::NonFinite;

/// The contents of a `[1, 2]` matrix: the bits of the norm, and the flag.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Health {
    /// The L2 norm of all gradients.
    pub grad_norm: f32,
    /// The cause of the flag, if it is raised.
    pub non_finite: Option<NonFinite>,
}

impl Health {
    /// The words of a norm of 0 and no flag. Kernels take the minimum of the flag and the number of
    /// a cause (`health.wgsl`), so the reported cause does not depend on their order.
    pub const SOUND: [u32; 2] = [0, u32::MAX];

    /// Decodes downloaded words.
    #[must_use]
    pub const fn of_words([norm, flag]: [u32; 2]) -> Self {
        const NORM: u32 = u32::MAX - 1;
        let non_finite = match flag {
            u32::MAX => None,
            NORM => Some(NonFinite::Norm),
            0 => Some(NonFinite::Loss),
            row => Some(NonFinite::Gradient(row as usize - 1)),
        };
        Self { grad_norm: f32::from_bits(norm), non_finite }
    }
}

//! When training is sparse and when dense, and when masks are searched anew.
//!
//! Steps are counted from 1: optimizer step t turns w_{t-1} into w_t. Deliberately absent: what a phase computes (a method's choice).

use core::num::NonZeroU32;

use crate::Error;

/// An exact fraction in [0, 1] of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fraction {
    numerator: u32,
    denominator: NonZeroU32,
}

impl Fraction {
    /// Where the paper turns from sparse to dense: 5/6.
    pub const FIVE_SIXTHS: Self = Self { numerator: 5, denominator: NonZeroU32::new(6).unwrap() };
    /// The whole run.
    pub const ONE: Self = Self { numerator: 1, denominator: NonZeroU32::new(1).unwrap() };

    /// `numerator / denominator`.
    ///
    /// # Errors
    /// [`Error::Fraction`] unless it is in [0, 1].
    pub const fn new(numerator: u32, denominator: u32) -> Result<Self, Error> {
        match NonZeroU32::new(denominator) {
            Some(denominator) if numerator <= denominator.get() => Ok(Self { numerator, denominator }),
            _ => Err(Error::Fraction { operation: "phase", numerator, denominator }),
        }
    }

    /// floor(steps * numerator / denominator).
    #[must_use]
    pub const fn of(self, steps: u32) -> u32 {
        (steps as u64 * self.numerator as u64 / self.denominator.get() as u64) as u32
    }

    /// The numerator.
    #[must_use]
    pub const fn numerator(self) -> u32 {
        self.numerator
    }

    /// The denominator.
    #[must_use]
    pub const fn denominator(self) -> u32 {
        self.denominator.get()
    }
}

/// How often masks are searched anew. The first mask comes from w_0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refresh {
    /// After every optimizer step.
    EachStep,
    /// After the optimizer steps that are multiples of l; the paper's l is 40.
    Every(NonZeroU32),
}

impl Refresh {
    /// Whether the mask is searched anew from w_t after optimizer step `t` (1, 2, ...).
    #[must_use]
    pub const fn is_due(self, t: u32) -> bool {
        match self {
            Self::EachStep => true,
            Self::Every(interval) => t.is_multiple_of(interval.get()),
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;
    use core::num::NonZeroU32;

    use super::{Fraction, Refresh};

    #[test]
    fn five_sixths_round_down() {
        assert_eq!([0, 1, 5, 6, 7, 11, 12, 300_000].map(|steps| Fraction::FIVE_SIXTHS.of(steps)), [0, 0, 4, 5, 5, 9, 10, 250_000]);
        assert_eq!(Fraction::FIVE_SIXTHS.of(u32::MAX), 3_579_139_412);
        assert_eq!(Fraction::ONE.of(u32::MAX), u32::MAX);
    }

    #[test]
    fn fractions_are_proper() {
        assert_eq!(Fraction::new(5, 6), Ok(Fraction::FIVE_SIXTHS));
        assert_eq!(Fraction::new(0, 1).map(|fraction| fraction.of(7)), Ok(0));
        assert_eq!(Fraction::new(7, 6).expect_err("too large").to_string(), "phase: 7/6 is not in [0, 1]");
        assert_eq!(Fraction::new(0, 0).expect_err("no number").to_string(), "phase: 0/0 is not in [0, 1]");
    }

    #[test]
    fn refresh_is_due_at_multiples() {
        let refresh = Refresh::Every(NonZeroU32::new(40).expect("not zero"));
        assert!((1..=200).filter(|&t| refresh.is_due(t)).eq([40, 80, 120, 160, 200]));
        assert!((1..=200).all(|t| Refresh::EachStep.is_due(t)));
    }
}

//! When training is sparse or dense, and when masks are searched again.
//!
//! Steps are counted from 1: optimizer step t turns w_{t-1} into w_t.

use core::{fmt, num::NonZeroU32, str::FromStr};

use crate::Error;

/// An exact fraction of a run, in [0, 1].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fraction {
    numerator: u32,
    denominator: NonZeroU32,
}

impl Fraction {
    /// The sparse part of a run in the paper, 5/6.
    pub const FIVE_SIXTHS: Self = Self { numerator: 5, denominator: NonZeroU32::new(6).unwrap() };
    /// The whole run.
    pub const ONE: Self = Self { numerator: 1, denominator: NonZeroU32::new(1).unwrap() };

    /// `numerator / denominator`.
    ///
    /// # Errors
    /// [`Error::Fraction`] unless it is in [0, 1].
    pub const fn new(numerator: u32, denominator: u32) -> Result<Self, Error> {
        match NonZeroU32::new(denominator) {
            Some(denominator) if numerator <= denominator.get() => {
                Ok(Self { numerator, denominator })
            }
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

impl fmt::Display for Fraction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.denominator.get() {
            1 => write!(f, "{}", self.numerator),
            denominator => write!(f, "{}/{denominator}", self.numerator),
        }
    }
}

/// Parses `5/6`, or a decimal with at most nine decimal places (`0.55`), exactly.
impl FromStr for Fraction {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        const INVALID: Error = Error::NotAFraction { operation: "phase" };
        let digits = |text: &str| match text.parse() {
            Ok(number) if text.bytes().all(|b| b.is_ascii_digit()) => Ok(number),
            _ => Err(INVALID),
        };
        let (numerator, denominator) = match (text.split_once('/'), text.split_once('.')) {
            (Some((numerator, denominator)), _) => (digits(numerator)?, digits(denominator)?),
            (None, Some((whole, decimals))) if decimals.len() <= 9 => {
                let denominator = 10_u32.pow(decimals.len() as u32);
                let whole: u32 = digits(whole)?;
                (
                    whole
                        .checked_mul(denominator)
                        .and_then(|whole| whole.checked_add(digits(decimals).ok()?))
                        .ok_or(INVALID)?,
                    denominator,
                )
            }
            _ => (digits(text)?, 1),
        };
        Self::new(numerator, denominator)
    }
}

/// How often masks are searched again. The first mask comes from the weights from which the first
/// sparse step starts, w_0 unless training starts dense.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refresh {
    /// After every optimizer step.
    EachStep,
    /// After the optimizer steps that are multiples of this; 40 in the paper.
    Every(NonZeroU32),
}

impl Refresh {
    /// Whether the mask is searched again, from w_t, after optimizer step `t` (1, 2, ...).
    #[must_use]
    pub const fn is_due(self, t: u32) -> bool {
        match self {
            Self::EachStep => true,
            Self::Every(interval) => t.is_multiple_of(interval.get()),
        }
    }
}

/// Whether Adam's second moment has settled (STEP's AutoSwitch with the arithmetic mean): the mean
/// of the last T_w changes is below `epsilon`.
///
/// A change is Z_t, the mean over all weights of |v_t - v_{t-1}|, rounded to f32. `changes` holds
/// those of all steps so far, or at least the last T_w = [`settling_window`] of them; with fewer,
/// nothing has settled. The sum is in f64, oldest first.
///
/// Source: Lu et al., "STEP: learning N:M structured sparsity masks from scratch with
/// precondition", ICML 2023, algorithm 2.
#[must_use]
pub fn has_settled(changes: &[f32], beta2: f32, epsilon: f32) -> bool {
    let window = settling_window(beta2);
    let Some(first) = changes.len().checked_sub(window) else { return false };
    changes[first..].iter().copied().map(f64::from).sum::<f64>()
        < f64::from(epsilon) * window as f64
}

/// T_w = 1/(1 - beta2), rounded to the nearest integer and at least 1. (The source rounds down,
/// which would give 19 for the binary float nearest to 0.95.)
#[must_use]
pub fn settling_window(beta2: f32) -> usize {
    ((1.0 / (1.0 - f64::from(beta2)) + 0.5) as usize).max(1)
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::{Fraction, has_settled, settling_window};

    #[test]
    fn parsing_fractions() {
        let read = |text: &str| text.parse::<Fraction>().map(|fraction| fraction.to_string());
        for (text, expected) in [
            ("5/6", "5/6"),
            ("1", "1"),
            ("0", "0"),
            ("0.5", "5/10"),
            ("1.0", "10/10"),
            ("10/13", "10/13"),
            ("0.000000001", "1/1000000000"),
        ] {
            assert_eq!(read(text).as_deref(), Ok(expected));
        }
        let invalid = [
            "",
            "7/6",
            "1.5",
            "-1",
            "+1",
            "1/",
            "/2",
            "1/0",
            ".5",
            "0.",
            "1e-1",
            "0.0000000001",
            "a",
        ];
        for text in invalid.into_iter().chain(["99999999999", "4294967295.1"]) {
            let error: &dyn core::error::Error = &read(text).expect_err(text);
            assert!(error.to_string().starts_with("phase: "), "{error}");
        }
    }

    #[test]
    fn settling_needs_a_whole_window() {
        assert_eq!(
            [0.0, 0.5, 0.9, 0.95, 0.99, 0.999].map(settling_window),
            [1, 2, 10, 20, 100, 1000]
        );
        let settled = |changes: &[f32]| has_settled(changes, 0.75, 1.0);
        assert!(!settled(&[0.0; 3]) && settled(&[0.0; 4]), "a window of four");
        assert!(
            settled(&[9.0, 0.0, 3.5, 0.0, 0.0]) && !settled(&[9.0, 0.0, 4.0, 0.0, 0.0]),
            "a mean below 1, of the last four"
        );
        assert!(!settled(&[0.0, f32::NAN, 0.0, 0.0]));
    }
}

//! Statistics for comparing runs: Student's t, paired differences, quantiles.
//!
//! Invariant: sums run in the order of their terms, so the same numbers give the same bits.

use serde::Serialize;

/// Coverage of the intervals.
pub const LEVEL: f64 = 0.95;

/// A mean of differences with its confidence interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Interval {
    /// Mean of the differences.
    pub mean: f64,
    /// mean - t s / sqrt(n), with the standard deviation s (n-1) and Student's quantile t for
    /// [`LEVEL`]; none if n < 2.
    pub low: Option<f64>,
    /// mean + t s / sqrt(n).
    pub high: Option<f64>,
    /// Number of differences, n.
    pub pairs: usize,
}

impl Interval {
    /// The interval of differences, one per seed; none if there are none.
    #[must_use]
    pub fn of(differences: &[f64]) -> Option<Self> {
        let (mean, pairs) = (mean(differences)?, differences.len());
        let half = deviation(differences).map(|s| {
            student_quantile(0.5 + LEVEL / 2.0, pairs as u32 - 1) * s / (pairs as f64).sqrt()
        });
        Some(Self { mean, low: half.map(|h| mean - h), high: half.map(|h| mean + h), pairs })
    }
}

/// The arithmetic mean; none of an empty list.
#[must_use]
pub fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// The standard deviation (n-1); none of fewer than two values.
#[must_use]
pub fn deviation(values: &[f64]) -> Option<f64> {
    let mean = mean(values)?;
    let sum: f64 = values.iter().map(|value| (value - mean) * (value - mean)).sum();
    (values.len() > 1).then(|| (sum / (values.len() - 1) as f64).sqrt())
}

/// The quantile at `share` in [0, 1], interpolated linearly (Hyndman and Fan's type 7); none of an
/// empty list.
///
/// # Panics
/// If `share` is outside [0, 1].
#[must_use]
pub fn quantile(values: &[f64], share: f64) -> Option<f64> {
    assert!((0.0..=1.0).contains(&share), "no quantile at {share}");
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = share * (sorted.len().checked_sub(1)?) as f64;
    let (below, above) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    Some(below + (above - below) * at.fract())
}

/// P(|T| <= t) of Student's t with `degrees` >= 1 degrees of freedom, t = sqrt(degrees) tan(angle):
/// a finite sum.
///
/// Source: Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.7.3 and 26.7.4.
fn student_within(angle: f64, degrees: u32) -> f64 {
    let (sine, cosine) = (libm::sin(angle), libm::cos(angle));
    // Even degrees: 1 + (1/2) cos^2 + (1 3)/(2 4) cos^4 + ...; odd: cos (1 + (2/3) cos^2 + ...); up
    // to cos^(degrees - 2).
    let odd = degrees % 2;
    let (mut sum, mut term) = (0.0, if odd == 1 { cosine } else { 1.0 });
    for power in (odd..degrees.saturating_sub(1)).step_by(2) {
        sum += term;
        term *= cosine * cosine * f64::from(power + 1) / f64::from(power + 2);
    }
    if odd == 1 { core::f64::consts::FRAC_2_PI * (angle + sine * sum) } else { sine * sum }
}

/// The t with P(T <= t) = `probability` in [1/2, 1), by bisection of its angle down to the last
/// bit.
///
/// # Panics
/// For other probabilities, or zero degrees of freedom.
#[must_use]
pub fn student_quantile(probability: f64, degrees: u32) -> f64 {
    assert!(
        (0.5..1.0).contains(&probability) && degrees > 0,
        "no quantile of {probability} with {degrees} degrees of freedom"
    );
    let (mut low, mut high) = (0.0, core::f64::consts::FRAC_PI_2);
    loop {
        let middle = low + (high - low) / 2.0;
        if middle <= low || middle >= high {
            return f64::from(degrees).sqrt() * libm::tan(low);
        }
        if student_within(middle, degrees) < 2.0 * probability - 1.0 {
            low = middle
        } else {
            high = middle
        }
    }
}

#[cfg(test)]
mod tests {
    use core::f64::consts::PI;

    use super::*;

    fn close(found: f64, expected: f64, error: f64) {
        assert!((found - expected).abs() <= error, "{found}, expected {expected}");
    }

    /// Published tables, and the closed forms of one degree, tan(pi (p - 1/2)), and of two,
    /// a (2 / (1 - a^2))^(1/2) with a = 2p - 1.
    #[test]
    fn student_quantiles_match_tables() {
        for (degrees, expected) in [
            (3, 3.182_446_305_284_263),
            (4, 2.776_445_105_197_799),
            (9, 2.262_157_162_740_992),
            (30, 2.042_272_456_301_238),
        ] {
            close(student_quantile(0.975, degrees), expected, 1e-9);
        }
        for p in [0.5, 0.6, 0.9, 0.975, 0.999] {
            let a: f64 = 2.0 * p - 1.0;
            close(student_quantile(p, 1), (PI * (p - 0.5)).tan(), 1e-9);
            close(student_quantile(p, 2), a * (2.0 / (1.0 - a * a)).sqrt(), 1e-9);
        }
        close(student_quantile(0.975, 100_000), 1.959_963_985, 1e-4);
    }

    #[test]
    fn an_interval_is_the_mean_and_t_standard_errors() {
        // Mean 3, s = sqrt(2.5), t = 2.7764 for four degrees.
        let found = Interval::of(&[1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
        assert_eq!((found.mean, found.pairs), (3.0, 5));
        close(found.high.unwrap() - 3.0, 2.776_445_105_197_799 * (2.5_f64 / 5.0).sqrt(), 1e-12);
        close(3.0 - found.low.unwrap(), found.high.unwrap() - 3.0, 1e-12);
        let one = Interval { mean: 7.0, low: None, high: None, pairs: 1 };
        assert_eq!((Interval::of(&[7.0]), Interval::of(&[])), (Some(one), None));
    }

    #[test]
    fn quantiles_are_interpolated() {
        let values = [3.0, 1.0, 2.0, 5.0, 4.0];
        for (share, expected) in [(0.0, 1.0), (0.25, 2.0), (0.5, 3.0), (0.975, 4.9), (1.0, 5.0)] {
            close(quantile(&values, share).unwrap(), expected, 1e-12);
        }
        assert_eq!(quantile(&[], 0.5), None);
        assert!(std::panic::catch_unwind(|| quantile(&values, -0.1)).is_err());
    }
}

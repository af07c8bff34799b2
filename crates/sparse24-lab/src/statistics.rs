//! The little statistics that comparisons of runs need: Student's t, paired differences, quantiles,
//! rank correlation.
//!
//! Invariant: sums run in the order of their terms, so that the same numbers give the same bits.
//! Deliberately absent: what is compared.

use serde::Serialize;

/// The share of intervals that cover what they estimate.
pub const LEVEL: f64 = 0.95;

/// A mean, and what its terms say of it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Interval {
    /// The mean.
    pub mean: f64,
    /// mean - t s / sqrt(n), with s the standard deviation (n-1) and t Student's quantile for
    /// [`LEVEL`]; none of fewer than two terms.
    pub low: Option<f64>,
    /// The same on the other side.
    pub high: Option<f64>,
    /// n.
    pub pairs: usize,
}

impl Interval {
    /// Of differences, one a seed; none if there are none.
    #[must_use]
    pub fn of(differences: &[f64]) -> Option<Self> {
        let (mean, pairs) = (mean(differences)?, differences.len());
        let half = deviation(differences).map(|s| {
            student_quantile(0.5 + LEVEL / 2.0, pairs as u32 - 1) * s / (pairs as f64).sqrt()
        });
        Some(Self {
            mean,
            low: half.map(|half| mean - half),
            high: half.map(|half| mean + half),
            pairs,
        })
    }
}

/// The arithmetic mean; none of nothing.
#[must_use]
pub fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// The standard deviation with n-1; none of fewer than two.
#[must_use]
pub fn deviation(values: &[f64]) -> Option<f64> {
    let mean = mean(values)?;
    let sum: f64 = values.iter().map(|value| (value - mean) * (value - mean)).sum();
    (values.len() > 1).then(|| (sum / (values.len() - 1) as f64).sqrt())
}

/// The value below which a share of the values lies, between two of them linearly (Hyndman and
/// Fan's type 7); none of nothing.
#[must_use]
pub fn quantile(values: &[f64], share: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = share * (sorted.len().checked_sub(1)?) as f64;
    let (below, above) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    Some(below + (above - below) * at.fract())
}

/// P(|T| <= t) of Student's t with `degrees` >= 1 degrees of freedom, t = sqrt(degrees) tan(angle):
/// a finite sum for whole degrees.
///
/// Source: Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.7.3 and 26.7.4.
fn student_within(angle: f64, degrees: u32) -> f64 {
    let (sine, cosine) = (libm::sin(angle), libm::cos(angle));
    // 1 + (1/2) cos^2 + (1 3)/(2 4) cos^4 + ..., of odd degrees cos (1 + (2/3) cos^2 + ...), up to
    // cos^(degrees - 2).
    let odd = degrees % 2;
    let (mut sum, mut term) = (0.0, if odd == 1 { cosine } else { 1.0 });
    for power in (odd..degrees.saturating_sub(1)).step_by(2) {
        sum += term;
        term *= cosine * cosine * f64::from(power + 1) / f64::from(power + 2);
    }
    if odd == 1 { core::f64::consts::FRAC_2_PI * (angle + sine * sum) } else { sine * sum }
}

/// The t with P(T <= t) = `probability` in [1/2, 1), to the last bits: bisected in its angle.
///
/// # Panics
/// For another probability, or no degree of freedom.
#[must_use]
pub fn student_quantile(probability: f64, degrees: u32) -> f64 {
    assert!(
        (0.5..1.0).contains(&probability) && degrees > 0,
        "a quantile of {probability} with {degrees} degrees of freedom"
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

/// Spearman's rank correlation: Pearson's of the ranks, equal values sharing the mean of theirs;
/// none where either is constant.
///
/// # Panics
/// For lists of different lengths.
#[must_use]
pub fn spearman(x: &[f64], y: &[f64]) -> Option<f64> {
    assert_eq!(x.len(), y.len(), "a correlation pairs its values");
    let (x, y) = (centred_ranks(x)?, centred_ranks(y)?);
    let product = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let scale = (product(&x, &x) * product(&y, &y)).sqrt();
    (scale > 0.0).then(|| product(&x, &y) / scale)
}

/// Ranks less their mean.
fn centred_ranks(values: &[f64]) -> Option<Vec<f64>> {
    let rank = |value: &f64| {
        let below = values.iter().filter(|other| *other < value).count();
        let equal = values.iter().filter(|other| *other == value).count();
        below as f64 + (equal as f64 - 1.0) / 2.0
    };
    let ranks: Vec<f64> = values.iter().map(rank).collect();
    let mean = mean(&ranks)?;
    Some(ranks.into_iter().map(|rank| rank - mean).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(found: f64, expected: f64, error: f64) {
        assert!((found - expected).abs() <= error, "{found}, expected {expected}");
    }

    /// Tables print three or four decimals; one and two degrees have closed forms: tan(pi (p -
    /// 1/2)), and a (2 / (1 - a^2))^(1/2), a = 2p - 1.
    #[test]
    fn student_quantiles_are_those_of_tables() {
        let table = [
            (3, 3.182_446_305_284_263),
            (4, 2.776_445_105_197_799),
            (9, 2.262_157_162_740_992),
            (30, 2.042_272_456_301_238),
        ];
        for (degrees, expected) in table {
            close(student_quantile(0.975, degrees), expected, 1e-9);
        }
        for probability in [0.5, 0.6, 0.9, 0.975, 0.999] {
            close(
                student_quantile(probability, 1),
                (core::f64::consts::PI * (probability - 0.5)).tan(),
                1e-9,
            );
            let a = 2.0 * probability - 1.0;
            close(student_quantile(probability, 2), a * (2.0 / (1.0 - a * a)).sqrt(), 1e-9);
        }
        close(student_quantile(0.975, 100_000), 1.959_963_985, 1e-4);
    }

    /// Simpson's rule over the density is an oracle that shares nothing with the sum.
    #[test]
    fn the_quantile_holds_its_share_of_the_density() {
        for degrees in [1_u32, 2, 5, 8, 13] {
            let n = f64::from(degrees);
            let density = |t: f64| {
                let scale = libm::tgamma((n + 1.0) / 2.0)
                    / (libm::tgamma(n / 2.0) * (n * core::f64::consts::PI).sqrt());
                scale * (1.0 + t * t / n).powf(-(n + 1.0) / 2.0)
            };
            let (end, parts) = (student_quantile(0.975, degrees), 20_000);
            let h = end / f64::from(parts);
            let weight = |i: i32| {
                if i == 0 || i == parts {
                    1.0
                } else if i % 2 == 1 {
                    4.0
                } else {
                    2.0
                }
            };
            let share: f64 =
                (0..=parts).map(|i| weight(i) * density(f64::from(i) * h)).sum::<f64>() * h / 3.0;
            close(share, 0.475, 1e-9);
        }
    }

    #[test]
    fn an_interval_is_the_mean_and_t_standard_errors() {
        // Mean 3, s = sqrt(2.5), t = 2.7764 for four degrees.
        let found = Interval::of(&[1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
        assert_eq!((found.mean, found.pairs), (3.0, 5));
        close(found.high.unwrap() - 3.0, 2.776_445_105_197_799 * (2.5_f64 / 5.0).sqrt(), 1e-12);
        close(3.0 - found.low.unwrap(), found.high.unwrap() - 3.0, 1e-12);
        assert_eq!(
            Interval::of(&[7.0]),
            Some(Interval { mean: 7.0, low: None, high: None, pairs: 1 })
        );
        assert_eq!(Interval::of(&[]), None);
    }

    #[test]
    fn quantiles_lie_between_values() {
        let values = [3.0, 1.0, 2.0, 5.0, 4.0];
        assert_eq!(
            [0.0, 0.25, 0.5, 1.0].map(|share| quantile(&values, share).unwrap()),
            [1.0, 2.0, 3.0, 5.0]
        );
        close(quantile(&values, 0.975).unwrap(), 4.9, 1e-12);
        assert_eq!(quantile(&[], 0.5), None);
    }

    #[test]
    fn ranks_correlate() {
        assert_eq!(spearman(&[1.0, 10.0, 100.0], &[3.0, 2.0, 1.0]), Some(-1.0));
        assert_eq!(spearman(&[1.0, 2.0], &[4.0, 4.0]), None, "a constant has no ranks");
        // Of 1 - 6 sum d^2 / (n (n^2 - 1)): ranks 1234 and 1324, so 1 - 12 / 60.
        close(spearman(&[1.0, 2.0, 3.0, 4.0], &[0.1, 0.3, 0.2, 0.4]).unwrap(), 0.8, 1e-12);
        // Ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4: 4.5 / sqrt(4.5 * 5).
        close(
            spearman(&[1.0, 2.0, 2.0, 3.0], &[1.0, 2.0, 3.0, 4.0]).unwrap(),
            4.5 / 22.5_f64.sqrt(),
            1e-12,
        );
    }
}

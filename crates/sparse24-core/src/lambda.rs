//! The feasibility rule for the decay factor lambda (paper, section 4.3): how the sparse flip rate
//! must compare to the dense one.
//!
//! Deliberately absent: the runs that measure it.

use core::ops::RangeInclusive;

/// Feasible mu = mean sparse flip rate / mean dense flip rate over the sampling window of the
/// warm-up.
pub const FEASIBLE: RangeInclusive<f64> = 0.60..=0.95;

/// Among feasible candidates the one whose mu is nearest to this is recommended.
pub const TARGET: f64 = 0.775;

/// The default candidates.
pub const GRID: [f64; 8] = [6e-7, 2e-6, 6e-6, 2e-5, 6e-5, 2e-4, 6e-4, 2e-3];

/// What mu says of a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// mu < 0.60: the mask is frozen too early.
    TooStrong,
    /// mu in [0.60, 0.95].
    Feasible,
    /// mu in (0.95, 1): the decay hardly calms the mask.
    TooWeak,
    /// mu >= 1, or no number: flip-rate explosion.
    Explosion,
}

/// The verdict on mu; NaN is an explosion.
#[must_use]
pub fn verdict(mu: f64) -> Verdict {
    if mu < *FEASIBLE.start() {
        Verdict::TooStrong
    } else if mu <= *FEASIBLE.end() {
        Verdict::Feasible
    } else if mu < 1.0 {
        Verdict::TooWeak
    } else {
        Verdict::Explosion
    }
}

/// The index of the recommended candidate, given each one's mu: feasible and nearest to [`TARGET`],
/// the first on ties; `None` if none is feasible.
#[must_use]
pub fn recommend(mu: &[f64]) -> Option<usize> {
    let distance = |i: usize| (mu[i] - TARGET).abs();
    (0..mu.len())
        .filter(|&i| verdict(mu[i]) == Verdict::Feasible)
        .reduce(|best, i| if distance(i) < distance(best) { i } else { best })
}

#[cfg(test)]
mod tests {
    use super::{Verdict, recommend, verdict};

    #[test]
    fn the_band_includes_its_edges() {
        let below = |x: f64| f64::from_bits(x.to_bits() - 1);
        let above = |x: f64| f64::from_bits(x.to_bits() + 1);
        for (mu, expected) in [
            (0.0, Verdict::TooStrong),
            (below(0.60), Verdict::TooStrong),
            (0.60, Verdict::Feasible),
            (0.95, Verdict::Feasible),
            (above(0.95), Verdict::TooWeak),
            (below(1.0), Verdict::TooWeak),
            (1.0, Verdict::Explosion),
            (f64::INFINITY, Verdict::Explosion),
            (f64::NAN, Verdict::Explosion),
        ] {
            assert_eq!(verdict(mu), expected, "{mu}");
        }
    }

    #[test]
    fn the_nearest_to_the_target_is_recommended() {
        assert_eq!(recommend(&[0.5, 0.61, 0.8, 0.74, f64::NAN, 1.2]), Some(2));
        assert_eq!(recommend(&[0.77, 0.77, 0.9]), Some(0));
        assert_eq!(recommend(&[0.59, 0.96, 1.0, f64::NAN]), None);
        assert_eq!(recommend(&[]), None);
    }
}

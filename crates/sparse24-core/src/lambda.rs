//! The feasibility rule for the decay factor lambda (the paper's section 4.3), which compares the
//! flip rate of sparse training with that of dense training.
//!
//! mu = mean sparse flip rate / mean dense flip rate over the sampling window of the warm-up.

use core::ops::RangeInclusive;

/// The feasible range of mu.
pub const FEASIBLE: RangeInclusive<f64> = 0.60..=0.95;

/// The feasible candidate whose mu is nearest to this is recommended.
pub const TARGET: f64 = 0.775;

/// The default candidates for lambda: from the scale of the paper, whose steps have half a million
/// tokens, to that of steps of a few hundred, whose gradients are noisier.
pub const GRID: [f64; 15] =
    [6e-7, 2e-6, 6e-6, 2e-5, 6e-5, 2e-4, 6e-4, 2e-3, 6e-3, 2e-2, 6e-2, 2e-1, 6e-1, 2.0, 6.0];

/// The verdict on a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// mu < 0.60: the mask freezes too early.
    TooStrong,
    /// mu in [0.60, 0.95].
    Feasible,
    /// mu in (0.95, 1): the decay hardly reduces flips.
    TooWeak,
    /// mu >= 1 or NaN: flip-rate explosion.
    Explosion,
}

/// The verdict on mu.
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

/// The index of the recommended candidate given every candidate's mu: the feasible one nearest to
/// [`TARGET`], the first on ties; `None` if none is feasible.
#[must_use]
pub fn recommend(mu: &[f64]) -> Option<usize> {
    let distance = |i: usize| (mu[i] - TARGET).abs();
    (0..mu.len())
        .filter(|&i| verdict(mu[i]) == Verdict::Feasible)
        .reduce(|best, i| if distance(i) < distance(best) { i } else { best })
}

#[cfg(test)]
mod tests {
    use super::{Verdict, verdict};

    #[test]
    fn verdicts_at_the_edges() {
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
}

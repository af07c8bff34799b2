//! Phases, refreshes and the lambda rule.

use proptest::prelude::*;
use sparse24_core::{
    lambda::{self, Verdict},
    phase::{Fraction, Refresh},
};
use std::num::NonZeroU32;

use super::input::cases;

proptest! {
    #![proptest_config(cases(1000))]

    #[test]
    fn a_fraction_rounds_down(
        numerator in any::<u32>(),
        denominator in any::<u32>(),
        steps in any::<u32>(),
    ) {
        match Fraction::new(numerator, denominator) {
            Ok(fraction) => {
                let (of, t) = (fraction.of(steps) as u128, steps as u128);
                let (n, d) = (numerator as u128, denominator as u128);
                prop_assert!(of * d <= t * n && t * n < (of + 1) * d);
                prop_assert!(of <= t);
            }
            Err(error) => {
                prop_assert!(denominator == 0 || numerator > denominator);
                let expected = format!("phase: {numerator}/{denominator} is not in [0, 1]");
                prop_assert_eq!(error.to_string(), expected);
            }
        }
    }

    #[test]
    fn refreshes_are_one_interval_apart(interval in 1_u32..60, steps in 0_u32..500) {
        let refresh = Refresh::Every(NonZeroU32::new(interval).expect("not zero"));
        let due: Vec<u32> = (1..=steps).filter(|&t| refresh.is_due(t)).collect();
        let expected: Vec<u32> = (1..=steps / interval).map(|n| n * interval).collect();
        prop_assert_eq!(due, expected);
        prop_assert!(Refresh::EachStep.is_due(steps));
    }

    #[test]
    fn the_recommended_lambda_is_feasible_and_nearest(
        mu in prop::collection::vec(prop_oneof![4 => 0.0..1.5, 1 => Just(f64::NAN)], 0..9),
    ) {
        let feasible = |&i: &usize| (0.60..=0.95).contains(&mu[i]);
        match lambda::recommend(&mu) {
            Some(best) => {
                prop_assert!(feasible(&best));
                prop_assert_eq!(lambda::verdict(mu[best]), Verdict::Feasible);
                for i in (0..mu.len()).filter(feasible) {
                    let (this, chosen) = ((mu[i] - 0.775).abs(), (mu[best] - 0.775).abs());
                    prop_assert!(chosen < this || chosen == this && best <= i);
                }
            }
            None => prop_assert_eq!((0..mu.len()).filter(feasible).count(), 0),
        }
        for mu in mu {
            let explodes = lambda::verdict(mu) == Verdict::Explosion;
            prop_assert_eq!(explodes, mu >= 1.0 || mu.is_nan());
        }
    }
}

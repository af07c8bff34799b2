//! Phases, refreshes, the lambda rule and random addresses.

use proptest::prelude::*;
use sparse24_core::{
    lambda::{self, Verdict},
    phase::{Fraction, Refresh},
    philox::{Philox4x32, Purpose, Site, Stream, uniform},
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

    #[test]
    fn a_stream_is_a_function_of_its_address(
        seed in any::<u64>(),
        tensor in 0_u32..1 << 24,
        micro_step in any::<u32>(),
        step in any::<u32>(),
        call in any::<u32>(),
    ) {
        let stream = Stream::new(seed, Site::new(Purpose::Mvue, tensor), micro_step, step);
        let expected = Philox4x32::new(seed).block([call, 4 << 24 | tensor, micro_step, step]);
        prop_assert_eq!(stream.words(call), expected);
        let second = stream.with_purpose(Purpose::MvueSecond);
        let site = Site::new(Purpose::MvueSecond, tensor);
        prop_assert_eq!(second, Stream::new(seed, site, micro_step, step));
        prop_assert_ne!(second.words(call), stream.words(call));
        for word in stream.words(call) {
            let u = f64::from(uniform(word));
            prop_assert!((0.0..1.0).contains(&u));
            prop_assert_eq!(u * 16_777_216.0, f64::from(word / 256));
        }
    }
}

//! MVUE: bit for bit against the definition, and mean and variance by integration over the
//! uniforms.

use proptest::prelude::*;
use rayon::prelude::*;
use sparse24_core::mvue::{self, Estimator, Kept24};
use sparse24_tests::oracle;

use super::input::{cases, group, moderate, subnormal, tied, uniform};

/// The spacing of uniforms and twice the rounding unit of f32.
const EPS: f64 = 1.0 / 16_777_216.0;

/// Mean and second moment over all uniforms.
#[derive(Default)]
struct Moments {
    mean: [f64; 4],
    square: f64,
}

impl Moments {
    fn add(&mut self, p: f64, kept: Kept24) {
        for (i, value) in kept.indices.into_iter().zip(kept.values) {
            self.mean[usize::from(i)] += p * f64::from(value);
            self.square += p * f64::from(value).powi(2);
        }
    }

    fn mean_is_within(&self, bound: f64, x: [f32; 4]) -> bool {
        self.mean.into_iter().zip(x).all(|(mean, x)| (mean - f64::from(x)).abs() <= bound)
    }

    fn variance(&self, a: [f64; 4]) -> f64 {
        self.square - a.iter().map(|a| a * a).sum::<f64>()
    }
}

fn share(length: u32) -> f64 {
    f64::from(length) / f64::from(oracle::UNIFORMS)
}

fn exact_moments(x: [f32; 4]) -> Moments {
    let mut moments = Moments::default();
    for (start, length) in oracle::runs(|n| mvue::exact(x, oracle::uniform(n)).indices) {
        moments.add(share(length), mvue::exact(x, oracle::uniform(start)));
    }
    moments
}

/// The pairs for the smallest and the largest second uniform identify the first draw.
fn approximate_moments(x: [f32; 4]) -> Moments {
    let kept =
        |first, second| mvue::approximate(x, [oracle::uniform(first), oracle::uniform(second)]);
    let mut moments = Moments::default();
    for (first, length) in
        oracle::runs(|n| (kept(n, 0).indices, kept(n, oracle::UNIFORMS - 1).indices))
    {
        for (second, second_length) in oracle::runs(|n| kept(first, n).indices) {
            moments.add(share(length) * share(second_length), kept(first, second));
        }
    }
    moments
}

/// Groups whose estimate stays finite: moderate, tied, subnormal, near overflow.
fn finite() -> impl Strategy<Value = [f32; 4]> {
    use prop::array::uniform4;
    let huge = (-1.0_f32..1.0).prop_map(|x| x * 1.6e38);
    prop_oneof![uniform4(moderate()), uniform4(tied()), uniform4(subnormal()), uniform4(huge)]
}

proptest! {
    #![proptest_config(cases(2000))]

    #[test]
    fn exact_equals_its_definition(x in group(), n in uniform()) {
        let kept = mvue::exact(x, oracle::uniform(n));
        if x.iter().all(|x| x.is_finite()) {
            let (indices, values) = oracle::mvue(x, oracle::uniform(n));
            prop_assert_eq!(kept.indices, indices);
            prop_assert_eq!(kept.values.map(f32::to_bits), values.map(f32::to_bits));
        } else {
            prop_assert_eq!(kept.indices, [0, 1]);
            prop_assert!(kept.values.iter().all(|x| x.is_nan()));
        }
    }

    #[test]
    fn both_keep_an_ascending_pair_of_the_right_signs(
        x in group(),
        n in uniform(),
        k in uniform(),
    ) {
        let (u, v) = (oracle::uniform(n), oracle::uniform(k));
        for kept in [mvue::exact(x, u), mvue::approximate(x, [u, v])] {
            let [first, second] = kept.indices;
            prop_assert!(first < second && second < 4);
            prop_assert_eq!(kept.pattern().indices(), kept.indices);
            let finite = x.iter().all(|x| x.is_finite());
            for (i, value) in kept.indices.into_iter().zip(kept.values) {
                let x = x[usize::from(i)];
                prop_assert_eq!(value.is_nan(), !finite);
                prop_assert!(!finite || value.is_sign_negative() == x.is_sign_negative());
                // A probability is at most 1, within ten roundings.
                prop_assert!(!finite || value.abs() >= x.abs() * (1.0 - 10.0 * f32::EPSILON));
            }
            if finite && x.iter().filter(|&&x| x != 0.0).count() <= 2 {
                let mut dense = [0.0; 4];
                for (i, value) in kept.indices.into_iter().zip(kept.values) {
                    dense[usize::from(i)] = value;
                }
                prop_assert_eq!(dense, x);
            }
        }
    }
}

proptest! {
    #![proptest_config(cases(500))]

    #[test]
    fn exact_is_unbiased_with_least_variance(x in finite()) {
        let a = x.map(|x| f64::from(x).abs());
        let s: f64 = a.iter().sum();
        let moments = exact_moments(x);
        // An element's probability times r is the length of its interval of t: the difference of
        // two running sums (a rounding of at most EPS*s), up to three ends off by the spacing of u
        // and the rounding of t' <= s (2*EPS*s each), and, in the last, what 2r and the whole sum
        // differ by (7*EPS*s): 14*EPS*s. Below the normal range each of these roundings is half of
        // 2^-149 instead, at most eight.
        let bound = 16.0 * EPS * s + 4.0 * f64::from(f32::from_bits(1));
        prop_assert!(moments.mean_is_within(bound, x), "the mean is {:?}", moments.mean);
        // The second moment is the sum of value times mean, and the values sum to at most s + 4r <=
        // 3s.
        let (variance, least) = (moments.variance(a), oracle::least_variance(a));
        prop_assert!((variance - least).abs() <= 4.0 * s * bound, "the variance is {variance}, \
                     the least {least}");
        // In f64 a dozen roundings of terms of at most s*s.
        let told = mvue::variance(x, Estimator::Exact);
        prop_assert!((told - least).abs() <= 16.0 * f64::EPSILON * s * s, "told is {told}, the \
                     least {least}");
    }

    #[test]
    fn no_probabilities_have_less_variance(
        a in prop::array::uniform4(0.01_f64..10.0),
        weights in prop::array::uniform4(0.01_f64..1.0),
    ) {
        // Any p in (0, 1] that sums to 2: weights, capped at 1 with the excess redistributed.
        let mut p = weights.map(|w| 2.0 * w / weights.iter().sum::<f64>());
        for _ in 0..4 {
            let free: f64 = p.iter().filter(|&&p| p < 1.0).sum();
            let full = p.iter().filter(|&&p| p >= 1.0).count() as f64;
            p = p.map(|p| if p >= 1.0 { 1.0 } else { p * (2.0 - full) / free });
        }
        let s: f64 = a.iter().sum();
        prop_assume!(p.iter().all(|&p| p <= 1.0 + 1e-12));
        prop_assert!(oracle::least_variance(a) <= oracle::variance(a, p) + 1e-9 * s * s);
        let x = a.map(|a| a as f32);
        let exact = exact_moments(x).variance(x.map(f64::from));
        prop_assert!(exact <= oracle::variance(a, p) + 1e-5 * s * s);
    }

    #[test]
    fn approximate_is_unbiased_and_no_better(
        x in prop::array::uniform4(-1000_i32..=1000),
        zero in prop::option::of(0_usize..4),
        scale in -60..60,
    ) {
        let mut x = x.map(|x| x as f32 * 2.0_f32.powi(scale));
        if let Some(zero) = zero {
            x[zero] = 0.0;
        }
        prop_assume!(x.iter().filter(|&&x| x != 0.0).count() >= 3);
        let a = x.map(|x| f64::from(x).abs());
        let s: f64 = a.iter().sum();
        let moments = approximate_moments(x);
        // Either draw has an interval whose ends are off by a running sum (3*EPS*s), t (EPS*s) and
        // the spacing of u (EPS*s): 10*EPS. A kept probability is one first draw and three products
        // of two, so within 50*EPS; a value is at most s, and off by ten roundings.
        let bound = 64.0 * EPS * s;
        prop_assert!(moments.mean_is_within(bound, x), "the mean is {:?}", moments.mean);
        let published = oracle::variance(a, oracle::approximate_probabilities(a));
        let (variance, exact) = (moments.variance(a), exact_moments(x).variance(a));
        // The second moment is the sum of value times mean, and the values sum to at most 4s.
        prop_assert!((variance - published).abs() <= 5.0 * s * bound, "the variance is \
                     {variance}, not {published}");
        // A reciprocal probability is at most s/a, so a term at most s*s; a hundred roundings.
        let told = mvue::variance(x, Estimator::Approximate);
        prop_assert!((told - published).abs() <= 100.0 * f64::EPSILON * s * s, "told is {told}, \
                     not {published}");
        prop_assert!(exact <= variance + 6.0 * s * bound, "exact {exact}, approximate {variance}");
        prop_assert!(oracle::least_variance(a) <= published * (1.0 + 1e-9));
    }
}

/// The integration over runs of uniforms, which the properties rest on.
#[test]
#[cfg_attr(debug_assertions, ignore = "67,108,864 uniforms take a release build")]
fn integration_equals_counting_every_uniform() {
    for x in
        [[1.0, -2.0, 3.0, 0.5], [1.0, 1.0, 1.0, 0.0], [9.0, 1e-3, 2.0, 1.0], [0.1, 0.7, 0.2, 0.3]]
    {
        let runs = oracle::runs(|n| mvue::exact(x, oracle::uniform(n)).indices);
        for (start, length) in runs {
            let outcome = mvue::exact(x, oracle::uniform(start));
            let differs = |n| mvue::exact(x, oracle::uniform(n)) != outcome;
            assert_eq!(
                (start..start + length).into_par_iter().find_any(|&n| differs(n)),
                None,
                "{x:?}"
            );
        }
    }
}

#[test]
fn all_small_integer_groups() {
    // Sums of integers are exact and r <= 14, so that an interval's two ends are off by the spacing
    // of u, r*2^-24, and the rounding of t' <= 2r, 2r*2^-24, alone. A value is at most 14, and the
    // second moment is the sum of value times mean.
    let bound = 2.0 * 3.0 * 14.0 * EPS;
    for n in 0..8_usize.pow(4) {
        let a = [n / 512, n / 64 % 8, n / 8 % 8, n % 8].map(|a| a as f64);
        let x = std::array::from_fn(|i| if i % 2 == 0 { a[i] as f32 } else { -a[i] as f32 });
        let moments = exact_moments(x);
        assert!(moments.mean_is_within(bound, x), "{x:?}: the mean is {:?}", moments.mean);
        let (variance, least) = (moments.variance(a), oracle::least_variance(a));
        let off = (variance - least).abs();
        assert!(off <= 4.0 * 14.0 * bound, "{x:?}: the variance is {variance}, not {least}");
    }
}

//! MVUE means and variances, computed by integration over the uniforms instead of sampling.

use rayon::prelude::*;
use sparse24_core::mvue;
use sparse24_tests::oracle;

#[test]
fn integration_equals_counting_every_uniform() {
    for x in
        [[1.0, -2.0, 3.0, 0.5], [1.0, 1.0, 1.0, 0.0], [9.0, 1e-3, 2.0, 1.0], [0.1, 0.7, 0.2, 0.3]]
    {
        let runs = oracle::runs(|n| mvue::exact(x, oracle::uniform(n)).indices);
        for (start, length) in runs {
            let outcome = mvue::exact(x, oracle::uniform(start));
            let stride = if cfg!(debug_assertions) { 61 } else { 1 };
            let differs = |n| mvue::exact(x, oracle::uniform(n)) != outcome;
            assert_eq!(
                (start..start + length).into_par_iter().step_by(stride).find_any(|&n| differs(n)),
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
    let bound = 2.0 * 3.0 * 14.0 * 2.0_f64.powi(-24);
    for n in 0..8_usize.pow(4) {
        let a = [n / 512, n / 64 % 8, n / 8 % 8, n % 8].map(|a| a as f64);
        let x: [f32; 4] =
            std::array::from_fn(|i| if i % 2 == 0 { a[i] as f32 } else { -a[i] as f32 });
        let (mut mean, mut square) = ([0.0; 4], 0.0);
        for (start, length) in oracle::runs(|n| mvue::exact(x, oracle::uniform(n)).indices) {
            let kept = mvue::exact(x, oracle::uniform(start));
            let p = f64::from(length) / f64::from(oracle::UNIFORMS);
            for (i, value) in kept.indices.into_iter().zip(kept.values) {
                mean[usize::from(i)] += p * f64::from(value);
                square += p * f64::from(value).powi(2);
            }
        }
        for i in 0..4 {
            assert!((mean[i] - f64::from(x[i])).abs() <= bound, "{x:?}: the mean is {mean:?}");
        }
        let variance = square - a.iter().map(|a| a * a).sum::<f64>();
        let least = oracle::least_variance(a);
        assert!(
            (variance - least).abs() <= 4.0 * 14.0 * bound,
            "{x:?}: the variance is {variance}, not {least}"
        );
    }
}

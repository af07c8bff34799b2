//! Exponentials and sigmoid against f64 over a dense sweep of floats.

use sparse24_cpu::math::{exp, exp2, sigmoid2};

/// Distance in units in the last place of the exact value.
fn ulps(found: f32, exact: f64) -> f64 {
    let nearest = exact as f32;
    let ulp = f64::from(f32::from_bits(nearest.to_bits() + 1)) - f64::from(nearest);
    (f64::from(found) - exact).abs() / ulp
}

fn sweep(low: f32, high: f32) -> impl Iterator<Item = f32> {
    const POINTS: u32 = 1_000_000;
    (0..=POINTS).map(move |i| low + (high - low) * (i as f32 / POINTS as f32))
}

#[test]
fn errors_are_within_their_ulps() {
    type Case = (&'static str, f64, fn(f32) -> f32, fn(f64) -> f64, [f32; 2]);
    let cases: [Case; 3] = [
        ("exp", 2.0, exp, f64::exp, [-86.9, 88.72]),
        ("exp2", 2.0, exp2, f64::exp2, [-126.0, 127.0]),
        ("sigmoid2", 4.0, sigmoid2, |x| 1.0 / (1.0 + (-x).exp2()), [-126.0, 126.0]),
    ];
    for (name, bound, function, exact, [low, high]) in cases {
        for x in sweep(low, high).chain(sweep(-1.0, 1.0)) {
            let error = ulps(function(x), exact(f64::from(x)));
            assert!(error <= bound, "{name}({x}): {error} ulps");
        }
    }
}

#[test]
fn results_at_the_ends_of_the_range() {
    assert_eq!([exp(0.0), exp(-0.0), exp2(0.0), exp2(-0.0)], [1.0; 4]);
    for x in [-126.1, -1e4, f32::MIN, f32::NEG_INFINITY] {
        assert_eq!([exp(x), exp2(x)], [0.0; 2], "{x}");
    }
    for x in [88.73, 1e4, f32::MAX, f32::INFINITY] {
        assert_eq!(exp(x), f32::INFINITY, "exp({x})");
    }
    assert_eq!(exp(-87.5), 0.0);
    for nan in [0x7fc0_0000, 0x7fc0_0001, 0x7fff_ffff, 0xffff_ffff].map(f32::from_bits) {
        assert!(exp(nan).is_nan() && exp2(nan).is_nan() && sigmoid2(nan).is_nan(), "{nan:?}");
    }
}

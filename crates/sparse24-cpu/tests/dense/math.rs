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
fn exp_is_within_two_ulps() {
    for x in sweep(-86.9, 88.72).chain(sweep(-1.0, 1.0)) {
        let error = ulps(exp(x), f64::from(x).exp());
        assert!(error <= 2.0, "exp({x}): {error} ulps");
    }
}

#[test]
fn exp2_is_within_two_ulps() {
    for x in sweep(-126.0, 127.0).chain(sweep(-1.0, 1.0)) {
        let error = ulps(exp2(x), f64::from(x).exp2());
        assert!(error <= 2.0, "exp2({x}): {error} ulps");
    }
}

#[test]
fn sigmoid_is_within_four_ulps() {
    for x in sweep(-126.0, 126.0).chain(sweep(-1.0, 1.0)) {
        let error = ulps(sigmoid2(x), 1.0 / (1.0 + (-f64::from(x)).exp2()));
        assert!(error <= 4.0, "sigmoid2({x}): {error} ulps");
    }
}

#[test]
fn the_ends_are_zero_and_infinity() {
    assert_eq!([exp(0.0), exp(-0.0), exp2(0.0), exp2(-0.0)], [1.0; 4]);
    for x in [-126.1, -1e4, f32::MIN, f32::NEG_INFINITY] {
        assert_eq!([exp(x), exp2(x)], [0.0; 2], "{x}");
    }
    for x in [88.73, 1e4, f32::MAX, f32::INFINITY] {
        assert_eq!(exp(x), f32::INFINITY, "exp({x})");
    }
    assert_eq!(exp(-87.5), 0.0);
    assert!(exp(f32::NAN).is_nan() && exp2(f32::NAN).is_nan() && sigmoid2(f32::NAN).is_nan());
}

//! The optimizer step against f64, with masks of every kind, and the norms.

use ndarray::Array2;
use sparse24_core::{
    Mask,
    op::{AdamW, MaskedDecay, StepState},
};
use sparse24_cpu::{
    Error,
    adamw::{adamw_step, l1_distance, squared_norm},
};

use crate::check::{U, any_threads, one_number, random};

const RULE: AdamW = AdamW { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, clip: 1.0 };
const WEIGHT_DECAY: f32 = 0.1;
const SCALE: f32 = 0.5;
const DECAYS: [MaskedDecay; 3] =
    [MaskedDecay::None, MaskedDecay::OnGradients(0.3), MaskedDecay::OnWeights(0.3)];

fn state() -> StepState {
    StepState { learning_rate: 0.01, bias_corrections: [0.19, 0.0975], ..StepState::default() }
}

fn mask(rows: usize, columns: usize) -> Mask {
    let tiles = (0..rows * columns / 16).map(|i| (i * 40_503 + 12_345) as u16).collect();
    Mask::from_tiles(rows, columns, tiles).unwrap()
}

/// The step on `[w, m, v]` with the constants above.
fn step(
    [w, m, v]: &mut [Array2<f32>; 3],
    g: &Array2<f32>,
    rule: &AdamW,
    decay: MaskedDecay,
    mask: Option<&Mask>,
) -> Result<(), Error> {
    let [w, m, v] = [w, m, v].map(|x| x.as_slice_mut().unwrap());
    let g = g.as_slice().unwrap();
    adamw_step(w, g, m, v, rule, &state(), WEIGHT_DECAY, SCALE, decay, mask)
}

#[test]
fn the_step_is_the_documented_update() {
    for [rows, columns] in [[4, 4], [12, 20], [256, 132]] {
        let mask = mask(rows, columns);
        let [w, g, m] = [1, 2, 3].map(|seed| random([rows, columns], seed, 1.0));
        let v = random([rows, columns], 4, 1.0).mapv(f32::abs);
        for decay in DECAYS {
            let after = any_threads(|| {
                let mut outputs = [w.clone(), m.clone(), v.clone()];
                step(&mut outputs, &g, &RULE, decay, Some(&mask)).unwrap();
                outputs
            });
            let [scale, beta1, beta2, epsilon, lr, wd] =
                [SCALE, RULE.beta1, RULE.beta2, RULE.epsilon, state().learning_rate, WEIGHT_DECAY]
                    .map(f64::from);
            let [c1, c2] = state().bias_corrections.map(f64::from);
            for ((row, column), &w0) in w.indexed_iter() {
                let at = (row, column);
                let pruned = if mask.keeps(row, column) { 0.0 } else { f64::from(0.3f32) };
                let (on_gradient, on_weight) = match decay {
                    MaskedDecay::OnGradients(_) => (pruned, 0.0),
                    MaskedDecay::OnWeights(_) => (0.0, pruned),
                    MaskedDecay::None => (0.0, 0.0),
                };
                let [w0, g, m, v] = [w0, g[at], m[at], v[at]].map(f64::from);
                let g = g * scale + on_gradient * w0;
                let m1 = beta1 * m + (1.0 - beta1) * g;
                let v1 = beta2 * v + (1.0 - beta2) * g * g;
                let step = m1 / c1 / ((v1 / c2).sqrt() + epsilon);
                let w1 = w0 - lr * (step + (wd + on_weight) * w0);
                // m and v are sums of two terms below 1 after at most four roundings each. The step
                // divides by sqrt(v/c2), whose relative error is half that of v and five roundings
                // more.
                let error = 6.0 * U;
                let step_error =
                    error / c1 / (v1 / c2).sqrt() + step.abs() * (error / v1 / 2.0 + 8.0 * U);
                let w_error = lr * (step_error + 4.0 * U * (step.abs() + 1.0)) + U;
                for ((found, expected), bound) in
                    after.iter().zip([w1, m1, v1]).zip([w_error, error, error])
                {
                    let difference = (f64::from(found[at]) - expected).abs();
                    assert!(
                        difference <= bound,
                        "{at:?}, {decay:?}: found {}, expected {expected}, bound {bound}",
                        found[at]
                    );
                }
            }
        }
    }
}

#[test]
fn any_length_without_a_mask() {
    for length in [0, 1, 5, 40_001] {
        let [w, g] = [1, 2].map(|seed| random([1, length], seed, 1.0));
        let mut after = [w.clone(), Array2::zeros([1, length]), Array2::zeros([1, length])];
        step(&mut after, &g, &RULE, MaskedDecay::OnGradients(0.3), None).unwrap();
        assert!(after[0].iter().zip(&w).all(|(a, b)| a.is_finite() && a != b));
    }
}

/// With beta2 = 1, v keeps its bits whatever the gradient and the mask, and the step divides by it.
#[test]
fn a_frozen_second_moment_keeps_its_bits() {
    let shape @ [rows, columns] = [256, 132];
    let mask = mask(rows, columns);
    let mut g = random(shape, 1, 1.0);
    let mut v = random(shape, 2, 1.0).mapv(f32::abs);
    for (at, extreme) in
        [f32::MAX, -f32::MAX, 1e30, -0.0, f32::MIN_POSITIVE / 8.0].into_iter().enumerate()
    {
        (g[[0, at]], v[[1, at]]) =
            (extreme, [0.0, f32::MIN_POSITIVE / 4.0, f32::MAX, 1.0, 0.0][at]);
    }
    for decay in DECAYS {
        let [w, _, after] = any_threads(|| {
            let mut outputs = [random(shape, 3, 1.0), random(shape, 4, 1.0), v.clone()];
            step(&mut outputs, &g, &AdamW { beta2: 1.0, ..RULE }, decay, Some(&mask)).unwrap();
            outputs
        });
        assert_eq!(after.mapv(f32::to_bits), v.mapv(f32::to_bits));
        assert_ne!(w, random(shape, 3, 1.0));
    }
}

#[test]
fn shape_errors_name_the_operand() {
    let mut state = [(); 3].map(|()| Array2::zeros([6, 8]));
    for (g, rows, operand, expected, found) in
        [([1, 47], 4, "g", [1, 48], [1, 47]), ([6, 8], 4, "mask", [1, 48], [1, 32])]
    {
        let (mask, g) = (mask(rows, 8), Array2::zeros(g));
        let error = step(&mut state, &g, &RULE, MaskedDecay::None, Some(&mask)).unwrap_err();
        assert_eq!(error, Error::Shape { operation: "adamw_step", operand, expected, found });
    }
    let error = l1_distance(&[0.0; 3], &[0.0; 2]).unwrap_err();
    assert!(matches!(error, Error::Shape { expected: [1, 3], found: [1, 2], .. }), "{error}");
}

#[test]
fn norms_and_distances() {
    for length in [0, 1, 15, 17, 16_385, 100_000] {
        let [a, b] = [1, 2].map(|seed| random([1, length], seed, 100.0).mapv(f32::round));
        let (a, b) = (a.as_slice().unwrap(), b.as_slice().unwrap());
        // Sums of small integers are exact in any order.
        let squares: f64 = a.iter().map(|&a| f64::from(a) * f64::from(a)).sum();
        let distance: f64 = a.iter().zip(b).map(|(a, b)| f64::from((a - b).abs())).sum();
        assert_eq!((squared_norm(a), l1_distance(a, b)), (squares, Ok(distance)));
        let [a, b] = [3, 4].map(|seed| random([1, length], seed, 1.0));
        let (a, b) = (a.as_slice().unwrap(), b.as_slice().unwrap());
        any_threads(|| [squared_norm(a), l1_distance(a, b).unwrap()].map(one_number));
    }
    assert!(squared_norm(&[1.0, f32::NAN]).is_nan());
    assert_eq!(squared_norm(&[f32::MAX]), f64::from(f32::MAX) * f64::from(f32::MAX));
}

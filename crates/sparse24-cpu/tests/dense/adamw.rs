//! The optimizer against f64 with masks of every kind, and the norm.

use ndarray::Array2;
use sparse24_core::Mask;
use sparse24_cpu::adamw::{AdamW, Decay, adamw_step, l1_distance, squared_norm};

use crate::check::{U, any_threads, random};

const RULE: AdamW = AdamW {
    learning_rate: 0.01,
    beta1: 0.9,
    beta2: 0.95,
    epsilon: 1e-8,
    weight_decay: 0.1,
    bias_correction1: 0.19,
    bias_correction2: 0.0975,
    gradient_scale: 0.5,
};

fn mask(rows: usize, columns: usize) -> Mask {
    let tiles = (0..rows * columns / 16).map(|i| (i * 40_503 + 12_345) as u16).collect();
    Mask::from_tiles(rows, columns, tiles).unwrap()
}

#[test]
fn every_decay_is_the_documented_update() {
    for [rows, columns] in [[4, 4], [12, 20], [256, 132]] {
        let mask = mask(rows, columns);
        let [w, g, m] = [1, 2, 3].map(|seed| random([rows, columns], seed, 1.0));
        let v = random([rows, columns], 4, 1.0).mapv(f32::abs);
        for decay in [
            Decay::None,
            Decay::OnGradients { lambda: 0.3, mask: &mask },
            Decay::OnWeights { lambda: 0.3, mask: &mask },
        ] {
            let [w_after, m_after, v_after] = any_threads(|| {
                let mut outputs = [w.clone(), m.clone(), v.clone()];
                let [w, m, v] = outputs.each_mut().map(|x| x.as_slice_mut().unwrap());
                adamw_step(w, g.as_slice().unwrap(), m, v, columns, &RULE, decay).unwrap();
                outputs
            });
            let r = RULE;
            let [scale, beta1, beta2, lr, wd] =
                [r.gradient_scale, r.beta1, r.beta2, r.learning_rate, r.weight_decay]
                    .map(f64::from);
            let [c1, c2, epsilon] =
                [r.bias_correction1, r.bias_correction2, r.epsilon].map(f64::from);
            for ((row, column), &w0) in w.indexed_iter() {
                let at = (row, column);
                let pruned = if mask.keeps(row, column) { 0.0 } else { f64::from(0.3f32) };
                let (on_gradient, on_weight) = match decay {
                    Decay::OnGradients { .. } => (pruned, 0.0),
                    Decay::OnWeights { .. } => (0.0, pruned),
                    Decay::None => (0.0, 0.0),
                };
                let [w0, g, m, v] = [w0, g[at], m[at], v[at]].map(f64::from);
                let g = g * scale + on_gradient * w0;
                let m1 = beta1 * m + (1.0 - beta1) * g;
                let v1 = beta2 * v + (1.0 - beta2) * g * g;
                let step = m1 / c1 / ((v1 / c2).sqrt() + epsilon);
                let expected = w0 - lr * (step + (wd + on_weight) * w0);
                // m and v are sums of two terms below 1 after at most four roundings each. The step
                // divides by sqrt(v/c2), whose relative error is half that of v and five roundings
                // more.
                let (m_error, v_error) = (6.0 * U, 6.0 * U);
                let step_error =
                    m_error / c1 / (v1 / c2).sqrt() + step.abs() * (v_error / v1 / 2.0 + 8.0 * U);
                for (what, found, expected, bound) in [
                    ("m", m_after[at], m1, m_error),
                    ("v", v_after[at], v1, v_error),
                    (
                        "w",
                        w_after[at],
                        expected,
                        lr * (step_error + 4.0 * U * (step.abs() + 1.0)) + U,
                    ),
                ] {
                    let difference = (f64::from(found) - expected).abs();
                    assert!(
                        difference <= bound,
                        "{what} at {at:?}, {decay:?}: {found} and {expected}, {} times the bound",
                        difference / bound
                    );
                }
            }
        }
    }
}

#[test]
fn ragged_and_empty_parameters_without_a_mask() {
    for length in [0, 1, 5, 40_001] {
        let [w, g] = [1, 2].map(|seed| random([1, length], seed, 1.0).into_raw_vec_and_offset().0);
        let (mut after, mut m, mut v) = (w.clone(), vec![0.0; length], vec![0.0; length]);
        adamw_step(&mut after, &g, &mut m, &mut v, length, &RULE, Decay::None).unwrap();
        assert!(after.iter().zip(&w).all(|(a, b)| a.is_finite() && a != b));
    }
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let mask = mask(4, 8);
    let (mut w, mut m, mut v) = (vec![0.0; 48], vec![0.0; 48], vec![0.0; 48]);
    let error = adamw_step(&mut w, &[0.0; 47], &mut m, &mut v, 8, &RULE, Decay::None).unwrap_err();
    assert_eq!(error.to_string(), "adamw_step: g should be [1, 48], found [1, 47]");
    let error = adamw_step(
        &mut w,
        &[0.0; 48],
        &mut m,
        &mut v,
        8,
        &RULE,
        Decay::OnGradients { lambda: 1.0, mask: &mask },
    )
    .unwrap_err();
    assert_eq!(error.to_string(), "adamw_step: mask should be [6, 8], found [4, 8]");
}

#[test]
fn the_norm_is_exact_for_small_integers_and_one_on_any_number_of_threads() {
    for length in [0, 1, 17, 16_385, 100_000] {
        let g = random([1, length], 3, 100.0).mapv(f32::round);
        let expected: f64 = g.iter().map(|&g| f64::from(g) * f64::from(g)).sum();
        assert_eq!(squared_norm(g.as_slice().unwrap()), expected);
        let g = random([1, length], 4, 1.0);
        any_threads(|| {
            let bits = squared_norm(g.as_slice().unwrap()).to_bits();
            [Array2::from_shape_vec(
                [1, 2],
                [bits as u32, (bits >> 32) as u32].map(f32::from_bits).to_vec(),
            )
            .unwrap()]
        });
    }
    assert!(squared_norm(&[1.0, f32::NAN]).is_nan());
    assert_eq!(squared_norm(&[f32::MAX]), f64::from(f32::MAX) * f64::from(f32::MAX));
}

/// beta2 = 1: v keeps its bits, whatever the gradient and the mask; the step divides by it.
#[test]
fn a_frozen_variance_keeps_its_bits() {
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
    let frozen = AdamW { beta2: 1.0, ..RULE };
    for decay in [
        Decay::None,
        Decay::OnGradients { lambda: 0.3, mask: &mask },
        Decay::OnWeights { lambda: 0.3, mask: &mask },
    ] {
        let [after, moved] = any_threads(|| {
            let mut outputs = [random(shape, 3, 1.0), random(shape, 4, 1.0), v.clone()];
            let [w, m, v] = outputs.each_mut().map(|x| x.as_slice_mut().unwrap());
            adamw_step(w, g.as_slice().unwrap(), m, v, columns, &frozen, decay).unwrap();
            let [w, _, v] = outputs;
            [v, w]
        });
        assert_eq!(after.mapv(f32::to_bits), v.mapv(f32::to_bits));
        assert_ne!(moved, random(shape, 3, 1.0));
    }
}

#[test]
fn the_distance_is_a_sum_of_exact_differences() {
    for length in [0, 1, 15, 16, 16_384, 40_003] {
        let (a, b) = (random([1, length], 1, 1.0), random([1, length], 2, 1e-3));
        let expected: f64 =
            a.iter().zip(&b).map(|(&a, &b)| (f64::from(a) - f64::from(b)).abs()).sum();
        let found = l1_distance(a.as_slice().unwrap(), b.as_slice().unwrap()).unwrap();
        // Additions in another order, each within 2^-53 of a partial sum.
        assert!((found - expected).abs() <= length as f64 * f64::EPSILON * expected, "{length}");
        any_threads(|| {
            let bits = l1_distance(a.as_slice().unwrap(), b.as_slice().unwrap()).unwrap().to_bits();
            [Array2::from_shape_vec(
                [1, 2],
                [bits as u32, (bits >> 32) as u32].map(f32::from_bits).to_vec(),
            )
            .unwrap()]
        });
    }
    assert_eq!(
        l1_distance(&[0.0; 3], &[0.0; 2]).unwrap_err().to_string(),
        "l1 distance: b should be [1, 3], found [1, 2]"
    );
}

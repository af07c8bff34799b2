//! Properties that hold for every shape: a row or sequence does not depend on the others, and
//! gradients are linear.

use ndarray::{Array2, s};
use proptest::prelude::*;
use sparse24_core::op::{Activation, AttentionMask, AttentionShape};
use sparse24_cpu::{
    activation::{activation_backward, activation_forward},
    attention::attention_forward,
    loss::{head_loss, loss_forward},
    norm::norm_forward,
};

use crate::check::{poison, random, tokens};

fn bits(x: &Array2<f32>) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// One row as a matrix.
fn alone(x: &Array2<f32>, row: usize) -> Array2<f32> {
    x.slice(s![row..row + 1, ..]).to_owned()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn activations(p in 1..20_usize, f in 1..70_usize, row in 0..20_usize, seed: u64) {
        let row = row % p;
        for activation in Activation::ALL {
            let width = f * activation.columns_in();
            let (z, dh) = (random([p, width], seed, 6.0), random([p, f], !seed, 2.0));
            let (mut h, mut of_row) = (poison([p, f]), poison([1, f]));
            activation_forward(activation, z.view(), h.view_mut()).unwrap();
            activation_forward(activation, alone(&z, row).view(), of_row.view_mut()).unwrap();
            prop_assert_eq!(bits(&alone(&h, row)), bits(&of_row));
            let (mut dz, mut doubled) = (poison([p, width]), poison([p, width]));
            activation_backward(activation, dh.view(), z.view(), dz.view_mut()).unwrap();
            let dh = &dh * 2.0;
            activation_backward(activation, dh.view(), z.view(), doubled.view_mut()).unwrap();
            prop_assert_eq!(bits(&(dz * 2.0)), bits(&doubled));
        }
    }

    #[test]
    fn norms(p in 1..20_usize, c in 2..130_usize, row in 0..20_usize, seed: u64) {
        let row = row % p;
        let (x, gamma) = (random([p, c], seed, 3.0), random([1, c], !seed, 1.0));
        let run = |x: &Array2<f32>| {
            let p = x.nrows();
            let mut outputs = [poison([p, c]), poison([p, c]), poison([p, 2])];
            let [residual, y, stats] = outputs.each_mut().map(|x| x.view_mut());
            norm_forward(x.view(), None, gamma.row(0), None, residual, y, stats).unwrap();
            outputs
        };
        let (all, one) = (run(&x), run(&alone(&x, row)));
        prop_assert_eq!(bits(&all[0]), bits(&x), "without a delta the residual is x");
        for (all, one) in all.iter().zip(&one) {
            prop_assert_eq!(bits(&alone(all, row)), bits(one));
        }
    }

    #[test]
    fn attention(
        batch in 1..4_usize, heads in 1..4_usize, tokens in 1..40_usize, length in 0..40_usize,
        seed: u64,
    ) {
        let (d, length) = (8 * heads, length % (tokens + 1));
        let [q, k, v] = [0, 1, 2].map(|of| random([batch * tokens, d], seed ^ of, 1.0));
        let shape = |batch, tokens| {
            AttentionShape { batch, heads, queries: tokens, keys: tokens, mask: AttentionMask::Causal }
        };
        let run = |batch: usize, first: usize| {
            let rows = first * tokens..(first + batch) * tokens;
            let (mut o, mut lse) = (poison([batch * tokens, d]), poison([batch * heads, tokens]));
            let [q, k, v] = [&q, &k, &v].map(|x| x.slice(s![rows.clone(), ..]));
            let shape = shape(batch, tokens);
            attention_forward(shape, q, k, v, None, o.view_mut(), lse.view_mut(), None).unwrap();
            o
        };
        let last = run(1, batch - 1);
        let of_all = run(batch, 0).slice(s![(batch - 1) * tokens.., ..]).to_owned();
        prop_assert_eq!(bits(&of_all), bits(&last));
        // The first query sees only its own key.
        prop_assert_eq!(bits(&alone(&last, 0)), bits(&alone(&v, (batch - 1) * tokens)));

        // Keys beyond the length are never read, and full lengths change nothing.
        let run = |lengths: &[u32], k: &Array2<f32>, v: &Array2<f32>| {
            let (mut o, mut lse) = (poison([batch * tokens, d]), poison([batch * heads, tokens]));
            let (shape, [q, k, v]) = (shape(batch, tokens), [&q, k, v].map(|x| x.view()));
            let (o_view, lse_view) = (o.view_mut(), lse.view_mut());
            attention_forward(shape, q, k, v, Some(lengths), o_view, lse_view, None).unwrap();
            o
        };
        prop_assert_eq!(
            bits(&run(&vec![tokens as u32; batch], &k, &v).slice(s![(batch - 1) * tokens.., ..]).to_owned()),
            bits(&last)
        );
        let mut lengths = vec![tokens as u32; batch];
        lengths[batch - 1] = length as u32;
        let clean = run(&lengths, &k, &v);
        let (mut k, mut v) = (k, v);
        for x in [&mut k, &mut v] {
            x.slice_mut(s![(batch - 1) * tokens + length.., ..]).fill(f32::NAN);
        }
        prop_assert_eq!(bits(&run(&lengths, &k, &v)), bits(&clean));
    }

    #[test]
    fn losses(p in 1..30_usize, vocabulary in 1..70_u32, seed: u64) {
        let logits = random([p, vocabulary as usize], seed, 5.0);
        let targets = tokens(p, !seed, vocabulary);
        let sum = |logits: &Array2<f32>, targets: &[u32]| {
            loss_forward(logits.view(), targets, None, 0.0).unwrap().sum
        };
        let all = sum(&logits, &targets);
        let each: f64 =
            (0..p).map(|row| sum(&alone(&logits, row), &targets[row..row + 1])).sum();
        // Sums of at most 30 terms in f64, in any order.
        prop_assert!((all - each).abs() <= 64.0 * f64::EPSILON * each.abs(), "{all} and {each}");
        let mut gradient = logits.clone();
        head_loss(gradient.view_mut(), &targets, None, 0.0, 1.0).unwrap();
        for (row, &target) in gradient.rows().into_iter().zip(&targets) {
            let sign = |token| if token == target as usize { -1.0 } else { 1.0 };
            prop_assert!(row.iter().enumerate().all(|(token, &g)| g * sign(token) >= 0.0), "{row}");
        }
    }
}

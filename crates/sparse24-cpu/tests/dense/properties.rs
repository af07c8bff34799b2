//! Properties of the dense kernels that hold for every shape: exact on small integers, no row sees
//! another, gradients are linear.

use ndarray::{Array1, Array2, ArrayView2, ArrayViewMut2, Axis, s};
use proptest::prelude::*;
use sparse24_core::philox::{Purpose, Site, Stream};
use sparse24_cpu::{
    Error,
    activation::{
        geglu_backward, geglu_forward, gelu_backward, gelu_forward, swiglu_backward, swiglu_forward,
    },
    adamw::{AdamW, Decay, adamw_step},
    attention::{AttentionMask, AttentionShape, attention_forward},
    bias::{bias_forward, bias_grad},
    dropout::{Dropout, dropout},
    embedding::{embed_backward, embed_forward},
    gemm::{Beta, matmul},
    loss::{head_loss, loss_forward},
    norm::norm_forward,
    rounding::round_bf16,
};

use crate::check::{poison, random, tokens};

type Forward = fn(ArrayView2<'_, f32>, ArrayViewMut2<'_, f32>) -> Result<(), Error>;
type Backward =
    fn(ArrayView2<'_, f32>, ArrayView2<'_, f32>, ArrayViewMut2<'_, f32>) -> Result<(), Error>;

/// Integers in -4..=4: their sums are exact in any order.
fn integers(shape: [usize; 2], seed: u64) -> Array2<f32> {
    random(shape, seed, 4.0).mapv(f32::round)
}

fn bits(x: &Array2<f32>) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// A row of many, alone.
fn alone(x: &Array2<f32>, row: usize) -> Array2<f32> {
    x.slice(s![row..row + 1, ..]).to_owned()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn products_of_integers_are_exact(m in 0..40_usize, n in 0..40_usize, k in 0..70_usize, seed: u64) {
        let (a, b, before) = (integers([m, k], seed), integers([k, n], !seed), integers([m, n], seed ^ 1));
        let expected = Array2::from_shape_fn((m, n), |(i, j)| (0..k).map(|at| a[[i, at]] * b[[at, j]]).sum());
        let mut c = poison([m, n]);
        matmul(a.view(), b.view(), c.view_mut(), Beta::Overwrite).unwrap();
        prop_assert_eq!(&c, &expected);
        c.assign(&before);
        matmul(a.view(), b.view(), c.view_mut(), Beta::Accumulate).unwrap();
        prop_assert_eq!(c, expected + before);
    }

    #[test]
    fn column_sums_of_integers_are_exact(p in 0..300_usize, r in 0..40_usize, seed: u64) {
        let (dz, bias) = (integers([p, r], seed), integers([1, r], !seed));
        let mut db = poison([1, r]);
        bias_grad(dz.view(), db.row_mut(0), Beta::Overwrite).unwrap();
        prop_assert_eq!(db.row(0).to_owned(), dz.sum_axis(Axis(0)));
        let mut z = dz.clone();
        bias_forward(z.view_mut(), bias.row(0)).unwrap();
        prop_assert_eq!(z, dz + bias);
    }

    #[test]
    fn activations_are_elementwise_and_their_gradients_linear(p in 1..20_usize, f in 1..70_usize, row in 0..20_usize, seed: u64) {
        let row = row % p;
        let (z, dh) = (random([p, 2 * f], seed, 6.0), random([p, f], !seed, 2.0));
        let gated: [(Forward, Backward); 2] = [(geglu_forward, geglu_backward), (swiglu_forward, swiglu_backward)];
        for (forward, backward) in gated {
            let (mut h, mut of_row) = (poison([p, f]), poison([1, f]));
            forward(z.view(), h.view_mut()).unwrap();
            forward(alone(&z, row).view(), of_row.view_mut()).unwrap();
            prop_assert_eq!(bits(&alone(&h, row)), bits(&of_row));
            let (mut dz, mut doubled) = (poison([p, 2 * f]), poison([p, 2 * f]));
            backward(dh.view(), z.view(), dz.view_mut()).unwrap();
            backward((&dh * 2.0).view(), z.view(), doubled.view_mut()).unwrap();
            prop_assert_eq!(bits(&(dz * 2.0)), bits(&doubled));
        }
        let z = z.slice(s![.., ..f]).to_owned();
        let (mut h, mut of_row, mut dz, mut doubled) = (poison([p, f]), poison([1, f]), poison([p, f]), poison([p, f]));
        gelu_forward(z.view(), h.view_mut()).unwrap();
        gelu_forward(alone(&z, row).view(), of_row.view_mut()).unwrap();
        prop_assert_eq!(bits(&alone(&h, row)), bits(&of_row));
        gelu_backward(dh.view(), z.view(), dz.view_mut()).unwrap();
        gelu_backward((&dh * 2.0).view(), z.view(), doubled.view_mut()).unwrap();
        prop_assert_eq!(bits(&(dz * 2.0)), bits(&doubled));
    }

    #[test]
    fn a_norm_sees_one_row(p in 1..20_usize, c in 2..130_usize, row in 0..20_usize, seed: u64) {
        let row = row % p;
        let x = random([p, c], seed, 3.0);
        let (gamma, run) = (random([1, c], !seed, 1.0), |x: &Array2<f32>, gamma: &Array2<f32>| {
            let (mut residual, mut y, mut stats) = (poison([x.nrows(), c]), poison([x.nrows(), c]), poison([x.nrows(), 2]));
            norm_forward(x.view(), None, gamma.row(0), None, residual.view_mut(), y.view_mut(), stats.view_mut()).unwrap();
            [residual, y, stats]
        });
        let (all, one) = (run(&x, &gamma), run(&alone(&x, row), &gamma));
        prop_assert_eq!(bits(&all[0]), bits(&x), "without a delta the residual is x");
        for (all, one) in all.iter().zip(&one) {
            prop_assert_eq!(bits(&alone(all, row)), bits(one));
        }
    }

    #[test]
    fn attention_sees_one_sequence(batch in 1..4_usize, heads in 1..4_usize, tokens in 1..40_usize, seed: u64) {
        let d = 8 * heads;
        let [q, k, v] = [0, 1, 2].map(|of| random([batch * tokens, d], seed ^ of, 1.0));
        let run = |batch: usize, first: usize| {
            let shape = AttentionShape { batch, heads, queries: tokens, keys: tokens, mask: AttentionMask::Causal };
            let rows = first * tokens..(first + batch) * tokens;
            let (mut o, mut lse) = (poison([batch * tokens, d]), poison([batch * heads, tokens]));
            let [q, k, v] = [&q, &k, &v].map(|x| x.slice(s![rows.clone(), ..]));
            attention_forward(shape, q, k, v, o.view_mut(), lse.view_mut(), None).unwrap();
            o
        };
        let last = run(1, batch - 1);
        prop_assert_eq!(bits(&run(batch, 0).slice(s![(batch - 1) * tokens.., ..]).to_owned()), bits(&last));
        // The first query sees its own key alone.
        prop_assert_eq!(bits(&alone(&last, 0)), bits(&alone(&v, (batch - 1) * tokens)));
    }

    #[test]
    fn the_loss_counts_each_row_once(p in 1..30_usize, vocabulary in 1..70_u32, seed: u64) {
        let (logits, targets) = (random([p, vocabulary as usize], seed, 5.0), tokens(p, !seed, vocabulary));
        let all = loss_forward(logits.view(), &targets, None, 0.0).unwrap();
        let each: f64 = (0..p).map(|row| loss_forward(alone(&logits, row).view(), &targets[row..row + 1], None, 0.0).unwrap().sum).sum();
        // Sums of at most 30 terms in f64, whatever their order.
        prop_assert!((all.sum - each).abs() <= 64.0 * f64::EPSILON * each.abs(), "{} against {each}", all.sum);
        let mut gradient = logits.clone();
        prop_assert_eq!(head_loss(gradient.view_mut(), &targets, None, 0.0, 1.0).unwrap().sum.to_bits(), all.sum.to_bits());
        for (row, &target) in gradient.rows().into_iter().zip(&targets) {
            prop_assert!(row.iter().enumerate().all(|(token, &g)| if token == target as usize { g <= 0.0 } else { g >= 0.0 }), "{row}");
        }
    }

    #[test]
    fn an_embedding_and_its_gradient_count_tokens(sequences in 1..5_usize, context in 1..20_usize, vocabulary in 1..30_u32, seed: u64) {
        let (p, c) = (sequences * context, 12);
        let ids = tokens(p, seed, vocabulary);
        let (wte, wpe) = (integers([vocabulary as usize, c], seed), integers([context, c], !seed));
        let mut out = poison([p, c]);
        embed_forward(&ids, context, wte.view(), Some(wpe.view()), out.view_mut()).unwrap();
        let expected = Array2::from_shape_fn((p, c), |(row, at)| wte[[ids[row] as usize, at]] + wpe[[row % context, at]]);
        prop_assert_eq!(&out, &expected);
        let (mut dwte, mut dwpe) = (poison([vocabulary as usize, c]), poison([context, c]));
        embed_backward(Array2::ones((p, c)).view(), &ids, context, dwte.view_mut(), Some(dwpe.view_mut()), Beta::Overwrite).unwrap();
        for (token, row) in dwte.rows().into_iter().enumerate() {
            let count = ids.iter().filter(|&&id| id as usize == token).count() as f32;
            prop_assert!(row.iter().all(|&g| g == count), "token {token}: {row}, not {count}");
        }
        prop_assert!(dwpe.iter().all(|&g| g == sequences as f32));
    }

    #[test]
    fn dropout_keeps_or_zeroes_and_repeats(rows in 1..30_usize, columns in 1..50_usize, p in 0.0_f32..0.99, seed: u64) {
        let rule = Dropout { p, stream: Stream::new(seed, Site::new(Purpose::Dropout, 3), 1, 2) };
        let x = random([rows, columns], seed, 2.0).mapv(|x| x + 3.0);
        let (mut once, mut again) = (x.clone(), x.clone());
        dropout(once.view_mut(), &rule).unwrap();
        dropout(again.view_mut(), &rule).unwrap();
        prop_assert_eq!(bits(&once), bits(&again));
        prop_assert!(once.iter().zip(&x).all(|(&y, &x)| y == 0.0 || y == x * (1.0 / (1.0 - p))));
    }

    #[test]
    fn bf16_is_the_nearest(raw in prop::collection::vec(any::<u32>(), 1..200)) {
        let x = Array2::from_shape_vec((1, raw.len()), raw.iter().map(|&raw| f32::from_bits(raw)).collect()).unwrap();
        let mut out = poison([1, raw.len()]);
        round_bf16(x.view(), out.view_mut()).unwrap();
        for (&x, &y) in x.iter().zip(&out) {
            let expected = half::bf16::from_f32(x).to_f32();
            prop_assert!(y.to_bits() == expected.to_bits() || y.is_nan() && expected.is_nan(), "{x:e} became {y:e}");
        }
    }

    #[test]
    fn adam_without_gradients_leaves_weights(length in 0..300_usize, seed: u64) {
        let w = Array1::from_iter(random([1, length], seed, 1.0));
        let (mut stepped, g, mut m, mut v) = (w.to_vec(), vec![0.0; length], vec![0.0; length], vec![0.0; length]);
        let rule = AdamW {
            learning_rate: 0.1,
            beta1: 0.9,
            beta2: 0.99,
            epsilon: 1e-8,
            weight_decay: 0.0,
            bias_correction1: 0.1,
            bias_correction2: 0.01,
            gradient_scale: 1.0,
        };
        adamw_step(&mut stepped, &g, &mut m, &mut v, length, &rule, Decay::None).unwrap();
        prop_assert_eq!(&stepped, &w.to_vec());
        prop_assert!(m.iter().chain(&v).all(|&moment| moment == 0.0));
    }
}

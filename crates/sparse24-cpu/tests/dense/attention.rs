//! Attention against naive loops in f64, and its gradient against central differences.

use ndarray::{Array2, Axis, concatenate, s};
use sparse24_core::{
    op::{
        AttentionMask::{self, Causal, Full},
        AttentionShape, Dropout,
    },
    philox::{Purpose, Site, Stream},
};
use sparse24_cpu::{
    Error,
    attention::{attention_backward, attention_forward},
};

use crate::check::{NUMERIC, U, any_threads, assert_close, numeric_gradient, poison, random, wide};

fn shape(
    batch: usize,
    heads: usize,
    queries: usize,
    keys: usize,
    mask: AttentionMask,
) -> AttentionShape {
    AttentionShape { batch, heads, queries, keys, mask }
}

/// The factor of an element of P under dropout with the stream [`STREAM`].
fn factor(dropout: Option<&Dropout>, element: usize) -> f64 {
    match dropout {
        None => 1.0,
        Some(rule) if STREAM.uniforms((element / 4) as u32)[element % 4] >= rule.p => {
            f64::from(1.0 / (1.0 - rule.p))
        }
        Some(_) => 0.0,
    }
}

/// O and the log-sum-exps.
fn naive(
    shape: AttentionShape,
    [q, k, v]: [&Array2<f64>; 3],
    lengths: Option<&[u32]>,
    dropout: Option<&Dropout>,
) -> [Array2<f64>; 2] {
    let width = q.ncols() / shape.heads;
    let mut o = Array2::zeros(q.dim());
    let mut lse = Array2::zeros([shape.batch * shape.heads, shape.queries]);
    for (task, head) in
        (0..shape.batch * shape.heads).map(|task| (task, task % shape.heads * width))
    {
        let batch = task / shape.heads;
        let length = lengths.map_or(shape.keys, |lengths| lengths[batch] as usize);
        let sees = |query: usize, key: usize| {
            key < length && (shape.mask == Full || key + shape.queries <= query + shape.keys)
        };
        for query in 0..shape.queries {
            let row = batch * shape.queries + query;
            let score = |key: usize| {
                let dot: f64 = (0..width)
                    .map(|i| q[[row, head + i]] * k[[batch * shape.keys + key, head + i]])
                    .sum();
                if sees(query, key) { dot / (width as f64).sqrt() } else { f64::NEG_INFINITY }
            };
            let sum: f64 = (0..shape.keys).map(|key| score(key).exp()).sum();
            lse[[task, query]] = sum.ln();
            for key in (0..shape.keys).filter(|&key| sees(query, key)) {
                let probability = score(key).exp() / sum
                    * factor(dropout, (task * shape.queries + query) * shape.keys + key);
                for i in 0..width {
                    o[[row, head + i]] += probability * v[[batch * shape.keys + key, head + i]];
                }
            }
        }
    }
    [o, lse]
}

const SITE: Site = Site::new(Purpose::Dropout, 3);
const STREAM: Stream = Stream::new(5, SITE, 1, 2);

/// Combinations of lengths and dropout. Lengths are 0, 7, 14, ... up to the number of keys.
fn options(shape: AttentionShape) -> [(Option<Vec<u32>>, Option<Dropout>); 3] {
    let lengths = (0..shape.batch).map(|i| (7 * i).min(shape.keys) as u32).rev().collect();
    let dropout = Some(Dropout { p: 0.25, site: SITE });
    [(None, None), (None, dropout), (Some(lengths), dropout)]
}

#[test]
fn forward_is_within_the_bound() {
    for (shape, d) in [
        (shape(1, 1, 1, 1, Causal), 1),
        (shape(2, 3, 17, 17, Causal), 12),
        (shape(2, 2, 64, 64, Causal), 64),
        (shape(1, 2, 130, 130, Causal), 16),
        (shape(1, 2, 5, 80, Causal), 10),
        (shape(3, 1, 70, 33, Full), 8),
        (shape(1, 1, 3, 1, Full), 4),
    ] {
        let (q, k, v) = (
            random([shape.batch * shape.queries, d], 1, 2.0),
            random([shape.batch * shape.keys, d], 2, 2.0),
            random([shape.batch * shape.keys, d], 3, 1.0),
        );
        for (lengths, dropout) in options(shape) {
            let (lengths, dropout) = (lengths.as_deref(), dropout.as_ref());
            let [o, lse] = any_threads(|| {
                let mut outputs =
                    [poison(q.dim().into()), poison([shape.batch * shape.heads, shape.queries])];
                let [o, lse] = outputs.each_mut().map(|x| x.view_mut());
                let [q, k, v] = [&q, &k, &v].map(|x| x.view());
                let dropout = dropout.map(|rule| (rule, STREAM));
                attention_forward(shape, q, k, v, lengths, o, lse, dropout).unwrap();
                outputs
            });
            let [expected, expected_lse] =
                naive(shape, [&q, &k, &v].map(wide).each_ref(), lengths, dropout);
            // No key: 0/0 in the naive sum, and equal infinities.
            let seen = |lse: &f64| *lse != f64::NEG_INFINITY;
            for (found, expected) in lse.iter().zip(&expected_lse).filter(|(_, lse)| !seen(lse)) {
                assert_eq!(f64::from(*found), *expected);
            }
            let (lse, expected_lse) =
                (lse.mapv(|x| x.max(f32::MIN)), expected_lse.mapv(|x| x.max(f32::MIN.into())));
            // |q|, |k| <= 2: scores have error (width + 3) u * 4 sqrt(width), and their sum of
            // exponentials relatively (keys/16 + 12) u more. |v| <= 1: O has twice the relative
            // error of the probabilities and keys roundings, times the scale of dropout.
            let width = (d / shape.heads) as f64;
            let scores = (width + 3.0) * 4.0 * width.sqrt() * U;
            let sums = (shape.keys as f64 / 16.0 + 12.0) * U;
            let bound = (2.0 * scores + sums + (shape.keys as f64 + 2.0) * U) * 4.0 / 3.0;
            assert_close("o", o.view(), &expected, &expected.mapv(|_| bound));
            assert_close(
                "lse",
                lse.view(),
                &expected_lse,
                &expected_lse.mapv(|lse| scores + sums + 4.0 * U * (1.0 + lse.abs())),
            );
        }
    }
}

#[test]
fn backward_is_the_gradient_of_the_forward() {
    for (shape, d) in [
        (shape(1, 1, 1, 1, Causal), 2),
        (shape(2, 2, 9, 9, Causal), 6),
        (shape(1, 1, 67, 67, Causal), 2),
        (shape(1, 2, 3, 7, Causal), 4),
        (shape(2, 1, 5, 3, Full), 3),
        (shape(1, 1, 5, 3, Causal), 3),
    ] {
        let [queries, keys] = [[shape.batch * shape.queries, d], [shape.batch * shape.keys, d]];
        // Every operand is a column slice of a wider matrix.
        let qkv = [queries, keys, keys].map(|[rows, d]| random([rows, 3 * d], 4, 1.0));
        let [q, k, v] = [0, 1, 2].map(|i| qkv[i].slice(s![.., i * d..(i + 1) * d]));
        let d_o = random(queries, 5, 1.0);
        for (lengths, dropout) in options(shape) {
            let (lengths, dropout) = (lengths.as_deref(), dropout.as_ref());
            let drawn = dropout.map(|rule| (rule, STREAM));
            let [dq, dk, dv] = any_threads(|| {
                let (mut o, mut lse) =
                    (poison(queries), poison([shape.batch * shape.heads, shape.queries]));
                let (o_view, lse_view) = (o.view_mut(), lse.view_mut());
                attention_forward(shape, q, k, v, lengths, o_view, lse_view, drawn).unwrap();
                let mut outputs = [queries, keys, keys].map(|[rows, d]| poison([rows, 3 * d]));
                let [dq, dk, dv] = outputs.each_mut().map(|x| x.slice_mut(s![.., d..2 * d]));
                let (o, lse, d_o) = (o.view(), lse.view(), d_o.view());
                attention_backward(shape, q, k, v, lengths, o, lse, d_o, dq, dk, dv, drawn)
                    .unwrap();
                outputs
            });
            let [q, k, v] = [q, k, v].map(|x| x.mapv(f64::from));
            let loss = |q: &Array2<f64>, k: &Array2<f64>, v: &Array2<f64>| {
                (&naive(shape, [q, k, v], lengths, dropout)[0] * &wide(&d_o)).sum()
            };
            // All inputs are below 1: a probability has relative error e = 2 (width + 3)
            // sqrt(width) u + (keys/16 + 16) u, dP and D at most (width + 2) u 4/3 width and D
            // width e more, and sums have at most max(Tq, Tk) terms of at most 4 width.
            let width = (d / shape.heads) as f64;
            let relative =
                2.0 * (width + 3.0) * width.sqrt() * U + (shape.keys as f64 / 16.0 + 16.0) * U;
            let terms = shape.queries.max(shape.keys) as f64;
            let bound =
                (relative + (width + terms + 4.0) * U) * 4.0 * width * terms.min(8.0) + NUMERIC;
            for (what, found, expected) in [
                ("dq", dq, numeric_gradient(&q, |q| loss(q, &k, &v))),
                ("dk", dk, numeric_gradient(&k, |k| loss(&q, k, &v))),
                ("dv", dv, numeric_gradient(&v, |v| loss(&q, &k, v))),
            ] {
                assert_close(
                    what,
                    found.slice(s![.., d..2 * d]),
                    &expected,
                    &expected.mapv(|_| bound),
                );
                let around =
                    concatenate![Axis(1), found.slice(s![.., ..d]), found.slice(s![.., 2 * d..])];
                assert!(around.iter().all(|x| x.is_nan()), "{what}: written outside its columns");
            }
        }
    }
}

/// Hidden keys never matter: those after a causal query, and those beyond a sequence's length. Full
/// lengths change no bit.
#[test]
fn hidden_keys_are_ignored() {
    let run = |lengths: Option<&[u32]>, [k, v]: [&Array2<f32>; 2]| {
        let (shape, q) = (shape(2, 2, 40, 40, Causal), random([80, 8], 1, 1.0));
        let (mut o, mut lse) = (poison([80, 8]), poison([4, 40]));
        let [q, k, v] = [&q, k, v].map(|x| x.view());
        attention_forward(shape, q, k, v, lengths, o.view_mut(), lse.view_mut(), None).unwrap();
        o.mapv(f32::to_bits)
    };
    let [k, v] = [2, 3].map(|seed| random([80, 8], seed, 1.0));
    let clean = run(None, [&k, &v]);
    assert_eq!(run(Some(&[40, 40]), [&k, &v]), clean);
    let mut hidden = k.clone();
    hidden.slice_mut(s![70.., ..]).fill(f32::NAN);
    let after = run(None, [&hidden, &v]);
    assert_eq!(after.slice(s![..70, ..]), clean.slice(s![..70, ..]));
    assert!(after.slice(s![70.., ..]).iter().all(|&x| f32::from_bits(x).is_nan()));
    for length in [0, 1, 16, 30] {
        let clean = run(Some(&[40, length]), [&k, &v]);
        let [mut k, mut v] = [k.clone(), v.clone()];
        for x in [&mut k, &mut v] {
            x.slice_mut(s![(40 + length as usize).., ..]).fill(f32::NAN);
        }
        assert_eq!(run(Some(&[40, length]), [&k, &v]), clean, "{length} keys");
    }
}

#[test]
fn queries_that_see_no_key_and_empty_sequences() {
    for shape in [shape(1, 1, 5, 3, Causal), shape(1, 1, 5, 0, Full), shape(0, 1, 4, 4, Full)] {
        let (q, k) = (
            random([shape.batch * shape.queries, 2], 1, 1.0),
            random([shape.batch * shape.keys, 2], 2, 1.0),
        );
        let [mut o, mut lse] = [poison(q.dim().into()), poison([shape.batch, shape.queries])];
        let (q, k) = (q.view(), k.view());
        attention_forward(shape, q, k, k, None, o.view_mut(), lse.view_mut(), None).unwrap();
        let blind = if shape.keys == 0 { shape.queries } else { 2 }.min(o.nrows());
        assert!(o.slice(s![..blind, ..]).iter().all(|&x| x == 0.0));
        assert!(lse.iter().take(blind).all(|&x| x == f32::NEG_INFINITY));
        assert!(o.iter().all(|x| x.is_finite()));
        let [mut dq, mut dk, mut dv] =
            [poison(q.dim().into()), poison(k.dim().into()), poison(k.dim().into())];
        let (o, lse) = (o.view(), lse.view());
        let gradients = (dq.view_mut(), dk.view_mut(), dv.view_mut());
        let (dq_view, dk_view, dv_view) = gradients;
        attention_backward(shape, q, k, k, None, o, lse, q, dq_view, dk_view, dv_view, None)
            .unwrap();
        assert!(dq.slice(s![..blind, ..]).iter().all(|&x| x == 0.0));
        assert!([dq, dk, dv].iter().flatten().all(|x| x.is_finite()));
    }
}

#[test]
fn shape_errors_name_the_operand() {
    let x = Array2::zeros([6, 4]);
    for (shape, lengths, operand, expected) in [
        (shape(2, 3, 3, 3, Full), None, "q", [6, 3]),
        (shape(2, 2, 3, 2, Full), None, "k", [4, 4]),
        (shape(2, 2, 3, 3, Full), Some(vec![3]), "lengths", [2, 3]),
        (shape(2, 2, 3, 3, Full), Some(vec![0, 4]), "lengths", [2, 3]),
    ] {
        let (mut o, mut lse) = (poison([6, 4]), poison([4, 3]));
        let (x, o, lse) = (x.view(), o.view_mut(), lse.view_mut());
        let error = attention_forward(shape, x, x, x, lengths.as_deref(), o, lse, None);
        let error = error.unwrap_err();
        let Error::Shape { operand: found, expected: wanted, .. } = error else {
            panic!("{error}");
        };
        assert_eq!((found, wanted), (operand, expected));
    }
}

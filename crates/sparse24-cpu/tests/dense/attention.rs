//! Attention against naive loops in f64, and its gradient against central differences.

use ndarray::{Array2, Axis, concatenate, s};
use sparse24_core::philox::{Purpose, Site, Stream};
use sparse24_cpu::{
    Error,
    attention::{AttentionMask, AttentionShape, attention_backward, attention_forward},
    dropout::Dropout,
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

fn sees(shape: AttentionShape, query: usize, key: usize) -> bool {
    shape.mask == AttentionMask::Full || key + shape.queries <= query + shape.keys
}

fn factor(dropout: Option<&Dropout>, element: usize) -> f64 {
    match dropout {
        None => 1.0,
        Some(Dropout { p, stream }) if stream.uniforms((element / 4) as u32)[element % 4] >= *p => {
            f64::from(1.0 / (1.0 - p))
        }
        Some(_) => 0.0,
    }
}

/// O and the log-sum-exps.
fn naive(
    shape: AttentionShape,
    q: &Array2<f64>,
    k: &Array2<f64>,
    v: &Array2<f64>,
    dropout: Option<&Dropout>,
) -> [Array2<f64>; 2] {
    let width = q.ncols() / shape.heads;
    let mut o = Array2::zeros(q.dim());
    let mut lse = Array2::zeros([shape.batch * shape.heads, shape.queries]);
    for (task, head) in
        (0..shape.batch * shape.heads).map(|task| (task, task % shape.heads * width))
    {
        let batch = task / shape.heads;
        for query in 0..shape.queries {
            let row = batch * shape.queries + query;
            let score = |key: usize| {
                let dot: f64 = (0..width)
                    .map(|i| q[[row, head + i]] * k[[batch * shape.keys + key, head + i]])
                    .sum();
                if sees(shape, query, key) {
                    dot / (width as f64).sqrt()
                } else {
                    f64::NEG_INFINITY
                }
            };
            let sum: f64 = (0..shape.keys).map(|key| score(key).exp()).sum();
            lse[[task, query]] = sum.ln();
            for key in (0..shape.keys).filter(|&key| sees(shape, query, key)) {
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

fn dropouts() -> [Option<Dropout>; 2] {
    [None, Some(Dropout { p: 0.25, stream: Stream::new(5, Site::new(Purpose::Dropout, 3), 1, 2) })]
}

#[test]
fn forward_lies_within_the_bound() {
    use AttentionMask::{Causal, Full};
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
        for dropout in dropouts() {
            let [o, lse] = any_threads(|| {
                let mut outputs =
                    [poison(q.dim().into()), poison([shape.batch * shape.heads, shape.queries])];
                let [o, lse] = outputs.each_mut().map(|x| x.view_mut());
                attention_forward(shape, q.view(), k.view(), v.view(), o, lse, dropout.as_ref())
                    .unwrap();
                outputs
            });
            let [expected, expected_lse] =
                naive(shape, &wide(&q), &wide(&k), &wide(&v), dropout.as_ref());
            // |q|, |k| <= 2: scores err by (width + 3) u * 4 sqrt(width), their sum of exponentials relatively by (keys/16 + 12) u more;
            // |v| <= 1: O by twice the relative error of the probabilities and keys roundings, times the scale of dropout.
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
    use AttentionMask::{Causal, Full};
    for (shape, d) in [
        (shape(1, 1, 1, 1, Causal), 2),
        (shape(2, 2, 6, 6, Causal), 6),
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
        for dropout in dropouts() {
            let [dq, dk, dv] = any_threads(|| {
                let (mut o, mut lse) =
                    (poison(queries), poison([shape.batch * shape.heads, shape.queries]));
                attention_forward(shape, q, k, v, o.view_mut(), lse.view_mut(), dropout.as_ref())
                    .unwrap();
                let mut outputs = [queries, keys, keys].map(|[rows, d]| poison([rows, 3 * d]));
                let [dq, dk, dv] = outputs.each_mut().map(|x| x.slice_mut(s![.., d..2 * d]));
                attention_backward(
                    shape,
                    q,
                    k,
                    v,
                    o.view(),
                    lse.view(),
                    d_o.view(),
                    dq,
                    dk,
                    dv,
                    dropout.as_ref(),
                )
                .unwrap();
                outputs
            });
            let [q, k, v] = [q, k, v].map(|x| x.mapv(f64::from));
            let loss = |q: &Array2<f64>, k: &Array2<f64>, v: &Array2<f64>| {
                (&naive(shape, q, k, v, dropout.as_ref())[0] * &wide(&d_o)).sum()
            };
            // All inputs are below 1: a probability errs relatively by e = 2 (width + 3)
            // sqrt(width) u + (keys/16 + 16) u, dP and D by at most (width + 2) u 4/3 width and D
            // by width e more, and sums run over at most max(Tq, Tk) terms of at most 4 width.
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
                assert!(
                    around.iter().all(|x| x.is_nan()),
                    "{what}: written outside of its columns"
                );
            }
        }
    }
}

#[test]
fn later_keys_do_not_matter() {
    let shape = shape(1, 2, 64, 64, AttentionMask::Causal);
    let (q, mut k, v) = (random([64, 8], 1, 1.0), random([64, 8], 2, 1.0), random([64, 8], 3, 1.0));
    let run = |k: &Array2<f32>| {
        let (mut o, mut lse) = (poison([64, 8]), poison([2, 64]));
        attention_forward(shape, q.view(), k.view(), v.view(), o.view_mut(), lse.view_mut(), None)
            .unwrap();
        o
    };
    let before = run(&k);
    k.slice_mut(s![40.., ..]).fill(f32::NAN);
    let after = run(&k);
    assert_eq!(before.slice(s![..40, ..]), after.slice(s![..40, ..]));
    assert!(after.slice(s![40.., ..]).iter().all(|x| x.is_nan()));
}

#[test]
fn queries_that_see_nothing_and_empty_sequences() {
    for shape in [
        shape(1, 1, 5, 3, AttentionMask::Causal),
        shape(1, 1, 5, 0, AttentionMask::Full),
        shape(0, 1, 4, 4, AttentionMask::Full),
    ] {
        let (q, k) = (
            random([shape.batch * shape.queries, 2], 1, 1.0),
            random([shape.batch * shape.keys, 2], 2, 1.0),
        );
        let [mut o, mut lse] = [poison(q.dim().into()), poison([shape.batch, shape.queries])];
        attention_forward(shape, q.view(), k.view(), k.view(), o.view_mut(), lse.view_mut(), None)
            .unwrap();
        let blind = if shape.keys == 0 { shape.queries } else { 2 }.min(o.nrows());
        assert!(o.slice(s![..blind, ..]).iter().all(|&x| x == 0.0));
        assert!(lse.iter().take(blind).all(|&x| x == f32::NEG_INFINITY));
        assert!(o.iter().all(|x| x.is_finite()));
        let [mut dq, mut dk, mut dv] =
            [poison(q.dim().into()), poison(k.dim().into()), poison(k.dim().into())];
        attention_backward(
            shape,
            q.view(),
            k.view(),
            k.view(),
            o.view(),
            lse.view(),
            q.view(),
            dq.view_mut(),
            dk.view_mut(),
            dv.view_mut(),
            None,
        )
        .unwrap();
        assert!(dq.slice(s![..blind, ..]).iter().all(|&x| x == 0.0));
        assert!([dq, dk, dv].iter().flatten().all(|x| x.is_finite()));
    }
}

#[test]
fn shapes_that_do_not_fit_are_named() {
    let x = Array2::zeros([6, 4]);
    let run = |shape| {
        attention_forward(
            shape,
            x.view(),
            x.view(),
            x.view(),
            poison([6, 4]).view_mut(),
            poison([4, 3]).view_mut(),
            None,
        )
        .unwrap_err()
    };
    let error = run(shape(2, 3, 3, 3, AttentionMask::Full));
    assert_eq!(
        error,
        Error::Shape {
            operation: "attention_forward",
            operand: "q",
            expected: [6, 3],
            found: [6, 4]
        }
    );
    let error = run(shape(2, 2, 3, 2, AttentionMask::Full));
    assert_eq!(
        error,
        Error::Shape {
            operation: "attention_forward",
            operand: "k",
            expected: [4, 4],
            found: [6, 4]
        }
    );
}

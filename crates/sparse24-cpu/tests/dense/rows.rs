//! Bias, embedding, dropout and rounding.

use ndarray::{Array1, Array2, Axis, s};
use sparse24_core::{
    op::{Accumulate, Dropout},
    philox::{Purpose, Site, Stream},
};
use sparse24_cpu::{
    Error,
    bias::{bias_forward, bias_grad},
    dropout::dropout,
    embedding::{embed_backward, embed_forward},
    rounding::round_bf16,
};

use crate::check::{U, any_threads, assert_close, column_major, poison, random, tokens, wide};

#[test]
fn bias_forward_and_gradient() {
    for [p, r] in [[1, 1], [7, 5], [200, 130], [0, 3], [3, 0]] {
        let (z, bias) = (random([p, r], 1, 1.0), random([1, r], 2, 1.0));
        for z in [z.clone(), column_major(&z)] {
            let [out, db, added] = any_threads(|| {
                let mut outputs = [z.clone(), poison([1, r]), bias.clone()];
                bias_forward(outputs[0].view_mut(), bias.row(0)).unwrap();
                bias_grad(z.view(), outputs[1].row_mut(0), Accumulate::Overwrite).unwrap();
                bias_grad(z.view(), outputs[2].row_mut(0), Accumulate::Add).unwrap();
                outputs
            });
            assert_eq!(out, &z + &bias);
            let expected = wide(&z).sum_axis(Axis(0)).insert_axis(Axis(0));
            let bound = (wide(&z).mapv(f64::abs).sum_axis(Axis(0)).insert_axis(Axis(0)) + 1.0)
                * ((64 + p / 64 + 1) as f64 * U);
            assert_close("db", db.view(), &expected, &bound);
            assert_close("db, added", added.view(), &(expected + wide(&bias)), &bound);
        }
    }
    let error =
        bias_forward(Array2::zeros([2, 3]).view_mut(), Array1::zeros(2).view()).unwrap_err();
    assert!(matches!(error, Error::Shape { operand: "bias", expected: [1, 3], .. }), "{error}");
}

#[test]
fn embedding_forward_and_gradient() {
    for [count, context, vocabulary, c] in
        [[1, 1, 1, 1], [24, 8, 5, 40], [0, 4, 3, 2], [300, 50, 1000, 33]]
    {
        let tokens = tokens(count, 1, vocabulary as u32);
        let (wte, wpe) = (random([vocabulary, c], 2, 1.0), random([context, c], 3, 1.0));
        let dout = random([count, c], 4, 1.0);
        let [out, plain, dwte, dwpe, added] = any_threads(|| {
            let mut outputs = [
                poison([count, c]),
                poison([count, c]),
                poison([vocabulary, c]),
                poison([context, c]),
                wte.clone(),
            ];
            let [out, plain, dwte, dwpe, added] = outputs.each_mut().map(|x| x.view_mut());
            embed_forward(&tokens, context, wte.view(), Some(wpe.view()), out).unwrap();
            embed_forward(&tokens, context, wte.view(), None, plain).unwrap();
            embed_backward(dout.view(), &tokens, context, dwte, Some(dwpe), Accumulate::Overwrite)
                .unwrap();
            embed_backward(dout.view(), &tokens, context, added, None, Accumulate::Add).unwrap();
            outputs
        });
        let (mut expected, mut positions, mut accumulated) = (
            Array2::<f32>::zeros([vocabulary, c]),
            Array2::<f32>::zeros([context, c]),
            wte.clone(),
        );
        for (row, &token) in tokens.iter().enumerate() {
            let (token, position) = (token as usize, row % context);
            assert_eq!(plain.row(row), wte.row(token));
            assert_eq!(out.row(row), &wte.row(token) + &wpe.row(position));
            let add = |sums: &mut Array2<f32>, at: usize| {
                sums.row_mut(at).zip_mut_with(&dout.row(row), |sum, x| *sum += x)
            };
            add(&mut expected, token);
            add(&mut accumulated, token);
            add(&mut positions, position);
        }
        // Sums are in the order of the tokens, so every bit agrees.
        assert_eq!([dwte, dwpe, added], [expected, positions, accumulated]);
    }
}

#[test]
fn bad_tokens_and_positions_are_errors() {
    let (wte, mut out) = (Array2::zeros([3, 2]), poison([2, 2]));
    let error = embed_forward(&[1, 3], 2, wte.view(), None, out.view_mut()).unwrap_err();
    assert!(matches!(error, Error::Token { token: 3, position: 1, vocabulary: 3, .. }), "{error}");
    let error =
        embed_forward(&[1, 2], 2, wte.view(), Some(Array2::zeros([1, 2]).view()), out.view_mut())
            .unwrap_err();
    assert!(matches!(error, Error::Shape { operand: "wpe", expected: [2, 2], .. }), "{error}");
    assert!(
        embed_forward(&[1], 0, wte.view(), Some(wte.view()), poison([1, 2]).view_mut()).is_err()
    );
}

#[test]
fn dropout_follows_its_stream() {
    let rule = Dropout { p: 0.3, site: Site::new(Purpose::Dropout, 1) };
    let stream = Stream::new(9, rule.site, 2, 3);
    for shape in [[1, 1], [3, 7], [130, 257], [0, 5]] {
        let x = random(shape, 1, 1.0);
        let [y] = any_threads(|| {
            let mut y = x.clone();
            dropout(y.view_mut(), &rule, stream).unwrap();
            [y]
        });
        for (element, (&x, &y)) in x.iter().zip(&y).enumerate() {
            let kept = stream.uniforms(element as u32 / 4)[element % 4] >= rule.p;
            assert_eq!(y, if kept { x * (1.0 / (1.0 - rule.p)) } else { 0.0 }, "element {element}");
        }
    }
    let mut x = random([40, 40], 1, 1.0);
    let before = x.clone();
    dropout(x.view_mut(), &Dropout { p: 0.0, ..rule }, stream).unwrap();
    assert_eq!(x, before);
    let error = dropout(x.slice_mut(s![.., 1..3]), &rule, stream).unwrap_err();
    assert!(matches!(error, Error::Layout { operand: "x", .. }), "{error}");
}

#[test]
fn bf16_rounds_to_nearest_even() {
    let mut x: Vec<f32> =
        (0..200_000u32).map(|i| f32::from_bits(i.wrapping_mul(2_654_435_761))).collect();
    x.extend([
        1.0,
        1.003_906_3,
        1.011_718_8,
        f32::MAX,
        f32::INFINITY,
        -0.0,
        1e-45,
        f32::NAN,
        f32::from_bits(0x7f80_0001),
    ]);
    let x = Array2::from_shape_vec([1, x.len()], x).unwrap();
    let mut y = poison(x.dim().into());
    round_bf16(x.view(), y.view_mut()).unwrap();
    for (x, y) in x.iter().zip(&y) {
        assert_eq!(y.to_bits(), half::bf16::from_f32(*x).to_f32().to_bits(), "{x}");
    }
}

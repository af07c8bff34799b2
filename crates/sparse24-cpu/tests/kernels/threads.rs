//! Several tasks of every kernel have the same bits on any number of threads.

use ndarray::{Array2, s};
use sparse24_core::{
    op::{Accumulate, AttentionMask, AttentionShape, Dropout, MaskedDecay},
    philox::{Purpose, Site, Stream},
};
use sparse24_cpu::{
    adamw::{l1_distance, squared_norm},
    attention::{attention_backward, attention_forward},
    bias::{bias_forward, bias_grad},
    dropout::dropout,
    embedding::{embed_backward, embed_forward},
    loss::head_loss,
    norm::{norm_backward, norm_forward},
};

use crate::{
    edges::{adamw, mask},
    input::{any_threads, column_major, one_number, poison, random},
};

const SITE: Site = Site::new(Purpose::Dropout, 3);
const STREAM: Stream = Stream::new(5, SITE, 1, 2);
const DROPOUT: Dropout = Dropout { p: 0.25, site: SITE };

/// Token ids below `vocabulary`.
fn tokens(count: u32, vocabulary: u32) -> Vec<u32> {
    (0..count).map(|i| i.wrapping_mul(40_503) >> 3 & 0xffff).map(|i| i % vocabulary).collect()
}

/// Operands are column slices, and nothing around the gradients is written.
#[test]
fn attention() {
    let (queries, keys, d) = (70, 90, 12);
    let mask = AttentionMask::Causal;
    let shape = AttentionShape { batch: 2, heads: 3, queries, keys, mask };
    let [q, kv] = [queries, keys].map(|rows| random([2 * rows, 3 * d], 4, 1.0));
    let parts = [(&q, 0), (&kv, d), (&kv, 2 * d)];
    let [q, k, v] = parts.map(|(x, first)| x.slice(s![.., first..first + d]));
    let d_o = random([2 * queries, d], 5, 1.0);
    let outputs = any_threads(|| {
        let (mut o, mut lse) = (poison([2 * queries, d]), poison([6, queries]));
        let (lengths, drawn) = (Some(&[80, 33][..]), Some((&DROPOUT, STREAM)));
        let views = (o.view_mut(), lse.view_mut());
        attention_forward(shape, q, k, v, lengths, views.0, views.1, drawn).unwrap();
        let mut outputs = [queries, keys, keys].map(|rows| poison([2 * rows, 3 * d]));
        let [dq, dk, dv] = outputs.each_mut().map(|x| x.slice_mut(s![.., d..2 * d]));
        let (lse, d_o) = (lse.view(), d_o.view());
        attention_backward(shape, q, k, v, lengths, o.view(), lse, d_o, dq, dk, dv, drawn).unwrap();
        let [dq, dk, dv] = outputs;
        [o, dq, dk, dv]
    });
    for gradient in &outputs[1..] {
        let written = |(_, column): (usize, usize)| (d..2 * d).contains(&column);
        assert!(gradient.indexed_iter().all(|(at, x)| x.is_nan() != written(at)));
    }
}

#[test]
fn norm() {
    let shape @ [p, c] = [100, 40];
    let [x, delta, dy, above] = [1, 2, 3, 4].map(|seed| random(shape, seed, 1.0));
    let [gamma, beta, held] = [5, 6, 7].map(|seed| random([1, c], seed, 1.0));
    any_threads(|| {
        let mut outputs = [shape, shape, [p, 2]].map(poison);
        let [residual, y, stats] = outputs.each_mut().map(|x| x.view_mut());
        let (delta, beta) = (Some(delta.view()), Some(beta.row(0)));
        norm_forward(x.view(), delta, gamma.row(0), beta, residual, y, stats).unwrap();
        let [residual, y, stats] = outputs;
        let [mut dx, mut dgamma, mut dbeta] = [above.clone(), held.clone(), held.clone()];
        norm_backward(
            dy.view(),
            residual.view(),
            stats.view(),
            gamma.row(0),
            dx.view_mut(),
            Accumulate::Add,
            dgamma.row_mut(0),
            Some(dbeta.row_mut(0)),
            Accumulate::Add,
        )
        .unwrap();
        [y, dx, dgamma, dbeta]
    });
}

#[test]
fn bias_in_both_layouts() {
    let (z, bias) = (random([200, 130], 1, 1.0), random([1, 130], 2, 1.0));
    for z in [z.clone(), column_major(&z)] {
        let [out, _] = any_threads(|| {
            let (mut out, mut db) = (z.clone(), poison([1, 130]));
            bias_forward(out.view_mut(), bias.row(0)).unwrap();
            bias_grad(z.view(), db.row_mut(0), Accumulate::Overwrite).unwrap();
            [out, db]
        });
        assert_eq!(out, &z + &bias);
    }
}

/// Sums are in the order of the tokens, so every bit agrees.
#[test]
fn embedding() {
    let (context, vocabulary, c) = (50, 1000, 33);
    let tokens = tokens(300, vocabulary as u32);
    let (wte, wpe) = (random([vocabulary, c], 2, 1.0), random([context, c], 3, 1.0));
    let dout = random([300, c], 4, 1.0);
    let [_, dwte, dwpe] = any_threads(|| {
        let mut outputs = [[300, c], [vocabulary, c], [context, c]].map(poison);
        let [out, dwte, dwpe] = outputs.each_mut().map(|x| x.view_mut());
        embed_forward(&tokens, context, wte.view(), Some(wpe.view()), out).unwrap();
        embed_backward(dout.view(), &tokens, context, dwte, Some(dwpe), Accumulate::Overwrite)
            .unwrap();
        outputs
    });
    let mut expected = [Array2::<f32>::zeros([vocabulary, c]), Array2::zeros([context, c])];
    for (row, &token) in tokens.iter().enumerate() {
        for (sums, at) in expected.iter_mut().zip([token as usize, row % context]) {
            sums.row_mut(at).zip_mut_with(&dout.row(row), |sum, x| *sum += x);
        }
    }
    assert_eq!([dwte, dwpe], expected);
}

#[test]
fn loss_and_dropout() {
    let (logits, targets) = (random([40, 65], 1, 4.0), tokens(40, 65));
    let x = random([130, 257], 1, 1.0);
    any_threads(|| {
        let mut gradient = logits.clone();
        let loss = head_loss(gradient.view_mut(), &targets, Some(2), 0.1, 0.25).unwrap();
        let mut x = x.clone();
        dropout(x.view_mut(), &DROPOUT, STREAM).unwrap();
        [gradient, one_number(loss), x]
    });
}

#[test]
fn optimizer() {
    let shape = [256, 132];
    let [w, g, m, v] = [1, 2, 3, 4].map(|seed| random(shape, seed, 1.0).mapv(f32::abs));
    for decay in [MaskedDecay::None, MaskedDecay::OnGradients(0.3), MaskedDecay::OnWeights(0.3)] {
        any_threads(|| {
            let mut outputs = [w.clone(), m.clone(), v.clone()];
            adamw(&mut outputs, &g, 0.95, decay, &mask(shape)).unwrap();
            outputs
        });
    }
    let [a, b] = [&w, &g].map(|x| x.as_slice().unwrap());
    any_threads(|| [squared_norm(a), l1_distance(a, b).unwrap()].map(one_number));
}

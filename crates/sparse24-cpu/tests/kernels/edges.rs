//! Extreme inputs.

use ndarray::{Array1, Array2, arr2, s};
use sparse24_core::{
    Mask,
    op::{
        Adam,
        AttentionMask::{self, Causal, Full},
        AttentionShape, Dropout, MaskedDecay, Optimizer, StepState, UpdateRule,
    },
    philox::{Purpose, Site},
};
use sparse24_cpu::{
    Error,
    attention::{attention_backward, attention_forward},
    dropout::dropout,
    loss::head_loss,
    optimizer::optimizer_step,
    rounding::round_bf16,
};

use crate::input::{poison, random};

pub(crate) fn shape(
    [batch, heads, queries, keys]: [usize; 4],
    mask: AttentionMask,
) -> AttentionShape {
    AttentionShape { batch, heads, queries, keys, mask }
}

/// Hidden keys never matter: those after a causal query, and those beyond a sequence's length. Full
/// lengths change no bit.
#[test]
fn hidden_keys_are_ignored() {
    let run = |lengths: Option<&[u32]>, [k, v]: [&Array2<f32>; 2]| {
        let (shape, q) = (shape([2, 2, 40, 40], Causal), random([80, 8], 1, 1.0));
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
fn dropout_of_everything_is_not_finite() {
    let site = Site::new(Purpose::Dropout, 0);
    for p in [1.0, 1.5, f32::INFINITY, f32::NAN] {
        let mut x = random([8, 64], 1, 1.0);
        dropout(x.view_mut(), &Dropout { p, site }, StepState::default().stream(site)).unwrap();
        assert!(x.iter().all(|x| !x.is_finite()), "{p}");
    }
}

#[test]
fn attention_without_keys_or_sequences() {
    for shape in [shape([1, 1, 5, 0], Full), shape([0, 1, 4, 4], Full)] {
        let [queries, keys] = [shape.queries, shape.keys].map(|rows| [shape.batch * rows, 2]);
        let (q, k) = (random(queries, 1, 1.0), random(keys, 2, 1.0));
        let [mut o, mut lse] = [poison(queries), poison([shape.batch, shape.queries])];
        let (q, k) = (q.view(), k.view());
        attention_forward(shape, q, k, k, None, o.view_mut(), lse.view_mut(), None).unwrap();
        assert!(o.iter().all(|&x| x == 0.0));
        assert!(lse.iter().all(|&x| x == f32::NEG_INFINITY));
        let [mut dq, mut dk, mut dv] = [queries, keys, keys].map(poison);
        let (o, lse) = (o.view(), lse.view());
        let views = (dq.view_mut(), dk.view_mut(), dv.view_mut());
        attention_backward(shape, q, k, k, None, o, lse, q, views.0, views.1, views.2, None)
            .unwrap();
        assert!([dq, dk, dv].iter().flatten().all(|&x| x == 0.0));
    }
}

#[test]
fn huge_and_non_finite_logits() {
    let mut logits = arr2(&[[1e30f32, -1e30, 0.0]]);
    let loss = head_loss(logits.view_mut(), &[0], None, 0.0, None, 1.0).unwrap();
    assert_eq!((loss, logits), (0.0, Array2::zeros([1, 3])));
    for bad in [f32::NAN, f32::INFINITY] {
        let mut logits = arr2(&[[bad, 0.0, 0.0]]);
        let loss = head_loss(logits.view_mut(), &[1], None, 0.0, None, 1.0).unwrap();
        let spreads = !loss.is_finite() && logits.iter().any(|x| !x.is_finite());
        assert!(spreads, "{bad}: {loss:?} {logits}");
    }
}

#[test]
fn bf16_rounds_to_nearest_even() {
    let ties = [1.0, 1.003_906_3, 1.011_718_8, f32::MAX, f32::INFINITY, -0.0, 1e-45, f32::NAN];
    let bits = (0..200_000_u32).map(|i| i.wrapping_mul(2_654_435_761)).chain([0x7f80_0001]);
    let x = Array2::from_shape_vec([1, 200_009], bits.map(f32::from_bits).chain(ties).collect());
    let x = x.unwrap();
    let mut y = x.clone();
    round_bf16(y.view_mut());
    for (x, y) in x.iter().zip(&y) {
        assert_eq!(y.to_bits(), half::bf16::from_f32(*x).to_f32().to_bits(), "{x}");
    }
}

pub(crate) fn mask([rows, columns]: [usize; 2]) -> Mask {
    let tiles = (0..rows * columns / 16).map(|i| (i * 40_503 + 12_345) as u16).collect();
    Mask::from_tiles(rows, columns, tiles).unwrap()
}

/// A step on `[w, m, v]`.
pub(crate) fn adamw(
    [w, m, v]: &mut [Array2<f32>; 3],
    g: &Array2<f32>,
    beta2: f32,
    decay: MaskedDecay,
    mask: &Mask,
) -> Result<(), Error> {
    let [w, m, v] = [w, m, v].map(|x| x.as_slice_mut().unwrap());
    let rule = UpdateRule::AdamW(Adam { beta1: 0.9, beta2, epsilon: 1e-8 });
    let optimizer = Optimizer { rule, clip: 1.0 };
    let (learning_rate, bias_corrections) = (0.01, [0.19, 0.0975]);
    let state = StepState { learning_rate, bias_corrections, ..StepState::default() };
    optimizer_step(w, g.as_slice().unwrap(), m, v, &optimizer, &state, 0.1, 0.5, decay, Some(mask))
}

/// With beta2 = 1, v keeps its bits whatever the gradient and the mask, and the step divides by it.
#[test]
fn a_frozen_second_moment_keeps_its_bits() {
    let shape = [256, 132];
    let mut g = random(shape, 1, 1.0);
    let mut v = random(shape, 2, 1.0).mapv(f32::abs);
    let gradients = [f32::MAX, -f32::MAX, 1e30, -0.0, f32::MIN_POSITIVE / 8.0];
    let moments = [0.0, f32::MIN_POSITIVE / 4.0, f32::MAX, 1.0, 0.0];
    g.slice_mut(s![0, ..5]).assign(&Array1::from_iter(gradients));
    v.slice_mut(s![1, ..5]).assign(&Array1::from_iter(moments));
    for decay in [MaskedDecay::None, MaskedDecay::OnGradients(0.3), MaskedDecay::OnWeights(0.3)] {
        let mut state = [random(shape, 3, 1.0), random(shape, 4, 1.0), v.clone()];
        adamw(&mut state, &g, 1.0, decay, &mask(shape)).unwrap();
        let [w, _, after] = state;
        assert_eq!(after.mapv(f32::to_bits), v.mapv(f32::to_bits));
        assert_ne!(w, random(shape, 3, 1.0));
    }
}

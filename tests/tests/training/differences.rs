//! The gradients of the f64 oracle against finite differences, so that the trainer is compared with
//! correct values: whole models, and the shapes of attention and targets that these do not have.
//!
//! With D(h) the central difference, D(h) - D(2h) = -3 c h^2 up to h^4: |D(h) - D(2h)| is three
//! times the error of D(h), and the bound. The rounding of f, a sum of fewer than 2^10 terms along
//! each path, adds at most 2^10 * 2^-53 |f| / h.

use sparse24_core::op::{Activation, AttentionMask, AttentionShape};
use sparse24_tests::oracle::{
    arithmetic::{Arithmetic, Matrix, Random, Tensors},
    layers::{self, Address, Attention, Dropout},
};
use sparse24_train::{
    backend::op::HeadLoss,
    model::{Gpt2Spec, ModelSpec, Sparsify},
    nn::{BatchShape, Bias, Prediction},
    objective::Batch,
};

use super::oracle::{
    fst::Pruned,
    pass::{Dense, Operands, Pass, parameters},
};

const H: f64 = 1e-3;
const ADDRESS: Address = Address { seed: 7, step: 3, micro_step: 1 };

/// Fails unless `gradient` is that of `f` at `x`, for the elements that `perturbed` selects.
fn check(
    what: &str,
    x: &Matrix,
    gradient: &Matrix,
    perturbed: impl Fn(usize) -> bool,
    mut f: impl FnMut(&Matrix) -> f64,
) {
    let mut moved = x.clone();
    let magnitude = f(x).abs().max(1.0);
    let (mut seen, mut loosest) = (0.0_f64, 0.0_f64);
    for (at, &expected) in gradient.iter().enumerate().filter(|(at, _)| perturbed(*at)) {
        let mut difference = |h: f64| {
            let mut value = |by: f64| {
                *moved.iter_mut().nth(at).expect("as many elements as the gradient") += by;
                let value = f(&moved);
                moved.assign(x);
                value
            };
            (value(h) - value(-h)) / (2.0 * h)
        };
        let (near, far) = (difference(H), difference(2.0 * H));
        let bound = (near - far).abs() + 1024.0 * f64::EPSILON / 2.0 * magnitude / H;
        assert!(
            (near - expected).abs() <= bound,
            "{what}[{at}]: {expected} against {near}, bound {bound}"
        );
        (seen, loosest) = (seen.max(expected.abs()), loosest.max(bound));
    }
    assert!(
        loosest <= 1e-3 * seen,
        "{what}: a bound of {loosest} is too wide for gradients up to {seen}"
    );
}

/// sum of c * y, whose gradient over y is c.
fn along(c: &Matrix, y: &Matrix) -> f64 {
    (c * y).sum()
}

fn all(_: usize) -> bool {
    true
}

#[test]
fn attention() {
    let mut random = Random(4);
    let a = &mut Arithmetic::Exact;
    let dropped = Some(Dropout { address: ADDRESS, number: 4, p: 0.25 });
    for (queries, keys, mask, lengths, dropout) in [
        (5, 5, AttentionMask::Causal, None, None),
        (5, 5, AttentionMask::Causal, None, dropped),
        (3, 5, AttentionMask::Causal, Some([5, 3]), dropped),
        (5, 4, AttentionMask::Full, Some([2, 0]), None),
    ] {
        let shape = AttentionShape { batch: 2, heads: 2, queries, keys, mask };
        let qkv = [queries, keys, keys].map(|rows| random.matrix([2 * rows, 6], 1.5));
        let c = random.matrix([2 * queries, 6], 1.0);
        let lengths = lengths.as_ref().map(<[u32; 2]>::as_slice);
        let attention = Attention { shape, qkv: &qkv, lengths, dropout, operand_units: 0.0 };
        let kept = attention.forward(a);
        let gradients = attention.backward(a, &kept, &c);
        for (part, gradient) in gradients.iter().enumerate() {
            let mut moved = qkv.clone();
            check(&format!("{mask:?} {part}"), &qkv[part], gradient, all, |x| {
                moved[part].assign(x);
                let attention = Attention { qkv: &moved, ..attention };
                along(&c, &attention.forward(&mut Arithmetic::Exact).o)
            });
        }
    }
}

#[test]
fn loss() {
    let mut random = Random(5);
    let a = &mut Arithmetic::Exact;
    let (logits, targets) = (random.matrix([4, 7], 3.0), [6, 0, layers::IGNORE, 3]);
    for smoothing in [0.0, 0.25] {
        let (_, dlogits) = layers::loss(a, &logits, &targets, smoothing, 0.5);
        check("logits", &logits, &dlogits, all, |logits| {
            0.5 * layers::loss(a, logits, &targets, smoothing, 0.5).0
        });
    }
}

/// The loss of a whole model with these operands, and all its gradients.
fn model(
    spec: &ModelSpec,
    weights: &Tensors,
    operands: &mut dyn Operands,
    dropout: f64,
) -> (f64, Tensors) {
    let mut random = Random(8);
    let mut ids = || (0..10).map(|_| random.below(spec.vocabulary() as u32)).collect::<Vec<_>>();
    let mut batch = Batch::default();
    (batch.tokens, batch.targets, batch.lengths) = (ids(), ids(), vec![3, 5]);
    batch.segments = batch.tokens.iter().map(|token| token % 2).collect();
    batch.source = ids();
    batch.targets[1] = HeadLoss::IGNORE;
    if let Some(prediction) = spec.prediction() {
        batch.targets = vec![HeadLoss::IGNORE; 10];
        let of = |target: u32| match prediction {
            Prediction::Class(_) | Prediction::Span => target,
            Prediction::Value => (target as f32 - 0.5).to_bits(),
        };
        (batch.targets[2], batch.targets[5]) = (of(1), of(0));
    }
    if let ModelSpec::Deit(spec) = spec {
        batch.pixels.extend((0..2 * 3 * spec.image_size.pow(2)).map(|_| random.symmetric()));
        batch.targets[2] = HeadLoss::IGNORE;
        (batch.targets[0], batch.second_targets) = (2, vec![1, 0]);
        batch.shares.extend([0.75, 0.125]);
    }
    let mut gradients = Tensors::new();
    let mut pass = Pass {
        arithmetic: &mut Arithmetic::Exact,
        spec,
        weights,
        operands,
        batch: BatchShape { size: 2, sequence_length: 5 },
        dropout,
        address: ADDRESS,
    };
    let loss = pass.train(&batch, 0.1, &mut gradients);
    (0.1 * loss, gradients)
}

fn spec(activation: Activation, bias: Bias) -> Gpt2Spec {
    Gpt2Spec {
        layers: 2,
        heads: 2,
        d_model: 4,
        d_ff: 8,
        sequence_length: 6,
        vocabulary: 5,
        activation,
        bias,
        sparsify: Sparsify::FfnAndAttention,
        prediction: None,
    }
}

fn random_weights(spec: &ModelSpec) -> Tensors {
    let mut random = Random(6);
    parameters(spec).into_iter().map(|(name, shape)| (name, random.matrix(shape, 1.0))).collect()
}

#[test]
fn whole_model() {
    let base = spec(Activation::Gelu, Bias::Present);
    let gated = spec(Activation::Geglu, Bias::Present);
    let tuned = |spec, prediction| Gpt2Spec { prediction: Some(prediction), ..spec };
    let models = [
        (ModelSpec::Gpt2(base), 0.0),
        (ModelSpec::Gpt2(spec(Activation::Geglu, Bias::Absent)), 0.25),
        (ModelSpec::Gpt2(spec(Activation::Swiglu, Bias::Present)), 0.25),
        (ModelSpec::Gpt2(tuned(base, Prediction::Value)), 0.25),
        (ModelSpec::Gpt2(tuned(base, Prediction::Span)), 0.25),
        (sparse24_tests::bert(spec(Activation::GeluErf, Bias::Present)), 0.25),
        (sparse24_tests::bert(tuned(base, Prediction::Class(3))), 0.25),
        (sparse24_tests::bert(tuned(base, Prediction::Span)), 0.25),
        (sparse24_tests::deit(base), 0.25),
        (sparse24_tests::crammed_bert(gated), 0.25),
        (sparse24_tests::transformer(gated), 0.25),
        (sparse24_tests::crammed_bert(tuned(gated, Prediction::Class(3))), 0.25),
        (sparse24_tests::crammed_bert(tuned(gated, Prediction::Value)), 0.0),
        (sparse24_tests::crammed_bert(tuned(gated, Prediction::Span)), 0.25),
    ];
    for (spec, dropout) in models {
        let weights = random_weights(&spec);
        let (_, gradients) = model(&spec, &weights, &mut Dense(&weights), dropout);
        for (name, _) in parameters(&spec) {
            let mut moved = weights.clone();
            // A shift of all tokens changes no softmax over them: the gradient is rounding noise.
            let moves_all = [
                "qa_outputs.bias",
                "layer.1.output.LayerNorm.bias",
                "ln_f.bias",
                "final_norm.bias",
            ];
            let noise = spec.prediction() == Some(Prediction::Span)
                && moves_all.iter().any(|end| name.ends_with(end));
            check(
                &name,
                &weights[&name],
                &gradients[&name],
                |_| !noise,
                |w| {
                    moved.insert(name.clone(), w.clone());
                    model(&spec, &moved, &mut Dense(&moved), dropout).0
                },
            );
        }
    }
}

/// With S(W) in forward and dgrad, kept weights and all other parameters have the gradient of the
/// pruned model.
#[test]
fn pruned_model() {
    let spec = ModelSpec::Gpt2(spec(Activation::Gelu, Bias::Present));
    let weights = random_weights(&spec);
    let masks = Pruned::of(&spec, &weights).masks;
    let (_, gradients) = model(&spec, &weights, &mut Pruned::of(&spec, &weights), 0.0);
    assert_eq!(masks.len(), 8);
    for (name, _) in parameters(&spec) {
        let mut pruned = Pruned::of(&spec, &weights);
        let kept = |at: usize| masks.get(&name).is_none_or(|mask| mask[at]);
        check(&name, &weights[&name], &gradients[&name], kept, |w| {
            pruned.weights.insert(name.clone(), w.clone());
            model(&spec, &pruned.weights.clone(), &mut pruned, 0.0).0
        });
    }
}

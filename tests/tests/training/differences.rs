//! The gradients of the f64 oracle against finite differences, so that what the trainer is compared
//! with is right.
//!
//! With D(h) the central difference, D(h) - D(2h) = -3 c h^2 up to h^4: |D(h) - D(2h)| is three
//! times the error of D(h), and the bound. The rounding of f, a sum of fewer than 2^10 terms a
//! path, adds at most 2^10 * 2^-53 |f| / h.

use sparse24_train::{
    backend::Activation,
    model::gpt2::{Gpt2Shape, Sparsify},
    nn::linear24::Bias,
};

use super::oracle::{
    arithmetic::{Arithmetic, Matrix, Random, Tensors},
    fst::Pruned,
    gpt2::{Dense, Operands, Pass, parameters},
    layers::{self, Address, Dropout, Heads},
};

const H: f64 = 1e-3;
const ADDRESS: Address = Address { seed: 7, step: 3, micro_step: 1 };

/// Fails unless `gradient` is that of `f` at `x`, element by element where `perturbed` says so.
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
        "{what}: a bound of {loosest} says little of gradients up to {seen}"
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
fn of_linear_layers() {
    let (mut random, mut a) = (Random(1), Arithmetic::Exact);
    let (x, w) = (random.matrix([5, 6], 1.0), random.matrix([3, 6], 1.0));
    let (b, c) = (random.matrix([1, 3], 1.0), random.matrix([5, 3], 1.0));
    let dx = a.product(&c, &w);
    let dw = a.product(&c.t().to_owned(), &x);
    let db = a.column_sums(&c);
    for bias in [None, Some(&b)] {
        check("x", &x, &dx, all, |x| {
            along(&c, &layers::linear(&mut Arithmetic::Exact, x, &w, bias))
        });
        check("w", &w, &dw, all, |w| {
            along(&c, &layers::linear(&mut Arithmetic::Exact, &x, w, bias))
        });
    }
    check("b", &b, &db, all, |b| {
        along(&c, &layers::linear(&mut Arithmetic::Exact, &x, &w, Some(b)))
    });
}

#[test]
fn of_layer_norm() {
    let mut random = Random(2);
    let a = &mut Arithmetic::Exact;
    let (x, c) = (random.matrix([3, 8], 2.0), random.matrix([3, 8], 1.0));
    let (gamma, shift) = (random.matrix([1, 8], 1.0), random.matrix([1, 8], 1.0));
    for beta in [None, Some(&shift)] {
        let kept = layers::norm(a, &x, &gamma, beta);
        let (dx, dgamma, dbeta) = layers::norm_backward(a, &c, &kept, &gamma);
        check("x", &x, &dx, all, |x| along(&c, &layers::norm(a, x, &gamma, beta).y));
        check("gamma", &gamma, &dgamma, all, |gamma| {
            along(&c, &layers::norm(a, &x, gamma, beta).y)
        });
        check("beta", &shift, &dbeta, all, |beta| {
            along(&c, &layers::norm(a, &x, &gamma, Some(beta)).y)
        });
    }
}

#[test]
fn of_activations() {
    let mut random = Random(3);
    let a = &mut Arithmetic::Exact;
    for activation in [Activation::Gelu, Activation::Geglu, Activation::Swiglu] {
        let (z, c) = (random.matrix([4, 5 * activation.width()], 3.0), random.matrix([4, 5], 1.0));
        let dz = layers::activate_backward(a, activation, &z, &c);
        check(&format!("{activation:?}"), &z, &dz, all, |z| {
            along(&c, &layers::activate(a, activation, z))
        });
    }
}

#[test]
fn of_attention() {
    let mut random = Random(4);
    let a = &mut Arithmetic::Exact;
    let at = Heads { sequences: 2, context: 5, heads: 2 };
    let (qkv, c) = (random.matrix([10, 3 * 6], 1.5), random.matrix([10, 6], 1.0));
    for dropout in [None, Some(Dropout { address: ADDRESS, place: 4, p: 0.25 })] {
        let kept = layers::attention(a, &qkv, at, dropout);
        let dqkv = layers::attention_backward(a, &qkv, at, dropout, &kept, &c);
        check("qkv", &qkv, &dqkv, all, |qkv| along(&c, &layers::attention(a, qkv, at, dropout).o));
    }
}

#[test]
fn of_the_loss() {
    let mut random = Random(5);
    let a = &mut Arithmetic::Exact;
    let (logits, targets) = (random.matrix([4, 7], 3.0), [6, 0, 3, 3]);
    let (_, dlogits) = layers::loss(a, &logits, &targets, 0.5);
    check("logits", &logits, &dlogits, all, |logits| {
        0.5 * layers::loss(a, logits, &targets, 0.5).0
    });
}

/// The loss of a whole model and all its gradients, through these operands.
fn model(
    shape: Gpt2Shape,
    weights: &Tensors,
    operands: &mut dyn Operands,
    dropout: f64,
) -> (f64, Tensors) {
    let mut random = Random(8);
    let mut ids = || (0..10).map(|_| random.below(shape.vocabulary as u32)).collect::<Vec<_>>();
    let (tokens, targets) = (ids(), ids());
    let mut gradients = Tensors::new();
    let mut pass = Pass {
        arithmetic: &mut Arithmetic::Exact,
        shape,
        weights,
        operands,
        sequences: 2,
        context: 5,
        dropout,
        address: ADDRESS,
    };
    let loss = pass.train(&tokens, &targets, 0.1, &mut gradients);
    assert_eq!(loss, pass.loss(&tokens, &targets));
    (0.1 * loss, gradients)
}

fn shape(activation: Activation, bias: Bias) -> Gpt2Shape {
    Gpt2Shape {
        layers: 2,
        heads: 2,
        width: 4,
        ffn_width: 8,
        context: 6,
        vocabulary: 5,
        activation,
        bias,
        sparsify: Sparsify::FfnAndAttention,
    }
}

fn random_weights(shape: &Gpt2Shape) -> Tensors {
    let mut random = Random(6);
    parameters(shape).into_iter().map(|(name, shape)| (name, random.matrix(shape, 1.0))).collect()
}

#[test]
fn of_the_model() {
    let settings = [
        (Activation::Gelu, Bias::Present, 0.0),
        (Activation::Geglu, Bias::Absent, 0.25),
        (Activation::Swiglu, Bias::Present, 0.25),
    ];
    for (activation, bias, dropout) in settings {
        let shape = shape(activation, bias);
        let weights = random_weights(&shape);
        let (_, gradients) = model(shape, &weights, &mut Dense(&weights), dropout);
        for (name, _) in parameters(&shape) {
            let mut moved = weights.clone();
            check(&name, &weights[&name], &gradients[&name], all, |w| {
                moved.insert(name.clone(), w.clone());
                model(shape, &moved, &mut Dense(&moved), dropout).0
            });
        }
    }
}

/// With S(W) in forward and dgrad, kept weights and everything else have the gradient of the pruned
/// model.
#[test]
fn of_the_pruned_model() {
    let shape = shape(Activation::Gelu, Bias::Present);
    let weights = random_weights(&shape);
    let masks = Pruned::of(&shape, &weights).masks;
    let (_, gradients) = model(shape, &weights, &mut Pruned::of(&shape, &weights), 0.0);
    assert_eq!(masks.len(), 8);
    for (name, _) in parameters(&shape) {
        let mut pruned = Pruned::of(&shape, &weights);
        let kept = |at: usize| masks.get(&name).is_none_or(|mask| mask[at]);
        check(&name, &weights[&name], &gradients[&name], kept, |w| {
            pruned.weights.insert(name.clone(), w.clone());
            model(shape, &pruned.weights.clone(), &mut pruned, 0.0).0
        });
    }
}

//! Every optimizer over 100 steps: PyTorch's, the oracle's recurrences in f64, and the CPU kernel.

use std::collections::BTreeSet;

use ndarray::Array2;
use sparse24_core::{
    Mask,
    op::{Adam, MaskedDecay, Optimizer, StepState, UpdateRule},
};
use sparse24_cpu::optimizer::optimizer_step;
use sparse24_tests::oracle::{
    arithmetic::{Arithmetic, Matrix, Random, bound, distance},
    optimizer::Step,
};
use sparse24_train::{method::Method, nn::NoWeightDecay, optim::bias_corrections};

use super::fixture;

const STEPS: u32 = 100;
const RATE: f32 = 1.0 / 64.0;
const WEIGHT_DECAY: f32 = 1.0 / 8.0;

/// Numbers that f32 holds exactly, so that PyTorch reads the same ones in f64.
const ADAM: Adam = Adam { beta1: 0.875, beta2: 0.9375, epsilon: 1.0 / (1 << 27) as f32 };

/// The weights after 100 steps in f64 by `AdamW`, `Adam` and `SGD` of torch 2.15.0 on a CPU, and by
/// Lion as its authors' code for PyTorch has it (google/automl, `lion_pytorch.py`).
const TORCH: [(UpdateRule, [f64; 5]); 4] = [
    (
        UpdateRule::AdamW(ADAM),
        [
            -0.3065186489047886,
            -0.15380852283454285,
            -0.013506209155828008,
            0.16058202220612606,
            0.30606064036262,
        ],
    ),
    (
        UpdateRule::Adam(ADAM),
        [
            -0.2497326056298369,
            -0.11164638701924963,
            -0.009284522625400209,
            0.11475842821320216,
            0.2514448082424114,
        ],
    ),
    (
        UpdateRule::Sgd { momentum: 0.875 },
        [
            0.001631610898551206,
            0.0016071364705859785,
            0.0035396713899265783,
            -0.0029968684163220356,
            -0.003055540190772154,
        ],
    ),
    (
        UpdateRule::Lion { beta1: 0.875, beta2: 0.984375 },
        [
            0.2465625123671293,
            0.12271155938843845,
            0.004560081500727002,
            -0.09577321307346341,
            -0.2436635173967789,
        ],
    ),
];

/// w = (i - 2) / 2.
fn weights() -> Matrix {
    Matrix::from_shape_fn((1, 5), |(_, i)| (i as f64 - 2.0) / 2.0)
}

/// g = ((7 i + 3 t) mod 11 - 5) / 8 + w / 4.
fn gradient(step: u32, i: usize, w: f64) -> f64 {
    f64::from((7 * i as u32 + 3 * step) % 11) / 8.0 - 5.0 / 8.0 + w / 4.0
}

fn of_oracle(rule: UpdateRule, mut arithmetic: Arithmetic) -> Matrix {
    let [mut w, mut m, mut v] = [weights(), Matrix::zeros((1, 5)), Matrix::zeros((1, 5))];
    let betas = rule.adam().map_or([0.0; 2], |adam| [adam.beta1, adam.beta2].map(f64::from));
    for t in 1..=STEPS {
        let g = Matrix::from_shape_fn((1, 5), |(_, i)| gradient(t, i, w[[0, i]]));
        let step = Step {
            optimizer: Optimizer { rule, clip: f32::INFINITY },
            decay: MaskedDecay::None,
            rate: RATE.into(),
            corrections: betas.map(|beta| 1.0 - beta.powi(t as i32)),
        };
        let row = ([&mut w, &mut m, &mut v], &g, WEIGHT_DECAY.into(), |_| false);
        step.apply(&mut arithmetic, 1.0, [row].into_iter());
    }
    w
}

fn of_kernel(rule: UpdateRule) -> Vec<f64> {
    let mut w: Vec<f32> = weights().iter().map(|&w| w as f32).collect();
    let (mut m, mut v) = (vec![0.0; 5], vec![0.0; if rule.adam().is_some() { 5 } else { 0 }]);
    let optimizer = Optimizer { rule, clip: f32::INFINITY };
    for t in 1..=STEPS {
        let g: Vec<f32> =
            w.iter().enumerate().map(|(i, &w)| gradient(t, i, w.into()) as f32).collect();
        let state = StepState {
            learning_rate: RATE,
            bias_corrections: bias_corrections(&rule, t),
            ..StepState::default()
        };
        let (none, decay) = (MaskedDecay::None, WEIGHT_DECAY);
        optimizer_step(&mut w, &g, &mut m, &mut v, &optimizer, &state, decay, 1.0, none, None)
            .expect("one shape");
    }
    w.into_iter().map(f64::from).collect()
}

#[test]
fn a_hundred_steps_are_those_of_pytorch() {
    for (rule, torch) in TORCH {
        let exact = of_oracle(rule, Arithmetic::Exact);
        // A step rounds numbers below 4 at most sixteen times, and later steps pull towards 0.
        let most = f64::from(16 * STEPS) * 4.0 * f64::EPSILON;
        let difference = distance(&exact, torch);
        assert!(difference <= most, "{rule:?}: {difference} from PyTorch, {exact:.17}");
        let displaced: Vec<_> =
            (0..8).map(|seed| of_oracle(rule, Arithmetic::Displaced(Random(seed)))).collect();
        let (difference, most) = (distance(&exact, of_kernel(rule)), bound(&exact, &displaced));
        assert!(difference <= most, "{rule:?}: the kernel is {difference} away, bound {most}");
        assert!(most <= 1e-3, "{rule:?}: a bound of {most} shows nothing");
    }
}

/// Without momentum, SGD's step is linear in the gradient, so that it subtracts `lr lambda w` from
/// a pruned weight wherever masked decay acts; Adam's step is not.
#[test]
fn masked_decay_of_sgd_is_the_same_on_gradients_and_on_weights() {
    let mask = Mask::from_tiles(4, 8, vec![0x33cc, 0x5a5a]).expect("two tiles");
    let mut random = Random(4);
    let [w, g, m] = [1.0; 3].map(|scale| random.matrix([4, 8], scale).map(|&x| x as f32));
    let stepped = |rule: UpdateRule, decay: MaskedDecay| -> Array2<f32> {
        let [mut w, mut m, mut v] = [w.clone(), m.clone(), g.map(|g| g * g)];
        let has_v = rule.adam().is_some();
        let [w_, m_, v_] = [&mut w, &mut m, &mut v].map(|x| x.as_slice_mut().expect("row-major"));
        let state =
            StepState { learning_rate: 0.25, bias_corrections: [1.0; 2], ..StepState::default() };
        let (g, optimizer) = (g.as_slice().expect("row-major"), Optimizer { rule, clip: 1.0 });
        let v_ = if has_v { v_ } else { &mut [] };
        optimizer_step(w_, g, m_, v_, &optimizer, &state, 0.0, 1.0, decay, Some(&mask))
            .expect("one shape");
        w
    };
    for (rule, expected) in
        [(UpdateRule::Sgd { momentum: 0.0 }, true), (UpdateRule::AdamW(ADAM), false)]
    {
        let [none, gradients, weights] =
            [MaskedDecay::None, MaskedDecay::OnGradients(0.5), MaskedDecay::OnWeights(0.5)]
                .map(|decay| stepped(rule, decay));
        assert_ne!(none, gradients);
        assert_eq!(gradients == weights, expected, "{rule:?}");
    }
}

/// Each setting leaves out the parameters of a crammed BERT of the settings before it, and more.
#[test]
fn weight_decay_leaves_out_biases_gains_and_tables() {
    let recipe = fixture::crammed_bert(fixture::recipe(Method::dense()));
    let parameters = recipe.model.parameters().expect("a model");
    let left_out = |setting: NoWeightDecay| {
        let names = parameters.iter().filter(|spec| setting.covers(spec.role));
        names.map(|spec| &*spec.name).collect::<BTreeSet<_>>()
    };
    let mut before = BTreeSet::new();
    for (setting, endings) in [
        (NoWeightDecay::None, [].as_slice()),
        (NoWeightDecay::Biases, &[".bias"]),
        (NoWeightDecay::Vectors, &["norm.weight", "norm1.weight", "norm2.weight", "scale_factor"]),
        (NoWeightDecay::VectorsAndEmbeddings, &["word_embedding.weight"]),
    ] {
        let names = parameters.iter().map(|spec| &*spec.name);
        before.extend(names.filter(|name| endings.iter().any(|ending| name.ends_with(ending))));
        assert_eq!(left_out(setting), before, "{setting:?}");
    }
}

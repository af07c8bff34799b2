//! Every optimizer over 100 steps: PyTorch's, the oracle's recurrences in f64, and the CPU kernel.

use std::collections::BTreeSet;

use ndarray::{Array2, ArrayView2};
use sparse24_core::{
    Mask,
    op::{Adam, MaskedDecay, Optimizer, StepState, UpdateRule},
};
use sparse24_cpu::{average::moving_average, optimizer::optimizer_step};
use sparse24_tests::oracle::{
    arithmetic::{Arithmetic, Matrix, Random, bound, distance},
    optimizer::Step,
};
use sparse24_train::{method::Method, nn::NoWeightDecay, optim::bias_corrections, trainer::Recipe};

use super::fixture::{self, Noise};

const STEPS: u32 = 100;
const RATE: f32 = 1.0 / 64.0;
const WEIGHT_DECAY: f32 = 1.0 / 8.0;

/// Decay rate of the moving average.
const EMA_DECAY: f32 = 31.0 / 32.0;

/// Numbers that f32 holds exactly, so that PyTorch reads the same ones in f64.
const ADAM: Adam = Adam { beta1: 0.875, beta2: 0.9375, epsilon: 1.0 / (1 << 27) as f32 };

/// The weights after 100 steps in f64 by `AdamW`, `Adam` and `SGD` of torch 2.15.0 on a CPU, and by
/// Lion as its authors' code for PyTorch has it (google/automl, `lion_pytorch.py`); and their
/// moving averages by `ModelEma` of timm 1.0.31. PyTorch's `AveragedModel` with
/// `get_ema_multi_avg_fn` has the same averages if it is updated before the first step too.
const TORCH: [(UpdateRule, [f64; 5], [f64; 5]); 4] = [
    (
        UpdateRule::AdamW(ADAM),
        [
            -0.3065186489047886,
            -0.15380852283454285,
            -0.013506209155828008,
            0.16058202220612606,
            0.30606064036262,
        ],
        [
            -0.4659960726201098,
            -0.2372150681120545,
            -0.0203210471243003,
            0.2471268937388679,
            0.4658857584199847,
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
        [
            -0.42190475238744907,
            -0.19967787283361726,
            -0.016550987945650776,
            0.20515012252422488,
            0.42464323044794705,
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
        [
            -0.08575824412717539,
            -0.04253825558146175,
            -0.0030658525768178947,
            0.046266524779231204,
            0.08224849924957704,
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
        [
            -0.034229052910551554,
            -0.014338449911071624,
            -0.00567784862209077,
            0.03138974508517436,
            0.02718022381731937,
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

/// The weights and their moving averages.
fn of_oracle(rule: UpdateRule, mut arithmetic: Arithmetic) -> [Matrix; 2] {
    let [mut w, mut m, mut v] = [weights(), Matrix::zeros((1, 5)), Matrix::zeros((1, 5))];
    let (mut average, decay) = (w.clone(), f64::from(EMA_DECAY));
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
        average.zip_mut_with(&w, |average, &w| {
            let [kept, new] = [decay * *average, (1.0 - decay) * w];
            *average = arithmetic.rounded(kept + new, 2.0, kept.abs() + new.abs());
        });
    }
    [w, average]
}

/// The weights and their moving averages.
fn of_kernel(rule: UpdateRule) -> [Vec<f64>; 2] {
    let mut w: Vec<f32> = weights().iter().map(|&w| w as f32).collect();
    let mut average = weights().mapv(|w| w as f32);
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
        let w = ArrayView2::from_shape((1, 5), &w).expect("one row");
        moving_average(w, average.view_mut(), EMA_DECAY).expect("one shape");
    }
    [w, average.into_iter().collect()].map(|values| values.into_iter().map(f64::from).collect())
}

#[test]
fn a_hundred_steps_are_those_of_pytorch() {
    for (rule, weights, averages) in TORCH {
        let exact = of_oracle(rule, Arithmetic::Exact);
        let displaced = [0, 1, 2, 3, 4, 5, 6, 7]
            .map(|seed| of_oracle(rule, Arithmetic::Displaced(Random(seed))));
        let found = of_kernel(rule);
        for (at, torch) in [weights, averages].into_iter().enumerate() {
            let what = format!("{rule:?}, {}", ["weights", "averages"][at]);
            // A step rounds numbers below 4 at most sixteen times, and later steps pull towards 0.
            let most = f64::from(16 * STEPS) * 4.0 * f64::EPSILON;
            let difference = distance(&exact[at], torch);
            assert!(difference <= most, "{what}: {difference} from PyTorch, {:.17}", exact[at]);
            let others: Vec<_> = displaced.iter().map(|run| run[at].clone()).collect();
            let (difference, most) =
                (distance(&exact[at], found[at].iter().copied()), bound(&exact[at], &others));
            assert!(difference <= most, "{what}: the kernel is {difference} away, bound {most}");
            assert!(most <= 1e-3, "{what}: a bound of {most} shows nothing");
        }
    }
}

/// The average of every parameter, to the bit, from its first weights on.
#[test]
fn averages_follow_the_weights_of_a_run() {
    let recipe = Recipe { ema_decay: Some(EMA_DECAY), ..fixture::recipe(Method::dense()) };
    let noise = Noise::of(&recipe);
    let mut trainer = fixture::start(&recipe);
    let first = fixture::states(&mut trainer);
    let mut expected: Vec<_> = first.into_iter().map(|state| state.weight).collect();
    for _ in 0..fixture::STEPS {
        fixture::step(&mut trainer, &noise);
        for (state, expected) in fixture::states(&mut trainer).iter().zip(&mut expected) {
            for (average, w) in expected.iter_mut().zip(&state.weight) {
                *average = EMA_DECAY * *average + (1.0 - EMA_DECAY) * w;
            }
            assert_eq!(state.average, *expected, "{}", state.name);
        }
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

//! Optimizer steps of a sparse method: masks, sampled gradients, accumulation, clipping, masked
//! decay, the optimizer, the learning rate, refreshes and the switch.
//!
//! A [`Part`] can be left out, to test that the comparison notices.

use std::collections::BTreeMap;

use sparse24_tests::oracle::{
    approximate_probabilities,
    arithmetic::{Arithmetic, Matrix, Tensors},
    canonical, largest_two,
    layers::Address,
    optimizer::Step,
};
use sparse24_train::{
    model::{DeitSpec, Gpt2Spec, ModelSpec, Sparsify, TransformerSpec},
    nn::{BatchShape, NoWeightDecay},
    objective::Batch,
    optim::{Adam, MaskedDecay, UpdateRule},
    schedule::{Decay, GradientAccumulation},
    trainer::Recipe,
};

use super::pass::{Operands, Pass, parameters};

/// The model without a part of its regularization.
fn without(model: &ModelSpec, part: Option<Part>) -> ModelSpec {
    match (model, part) {
        (ModelSpec::Deit(spec), Some(Part::DropPath)) => {
            ModelSpec::Deit(DeitSpec { drop_path: 0.0, ..*spec })
        }
        (ModelSpec::Deit(spec), Some(Part::Smoothing)) => {
            ModelSpec::Deit(DeitSpec { label_smoothing: 0.0, ..*spec })
        }
        (ModelSpec::Transformer(spec), Some(Part::Smoothing)) => {
            ModelSpec::Transformer(TransformerSpec { label_smoothing: 0.0, ..*spec })
        }
        _ => model.clone(),
    }
}

/// The GPT-2 of a recipe.
pub(crate) fn gpt2(recipe: &Recipe) -> Gpt2Spec {
    match recipe.model {
        ModelSpec::Gpt2(spec) => spec,
        ref other => panic!("a GPT-2, not {other:?}"),
    }
}

/// A sparse method, restated in numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rules {
    pub(crate) pattern: Pattern,
    /// Whether dX = dZ S(W), or dX = dZ W.
    pub(crate) dgrad: Dgrad,
    pub(crate) sample: Sample,
    pub(crate) decay: MaskedDecay,
    /// Masks are searched again after steps that are multiples of this.
    pub(crate) interval: u32,
    /// The last sparse step.
    pub(crate) switch: u32,
    /// Dense steps before the first sparse one. If there are any, Adam's second moment keeps the
    /// value that they leave.
    pub(crate) dense_first: u32,
    pub(crate) without: Option<Part>,
}

/// Which weights are kept.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Pattern {
    /// The best of 90 patterns per tile.
    Transposable,
    /// The two largest of every four in a row.
    RowWise,
    /// The same, with magnitudes reduced by the second-smallest of the four, times the scale of the
    /// weight.
    Soft,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Dgrad {
    Pruned,
    Dense,
    /// Pruned again to two of every four rows, in the weight's order of rows.
    Permuted,
}

/// The output gradient that the weight gradient reads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Sample {
    All,
    Mvue,
    Approximate,
}

/// A part of the method.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Part {
    Mask,
    Mvue,
    Decay,
    Refresh,
    Switch,
    Clipping,
    WeightDecay,
    Dropout,
    DropPath,
    Smoothing,
    Mixing,
}

/// Kept elements are true.
pub(crate) type Masks = BTreeMap<String, Vec<bool>>;

/// The samples of dZ^T `[r, p]`, by (micro-step, number of the weight).
pub(crate) type Samples = BTreeMap<(u32, u32), Matrix>;

/// A run in f64.
#[derive(Debug, Clone)]
pub(crate) struct Run {
    recipe: Recipe,
    rules: Rules,
    arithmetic: Arithmetic,
    pub(crate) weights: Tensors,
    pub(crate) first_moments: Tensors,
    pub(crate) second_moments: Tensors,
    pub(crate) masks: Masks,
    /// Orders of rows, given: core chooses them.
    pub(crate) orders: BTreeMap<String, Vec<usize>>,
    scales: BTreeMap<String, f64>,
    step: u32,
}

/// The outcome of one step.
#[derive(Debug, Clone)]
pub(crate) struct Outcome {
    pub(crate) loss: f64,
    pub(crate) norm: f64,
    pub(crate) learning_rate: f64,
    pub(crate) samples: Samples,
}

impl Run {
    /// A run at step 0, with masks searched in the initial weights.
    pub(crate) fn new(
        recipe: &Recipe,
        rules: Rules,
        weights: Tensors,
        arithmetic: Arithmetic,
    ) -> Self {
        let zeros: Tensors =
            weights.iter().map(|(name, w)| (name.clone(), Matrix::zeros(w.dim()))).collect();
        let (first_moments, second_moments) = (zeros.clone(), zeros);
        let recipe = recipe.clone();
        let (masks, orders, scales) = (Masks::new(), BTreeMap::new(), BTreeMap::new());
        let mut run = Self {
            recipe,
            rules,
            arithmetic,
            weights,
            first_moments,
            second_moments,
            masks,
            orders,
            scales,
            step: 0,
        };
        run.search();
        if rules.pattern == Pattern::Soft {
            run.scales = run
                .masks
                .iter()
                .map(|(name, mask)| (name.clone(), scale(&run.weights[name], mask)))
                .collect();
        }
        run
    }

    /// Step t = 1, 2, ... on its micro-batches.
    pub(crate) fn train(&mut self, batches: &[Batch]) -> Outcome {
        self.step += 1;
        let (step, rules) = (self.step, self.rules);
        let sparse = step > rules.dense_first
            && (step <= rules.switch || rules.without == Some(Part::Switch));
        let batch = self.recipe.batch;
        let mut gradients = Tensors::new();
        let mut loss = 0.0;
        let masks = if sparse && rules.without != Some(Part::Mask) {
            self.masks.clone()
        } else {
            Masks::new()
        };
        let sample =
            if sparse && rules.without != Some(Part::Mvue) { rules.sample } else { Sample::All };
        let mut operands = self.operands(masks, sample);
        let model = without(&self.recipe.model, rules.without);
        for (micro_step, micro_batch) in batches.iter().enumerate() {
            let targets = (micro_batch.counted * batches.len()) as f64;
            let mut micro_batch = micro_batch.clone();
            if rules.without == Some(Part::Mixing) {
                micro_batch.shares.fill(1.0);
            }
            let mut pass = Pass {
                arithmetic: &mut self.arithmetic,
                spec: &model,
                weights: &self.weights,
                operands: &mut operands,
                batch,
                dropout: if rules.without == Some(Part::Dropout) {
                    0.0
                } else {
                    f64::from(self.recipe.dropout)
                },
                address: Address { seed: self.recipe.seed, step, micro_step: micro_step as u32 },
            };
            loss += pass.train(&micro_batch, 1.0 / targets, &mut gradients) / targets;
        }
        let samples = operands.samples;
        let norm = gradients.values().flat_map(|g| g.iter()).map(|g| g * g).sum::<f64>().sqrt();
        let norm = self.arithmetic.rounded(norm, 1.0, norm);
        let learning_rate = self.learning_rate();
        self.update(&gradients, norm, learning_rate, sparse);
        let due = sparse && step % rules.interval == 0 && rules.without != Some(Part::Refresh);
        if due || step == rules.dense_first {
            self.search();
        }
        Outcome { loss, norm, learning_rate, samples }
    }

    /// The mean loss with the weights of the last step's phase.
    pub(crate) fn evaluate(&mut self, all: &Batch) -> f64 {
        let sparse = self.step > self.rules.dense_first && self.step <= self.rules.switch;
        let masks = if sparse { self.masks.clone() } else { Masks::new() };
        let mut operands = self.operands(masks, Sample::All);
        let sequence_length = self.recipe.batch.sequence_length;
        let batch = BatchShape { size: all.targets.len() / sequence_length, sequence_length };
        let mut pass = Pass {
            arithmetic: &mut self.arithmetic,
            spec: &self.recipe.model,
            weights: &self.weights,
            operands: &mut operands,
            batch,
            dropout: 0.0,
            address: Address { seed: self.recipe.seed, step: self.step, micro_step: 0 },
        };
        pass.loss(all) / all.counted as f64
    }

    /// Searches the masks of the present weights.
    fn search(&mut self) {
        let search = match self.rules.pattern {
            Pattern::Transposable => transposable,
            Pattern::RowWise | Pattern::Soft => row_wise,
        };
        self.masks = sparsified(&self.recipe.model)
            .map(|(name, _)| (name.clone(), search(&self.weights[&name])))
            .collect();
    }

    fn operands(&self, masks: Masks, sample: Sample) -> Pruned {
        let (weights, numbers) = (self.weights.clone(), sparsified(&self.recipe.model).collect());
        let (orders, scales) = (self.orders.clone(), self.scales.clone());
        Pruned {
            weights,
            masks,
            dgrad: self.rules.dgrad,
            orders,
            scales,
            numbers,
            sample,
            samples: Samples::new(),
        }
    }

    /// Linear warm-up to the peak, then the schedule's decay to the floor.
    fn learning_rate(&mut self) -> f64 {
        let schedule = self.recipe.schedule;
        let (peak, floor) = (f64::from(schedule.peak), f64::from(schedule.floor));
        let (t, warmup) = (f64::from(self.step), f64::from(schedule.warmup_steps));
        let span = f64::from(schedule.decay_steps) - warmup;
        let start = f64::from(schedule.warmup_start);
        let rate = if t <= warmup && schedule.decay != Decay::Triangle {
            if start > 0.0 {
                start + (peak - start) * (t - 1.0) / warmup
            } else {
                peak * t / (warmup + 1.0)
            }
        } else if t - 1.0 > f64::from(schedule.decay_steps) {
            floor
        } else {
            let left = 1.0 - (t - 1.0 - warmup) / span;
            let factor = match schedule.decay {
                Decay::Cosine => (1.0 - (std::f64::consts::PI * left).cos()) / 2.0,
                Decay::Linear => left,
                Decay::Wsd => f64::min(1.0, left * span / f64::from(schedule.cooldown_steps)),
                Decay::InverseSqrt => (warmup / (t - 1.0)).sqrt(),
                Decay::Triangle => {
                    let sizes = accumulation(&self.recipe.gradient_accumulation);
                    let done: u32 = sizes[..self.step as usize].iter().sum();
                    let x = f64::from(done - 1) / f64::from(sizes.iter().sum::<u32>());
                    f64::min(0.25 + x, 4.0 - 4.0 * x)
                }
            };
            floor + (peak - floor) * factor
        };
        self.arithmetic.rounded(rate, 1.0, rate)
    }

    /// Clipping, masked decay, the optimizer and its weight decay.
    fn update(&mut self, gradients: &Tensors, norm: f64, rate: f64, sparse: bool) {
        let (a, rules, mut optimizer) = (&mut self.arithmetic, self.rules, self.recipe.optimizer);
        if rules.without == Some(Part::Clipping) {
            optimizer.clip = f32::INFINITY;
        }
        let frozen = rules.dense_first > 0 && sparse;
        let corrected = [self.step, if frozen { rules.dense_first } else { self.step }];
        let adam = optimizer.rule.adam();
        let betas = adam.map_or([0.0; 2], |adam| [adam.beta1, adam.beta2]);
        let corrections = [(betas[0], corrected[0]), (betas[1], corrected[1])]
            .map(|(beta, step)| 1.0 - f64::from(beta).powi(step as i32))
            .map(|c| a.rounded(c, 2.0, c));
        if let Some(adam) = adam.filter(|_| frozen) {
            optimizer.rule = UpdateRule::AdamW(Adam { beta2: 1.0, ..adam });
        }
        let states = self.weights.iter_mut().zip(self.first_moments.values_mut());
        let states = states.zip(self.second_moments.values_mut());
        let Recipe { weight_decay, no_weight_decay, .. } = self.recipe;
        let (masks, decay) = (&self.masks, f64::from(weight_decay));
        let parameters = states.map(|(((name, w), m), v)| {
            let mask = masks.get(name).filter(|_| sparse && rules.without != Some(Part::Decay));
            // The output layer of a number has one row.
            let matrix = w.nrows() > 1 || ["score.weight", "classifier.weight"].contains(&&**name);
            let is_table = ["wte.weight", "wpe.weight"].contains(&&**name);
            let decays = match no_weight_decay {
                NoWeightDecay::None => true,
                NoWeightDecay::Biases => !name.ends_with("bias"),
                NoWeightDecay::Vectors => matrix,
                NoWeightDecay::VectorsAndEmbeddings => matrix && !is_table,
            };
            let decays = decays && rules.without != Some(Part::WeightDecay);
            let pruned = move |at: usize| mask.is_some_and(|kept| !kept[at]);
            ([w, m, v], &gradients[name], if decays { decay } else { 0.0 }, pruned)
        });
        Step { optimizer, decay: rules.decay, rate, corrections }.apply(a, norm, parameters);
    }
}

/// The micro-batches of every step of a run.
pub(crate) fn accumulation(of: &GradientAccumulation) -> Vec<u32> {
    let (first, last) = (of.first.get(), of.last.get());
    let sizes = f64::from(last - first + 1);
    let mean = (first..=last).map(|size| 1.0 / f64::from(size)).sum::<f64>() / sizes;
    let all = (f64::from(of.steps) / mean).round();
    let mut before = 0;
    let size = |_| {
        let growth = (f64::from(before) * sizes / all).floor() as u32;
        let size = last.min(first + growth);
        before += size;
        size
    };
    (0..of.steps).map(size).collect()
}

/// The operands of a step: pruned where there is a mask.
#[derive(Debug, Clone)]
pub(crate) struct Pruned {
    pub(crate) weights: Tensors,
    pub(crate) masks: Masks,
    dgrad: Dgrad,
    orders: BTreeMap<String, Vec<usize>>,
    scales: BTreeMap<String, f64>,
    numbers: BTreeMap<String, u32>,
    sample: Sample,
    samples: Samples,
}

impl Pruned {
    /// Transposable masks of these weights in forward and dgrad, and nothing sampled.
    pub(crate) fn of(spec: &ModelSpec, weights: &Tensors) -> Self {
        let masks = sparsified(spec)
            .map(|(name, _)| (name.clone(), transposable(&weights[&name])))
            .collect();
        let (weights, numbers, samples) = (weights.clone(), BTreeMap::new(), Samples::new());
        let (orders, scales) = (BTreeMap::new(), BTreeMap::new());
        Self {
            weights,
            masks,
            dgrad: Dgrad::Pruned,
            orders,
            scales,
            numbers,
            sample: Sample::All,
            samples,
        }
    }
}

impl Operands for Pruned {
    fn forward(&self, name: &str) -> Matrix {
        let mut w = self.weights[name].clone();
        if let Some(mask) = self.masks.get(name) {
            if let Some(scale) = self.scales.get(name) {
                w = softened(&w).mapv(|w| w * scale);
            }
            w.iter_mut().zip(mask).filter(|(_, kept)| !**kept).for_each(|(w, _)| *w = 0.0);
        }
        w
    }

    fn dgrad(&self, name: &str) -> Matrix {
        match (self.dgrad, self.orders.get(name).filter(|_| self.masks.contains_key(name))) {
            (Dgrad::Dense, _) => self.weights[name].clone(),
            (Dgrad::Permuted, Some(order)) => two_of_four_rows(self.forward(name), order),
            _ => self.forward(name),
        }
    }

    fn wgrad(&mut self, a: &mut Arithmetic, address: Address, name: &str, dz: &Matrix) -> Matrix {
        let Some(&number) = self.numbers.get(name).filter(|_| self.sample != Sample::All) else {
            return dz.clone();
        };
        let (p, r) = dz.dim();
        let mut sampled = Matrix::zeros((p, r));
        for i in 0..r {
            for j in 0..p.div_ceil(4) {
                let x =
                    [0, 1, 2, 3].map(|at| if 4 * j + at < p { dz[[4 * j + at, i]] } else { 0.0 });
                let call = (i * p.div_ceil(16) + j / 4) as u32;
                let [u, v] =
                    [4, 5].map(|purpose| address.uniform(purpose << 24 | number, call, j % 4));
                let (pair, values) =
                    if self.sample == Sample::Mvue { mvue(x, u) } else { approximate(x, u, v) };
                for (&at, value) in pair.iter().zip(values).filter(|(at, _)| 4 * j + **at < p) {
                    sampled[[4 * j + at, i]] = a.rounded(value, 8.0, value);
                }
            }
        }
        self.samples.insert((address.micro_step, number), sampled.t().to_owned());
        sampled
    }
}

/// The weights that may be pruned, with the number that addresses their streams: their index among
/// the parameters.
pub(crate) fn sparsified(spec: &ModelSpec) -> impl Iterator<Item = (String, u32)> {
    let sparsify = match spec {
        ModelSpec::Gpt2(spec) => spec.sparsify,
        ModelSpec::Bert(spec) | ModelSpec::CrammedBert(spec) => spec.sparsify,
        ModelSpec::Deit(spec) => spec.sparsify,
        ModelSpec::Transformer(spec) => spec.sparsify,
        other => panic!("the oracle has no {other:?}"),
    };
    let attention = sparsify == Sparsify::FfnAndAttention;
    let named = parameters(spec).into_iter().zip(0..).map(|((name, _), number)| (name, number));
    named.filter(move |(name, _)| {
        let is_of_attention = name.contains(".att") || name.contains("_attn.");
        let is_linear = [
            ".fc1.",
            ".fc2.",
            "_attn.",
            ".mlp.",
            ".ffn.",
            ".attn.",
            ".self.",
            "intermediate.dense.",
            ".output.dense.",
        ]
        .iter()
        .any(|part| name.contains(part));
        name.ends_with(".weight") && is_linear && (attention || !is_of_attention)
    })
}

/// The best pattern of every tile.
fn transposable(w: &Matrix) -> Vec<bool> {
    let (rows, columns) = w.dim();
    let mut mask = vec![false; rows * columns];
    for (i, j) in (0..rows / 4).flat_map(|i| (0..columns / 4).map(move |j| (i, j))) {
        let at = |at: usize| [4 * i + at / 4, 4 * j + at % 4];
        let kept = canonical(&std::array::from_fn(|e| w[at(e)] as f32));
        for [row, column] in (0..16).filter(|e| kept >> e & 1 == 1).map(at) {
            mask[row * columns + column] = true;
        }
    }
    mask
}

/// The two largest of every four in a row.
fn row_wise(w: &Matrix) -> Vec<bool> {
    let values: Vec<f32> = w.iter().map(|&w| w as f32).collect();
    let groups = values.as_chunks::<4>().0.iter();
    groups.flat_map(|&x| [0, 1, 2, 3].map(|at| largest_two(x).contains(&at))).collect()
}

/// Every magnitude, reduced by the second-smallest of its four in a row.
fn softened(w: &Matrix) -> Matrix {
    let mut out = w.clone();
    for group in out.as_slice_mut().expect("row-major").chunks_mut(4) {
        let mut magnitudes: Vec<f64> = group.iter().map(|w| w.abs()).collect();
        magnitudes.sort_by(f64::total_cmp);
        group.iter_mut().for_each(|w| *w = (w.abs() - magnitudes[1]).max(0.0).copysign(*w));
    }
    out
}

/// The factor that brings the thresholded weights nearest to the weights.
fn scale(w: &Matrix, mask: &[bool]) -> f64 {
    let thresholded = softened(w);
    let pairs =
        || w.iter().zip(&thresholded).zip(mask).filter(|(_, kept)| **kept).map(|(pair, _)| pair);
    pairs().map(|(w, s)| w * s).sum::<f64>() / pairs().map(|(_, s)| s * s).sum::<f64>()
}

/// The two largest magnitudes of every four rows in this order.
fn two_of_four_rows(mut w: Matrix, order: &[usize]) -> Matrix {
    for group in order.chunks(4) {
        for column in 0..w.ncols() {
            let mut rows = group.to_vec();
            rows.sort_by(|&a, &b| w[[b, column]].abs().total_cmp(&w[[a, column]].abs()));
            rows[2..].iter().for_each(|&row| w[[row, column]] = 0.0);
        }
    }
    w
}

/// Systematic sampling with inclusion probabilities min(1, |x|/r): the kept pair and its values.
fn mvue(x: [f64; 4], u: f64) -> ([usize; 2], [f64; 2]) {
    let a = x.map(f64::abs);
    let largest = a.iter().copied().fold(0.0, f64::max);
    let nonzero: Vec<usize> = (0..4).filter(|&i| a[i] > 0.0).collect();
    if nonzero.len() < 3 {
        return few(x, &nonzero);
    }
    let s: f64 = a.iter().sum();
    let rest: f64 = s - largest;
    let r = (s / 2.0).min(rest);
    let certain: Vec<usize> = (0..4).filter(|&i| a[i] == largest && rest <= s / 2.0).collect();
    let drawn: Vec<usize> = nonzero.into_iter().filter(|i| !certain.contains(i)).collect();
    let at = |t: f64| {
        let mut running = 0.0;
        drawn.iter().copied().find(|&i| {
            running += a[i];
            t < running
        })
    };
    let last = drawn[drawn.len() - 1];
    let first = at(u * r).unwrap_or(last);
    let second = certain.first().copied().unwrap_or_else(|| at(u * r + r).unwrap_or(last));
    let pair = [first.min(second), first.max(second)];
    (pair, pair.map(|i| a[i].max(r).copysign(x[i])))
}

/// Element i first with probability a_i/s, then another in proportion; the value is x_i over its
/// inclusion probability.
fn approximate(x: [f64; 4], u: f64, v: f64) -> ([usize; 2], [f64; 2]) {
    let a = x.map(f64::abs);
    let nonzero: Vec<usize> = (0..4).filter(|&i| a[i] > 0.0).collect();
    if nonzero.len() < 3 {
        return few(x, &nonzero);
    }
    let draw = |among: &[usize], u: f64| {
        let t = u * among.iter().map(|&i| a[i]).sum::<f64>();
        let mut running = 0.0;
        among.iter().copied().find(|&i| {
            running += a[i];
            t < running
        })
    };
    let first = draw(&nonzero, u).unwrap_or(nonzero[nonzero.len() - 1]);
    let others: Vec<usize> = nonzero.iter().copied().filter(|&i| i != first).collect();
    let second = draw(&others, v).unwrap_or(others[others.len() - 1]);
    let pair = [first.min(second), first.max(second)];
    (pair, pair.map(|i| x[i] / approximate_probabilities(a)[i]))
}

/// At most two nonzeros are kept unchanged; a single one is paired with its neighbour.
fn few(x: [f64; 4], nonzero: &[usize]) -> ([usize; 2], [f64; 2]) {
    let pair = match *nonzero {
        [first, second] => [first, second],
        [only] => [only.min(only ^ 1), only.max(only ^ 1)],
        _ => [0, 1],
    };
    (pair, pair.map(|i| x[i]))
}

//! Whole training steps of `shakespeare-char-cpu` and `bert-tiny-cpu` against their dense products
//! alone, alternately: dense, fst, and fst with sparse attention projections.
//!
//! The products are those of the model's linear layers and head, at their shapes, through the
//! kernel that the trainer uses. Batches are random tokens, without files.

use std::{hint::black_box, time::Instant};

use ndarray::Array2;
use sparse24_core::op::Accumulate;
use sparse24_cpu::{gemm::matmul, on_threads, threads};
use sparse24_run::{
    config::{Config, ModelKind, preset},
    run::masked_lm,
};
use sparse24_train::{
    backend::{Arithmetic, cpu::CpuBackend},
    model::Sparsify,
    nn::BatchShape,
    objective::{Batch, DataError, MaskedLm, Objective, most_targets},
    trainer::{FlipSampling, Trainer},
};

const ROUNDS: usize = 150;

/// Random tokens, each the target of the one before it, or masked.
struct Random {
    shape: BatchShape,
    vocabulary: u32,
    masked: Option<MaskedLm>,
}

impl Objective for Random {
    fn fill(&self, step: u32, micro_step: u32, batch: &mut Batch) -> Result<(), DataError> {
        let p = self.shape.tokens() as u32;
        let token = |at: u32| (at * 7919 + step * 104_729 + micro_step) % self.vocabulary;
        batch.clear();
        batch.tokens.extend((0..p).map(token));
        match &self.masked {
            Some(masked) => masked.mask(step, micro_step, self.shape.sequence_length, batch),
            None => {
                batch.targets.extend((1..p + 1).map(token));
                batch.counted = batch.targets.len();
            }
        }
        Ok(())
    }
}

/// X `[p, q]`, W `[r, q]` and buffers for Z, dX and dW.
struct Products {
    x: Array2<f32>,
    w: Array2<f32>,
    z: Array2<f32>,
    dx: Array2<f32>,
    dw: Array2<f32>,
}

impl Products {
    fn new(p: usize, [r, q]: [usize; 2]) -> Self {
        let filled = |rows, columns| {
            Array2::from_shape_fn((rows, columns), |(i, j)| ((i * 31 + j * 17) % 13) as f32 - 6.0)
        };
        Self {
            x: filled(p, q),
            w: filled(r, q),
            z: filled(p, r),
            dx: filled(p, q),
            dw: filled(r, q),
        }
    }

    /// Forward, dgrad and wgrad.
    fn run(&mut self) {
        matmul(self.x.view(), self.w.t(), self.z.view_mut(), Accumulate::Overwrite)
            .expect("the shapes agree");
        matmul(self.z.view(), self.w.view(), self.dx.view_mut(), Accumulate::Overwrite)
            .expect("the shapes agree");
        matmul(self.z.t(), self.x.view(), self.dw.view_mut(), Accumulate::Overwrite)
            .expect("the shapes agree");
        black_box(&self.dw);
    }
}

fn main() {
    on_threads(0, || ["shakespeare-char-cpu", "bert-tiny-cpu"].into_iter().for_each(measure))
        .expect("the system starts threads");
}

fn measure(name: &str) {
    let config = preset::find(name).expect("the preset exists");
    let Config { model, batch, .. } = &config;
    let (d, f) = (model.d_model, model.d_ff);
    let shape = BatchShape { size: batch.size, sequence_length: model.sequence_length };
    let p = shape.tokens();
    let vocabulary = if model.kind == ModelKind::Bert { 257 } else { 65 };
    let recipe = |method: &str, sparsify| {
        let mut config = config.clone();
        config.method.name = method.to_owned();
        config.model.sparsify = sparsify;
        config.recipe(vocabulary).expect("the preset is possible")
    };
    let masked = masked_lm(&recipe("dense", Sparsify::Ffn), None);
    let (of_head, head): (usize, &[[usize; 2]]) = match &masked {
        Some(masked) => (most_targets(masked.probability, p), &[[d, d], [vocabulary, d]]),
        None => (p, &[[vocabulary, d]]),
    };
    let blocks = (0..model.layers).flat_map(|_| [[3 * d, d], [d, d], [f, d], [d, f]]);
    let mut layers: Vec<Products> = blocks
        .map(|shape| Products::new(p, shape))
        .chain(head.iter().map(|&shape| Products::new(of_head, shape)))
        .collect();
    let data = Random { shape, vocabulary: vocabulary as u32, masked };
    let contestants = [
        ("dense step", "dense", Sparsify::Ffn),
        ("fst step", "fst", Sparsify::Ffn),
        ("... attention", "fst", Sparsify::FfnAndAttention),
    ];
    let mut trainers = contestants.map(|(_, method, sparsify)| {
        Trainer::new(Box::new(CpuBackend::new(Arithmetic::F32)), recipe(method, sparsify))
            .expect("the preset can be trained")
    });

    let mut times = [const { Vec::new() }; 4];
    for _ in 0..ROUNDS {
        let began = Instant::now();
        layers.iter_mut().for_each(Products::run);
        times[0].push(began.elapsed().as_secs_f64() * 1e3);
        for (trainer, times) in trainers.iter_mut().zip(&mut times[1..]) {
            let began = Instant::now();
            let outcome =
                trainer.train_step(&data, FlipSampling::Skip).expect("the step is finite");
            times.push(began.elapsed().as_secs_f64() * 1e3);
            assert!(outcome.loss.is_finite(), "a step that is timed must be a step");
        }
    }
    let quantile = |times: &mut Vec<f64>, share: f64| {
        times.sort_by(f64::total_cmp);
        times[(share * (times.len() - 1) as f64) as usize]
    };
    println!(
        "{name}, {} threads, {ROUNDS} interleaved rounds, ms: p10, median, p90, median over the \
         products'",
        threads()
    );
    let products = quantile(&mut times[0], 0.5);
    let names = contestants.map(|(name, ..)| name);
    for (name, times) in ["products alone"].into_iter().chain(names).zip(&mut times) {
        let [low, median, high] = [0.1, 0.5, 0.9].map(|share| quantile(times, share));
        println!("{name:<15} {low:7.2} {median:7.2} {high:7.2} {:6.2}", median / products);
    }
}

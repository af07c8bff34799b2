//! A whole training step of `shakespeare-char-cpu` against its products alone, in turns, dense and
//! fst.
//!
//! The products are those of the model's linear layers and head, at their shapes, through the
//! kernel that the trainer uses. Deliberately absent: files; batches are random tokens.

use std::{hint::black_box, time::Instant};

use ndarray::Array2;
use sparse24_core::op::Accumulate;
use sparse24_cpu::{gemm::matmul, on_threads, threads};
use sparse24_run::config::preset;
use sparse24_train::{
    backend::{Arithmetic, cpu::CpuBackend},
    objective::{Batch, DataError, Objective},
    trainer::{FlipSampling, Trainer},
};

const VOCABULARY: usize = 65;
const ROUNDS: usize = 150;

struct Random;

impl Objective for Random {
    fn fill(&self, step: u32, micro_step: u32, batch: &mut Batch) -> Result<(), DataError> {
        let token = |at: u32| (at * 7919 + step * 104_729 + micro_step) % VOCABULARY as u32;
        batch.clear();
        batch.tokens.extend((0..12 * 64).map(token));
        batch.targets.extend((1..12 * 64 + 1).map(token));
        batch.counted = batch.targets.len();
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
    on_threads(0, measure).expect("the system starts threads");
}

fn measure() {
    let config = preset::find("shakespeare-char-cpu").expect("the preset exists");
    let (d, f, p) =
        (config.model.d_model, config.model.d_ff, config.batch.size * config.model.sequence_length);
    let mut layers: Vec<Products> = (0..config.model.layers)
        .flat_map(|_| [[3 * d, d], [d, d], [f, d], [d, f]])
        .chain([[VOCABULARY, d]])
        .map(|shape| Products::new(p, shape))
        .collect();
    let mut trainers = ["dense", "fst"].map(|method| {
        let mut config = config.clone();
        config.method.name = method.to_owned();
        let recipe = config.recipe(VOCABULARY).expect("the preset is possible");
        Trainer::new(Box::new(CpuBackend::new(Arithmetic::F32)), recipe)
            .expect("the preset can be trained")
    });

    let mut times = [Vec::new(), Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        let began = Instant::now();
        layers.iter_mut().for_each(Products::run);
        times[0].push(began.elapsed().as_secs_f64() * 1e3);
        for (trainer, times) in trainers.iter_mut().zip(&mut times[1..]) {
            let began = Instant::now();
            let outcome =
                trainer.train_step(&Random, FlipSampling::Skip).expect("the step is finite");
            times.push(began.elapsed().as_secs_f64() * 1e3);
            assert!(outcome.loss.is_finite(), "a step that is timed must be a step");
        }
    }
    let quantile = |times: &mut Vec<f64>, share: f64| {
        times.sort_by(f64::total_cmp);
        times[(share * (times.len() - 1) as f64) as usize]
    };
    println!(
        "{} threads, {ROUNDS} rounds in turns, ms: p10, median, p90, median over the products'",
        threads()
    );
    let products = quantile(&mut times[0], 0.5);
    for (name, times) in ["products alone", "dense step", "fst step"].into_iter().zip(&mut times) {
        let [low, median, high] = [0.1, 0.5, 0.9].map(|share| quantile(times, share));
        println!("{name:<15} {low:7.2} {median:7.2} {high:7.2} {:6.2}", median / products);
    }
}

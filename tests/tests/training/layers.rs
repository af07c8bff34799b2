//! The layers of the trainer on the CPU backend against the f64 oracle: outputs and gradients,
//! every activation, with and without biases, ragged shapes, dropout, accumulation.
//!
//! Outputs begin as NaN, so that an element which nothing wrote fails. The bounds are those of
//! `oracle::arithmetic`.

use sparse24_core::philox::{Purpose, Site};
use sparse24_train::{
    backend::{
        Activation, Arithmetic as Operands, AttentionMask, Backend, Beta, DType, Region, StepState,
        Tensor, cpu::CpuBackend,
    },
    method::{DgradOperand, GradientOperand, Phase},
    nn::{
        Pass,
        attention::{Attention, AttentionActivations},
        embedding::{Embedding, HeadBuffers},
        ffn::{Ffn, FfnActivations},
        linear24::{Bias, Linear24, LinearSpec},
        norm::{Norm, NormActivations},
        parameter::Parameters,
    },
};

use super::{
    fixture,
    oracle::{
        arithmetic::{Arithmetic, Matrix, Random, Tensors, bound, distance},
        layers::{self, Address, Dropout, Heads},
    },
};

const ADDRESS: Address = Address { seed: 77, step: 5, micro_step: 2 };

/// A backend with parameters, activations and a phase, and the random numbers that fill them.
struct Bench {
    backend: CpuBackend,
    parameters: Parameters,
    phase: Phase,
    random: Random,
    /// What the parameters hold.
    weights: Tensors,
    /// What their gradients held before the backward.
    before: Tensors,
}

impl Bench {
    fn new(seed: u64) -> Self {
        Self::with(seed, Operands::F32)
    }

    fn with(seed: u64, operands: Operands) -> Self {
        let mut backend = CpuBackend::new(operands);
        let Address { seed: of_run, step, micro_step } = ADDRESS;
        backend
            .set_step(StepState {
                seed: of_run,
                step,
                micro_step,
                learning_rate: 0.0,
                bias_corrections: [1.0; 2],
                loss_scale: 1.0,
            })
            .expect("the CPU does not refuse");
        let (parameters, weights, before) = (Parameters::default(), Tensors::new(), Tensors::new());
        let phase = fixture::phase(None, DgradOperand::Dense, GradientOperand::Dense);
        Self { backend, parameters, phase, random: Random(seed), weights, before }
    }

    /// Random weights, and gradients that are NaN, or random where they will be added to.
    fn fill(&mut self, beta: Beta) {
        for parameter in self.parameters.iter() {
            let shape = parameter.weight.shape;
            let (w, g) = (self.random.matrix(shape, 0.5), self.random.matrix(shape, 1.0));
            upload(&mut self.backend, parameter.weight, &w);
            match beta {
                Beta::Overwrite => {
                    self.backend.fill(parameter.gradient, f32::NAN).expect("a gradient")
                }
                Beta::Accumulate => {
                    upload(&mut self.backend, parameter.gradient, &g);
                    self.before.insert(parameter.name.clone(), g);
                }
            }
            self.weights.insert(parameter.name.clone(), w);
        }
    }

    /// An output: NaN everywhere.
    fn poisoned(&mut self, shape: [usize; 2]) -> Tensor {
        let t =
            self.backend.alloc("poisoned", shape, DType::F32, Region::Activations).expect("room");
        self.backend.fill(t, f32::NAN).expect("a tensor");
        t
    }

    fn input(&mut self, shape: [usize; 2], scale: f32) -> (Tensor, Matrix) {
        let values = self.random.matrix(shape, scale);
        let t = self.poisoned(shape);
        upload(&mut self.backend, t, &values);
        (t, values)
    }

    fn tokens(&mut self, p: usize, vocabulary: u32) -> (Tensor, Vec<u32>) {
        let ids: Vec<u32> = (0..p).map(|_| self.random.below(vocabulary)).collect();
        let t =
            self.backend.alloc("tokens", [p, 1], DType::U32, Region::Activations).expect("room");
        self.backend.upload_tokens(t, &ids).expect("one id a token");
        (t, ids)
    }

    fn pass(&mut self, sequences: usize, context: usize, dropout: f32, beta: Beta) -> Pass<'_> {
        Pass {
            backend: &mut self.backend,
            phase: &self.phase,
            sequences,
            context,
            dropout,
            beta,
            watch: None,
        }
    }

    /// What these tensors and all gradients hold, by name.
    fn found(&mut self, outputs: &[(&str, Tensor)]) -> Tensors {
        let gradients = self
            .parameters
            .iter()
            .map(|parameter| (format!("d {}", parameter.name), parameter.gradient));
        let named: Vec<_> =
            outputs.iter().map(|&(name, t)| (name.to_owned(), t)).chain(gradients).collect();
        let mut download = |t: Tensor| {
            self.backend.download(t).expect("a tensor").into_iter().map(f64::from).collect()
        };
        named
            .into_iter()
            .map(|(name, t)| {
                (name, Matrix::from_shape_vec(t.shape, download(t)).expect("its shape"))
            })
            .collect()
    }

    /// Fails unless all of `found` lies within the bounds of what the oracle computes; it names
    /// gradients like their parameters.
    fn check(
        &self,
        found: &Tensors,
        compute: impl Fn(&mut Arithmetic, &mut Tensors, &Tensors) -> Tensors,
    ) {
        let run = |mut a: Arithmetic| {
            let mut gradients = self.before.clone();
            let mut all = compute(&mut a, &mut gradients, &self.weights);
            all.extend(
                gradients.into_iter().map(|(name, gradient)| (format!("d {name}"), gradient)),
            );
            all
        };
        let expected = run(Arithmetic::Exact);
        let displaced: Vec<Tensors> =
            (0..8).map(|seed| run(Arithmetic::Displaced(Random(seed)))).collect();
        assert!(
            found.keys().eq(expected.keys()),
            "{:?} against {:?}",
            found.keys(),
            expected.keys()
        );
        for (name, values) in found {
            let bound = bound(&expected[name], displaced.iter().map(|run| &run[name]));
            let distance = distance(&expected[name], values.iter().copied());
            assert!(distance <= bound, "{name}: {distance} from the oracle, bound {bound}");
            let size = expected[name].iter().fold(0.0_f64, |size, x| size.max(x.abs()));
            assert!(
                bound <= 1e-3 * size,
                "{name}: a bound of {bound} says little of values up to {size}"
            );
        }
    }
}

fn upload(backend: &mut CpuBackend, t: Tensor, values: &Matrix) {
    let values: Vec<f32> = values.iter().map(|&x| x as f32).collect();
    backend.upload(t, &values).expect("as many values as elements");
}

fn named<const N: usize>(tensors: [(&str, Matrix); N]) -> Tensors {
    tensors.into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect()
}

/// dX, and dW and db added to the gradients.
fn linear_backward(
    a: &mut Arithmetic,
    gradients: &mut Tensors,
    weights: &Tensors,
    name: &str,
    x: &Matrix,
    dz: &Matrix,
) -> Matrix {
    let (weight, bias) = (format!("{name}.weight"), format!("{name}.bias"));
    let dw = a.product(&dz.t().to_owned(), x);
    a.accumulate(gradients, &weight, dw, x.nrows());
    if weights.contains_key(&bias) {
        let db = a.column_sums(dz);
        a.accumulate(gradients, &bias, db, x.nrows());
    }
    a.product(dz, &weights[&weight])
}

fn linear(a: &mut Arithmetic, weights: &Tensors, name: &str, x: &Matrix) -> Matrix {
    layers::linear(a, x, &weights[&format!("{name}.weight")], weights.get(&format!("{name}.bias")))
}

fn spec(name: &str, shape: [usize; 2], bias: Bias) -> LinearSpec {
    LinearSpec { name: name.to_owned(), shape, deviation: 0.02, bias, sparse: None }
}

const CASES: [(Bias, Beta); 4] = [
    (Bias::Present, Beta::Overwrite),
    (Bias::Absent, Beta::Overwrite),
    (Bias::Present, Beta::Accumulate),
    (Bias::Absent, Beta::Accumulate),
];

#[test]
fn linear_layers() {
    // One token, one output: vectors; then ragged tiles.
    for (p, q, r) in [(1, 5, 3), (7, 3, 1), (13, 10, 67)] {
        for (bias, beta) in CASES {
            let mut bench = Bench::new(1);
            let layer =
                Linear24::new(&mut bench.backend, &mut bench.parameters, spec("l", [r, q], bias))
                    .expect("room");
            bench.fill(beta);
            let ((x, of_x), (dz, of_dz)) = (bench.input([p, q], 1.0), bench.input([p, r], 1.0));
            let (z, dx) = (bench.poisoned([p, r]), bench.poisoned([p, q]));
            let mut pass = bench.pass(1, p, 0.0, beta);
            layer.forward(&mut pass, x, z, None).expect("fits");
            layer.backward(&mut pass, x, dz, dx, None).expect("fits");
            let found = bench.found(&[("z", z), ("dx", dx)]);
            bench.check(&found, |a, gradients, weights| {
                let z = linear(a, weights, "l", &of_x);
                named([
                    ("z", z),
                    ("dx", linear_backward(a, gradients, weights, "l", &of_x, &of_dz)),
                ])
            });
        }
    }
}

/// With operands rounded to bf16 the products are, to the bit, those of operands that were rounded
/// before.
#[test]
fn rounded_operands_are_as_if_rounded_before() {
    let (p, q, r) = (9, 12, 8);
    let round = |values: &Matrix| values.map(|&x| half::bf16::from_f64(x).to_f64());
    let run = |operands, prepare: &dyn Fn(&Matrix) -> Matrix| {
        let mut bench = Bench::with(7, operands);
        let layer = Linear24::new(
            &mut bench.backend,
            &mut bench.parameters,
            spec("l", [r, q], Bias::Absent),
        )
        .expect("room");
        bench.fill(Beta::Overwrite);
        let weight = bench.parameters.iter().next().expect("one parameter").weight;
        let ((x, of_x), (dz, of_dz)) = (bench.input([p, q], 1.0), bench.input([p, r], 1.0));
        for (t, values) in [(weight, &bench.weights["l.weight"]), (x, &of_x), (dz, &of_dz)] {
            upload(&mut bench.backend, t, &prepare(values));
        }
        let (z, dx) = (bench.poisoned([p, r]), bench.poisoned([p, q]));
        let mut pass = bench.pass(1, p, 0.0, Beta::Overwrite);
        layer.forward(&mut pass, x, z, None).expect("fits");
        layer.backward(&mut pass, x, dz, dx, None).expect("fits");
        bench.found(&[("z", z), ("dx", dx)])
    };
    let rounded = run(Operands::Bf16, &Matrix::clone);
    assert_eq!(rounded, run(Operands::F32, &round));
    assert_ne!(rounded, run(Operands::F32, &Matrix::clone));
}

#[test]
fn feed_forward_blocks() {
    let (p, d, f) = (11, 6, 9);
    for activation in [Activation::Gelu, Activation::Geglu, Activation::Swiglu] {
        for (bias, beta) in CASES {
            let mut bench = Bench::new(2);
            let wide = f * activation.width();
            let (backend, parameters) = (&mut bench.backend, &mut bench.parameters);
            let up = Linear24::new(backend, parameters, spec("up", [wide, d], bias)).expect("room");
            let down =
                Linear24::new(backend, parameters, spec("down", [d, f], bias)).expect("room");
            bench.fill(beta);
            let ffn = Ffn { up, down, activation };
            // Large inputs, so that activations saturate on both sides.
            let ((x, of_x), (dy, of_dy)) = (bench.input([p, d], 6.0), bench.input([p, d], 1.0));
            let kept = FfnActivations { z: bench.poisoned([p, wide]), h: bench.poisoned([p, f]) };
            let [y, dx] = [0; 2].map(|_| bench.poisoned([p, d]));
            let dz = bench.poisoned([p, wide]);
            let mut pass = bench.pass(1, p, 0.0, beta);
            ffn.forward(&mut pass, x, kept, y).expect("fits");
            ffn.backward(&mut pass, x, kept, dy, dz, dx).expect("fits");
            let found =
                bench.found(&[("z", kept.z), ("h", kept.h), ("y", y), ("dz", dz), ("dx", dx)]);
            bench.check(&found, |a, gradients, weights| {
                let z = linear(a, weights, "up", &of_x);
                let h = layers::activate(a, activation, &z);
                let y = linear(a, weights, "down", &h);
                let dh = linear_backward(a, gradients, weights, "down", &h, &of_dy);
                let dz = layers::activate_backward(a, activation, &z, &dh);
                let dx = linear_backward(a, gradients, weights, "up", &of_x, &dz);
                named([("z", z), ("h", h), ("y", y), ("dz", dz), ("dx", dx)])
            });
        }
    }
}

#[test]
fn norms() {
    let (p, d) = (37, 21);
    for (bias, beta) in CASES {
        for delta in [None, Some(2.0)] {
            let mut bench = Bench::new(3);
            let norm =
                Norm::new(&mut bench.backend, &mut bench.parameters, "n", d, bias).expect("room");
            bench.fill(beta);
            let ((x, of_x), (dy, of_dy)) = (bench.input([p, d], 3.0), bench.input([p, d], 1.0));
            let delta = delta.map(|scale| bench.input([p, d], scale));
            let (dresidual, from_above) = bench.input([p, d], 1.0);
            let kept = NormActivations {
                residual: bench.poisoned([p, d]),
                y: bench.poisoned([p, d]),
                stats: bench.poisoned([p, 2]),
            };
            let mut pass = bench.pass(1, p, 0.0, beta);
            norm.forward(&mut pass, x, delta.as_ref().map(|(delta, _)| *delta), kept)
                .expect("fits");
            norm.backward(&mut pass, dy, kept, dresidual).expect("fits");
            let found = bench.found(&[
                ("residual", kept.residual),
                ("y", kept.y),
                ("dresidual", dresidual),
            ]);
            bench.check(&found, |a, gradients, weights| {
                let residual =
                    delta.as_ref().map_or(of_x.clone(), |(_, delta)| a.plus(&of_x, delta));
                let (gamma, beta) = (&weights["n.weight"], weights.get("n.bias"));
                let normed = layers::norm(a, &residual, gamma, beta);
                let (dx, dgamma, dbeta) = layers::norm_backward(a, &of_dy, &normed, gamma);
                a.accumulate(gradients, "n.weight", dgamma, p);
                if beta.is_some() {
                    a.accumulate(gradients, "n.bias", dbeta, p);
                }
                named([
                    ("residual", residual),
                    ("y", normed.y.clone()),
                    ("dresidual", a.plus(&from_above, &dx)),
                ])
            });
        }
    }
}

#[test]
fn attention() {
    // Contexts below, at and above a block of 64 queries, none but one a multiple of anything; one
    // token alone.
    for (sequences, context, heads, width) in
        [(3, 1, 2, 6), (2, 13, 3, 12), (1, 64, 1, 5), (2, 67, 2, 6), (1, 131, 2, 4)]
    {
        for (dropout, (bias, beta)) in [(0.0, CASES[0]), (0.25, CASES[1]), (0.5, CASES[2])] {
            let mut bench = Bench::new(4);
            let (p, place) = (sequences * context, 9);
            let (backend, parameters) = (&mut bench.backend, &mut bench.parameters);
            let qkv = Linear24::new(backend, parameters, spec("qkv", [3 * width, width], bias))
                .expect("room");
            let projection = Linear24::new(backend, parameters, spec("out", [width, width], bias))
                .expect("room");
            bench.fill(beta);
            let attention =
                Attention { qkv, projection, heads, mask: AttentionMask::Causal, dropout: place };
            let ((x, of_x), (dy, of_dy)) =
                (bench.input([p, width], 2.0), bench.input([p, width], 1.0));
            let (qkv, o, lse) = (
                bench.poisoned([p, 3 * width]),
                bench.poisoned([p, width]),
                bench.poisoned([sequences * heads, context]),
            );
            let kept = AttentionActivations { qkv, o, lse };
            let [y, d_o, dx] = [0; 3].map(|_| bench.poisoned([p, width]));
            let dqkv = bench.poisoned([p, 3 * width]);
            let mut pass = bench.pass(sequences, context, dropout, beta);
            attention.forward(&mut pass, x, kept, y).expect("fits");
            attention.backward(&mut pass, x, kept, dy, [d_o, dqkv], dx).expect("fits");
            let found = bench.found(&[("o", o), ("y", y), ("dqkv", dqkv), ("dx", dx)]);
            let at = Heads { sequences, context, heads };
            let dropout = (dropout > 0.0).then_some(Dropout {
                address: ADDRESS,
                place,
                p: f64::from(dropout),
            });
            bench.check(&found, |a, gradients, weights| {
                let qkv = linear(a, weights, "qkv", &of_x);
                let attended = layers::attention(a, &qkv, at, dropout);
                let y = linear(a, weights, "out", &attended.o);
                let d_o = linear_backward(a, gradients, weights, "out", &attended.o, &of_dy);
                let dqkv = layers::attention_backward(a, &qkv, at, dropout, &attended, &d_o);
                let dx = linear_backward(a, gradients, weights, "qkv", &of_x, &dqkv);
                named([("o", attended.o), ("y", y), ("dqkv", dqkv), ("dx", dx)])
            });
        }
    }
}

#[test]
fn dropout_in_place() {
    let mut bench = Bench::new(5);
    let (x, of_x) = bench.input([9, 7], 1.0);
    bench.pass(1, 9, 0.25, Beta::Overwrite).drop_in_place(x, 3).expect("fits");
    let found = bench.found(&[("x", x)]);
    let dropped = found["x"].iter().filter(|&&x| x == 0.0).count();
    assert!((5..=30).contains(&dropped), "{dropped} of 63 were dropped with probability 1/4");
    let dropout = Dropout { address: ADDRESS, place: 3, p: 0.25 };
    bench.check(&found, |a, _, _| named([("x", Dropout::apply(Some(dropout), a, of_x.clone()))]));
    // The purpose and the place are those of the site.
    assert_eq!(Site::new(Purpose::Dropout, 3).word(), 3 << 24 | 3);
}

/// More tokens than logits are held at a time, in three pieces of which the last is short.
#[test]
fn embedding_and_head() {
    let (sequences, context, d, vocabulary) = (5, 5, 6, 13);
    let p = sequences * context;
    for beta in [Beta::Overwrite, Beta::Accumulate] {
        let mut bench = Bench::new(6);
        let tables = [("tokens", vocabulary), ("positions", context + 2)];
        let embedding = Embedding::new(&mut bench.backend, &mut bench.parameters, tables, d, 0.02)
            .expect("room");
        bench.fill(beta);
        let ((tokens, ids), (targets, wanted)) =
            (bench.tokens(p, vocabulary as u32), bench.tokens(p, vocabulary as u32));
        let [x, dx] = [0; 2].map(|_| bench.poisoned([p, d]));
        let (y, of_y) = bench.input([p, d], 2.0);
        let (from_above, of_above) = bench.input([p, d], 0.01);
        let (loss, logits) = (bench.poisoned([1, 1]), bench.poisoned([10, vocabulary]));
        let head = HeadBuffers { logits, targets, loss };
        let scale = 1.0 / 32.0;
        let mut pass = bench.pass(sequences, context, 0.0, beta);
        embedding.forward(&mut pass, tokens, x).expect("fits");
        embedding.loss_and_gradient(&mut pass, y, head, scale, dx).expect("fits");
        embedding.backward(&mut pass, tokens, from_above).expect("fits");
        let found = bench.found(&[("x", x), ("loss", loss), ("dx", dx)]);
        bench.check(&found, |a, gradients, weights| {
            let (e, positions) = (&weights["tokens"], &weights["positions"]);
            let x = Matrix::from_shape_fn((p, d), |(i, j)| {
                let value = e[[ids[i] as usize, j]] + positions[[i % context, j]];
                a.rounded(value, 1.0, value)
            });
            let logits = a.product(&of_y, &e.t().to_owned());
            let (sum, dlogits) = layers::loss(a, &logits, &wanted, f64::from(scale));
            let (de, dx) = (a.product(&dlogits.t().to_owned(), &of_y), a.product(&dlogits, e));
            a.accumulate(gradients, "tokens", de, p);
            let mut rows_of = |rows: usize, of: &dyn Fn(usize) -> usize| {
                Matrix::from_shape_fn((rows, d), |(row, j)| {
                    a.sum((0..p).filter(|&i| of(i) == row).map(|i| of_above[[i, j]]))
                })
            };
            let (of_tokens, of_positions) =
                (rows_of(vocabulary, &|i| ids[i] as usize), rows_of(context + 2, &|i| i % context));
            a.accumulate(gradients, "tokens", of_tokens, p);
            a.accumulate(gradients, "positions", of_positions, p);
            named([("x", x), ("loss", Matrix::from_elem((1, 1), sum)), ("dx", dx)])
        });
    }
}

//! The layers of the trainer on the CPU backend against the f64 oracle: outputs and gradients,
//! every activation, with and without biases, ragged shapes, dropout, gradient accumulation.
//!
//! Outputs start as NaN, so an element that nothing writes fails. The bounds are those of
//! `oracle::arithmetic`.

use sparse24_core::{
    op::{Accumulate, Activation, AttentionMask, AttentionShape, StepState},
    philox::{Purpose, Site},
};
use sparse24_tests::oracle::{
    arithmetic::{Arithmetic, Matrix, Random, Tensors, bound, distance},
    layers::{self, Address, Dropout},
};
use sparse24_train::{
    Error,
    backend::{
        Arithmetic as Operands, Backend, DType, Memory, Region, Tensor, cpu::CpuBackend, op::Fill,
    },
    method::{DgradOperand, GradientOperand, Method, Phase},
    nn::{
        Attention, AttentionActivations, AttentionSpec, BatchShape, Bias, Builder, Embedding, Ffn,
        FfnActivations, FfnSpec, Head, Linear24, LinearSpec, Norm, NormActivations, ParameterSpec,
        Parameters, Pass, Sharing, Sparsity, Streams,
    },
};

use super::fixture;

const ADDRESS: Address = Address { seed: 77, step: 5, micro_step: 2 };
const LOSS_SCALE: f32 = 1.0 / 32.0;

/// A backend with a layer's parameters, activations and a phase, and the random numbers that fill
/// them.
struct Bench {
    backend: CpuBackend,
    parameters: Parameters,
    phase: Phase,
    batch: BatchShape,
    random: Random,
    /// Values of the parameters.
    weights: Tensors,
    /// Values of their gradients before the backward pass.
    before: Tensors,
}

impl Bench {
    /// A layer with random weights, and gradients that are NaN, or random where they will be added
    /// to.
    fn new<L>(
        batch: BatchShape,
        accumulate: Accumulate,
        build: impl FnOnce(&mut Builder<'_>) -> Result<L, Error>,
    ) -> (Self, L) {
        Self::with(Operands::F32, batch, accumulate, build)
    }

    fn with<L>(
        operands: Operands,
        batch: BatchShape,
        accumulate: Accumulate,
        build: impl FnOnce(&mut Builder<'_>) -> Result<L, Error>,
    ) -> (Self, L) {
        let mut backend = CpuBackend::new(operands);
        let Address { seed, step, micro_step } = ADDRESS;
        let state =
            StepState { seed, step, micro_step, loss_scale: LOSS_SCALE, ..StepState::default() };
        backend.set_step(state).expect("the CPU accepts every state");
        let method = Method::dense();
        let mut builder = Builder::new(&mut backend, &method, batch);
        let layer = build(&mut builder).expect("memory suffices");
        let parameters = builder.into_parameters();
        let phase = fixture::phase(None, DgradOperand::Dense, GradientOperand::Dense);
        let (random, weights, before) = (Random(1), Tensors::new(), Tensors::new());
        let mut bench = Self { backend, parameters, phase, batch, random, weights, before };
        bench.fill(accumulate);
        (bench, layer)
    }

    fn fill(&mut self, accumulate: Accumulate) {
        for parameter in self.parameters.iter() {
            let (name, shape) = (&parameter.spec.name, parameter.weight.shape);
            let (w, g) = (self.random.matrix(shape, 0.5), self.random.matrix(shape, 1.0));
            upload(&mut self.backend, parameter.weight, &w);
            match accumulate {
                Accumulate::Overwrite => poison(&mut self.backend, parameter.gradient),
                Accumulate::Add => {
                    upload(&mut self.backend, parameter.gradient, &g);
                    self.before.insert(name.clone(), g);
                }
            }
            self.weights.insert(name.clone(), w);
        }
    }

    /// An output: NaN everywhere.
    fn output(&mut self, shape: [usize; 2]) -> Tensor {
        let t = self.backend.alloc("output", shape, DType::F32, Region::Activations);
        let t = t.expect("memory suffices");
        poison(&mut self.backend, t);
        t
    }

    fn input(&mut self, shape: [usize; 2], scale: f32) -> (Tensor, Matrix) {
        let values = self.random.matrix(shape, scale);
        let t = self.output(shape);
        upload(&mut self.backend, t, &values);
        (t, values)
    }

    fn ids(&mut self, to: Option<Tensor>, ids: Vec<u32>) -> (Tensor, Vec<u32>) {
        let shape = [ids.len(), 1];
        let alloc = |backend: &mut CpuBackend| {
            backend.alloc("ids", shape, DType::U32, Region::Activations).expect("memory suffices")
        };
        let t = to.unwrap_or_else(|| alloc(&mut self.backend));
        self.backend.upload_ids(t, &ids).expect("one id per element");
        (t, ids)
    }

    fn random_ids(&mut self, vocabulary: usize) -> Vec<u32> {
        (0..self.batch.tokens()).map(|_| self.random.below(vocabulary as u32)).collect()
    }

    fn pass(&mut self, dropout: f32, accumulate: Accumulate) -> Pass<'_> {
        let (backend, phase, batch) = (&mut self.backend, &self.phase, self.batch);
        Pass { backend, phase, batch, dropout, accumulate, watch: None }
    }

    /// The values of these tensors and of all gradients, by name.
    fn found(&mut self, outputs: &[(&str, Tensor)]) -> Tensors {
        let gradients = self
            .parameters
            .iter()
            .map(|parameter| (format!("d {}", parameter.spec.name), parameter.gradient));
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

    /// Fails unless `found` lies within the bounds of the oracle's results, in which gradients are
    /// named like their parameters.
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
                "{name}: a bound of {bound} is too wide for values up to {size}"
            );
        }
    }
}

fn poison(backend: &mut dyn Backend, t: Tensor) {
    backend.run(Fill { to: t, value: f32::NAN }).expect("a tensor of floats");
}

fn upload(backend: &mut dyn Backend, t: Tensor, values: &Matrix) {
    let values: Vec<f32> = values.iter().map(|&x| x as f32).collect();
    backend.upload(t, &values).expect("as many values as elements");
}

fn named<const N: usize>(tensors: [(&str, Matrix); N]) -> Tensors {
    tensors.into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect()
}

/// One sequence of p tokens.
fn one(p: usize) -> BatchShape {
    BatchShape { size: 1, sequence_length: p }
}

/// dX; dW and db are added to the gradients.
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

fn spec(shape: [usize; 2], bias: Bias) -> LinearSpec {
    let sparsity = Sparsity::Dense;
    LinearSpec { name: "l".to_owned(), shape, deviation: 0.02, bias, sparsity }
}

const CASES: [(Bias, Accumulate); 4] = [
    (Bias::Present, Accumulate::Overwrite),
    (Bias::Absent, Accumulate::Overwrite),
    (Bias::Present, Accumulate::Add),
    (Bias::Absent, Accumulate::Add),
];

#[test]
fn linear_layers() {
    // One token, one output: vectors; then ragged tiles.
    for (p, q, r) in [(1, 5, 3), (7, 3, 1), (13, 10, 67)] {
        for (bias, accumulate) in CASES {
            let (mut bench, layer) = Bench::new(one(p), accumulate, |builder| {
                Linear24::new(builder, spec([r, q], bias))
            });
            let ((x, x_host), (dz, dz_host)) = (bench.input([p, q], 1.0), bench.input([p, r], 1.0));
            let (z, dx) = (bench.output([p, r]), bench.output([p, q]));
            let mut pass = bench.pass(0.0, accumulate);
            layer.forward(&mut pass, x, z).expect("shapes fit");
            layer.backward(&mut pass, x, dz, dx).expect("shapes fit");
            let found = bench.found(&[("z", z), ("dx", dx)]);
            bench.check(&found, |a, gradients, weights| {
                let z = linear(a, weights, "l", &x_host);
                let dx = linear_backward(a, gradients, weights, "l", &x_host, &dz_host);
                named([("z", z), ("dx", dx)])
            });
        }
    }
}

/// With operands rounded to bf16, the products have the bits of those of operands rounded
/// beforehand.
#[test]
fn products_round_their_operands() {
    let (p, q, r) = (9, 12, 8);
    let round = |values: &Matrix| values.map(|&x| half::bf16::from_f32(x as f32).to_f64());
    let run = |operands, prepare: &dyn Fn(&Matrix) -> Matrix| {
        let (mut bench, layer) = Bench::with(operands, one(p), Accumulate::Overwrite, |builder| {
            Linear24::new(builder, spec([r, q], Bias::Absent))
        });
        let weight = bench.parameters.iter().next().expect("one parameter").weight;
        let ((x, x_host), (dz, dz_host)) = (bench.input([p, q], 1.0), bench.input([p, r], 1.0));
        for (t, values) in [(weight, &bench.weights["l.weight"]), (x, &x_host), (dz, &dz_host)] {
            upload(&mut bench.backend, t, &prepare(values));
        }
        let (z, dx) = (bench.output([p, r]), bench.output([p, q]));
        let mut pass = bench.pass(0.0, Accumulate::Overwrite);
        layer.forward(&mut pass, x, z).expect("shapes fit");
        layer.backward(&mut pass, x, dz, dx).expect("shapes fit");
        bench.found(&[("z", z), ("dx", dx)])
    };
    let rounded = run(Operands::Bf16, &Matrix::clone);
    assert_eq!(rounded, run(Operands::F32, &round));
    assert_ne!(rounded, run(Operands::F32, &Matrix::clone));
}

#[test]
fn feed_forward_blocks() {
    let (p, d_model, d_ff) = (11, 8, 12);
    for activation in Activation::ALL {
        for (bias, accumulate) in CASES {
            let (mut bench, ffn) = Bench::new(one(p), accumulate, |builder| {
                let (names, deviations) = (["up", "down"].map(str::to_owned), [0.02; 2]);
                Ffn::new(builder, FfnSpec { names, d_model, d_ff, activation, bias, deviations })
            });
            let z_columns = d_ff * activation.columns_in();
            // Large inputs, so that activations saturate on both sides.
            let (x, x_host) = bench.input([p, d_model], 6.0);
            let (dy, dy_host) = bench.input([p, d_model], 1.0);
            let [kept, scratch] = [0; 2].map(|_| FfnActivations {
                z: bench.output([p, z_columns]),
                h: bench.output([p, d_ff]),
            });
            let [y, dx] = [0; 2].map(|_| bench.output([p, d_model]));
            let mut pass = bench.pass(0.0, accumulate);
            ffn.forward_up(&mut pass, x, kept).expect("shapes fit");
            ffn.forward_down(&mut pass, kept, y).expect("shapes fit");
            ffn.backward(&mut pass, x, kept, dy, scratch, dx).expect("shapes fit");
            let outputs = [("z", kept.z), ("h", kept.h), ("y", y), ("dz", scratch.z), ("dx", dx)];
            let found = bench.found(&outputs);
            bench.check(&found, |a, gradients, weights| {
                let z = linear(a, weights, "up", &x_host);
                let h = layers::activate(a, activation, &z);
                let y = linear(a, weights, "down", &h);
                let dh = linear_backward(a, gradients, weights, "down", &h, &dy_host);
                let dz = layers::activate_backward(a, activation, &z, &dh);
                let dx = linear_backward(a, gradients, weights, "up", &x_host, &dz);
                named([("z", z), ("h", h), ("y", y), ("dz", dz), ("dx", dx)])
            });
        }
    }
}

/// Alone and after a residual addition; the input gradient is overwritten or added to.
#[test]
fn norms() {
    let (p, d) = (37, 21);
    for (bias, accumulate) in CASES {
        let both = [Accumulate::Add, Accumulate::Overwrite];
        for (residual, accumulate_dx) in
            [false, true].into_iter().flat_map(|r| both.map(|a| (r, a)))
        {
            let (mut bench, norm) =
                Bench::new(one(p), accumulate, |builder| Norm::new(builder, "n", d, bias));
            let ((x, x_host), (dy, dy_host)) = (bench.input([p, d], 3.0), bench.input([p, d], 1.0));
            let (delta, delta_host) = bench.input([p, d], 2.0);
            let (dx, dx_before) = bench.input([p, d], 1.0);
            if accumulate_dx == Accumulate::Overwrite {
                poison(&mut bench.backend, dx);
            }
            let (sum, y, stats) =
                (bench.output([p, d]), bench.output([p, d]), bench.output([p, 2]));
            let kept = NormActivations { x: if residual { sum } else { x }, y, stats };
            let mut pass = bench.pass(0.0, accumulate);
            if residual {
                norm.forward_residual(&mut pass, x, delta, kept).expect("shapes fit");
            } else {
                norm.forward(&mut pass, kept).expect("shapes fit");
            }
            norm.backward(&mut pass, dy, kept, dx, accumulate_dx).expect("shapes fit");
            let found = bench.found(&[("x", kept.x), ("y", y), ("dx", dx)]);
            bench.check(&found, |a, gradients, weights| {
                let x = if residual { a.plus(&x_host, &delta_host) } else { x_host.clone() };
                let (gamma, beta) = (&weights["n.weight"], weights.get("n.bias"));
                let normed = layers::norm(a, &x, gamma, beta);
                let (dx, dgamma, dbeta) = layers::norm_backward(a, &dy_host, &normed, gamma);
                a.accumulate(gradients, "n.weight", dgamma, p);
                if beta.is_some() {
                    a.accumulate(gradients, "n.bias", dbeta, p);
                }
                let dx = match accumulate_dx {
                    Accumulate::Add => a.plus(&dx_before, &dx),
                    Accumulate::Overwrite => dx,
                };
                named([("x", x), ("y", normed.y.clone()), ("dx", dx)])
            });
        }
    }
}

/// The streams of an attention layer.
#[derive(Clone, Copy, PartialEq)]
enum Keys {
    /// q, k and v of one stream, one projection.
    Joint,
    /// q, k and v of one stream, two projections.
    Separate,
    /// k and v of another stream with this many tokens per sequence, of which the last sequences
    /// have fewer.
    Cross(usize),
}

#[test]
fn attention() {
    // Sequence lengths below, at and above a block of queries, none but one a multiple of anything;
    // one token alone; more queries than keys and the reverse.
    let causal = AttentionMask::Causal;
    let shapes = [
        (3, 1, 2, 6, Keys::Joint, causal),
        (2, 13, 3, 12, Keys::Joint, causal),
        (1, 64, 1, 5, Keys::Joint, causal),
        (2, 67, 2, 6, Keys::Joint, AttentionMask::Full),
        (1, 131, 2, 4, Keys::Joint, causal),
        (2, 9, 2, 6, Keys::Separate, causal),
        (3, 7, 2, 6, Keys::Cross(11), AttentionMask::Full),
        (2, 17, 1, 4, Keys::Cross(5), AttentionMask::Full),
        (2, 5, 1, 4, Keys::Cross(8), causal),
    ];
    for (size, sequence_length, heads, d_model, keys, mask) in shapes {
        for (dropout, (bias, accumulate)) in [(0.0, CASES[0]), (0.25, CASES[1]), (0.5, CASES[2])] {
            let batch = BatchShape { size, sequence_length };
            let (p, number) = (batch.tokens(), 1);
            let names: &[&str] =
                if keys == Keys::Joint { &["qkv", "out"] } else { &["q", "kv", "out"] };
            let names: Vec<_> = names.iter().map(|&name| name.to_owned()).collect();
            let (deviations, sparsity) = ([0.02; 2], Sparsity::Dense);
            let spec =
                AttentionSpec { names: &names, d_model, heads, mask, bias, deviations, sparsity };
            let (mut bench, attention) = Bench::new(batch, accumulate, |builder| {
                builder.dropout_site();
                Attention::new(builder, &spec)
            });
            let (x, x_host) = bench.input([p, d_model], 2.0);
            let (dy, dy_host) = bench.input([p, d_model], 1.0);
            let memory_length = match keys {
                Keys::Cross(length) => length,
                _ => sequence_length,
            };
            let of_memory = BatchShape { size, sequence_length: memory_length };
            let (memory, memory_host) = bench.input([of_memory.tokens(), d_model], 2.0);
            let cross = matches!(keys, Keys::Cross(_));
            // The first sequence has no padding, the last no key at all.
            let lengths =
                (0..size).map(|at| (memory_length - memory_length * at / (size - 1).max(1)) as u32);
            let lengths = cross.then(|| bench.ids(None, lengths.collect()));
            let [kept, scratch] = [0; 2].map(|_| {
                let (q, kv) = match keys {
                    Keys::Joint => (bench.output([p, 3 * d_model]), None),
                    _ => {
                        let kv = bench.output([of_memory.tokens(), 2 * d_model]);
                        (bench.output([p, d_model]), Some(kv))
                    }
                };
                let o = bench.output([p, d_model]);
                AttentionActivations {
                    q,
                    kv,
                    o,
                    lse: bench.output([size * heads, sequence_length]),
                }
            });
            let [y, dx] = [0; 2].map(|_| bench.output([p, d_model]));
            let dmemory = bench.output([of_memory.tokens(), d_model]);
            let streams = Streams {
                x,
                memory: cross.then_some((memory, of_memory)),
                lengths: lengths.as_ref().map(|(t, _)| *t),
            };
            let mut pass = bench.pass(dropout, accumulate);
            attention.forward(&mut pass, streams, kept, y).expect("shapes fit");
            let separate = (keys != Keys::Joint).then_some(dmemory);
            attention
                .backward(&mut pass, streams, [kept, scratch], dy, dx, separate)
                .expect("shapes fit");
            let mut outputs = vec![("o", kept.o), ("y", y), ("dq", scratch.q), ("dx", dx)];
            outputs.extend(scratch.kv.map(|dkv| ("dkv", dkv)));
            outputs.extend(cross.then_some(("dmemory", dmemory)));
            let found = bench.found(&outputs);
            let dropout =
                (dropout > 0.0).then_some(Dropout { address: ADDRESS, number, p: dropout.into() });
            let lengths = lengths.map(|(_, lengths)| lengths);
            let (queries, keys) = (sequence_length, memory_length);
            let shape = AttentionShape { batch: size, heads, queries, keys, mask };
            let joint = names.len() == 2;
            bench.check(&found, |a, gradients, weights| {
                let from = if cross { &memory_host } else { &x_host };
                let qkv: [Matrix; 3] = if joint {
                    layers::split(&linear(a, weights, "qkv", &x_host))
                } else {
                    let q = linear(a, weights, "q", &x_host);
                    let [k, v] = layers::split(&linear(a, weights, "kv", from));
                    [q, k, v]
                };
                let lengths = lengths.as_deref();
                let qkv = &qkv;
                let attention =
                    layers::Attention { shape, qkv, lengths, dropout, operand_units: 0.0 };
                let attended = attention.forward(a);
                let y = linear(a, weights, "out", &attended.o);
                let d_o = linear_backward(a, gradients, weights, "out", &attended.o, &dy_host);
                let dqkv = attention.backward(a, &attended, &d_o);
                let mut all = named([("o", attended.o), ("y", y)]);
                let mut back = |a: &mut Arithmetic, name: &str, x: &Matrix, dz: &Matrix| {
                    linear_backward(a, gradients, weights, name, x, dz)
                };
                if joint {
                    let dq = layers::join(&dqkv);
                    all.extend(named([("dx", back(a, "qkv", &x_host, &dq)), ("dq", dq)]));
                    return all;
                }
                let [dq, dk, dv] = dqkv;
                let dkv = layers::join(&[dk, dv]);
                let dx = back(a, "q", &x_host, &dq);
                let dmemory = back(a, "kv", from, &dkv);
                if cross {
                    all.extend(named([("dx", dx), ("dmemory", dmemory)]));
                } else {
                    all.extend(named([("dx", a.plus(&dx, &dmemory))]));
                }
                all.extend(named([("dq", dq), ("dkv", dkv)]));
                all
            });
        }
    }
}

#[test]
fn dropout_in_place() {
    let (mut bench, site) =
        Bench::new(one(9), Accumulate::Overwrite, |builder| Ok(builder.dropout_site()));
    // The purpose and the number are those of the site.
    assert_eq!(site.word(), 3 << 24);
    let site = Site::new(Purpose::Dropout, 3);
    let (x, x_host) = bench.input([9, 7], 1.0);
    bench.pass(0.25, Accumulate::Overwrite).drop_in_place(x, site).expect("shapes fit");
    let found = bench.found(&[("x", x)]);
    let dropped = found["x"].iter().filter(|&&x| x == 0.0).count();
    assert!((5..=30).contains(&dropped), "{dropped} of 63 were dropped with probability 1/4");
    let dropout = Dropout { address: ADDRESS, number: 3, p: 0.25 };
    bench.check(&found, |a, _, _| named([("x", Dropout::apply(Some(dropout), a, x_host.clone()))]));
}

/// Tied, and untied with label smoothing; some targets are ignored.
#[test]
fn embeddings_and_heads() {
    let (batch, d, vocabulary) = (BatchShape { size: 5, sequence_length: 5 }, 6, 13);
    let (p, length) = (batch.tokens(), batch.sequence_length);
    for (smoothing, accumulate) in [
        (None, Accumulate::Overwrite),
        (None, Accumulate::Add),
        (Some(0.0), Accumulate::Add),
        (Some(0.25), Accumulate::Overwrite),
    ] {
        let tied = smoothing.is_none();
        let positions = tied.then_some(("positions", length + 2));
        let (mut bench, (embedding, head)) = Bench::new(batch, accumulate, |builder| {
            let embedding = Embedding::new(builder, ("tokens", vocabulary), positions, d, 0.02)?;
            let head = match smoothing {
                None => Head::tied(builder, &embedding)?,
                Some(smoothing) => {
                    let spec = ParameterSpec::matrix("head", [vocabulary, d], 0.02);
                    Head::untied(builder, spec, smoothing)?
                }
            };
            Ok((embedding, head))
        });
        let ids = bench.random_ids(vocabulary);
        let (tokens, ids) = bench.ids(None, ids);
        let mut wanted = bench.random_ids(vocabulary);
        (wanted[0], wanted[7]) = (layers::IGNORE, layers::IGNORE);
        let (_, wanted) = bench.ids(Some(head.buffers().targets), wanted);
        let loss = head.buffers().loss;
        let [x, dx] = [0; 2].map(|_| bench.output([p, d]));
        let (y, y_host) = bench.input([p, d], 2.0);
        let (drows, drows_host) = bench.input([p, d], 0.01);
        let sharing = if tied { Sharing::Tied } else { Sharing::Alone };
        let mut pass = bench.pass(0.0, accumulate);
        embedding.forward(&mut pass, tokens, x).expect("shapes fit");
        head.loss_and_gradient(&mut pass, y, dx).expect("shapes fit");
        embedding.backward(&mut pass, tokens, drows, sharing).expect("shapes fit");
        let found = bench.found(&[("x", x), ("loss", loss), ("dx", dx)]);
        let table = if tied { "tokens" } else { "head" };
        bench.check(&found, |a, gradients, weights| {
            let (e, positions) = (&weights["tokens"], weights.get("positions"));
            let x = Matrix::from_shape_fn((p, d), |(i, j)| {
                let position = positions.map_or(0.0, |positions| positions[[i % length, j]]);
                let value = e[[ids[i] as usize, j]] + position;
                a.rounded(value, if tied { 1.0 } else { 0.0 }, value)
            });
            let head = &weights[table];
            let logits = a.product(&y_host, &head.t().to_owned());
            let smoothing = f64::from(smoothing.unwrap_or(0.0));
            let (sum, dlogits) =
                layers::loss(a, &logits, &wanted, smoothing, f64::from(LOSS_SCALE));
            let (dhead, dx) =
                (a.product(&dlogits.t().to_owned(), &y_host), a.product(&dlogits, head));
            a.accumulate(gradients, table, dhead, p);
            let mut rows_of = |rows: usize, of: &dyn Fn(usize) -> usize| {
                Matrix::from_shape_fn((rows, d), |(row, j)| {
                    a.sum((0..p).filter(|&i| of(i) == row).map(|i| drows_host[[i, j]]))
                })
            };
            let dtokens = rows_of(vocabulary, &|i| ids[i] as usize);
            let dpositions = rows_of(length + 2, &|i| i % length);
            a.accumulate(gradients, "tokens", dtokens, p);
            if tied {
                a.accumulate(gradients, "positions", dpositions, p);
            }
            named([("x", x), ("loss", Matrix::from_elem((1, 1), sum)), ("dx", dx)])
        });
        // Without gradients there is no smoothing either.
        head.loss(&mut bench.pass(0.0, accumulate), y).expect("shapes fit");
        let found = bench.backend.download(loss).expect("one loss");
        let head = &bench.weights[table];
        let run = |mut a: Arithmetic| {
            let logits = a.product(&y_host, &head.t().to_owned());
            Matrix::from_elem((1, 1), layers::loss(&mut a, &logits, &wanted, 0.0, 0.0).0)
        };
        let expected = run(Arithmetic::Exact);
        let displaced: Vec<_> =
            (0..8).map(|seed| run(Arithmetic::Displaced(Random(seed)))).collect();
        let distance = distance(&expected, found.into_iter().map(f64::from));
        assert!(distance <= bound(&expected, &displaced), "{distance} from the plain loss");
    }
}

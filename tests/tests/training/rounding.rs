//! With bf16 arithmetic the CPU stores activations as a GPU does: each operation has the bits of
//! the f32 operation on operands that were rounded beforehand, and values between two operations
//! are rounded where the GPU stores them.

use sparse24_core::op::Activation;
use sparse24_tests::oracle::arithmetic::Random;
use sparse24_train::backend::{
    Arithmetic, Backend, DType, Memory, Region, Tensor,
    cpu::CpuBackend,
    op::{
        ActivationBackward, ActivationForward, Add, LinearDgrad, LinearForward, NormForward, Weight,
    },
};

/// Tokens, in-features, out-features.
const P: usize = 9;
const Q: usize = 8;
const R: usize = 12;

fn rounded(values: &[f32]) -> Vec<f32> {
    values.iter().map(|&x| half::bf16::from_f32(x).to_f32()).collect()
}

fn random(seed: u64, elements: usize) -> Vec<f32> {
    let mut random = Random(seed);
    (0..elements).map(|_| 3.0 * random.symmetric()).collect()
}

fn identity(width: usize) -> Vec<f32> {
    (0..width * width).map(|at| if at / width == at % width { 1.0 } else { 0.0 }).collect()
}

struct Run(CpuBackend);

impl Run {
    fn with(&mut self, dtype: DType, shape: [usize; 2], values: &[f32]) -> Tensor {
        let t = self.0.alloc("t", shape, dtype, Region::Activations).expect("memory suffices");
        self.0.upload(t, values).expect("its shape");
        t
    }

    fn activations(&mut self, shape: [usize; 2], values: &[f32]) -> Tensor {
        self.with(DType::Activation, shape, values)
    }

    fn output(&mut self, shape: [usize; 2]) -> Tensor {
        self.activations(shape, &vec![f32::NAN; shape[0] * shape[1]])
    }

    fn found(&mut self, t: Tensor) -> Vec<f32> {
        self.0.download(t).expect("a tensor")
    }

    /// Z and act(Z).
    fn forward(&mut self, x: &[f32], w: &[f32], q: usize) -> [Vec<f32>; 2] {
        let (x, w) = (self.activations([P, q], x), self.with(DType::F32, [R, q], w));
        let [z, h] = [0; 2].map(|_| self.output([P, R]));
        let product = LinearForward { x, weight: Weight::Dense(w), bias: None, z };
        let activation = ActivationForward { activation: Activation::Gelu, z, h };
        self.0.sequence(&[product.into(), activation.into()]).expect("shapes fit");
        [z, h].map(|t| self.found(t))
    }

    /// (dZ W) * act'(Z').
    fn backward(&mut self, dz: &[f32], w: &[f32], before: &[f32], q: usize) -> Vec<f32> {
        let (dz, w) = (self.activations([P, q], dz), self.with(DType::F32, [q, R], w));
        let z = self.activations([P, R], before);
        let [dh, dx] = [0; 2].map(|_| self.output([P, R]));
        let product = LinearDgrad { dz, weight: Weight::Dense(w), dx: dh };
        let derivative = ActivationBackward { activation: Activation::Gelu, dh, z, dz: dx };
        self.0.sequence(&[product.into(), derivative.into()]).expect("shapes fit");
        self.found(dx)
    }

    /// dZ W.
    fn product(&mut self, dz: &[f32], w: &[f32]) -> Vec<f32> {
        let (dz, w, dx) =
            (self.activations([P, Q], dz), self.with(DType::F32, [Q, R], w), self.output([P, R]));
        let op = LinearDgrad { dz, weight: Weight::Dense(w), dx };
        self.0.execute(&op.into()).expect("shapes fit");
        self.found(dx)
    }

    /// The residual stream and its norm.
    fn norm(&mut self, x: &[f32], delta: Option<&[f32]>) -> [Vec<f32>; 2] {
        let (x, delta) =
            (self.activations([P, Q], x), delta.map(|delta| self.activations([P, Q], delta)));
        let gamma = self.with(DType::F32, [1, Q], &random(5, Q));
        let ([sum, y], stats) =
            ([0; 2].map(|_| self.output([P, Q])), self.with(DType::F32, [P, 2], &[0.0; 2 * P]));
        let norm = |x| NormForward { x, gamma, beta: None, y, stats };
        let done = match delta {
            None => self.0.execute(&norm(x).into()),
            Some(delta) => self.0.sequence(&[Add { x, delta, out: sum }.into(), norm(sum).into()]),
        };
        done.expect("shapes fit");
        [sum, y].map(|t| self.found(t))
    }
}

#[test]
fn activations_are_rounded_where_a_gpu_stores_them() {
    let [mut bf16, mut f32] =
        [Arithmetic::Bf16, Arithmetic::F32].map(|arithmetic| Run(CpuBackend::new(arithmetic)));
    let (x, w, dz) = (random(1, P * Q), random(2, R * Q), random(3, P * Q));
    let [z, h] = bf16.forward(&x, &w, Q);
    assert_eq!(z, rounded(&f32.forward(&rounded(&x), &rounded(&w), Q)[0]));
    assert_eq!(
        h,
        rounded(&f32.forward(&z, &identity(R), R)[1]),
        "the activation reads Z as it is stored"
    );

    let dx = bf16.backward(&dz, &w, &z, Q);
    let dh = rounded(&f32.product(&rounded(&dz), &rounded(&w)));
    assert_eq!(
        dx,
        rounded(&f32.backward(&dh, &identity(R), &z, R)),
        "the product is stored before it is multiplied by the activation's derivative"
    );

    let delta = random(4, P * Q);
    let [residual, y] = bf16.norm(&x, Some(&delta));
    let sums: Vec<f32> =
        rounded(&x).iter().zip(rounded(&delta)).map(|(&x, delta)| x + delta).collect();
    assert_eq!(residual, rounded(&sums));
    assert_eq!(
        y,
        rounded(&f32.norm(&residual, None)[1]),
        "the norm reads the residual as it is stored"
    );
}

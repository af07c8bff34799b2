//! With bf16 arithmetic the CPU stores activations as a GPU does: every operation of a sequence
//! reads its operands as they are stored, and its activations are those of f32, rounded.

use sparse24_core::op::Activation;
use sparse24_tests::oracle::arithmetic::Random;
use sparse24_train::backend::{
    Arithmetic, Backend, DType, Memory, Op, Region,
    cpu::CpuBackend,
    op::{
        ActivationBackward, ActivationForward, Add, LinearDgrad, LinearForward, NormForward, Weight,
    },
};

/// Tokens, in-features, out-features.
const P: usize = 9;
const Q: usize = 8;
const R: usize = 12;

fn rounded(values: Vec<f32>) -> Vec<f32> {
    values.into_iter().map(|x| half::bf16::from_f32(x).to_f32()).collect()
}

/// The stored results of three sequences. In f32, one operation is executed at a time, with
/// operands rounded beforehand and results rounded afterwards.
fn stored(arithmetic: Arithmetic) -> [Vec<f32>; 6] {
    let mut backend = CpuBackend::new(arithmetic);
    let mut random = Random(1);
    let mut given = |dtype, shape: [usize; 2], rounds: bool| {
        let t = backend.alloc("t", shape, dtype, Region::Activations).expect("memory suffices");
        let values = (0..t.elements()).map(|_| 3.0 * random.symmetric()).collect();
        let values = if rounds && arithmetic == Arithmetic::F32 { rounded(values) } else { values };
        backend.upload(t, &values).expect("its shape");
        t
    };
    let [x, delta, before, dh, dx, sum, y] = [0; 7].map(|_| given(DType::Activation, [P, Q], true));
    let [dz, z, h] = [0; 3].map(|_| given(DType::Activation, [P, R], true));
    let weight = Weight::Dense(given(DType::F32, [R, Q], true));
    // Only products read their f32 operands rounded.
    let (gamma, stats) = (given(DType::F32, [1, Q], false), given(DType::F32, [P, 2], false));
    let activation = Activation::Gelu;
    let sequences: [[Op<'_>; 2]; 3] = [
        [
            LinearForward { x, weight, bias: None, z }.into(),
            ActivationForward { activation, z, h }.into(),
        ],
        [
            LinearDgrad { dz, weight, dx: dh }.into(),
            ActivationBackward { activation, dh, z: before, dz: dx }.into(),
        ],
        [
            Add { x, delta, out: sum }.into(),
            NormForward { x: sum, gamma, beta: None, y, stats }.into(),
        ],
    ];
    let outputs = [z, h, dh, dx, sum, y];
    if arithmetic == Arithmetic::Bf16 {
        sequences.iter().for_each(|ops| backend.sequence(ops).expect("shapes fit"));
    } else {
        for (op, output) in sequences.as_flattened().iter().zip(outputs) {
            backend.execute(op).expect("shapes fit");
            let values = rounded(backend.download(output).expect("a tensor"));
            backend.upload(output, &values).expect("its shape");
        }
    }
    outputs.map(|t| backend.download(t).expect("a tensor"))
}

#[test]
fn activations_are_rounded_where_a_gpu_stores_them() {
    let [found, expected] = [Arithmetic::Bf16, Arithmetic::F32].map(stored);
    for (name, (found, expected)) in
        ["z", "h", "dh", "dx", "sum", "y"].into_iter().zip(found.iter().zip(&expected))
    {
        assert_eq!(found, expected, "{name}");
    }
}

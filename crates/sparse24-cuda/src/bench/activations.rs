//! GELU, GEGLU and SwiGLU, forward and backward.

use half::bf16;
use ndarray::{Array2, ArrayView2, ArrayViewMut2};
use sparse24_core::op;
use sparse24_cpu::{self as cpu, activation as on_cpu};

use super::{
    Bench, Case, Prepared, Size,
    check::{BF16, Stop, near, repeating},
    input::{PANEL, panel, repeated, widened},
};
use crate::{Device, Error, Matrix, activation};

type Forward = fn(&mut Device, Matrix<bf16>, Matrix<bf16>) -> Result<(), Error>;
type Backward = fn(&mut Device, Matrix<bf16>, Matrix<bf16>, Matrix<bf16>) -> Result<(), Error>;
type CpuForward = fn(ArrayView2<'_, f32>, ArrayViewMut2<'_, f32>) -> Result<(), cpu::Error>;
type CpuBackward =
    fn(ArrayView2<'_, f32>, ArrayView2<'_, f32>, ArrayViewMut2<'_, f32>) -> Result<(), cpu::Error>;

/// An activation; columns of Z for one of H.
struct Activation {
    names: [&'static str; 2],
    entries: [&'static [&'static str]; 2],
    width: usize,
    forward: (Forward, CpuForward),
    backward: (Backward, CpuBackward),
}

const ACTIVATIONS: [Activation; 3] = [
    Activation {
        names: ["gelu_forward", "gelu_backward"],
        entries: [&["gelu_forward"], &["gelu_backward"]],
        width: 1,
        forward: (activation::gelu_forward, |z, h| {
            on_cpu::activation_forward(op::Activation::Gelu, z, h)
        }),
        backward: (activation::gelu_backward, |dh, z, dz| {
            on_cpu::activation_backward(op::Activation::Gelu, dh, z, dz)
        }),
    },
    Activation {
        names: ["geglu_forward", "geglu_backward"],
        entries: [&["geglu_forward"], &["geglu_backward"]],
        width: 2,
        forward: (activation::geglu_forward, |z, h| {
            on_cpu::activation_forward(op::Activation::Geglu, z, h)
        }),
        backward: (activation::geglu_backward, |dh, z, dz| {
            on_cpu::activation_backward(op::Activation::Geglu, dh, z, dz)
        }),
    },
    Activation {
        names: ["swiglu_forward", "swiglu_backward"],
        entries: [&["swiglu_forward"], &["swiglu_backward"]],
        width: 2,
        forward: (activation::swiglu_forward, |z, h| {
            on_cpu::activation_forward(op::Activation::Swiglu, z, h)
        }),
        backward: (activation::swiglu_backward, |dh, z, dz| {
            on_cpu::activation_backward(op::Activation::Swiglu, dh, z, dz)
        }),
    },
];

pub(super) fn cases(size: &Size) -> Vec<Case> {
    let shape @ [p, f] = size.hidden();
    let case = |kernel, entries, prepare: Box<super::Prepare>| Case {
        kernel,
        shape: format!("{p}x{f}"),
        entries,
        prepare,
    };
    let of = |a: &'static Activation| {
        let [forward, backward] = a.names;
        let (of_forward, of_backward): (Box<super::Prepare>, Box<super::Prepare>) = (
            Box::new(move |bench| forwards(bench, shape, a)),
            Box::new(move |bench| backwards(bench, shape, a)),
        );
        [case(forward, a.entries[0], of_forward), case(backward, a.entries[1], of_backward)]
    };
    const { &ACTIVATIONS }.iter().flat_map(of).collect()
}

/// Where a slope is near zero, f32's sums are good to this.
const SMALL: f64 = 1e-5;

fn forwards(
    bench: &mut Bench,
    shape @ [p, f]: [usize; 2],
    activation: &Activation,
) -> Result<Prepared, Stop> {
    let (z, (launch, on_cpu)) = (panel(activation.width * f, 1), activation.forward);
    let bytes = 2 * p * f * (activation.width + 1);
    let mut sets = Vec::new();
    for _ in 0..bench.sets(bytes) {
        let h = bench.device.alloc("h", shape)?;
        sets.push((repeated(&mut bench.device, [p, activation.width * f], &z)?, h));
    }
    launch(&mut bench.device, sets[0].0, sets[0].1)?;
    let mut expected = Array2::zeros((PANEL, f));
    on_cpu(widened(z.view()).view(), expected.view_mut()).expect("fits");
    compare(&mut bench.device, "h", sets[0].1, expected)?;
    bench.moving(VERIFIED, bytes, sets, move |device, &(z, h)| launch(device, z, h))
}

fn backwards(
    bench: &mut Bench,
    shape @ [p, f]: [usize; 2],
    activation: &Activation,
) -> Result<Prepared, Stop> {
    let (z, dh, (launch, on_cpu)) =
        (panel(activation.width * f, 1), panel(f, 2), activation.backward);
    let (wide, bytes) = ([p, activation.width * f], 2 * p * f * (2 * activation.width + 1));
    let mut sets = Vec::new();
    for _ in 0..bench.sets(bytes) {
        let device = &mut bench.device;
        sets.push((
            repeated(device, shape, &dh)?,
            repeated(device, wide, &z)?,
            device.alloc("dz", wide)?,
        ));
    }
    let (first, second, dz) = sets[0];
    launch(&mut bench.device, first, second, dz)?;
    let mut expected = Array2::zeros((PANEL, wide[1]));
    on_cpu(widened(dh.view()).view(), widened(z.view()).view(), expected.view_mut()).expect("fits");
    compare(&mut bench.device, "dz", dz, expected)?;
    bench.moving(VERIFIED, bytes, sets, move |device, &(dh, z, dz)| launch(device, dh, z, dz))
}

const VERIFIED: &str = "every element, within 5/1024 of the CPU's in f32";

fn compare(
    device: &mut Device,
    what: &str,
    found: Matrix<bf16>,
    expected: Array2<f32>,
) -> Result<(), Stop> {
    let found = repeating(device, what, found, PANEL)?;
    let count = found.len();
    near(what, found.into_iter().map(bf16::to_f32), expected.into_iter().take(count), [BF16, SMALL])
}

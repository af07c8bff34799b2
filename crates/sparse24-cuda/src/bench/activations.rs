//! GELU, GEGLU and SwiGLU, forward and backward.

use half::bf16;
use ndarray::Array2;
use sparse24_core::op::Activation;
use sparse24_cpu::activation as on_cpu;

use super::{
    Bench, Case, Prepared, Size,
    check::{BF16, Stop, near, repeating},
    input::{PANEL, panel, repeated, widened},
};
use crate::{Device, Matrix, activation};

/// An activation, its kernels, and its reference.
struct Reference {
    activation: Activation,
    entries: [&'static [&'static str; 1]; 2],
}

const ACTIVATIONS: [Reference; 3] = [
    Reference { activation: Activation::Gelu, entries: [&["gelu_forward"], &["gelu_backward"]] },
    Reference { activation: Activation::Geglu, entries: [&["geglu_forward"], &["geglu_backward"]] },
    Reference {
        activation: Activation::Swiglu,
        entries: [&["swiglu_forward"], &["swiglu_backward"]],
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
    let of = |a: &'static Reference| {
        let [[forward], [backward]] = a.entries;
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
    reference: &Reference,
) -> Result<Prepared, Stop> {
    let (activation, columns) = (reference.activation, reference.activation.columns_in());
    let z = panel(columns * f, 1);
    let bytes = 2 * p * f * (columns + 1);
    let mut sets = Vec::new();
    for _ in 0..bench.sets(bytes) {
        let h = bench.device.alloc("h", shape)?;
        sets.push((repeated(&mut bench.device, [p, columns * f], &z)?, h));
    }
    activation::forward(&mut bench.device, activation, sets[0].0, sets[0].1)?;
    let mut expected = Array2::zeros((PANEL, f));
    on_cpu::activation_forward(activation, widened(z.view()).view(), expected.view_mut())
        .expect("fits");
    compare(&mut bench.device, "h", sets[0].1, expected)?;
    bench.moving(VERIFIED, bytes, sets, move |device, &(z, h)| {
        activation::forward(device, activation, z, h)
    })
}

fn backwards(
    bench: &mut Bench,
    shape @ [p, f]: [usize; 2],
    reference: &Reference,
) -> Result<Prepared, Stop> {
    let (activation, columns) = (reference.activation, reference.activation.columns_in());
    let (z, dh) = (panel(columns * f, 1), panel(f, 2));
    let (wide, bytes) = ([p, columns * f], 2 * p * f * (2 * columns + 1));
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
    activation::backward(&mut bench.device, activation, first, second, dz)?;
    let mut expected = Array2::zeros((PANEL, wide[1]));
    let (dh_wide, z_wide) = (widened(dh.view()), widened(z.view()));
    on_cpu::activation_backward(activation, dh_wide.view(), z_wide.view(), expected.view_mut())
        .expect("fits");
    compare(&mut bench.device, "dz", dz, expected)?;
    bench.moving(VERIFIED, bytes, sets, move |device, &(dh, z, dz)| {
        activation::backward(device, activation, dh, z, dz)
    })
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

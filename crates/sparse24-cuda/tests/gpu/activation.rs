//! GELU, GEGLU and SwiGLU, forward and backward: every bf16 number, ragged shapes, and numbers that
//! are not finite.

use half::bf16;
use ndarray::{Array2, Axis, concatenate};
use sparse24_core::op::Activation;
use sparse24_cpu::activation as cpu;
use sparse24_cuda::{
    Device, Error,
    activation::{backward, forward},
};

use crate::{
    support::{Poisoned, gaussian, on_gpu, upload},
    tolerance::{U, activation, assert_within, stored},
};

const SHAPES: [[usize; 2]; 9] =
    [[0, 8], [8, 0], [1, 1], [7, 13], [33, 4], [5, 64], [130, 1600], [3, 3072], [65, 5120]];
/// 2 sqrt(2/pi).
const SLOPE: f64 = 1.595_769_121_605_731;

fn wide(x: &Array2<bf16>) -> Array2<f32> {
    x.mapv(bf16::to_f32)
}

fn widened(x: Vec<bf16>) -> impl Iterator<Item = f32> {
    x.into_iter().map(bf16::to_f32)
}

/// Bounds on the errors of value and slope.
type Bounds = fn(f64) -> [f64; 2];

fn gelu(z: f64) -> [f64; 2] {
    // Beyond the limit, the sigmoid is constant.
    let z = z.max(-9.98);
    activation(z, SLOPE * (z + 0.044715 * z * z * z), SLOPE * (1.0 + 0.134145 * z * z))
}

fn silu(z: f64) -> [f64; 2] {
    let z = z.max(-87.0);
    activation(z, z, 1.0)
}

/// Every finite bf16 number from -2^7 to 2^7, and zeros: `[1, elements]`.
fn every_number() -> Array2<bf16> {
    let numbers = (0..=u16::MAX).map(bf16::from_bits).filter(|x| x.to_f32().abs() <= 128.0);
    Array2::from_shape_vec((1, 2 * 0x4301), numbers.collect()).expect("the shape")
}

#[test]
fn gelu_of_every_number() {
    on_gpu(|device| {
        let z = every_number();
        let shape = [z.nrows(), z.ncols()];
        check_gelu(device, &z, &gaussian(shape, 1));
        check_gelu(device, &z, &Array2::from_elem(shape, bf16::ONE));
    });
}

#[test]
fn gelu_of_ragged_shapes() {
    on_gpu(|device| {
        for shape in SHAPES {
            check_gelu(
                device,
                &gaussian(shape, 2).mapv(|x: bf16| x * bf16::from_f32(4.0)),
                &gaussian(shape, 3),
            );
        }
    });
}

fn check_gelu(device: &mut Device, z: &Array2<bf16>, dh: &Array2<bf16>) {
    let shape = [z.nrows(), z.ncols()];
    let (on_device, dh_on_device) = (upload(device, z), upload(device, dh));
    let [h, dz] = [(); 2].map(|()| Poisoned::<bf16>::new(device, shape));
    forward(device, Activation::Gelu, on_device, h.matrix).expect("queued");
    backward(device, Activation::Gelu, dh_on_device, on_device, dz.matrix).expect("queued");
    let [mut value, mut gradient] = [(); 2].map(|()| Array2::<f32>::zeros(shape));
    cpu::activation_forward(Activation::Gelu, wide(z).view(), value.view_mut())
        .expect("shapes agree");
    let (dh_wide, z_wide) = (wide(dh), wide(z));
    cpu::activation_backward(Activation::Gelu, dh_wide.view(), z_wide.view(), gradient.view_mut())
        .expect("shapes agree");
    let (z, dh): (Vec<f64>, Vec<f64>) =
        z.iter().zip(dh).map(|(z, dh)| (z.to_f64(), dh.to_f64())).unzip();
    let (value, gradient): (Vec<f64>, Vec<f64>) =
        value.iter().zip(&gradient).map(|(&h, &dz)| (f64::from(h), f64::from(dz))).unzip();
    assert_within("h", widened(h.read(device)), &value, |at| stored(value[at], gelu(z[at])[0]));
    assert_within("dz", widened(dz.read(device)), &gradient, |at| {
        stored(gradient[at], dh[at].abs() * gelu(z[at])[1] + 2.0 * U * gradient[at].abs())
    });
}

/// A gated activation and its reference.
#[derive(Clone, Copy)]
struct Gated {
    activation: Activation,
    bounds: Bounds,
}

const GEGLU: Gated = Gated { activation: Activation::Geglu, bounds: gelu };
const SWIGLU: Gated = Gated { activation: Activation::Swiglu, bounds: silu };

impl Gated {
    fn check(self, device: &mut Device, z: &Array2<bf16>, dh: &Array2<bf16>) {
        let (shape, [p, f]) = ([z.nrows(), z.ncols()], [dh.nrows(), dh.ncols()]);
        let (on_device, dh_on_device) = (upload(device, z), upload(device, dh));
        let (h, dz) = (Poisoned::<bf16>::new(device, [p, f]), Poisoned::<bf16>::new(device, shape));
        forward(device, self.activation, on_device, h.matrix).expect("queued");
        backward(device, self.activation, dh_on_device, on_device, dz.matrix).expect("queued");
        let (mut value, mut gradient) = (Array2::<f32>::zeros([p, f]), Array2::<f32>::zeros(shape));
        cpu::activation_forward(self.activation, wide(z).view(), value.view_mut())
            .expect("shapes agree");
        cpu::activation_backward(
            self.activation,
            wide(dh).view(),
            wide(z).view(),
            gradient.view_mut(),
        )
        .expect("shapes agree");
        let (value, gradient) = (
            value.mapv(f64::from).into_raw_vec_and_offset().0,
            gradient.mapv(f64::from).into_raw_vec_and_offset().0,
        );
        let half = |row: usize, column: usize| {
            (z[[row, column]].to_f64(), z[[row, (column + f) % (2 * f)]].to_f64())
        };
        assert_within("h", widened(h.read(device)), &value, |at| {
            let (a, b) = half(at / f, at % f);
            stored(value[at], b.abs() * (self.bounds)(a)[0] + 2.0 * U * value[at].abs())
        });
        assert_within("dz", widened(dz.read(device)), &gradient, |at| {
            let (row, column) = (at / (2 * f), at % (2 * f));
            let (here, there) = half(row, column);
            let dh = dh[[row, column % f]].to_f64().abs();
            let error = if column < f {
                there.abs() * (self.bounds)(here)[1]
            } else {
                (self.bounds)(there)[0]
            };
            stored(gradient[at], dh * error + 4.0 * U * gradient[at].abs())
        });
    }
}

#[test]
fn gated_activations_of_every_number() {
    on_gpu(|device| {
        let a = every_number();
        let shape = [a.nrows(), a.ncols()];
        let z = concatenate![Axis(1), a, gaussian::<bf16>(shape, 4)];
        for gated in [GEGLU, SWIGLU] {
            gated.check(device, &z, &gaussian(shape, 5));
        }
    });
}

#[test]
fn gated_activations_of_ragged_shapes() {
    on_gpu(|device| {
        for [p, f] in SHAPES {
            for gated in [GEGLU, SWIGLU] {
                gated.check(
                    device,
                    &gaussian([p, 2 * f], 6).mapv(|x: bf16| x * bf16::from_f32(4.0)),
                    &gaussian([p, f], 7),
                );
            }
        }
    });
}

/// Values tend to 0 and z, slopes to 0 and 1, and NaN stays NaN.
#[test]
fn extreme_values_and_nans() {
    on_gpu(|device| {
        let numbers =
            [f32::NEG_INFINITY, f32::MIN, -1e20, -0.0, 0.0, 1e20, f32::INFINITY, f32::NAN]
                .map(bf16::from_f32);
        let (z, ones) = (
            Array2::from_shape_vec((1, 8), numbers.to_vec()).expect("a row"),
            Array2::from_elem((1, 8), bf16::ONE),
        );
        let check = |what: &str, found: Vec<bf16>, expected: [f32; 8]| {
            for (found, expected) in found.into_iter().zip(expected) {
                let same = found.to_f32() == bf16::from_f32(expected).to_f32()
                    || (expected == 0.0 && found.to_f32().abs() < 1e-34);
                assert!(
                    same || (found.is_nan() && expected.is_nan()),
                    "{what}: {found} for {expected}"
                );
            }
        };
        let values = numbers.map(|z| if z.to_f32() < 0.0 { 0.0 } else { z.to_f32() });
        let slopes = [0.0, 0.0, 0.0, 0.5, 0.5, 1.0, 1.0, f32::NAN];
        let (on_device, d) = (upload(device, &z), upload(device, &ones));
        let [h, dz] = [(); 2].map(|()| Poisoned::<bf16>::new(device, [1, 8]));
        forward(device, Activation::Gelu, on_device, h.matrix).expect("queued");
        backward(device, Activation::Gelu, d, on_device, dz.matrix).expect("queued");
        check("gelu", h.read(device), values);
        check("gelu'", dz.read(device), slopes);
        let both = upload(device, &concatenate![Axis(1), z, ones]);
        for gated in [GEGLU, SWIGLU] {
            let (h, dz) =
                (Poisoned::<bf16>::new(device, [1, 8]), Poisoned::<bf16>::new(device, [1, 16]));
            forward(device, gated.activation, both, h.matrix).expect("queued");
            backward(device, gated.activation, d, both, dz.matrix).expect("queued");
            check("gated", h.read(device), values);
            let dz = dz.read(device);
            check("gated', first half", dz[..8].to_vec(), slopes);
            check("gated', second half", dz[8..].to_vec(), values);
        }
    });
}

#[test]
fn refusals_name_the_operand() {
    on_gpu(|device| {
        let z = device.alloc::<bf16>("z", [4, 32]).expect("memory");
        let h = device.alloc::<bf16>("h", [4, 24]).expect("memory");
        let wrong = Error::Shape {
            operation: "geglu forward",
            operand: "z",
            expected: [4, 48],
            found: [4, 32],
        };
        assert_eq!(forward(device, Activation::Geglu, z, h), Err(wrong));
        let gaps = Error::Gaps { operation: "gelu forward", operand: "z", columns: 24, stride: 32 };
        assert_eq!(forward(device, Activation::Gelu, z.columns(0..24), h), Err(gaps));
        assert_eq!(
            forward(device, Activation::Gelu, z, z),
            Err(Error::Alias { operation: "gelu forward", output: "h", other: "z" })
        );
        let shifted = z.rows(0..1).columns(1..9);
        let refused =
            backward(device, Activation::Gelu, shifted, shifted, h.rows(0..1).columns(0..8));
        assert_eq!(
            refused,
            Err(Error::Alignment { operation: "gelu backward", operand: "dh", bytes: 16 })
        );
    });
}

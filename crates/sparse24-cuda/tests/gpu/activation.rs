//! Activations of numbers that are not finite, and their errors.

use half::bf16;
use ndarray::{Array2, Axis, concatenate};
use sparse24_core::op::Activation;
use sparse24_cuda::activation::{backward, forward};

use crate::support::{Poisoned, on_gpu, refused, upload};

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
        let relu = numbers.map(|z| if z.to_f32() < 0.0 { 0.0 } else { z.to_f32() });
        let step = [0.0, 0.0, 0.0, 0.5, 0.5, 1.0, 1.0, f32::NAN];
        let hard = step.map(|slope: f32| if slope == 0.5 { 0.0 } else { slope });
        let sign = [-1.0, -1.0, -1.0, 0.0, 0.0, 1.0, 1.0, f32::NAN];
        let peak = [0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, f32::NAN];
        let d = upload(device, &ones);
        for activation in Activation::ALL {
            let gated = activation.columns_in() == 2;
            let z = if gated { concatenate![Axis(1), z, ones] } else { z.clone() };
            let (values, slopes) = match activation {
                Activation::Tanh => (sign, peak),
                Activation::Relu => (relu, hard),
                _ => (relu, step),
            };
            let (shape, z) = ([1, z.ncols()], upload(device, &z));
            let [h, dz] = [[1, 8], shape].map(|shape| Poisoned::<bf16>::new(device, shape));
            forward(device, activation, z, h.matrix).expect("queued");
            backward(device, activation, d, z, dz.matrix).expect("queued");
            check("h", h.read(device), values);
            let dz = dz.read(device);
            check("dz", dz[..8].to_vec(), slopes);
            if gated {
                check("dz, second half", dz[8..].to_vec(), values);
            }
        }
    });
}

#[test]
fn refusals_name_the_operand() {
    on_gpu(|device| {
        let z = device.alloc::<bf16>("z", [4, 32]).expect("memory");
        let h = device.alloc::<bf16>("h", [4, 24]).expect("memory");
        assert_eq!(refused(forward(device, Activation::Geglu, z, h)), ("shape", "z"));
        assert_eq!(refused(forward(device, Activation::Gelu, z.columns(0..24), h)), ("gaps", "z"));
        assert_eq!(refused(forward(device, Activation::Gelu, z, z)), ("alias", "h"));
        let (shifted, h) = (z.rows(0..1).columns(1..9), h.rows(0..1).columns(0..8));
        let shifted = backward(device, Activation::Gelu, shifted, shifted, h);
        assert_eq!(refused(shifted), ("alignment", "dh"));
    });
}

//! bias_grad: within the bound of two sums, the same bits every time.

use half::bf16;
use ndarray::{Array1, Array2, s};
use sparse24_core::op::Accumulate;
use sparse24_cpu::bias as cpu;
use sparse24_cuda::{
    Beta, Error,
    bias::{bias_grad, bias_grad_scratch},
};

use crate::{
    support::{Poisoned, affordable, gaussian, on_gpu, upload},
    tolerance,
};

#[test]
fn column_sums_are_the_cpu_s_within_their_bound() {
    on_gpu(|device| {
        for shape @ [p, r] in [
            [0, 8],
            [1, 1],
            [7, 13],
            [256, 256],
            [257, 264],
            [1000, 1604],
            [5000, 768],
            [9000, 5120],
        ] {
            if !affordable(p * r) {
                continue;
            }
            let dz: Array2<bf16> = gaussian(shape, 1);
            let on_device = upload(device, &dz);
            let (db, scratch) = (
                Poisoned::<f32>::new(device, [1, r]),
                Poisoned::<f32>::new(device, bias_grad_scratch(shape)),
            );
            let magnitudes: Vec<f64> = dz
                .columns()
                .into_iter()
                .map(|column| column.iter().map(|x| x.to_f64().abs()).sum())
                .collect();
            let (wide, mut expected) = (dz.mapv(bf16::to_f32), Array1::zeros(r));
            for (beta, cpu_beta, times) in [
                (Beta::Overwrite, Accumulate::Overwrite, 1.0),
                (Beta::Accumulate, Accumulate::Add, 2.0),
            ] {
                bias_grad(device, on_device, db.matrix, beta, scratch.matrix).expect("queued");
                cpu::bias_grad(wide.view(), expected.view_mut(), cpu_beta).expect("shapes agree");
                let found = db.read(device);
                let sums: Vec<f64> = expected.iter().map(|&x: &f32| f64::from(x)).collect();
                tolerance::assert_within("db", found, &sums, |at| {
                    times * tolerance::bias_grad(p, bias_grad_scratch(shape)[0], magnitudes[at])
                });
            }
            scratch.assert_guarded(device);
        }
    });
}

/// Integers add up exactly, whatever the order; rows may lie apart, at any alignment.
#[test]
fn integers_are_summed_exactly() {
    on_gpu(|device| {
        let dz = Array2::from_shape_fn((1030, 80), |(row, column)| {
            bf16::from_f32(((row * 7 + column * 5) % 11) as f32 - 5.0)
        });
        let on_device = upload(device, &dz);
        for (rows, columns) in [(0..1030, 0..80), (3..1029, 8..72), (1..600, 3..50)] {
            let part = on_device.rows(rows.clone()).columns(columns.clone());
            let db = Poisoned::<f32>::new(device, [1, columns.len()]);
            let scratch = Poisoned::new(device, bias_grad_scratch(part.shape()));
            bias_grad(device, part, db.matrix, Beta::Overwrite, scratch.matrix).expect("queued");
            let expected =
                dz.slice(s![rows, columns]).mapv(bf16::to_f32).sum_axis(ndarray::Axis(0));
            assert_eq!(db.read(device), expected.to_vec());
        }
        let scratch = device.alloc("scratch", [1, 80]).expect("memory");
        let db = device.alloc("db", [1, 80]).expect("memory");
        let refused = bias_grad(device, on_device, db, Beta::Overwrite, scratch);
        assert_eq!(
            refused,
            Err(Error::Shape {
                operation: "bias grad",
                operand: "scratch",
                expected: [17, 80],
                found: [1, 80]
            })
        );
    });
}

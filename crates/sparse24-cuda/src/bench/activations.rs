//! Activations and their gradients: MVUE, bias gradients, dropout, GELU, GEGLU and SwiGLU.

use std::slice;

use half::bf16;
use ndarray::{Array2, Axis, s};
use sparse24_core::{
    compressed::Compressed24,
    mvue::Estimator,
    op::{Activation, Dropout, StepState},
    philox::{Purpose, Site, Stream},
};
use sparse24_cpu::{activation as on_cpu, dropout as dropout_on_cpu, mvue as mvue_on_cpu};

use super::{
    Bench, Case, OVERWRITE, Prepared, Size,
    check::{BF16, CLOSE, Stop, near_rows, same, same_compressed},
    input::{PANEL, panel, random, repeated, tall, widened},
};
use crate::{
    activation,
    bias::{bias_grad, bias_grad_scratch},
    compressed::Compressed,
    dropout::dropout,
    mvue::mvue_compress,
};

pub(super) fn cases(size: &Size) -> Vec<Case> {
    let (hidden, stream) = (size.hidden(), size.stream());
    let estimate = |kernel, entries, shape, estimator, zeros| {
        Case::new(kernel, entries, shape, move |bench, shape| {
            estimate(bench, shape, estimator, zeros)
        })
    };
    let exact = &["mvue_compress_exact"];
    let mut cases = vec![estimate("mvue_exact", exact, hidden, Estimator::Exact, Zeros::None)];
    if stream != hidden {
        cases.push(estimate("mvue_exact", exact, stream, Estimator::Exact, Zeros::None));
    }
    let approximate = &["mvue_compress_approximate"];
    cases.extend([
        // As after dropout: groups with three or four zeros take the slow path.
        estimate("mvue_exact_fifth_zero", exact, hidden, Estimator::Exact, Zeros::Fifth),
        estimate("mvue_approximate", approximate, hidden, Estimator::Approximate, Zeros::None),
        Case::new("bias_grad", &["column_sums", "row_sums"], hidden, sums),
        Case::new("dropout", &["dropout"], stream, drops),
    ]);
    for (activation, [(_, of_forward), (_, of_backward)]) in &activation::KERNELS {
        cases.extend([
            Case::new(of_forward, slice::from_ref(of_forward), hidden, |bench, shape| {
                forward(bench, shape, *activation)
            }),
            Case::new(of_backward, slice::from_ref(of_backward), hidden, |bench, shape| {
                backward(bench, shape, *activation)
            }),
        ]);
    }
    cases
}

const STATE: StepState = StepState {
    seed: 1,
    step: 1,
    micro_step: 0,
    learning_rate: 0.0,
    bias_corrections: [1.0, 1.0],
    loss_scale: 1.0,
};

/// The share of zeros in a gradient.
#[derive(Clone, Copy, PartialEq)]
enum Zeros {
    None,
    Fifth,
}

fn estimate(
    bench: &mut Bench,
    shape @ [p, r]: [usize; 2],
    estimator: Estimator,
    zeros: Zeros,
) -> Result<Prepared, Stop> {
    const SITE: Site = Site::new(Purpose::Mvue, 1);
    let mut few = panel(r, 5);
    if zeros == Zeros::Fifth {
        few.zip_mut_with(&random([PANEL, r], 6), |x, &other| {
            if other.to_bits() >> 4 & 0xff < 51 {
                *x = bf16::ZERO
            }
        });
    }
    let bytes = 2 * p * r + p * r + p * r / 8;
    bench.device.set_step(&STATE)?;
    let sets = bench.sets(bytes, |device| {
        Ok((repeated(device, shape, &few)?, Compressed::alloc(device, "estimate", [r, p])?))
    })?;
    bench.kernel(
        "every group, bit for bit with core",
        bytes,
        sets,
        move |device, &(dz, out)| mvue_compress(device, dz, estimator, SITE, out),
        |device, (_, out)| {
            let (host, stream) = (tall(p, &few), Stream::new(1, SITE, 0, 1));
            let mut expected = Compressed24::zeros(r, p)?;
            mvue_on_cpu::mvue_compress(host.view(), estimator, stream, &mut expected)
                .expect("grouped");
            same_compressed("the estimate", &out.download(device)?, &expected)
        },
    )
}

fn sums(bench: &mut Bench, shape @ [p, r]: [usize; 2]) -> Result<Prepared, Stop> {
    let bytes = 2 * p * r;
    let db = bench.device.alloc("db", [1, r])?;
    let scratch = bench.device.alloc("scratch", bias_grad_scratch(shape))?;
    let sets = bench.sets(bytes, |device| repeated(device, shape, &panel(r, 7)))?;
    bench.kernel(
        "every sum, of small integers, exactly",
        bytes,
        sets,
        move |device, &dz| bias_grad(device, dz, db, OVERWRITE, scratch),
        |device, _| {
            let few = Array2::from_shape_fn((PANEL, r), |(row, column)| {
                bf16::from_f32(((row + column) % 7) as f32 - 3.0)
            });
            let integers = repeated(device, shape, &few)?;
            bias_grad(device, integers, db, OVERWRITE, scratch)?;
            let few = widened(&few);
            let rest = few.slice(s![..p % PANEL, ..]).sum_axis(Axis(0));
            let expected = few.sum_axis(Axis(0)) * (p / PANEL) as f32 + rest;
            same("db", &device.download(db)?, &expected.to_vec())
        },
    )
}

fn drops(bench: &mut Bench, shape @ [p, r]: [usize; 2]) -> Result<Prepared, Stop> {
    const RULE: Dropout = Dropout { p: 0.1, site: Site::new(Purpose::Dropout, 1) };
    let (values, bytes) = (panel(r, 8), 4 * p * r);
    bench.device.set_step(&STATE)?;
    let sets = bench.sets(bytes, |device| repeated(device, shape, &values))?;
    bench.kernel(
        "every element, bit for bit with the CPU",
        bytes,
        sets,
        |device, &x| dropout(device, x, &RULE),
        |device, &x| {
            let mut expected = widened(&tall(p, &values));
            let stream = Stream::new(1, RULE.site, 0, 1);
            dropout_on_cpu::dropout(expected.view_mut(), &RULE, stream).expect("contiguous");
            let expected: Vec<bf16> = expected.into_iter().map(bf16::from_f32).collect();
            same("x", &device.download(x)?, &expected)
        },
    )
}

/// Where a slope is near zero, f32's sums are good to this.
const SMALL: f64 = 1e-5;

fn forward(
    bench: &mut Bench,
    shape @ [p, f]: [usize; 2],
    activation: Activation,
) -> Result<Prepared, Stop> {
    let columns = activation.columns_in();
    let (z, bytes) = (panel(columns * f, 1), 2 * p * f * (columns + 1));
    let sets = bench.sets(bytes, |device| {
        Ok((repeated(device, [p, columns * f], &z)?, device.alloc("h", shape)?))
    })?;
    bench.kernel(
        CLOSE,
        bytes,
        sets,
        move |device, &(z, h)| activation::forward(device, activation, z, h),
        |device, &(_, h)| {
            let mut expected = Array2::zeros((PANEL, f));
            on_cpu::activation_forward(activation, widened(&z).view(), expected.view_mut())
                .expect("fits");
            near_rows(device, "h", h, &expected, [BF16, SMALL])
        },
    )
}

fn backward(
    bench: &mut Bench,
    shape @ [p, f]: [usize; 2],
    activation: Activation,
) -> Result<Prepared, Stop> {
    let columns = activation.columns_in();
    let (z, dh, wide) = (panel(columns * f, 1), panel(f, 2), [p, columns * f]);
    let bytes = 2 * p * f * (2 * columns + 1);
    let sets = bench.sets(bytes, |device| {
        let (dh, z) = (repeated(device, shape, &dh)?, repeated(device, wide, &z)?);
        Ok((dh, z, device.alloc("dz", wide)?))
    })?;
    bench.kernel(
        CLOSE,
        bytes,
        sets,
        move |device, &(dh, z, dz)| activation::backward(device, activation, dh, z, dz),
        |device, &(_, _, dz)| {
            let (dh, z, mut expected) = (widened(&dh), widened(&z), Array2::zeros(z.dim()));
            on_cpu::activation_backward(activation, dh.view(), z.view(), expected.view_mut())
                .expect("fits");
            near_rows(device, "dz", dz, &expected, [BF16, SMALL])
        },
    )
}

//! What is done to gradients of activations: the estimator, bias gradients, dropout.

use half::bf16;
use ndarray::{Array2, Axis};
use sparse24_core::{
    compressed::Compressed24,
    mvue::Estimator,
    philox::{Purpose, Site, Stream},
};
use sparse24_cpu as cpu;

use super::{
    BETA, Bench, Case, Prepared, Size,
    check::{Stop, same, same_compressed},
    input::{PANEL, panel, random, repeated, tall, upload},
};
use crate::{
    Error, StepState,
    bias::{bias_grad, bias_grad_scratch},
    compressed::Compressed,
    dropout::{Dropout, dropout},
    mvue::mvue_compress,
};

const STATE: StepState = StepState {
    seed: 1,
    step: 1,
    micro_step: 0,
    learning_rate: 0.0,
    bias_correction1: 1.0,
    bias_correction2: 1.0,
};

pub(super) fn cases(size: &Size) -> Vec<Case> {
    let case = |kernel, entries, shape: [usize; 2], prepare: Box<super::Prepare>| Case {
        kernel,
        shape: format!("{}x{}", shape[0], shape[1]),
        entries,
        prepare,
    };
    let (hidden, stream) = (size.hidden(), size.stream());
    let exact: &[&str] = &["mvue_compress_exact"];
    let estimate = |shape, estimator, zeros| -> Box<super::Prepare> {
        Box::new(move |bench| estimates(bench, shape, estimator, zeros))
    };
    let mut cases =
        vec![case("mvue_exact", exact, hidden, estimate(hidden, Estimator::Exact, Zeros::None))];
    if stream != hidden {
        cases.push(case(
            "mvue_exact",
            exact,
            stream,
            estimate(stream, Estimator::Exact, Zeros::None),
        ));
    }
    // As after dropout: groups with three zeros or four take the long way.
    cases.push(case(
        "mvue_exact_fifth_zero",
        exact,
        hidden,
        estimate(hidden, Estimator::Exact, Zeros::Fifth),
    ));
    let approximate = estimate(hidden, Estimator::Approximate, Zeros::None);
    cases.push(case("mvue_approximate", &["mvue_compress_approximate"], hidden, approximate));
    cases.push(case(
        "bias_grad",
        &["column_sums", "row_sums"],
        hidden,
        Box::new(move |bench| sums(bench, hidden)),
    ));
    cases.push(case("dropout", &["dropout"], stream, Box::new(move |bench| drops(bench, stream))));
    cases
}

/// How much of a gradient is zero.
#[derive(Clone, Copy, PartialEq)]
enum Zeros {
    None,
    Fifth,
}

fn estimates(
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
    let sets = (0..bench.sets(bytes))
        .map(|_| {
            let dz = repeated(&mut bench.device, shape, &few)?;
            Ok((dz, Compressed::alloc(&mut bench.device, "estimate", [r, p])?))
        })
        .collect::<Result<Vec<_>, Error>>()?;
    let (dz, out) = sets[0];
    mvue_compress(&mut bench.device, dz, estimator, SITE, out)?;
    let host = tall(p, &few);
    let mut expected = Compressed24::zeros(r, p)?;
    cpu::mvue::mvue_compress(host.view(), estimator, Stream::new(1, SITE, 0, 1), &mut expected)
        .expect("grouped");
    same_compressed("the estimate", &out.download(&mut bench.device)?, &expected)?;
    bench.moving("every group, bit for bit with core", bytes, sets, move |device, &(dz, out)| {
        mvue_compress(device, dz, estimator, SITE, out)
    })
}

fn sums(bench: &mut Bench, shape @ [p, r]: [usize; 2]) -> Result<Prepared, Stop> {
    let few = Array2::from_shape_fn((PANEL, r), |(row, column)| {
        bf16::from_f32(((row + column) % 7) as f32 - 3.0)
    });
    let of_panel = few.mapv(bf16::to_f32).sum_axis(Axis(0));
    let rest = few.slice(ndarray::s![..p % PANEL, ..]).mapv(bf16::to_f32).sum_axis(Axis(0));
    let device = &mut bench.device;
    let (db, scratch) =
        (device.alloc("db", [1, r])?, device.alloc("scratch", bias_grad_scratch(shape))?);
    let integers = repeated(device, shape, &few)?;
    bias_grad(device, integers, db, BETA, scratch)?;
    let expected: Vec<f32> =
        of_panel.iter().zip(&rest).map(|(sum, rest)| (p / PANEL) as f32 * sum + rest).collect();
    same("db", &device.download(db)?, &expected)?;
    let sets = (0..bench.sets(2 * p * r))
        .map(|_| repeated(&mut bench.device, shape, &panel(r, 7)))
        .collect::<Result<Vec<_>, Error>>()?;
    bench.moving("every sum, of small integers, exactly", 2 * p * r, sets, move |device, &dz| {
        bias_grad(device, dz, db, BETA, scratch)
    })
}

fn drops(bench: &mut Bench, shape @ [p, r]: [usize; 2]) -> Result<Prepared, Stop> {
    const SITE: Site = Site::new(Purpose::Dropout, 1);
    let rule = Dropout { p: 0.1, site: SITE };
    bench.device.set_step(&STATE)?;
    let values = panel(r, 8);
    let sets = (0..bench.sets(4 * p * r))
        .map(|_| repeated(&mut bench.device, shape, &values))
        .collect::<Result<Vec<_>, Error>>()?;
    let host = tall(p, &values);
    let fresh = upload(&mut bench.device, host.view())?;
    dropout(&mut bench.device, fresh, &rule)?;
    let mut expected = host.mapv(bf16::to_f32);
    let on_cpu = sparse24_core::op::Dropout { p: rule.p, site: SITE };
    cpu::dropout::dropout(expected.view_mut(), &on_cpu, Stream::new(1, SITE, 0, 1))
        .expect("contiguous");
    let expected: Vec<bf16> = expected.into_iter().map(bf16::from_f32).collect();
    same("x", &bench.device.download(fresh)?, &expected)?;
    bench.moving("every element, bit for bit with the CPU", 4 * p * r, sets, move |device, &x| {
        dropout(device, x, &rule)
    })
}

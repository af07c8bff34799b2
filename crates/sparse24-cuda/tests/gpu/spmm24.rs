//! spmm24 and spmm24_transposed, by every plan.

use half::bf16;
use ndarray::{Array2, Axis, concatenate};
use sparse24_core::{
    compressed::Compressed24,
    group::Pattern,
    op::Accumulate,
    philox::{Philox4x32, uniform},
};
use sparse24_cuda::{
    Device, Error,
    compressed::Compressed,
    layout::to_fragments,
    spmm24::{Form, Plan, Straight, Transposed, Wgmma, plans, spmm24, spmm24_transposed},
};

use crate::{
    support::{Poisoned, affordable, gaussian, on_gpu, upload},
    tolerance,
};

/// m, k, n: one block; one tile; ragged tokens; partial tiles; long and short k; small shapes whose
/// k wraps around the longest ring of stages.
const SHAPES: [[usize; 3]; 14] = [
    [64, 64, 64],
    [4, 4, 1],
    [8, 8, 4],
    [64, 64, 3],
    [264, 136, 65],
    [260, 132, 68],
    [320, 192, 1000],
    [1024, 1600, 1000],
    [1600, 64, 400],
    [132, 1092, 36],
    [768, 1024, 772],
    [2048, 320, 1024],
    [64, 512, 64],
    [260, 704, 36],
];

#[test]
fn products_of_small_integers_are_exact() {
    on_gpu(|device| {
        for [m, k, n] in SHAPES.into_iter().filter(affordable_product) {
            let a = sparse([m, k], 1, |x| bf16::from_f32(small(x)));
            let x = gaussian::<f32>([n, k], 2).mapv(small);
            let bias = gaussian::<f32>([1, m], 3).mapv(small);
            let product = reference(&a, &x.t().to_owned());
            let expected = (&product.t() + &bias).mapv(bf16::from_f32);
            for plan in all_plans(device, Form::Transposed, [m, n, k]) {
                let d = transposed(device, &a, &x.mapv(bf16::from_f32), Some(&bias), plan);
                assert_eq!(
                    first_difference(&d, &expected),
                    None,
                    "{plan} of m, k, n = {:?}",
                    [m, k, n]
                );
            }
            if n % 4 != 0 {
                continue;
            }
            let b = x.t().as_standard_layout().into_owned();
            let before = gaussian::<f32>([m, n], 4).mapv(small);
            for plan in all_plans(device, Form::Straight, [m, n, k]) {
                for (beta, expected) in [
                    (Accumulate::Overwrite, product.clone()),
                    (Accumulate::Add, &product + &before),
                ] {
                    let d = straight(device, &a, &b.mapv(bf16::from_f32), (beta, &before), plan);
                    assert_eq!(
                        first_difference(&d, &expected),
                        None,
                        "{plan}, {beta:?} of m, k, n = {:?}",
                        [m, k, n]
                    );
                }
            }
        }
    });
}

#[test]
fn an_identity_returns_the_other_operand() {
    on_gpu(|device| {
        for (size, n) in [(72, 40), (320, 200)]
            .into_iter()
            .filter(|&(size, n)| affordable_product(&[size, size, n]))
        {
            let identity = identity([size, size]);
            let x = gaussian::<bf16>([n, size], 5);
            for plan in all_plans(device, Form::Transposed, [size, n, size]) {
                let d = transposed(device, &identity, &x, None, plan);
                assert_eq!(first_difference(&d, &x), None, "{plan}");
            }
            let b = x.t().as_standard_layout().into_owned();
            let expected = b.mapv(bf16::to_f32);
            for plan in all_plans(device, Form::Straight, [size, n, size]) {
                let d = straight(device, &identity, &b, (Accumulate::Overwrite, &expected), plan);
                assert_eq!(first_difference(&d, &expected), None, "{plan}");
            }
        }
    });
}

#[test]
fn other_products_are_within_their_bound_and_repeat_their_bits() {
    on_gpu(|device| {
        for [m, k, n] in [[264, 136, 65], [136, 200, 72], [320, 1024, 1000], [768, 3072, 264]]
            .into_iter()
            .filter(affordable_product)
        {
            let a = sparse([m, k], 6, bf16::from_f32);
            let x = gaussian::<bf16>([n, k], 7);
            let b = x.t().mapv(bf16::to_f32);
            let bias = gaussian::<f32>([1, m], 8);
            let magnitudes = Compressed24::from_parts(
                a.values().mapv(|x| bf16::from_f32(x.to_f32().abs())),
                a.metadata().to_vec(),
            )
            .expect("patterns");
            let bound = tolerance::spmm24::product(
                k,
                &(reference(&magnitudes, &b.mapv(f32::abs)) + bias.mapv(f32::abs).t()),
            );
            let product = reference(&a, &b);
            for plan in all_plans(device, Form::Transposed, [m, n, k]) {
                let [d, again] = [(); 2].map(|()| transposed(device, &a, &x, Some(&bias), plan));
                assert_eq!(first_difference(&d, &again), None, "{plan}");
                for ((token, feature), &d) in d.indexed_iter() {
                    let expected = product[[feature, token]] + bias[[0, feature]];
                    let bound = tolerance::spmm24::rounded(expected, bound[[feature, token]]);
                    assert!(
                        (d.to_f32() - expected).abs() <= bound,
                        "{plan} at {:?}: {d}, not {expected} +- {bound}",
                        [token, feature]
                    );
                }
            }
            if n % 4 != 0 {
                continue;
            }
            let b = x.t().as_standard_layout().into_owned();
            for plan in all_plans(device, Form::Straight, [m, n, k]) {
                let [d, again] = [(); 2]
                    .map(|()| straight(device, &a, &b, (Accumulate::Overwrite, &product), plan));
                assert_eq!(first_difference(&d, &again), None, "{plan}");
                for (at, &d) in d.indexed_iter() {
                    let (expected, bound) = (product[at], bound[at]);
                    assert!(
                        (d - expected).abs() <= bound,
                        "{plan} at {at:?}: {d}, not {expected} +- {bound}"
                    );
                }
            }
        }
    });
}

/// Only rows that keep a NaN's column become NaN.
#[test]
fn a_nan_spoils_rows_that_keep_its_column() {
    on_gpu(|device| {
        let [m, k, n] = [136, 192, 72];
        let a = sparse([m, k], 9, bf16::from_f32);
        let mut x = gaussian::<bf16>([n, k], 10);
        x[[5, 70]] = bf16::NAN;
        x[[6, 71]] = bf16::INFINITY;
        let expected = reference(&a, &x.t().mapv(bf16::to_f32)).mapv(f32::is_finite);
        assert!(
            expected.iter().any(|&finite| !finite)
                && expected.column(5).iter().any(|&finite| finite)
        );
        for plan in all_plans(device, Form::Transposed, [m, n, k]) {
            let d = transposed(device, &a, &x, None, plan).t().mapv(|d| d.to_f32().is_finite());
            assert_eq!(
                first_difference(&d.as_standard_layout().into_owned(), &expected),
                None,
                "{plan}"
            );
        }
    });
}

/// If tokens are not a multiple of four, A is padded with zeros along them, and B is not.
#[test]
fn missing_last_rows_of_b_count_as_zeros() {
    on_gpu(|device| {
        let [m, k, n] = [72, 136, 264];
        let a = sparse([m, k], 11, |x| bf16::from_f32(small(x)));
        for missing in 1..4 {
            let b = gaussian::<f32>([k - missing, n], 12).mapv(small);
            let padded = concatenate![Axis(0), b, Array2::zeros((missing, n))];
            let expected = reference(&a, &padded);
            for plan in all_plans(device, Form::Straight, [m, n, k]) {
                let d = straight(
                    device,
                    &a,
                    &b.mapv(bf16::from_f32),
                    (Accumulate::Overwrite, &expected),
                    plan,
                );
                assert_eq!(first_difference(&d, &expected), None, "{plan}, {missing} missing");
            }
        }
    });
}

#[test]
fn empty_sums_are_zero_and_empty_results_are_fine() {
    on_gpu(|device| {
        let bias = gaussian::<f32>([1, 72], 13);
        let a = Compressed24::zeros(72, 0).expect("grouped");
        for plan in all_plans(device, Form::Transposed, [72, 40, 64]) {
            let d =
                transposed(device, &a, &Array2::from_elem((40, 0), bf16::ZERO), Some(&bias), plan);
            let expected = bias.mapv(bf16::from_f32);
            assert!(d.rows().into_iter().all(|row| row == expected.row(0)), "{plan}");
            for [m, n] in [[0, 40], [72, 0]] {
                let d = transposed(
                    device,
                    &Compressed24::zeros(m, 64).expect("grouped"),
                    &Array2::from_elem((n, 64), bf16::ZERO),
                    None,
                    plan,
                );
                assert_eq!(d.dim(), (n, m));
            }
        }
    });
}

#[test]
fn bad_operands_are_refused() {
    on_gpu(|device| {
        let a = compressed(device, &sparse([72, 64], 14, bf16::from_f32));
        let [wide, odd] = [80, 68]
            .map(|stride| device.alloc::<bf16>("b", [40, stride]).expect("memory").columns(0..64));
        let d = device.alloc::<bf16>("d", [40, 72]).expect("memory");
        let scratch = device.alloc::<f32>("scratch", [1, 0]).expect("memory");
        let good = Transposed { a, b: wide, bias: None, d, scratch };
        let wgmma = plans(device, Form::Transposed, [72, 40, 64], 16).expect("plans")[0];
        let refused = |device: &mut Device, operands: Transposed, plan| {
            spmm24_transposed(device, &operands, plan).expect_err("refused")
        };
        assert!(matches!(
            refused(device, Transposed { b: wide.rows(0..39), ..good }, wgmma),
            Error::Shape { operand: "d", .. }
        ));
        assert!(matches!(
            refused(device, Transposed { d: wide.columns(0..40), ..good }, wgmma),
            Error::Shape { operand: "d", .. }
        ));
        let alias = device.alloc::<bf16>("both", [40, 72]).expect("memory");
        assert!(matches!(
            refused(device, Transposed { b: alias.columns(0..64), d: alias, ..good }, wgmma),
            Error::Alias { output: "d", .. }
        ));
        if let Plan::Wgmma(wgmma) = wgmma {
            assert!(matches!(
                refused(device, Transposed { b: odd, ..good }, Plan::Wgmma(wgmma)),
                Error::Alignment { operand: "b", bytes: 16, .. }
            ));
            for bad in [
                Wgmma { split: 0, parts: 2, ..wgmma },
                Wgmma { sweep: 0, ..wgmma },
                Wgmma { sweep: 1 << 26, ..wgmma },
                Wgmma { residents: 0, ..wgmma },
            ] {
                assert!(
                    matches!(refused(device, good, Plan::Wgmma(bad)), Error::Plan { .. }),
                    "{bad:?}"
                );
            }
        }
        spmm24_transposed(device, &Transposed { b: odd, ..good }, Plan::Mma)
            .expect("narrow rows suffice");
        let other = Compressed::alloc(device, "a", [70, 64]).expect("memory");
        assert!(matches!(
            refused(device, Transposed { a: other, ..good }, Plan::Mma),
            Error::Semantics(_)
        ));
    });
}

/// The head of a large model, forward, dgrad and wgrad: exact on identities and small integers.
#[test]
#[ignore = "gigabytes: `run.sh long`"]
fn products_of_a_large_matrix_are_exact() {
    const WIDE: [usize; 2] = [30_768, 8192];
    on_gpu(|device| {
        let n = 260;
        for [m, k] in [WIDE, [WIDE[1], WIDE[0]]] {
            let panel = sparse([PANEL, k], 15, |x| bf16::from_f32(small(x)));
            let x = gaussian::<f32>([n, k], 16).mapv(|x| bf16::from_f32(small(x)));
            let product = reference(&panel, &x.t().mapv(bf16::to_f32));
            let product = Array2::from_shape_fn((n, m), |(token, row)| {
                bf16::from_f32(product[[row % PANEL, token]])
            });
            let copied = Array2::from_shape_fn((n, m), |(token, row)| x[[token, row % k]]);
            for (a, expected) in [(repeated(&panel, m), product), (identity([m, k]), copied)] {
                let a = compressed(device, &a);
                for plan in plans(device, Form::Transposed, [m, n, k], 16).expect("plans") {
                    let d = transposed_on_device(device, a, &x, None, plan);
                    assert_eq!(
                        first_difference(&d, &expected),
                        None,
                        "{plan} of m, k, n = {:?}",
                        [m, k, n]
                    );
                }
                device.reset().expect("no kernel failed");
            }
        }
        let ([m, n], k) = (WIDE, 260);
        let panel = sparse([PANEL, k], 17, |x| bf16::from_f32(small(x)));
        let b = gaussian::<f32>([k, n], 18).mapv(|x| bf16::from_f32(small(x)));
        let product = reference(&panel, &b.mapv(bf16::to_f32));
        let product = Array2::from_shape_fn((m, n), |(row, column)| product[[row % PANEL, column]]);
        let copied = Array2::from_shape_fn((m, n), |(row, column)| b[[row % k, column]].to_f32());
        for (a, expected) in [(repeated(&panel, m), product), (identity([m, k]), copied)] {
            let a = compressed(device, &a);
            for plan in plans(device, Form::Straight, [m, n, k], 16).expect("plans") {
                let d = straight_on_device(device, a, &b, (Accumulate::Overwrite, &expected), plan);
                assert_eq!(
                    first_difference(&d, &expected),
                    None,
                    "{plan} of m, k, n = {:?}",
                    [m, k, n]
                );
            }
            device.reset().expect("no kernel failed");
        }
    });
}

/// Distinct rows of a large random operand: not a multiple of a block, so that blocks differ.
const PANEL: usize = 769;

/// Repeats the rows.
fn repeated(a: &Compressed24<bf16>, rows: usize) -> Compressed24<bf16> {
    let bytes = a.metadata().len() / a.shape()[0];
    let values = Array2::from_shape_fn((rows, a.values().ncols()), |(row, kept)| {
        a.values()[[row % a.shape()[0], kept]]
    });
    let metadata = a.metadata().iter().copied().cycle().take(rows * bytes).collect();
    Compressed24::from_parts(values, metadata).expect("patterns")
}

/// A one in each row, on a diagonal that wraps around.
fn identity([m, k]: [usize; 2]) -> Compressed24<bf16> {
    let (kept, bytes) = (Pattern::ALL[0].nibble(), (k / 4).div_ceil(2));
    let row = |groups: usize| {
        (0..groups.div_ceil(2))
            .map(move |byte| if 2 * byte + 1 < groups { kept * 0x11 } else { kept })
    };
    let metadata = (0..m).flat_map(|_| row(k / 4)).collect();
    let mut identity =
        Compressed24::from_parts(Array2::from_elem((m, k / 2), bf16::ZERO), metadata)
            .expect("patterns");
    let (mut values, metadata) = identity.parts_mut();
    for row in 0..m {
        // Columns 0 and 1 of a group are kept where the diagonal is among them, 2 and 3 otherwise.
        let (group, within) = (row % k / 4, row % 4);
        values[[row, 2 * group + within % 2]] = bf16::ONE;
        if within >= 2 {
            let byte = &mut metadata[row * bytes + group / 2];
            *byte = *byte & !(0xf << (4 * (group % 2))) | 0xe << (4 * (group % 2));
        }
    }
    identity
}

/// Whether a product `[m, k, n]` is run; the sanitizer runs small ones only.
fn affordable_product([m, k, n]: &[usize; 3]) -> bool {
    affordable(m * k * n / 64)
}

/// Integers in -2..=2.
fn small(x: f32) -> f32 {
    (x * 2.0).round().clamp(-2.0, 2.0)
}

/// Random kept values in random patterns.
fn sparse([m, k]: [usize; 2], seed: u64, value: impl Fn(f32) -> bf16) -> Compressed24<bf16> {
    let philox = Philox4x32::new(seed);
    let pattern = |row: usize, group: usize| {
        Pattern::ALL[(uniform(philox.block([row as u32, group as u32, 1, 0])[0]) * 6.0) as usize]
            .nibble()
    };
    let bytes = (k / 4).div_ceil(2);
    let mut metadata = vec![0; m * bytes];
    for row in 0..m {
        (0..k / 4).for_each(|group| {
            metadata[row * bytes + group / 2] |= pattern(row, group) << (4 * (group % 2))
        });
    }
    Compressed24::from_parts(gaussian::<f32>([m, k / 2], seed).mapv(value), metadata)
        .expect("patterns")
}

fn reference(a: &Compressed24<bf16>, b: &Array2<f32>) -> Array2<f32> {
    let mut d = Array2::zeros((a.shape()[0], b.ncols()));
    sparse24_cpu::spmm24::spmm24(a, b.view(), d.view_mut()).expect("the shapes agree");
    d
}

/// The offered plans, and variants with other schedules.
fn all_plans(device: &mut Device, form: Form, [m, n, k]: [usize; 3]) -> Vec<Plan> {
    let inner = if form == Form::Transposed { [k, m] } else { [n, n] };
    let alignment = if inner.iter().all(|length| length % 8 == 0) { 16 } else { 8 };
    let offered = plans(device, form, [m, n, k], alignment).expect("plans");
    let more = offered.iter().flat_map(|&plan| match plan {
        Plan::Mma => vec![],
        Plan::Wgmma(wgmma) => {
            let parts = k.div_ceil(64).min(3) as u32;
            vec![
                Wgmma { split: 1, parts, residents: 2, ..wgmma },
                Wgmma { sweep: 1, split: 0, parts: 1, residents: 5, ..wgmma },
            ]
        }
    });
    let more: Vec<Plan> = more.map(Plan::Wgmma).collect();
    [offered, more].concat()
}

fn compressed(device: &mut Device, a: &Compressed24<bf16>) -> Compressed {
    let on_device = Compressed::alloc(device, "a", a.shape()).expect("memory");
    on_device.upload(device, &to_fragments(a)).expect("uploaded");
    on_device
}

fn transposed(
    device: &mut Device,
    a: &Compressed24<bf16>,
    x: &Array2<bf16>,
    bias: Option<&Array2<f32>>,
    plan: Plan,
) -> Array2<bf16> {
    let a = compressed(device, a);
    transposed_on_device(device, a, x, bias, plan)
}

fn transposed_on_device(
    device: &mut Device,
    a: Compressed,
    x: &Array2<bf16>,
    bias: Option<&Array2<f32>>,
    plan: Plan,
) -> Array2<bf16> {
    let (b, bias) = (upload(device, x), bias.map(|bias| upload(device, bias)));
    let d = Poisoned::new(device, [x.nrows(), a.shape()[0]]);
    if plan != Plan::Mma {
        // The sanitizer does not see TMA stores, and would report the result as uninitialized.
        device.fill_bytes(d.matrix, 0xff).expect("filled");
    }
    let scratch = Poisoned::new(device, [1, plan.scratch()]);
    spmm24_transposed(
        device,
        &Transposed { a, b, bias, d: d.matrix, scratch: scratch.matrix },
        plan,
    )
    .expect("queued");
    untouched_around(device, &scratch);
    Array2::from_shape_vec((x.nrows(), a.shape()[0]), d.read(device)).expect("the shape")
}

fn straight(
    device: &mut Device,
    a: &Compressed24<bf16>,
    b: &Array2<bf16>,
    result: (Accumulate, &Array2<f32>),
    plan: Plan,
) -> Array2<f32> {
    let a = compressed(device, a);
    straight_on_device(device, a, b, result, plan)
}

fn straight_on_device(
    device: &mut Device,
    a: Compressed,
    b: &Array2<bf16>,
    (beta, before): (Accumulate, &Array2<f32>),
    plan: Plan,
) -> Array2<f32> {
    let b = upload(device, b);
    let d = Poisoned::new(device, [a.shape()[0], b.shape()[1]]);
    if beta == Accumulate::Add {
        device.upload(d.matrix, before.as_slice().expect("row-major")).expect("uploaded");
    }
    let scratch = Poisoned::new(device, [1, plan.scratch()]);
    spmm24(
        device,
        &Straight { a, b, d: d.matrix, accumulate: beta, scratch: scratch.matrix },
        plan,
    )
    .expect("queued");
    untouched_around(device, &scratch);
    Array2::from_shape_vec((a.shape()[0], b.shape()[1]), d.read(device)).expect("the shape")
}

/// Asserts that the guard bands are untouched; part of the scratch may be uninitialized.
fn untouched_around(device: &mut Device, scratch: &Poisoned<f32>) {
    device.fill_bytes(scratch.matrix, 0).expect("filled");
    scratch.assert_guarded(device);
}

fn first_difference<T: PartialEq + Copy + std::fmt::Debug>(
    a: &Array2<T>,
    b: &Array2<T>,
) -> Option<([usize; 2], T, T)> {
    assert_eq!(a.dim(), b.dim());
    if a == b {
        return None;
    }
    let different = a.indexed_iter().zip(b).find(|((_, a), b)| a != b);
    different.map(|(((i, j), &a), &b)| ([i, j], a, b))
}

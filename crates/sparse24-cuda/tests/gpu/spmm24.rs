//! spmm24 and spmm24_transposed, by every plan. The conformance suite runs the plan that a backend
//! chooses.

use half::bf16;
use ndarray::{Array2, Axis, concatenate, s};
use sparse24_core::{
    compressed::Compressed24,
    group::Pattern,
    op::{Accumulate, Activation},
    philox::{Philox4x32, uniform},
};
use sparse24_cuda::{
    Device, Matrix, activation,
    compressed::Compressed,
    layout::to_fragments,
    spmm24::{Form, Plan, Straight, Tiling, Transposed, plans, spmm24, spmm24_transposed},
};

use crate::support::{Poisoned, affordable, gaussian, on_gpu, refused, upload};

const FORMS: [Form; 2] = [Form::Transposed, Form::Straight];

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
            let b = gaussian::<f32>([k, n], 2).mapv(small);
            let product = reference(&a, &b);
            let (a, b) = (compressed(device, &a), b.mapv(bf16::from_f32));
            for form in FORMS.into_iter().filter(|&form| serves(form, n)) {
                let addend = gaussian::<f32>(addend_shape(form, [m, n]), 3).mapv(small);
                for (addend, expected) in
                    [(None, product.clone()), (Some(&addend), plus(form, &product, &addend))]
                {
                    let expected = stored(form, expected);
                    for plan in all_plans(device, form, [m, n, k]) {
                        let d = multiply(device, form, a, &b, addend, plan);
                        let added = addend.is_some();
                        assert_eq!(
                            first_difference(&d, &expected),
                            None,
                            "{plan} of m, k, n = {:?}, added: {added}",
                            [m, k, n]
                        );
                    }
                }
            }
        }
    });
}

/// Each element is a sum of k/2 exact products in some order, in f32. Every addition, the bias's
/// among them, is off by at most a generous unit of 2^-22 (tensor cores may cut off where the CPU
/// rounds) of a partial sum, and no partial sum is larger than the sum of the absolute values; so
/// are those of the reference. A result in bf16 is rounded by half a unit in the last of 8 digits.
#[test]
fn other_products_are_within_their_bound_and_repeat_their_bits() {
    on_gpu(|device| {
        for [m, k, n] in [[264, 136, 65], [136, 200, 72], [320, 1024, 1000], [768, 3072, 264]]
            .into_iter()
            .filter(affordable_product)
        {
            let a = sparse([m, k], 6, bf16::from_f32);
            let b = gaussian::<bf16>([k, n], 7);
            let magnitudes = Compressed24::from_parts(
                a.values().mapv(|x| bf16::from_f32(x.to_f32().abs())),
                a.metadata().to_vec(),
            )
            .expect("patterns");
            let exact = b.mapv(bf16::to_f32);
            let products = [reference(&a, &exact), reference(&magnitudes, &exact.mapv(f32::abs))];
            let a = compressed(device, &a);
            for form in FORMS.into_iter().filter(|&form| serves(form, n)) {
                let bias = (form == Form::Transposed).then(|| gaussian::<f32>([1, m], 8));
                let [mut product, mut absolute] = products.clone();
                if let Some(bias) = &bias {
                    product = plus(form, &product, bias);
                    absolute = plus(form, &absolute, &bias.mapv(f32::abs));
                }
                for plan in all_plans(device, form, [m, n, k]) {
                    let [d, again] =
                        [(); 2].map(|()| multiply(device, form, a, &b, bias.as_ref(), plan));
                    assert_eq!(first_difference(&d, &again), None, "{plan}");
                    for (at, &d) in d.indexed_iter() {
                        let expected = product[at];
                        let mut bound = (k + 2) as f32 / (1 << 22) as f32 * absolute[at];
                        if form == Form::Transposed {
                            bound += (expected.abs() + bound) / 256.0;
                        }
                        assert!(
                            (d - expected).abs() <= bound,
                            "{plan} at {at:?}: {d}, not {expected} +- {bound}"
                        );
                    }
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
        let mut b = gaussian::<bf16>([k, n], 10);
        b[[70, 5]] = bf16::NAN;
        b[[71, 6]] = bf16::INFINITY;
        let expected = reference(&a, &b.mapv(bf16::to_f32)).mapv(f32::is_finite);
        assert!(
            expected.iter().any(|&finite| !finite)
                && expected.column(5).iter().any(|&finite| finite)
        );
        let a = compressed(device, &a);
        for form in FORMS {
            for plan in all_plans(device, form, [m, n, k]) {
                let d = multiply(device, form, a, &b, None, plan).mapv(f32::is_finite);
                assert_eq!(first_difference(&d, &expected), None, "{form:?}, {plan}");
            }
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
            let (a, b) = (compressed(device, &a), b.mapv(bf16::from_f32));
            for plan in all_plans(device, Form::Straight, [m, n, k]) {
                let d = multiply(device, Form::Straight, a, &b, None, plan);
                assert_eq!(first_difference(&d, &expected), None, "{plan}, {missing} missing");
            }
        }
    });
}

/// D and its activation have the bits of the two kernels, by every plan, split tiles among them.
#[test]
fn activations_may_be_fused() {
    on_gpu(|device| {
        for [m, k, n] in SHAPES.into_iter().filter(affordable_product) {
            let a = compressed(device, &sparse([m, k], 17, bf16::from_f32));
            let [b, bias] = [[n, k], [1, m]].map(|shape| gaussian::<f32>(shape, 18));
            let b = padded(device, &b.mapv(bf16::from_f32));
            let bias = Some(upload(device, &bias));
            for plan in all_plans(device, Form::Transposed, [m, n, k]) {
                // Their activation is a kernel of its own, which takes contiguous rows.
                if matches!(plan, Plan::Mma(_)) && !m.is_multiple_of(8) {
                    continue;
                }
                let scratch = device.alloc("scratch", [1, plan.scratch()]).expect("memory");
                let run = |device: &mut Device, activation: Option<Activation>| {
                    let wide = m.next_multiple_of(8);
                    let [d, h] = [(); 2].map(|()| {
                        let of = Poisoned::<bf16>::new(device, [n, wide]);
                        // For the sanitizer, as below.
                        device.fill_bytes(of.matrix, 0xff).expect("filled");
                        of
                    });
                    let [of_d, of_h] = [&d, &h].map(|of| of.matrix.columns(0..m));
                    let activated = activation.map(|activation| (activation, of_h));
                    let operands = Transposed { a, b, bias, d: of_d, activated, scratch };
                    spmm24_transposed(device, &operands, plan).expect("queued");
                    [d, h].map(|of| {
                        let all =
                            Array2::from_shape_vec((n, wide), of.read(device)).expect("a shape");
                        all.slice(s![.., ..m]).mapv(bf16::to_bits)
                    })
                };
                let [d, _] = run(device, None);
                let z = upload(device, &d.mapv(bf16::from_bits));
                for activation in [Activation::Gelu, Activation::Relu] {
                    let h = Poisoned::new(device, [n, m]);
                    activation::forward(device, activation, z, h.matrix).expect("queued");
                    let h = h.read(device).into_iter().map(bf16::to_bits).collect();
                    let h = Array2::from_shape_vec((n, m), h).expect("a shape");
                    let what = format!("{activation:?}, {plan} of m, k, n = {:?}", [m, k, n]);
                    let [fused_d, fused_h] = run(device, Some(activation));
                    assert_eq!(first_difference(&fused_d, &d), None, "d, {what}");
                    assert_eq!(first_difference(&fused_h, &h), None, "h, {what}");
                }
            }
            device.reset().expect("no kernel failed");
        }
    });
}

#[test]
fn empty_sums_are_zero_and_empty_results_are_fine() {
    on_gpu(|device| {
        let form = Form::Transposed;
        let bias = gaussian::<f32>([1, 72], 13);
        for plan in all_plans(device, form, [72, 40, 64]) {
            for ([m, n, k], bias) in
                [([72, 40, 0], Some(&bias)), ([0, 40, 64], None), ([72, 0, 64], None)]
            {
                let a = compressed(device, &Compressed24::zeros(m, k).expect("grouped"));
                let b = Array2::from_elem((k, n), bf16::ZERO);
                let d = multiply(device, form, a, &b, bias, plan);
                assert_eq!(d.dim(), (m, n));
                let zeros = Array2::zeros((m, n));
                let expected = bias.map_or(zeros.clone(), |bias| plus(form, &zeros, bias));
                assert_eq!(first_difference(&d, &stored(form, expected)), None, "{plan}");
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
        let good = Transposed { a, b: wide, bias: None, d, activated: None, scratch };
        let plan = plans(device, Form::Transposed, [72, 40, 64]).expect("plans")[0];
        let mut refuse = |operands, plan| refused(spmm24_transposed(device, &operands, plan));
        let few = wide.rows(0..39);
        assert_eq!(refuse(Transposed { b: few, ..good }, plan), ("shape", "d"));
        let narrow = wide.columns(0..40);
        assert_eq!(refuse(Transposed { d: narrow, ..good }, plan), ("shape", "d"));
        let within = d.columns(0..64);
        assert_eq!(refuse(Transposed { b: within, ..good }, plan), ("alias", "d"));
        assert_eq!(refuse(Transposed { b: odd, ..good }, plan), ("alignment", "b"));
        let tiling = Tiling { sweep: 0, ..plan.tiling() };
        let bad = if let Plan::Mma(_) = plan { Plan::Mma(tiling) } else { Plan::Wgmma(tiling) };
        assert_eq!(refuse(good, bad), ("plan", ""));
        let a = Compressed::alloc(device, "a", [70, 64]).expect("memory");
        let short = spmm24_transposed(device, &Transposed { a, ..good }, plan);
        assert_eq!(refused(short), ("semantics", ""));
    });
}

/// The head of a large model, forward, dgrad and wgrad.
#[test]
#[ignore = "gigabytes: `run.sh long`"]
fn products_of_a_large_matrix_are_exact() {
    on_gpu(|device| {
        for (form, [m, n, k]) in [
            (Form::Transposed, [30_768, 260, 8192]),
            (Form::Transposed, [8192, 260, 30_768]),
            (Form::Straight, [30_768, 8192, 260]),
        ] {
            let panel = sparse([PANEL, k], 15, |x| bf16::from_f32(small(x)));
            let b = gaussian::<f32>([k, n], 16).mapv(small);
            let product = stored(form, reference(&panel, &b));
            let expected =
                Array2::from_shape_fn((m, n), |(row, column)| product[[row % PANEL, column]]);
            let (a, b) = (compressed(device, &repeated(&panel, m)), b.mapv(bf16::from_f32));
            for plan in plans(device, form, [m, n, k]).expect("plans") {
                let d = multiply(device, form, a, &b, None, plan);
                assert_eq!(first_difference(&d, &expected), None, "{plan}, {:?}", [m, n, k]);
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
    let offered = plans(device, form, [m, n, k]).expect("plans");
    let more = offered.iter().flat_map(|&plan| {
        let of = |tiling| match plan {
            Plan::Mma(_) => Plan::Mma(tiling),
            Plan::Wgmma(_) => Plan::Wgmma(tiling),
        };
        let parts = k.div_ceil(64).min(3) as u32;
        [
            of(Tiling { split: 1, parts, residents: 2, ..plan.tiling() }),
            of(Tiling { sweep: 1, split: 0, parts: 1, residents: 5, ..plan.tiling() }),
        ]
    });
    let more: Vec<Plan> = more.collect();
    [offered, more].concat()
}

/// Rows that begin at multiples of 16 bytes, with NaN between them.
fn padded(device: &mut Device, from: &Array2<bf16>) -> Matrix<bf16> {
    let (rows, columns) = from.dim();
    let mut wide = Array2::from_elem((rows, columns.next_multiple_of(8)), bf16::NAN);
    wide.slice_mut(s![.., ..columns]).assign(from);
    upload(device, &wide).columns(0..columns)
}

fn compressed(device: &mut Device, a: &Compressed24<bf16>) -> Compressed {
    let on_device = Compressed::alloc(device, "a", a.shape()).expect("memory");
    on_device.upload(device, &to_fragments(a)).expect("uploaded");
    on_device
}

/// Whether a form has products with n columns.
fn serves(form: Form, n: usize) -> bool {
    form == Form::Transposed || n.is_multiple_of(4)
}

/// The shape of what a form can add to its product `[m, n]`: a bias, or the result's old values.
fn addend_shape(form: Form, [m, n]: [usize; 2]) -> [usize; 2] {
    if form == Form::Transposed { [1, m] } else { [m, n] }
}

fn plus(form: Form, product: &Array2<f32>, addend: &Array2<f32>) -> Array2<f32> {
    if form == Form::Transposed { product + &addend.t() } else { product + addend }
}

/// An exact result as the form stores it.
fn stored(form: Form, exact: Array2<f32>) -> Array2<f32> {
    match form {
        Form::Transposed => exact.mapv(|x| bf16::from_f32(x).to_f32()),
        Form::Straight => exact,
    }
}

/// D `[m, n]` of A `[m, k]` and B `[k, n]`, with what is added to it.
fn multiply(
    device: &mut Device,
    form: Form,
    a: Compressed,
    b: &Array2<bf16>,
    addend: Option<&Array2<f32>>,
    plan: Plan,
) -> Array2<f32> {
    let ([m, _], n) = (a.shape(), b.ncols());
    let poisoned_scratch = Poisoned::new(device, [1, plan.scratch()]);
    let scratch = poisoned_scratch.matrix;
    let d = match form {
        Form::Transposed => {
            let b = padded(device, &b.t().to_owned());
            let bias = addend.map(|bias| upload(device, bias));
            let wide = m.next_multiple_of(8);
            let d = Poisoned::<bf16>::new(device, [n, wide]);
            if matches!(plan, Plan::Wgmma(_)) {
                // The sanitizer does not see TMA stores, and would report the result as
                // uninitialized.
                device.fill_bytes(d.matrix, 0xff).expect("filled");
            }
            let operands =
                Transposed { a, b, bias, d: d.matrix.columns(0..m), activated: None, scratch };
            spmm24_transposed(device, &operands, plan).expect("queued");
            let d = d.read(device).into_iter().map(bf16::to_f32).collect();
            let d = Array2::from_shape_vec((n, wide), d).expect("the shape");
            d.slice_move(s![.., ..m]).reversed_axes()
        }
        Form::Straight => {
            let b = padded(device, b);
            let d = Poisoned::<f32>::new(device, [m, n]);
            let accumulate = match addend {
                Some(before) => {
                    device
                        .upload(d.matrix, before.as_slice().expect("row-major"))
                        .expect("uploaded");
                    Accumulate::Add
                }
                None => Accumulate::Overwrite,
            };
            let operands = Straight { a, b, d: d.matrix, accumulate, scratch };
            spmm24(device, &operands, plan).expect("queued");
            Array2::from_shape_vec((m, n), d.read(device)).expect("the shape")
        }
    };
    // Part of the scratch may be uninitialized.
    device.fill_bytes(scratch, 0).expect("filled");
    poisoned_scratch.assert_guarded(device);
    d
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

//! What is done to weights: mask search, compression, flips, the gradient norm and the optimizer
//! step.

use half::bf16;
use ndarray::Array2;
use sparse24_core::{Element, Mask, MaskKind, compressed::Compressed24, op, prune::ValueMap};
use sparse24_cpu as cpu;

use super::{
    Bench, Case, Prepared, Size,
    check::{Stop, near, repeating, same, same_compressed},
    input::{PANEL, random, repeat, repeated, tall},
};
use crate::{
    Device, Error, Matrix, StepState,
    adamw::{self, AdamW, Health, MaskedDecay, Parameter, Parameters},
    compressed::Compressed,
    flip::flip_count,
    prune::{Pruned, compress_forward, compress_weight},
    search::{Weight, mask_search},
};

pub(super) fn cases(size: &Size) -> Vec<Case> {
    let [r, q] = size.weights();
    let case = |kernel, entries, shape: [usize; 2], prepare: Box<super::Prepare>| Case {
        kernel,
        shape: format!("{}x{}", shape[0], shape[1]),
        entries,
        prepare,
    };
    let mut cases = Vec::new();
    for (kernel, entries, kind) in [
        ("mask_search_f32", &["mask_search_f32"] as &[&str], MaskKind::Transposable),
        ("row_mask_search_f32", &["row_mask_search_f32"], MaskKind::RowWise),
        ("column_mask_search_f32", &["column_mask_search_f32"], MaskKind::ColumnWise),
    ] {
        cases.push(case(
            kernel,
            entries,
            [r, q],
            Box::new(move |bench| searches(bench, [r, q], kind, |x| x)),
        ));
    }
    for (kernel, entries, kind) in [
        ("mask_search_bf16", &["mask_search_bf16"] as &[&str], MaskKind::Transposable),
        ("row_mask_search_bf16", &["row_mask_search_bf16"], MaskKind::RowWise),
        ("column_mask_search_bf16", &["column_mask_search_bf16"], MaskKind::ColumnWise),
    ] {
        cases.push(case(
            kernel,
            entries,
            [r, q],
            Box::new(move |bench| searches(bench, [r, q], kind, bf16::from_f32)),
        ));
    }
    // W of the up layer and of the down layer.
    for shape in [[r, q], [q, r]].into_iter().take(if size.width().is_some() { 2 } else { 1 }) {
        cases.push(case(
            "compress_weight",
            &["compress_weight"],
            shape,
            Box::new(move |bench| compresses(bench, shape, Ways::Both)),
        ));
    }
    cases.push(case(
        "compress_forward",
        &["compress_forward"],
        [r, q],
        Box::new(move |bench| compresses(bench, [r, q], Ways::Forward)),
    ));
    cases.push(case(
        "flip_count",
        &["flip_count"],
        [r, q],
        Box::new(move |bench| counts(bench, [r, q])),
    ));
    let norm: &[&str] = &["square_sums", "norm_of_sums"];
    for (name, tensors) in tables(size) {
        let (of_norm, of_step) = (tensors.clone(), tensors);
        let shape = name.clone();
        cases.push(Case {
            kernel: "grad_norm",
            shape,
            entries: norm,
            prepare: Box::new(move |bench| norms(bench, &of_norm)),
        });
        let entries = &["adamw_step"];
        cases.push(Case {
            kernel: "adamw_step",
            shape: name,
            entries,
            prepare: Box::new(move |bench| steps(bench, &of_step)),
        });
    }
    cases
}

/// One weight; and for the smallest GPT-2 all of its tensors, without biases.
fn tables(size: &Size) -> Vec<(String, Vec<[usize; 2]>)> {
    let [r, q] = size.weights();
    let mut tables = vec![(format!("{r}x{q}"), vec![[r, q]])];
    if size.width() == Some(768) {
        let layer = [[1, 768], [2304, 768], [768, 768], [1, 768], [3072, 768], [768, 3072]];
        let embeddings = [[50304, 768], [1024, 768], [1, 768]];
        tables.push((
            "GPT-2 124M".to_owned(),
            embeddings.into_iter().chain((0..12).flat_map(|_| layer)).collect(),
        ));
    }
    tables
}

fn searches<T: Weight + Element>(
    bench: &mut Bench,
    shape @ [r, q]: [usize; 2],
    kind: MaskKind,
    convert: fn(f32) -> T,
) -> Result<Prepared, Stop> {
    let w = random([PANEL, q], 1).mapv(convert);
    let bytes = r * q * size_of::<T>() + r * q / 8;
    let sets = (0..bench.sets(bytes))
        .map(|_| {
            Ok((
                repeated(&mut bench.device, shape, &w)?,
                bench.device.alloc("mask", [r / 4, q / 4])?,
            ))
        })
        .collect::<Result<Vec<(Matrix<T>, Matrix<u16>)>, Error>>()?;
    let (first, tiles) = sets[0];
    mask_search(&mut bench.device, first, kind, tiles)?;
    let mut mask = Mask::empty(PANEL, q)?;
    cpu::search::mask_search(w.view(), kind, &mut mask).expect("tiled");
    let found = repeating(&mut bench.device, "the mask", tiles, PANEL / 4)?;
    same("the mask", &found, &mask.tiles()[..found.len()])?;
    bench.moving("every tile, bit for bit with core", bytes, sets, move |device, &(w, tiles)| {
        mask_search(device, w, kind, tiles)
    })
}

/// Which products a weight is compressed for.
#[derive(Clone, Copy, PartialEq)]
enum Ways {
    Forward,
    Both,
}

fn compresses(bench: &mut Bench, shape @ [r, q]: [usize; 2], ways: Ways) -> Result<Prepared, Stop> {
    let panel = random([PANEL, q], 1);
    let host = tall(r, &panel);
    let mut mask = Mask::empty(r, q)?;
    cpu::search::mask_search(host.view(), MaskKind::Transposable, &mut mask).expect("tiled");
    let outputs = if ways == Ways::Both { 2 } else { 1 };
    let bytes = 4 * r * q + r * q / 8 + outputs * 9 * r * q / 8;
    let mut sets = Vec::new();
    for _ in 0..bench.sets(bytes) {
        let device = &mut bench.device;
        let (w, tiles) = (repeated(device, shape, &panel)?, device.alloc("mask", [r / 4, q / 4])?);
        device.upload(tiles, mask.tiles())?;
        let [forward, dgrad] =
            [[r, q], [q, r]].map(|shape| Compressed::alloc(device, "compressed weight", shape));
        sets.push((Pruned { w, tiles, map: ValueMap::Identity }, forward?, dgrad?));
    }
    let launch =
        move |device: &mut Device, &(pruned, forward, dgrad): &(Pruned, Compressed, Compressed)| {
            match ways {
                Ways::Both => compress_weight(device, &pruned, forward, dgrad),
                Ways::Forward => compress_forward(device, &pruned, forward),
            }
        };
    launch(&mut bench.device, &sets[0])?;
    let (mut forward, mut dgrad) = (Compressed24::zeros(r, q)?, Compressed24::zeros(q, r)?);
    cpu::prune::compress_weight(host.view(), &mask, ValueMap::Identity, &mut forward, &mut dgrad)
        .expect("fits");
    same_compressed("S(W)", &sets[0].1.download(&mut bench.device)?, &forward)?;
    if ways == Ways::Both {
        same_compressed("S(W)^T", &sets[0].2.download(&mut bench.device)?, &dgrad)?;
    }
    bench.moving("every group, bit for bit with core", bytes, sets, launch)
}

fn counts(bench: &mut Bench, [r, q]: [usize; 2]) -> Result<Prepared, Stop> {
    let tiles = |seed| random([PANEL, q / 4], seed).mapv(|x| (x * 16384.0) as i32 as u16);
    let [a, b] = [1, 2].map(tiles);
    let mut sets = Vec::new();
    for _ in 0..bench.sets(r * q / 4) {
        let device = &mut bench.device;
        let shape = [r / 4, q / 4];
        sets.push((
            repeated(device, shape, &a)?,
            repeated(device, shape, &b)?,
            device.alloc("count", [1, 1])?,
        ));
    }
    let launch = |device: &mut Device, &(a, b, count): &(Matrix<u16>, Matrix<u16>, Matrix<u64>)| {
        flip_count(device, a, b, count)
    };
    launch(&mut bench.device, &sets[0])?;
    let differing = |row: usize| {
        a.row(row).iter().zip(b.row(row)).map(|(a, b)| u64::from((a ^ b).count_ones())).sum::<u64>()
    };
    let rows: Vec<u64> = (0..PANEL).map(differing).collect();
    let expected = (0..r / 4).map(|row| rows[row % PANEL]).sum();
    same("the count", &bench.device.download(sets[0].2)?, &[expected])?;
    bench.moving("the count, exactly", r * q / 4, sets, launch)
}

/// A table of tensors whose rows repeat.
struct Table {
    parameters: Parameters,
    health: Matrix<u32>,
    largest: Parameter,
}

/// What repeats in the largest tensor of a table.
struct Panels {
    w: Array2<f32>,
    g: Array2<f32>,
    mask: Mask,
}

/// Sets of tensors, all matrices of several rows masked.
fn optimizer(bench: &mut Bench, tensors: &[[usize; 2]]) -> Result<(Vec<Table>, Panels), Stop> {
    let elements: usize = tensors.iter().map(|[rows, columns]| rows * columns).sum();
    let place = (0..tensors.len())
        .max_by_key(|&place| tensors[place][0] * tensors[place][1])
        .expect("a tensor");
    let [w, g] = [W, G].map(|seed| random([PANEL, tensors[place][1]], seed));
    let mut mask = Mask::empty(PANEL, w.ncols())?;
    cpu::search::mask_search(w.view(), MaskKind::Transposable, &mut mask).expect("tiled");
    let tiles =
        Array2::from_shape_vec((PANEL / 4, w.ncols() / 4), mask.tiles().to_vec()).expect("as many");
    let mut tables = Vec::new();
    for _ in 0..bench.sets(30 * elements) {
        let device = &mut bench.device;
        let mut parameters = Vec::new();
        for &shape @ [rows, columns] in tensors {
            let [w, g] =
                [W, G].map(|seed| repeated(device, shape, &random([PANEL, columns], seed)));
            let [m, v] = [(); 2].map(|()| device.alloc("moments", shape));
            let tiles =
                if rows > 1 { Some(device.alloc("mask", [rows / 4, columns / 4])?) } else { None };
            let shadow = Some(device.alloc("bf16 copy", shape)?);
            parameters.push(Parameter {
                w: w?,
                g: g?,
                m: m?,
                v: v?,
                tiles,
                shadow,
                weight_decay: 0.1,
            });
        }
        let largest = parameters[place];
        repeat(device, largest.tiles.expect("it is a matrix"), &tiles)?;
        tables.push(Table {
            parameters: Parameters::new(device, &parameters)?,
            health: device.alloc("health", [1, Health::WORDS])?,
            largest,
        });
    }
    Ok((tables, Panels { w, g, mask }))
}

// Seeds of weights and gradients.
const W: usize = 3;
const G: usize = 4;

fn norms(bench: &mut Bench, tensors: &[[usize; 2]]) -> Result<Prepared, Stop> {
    let (tables, _) = optimizer(bench, tensors)?;
    let elements: usize = tensors.iter().map(|[rows, columns]| rows * columns).sum();
    let found = norm(&mut bench.device, &tables[0])?;
    // Of every tensor as it lies on the device.
    let mut squares = 0.0;
    for &[rows, columns] in tensors {
        let g = random([PANEL, columns], G);
        let row = |row: usize| g.row(row).iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>();
        let of_rows: Vec<f64> = (0..PANEL.min(rows)).map(row).collect();
        squares += (0..rows).map(|row| of_rows[row % PANEL]).sum::<f64>();
    }
    near("the norm", [found], [squares.sqrt() as f32], [2_f64.powi(-22), 0.0])?;
    bench.moving("the norm, within 2^-22 of f64's", 4 * elements, tables, |device, table| {
        adamw::grad_norm(device, &table.parameters, table.health)
    })
}

fn norm(device: &mut Device, table: &Table) -> Result<f32, Error> {
    adamw::grad_norm(device, &table.parameters, table.health)?;
    let words = device.download(table.health)?;
    Ok(Health::of_words([words[0], words[1]]).grad_norm)
}

fn steps(bench: &mut Bench, tensors: &[[usize; 2]]) -> Result<Prepared, Stop> {
    const LAMBDA: f32 = 6e-5;
    let rule = AdamW {
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        clip: 1.0,
        decay: MaskedDecay::OnGradients(LAMBDA),
    };
    let state = StepState {
        learning_rate: 1e-4,
        bias_correction1: 0.1,
        bias_correction2: 0.05,
        ..StepState::default()
    };
    bench.device.set_step(&state)?;
    let (tables, Panels { mut w, g, mask }) = optimizer(bench, tensors)?;
    let norm = norm(&mut bench.device, &tables[0])?;
    // A step reads the norm where that of the gradients was left.
    for table in &tables[1..] {
        adamw::grad_norm(&mut bench.device, &table.parameters, table.health)?;
    }
    adamw::adamw_step(&mut bench.device, &tables[0].parameters, &rule, tables[0].health)?;
    let on_cpu =
        op::AdamW { beta1: rule.beta1, beta2: rule.beta2, epsilon: rule.epsilon, clip: rule.clip };
    let step = op::StepState {
        learning_rate: state.learning_rate,
        bias_corrections: [state.bias_correction1, state.bias_correction2],
        ..op::StepState::default()
    };
    let scale = on_cpu.gradient_scale(norm);
    let (mut m, mut v) = (vec![0.0; w.len()], vec![0.0; w.len()]);
    let decay = op::MaskedDecay::OnGradients(LAMBDA);
    let (expected, g) = (w.as_slice_mut().expect("row-major"), g.as_slice().expect("row-major"));
    cpu::adamw::adamw_step(
        expected,
        g,
        &mut m,
        &mut v,
        &on_cpu,
        &step,
        0.1,
        scale,
        decay,
        Some(&mask),
    )
    .expect("fits");
    let Parameter { w, m: first, v: second, shadow, .. } = tables[0].largest;
    for (what, found, expected) in [("w", w, &*expected), ("m", first, &m), ("v", second, &v)] {
        let found = repeating(&mut bench.device, what, found, PANEL)?;
        same(what, &found, &expected[..found.len()])?;
    }
    let copies = repeating(
        &mut bench.device,
        "the bf16 copy",
        shadow.expect("every tensor has one"),
        PANEL,
    )?;
    let rounded: Vec<bf16> = expected[..copies.len()].iter().copied().map(bf16::from_f32).collect();
    same("the bf16 copy", &copies, &rounded)?;
    let (elements, masked) = tensors.iter().fold((0, 0), |(elements, masked), [rows, columns]| {
        (elements + rows * columns, masked + if *rows > 1 { rows * columns } else { 0 })
    });
    bench.moving(
        "the largest tensor, bit for bit with the CPU",
        30 * elements + masked / 8,
        tables,
        move |device, table| adamw::adamw_step(device, &table.parameters, &rule, table.health),
    )
}

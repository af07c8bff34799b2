//! Operations on weights: mask search, compression, flip counts, gradient norm and optimizer step.

use std::slice;

use half::bf16;
use ndarray::Array2;
use sparse24_core::{
    Element, Mask, MaskKind,
    compressed::Compressed24,
    op::{AdamW, MaskedDecay, StepState},
    prune::ValueMap,
};
use sparse24_cpu as cpu;

use super::{
    Bench, Case, Prepared, Size,
    check::{Stop, near, same, same_compressed, same_rows},
    input::{PANEL, random, repeat, repeated, tall},
};
use crate::{
    Device, Error, Matrix,
    adamw::{self, Parameter, Parameters},
    compressed::Compressed,
    flip::flip_count,
    health::Health,
    prune::{Pruned, compress_forward, compress_weight},
    search::{Weight, mask_search},
};

/// The kernels of a mask search in f32 and bf16.
static SEARCHES: [(MaskKind, [&str; 2]); 3] = [
    (MaskKind::Transposable, ["mask_search_f32", "mask_search_bf16"]),
    (MaskKind::RowWise, ["row_mask_search_f32", "row_mask_search_bf16"]),
    (MaskKind::ColumnWise, ["column_mask_search_f32", "column_mask_search_bf16"]),
];

pub(super) fn cases(size: &Size) -> Vec<Case> {
    let shape @ [r, q] = size.weights();
    let in_f32 = SEARCHES.iter().map(|(kind, [kernel, _])| {
        Case::new(kernel, slice::from_ref(kernel), shape, |bench, shape| {
            search::<f32>(bench, shape, *kind)
        })
    });
    let in_bf16 = SEARCHES.iter().map(|(kind, [_, kernel])| {
        Case::new(kernel, slice::from_ref(kernel), shape, |bench, shape| {
            search::<bf16>(bench, shape, *kind)
        })
    });
    let mut cases: Vec<Case> = in_f32.chain(in_bf16).collect();
    // The weights of the up and the down layer.
    for shape in [[r, q], [q, r]].into_iter().take(if size.width().is_some() { 2 } else { 1 }) {
        cases.push(Case::new("compress_weight", &["compress_weight"], shape, |bench, shape| {
            compress(bench, shape, Ways::Both)
        }));
    }
    cases.push(Case::new("compress_forward", &["compress_forward"], shape, |bench, shape| {
        compress(bench, shape, Ways::Forward)
    }));
    cases.push(Case::new("flip_count", &["flip_count"], shape, count_flips));
    for (name, tensors) in tables(size) {
        let (of_norm, of_step) = (tensors.clone(), tensors);
        cases.push(Case {
            kernel: "grad_norm",
            shape: name.clone(),
            entries: &["square_sums", "norm_of_sums"],
            prepare: Box::new(move |bench| norm(bench, &of_norm)),
        });
        cases.push(Case {
            kernel: "adamw_step",
            shape: name,
            entries: &["adamw_step"],
            prepare: Box::new(move |bench| step(bench, &of_step)),
        });
    }
    cases
}

/// One weight, and for the smallest GPT-2 all of its tensors except biases.
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

/// The mask that the CPU finds.
fn searched<T: Element>(w: &Array2<T>, kind: MaskKind) -> Result<Mask, Stop> {
    let mut mask = Mask::empty(w.nrows(), w.ncols())?;
    cpu::search::mask_search(w.view(), kind, &mut mask).expect("tiled");
    Ok(mask)
}

fn search<T: Weight + Element>(
    bench: &mut Bench,
    shape @ [r, q]: [usize; 2],
    kind: MaskKind,
) -> Result<Prepared, Stop> {
    let w = random([PANEL, q], 1).mapv(T::from_f32);
    let bytes = r * q * size_of::<T>() + r * q / 8;
    let sets = bench.sets(bytes, |device| {
        Ok((repeated(device, shape, &w)?, device.alloc("mask", [r / 4, q / 4])?))
    })?;
    bench.kernel(
        "every tile, bit for bit with core",
        bytes,
        sets,
        move |device, &(w, tiles)| mask_search(device, w, kind, tiles),
        |device, &(_, tiles)| same_rows(device, "the mask", tiles, searched(&w, kind)?.tiles()),
    )
}

/// The products that a weight is compressed for.
#[derive(Clone, Copy, PartialEq)]
enum Ways {
    Forward,
    Both,
}

fn compress(bench: &mut Bench, shape @ [r, q]: [usize; 2], ways: Ways) -> Result<Prepared, Stop> {
    let panel = random([PANEL, q], 1);
    let host = tall(r, &panel);
    let mask = searched(&host, MaskKind::Transposable)?;
    let outputs = if ways == Ways::Both { 2 } else { 1 };
    let bytes = 4 * r * q + r * q / 8 + outputs * 9 * r * q / 8;
    let sets = bench.sets(bytes, |device| {
        let (w, tiles) = (repeated(device, shape, &panel)?, device.alloc("mask", [r / 4, q / 4])?);
        device.upload(tiles, mask.tiles())?;
        let [forward, dgrad] =
            [[r, q], [q, r]].map(|shape| Compressed::alloc(device, "compressed weight", shape));
        Ok((Pruned { w, tiles, map: ValueMap::Identity }, forward?, dgrad?))
    })?;
    bench.kernel(
        "every group, bit for bit with core",
        bytes,
        sets,
        move |device, (pruned, forward, dgrad)| match ways {
            Ways::Both => compress_weight(device, pruned, *forward, *dgrad),
            Ways::Forward => compress_forward(device, pruned, *forward),
        },
        |device, (_, found_forward, found_dgrad)| {
            let (mut forward, mut dgrad) = (Compressed24::zeros(r, q)?, Compressed24::zeros(q, r)?);
            let (w, map) = (host.view(), ValueMap::Identity);
            cpu::prune::compress_weight(w, &mask, map, &mut forward, &mut dgrad).expect("fits");
            same_compressed("S(W)", &found_forward.download(device)?, &forward)?;
            if ways == Ways::Both {
                same_compressed("S(W)^T", &found_dgrad.download(device)?, &dgrad)?;
            }
            Ok(())
        },
    )
}

fn count_flips(bench: &mut Bench, [r, q]: [usize; 2]) -> Result<Prepared, Stop> {
    let tiles = |seed| random([PANEL, q / 4], seed).mapv(|x| (x * 16384.0) as i32 as u16);
    let ([a, b], shape, bytes) = ([1, 2].map(tiles), [r / 4, q / 4], r * q / 4);
    let sets = bench.sets(bytes, |device| {
        let (a, b) = (repeated(device, shape, &a)?, repeated(device, shape, &b)?);
        Ok((a, b, device.alloc("count", [1, 1])?))
    })?;
    bench.kernel(
        "the count, exactly",
        bytes,
        sets,
        |device, &(a, b, count)| flip_count(device, a, b, count),
        |device, &(_, _, count)| {
            let differing = |row: usize| {
                let pairs = a.row(row).into_iter().zip(b.row(row));
                pairs.map(|(a, b)| u64::from((a ^ b).count_ones())).sum::<u64>()
            };
            let rows: Vec<u64> = (0..PANEL).map(differing).collect();
            let expected = (0..r / 4).map(|row| rows[row % PANEL]).sum();
            same("the count", &device.download(count)?, &[expected])
        },
    )
}

// Seeds of weights and gradients.
const W: usize = 3;
const G: usize = 4;

/// An optimizer table of tensors with repeating rows; all with several rows are masked.
struct Table {
    parameters: Parameters,
    health: Matrix<u32>,
    largest: Parameter,
}

impl Table {
    fn new(device: &mut Device, tensors: &[[usize; 2]], mask: &Mask) -> Result<Self, Error> {
        let mut parameters = Vec::new();
        for &shape @ [rows, columns] in tensors {
            let [w, g] =
                [W, G].map(|seed| repeated(device, shape, &random([PANEL, columns], seed)));
            let [m, v] = [(); 2].map(|()| device.alloc("moments", shape));
            let tiles =
                if rows > 1 { Some(device.alloc("mask", [rows / 4, columns / 4])?) } else { None };
            let shadow = Some(device.alloc("bf16 copy", shape)?);
            let (w, g, m, v) = (w?, g?, m?, v?);
            parameters.push(Parameter { w, g, m, v, tiles, shadow, weight_decay: 0.1 });
        }
        let largest = parameters[place_of_largest(tensors)];
        let tiles =
            Array2::from_shape_vec((PANEL / 4, largest.w.shape()[1] / 4), mask.tiles().to_vec());
        repeat(device, largest.tiles.expect("it is a matrix"), &tiles.expect("as many"))?;
        let health = device.alloc("health", [1, Health::WORDS])?;
        Ok(Self { parameters: Parameters::new(device, &parameters)?, health, largest })
    }

    fn queue_norm(&self, device: &mut Device) -> Result<(), Error> {
        adamw::grad_norm(device, &self.parameters, self.health)
    }

    fn norm(&self, device: &mut Device) -> Result<f32, Error> {
        let words = device.download(self.health)?;
        Ok(Health::of_words([words[0], words[1]]).grad_norm)
    }
}

fn place_of_largest(tensors: &[[usize; 2]]) -> usize {
    let elements = |&place: &usize| tensors[place][0] * tensors[place][1];
    (0..tensors.len()).max_by_key(elements).expect("a tensor")
}

/// The panel that the largest tensor repeats, its mask, and the number of all elements.
fn largest(tensors: &[[usize; 2]]) -> Result<(Array2<f32>, Mask, usize), Stop> {
    let w = random([PANEL, tensors[place_of_largest(tensors)][1]], W);
    let mask = searched(&w, MaskKind::Transposable)?;
    Ok((w, mask, tensors.iter().map(|[rows, columns]| rows * columns).sum()))
}

fn norm(bench: &mut Bench, tensors: &[[usize; 2]]) -> Result<Prepared, Stop> {
    let (_, mask, elements) = largest(tensors)?;
    let tables = bench.sets(30 * elements, |device| Table::new(device, tensors, &mask))?;
    let check = |device: &mut Device, table: &Table| {
        let mut squares = 0.0;
        for &[rows, columns] in tensors {
            let g = random([PANEL, columns], G);
            let row =
                |row: usize| g.row(row).iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>();
            let of_rows: Vec<f64> = (0..PANEL.min(rows)).map(row).collect();
            squares += (0..rows).map(|row| of_rows[row % PANEL]).sum::<f64>();
        }
        let (found, expected) = (table.norm(device)?, squares.sqrt() as f32);
        near("the norm", [found], [expected], [2_f64.powi(-22), 0.0])
    };
    let launch = |device: &mut Device, table: &Table| table.queue_norm(device);
    bench.kernel("the norm, within 2^-22 of f64's", 4 * elements, tables, launch, check)
}

fn step(bench: &mut Bench, tensors: &[[usize; 2]]) -> Result<Prepared, Stop> {
    const RULE: AdamW = AdamW { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, clip: 1.0 };
    const DECAY: MaskedDecay = MaskedDecay::OnGradients(6e-5);
    let state = StepState {
        learning_rate: 1e-4,
        bias_corrections: [0.1, 0.05],
        loss_scale: 1.0,
        ..StepState::default()
    };
    bench.device.set_step(&state)?;
    let (mut w, mask, elements) = largest(tensors)?;
    let tables = bench.sets(30 * elements, |device| {
        let table = Table::new(device, tensors, &mask)?;
        // A step reads the norm where that of the gradients was left.
        table.queue_norm(device)?;
        Ok(table)
    })?;
    let matrices = tensors.iter().filter(|[rows, _]| *rows > 1);
    let masked: usize = matrices.map(|[rows, columns]| rows * columns).sum();
    bench.kernel(
        "the largest tensor, bit for bit with the CPU",
        30 * elements + masked / 8,
        tables,
        |device, table| adamw::adamw_step(device, &table.parameters, &RULE, DECAY, table.health),
        |device, table| {
            let scale = RULE.gradient_scale(table.norm(device)?);
            let g = random([PANEL, w.ncols()], G);
            let (mut m, mut v) = (vec![0.0; w.len()], vec![0.0; w.len()]);
            let expected = w.as_slice_mut().expect("row-major");
            let g = g.as_slice().expect("row-major");
            let mask = Some(&mask);
            cpu::adamw::adamw_step(
                expected, g, &mut m, &mut v, &RULE, &state, 0.1, scale, DECAY, mask,
            )
            .expect("fits");
            let of = table.largest;
            for (what, found, expected) in
                [("w", of.w, &*expected), ("m", of.m, &m), ("v", of.v, &v)]
            {
                same_rows(device, what, found, expected)?;
            }
            let rounded: Vec<bf16> = expected.iter().copied().map(bf16::from_f32).collect();
            let shadow = of.shadow.expect("every tensor has one");
            same_rows(device, "the bf16 copy", shadow, &rounded)
        },
    )
}

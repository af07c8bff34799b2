//! compress_weight and compress_forward.

use half::bf16;
use ndarray::Array2;
use sparse24_core::{Mask, MaskKind, compressed::Compressed24, prune::ValueMap};
use sparse24_cpu::{prune as cpu, search::mask_search};
use sparse24_cuda::{
    Device, Error, Matrix,
    compressed::Compressed,
    layout::{Fragments, to_fragments},
    prune::{Pruned, compress_forward, compress_weight},
};

use crate::{
    mvue::assert_same,
    search::hostile,
    support::{Poisoned, gaussian, on_gpu, upload},
};

pub(crate) const MAPS: [ValueMap; 2] = [ValueMap::Identity, ValueMap::SoftThreshold { scale: 1.3 }];
const SHAPES: [[usize; 2]; 7] =
    [[4, 4], [4, 36], [64, 64], [68, 132], [132, 68], [192, 64], [1024, 1600]];

/// A poisoned compressed matrix.
struct Output {
    values: Poisoned<bf16>,
    metadata: Poisoned<u32>,
    compressed: Compressed,
}

impl Output {
    fn new(device: &mut Device, shape: [usize; 2]) -> Self {
        let mut compressed = Compressed::alloc(device, "compressed", shape).expect("memory");
        let values = Poisoned::new(device, compressed.values.shape());
        let metadata = Poisoned::new(device, compressed.metadata.shape());
        (compressed.values, compressed.metadata) = (values.matrix, metadata.matrix);
        Self { values, metadata, compressed }
    }

    fn expect(&self, device: &mut Device, logical: &Compressed24<bf16>, what: &str) {
        let Fragments { values, metadata } = to_fragments(logical);
        // The payload of a NaN is not defined.
        let same = |(a, b): (&bf16, &bf16)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
        let found = self.values.read(device);
        assert_eq!(
            found.iter().zip(&values).position(|pair| !same(pair)),
            None,
            "{what}: the first differing value"
        );
        assert!(self.metadata.read(device) == metadata, "{what}: metadata");
    }
}

/// S(W) and S(W)^T of many tiles, in memory that is reused.
pub(crate) struct BothWays {
    outputs: [Output; 2],
    expected: [Compressed24<bf16>; 2],
}

impl BothWays {
    pub(crate) fn new(device: &mut Device, [r, q]: [usize; 2]) -> Self {
        let shapes = [[r, q], [q, r]];
        Self {
            outputs: shapes.map(|shape| Output::new(device, shape)),
            expected: shapes.map(zeros),
        }
    }

    /// Compares values and metadata of finite weights with the CPU's.
    pub(crate) fn check(
        &mut self,
        device: &mut Device,
        w: &Array2<f32>,
        mask: &Mask,
        (on_device, tiles): (Matrix<f32>, Matrix<u16>),
        map: ValueMap,
    ) {
        let [forward, dgrad] = &mut self.expected;
        cpu::compress_weight(w.view(), mask, map, forward, dgrad).expect("fits");
        let [forward, dgrad] = [&self.outputs[0], &self.outputs[1]].map(|output| output.compressed);
        compress_weight(device, &Pruned { w: on_device, tiles, map }, forward, dgrad)
            .expect("queued");
        for (output, expected) in self.outputs.iter().zip(&self.expected) {
            let found = Fragments {
                values: output.values.read(device),
                metadata: output.metadata.read(device),
            };
            assert_same(&found, expected, &format!("{:?}, {map:?}", expected.shape()));
        }
    }
}

fn masked(device: &mut Device, w: &Array2<f32>, kind: MaskKind) -> (Mask, Matrix<u16>) {
    let mut mask = Mask::empty(w.nrows(), w.ncols()).expect("tiled");
    mask_search(w.view(), kind, &mut mask).expect("tiled");
    let tiles = device.alloc("mask", [w.nrows() / 4, w.ncols() / 4]).expect("memory");
    device.upload(tiles, mask.tiles()).expect("uploaded");
    (mask, tiles)
}

fn zeros([m, k]: [usize; 2]) -> Compressed24<bf16> {
    Compressed24::zeros(m, k).expect("grouped")
}

fn check_both_ways(device: &mut Device, w: &Array2<f32>) {
    let (shape, shape_t) = ([w.nrows(), w.ncols()], [w.ncols(), w.nrows()]);
    let on_device = upload(device, w);
    let (mask, tiles) = masked(device, w, MaskKind::Transposable);
    let (rows, row_tiles) = masked(device, w, MaskKind::RowWise);
    for map in MAPS {
        let what = format!("{shape:?}, {map:?}");
        let (mut forward, mut dgrad) = (zeros(shape), zeros(shape_t));
        cpu::compress_weight(w.view(), &mask, map, &mut forward, &mut dgrad).expect("fits");
        let outputs = [shape, shape_t].map(|shape| Output::new(device, shape));
        compress_weight(
            device,
            &Pruned { w: on_device, tiles, map },
            outputs[0].compressed,
            outputs[1].compressed,
        )
        .expect("queued");
        outputs[0].expect(device, &forward, &format!("forward of {what}"));
        outputs[1].expect(device, &dgrad, &format!("dgrad of {what}"));

        cpu::compress_forward(w.view(), &rows, map, &mut forward).expect("fits");
        let output = Output::new(device, shape);
        compress_forward(
            device,
            &Pruned { w: on_device, tiles: row_tiles, map },
            output.compressed,
        )
        .expect("queued");
        output.expect(device, &forward, &format!("forward alone of {what}"));
    }
}

#[test]
fn fragments_match_the_cpu() {
    on_gpu(|device| {
        for (seed, shape) in SHAPES.into_iter().enumerate() {
            check_both_ways(device, &gaussian(shape, seed as u64));
            check_both_ways(device, &hostile(shape, seed as u64));
            device.reset().expect("idle");
        }
    });
}

#[test]
#[ignore = "gigabytes: `run.sh long`"]
fn fragments_of_a_large_matrix() {
    on_gpu(|device| check_both_ways(device, &hostile([30768, 8192], 2)));
}

#[test]
fn empty_matrices_are_fine() {
    on_gpu(|device| {
        for shape in [[0, 8], [8, 0]] {
            let w = device.alloc("w", shape).expect("memory");
            let tiles = device.alloc("mask", [shape[0] / 4, shape[1] / 4]).expect("memory");
            let [forward, dgrad] = [shape, [shape[1], shape[0]]]
                .map(|shape| Compressed::alloc(device, "out", shape).expect("memory"));
            compress_weight(device, &Pruned { w, tiles, map: ValueMap::Identity }, forward, dgrad)
                .expect("nothing");
        }
    });
}

#[test]
fn refusals_name_the_operand() {
    on_gpu(|device| {
        let w = device.alloc("w", [8, 16]).expect("memory");
        let tiles = device.alloc("mask", [2, 4]).expect("memory");
        let [forward, dgrad] = [[8, 16], [16, 8]]
            .map(|shape| Compressed::alloc(device, "out", shape).expect("memory"));
        let mut refused = |w, forward, dgrad| {
            compress_weight(device, &Pruned { w, tiles, map: ValueMap::Identity }, forward, dgrad)
                .expect_err("refused")
        };
        assert!(matches!(
            refused(w, dgrad, forward),
            Error::Shape { operand: "forward", expected: [8, 16], found: [16, 8], .. }
        ));
        assert!(matches!(
            refused(w.columns(0..12), forward, dgrad),
            Error::Shape { operand: "the mask", .. }
        ));
        assert!(matches!(refused(w.columns(0..6), forward, dgrad), Error::Semantics(_)));
        let mut shared = dgrad;
        shared.values = forward.values;
        assert!(matches!(
            refused(w, forward, shared),
            Error::Alias { output: "dgrad", other: "forward", .. }
        ));
    });
}

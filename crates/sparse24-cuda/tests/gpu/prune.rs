//! compress_weight and compress_forward.

use half::bf16;
use ndarray::Array2;
use sparse24_core::{Mask, MaskKind, compressed::Compressed24, prune::ValueMap};
use sparse24_cpu::{prune as cpu, search::mask_search};
use sparse24_cuda::{
    Device, Matrix,
    compressed::Compressed,
    layout::{Fragments, to_fragments},
    prune::{Pruned, compress_forward, compress_weight},
};

use crate::{
    mvue::assert_same,
    search::hostile,
    support::{Poisoned, gaussian, on_gpu, refused, upload},
};

pub(crate) const MAPS: [ValueMap; 2] = [ValueMap::Identity, ValueMap::SoftThreshold { scale: 1.3 }];
const SHAPES: [[usize; 2]; 9] =
    [[0, 8], [8, 0], [4, 4], [4, 36], [64, 64], [68, 132], [132, 68], [192, 64], [1024, 1600]];

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

    fn expect(&self, device: &mut Device, expected: &Compressed24<bf16>, what: &str) {
        // The payload of a NaN is not defined.
        let quiet = |x: bf16| if x.is_nan() { bf16::NAN } else { x };
        let quiet = |values: Vec<bf16>| values.into_iter().map(quiet).collect();
        let expected = to_fragments(expected);
        let expected = Fragments { values: quiet(expected.values), ..expected };
        let values = quiet(self.values.read(device));
        let found = Fragments { values, metadata: self.metadata.read(device) };
        assert_same(&found, &expected, what);
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

    /// Compares values and metadata with the CPU's.
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
        let [forward, dgrad] = self.outputs.each_ref().map(|output| output.compressed);
        compress_weight(device, &Pruned { w: on_device, tiles, map }, forward, dgrad)
            .expect("queued");
        for (output, expected) in self.outputs.iter().zip(&self.expected) {
            output.expect(device, expected, &format!("{:?}, {map:?}", expected.shape()));
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

/// Both ways under a transposable mask, and forward alone under a row-wise one.
fn check(device: &mut Device, w: &Array2<f32>) {
    let shape = [w.nrows(), w.ncols()];
    let on_device = upload(device, w);
    let (mask, tiles) = masked(device, w, MaskKind::Transposable);
    let (rows, row_tiles) = masked(device, w, MaskKind::RowWise);
    for map in MAPS {
        BothWays::new(device, shape).check(device, w, &mask, (on_device, tiles), map);
        let mut forward = zeros(shape);
        cpu::compress_forward(w.view(), &rows, map, &mut forward).expect("fits");
        let output = Output::new(device, shape);
        let pruned = Pruned { w: on_device, tiles: row_tiles, map };
        compress_forward(device, &pruned, output.compressed).expect("queued");
        output.expect(device, &forward, &format!("forward alone of {shape:?}, {map:?}"));
    }
}

#[test]
fn fragments_match_the_cpu() {
    on_gpu(|device| {
        for (seed, shape) in SHAPES.into_iter().enumerate() {
            check(device, &gaussian(shape, seed as u64));
            check(device, &hostile(shape, seed as u64));
            device.reset().expect("idle");
        }
    });
}

#[test]
#[ignore = "gigabytes: `run.sh long`"]
fn fragments_of_a_large_matrix() {
    on_gpu(|device| check(device, &hostile([30768, 8192], 2)));
}

#[test]
fn refusals_name_the_operand() {
    on_gpu(|device| {
        let w = device.alloc("w", [8, 16]).expect("memory");
        let tiles = device.alloc("mask", [2, 4]).expect("memory");
        let [forward, dgrad] = [[8, 16], [16, 8]]
            .map(|shape| Compressed::alloc(device, "out", shape).expect("memory"));
        let map = ValueMap::Identity;
        let mut refuse = |w, forward, dgrad| {
            refused(compress_weight(device, &Pruned { w, tiles, map }, forward, dgrad))
        };
        assert_eq!(refuse(w, dgrad, forward), ("shape", "forward"));
        assert_eq!(refuse(w.columns(0..12), forward, dgrad), ("shape", "the mask"));
        assert_eq!(refuse(w.columns(0..6), forward, dgrad), ("semantics", ""));
        let mut shared = dgrad;
        shared.values = forward.values;
        assert_eq!(refuse(w, forward, shared), ("alias", "dgrad"));
    });
}

//! Masks, samples, pruned weights and flips.

use std::{
    iter,
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

use ndarray::Array2;
use sparse24_core::{
    MaskKind,
    flip::flip_count,
    mvue::{self, Estimator},
    op::StepState,
    permute,
    philox::{Purpose, Site},
    prune::{self, ValueMap},
    search,
};
use sparse24_wgpu as wgpu;

use crate::{Bits, alloc, loaded, open};

fn floats(bits: &[u32]) -> Vec<f32> {
    bits.iter().map(|&bits| f32::from_bits(bits)).collect()
}

/// An order of rows, and the place of every row in it.
fn order(rows: usize) -> (Vec<u32>, Vec<u32>) {
    // Steps of 7 around the rows, whose number is no multiple of 7.
    let order: Vec<_> = (0..rows).map(|i| (7 * i + 3) % rows).collect();
    let mut places = vec![0; rows];
    order.iter().zip(0..).for_each(|(&row, place)| places[row] = place);
    (order.into_iter().map(|row| row as u32).collect(), places)
}

/// Runs `check` for every block of ten million tiles or groups, with one device per thread.
fn blocks(check: fn(u64)) {
    const BLOCKS: u64 = 100;
    let next = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                let numbers = iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed));
                for block in numbers.take_while(|&block| block < BLOCKS) {
                    check(block);
                    println!("block {block} of {BLOCKS}");
                }
            });
        }
    });
}

/// Ten million tiles of transposable masks, 62,500 at a time inside a wider matrix, and of weights
/// pruned by them; ten million groups of row-wise, of column-wise and of permuted masks, and the
/// flips between the first two and the transposable ones.
fn ten_million_masks(block: u64) {
    let Some(mut device) = open() else { return };
    let shape = [1000, 1000];
    let whole = alloc(&mut device, [shape[0], shape[1] + 3]);
    let w = wgpu::Matrix { offset: 2, shape, ..whole };
    let masks = MaskKind::ALL.map(|_| device.alloc_tiles(shape, "test").unwrap());
    let flips = alloc(&mut device, [1, 1]);
    let pruned = alloc(&mut device, shape);
    let permuted = device.alloc_tiles(shape, "test").unwrap();
    let (order, places) = order(shape[0]);
    let both = loaded(&mut device, [1, 2 * shape[0]], &[&order[..], &places].concat());
    for seed in 160 * block..160 * (block + 1) {
        let bits = Bits::ALL[seed as usize / 4 % Bits::ALL.len()];
        let values = bits.words(shape[0] * shape[1], 1 << 32 | seed);
        device.upload(w, &values).unwrap();
        // A tile has four groups.
        let kinds = if seed % 4 == 0 { 0..3 } else { 0..1 };
        for kind in kinds.clone() {
            wgpu::search::mask_search(&mut device, w, MaskKind::ALL[kind], masks[kind]).unwrap();
        }
        device.submit().unwrap();
        let host = Array2::from_shape_vec((shape[0], shape[1]), floats(&values)).unwrap();
        let mut expected = Vec::new();
        for kind in kinds {
            let mask = search::mask_search(host.view(), MaskKind::ALL[kind]).unwrap();
            let found = device.download_mask(masks[kind]).unwrap();
            let at = found.tiles().iter().zip(mask.tiles()).position(|(a, b)| a != b);
            assert_eq!(at, None, "a tile of {bits:?}, {:?}, seed {seed}", MaskKind::ALL[kind]);
            expected.push(mask);
        }
        let map = ValueMap::Identity;
        wgpu::prune::compress_weight(&mut device, w, masks[0], map, pruned).unwrap();
        let kept = prune::masked(host.view(), &expected[0]).unwrap();
        let found = device.download(pruned).unwrap();
        let equal = found.iter().zip(&kept).all(|(&found, x)| found == x.to_bits());
        assert!(equal, "pruned {bits:?}, seed {seed}");
        if let [_, rows, _] = &expected[..] {
            wgpu::permute::permuted_mask(&mut device, w, masks[1], both, permuted).unwrap();
            let expected = permute::permuted_mask(host.view(), rows, &order).unwrap();
            let found = device.download_mask(permuted).unwrap();
            assert!(found == expected, "permuted {bits:?}, seed {seed}");
        }
        for (number, pair) in expected.windows(2).enumerate() {
            wgpu::elementwise::fill(&mut device, flips, 0).unwrap();
            wgpu::flip::flip_count(&mut device, masks[number], masks[number + 1], flips).unwrap();
            let count = flip_count(&pair[0], &pair[1]).unwrap();
            assert_eq!(device.download(flips).unwrap(), [count as u32], "seed {seed}");
        }
    }
}

#[test]
fn ten_million_tiles() {
    ten_million_masks(0);
}

#[test]
#[ignore = "10^9 tiles take minutes on a GPU and hours on a processor"]
fn a_billion_tiles() {
    blocks(ten_million_masks);
}

const STATE: StepState = StepState {
    seed: 0x0123_4567_89ab_cdef,
    step: 41,
    micro_step: 3,
    learning_rate: 0.0,
    bias_corrections: [0.0; 2],
    loss_scale: 0.0,
};

fn assert_samples(device: &mut wgpu::Device, [p, r]: [usize; 2], bits: Bits, seed: u64) {
    let site = Site::new(Purpose::Mvue, seed as u32 & 0xff);
    let values = bits.words(p * r, 1 << 33 | seed);
    let [dz, out] = [0; 2].map(|_| alloc(device, [p, r]));
    device.upload(dz, &values).unwrap();
    device.set_step(&STATE).unwrap();
    wgpu::mvue::mvue_compress(device, dz, Estimator::Exact, site, out).unwrap();
    device.submit().unwrap();
    let host = Array2::from_shape_vec((p, r), floats(&values)).unwrap();
    let sampled = mvue::compress(host.view(), Estimator::Exact, STATE.stream(site)).unwrap();
    let expected = sampled.decode();
    for (at, found) in device.download(out).unwrap().into_iter().enumerate() {
        let expected = expected[[at % r, at / r]].to_bits();
        assert_eq!(found, expected, "{p} x {r}, {bits:?}, seed {seed}: element {at}");
    }
}

#[test]
fn samples() {
    let Some(mut device) = open() else { return };
    for (seed, shape) in [[1, 1], [3, 5], [4, 8], [17, 3], [70, 33]].into_iter().enumerate() {
        for bits in Bits::ALL {
            assert_samples(&mut device, shape, bits, seed as u64);
        }
    }
}

/// Ten million groups of the approximate estimator, also of any range: zeros where core has them,
/// and values within a few roundings, except elements that are below 2^-90 of the largest of their
/// group.
#[test]
fn approximate_samples() {
    let Some(mut device) = open() else { return };
    let site = Site::new(Purpose::Mvue, 7);
    let [p, r] = [1000, 1000];
    let [dz, out] = [0; 2].map(|_| alloc(&mut device, [p, r]));
    for (seed, bits) in Bits::ALL.into_iter().cycle().take(40).enumerate() {
        let values = bits.words(p * r, 1 << 34 | seed as u64);
        device.upload(dz, &values).unwrap();
        device.set_step(&STATE).unwrap();
        wgpu::mvue::mvue_compress(&mut device, dz, Estimator::Approximate, site, out).unwrap();
        let found = floats(&device.download(out).unwrap());
        let host = Array2::from_shape_vec((p, r), floats(&values)).unwrap();
        let sampled = mvue::compress(host.view(), Estimator::Approximate, STATE.stream(site));
        let expected = sampled.unwrap().decode();
        for (at, &found) in found.iter().enumerate() {
            let (token, feature) = (at / r, at % r);
            let expected = expected[[feature, token]];
            let group = (token / 4 * 4..token / 4 * 4 + 4).map(|i| host[[i, feature]].abs());
            let bound = 1e-5 * expected.abs() + 2f32.powi(-90) * group.fold(0.0, f32::max);
            let agree = bound.is_finite() && (found - expected).abs() <= bound
                || found == expected
                || found.is_nan() && expected.is_nan()
                || found.abs().min(expected.abs()) > 3.4e38;
            let agree = agree && (found == 0.0 || expected != 0.0);
            assert!(agree, "{bits:?}: element {at} is {found:e}, not {expected:e}");
        }
    }
}

fn ten_million_samples(block: u64) {
    let Some(mut device) = open() else { return };
    for seed in 40 * block..40 * (block + 1) {
        let bits = Bits::ALL[seed as usize % Bits::ALL.len()];
        assert_samples(&mut device, [1000, 1000], bits, seed);
    }
}

#[test]
fn ten_million_groups() {
    ten_million_samples(0);
}

#[test]
#[ignore = "10^9 groups take minutes on a GPU and hours on a processor"]
fn a_billion_groups() {
    blocks(ten_million_samples);
}

//! mask_search.

use half::bf16;
use ndarray::{Array2, ArrayView2, Zip, s};
use sparse24_core::{Element, Mask, MaskKind, philox::Philox4x32};
use sparse24_cpu::search as cpu;
use sparse24_cuda::{
    Device, Matrix,
    search::{Weight, mask_search},
};

use crate::{
    prune::{BothWays, MAPS},
    support::{Poisoned, affordable, on_gpu, refused, split_mix, upload},
};

/// Ordinary tiles and difficult ones: ties, zeros of both signs, subnormals, infinities, NaNs, sums
/// that round or overflow, random bits.
pub(crate) fn hostile<T: Element>([rows, columns]: [usize; 2], seed: u64) -> Array2<T> {
    const SPECIAL: [f32; 10] = [
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MAX,
        -f32::MAX,
        0.0,
        -0.0,
        1e-45,
        -1.2e-38,
        2.1e37,
    ];
    let draw = |purpose, row: usize, column: usize| {
        Philox4x32::new(seed).block([row as u32, column as u32, purpose, 0])
    };
    let mut w = Array2::from_elem((rows, columns), T::from_f32(0.0));
    Zip::indexed(&mut w).par_for_each(|(row, column), w| {
        let [kind, ..] = draw(1, row / 4, column / 4);
        let [a, b, bits, _] = draw(0, row, column);
        let signed = b as i32 as f32 * 2_f32.powi(-31);
        *w = T::from_f32(match kind % 9 {
            0 => (a % 3) as f32 - 1.0,
            1 => SPECIAL[a as usize % SPECIAL.len()],
            2 if a % 8 == 0 => SPECIAL[b as usize % SPECIAL.len()],
            3 => f32::from_bits(bits),
            // The smallest magnitudes of f32 and of bf16.
            4 => f32::from_bits((a % 8) << (b % 2 * 16) | b & 1 << 31),
            5 => f32::from_bits(0x7e80_0000 | a >> 8 | b & 1 << 31),
            6 => 1.0 + f32::EPSILON * (a % 4) as f32,
            // Magnitudes from 2^-40 on, so that sums round.
            7 => signed * 2_f64.powi(-((a % 40) as i32)) as f32,
            _ => signed,
        });
    });
    w
}

fn check_masks<T: Weight + Element>(device: &mut Device, w: &Array2<T>) {
    let on_device = upload(device, w);
    check_kinds(device, w.view(), on_device);
}

fn check_kinds<T: Weight + Element>(device: &mut Device, w: ArrayView2<'_, T>, of: Matrix<T>) {
    let [rows, columns] = of.shape();
    let tiles = Poisoned::<u16>::new(device, [rows / 4, columns / 4]);
    for kind in MaskKind::ALL {
        let mut expected = Mask::empty(rows, columns).expect("tiled");
        cpu::mask_search(w, kind, &mut expected).expect("tiled");
        mask_search(device, of, kind, tiles.matrix).expect("queued");
        let found = tiles.read(device);
        let differs = found.iter().zip(expected.tiles()).position(|(a, b)| a != b);
        assert_eq!(differs, None, "{kind} of {rows}x{columns}: the first differing tile");
    }
}

/// Compares the transposable masks of weights that replace those on the device.
fn check_again<T: Weight + Element>(
    device: &mut Device,
    w: &Array2<T>,
    on_device: Matrix<T>,
    tiles: &Poisoned<u16>,
    expected: &mut Mask,
    what: &str,
) {
    device.upload(on_device, w.as_slice().expect("row-major")).expect("uploaded");
    mask_search(device, on_device, MaskKind::Transposable, tiles.matrix).expect("queued");
    cpu::mask_search(w.view(), MaskKind::Transposable, expected).expect("tiled");
    assert!(tiles.read(device) == expected.tiles(), "{what} in {}", std::any::type_name::<T>());
}

#[test]
fn masks_of_hostile_tiles_match_the_cpu() {
    on_gpu(|device| {
        for (seed, shape) in [[0, 8], [8, 0], [4, 4], [4, 36], [68, 132], [512, 4], [1024, 1600]]
            .into_iter()
            .enumerate()
        {
            check_masks::<f32>(device, &hostile(shape, seed as u64));
            check_masks::<bf16>(device, &hostile(shape, seed as u64));
            device.reset().expect("idle");
        }
    });
}

#[test]
fn rectangles_are_searched_in_place() {
    on_gpu(|device| {
        let w = hostile::<f32>([24, 40], 5);
        let part = upload(device, &w).rows(3..19).columns(8..36);
        check_kinds(device, w.slice(s![3..19, 8..36]), part);
    });
}

/// All 3^16 ternary tiles, in 81 matrices: masks in f32 and bf16, and both compressed operands.
#[test]
fn every_ternary_tile() {
    /// Tiles along a side, and in a matrix.
    const SIDE: usize = 3_usize.pow(6);
    const TILES: usize = SIDE * SIDE;
    on_gpu(|device| {
        let mut w = Array2::<f32>::zeros((4 * SIDE, 4 * SIDE));
        let mut narrow = w.mapv(bf16::from_f32);
        let (on_device, narrow_on_device) = (upload(device, &w), upload(device, &narrow));
        let tiles = Poisoned::<u16>::new(device, [SIDE, SIDE]);
        let mut both_ways = BothWays::new(device, [4 * SIDE, 4 * SIDE]);
        let mut expected = Mask::empty(4 * SIDE, 4 * SIDE).expect("tiled");
        for part in (0..81).step_by(if affordable(usize::MAX) { 1 } else { 20 }) {
            for tile in 0..TILES {
                let mut rest = part * TILES + tile;
                for at in 0..16 {
                    w[[4 * (tile / SIDE) + at / 4, 4 * (tile % SIDE) + at % 4]] = (rest % 3) as f32;
                    rest /= 3;
                }
            }
            narrow.zip_mut_with(&w, |narrow, &w| *narrow = bf16::from_f32(w));
            let what = format!("part {part}");
            check_again(device, &narrow, narrow_on_device, &tiles, &mut expected, &what);
            check_again(device, &w, on_device, &tiles, &mut expected, &what);
            for map in MAPS {
                both_ways.check(device, &w, &expected, (on_device, tiles.matrix), map);
            }
        }
    });
}

/// Masks and both compressed operands of 2^30 tiles: a fifth so coarse that most tiles tie, the
/// rest with magnitudes in [1/8, 2), where every sum rounds.
#[test]
#[ignore = "64 GiB pass through the host: `run.sh long`"]
fn a_billion_random_tiles() {
    const SHAPE: [usize; 2] = [16384, 16384];
    on_gpu(|device| {
        let mut w = Array2::<f32>::zeros(SHAPE);
        let on_device = upload(device, &w);
        let tiles = Poisoned::<u16>::new(device, SHAPE.map(|length| length / 4));
        let mut both_ways = BothWays::new(device, SHAPE);
        let mut expected = Mask::empty(SHAPE[0], SHAPE[1]).expect("tiled");
        for round in 0..64_u64 {
            let bits: u32 = if round % 5 == 0 { 0x81e0_0000 } else { 0x81ff_ffff };
            Zip::indexed(w.rows_mut()).par_for_each(|row, mut w| {
                let first = (round * SHAPE[0] as u64 + row as u64) * SHAPE[1] as u64 / 2;
                for (at, pair) in w
                    .as_slice_mut()
                    .expect("row-major")
                    .as_chunks_mut::<2>()
                    .0
                    .iter_mut()
                    .enumerate()
                {
                    let word = split_mix(first + at as u64);
                    *pair = [word as u32, (word >> 32) as u32]
                        .map(|word| f32::from_bits(word & bits | 0x3e00_0000));
                }
            });
            let what = format!("round {round}");
            check_again(device, &w, on_device, &tiles, &mut expected, &what);
            both_ways.check(
                device,
                &w,
                &expected,
                (on_device, tiles.matrix),
                MAPS[round as usize % 2],
            );
        }
    });
}

/// More bytes than 32 bits can count, and ragged rows.
#[test]
#[ignore = "a gigabyte: `run.sh long`"]
fn a_large_matrix() {
    on_gpu(|device| check_masks::<f32>(device, &hostile([30768, 8192], 1)));
}

#[test]
fn refusals_name_the_operand() {
    on_gpu(|device| {
        let w = device.alloc::<f32>("w", [8, 16]).expect("memory");
        let tiles = device.alloc::<u16>("mask", [2, 4]).expect("memory");
        let mut refuse = |w, tiles| refused(mask_search(device, w, MaskKind::RowWise, tiles));
        assert_eq!(refuse(w.columns(0..14), tiles), ("semantics", ""));
        assert_eq!(refuse(w, tiles.columns(0..3)), ("shape", "the mask"));
        assert_eq!(refuse(w.columns(0..12), tiles.columns(0..3)), ("gaps", "the mask"));
        assert_eq!(refuse(w.columns(1..5), tiles.columns(0..1)), ("alignment", "w"));
    });
}

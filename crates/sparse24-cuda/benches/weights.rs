//! What is done to weights, against the bytes it must move: mask search, compression both ways, the gradient norm and the optimizer step.
//!
//! Every result is verified before it is timed. A timing is that of some launches in a row, each on other buffers than the one before, more
//! than the L2 holds in all. The floor is bytes at [`COPY`]; a copy of as many bytes stands beside it.

use half::bf16;
use ndarray::{Array2, Zip};
use sparse24_core::{
    Mask, MaskKind,
    compressed::Compressed24,
    philox::{Philox4x32, uniform},
    prune::ValueMap,
};
use sparse24_cpu as cpu;
use sparse24_cuda::{Device, Error, Matrix, Settings, compressed::Compressed, layout::to_fragments, prune, search};

/// Bytes a second that a copy on an H200 reads and writes.
const COPY: f64 = 4.1e12;
/// Bytes that the buffers of an operation take in all, at least: several times the L2.
const ROTATED: usize = 400 << 20;
const TIMINGS: usize = 40;
const LAUNCHES: usize = 8;
const SHAPES: [[usize; 2]; 5] = [[16384, 4096], [5120, 1280], [6400, 1600], [3072, 768], [768, 3072]];

fn main() -> Result<(), Error> {
    let mut device = Device::open(&Settings::default())?;
    println!("{}; medians of {TIMINGS} timings of {LAUNCHES} launches; floor: bytes / {:.1} TB/s", device.name(), COPY / 1e12);
    println!("{:<44} {:>9} {:>9} {:>9} {:>8} {:>7} {:>9}", "", "median us", "p10", "p90", "GB/s", "x floor", "x copy");
    for shape in SHAPES {
        weights(&mut device, shape)?;
        device.reset()?;
    }
    Ok(())
}

fn gaussian(shape: [usize; 2], seed: u64) -> Array2<f32> {
    let mut x = Array2::zeros(shape);
    Zip::indexed(&mut x).par_for_each(|(row, column), x| {
        let words = Philox4x32::new(seed).block([row as u32, column as u32, 0, 0]);
        *x = words.into_iter().map(|word| uniform(word) - 0.5).sum::<f32>() * 1.7;
    });
    x
}

/// Searches and compressions of matrices of one shape.
fn weights(device: &mut Device, shape: [usize; 2]) -> Result<(), Error> {
    struct Buffers {
        w: Matrix<f32>,
        narrow: Matrix<bf16>,
        tiles: Matrix<u16>,
        forward: Compressed,
        dgrad: Compressed,
    }
    let ([r, q], elements) = (shape, shape[0] * shape[1]);
    let w = gaussian(shape, 1);
    let narrow = w.mapv(bf16::from_f32);
    let mut buffers = Vec::new();
    for _ in 0..(ROTATED / (4 * elements)).max(2) {
        let of = Buffers {
            w: device.alloc("w", shape)?,
            narrow: device.alloc("w", shape)?,
            tiles: device.alloc("mask", [r / 4, q / 4])?,
            forward: Compressed::alloc(device, "forward", [r, q])?,
            dgrad: Compressed::alloc(device, "dgrad", [q, r])?,
        };
        device.upload(of.w, w.as_slice().expect("row-major"))?;
        device.upload(of.narrow, narrow.as_slice().expect("row-major"))?;
        buffers.push(of);
    }
    let pruned = |of: &Buffers| prune::Pruned { w: of.w, tiles: of.tiles, map: ValueMap::Identity };
    let first = &buffers[0];
    let mut mask = Mask::empty(r, q).expect("tiled");
    for kind in [MaskKind::RowWise, MaskKind::ColumnWise, MaskKind::Transposable] {
        cpu::search::mask_search(w.view(), kind, &mut mask).expect("tiled");
        search::mask_search(device, first.w, kind, first.tiles)?;
        assert!(device.download(first.tiles)? == mask.tiles(), "{kind}");
    }
    let (mut forward, mut dgrad) = (Compressed24::zeros(r, q).expect("grouped"), Compressed24::zeros(q, r).expect("grouped"));
    cpu::prune::compress_weight(w.view(), &mask, ValueMap::Identity, &mut forward, &mut dgrad).expect("fits");
    prune::compress_weight(device, &pruned(first), first.forward, first.dgrad)?;
    assert!(first.forward.download(device)? == to_fragments(&forward) && first.dgrad.download(device)? == to_fragments(&dgrad));

    let mut row = |name: &str, bytes: usize, run: &dyn Fn(&mut Device, &Buffers) -> Result<(), Error>| {
        report(device, &format!("{name} {r}x{q}"), bytes, &buffers, run)
    };
    let tiles = elements / 8;
    row("mask_search_f32", 4 * elements + tiles, &|device, of| search::mask_search(device, of.w, MaskKind::Transposable, of.tiles))?;
    row("mask_search_f32 row-wise", 4 * elements + tiles, &|device, of| search::mask_search(device, of.w, MaskKind::RowWise, of.tiles))?;
    row("mask_search_bf16", 2 * elements + tiles, &|device, of| search::mask_search(device, of.narrow, MaskKind::Transposable, of.tiles))?;
    row("compress_forward", 4 * elements + tiles + 9 * elements / 8, &|device, of| {
        prune::compress_forward(device, &pruned(of), of.forward)
    })?;
    row("compress_weight", 4 * elements + tiles + 9 * elements / 4, &|device, of| {
        prune::compress_weight(device, &pruned(of), of.forward, of.dgrad)
    })
}

/// Times `run` on each of the buffers in turn and prints a line.
fn report<B>(
    device: &mut Device,
    name: &str,
    bytes: usize,
    buffers: &[B],
    run: &dyn Fn(&mut Device, &B) -> Result<(), Error>,
) -> Result<(), Error> {
    let copied = {
        let halves = device.alloc::<u8>("copy", [2 * (ROTATED / bytes).max(2), bytes / 2])?;
        let sides = |at: usize| [0, 1].map(|side| halves.rows(2 * at + side..2 * at + side + 1));
        let pairs: Vec<[Matrix<u8>; 2]> = (0..halves.shape()[0] / 2).map(sides).collect();
        timings(device, &pairs, &|device, &[from, to]: &[Matrix<u8>; 2]| device.copy(from, to))?
    };
    let times = timings(device, buffers, run)?;
    let [low, median, high] = [times.len() / 10, times.len() / 2, times.len() * 9 / 10].map(|at| f64::from(times[at]));
    let (rate, floor) = (bytes as f64 / median / 1e3, bytes as f64 / COPY * 1e6);
    let copy = f64::from(copied[copied.len() / 2]);
    println!("{name:<44} {median:>9.2} {low:>9.2} {high:>9.2} {rate:>8.0} {:>7.2} {:>9.2}", median / floor, median / copy);
    Ok(())
}

/// Microseconds of one launch, ascending.
fn timings<B>(device: &mut Device, buffers: &[B], run: &dyn Fn(&mut Device, &B) -> Result<(), Error>) -> Result<Vec<f32>, Error> {
    let mut turns = buffers.iter().cycle();
    let mut times = Vec::new();
    for timing in 0..TIMINGS + 5 {
        let time = device.time(|device| (0..LAUNCHES).try_for_each(|_| run(device, turns.next().expect("there are buffers"))))?;
        if timing >= 5 {
            times.push(time * 1e3 / LAUNCHES as f32);
        }
    }
    times.sort_by(f32::total_cmp);
    Ok(times)
}

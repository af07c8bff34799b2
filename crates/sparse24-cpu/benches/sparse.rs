//! The sparse kernels against the bytes they must move, a parallel copy of as many bytes, and a
//! straightforward search; and products with a 2:4 operand against dense ones.
//!
//! ```text
//! cargo bench -p sparse24-cpu --bench sparse -- [products]
//! ```
//!
//! Every result is verified before it is timed. A table gives medians over rounds in which the
//! contestants take turns, so that a busy moment affects all of them.

use std::{hint::black_box, time::Instant};

use ndarray::Array2;
use rayon::prelude::*;
use sparse24_core::{
    Mask, MaskKind,
    mvue::{self as core_mvue, Estimator},
    op::Accumulate,
    philox::{Philox4x32, Purpose, Site, Stream},
    search as core_search,
    tile::TilePattern,
};
use sparse24_cpu::{
    Simd, gemm, mvue, prune, search,
    strips::{self, Strips},
};

/// Out- and in-features of the weights, and tokens of the gradients.
const SHAPE: [usize; 2] = [4096, 1024];
const ELEMENTS: usize = SHAPE[0] * SHAPE[1];

/// A contestant.
struct Entry<'a> {
    name: String,
    /// Bytes that must be read and written.
    bytes: usize,
    run: Box<dyn FnMut() + 'a>,
}

impl<'a> Entry<'a> {
    fn new(name: impl Into<String>, bytes: usize, run: impl FnMut() + 'a) -> Self {
        Self { name: name.into(), bytes, run: Box::new(run) }
    }
}

fn main() {
    if std::env::args().any(|argument| argument == "products") {
        return products();
    }
    let w = gaussian();
    searches(&w);
    masked(&w);
    estimates(&w);
    products();
}

/// Sums of four uniforms, close to Gaussian weights and the same on every run.
fn gaussian() -> Array2<f32> {
    Array2::from_shape_fn(SHAPE, |(row, column)| {
        let words = Philox4x32::new(24).block([row as u32, column as u32, 0, 0]);
        words.into_iter().map(|word| word as f32 / u32::MAX as f32 - 0.5).sum()
    })
}

fn searches(w: &Array2<f32>) {
    let bytes = ELEMENTS * 4 + ELEMENTS / 8;
    let expected = core_search::mask_search(w.view(), MaskKind::Transposable).expect("tiled");
    let mut mask = Mask::empty(SHAPE[0], SHAPE[1]).expect("tiled");
    naive_search(w, &mut mask);
    let same = mask.tiles().iter().zip(expected.tiles()).filter(|(a, b)| a == b).count();
    assert!(
        same * 1000 > expected.tiles().len() * 999,
        "only near ties may differ, yet {same} tiles agree"
    );
    let naive = Entry::new("90 sums", bytes, move || naive_search(black_box(w), &mut mask));
    let mut entries = vec![naive];
    for level in Simd::ALL.into_iter().filter_map(Simd::available) {
        let mut mask = Mask::empty(SHAPE[0], SHAPE[1]).expect("tiled");
        search::mask_search_at(level, w.view(), MaskKind::Transposable, &mut mask).expect("tiled");
        assert_eq!(mask, expected);
        entries.push(Entry::new(format!("mask search, {}", level.simd()), bytes, move || {
            search::mask_search_at(level, black_box(w).view(), MaskKind::Transposable, &mut mask)
                .expect("tiled");
        }));
    }
    contest(
        "mask search 4096x1024 f32 (goal: 10 x the loop, 80 GB/s of input with AVX-512)",
        entries,
    );
}

fn masked(w: &Array2<f32>) {
    let mask = core_search::mask_search(w.view(), MaskKind::Transposable).expect("tiled");
    let expected = sparse24_core::prune::masked(w.view(), &mask).expect("shapes agree");
    let bytes = ELEMENTS * 8 + ELEMENTS / 8;
    let mut dense = Array2::zeros(w.raw_dim());
    prune::masked(w.view(), &mask, dense.view_mut()).expect("shapes agree");
    assert_eq!(dense, expected);
    let masked = Entry::new("masked dense copy", bytes, move || {
        prune::masked(black_box(w).view(), &mask, dense.view_mut()).expect("shapes agree");
    });
    contest("masked dense copy 4096x1024 f32", vec![copy(bytes), masked]);
}

fn estimates(dz: &Array2<f32>) {
    let stream = Stream::new(1, Site::new(Purpose::Mvue, 2), 3, 4);
    let expected = core_mvue::compress(dz.view(), Estimator::Exact, stream).expect("grouped");
    let bytes = ELEMENTS * 8;
    let mut entries = vec![copy(bytes)];
    for level in Simd::ALL.into_iter().filter_map(Simd::available) {
        let mut dense = Array2::zeros(dz.raw_dim());
        mvue::mvue_prune_at(level, dz.view(), Estimator::Exact, stream, dense.view_mut())
            .expect("shapes agree");
        assert_eq!(dense, expected.decode().t());
        entries.push(Entry::new(format!("MVUE, dense, {}", level.simd()), bytes, move || {
            let dz = black_box(dz).view();
            mvue::mvue_prune_at(level, dz, Estimator::Exact, stream, dense.view_mut())
                .expect("shapes agree");
        }));
    }
    contest("MVUE 4096x1024 f32, random numbers included", entries);
}

/// The products of a layer at the shapes of `shakespeare-char-cpu` and of d_model 768. Weights are
/// packed once per optimizer step, and so before; the sample of dZ is packed for its product.
fn products() {
    println!("\nproducts, {} threads, {}", rayon::current_num_threads(), Simd::detect());
    println!("{:<30} {:>10} {:>10} {:>7}", "p q r", "dense us", "2:4 us", "ratio");
    for (p, sizes) in [
        (768, &[(128, 384), (128, 128), (128, 512), (512, 128)]),
        (1024, &[(768, 2304), (768, 768), (768, 3072), (3072, 768)]),
    ] {
        sizes.iter().for_each(|&(q, r)| products_of([p, q, r]));
    }
}

fn products_of([p, q, r]: [usize; 3]) {
    let numbers = gaussian();
    let matrix = |rows, columns| {
        let mut numbers = numbers.iter().copied();
        Array2::from_shape_simple_fn((rows, columns), || numbers.next().expect("there are enough"))
    };
    let (x, w, dz) = (matrix(p, q), matrix(r, q), matrix(p, r));
    let mask = core_search::mask_search(w.view(), MaskKind::Transposable).expect("tiled");
    let w = sparse24_core::prune::masked(w.view(), &mask).expect("shapes agree");
    let samples = [0, 1].map(|step| {
        let stream = Stream::new(1, Site::new(Purpose::Mvue, 2), 3, step);
        let mut sample = Array2::zeros((p, r));
        mvue::mvue_prune(dz.view(), Estimator::Exact, stream, sample.view_mut()).expect("it fits");
        sample
    });
    let [mut forward, mut dgrad, mut wgrad] = [(); 3].map(|()| Strips::default());
    forward.pack(w.view());
    dgrad.pack(w.t());
    let over = Accumulate::Overwrite;
    versus("forward", [p, q, r], (p, r), |sparse, z, _| match sparse {
        false => gemm::matmul(x.view(), w.t(), z.view_mut(), over),
        true => strips::matmul(&forward, x.t(), None, z.view_mut().reversed_axes(), over),
    });
    versus("dgrad", [p, q, r], (p, q), |sparse, dx, _| match sparse {
        false => gemm::matmul(dz.view(), w.view(), dx.view_mut(), over),
        true => strips::matmul(&dgrad, dz.t(), None, dx.view_mut().reversed_axes(), over),
    });
    versus("wgrad, packed", [p, q, r], (r, q), |sparse, dw, round| {
        // Another sample has other zeros.
        let sample = samples[round % 2].t();
        if !sparse {
            return gemm::matmul(sample, x.view(), dw.view_mut(), over);
        }
        wgrad.pack(sample);
        strips::matmul(&wgrad, x.view(), None, dw.view_mut(), over)
    });
}

/// Times a dense and a sparse product in turns; prints medians and their ratio.
fn versus(
    name: &str,
    [p, q, r]: [usize; 3],
    shape: (usize, usize),
    mut run: impl FnMut(bool, &mut Array2<f32>, usize) -> Result<(), sparse24_cpu::Error>,
) {
    const ROUNDS: usize = 61;
    let mut results = [0; 2].map(|_| Array2::zeros(shape));
    let mut seconds = [const { Vec::new() }; 2];
    for round in 0..ROUNDS {
        for (at, (result, seconds)) in results.iter_mut().zip(&mut seconds).enumerate() {
            let start = Instant::now();
            run(at == 1, result, round).expect("shapes agree");
            seconds.push(start.elapsed().as_secs_f64() * 1e6);
        }
        let [dense, sparse] = &results;
        let bound = 1e-5 * dense.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
        assert!(dense.iter().zip(sparse).all(|(a, b)| (a - b).abs() <= bound), "{name} differs");
    }
    let [dense, sparse] = seconds.map(|mut seconds| {
        seconds.sort_by(f64::total_cmp);
        seconds[ROUNDS / 2]
    });
    let name = format!("{p} {q} {r} {name}");
    println!("{name:<30} {dense:>10.1} {sparse:>10.1} {:>7.2}", dense / sparse);
}

/// A copy that reads and writes `bytes` in all, on all threads.
fn copy<'a>(bytes: usize) -> Entry<'a> {
    let (from, mut to) = (vec![1.0_f32; bytes / 8], vec![0.0; bytes / 8]);
    Entry::new("copy", bytes, move || {
        to.par_chunks_mut(1 << 15)
            .zip(black_box(&from).par_chunks(1 << 15))
            .for_each(|(to, from)| to.copy_from_slice(from));
        black_box(&to);
    })
}

fn naive_search(w: &Array2<f32>, mask: &mut Mask) {
    let tile_columns = SHAPE[1] / 4;
    let w = w.as_slice().expect("row-major");
    mask.tiles_mut().par_chunks_mut(tile_columns).zip(w.par_chunks(4 * SHAPE[1])).for_each(
        |(tiles, rows)| {
            for (at, bits) in tiles.iter_mut().enumerate() {
                *bits =
                    sums(&std::array::from_fn(|i| rows[i / 4 * SHAPE[1] + 4 * at + i % 4].abs()));
            }
        },
    );
}

/// The pattern with the largest sum of its eight kept magnitudes.
fn sums(tile: &[f32; 16]) -> u16 {
    const KEPT: [[u8; 8]; 90] = {
        let mut kept = [[0; 8]; 90];
        let mut pattern = 0;
        while pattern < 90 {
            let (mut at, mut found) = (0, 0);
            while at < 16 {
                if TilePattern::ALL[pattern].bits() >> at & 1 == 1 {
                    kept[pattern][found] = at;
                    found += 1;
                }
                at += 1;
            }
            pattern += 1;
        }
        kept
    };
    let mut best = (f32::NEG_INFINITY, 0);
    for (pattern, kept) in KEPT.iter().enumerate() {
        let score = kept.iter().map(|&at| tile[usize::from(at & 15)]).sum();
        if score > best.0 {
            best = (score, pattern);
        }
    }
    TilePattern::ALL[best.1].bits()
}

/// Times the entries in turns; prints medians and ratios to the first entry.
fn contest(title: &str, mut entries: Vec<Entry<'_>>) {
    const ROUNDS: usize = 31;
    let mut seconds = vec![Vec::new(); entries.len()];
    for _ in 0..ROUNDS {
        for (entry, seconds) in entries.iter_mut().zip(&mut seconds) {
            (entry.run)();
            let start = Instant::now();
            (entry.run)();
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    let bandwidth = |entry: &Entry<'_>, seconds: f64| entry.bytes as f64 / seconds / 1e9;
    println!("\n{title}, {} threads, {}", rayon::current_num_threads(), Simd::detect());
    println!(
        "{:<42} {:>9} {:>12} {:>12} {:>9} {:>10}",
        "", "MB", "median ms", "best ms", "GB/s", "ratio"
    );
    seconds.iter_mut().for_each(|seconds| seconds.sort_by(f64::total_cmp));
    let reference = bandwidth(&entries[0], seconds[0][ROUNDS / 2]);
    for (entry, seconds) in entries.iter().zip(&seconds) {
        let median = seconds[ROUNDS / 2];
        println!(
            "{:<42} {:>9.2} {:>12.3} {:>12.3} {:>9.2} {:>10.2}",
            entry.name,
            entry.bytes as f64 / 1e6,
            1e3 * median,
            1e3 * seconds[0],
            bandwidth(entry, median),
            bandwidth(entry, median) / reference
        );
    }
    println!();
}

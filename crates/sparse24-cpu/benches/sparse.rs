//! The sparse kernels against the bytes they must move, the faster of two parallel copies of as
//! many bytes (the library's, and one by stores past the caches, which large outputs get), and a
//! straightforward search.
//!
//! Every result is verified before it is timed. After criterion's groups a table gives medians,
//! taken in turns so that a busy moment falls on all of a row's contestants. Deliberately absent: a
//! verdict; the goals stand beside the measured ratios.

use std::{hint::black_box, time::Duration, time::Instant};

use criterion::{Criterion, Throughput};
use half::bf16;
use ndarray::{Array2, Axis};
use rayon::prelude::*;
use sparse24_core::{
    Element, Mask, MaskKind,
    compressed::Compressed24,
    mvue as core_mvue,
    mvue::Estimator,
    philox::{Philox4x32, Purpose, Site, Stream},
    prune::ValueMap,
    search as core_search,
    tile::TilePattern,
};
use sparse24_cpu::{
    Simd, mvue, prune, search,
    simd::{self, Available},
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
    let mut criterion = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args();
    let w = gaussian::<f32>();
    searches(&mut criterion, &w);
    compressions(&mut criterion, &w);
    estimates(&mut criterion, "f32", &w);
    estimates(&mut criterion, "bf16", &w.mapv(bf16::from_f32));
    criterion.final_summary();
}

/// Sums of four uniforms: near enough to Gaussian weights, the same on every run.
fn gaussian<T: Element>() -> Array2<T> {
    Array2::from_shape_fn(SHAPE, |(row, column)| {
        let words = Philox4x32::new(24).block([row as u32, column as u32, 0, 0]);
        T::from_f32(words.into_iter().map(|word| word as f32 / u32::MAX as f32 - 0.5).sum())
    })
}

fn searches(criterion: &mut Criterion, w: &Array2<f32>) {
    let bytes = ELEMENTS * 4 + ELEMENTS / 8;
    let expected = core_search::mask_search(w.view(), MaskKind::Transposable).expect("tiled");
    let empty = || Mask::empty(SHAPE[0], SHAPE[1]).expect("tiled");
    let mut entries = Vec::new();
    for (name, naive) in [("90 sums", sums as Naive), ("90-column product", products)] {
        let mut mask = empty();
        naive_search(w, &mut mask, naive);
        let same = mask.tiles().iter().zip(expected.tiles()).filter(|(a, b)| a == b).count();
        assert!(
            same * 1000 > expected.tiles().len() * 999,
            "{name}: only near ties may differ, yet {same} tiles agree"
        );
        entries.push(Entry::new(name, bytes, move || naive_search(black_box(w), &mut mask, naive)));
    }
    for level in Simd::ALL.into_iter().filter_map(Simd::available) {
        let mut mask = empty();
        search::mask_search_at(level, w.view(), MaskKind::Transposable, &mut mask).expect("tiled");
        assert_eq!(mask, expected);
        entries.push(Entry::new(format!("mask search, {}", level.simd()), bytes, move || {
            search::mask_search_at(level, black_box(w).view(), MaskKind::Transposable, &mut mask)
                .expect("tiled");
        }));
    }
    contest(
        criterion,
        "mask search 4096x1024 f32 (goal: 10 x the loop, 80 GB/s of input with AVX-512)",
        entries,
    );
}

fn compressions(criterion: &mut Criterion, w: &Array2<f32>) {
    let mask = core_search::mask_search(w.view(), MaskKind::Transposable).expect("tiled");
    let expected = Compressed24::encode(w.view(), &mask).expect("row-wise");
    let expected_dgrad = Compressed24::encode(w.t(), &mask.transpose()).expect("column-wise");
    let bytes =
        |size: usize| ELEMENTS * 4 + ELEMENTS / 8 + 2 * (ELEMENTS / 2 * size + ELEMENTS / 8);
    let (mut forward, mut dgrad) = (zeros(SHAPE[0], SHAPE[1]), zeros(SHAPE[1], SHAPE[0]));
    prune::compress_weight(w.view(), &mask, ValueMap::Identity, &mut forward, &mut dgrad)
        .expect("shapes agree");
    assert!(forward == expected && dgrad == expected_dgrad);
    let (mut forward16, mut dgrad16) =
        (zeros::<bf16>(SHAPE[0], SHAPE[1]), zeros(SHAPE[1], SHAPE[0]));
    let mut dense = Array2::zeros(w.raw_dim());
    let mask = &mask;
    let [copy, streamed] = copies(bytes(4));
    let entries = vec![
        copy,
        streamed,
        Entry::new("prune + compress both ways, f32", bytes(4), move || {
            prune::compress_weight(
                black_box(w).view(),
                mask,
                ValueMap::Identity,
                &mut forward,
                &mut dgrad,
            )
            .expect("shapes agree");
        }),
        Entry::new("prune + compress both ways, f32 to bf16", bytes(2), move || {
            prune::compress_weight(
                black_box(w).view(),
                mask,
                ValueMap::Identity,
                &mut forward16,
                &mut dgrad16,
            )
            .expect("shapes agree");
        }),
        Entry::new("the same, straightforwardly: core, group by group", bytes(4), move || {
            // On both cores, as a machine may take away one that idles.
            black_box(rayon::join(
                || Compressed24::encode(black_box(w).view(), mask).expect("row-wise"),
                || Compressed24::encode(black_box(w).t(), &mask.transpose()).expect("column-wise"),
            ));
        }),
        Entry::new("masked dense copy, f32", ELEMENTS * 8 + ELEMENTS / 8, move || {
            prune::masked(black_box(w).view(), mask, dense.view_mut()).expect("shapes agree");
        }),
    ];
    contest(criterion, "prune + compress 4096x1024 (goal: half of copy bandwidth)", entries);
}

fn estimates<T: Element>(criterion: &mut Criterion, name: &str, dz: &Array2<T>) {
    let stream = Stream::new(1, Site::new(Purpose::Mvue, 2), 3, 4);
    let bytes = ELEMENTS * size_of::<T>() + ELEMENTS / 2 * size_of::<T>() + ELEMENTS / 8;
    let mut out = zeros::<T>(SHAPE[1], SHAPE[0]);
    mvue::mvue_compress(dz.view(), Estimator::Exact, stream, &mut out).expect("shapes agree");
    assert!(out == core_mvue::compress(dz.view(), Estimator::Exact, stream).expect("grouped"));
    let mut entries = Vec::from(copies(bytes));
    for level in Simd::ALL.into_iter().filter_map(Simd::available) {
        let mut out = out.clone();
        entries.push(Entry::new(format!("MVUE + compress, {}", level.simd()), bytes, move || {
            mvue::mvue_compress_at(level, black_box(dz).view(), Estimator::Exact, stream, &mut out)
                .expect("shapes agree");
        }));
    }
    entries.push(Entry::new(
        "the same, straightforwardly: core, group by group",
        bytes,
        move || {
            let (left, right) = black_box(dz).view().split_at(Axis(1), SHAPE[1] / 2);
            let compress =
                |half| core_mvue::compress(half, Estimator::Exact, stream).expect("grouped");
            black_box(rayon::join(|| compress(left), || compress(right)));
        },
    ));
    let single = dz.mapv(T::to_f32);
    let mut dense = Array2::zeros(dz.raw_dim());
    mvue::mvue_prune(single.view(), Estimator::Exact, stream, dense.view_mut())
        .expect("shapes agree");
    if size_of::<T>() == 4 {
        assert!(dense == out.decode().t().mapv(T::to_f32));
        entries.push(Entry::new("MVUE, dense", ELEMENTS * 8, move || {
            mvue::mvue_prune(black_box(&single).view(), Estimator::Exact, stream, dense.view_mut())
                .expect("shapes agree");
        }));
    }
    contest(
        criterion,
        &format!(
            "MVUE 4096x1024 {name}, random numbers included (goal: a quarter of copy bandwidth)"
        ),
        entries,
    );
}

fn zeros<T: Element>(m: usize, k: usize) -> Compressed24<T> {
    Compressed24::zeros(m, k).expect("grouped")
}

/// Copies that read and write `bytes` in all, on all threads: by the library, and past the caches.
fn copies<'a>(bytes: usize) -> [Entry<'a>; 2] {
    let library: fn(&[f32], &mut [f32]) = |from, to| to.copy_from_slice(from);
    let past: fn(&[f32], &mut [f32]) =
        |from, to| simd::copy(Available::best(), usize::MAX, from, to);
    [("copy", library), ("copy past the caches", past)].map(|(name, copy)| {
        let (from, mut to) = (vec![1.0; bytes / 8], vec![0.0; bytes / 8]);
        Entry::new(name, bytes, move || {
            to.par_chunks_mut(1 << 15)
                .zip(black_box(&from).par_chunks(1 << 15))
                .for_each(|(to, from)| copy(from, to));
            black_box(&to);
        })
    })
}

/// The kept pattern of a tile's magnitudes, chosen by scoring all 90.
type Naive = fn(&[f32; 16]) -> u16;

fn naive_search(w: &Array2<f32>, mask: &mut Mask, naive: Naive) {
    let tile_columns = SHAPE[1] / 4;
    let w = w.as_slice().expect("row-major");
    mask.tiles_mut().par_chunks_mut(tile_columns).zip(w.par_chunks(4 * SHAPE[1])).for_each(
        |(tiles, rows)| {
            for (at, bits) in tiles.iter_mut().enumerate() {
                *bits =
                    naive(&std::array::from_fn(|i| rows[i / 4 * SHAPE[1] + 4 * at + i % 4].abs()));
            }
        },
    );
}

/// Adds up the eight kept magnitudes of each pattern.
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

/// Multiplies the tile by the 16x90 matrix of the patterns, which a compiler can vectorise.
fn products(tile: &[f32; 16]) -> u16 {
    const PATTERNS: [[f32; 90]; 16] = {
        let mut patterns = [[0.0; 90]; 16];
        let mut at = 0;
        while at < 16 {
            let mut pattern = 0;
            while pattern < 90 {
                patterns[at][pattern] = (TilePattern::ALL[pattern].bits() >> at & 1) as f32;
                pattern += 1;
            }
            at += 1;
        }
        patterns
    };
    let mut scores = [0.0; 90];
    for (magnitude, patterns) in tile.iter().zip(&PATTERNS) {
        scores.iter_mut().zip(patterns).for_each(|(score, pattern)| *score += magnitude * pattern);
    }
    let best = (1..90)
        .fold(0, |best, pattern| if scores[pattern] > scores[best] { pattern } else { best });
    TilePattern::ALL[best].bits()
}

/// Times the entries with criterion, then in turns; prints medians and ratios to the fastest copy,
/// or to the first entry.
fn contest(criterion: &mut Criterion, title: &str, mut entries: Vec<Entry<'_>>) {
    const ROUNDS: usize = 31;
    let mut group = criterion.benchmark_group(title);
    for entry in &mut entries {
        group.throughput(Throughput::Bytes(entry.bytes as u64));
        group.bench_function(&entry.name, |bencher| bencher.iter(&mut entry.run));
    }
    group.finish();

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
    let of = |at: usize| bandwidth(&entries[at], seconds[at][ROUNDS / 2]);
    let copies = entries.iter().take_while(|entry| entry.name.starts_with("copy")).count();
    let reference = (0..copies.max(1)).map(of).fold(0.0, f64::max);
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

//! Kernels that only benchmarks launch: other searches for transposable masks, and GEGLU of a
//! transposed Z.

use half::bf16;
use ndarray::Array2;
use sparse24_core::{
    MaskKind,
    search::{magnitude, mask_search_greedy},
    tile::TilePattern,
};

use super::{
    Bench, Case, Prepared, Size, Work,
    check::Stop,
    input::{PANEL, panel, random, repeated},
    timing::{self, Contestant},
};
use crate::{
    Device, Matrix,
    launch::{Grid, arguments},
    search::mask_search,
};

/// The cases for the weight and the activations of a size.
#[must_use]
pub fn peer_kernels(size: &Size) -> Vec<Case> {
    let search = |kernel, entries, reference| {
        Case::new(kernel, entries, size.weights(), move |bench, shape| {
            search(bench, kernel, shape, reference)
        })
    };
    let geglu = |kernel, entries, width| {
        Case::new(kernel, entries, size.hidden(), move |bench, shape| {
            geglu(bench, kernel, shape, width)
        })
    };
    vec![
        search("greedy_mask_search", &["greedy_mask_search_f32"], greedy),
        search("pattern_mask_search", &["pattern_mask_search_f32"], best_of_all),
        geglu("transposed_geglu", &["transposed_geglu_forward"], 8),
        geglu("strided_geglu", &["strided_geglu_forward"], 1),
    ]
}

/// A search of another definition.
type Search = fn(&Array2<f32>) -> Vec<u16>;

fn greedy(w: &Array2<f32>) -> Vec<u16> {
    mask_search_greedy(w.view()).expect("whole tiles").tiles().to_vec()
}

/// The first of the 90 patterns that keeps most, by sums in the order of elements.
fn best_of_all(w: &Array2<f32>) -> Vec<u16> {
    let tile = |chunk: ndarray::ArrayView2<'_, f32>| {
        let m: Vec<f32> = chunk.iter().map(|&w| magnitude(w)).collect();
        let norm = |pattern: TilePattern| {
            let kept = (0..16).filter(|at| pattern.bits() >> at & 1 == 1);
            kept.fold(0.0_f32, |sum, at| sum + m[at])
        };
        let all = TilePattern::ALL.into_iter().map(|pattern| (norm(pattern), pattern.bits()));
        all.reduce(|best, next| if next.0 > best.0 { next } else { best }).expect("90").1
    };
    w.exact_chunks([4, 4]).into_iter().map(tile).collect()
}

/// A search beside [`mask_search`].
fn search(
    bench: &mut Bench,
    kernel: &'static str,
    [r, q]: [usize; 2],
    reference: Search,
) -> Result<Prepared, Stop> {
    let entry = crate::kernels::entry(&format!("{kernel}_f32"));
    let of_w = random([PANEL.min(r), q], 1);
    let bytes = 4 * r * q + r * q / 8;
    let sets = bench.sets(bytes, |device| {
        let w = repeated(device, [r, q], &of_w)?;
        Ok((w, device.alloc("the mask", [r / 4, q / 4])?))
    })?;
    let launch = move |device: &mut Device, &(w, tiles): &(Matrix<f32>, Matrix<u16>)| {
        let (columns, count) = (q / 4, r * q / 16);
        let grid = Grid::line(count.div_ceil(128), 128);
        device.launch(entry, grid, &arguments![w, tiles, columns as u32, count as u32])
    };
    let device = &mut bench.device;
    launch(device, &sets[0])?;
    let (found, expected) = (device.download(sets[0].1)?, reference(&of_w));
    // The panel repeats down the matrix.
    let differs = |(at, tile): (usize, &u16)| *tile != expected[at % expected.len()];
    if let Some(at) = found.iter().enumerate().position(differs) {
        let (found, expected) = (found[at], expected[at % expected.len()]);
        return Err(Stop::Wrong(format!(
            "tile {at}: found {found:#06x}, expected {expected:#06x}"
        )));
    }
    let ours = |device: &mut Device, &(w, tiles): &(Matrix<f32>, Matrix<u16>)| {
        mask_search(device, w, MaskKind::Transposable, tiles)
    };
    let work = Work { bytes: bytes as f64, flops: 0.0, speed: 1.0 };
    let contestants = vec![
        Contestant::new("itself", sets.clone(), launch),
        Contestant::new("mask_search_f32", sets, ours),
    ];
    Ok(Prepared::new(work, "every tile, against a search on the host", contestants))
}

/// GEGLU of Z `[p, 2f]`, transposed, with `width` elements per thread, beside a copy.
fn geglu(
    bench: &mut Bench,
    kernel: &'static str,
    [p, f]: [usize; 2],
    width: usize,
) -> Result<Prepared, Stop> {
    let entry = crate::kernels::entry(&format!("{kernel}_forward"));
    let of_z = panel(p, 1);
    let bytes = 3 * 2 * p * f;
    let sets = bench.sets(bytes, |device| {
        let z = repeated(device, [2 * f, p], &of_z)?;
        Ok((z, device.alloc("h", [f, p])?))
    })?;
    let launch = move |device: &mut Device, &(z, h): &(Matrix<bf16>, Matrix<bf16>)| {
        let grid = Grid::line((p * f / width).div_ceil(256), 256);
        device.launch(entry, grid, &arguments![z, h, p as u32, f as u32])
    };
    let device = &mut bench.device;
    launch(device, &sets[0])?;
    for row in [0, 1, f / 2, f - 1] {
        let found = device.download(sets[0].1.rows(row..row + 1))?;
        for (column, found) in found.iter().enumerate() {
            let of = |row: usize| f64::from(of_z[[row % PANEL, column]].to_f32());
            let (a, expected_b) = (of(row), of(row + f));
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (a + 0.044715 * a.powi(3));
            let expected = 0.5 * a * (1.0 + inner.tanh()) * expected_b;
            let found = f64::from(found.to_f32());
            if (found - expected).abs() > expected.abs() / 128.0 + 1e-6 {
                return Err(Stop::Wrong(format!(
                    "h, row {row}, column {column}: found {found}, expected {expected}"
                )));
            }
        }
    }
    let work = Work { bytes: bytes as f64, flops: 0.0, speed: 1.0 };
    let copy = timing::copy(device, bytes, sets.len())?;
    let contestants = vec![Contestant::new("itself", sets, launch), copy];
    Ok(Prepared::new(work, "four rows, against f64", contestants))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sums of the product and the closed forms of the search round differently, so only equal
    /// norms may have other patterns.
    #[test]
    fn the_product_with_all_patterns_finds_the_largest_norm() {
        let w = random([64, 64], 3);
        let exact = sparse24_core::search::mask_search(w.view(), MaskKind::Transposable);
        assert_eq!(best_of_all(&w), exact.expect("whole tiles").tiles().to_vec());
    }

    #[test]
    fn the_kernel_has_the_patterns_of_core() {
        let text = include_str!("../../kernels/mask_search_peers.cu");
        let table = text.split("PATTERNS[90] = {").nth(1).and_then(|rest| rest.split('}').next());
        let words = table.expect("a table").split(',').filter_map(|x| x.trim().strip_prefix("0x"));
        let found: Vec<u16> =
            words.map(|digits| u16::from_str_radix(digits, 16).expect("hexadecimal")).collect();
        assert_eq!(found, TilePattern::ALL.map(TilePattern::bits));
    }
}

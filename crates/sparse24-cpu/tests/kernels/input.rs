//! Inputs with hostile values and layouts, poisoned outputs, and comparison at every SIMD level and
//! number of threads.

use half::{bf16, f16};
use ndarray::{Array2, ArrayView2, ShapeBuilder, s};
use proptest::prelude::*;
use sparse24_core::{
    Element, Mask,
    compressed::Compressed24,
    philox::{Philox4x32, uniform},
};
use sparse24_cpu::simd::{Available, Simd};

/// The layout of a matrix in memory.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Layout {
    RowMajor,
    ColumnMajor,
    /// Every second column of every third row of a larger matrix.
    Strided,
}

/// Access to the bits of an element, so that NaN payloads and the signs of zeros are compared.
pub(crate) trait Bits: Element {
    fn bits(self) -> u32;
    /// The element with the upper bits of `bits`.
    fn of_bits(bits: u32) -> Self;
}

impl Bits for f32 {
    fn bits(self) -> u32 {
        self.to_bits()
    }
    fn of_bits(bits: u32) -> Self {
        Self::from_bits(bits)
    }
}

macro_rules! bits_of_16 {
    ($($type:ty),*) => {$(
        impl Bits for $type {
            fn bits(self) -> u32 {
                self.to_bits().into()
            }
            fn of_bits(bits: u32) -> Self {
                Self::from_bits((bits >> 16) as u16)
            }
        }
    )*};
}
bits_of_16!(f16, bf16);

/// A random matrix whose tiles are of many kinds: ordinary, or full of ties, zeros, subnormals,
/// huge values, infinities, NaNs of both kinds or arbitrary bits.
pub(crate) fn matrix<T: Bits>(rows: usize, columns: usize, seed: u64) -> Array2<T> {
    let draw = |row: usize, column: usize, purpose| {
        Philox4x32::new(seed).block([row as u32, column as u32, purpose, 0])
    };
    Array2::from_shape_fn((rows, columns), |(row, column)| {
        let [kind, ..] = draw(row / 4, column / 4, 1);
        let [a, b, c, bits] = draw(row, column, 0);
        let uniform = |word: u32| word as f32 / u32::MAX as f32 - 0.5;
        let special = [
            f32::NAN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::MAX,
            -f32::MAX,
            0.0,
            -0.0,
            1e-45,
            -1.2e-38,
            2e37,
            -3e38,
            65504.0,
        ];
        match kind % 12 {
            0 => T::from_f32((a % 3) as f32 - 1.0),
            1 => T::from_f32(if a % 4 == 0 { uniform(b) } else { -0.0 }),
            2 => T::from_f32(special[a as usize % special.len()]),
            3 => T::of_bits(bits),
            4 => T::from_f32(f32::from_bits((a % 8) | (b << 31))),
            5 => T::from_f32(if a % 8 == 0 {
                special[b as usize % special.len()]
            } else {
                uniform(c)
            }),
            6 => T::from_f32(f32::from_bits(0x7f00_0000 | a >> 9 | b << 31)),
            7 => T::of_bits(if a % 4 == 0 { 0x7f80_0001 | b << 31 } else { bits & 0xbfff_ffff }),
            8 => T::from_f32(uniform(a) * f32::powi(2.0, (b % 200) as i32 - 100)),
            9 => T::from_f32(if a % 2 == 0 { 1.0 } else { 1.0 + f32::EPSILON * (b % 4) as f32 }),
            _ => T::from_f32(uniform(a) + uniform(b) + uniform(c)),
        }
    })
}

/// Uniform in [-scale, scale), reproducible from `seed`.
pub(crate) fn random(shape: [usize; 2], seed: u64, scale: f32) -> Array2<f32> {
    let mut call = 0;
    Array2::from_shape_simple_fn(shape, || {
        call += 1;
        (2.0 * uniform(Philox4x32::new(seed).block([call, 0, 0, 0])[0]) - 1.0) * scale
    })
}

/// The same values in column-major order.
pub(crate) fn column_major(x: &Array2<f32>) -> Array2<f32> {
    let mut y = Array2::zeros(x.dim().f());
    y.assign(x);
    y
}

/// Calls `f` with a view of `w` in the given layout.
pub(crate) fn laid_out<T: Element, R>(
    w: &Array2<T>,
    layout: Layout,
    f: impl FnOnce(ArrayView2<'_, T>) -> R,
) -> R {
    match layout {
        Layout::RowMajor => f(w.view()),
        Layout::ColumnMajor => f(w.t().as_standard_layout().t()),
        Layout::Strided => {
            let mut larger =
                Array2::from_elem((3 * w.nrows(), 2 * w.ncols()), T::from_f32(f32::NAN));
            larger.slice_mut(s![..;3, ..;2]).assign(w);
            f(larger.slice(s![..;3, ..;2]))
        }
    }
}

/// Calls `f` at every SIMD level of this machine, on 1, 2 and 7 threads.
pub(crate) fn everywhere(mut f: impl FnMut(Available) + Send) {
    for simd in Simd::ALL {
        match simd.available() {
            None => eprintln!("skipped: this machine has no {simd}"),
            Some(level) => threads(|| f(level)),
        }
    }
}

/// Calls `f` on 1, 2 and 7 threads.
pub(crate) fn threads(mut f: impl FnMut() + Send) {
    thread_local! {
        static POOLS: [rayon::ThreadPool; 3] = [1, 2, 7].map(|threads| {
            let builder = rayon::ThreadPoolBuilder::new().num_threads(threads);
            builder.build().expect("a thread pool")
        });
    }
    POOLS.with(|pools| pools.iter().for_each(|pool| pool.install(&mut f)));
}

pub(crate) fn layouts() -> impl Strategy<Value = Layout> {
    prop_oneof![
        3 => Just(Layout::RowMajor),
        1 => Just(Layout::ColumnMajor),
        1 => Just(Layout::Strided),
    ]
}

/// Asserts that all elements have the same bits.
pub(crate) fn assert_same<T: Bits>(found: ArrayView2<'_, T>, expected: ArrayView2<'_, T>) {
    assert_eq!(found.dim(), expected.dim());
    for ((at, &found), &expected) in found.indexed_iter().zip(expected) {
        assert!(
            found.bits() == expected.bits(),
            "{at:?}: found {found:?} ({:#x}), expected {expected:?} ({:#x})",
            found.bits(),
            expected.bits()
        );
    }
}

/// Asserts that every element is within its bound of the expected one.
pub(crate) fn assert_close(
    what: &str,
    found: ArrayView2<'_, f32>,
    expected: &Array2<f64>,
    bound: &Array2<f64>,
) {
    assert_eq!(found.dim(), expected.dim(), "{what}: shape");
    for (at, &value) in found.indexed_iter() {
        let (wanted, bound) = (expected[at], bound[at]);
        let difference = (f64::from(value) - wanted).abs();
        assert!(
            difference <= bound,
            "{what} at {at:?}: found {value}, expected {wanted}, bound {bound}"
        );
    }
}

/// Asserts that all values and metadata have the same bits.
pub(crate) fn assert_same_compressed<T: Bits>(found: &Compressed24<T>, expected: &Compressed24<T>) {
    assert_same(found.values(), expected.values());
    assert_eq!(found.metadata(), expected.metadata());
}

/// An output full of NaN, which shows what was not written.
pub(crate) fn poison<T: Element>(shape: [usize; 2]) -> Array2<T> {
    Array2::from_elem(shape, T::from_f32(f32::NAN))
}

/// A compressed output full of NaN, with wrong bits in its padding.
pub(crate) fn poisoned24<T: Element>(m: usize, k: usize) -> Compressed24<T> {
    let mut out = Compressed24::zeros(m, k).expect("a multiple of 4");
    let (mut values, metadata) = out.parts_mut();
    values.fill(T::from_f32(f32::NAN));
    metadata.fill(0xff);
    out
}

/// A random mask without structure.
pub(crate) fn any_mask(rows: usize, columns: usize, seed: u64) -> Mask {
    let tiles = matrix::<f32>(rows / 4, columns / 4, seed)
        .mapv(|x| (x.to_bits() ^ x.to_bits() >> 16) as u16);
    Mask::from_tiles(rows, columns, tiles.into_raw_vec_and_offset().0).expect("tiled")
}

/// An output mask of wrong bits.
pub(crate) fn poisoned_mask(rows: usize, columns: usize) -> Mask {
    Mask::from_tiles(rows, columns, vec![0xdead; rows * columns / 16]).expect("multiples of 4")
}

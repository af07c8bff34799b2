//! Small products whose operands stay in cache, for kernels that keep them in scratch buffers.
//! [`crate::gemm`] is for all others.
//!
//! Every element of C is one running sum over k in order, so the panel size never changes a bit.

use core::array;

use sparse24_core::op::Accumulate;

use crate::simd::{Available, Kernel, Vector};

/// Rows of scratch are padded to a multiple of this, the largest number of lanes.
pub(crate) const PAD: usize = 16;

/// The left operand A, and the distance of its rows or columns.
#[derive(Clone, Copy)]
pub(crate) enum Left<'a> {
    /// Row-major.
    Rows(&'a [f32], usize),
    /// Column-major.
    Columns(&'a [f32], usize),
}

/// C `[m, n]` = A `[m, k]` B `[k, n]`, or C += A B, for the shape `[m, n, k]`; `n` is a multiple of
/// [`PAD`].
///
/// B and C are row-major with rows `b_stride` and `c_stride` apart.
pub(crate) fn product(
    shape: [usize; 3],
    a: Left<'_>,
    (b, b_stride): (&[f32], usize),
    (c, c_stride): (&mut [f32], usize),
    accumulate: Accumulate,
) {
    Available::best().run(Product { shape, a, b, b_stride, c, c_stride, accumulate });
}

struct Product<'a> {
    shape: [usize; 3],
    a: Left<'a>,
    b: &'a [f32],
    b_stride: usize,
    c: &'a mut [f32],
    c_stride: usize,
    accumulate: Accumulate,
}

impl Product<'_> {
    /// Rows `i .. i + M`; returns M.
    #[inline(always)]
    fn strip<V: Vector, const M: usize>(&mut self, v: V, i: usize) -> usize {
        let n = self.shape[1];
        let mut j = 0;
        while n - j >= 2 * V::LANES {
            self.panel::<V, M, 2>(v, i, j);
            j += 2 * V::LANES;
        }
        if j < n {
            self.panel::<V, M, 1>(v, i, j);
        }
        M
    }

    /// Rows `i .. i + M`, `N` vectors of columns from `j` on.
    #[inline(always)]
    fn panel<V: Vector, const M: usize, const N: usize>(&mut self, v: V, i: usize, j: usize) {
        let width = N * V::LANES;
        let mut sums = [[v.splat(0.0); N]; M];
        if self.accumulate == Accumulate::Add {
            for (row, sums) in sums.iter_mut().enumerate() {
                let c = &self.c[(i + row) * self.c_stride + j..][..width];
                for (at, sum) in sums.iter_mut().enumerate() {
                    *sum = v.load(&c[at * V::LANES..]);
                }
            }
        }
        let columns = self.shape[2];
        let row_of_b = |l| &self.b[l * self.b_stride + j..][..width];
        // The slices are cut outside the innermost loops, which then check no bounds.
        match self.a {
            Left::Rows(a, stride) => {
                let rows: [&[f32]; M] = array::from_fn(|row| &a[(i + row) * stride..][..columns]);
                for l in 0..columns {
                    let b = load(v, row_of_b(l));
                    for (row, sums) in rows.iter().zip(&mut sums) {
                        add(v, sums, row[l], &b);
                    }
                }
            }
            Left::Columns(a, stride) => {
                for l in 0..columns {
                    let (b, column) = (load(v, row_of_b(l)), &a[l * stride + i..][..M]);
                    for (&a, sums) in column.iter().zip(&mut sums) {
                        add(v, sums, a, &b);
                    }
                }
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            let c = &mut self.c[(i + row) * self.c_stride + j..][..width];
            for (at, &sum) in sums.iter().enumerate() {
                v.store(sum, &mut c[at * V::LANES..]);
            }
        }
    }
}

/// N vectors of a row.
#[inline(always)]
pub(crate) fn load<V: Vector, const N: usize>(v: V, row: &[f32]) -> [V::F; N] {
    array::from_fn(
        #[inline(always)]
        |at| v.load(&row[at * V::LANES..]),
    )
}

/// sums += a b.
#[inline(always)]
pub(crate) fn add<V: Vector, const N: usize>(v: V, sums: &mut [V::F; N], a: f32, b: &[V::F; N]) {
    let a = v.splat(a);
    for (sum, &b) in sums.iter_mut().zip(b) {
        *sum = v.mul_add(a, b, *sum);
    }
}

impl Kernel for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(mut self, v: V) {
        let [m, n, _] = self.shape;
        debug_assert!(n.is_multiple_of(PAD), "padded columns");
        let mut i = 0;
        while i < m {
            i += match m - i {
                1 => self.strip::<V, 1>(v, i),
                2 => self.strip::<V, 2>(v, i),
                3 => self.strip::<V, 3>(v, i),
                // AVX-512 has registers for eight rows of two vectors.
                8.. if V::LANES == 16 => self.strip::<V, 8>(v, i),
                _ => self.strip::<V, 4>(v, i),
            };
        }
    }
}

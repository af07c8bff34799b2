//! Small products whose operands stay in cache, for kernels that keep them in scratch buffers.
//! [`crate::gemm`] is for all others.
//!
//! Every element of C is one running sum over k in order, so the panel size never changes a bit.

use sparse24_core::op::Accumulate;

use crate::simd::{Available, Kernel, Vector};

/// Rows of scratch are padded to a multiple of this, the largest number of lanes.
pub(crate) const PAD: usize = 16;

/// Rows of C in registers at once.
const ROWS: usize = 4;

/// C `[m, n]` = A `[m, k]` B `[k, n]`, or C += A B, for the shape `[m, n, k]`; `n` is a multiple of
/// [`PAD`].
///
/// Element (i, l) of A is at `i * a_strides[0] + l * a_strides[1]`; B and C are row-major with rows
/// `b_stride` and `c_stride` apart.
pub(crate) fn product(
    shape: [usize; 3],
    (a, a_strides): (&[f32], [usize; 2]),
    (b, b_stride): (&[f32], usize),
    (c, c_stride): (&mut [f32], usize),
    accumulate: Accumulate,
) {
    Available::best().run(Product { shape, a, a_strides, b, b_stride, c, c_stride, accumulate });
}

struct Product<'a> {
    shape: [usize; 3],
    a: &'a [f32],
    a_strides: [usize; 2],
    b: &'a [f32],
    b_stride: usize,
    c: &'a mut [f32],
    c_stride: usize,
    accumulate: Accumulate,
}

impl Product<'_> {
    #[inline(always)]
    fn strip<V: Vector, const M: usize>(&mut self, v: V, i: usize) {
        let n = self.shape[1];
        let mut j = 0;
        while n - j >= 2 * V::LANES {
            self.panel::<V, M, 2>(v, i, j);
            j += 2 * V::LANES;
        }
        if j < n {
            self.panel::<V, M, 1>(v, i, j);
        }
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
        for l in 0..self.shape[2] {
            let row = &self.b[l * self.b_stride + j..][..width];
            let mut b = [v.splat(0.0); N];
            for (at, b) in b.iter_mut().enumerate() {
                *b = v.load(&row[at * V::LANES..]);
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                let a = v.splat(self.a[(i + row) * self.a_strides[0] + l * self.a_strides[1]]);
                for (sum, &b) in sums.iter_mut().zip(&b) {
                    *sum = v.mul_add(a, b, *sum);
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

impl Kernel for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(mut self, v: V) {
        let [m, n, _] = self.shape;
        debug_assert!(n.is_multiple_of(PAD), "padded columns");
        for i in (0..m).step_by(ROWS) {
            match m - i {
                1 => self.strip::<V, 1>(v, i),
                2 => self.strip::<V, 2>(v, i),
                3 => self.strip::<V, 3>(v, i),
                _ => self.strip::<V, ROWS>(v, i),
            }
        }
    }
}

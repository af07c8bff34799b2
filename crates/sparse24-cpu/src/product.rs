//! Small products that stay in registers and cache, for kernels that hold their operands in scratch
//! of their own.
//!
//! Invariant: every element of C is one running sum over k in order, so neither panels nor
//! instruction sets of one kind of multiply-add change a bit. Deliberately absent: blocking for
//! caches, threads; [`crate::gemm`] is for the rest.

use pulp::{Arch, Simd, WithSimd};

use crate::gemm::Beta;

/// Rows of scratch are padded to a multiple of this, the most lanes that a vector has.
pub(crate) const PAD: usize = 16;

/// Rows of C in registers at once.
const ROWS: usize = 4;

/// C `[m, n]` = A `[m, k]` B `[k, n]`, or C += it; `n` is a multiple of [`PAD`].
pub(crate) struct Product<'a> {
    pub(crate) shape: [usize; 3],
    /// Element (i, l) stands at `i * strides[0] + l * strides[1]`.
    pub(crate) a: &'a [f32],
    pub(crate) a_strides: [usize; 2],
    /// Row-major, `b_stride` from row to row.
    pub(crate) b: &'a [f32],
    pub(crate) b_stride: usize,
    /// Row-major, `c_stride` from row to row.
    pub(crate) c: &'a mut [f32],
    pub(crate) c_stride: usize,
    pub(crate) beta: Beta,
}

impl Product<'_> {
    pub(crate) fn run(self) {
        Arch::new().dispatch(self);
    }

    #[inline(always)]
    fn strip<S: Simd, const M: usize>(&mut self, simd: S, i: usize) {
        let [_, n, _] = self.shape;
        let mut j = 0;
        while n - j >= 2 * S::F32_LANES {
            self.panel::<S, M, 2>(simd, i, j);
            j += 2 * S::F32_LANES;
        }
        if j < n {
            self.panel::<S, M, 1>(simd, i, j);
        }
    }

    /// Rows `i .. i + M`, `V` vectors of columns from `j` on.
    #[inline(always)]
    fn panel<S: Simd, const M: usize, const V: usize>(&mut self, simd: S, i: usize, j: usize) {
        let width = V * S::F32_LANES;
        let mut sums = [[simd.splat_f32s(0.0); V]; M];
        if self.beta == Beta::Accumulate {
            for (row, sums) in sums.iter_mut().enumerate() {
                let (c, _) = S::as_simd_f32s(&self.c[(i + row) * self.c_stride + j..][..width]);
                sums.copy_from_slice(c);
            }
        }
        for l in 0..self.shape[2] {
            let (b, _) = S::as_simd_f32s(&self.b[l * self.b_stride + j..][..width]);
            for (row, sums) in sums.iter_mut().enumerate() {
                let a =
                    simd.splat_f32s(self.a[(i + row) * self.a_strides[0] + l * self.a_strides[1]]);
                for (sum, &b) in sums.iter_mut().zip(b) {
                    *sum = simd.mul_add_e_f32s(a, b, *sum);
                }
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            let (c, _) = S::as_mut_simd_f32s(&mut self.c[(i + row) * self.c_stride + j..][..width]);
            c.copy_from_slice(sums);
        }
    }
}

impl WithSimd for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let [m, n, _] = self.shape;
        debug_assert!(n.is_multiple_of(PAD), "padded columns");
        for i in (0..m).step_by(ROWS) {
            match m - i {
                1 => self.strip::<S, 1>(simd, i),
                2 => self.strip::<S, 2>(simd, i),
                3 => self.strip::<S, 3>(simd, i),
                _ => self.strip::<S, ROWS>(simd, i),
            }
        }
    }
}

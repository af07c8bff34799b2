//! A dense product on one thread.

use ndarray::{ArrayView2, ArrayViewMut2, linalg::general_mat_mul};
use sparse24_core::op::Accumulate;

/// C = A B, or C += A B. No operand is empty.
pub(crate) fn multiply(
    a: ArrayView2<'_, f32>,
    b: ArrayView2<'_, f32>,
    mut c: ArrayViewMut2<'_, f32>,
    accumulate: Accumulate,
) {
    let add = accumulate == Accumulate::Add;
    #[cfg(target_arch = "x86_64")]
    {
        use core::ptr::null;
        use private_gemm_x86::*;

        let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        let avx512 = is_x86_feature_detected!("avx512dq").then_some(InstrSet::Avx512);
        if let Some(level) = avx512.or(avx2.then_some(InstrSet::Avx256)) {
            let ((m, n), k) = (c.dim(), b.nrows());
            assert_eq!((a.dim(), b.ncols()), ((m, k), n));
            let one = 1_f32;
            // SAFETY: the machine has the instructions, and the views hold all that their sizes and
            // strides address, that of C alone. Null means no diagonal factor, and all rows and
            // columns of C.
            unsafe {
                gemm(
                    DType::F32,
                    IType::U64,
                    level,
                    m,
                    n,
                    k,
                    c.as_mut_ptr().cast(),
                    c.strides()[0],
                    c.strides()[1],
                    null(),
                    null(),
                    DstKind::Full,
                    if add { Accum::Add } else { Accum::Replace },
                    a.as_ptr().cast(),
                    a.strides()[0],
                    a.strides()[1],
                    false,
                    null(),
                    0,
                    b.as_ptr().cast(),
                    b.strides()[0],
                    b.strides()[1],
                    false,
                    (&raw const one).cast(),
                    1,
                );
            }
            return;
        }
    }
    general_mat_mul(1.0, &a, &b, f32::from(u8::from(add)), &mut c);
}

//! Rounding to bf16 precision in f32 storage, so that a CPU run can mimic the operands of a GPU.

use ndarray::{ArrayView2, ArrayViewMut2};

use crate::{Error, check, elementwise};

/// out = x rounded to the nearest bf16, ties to even, stored as f32. A NaN becomes quiet and keeps
/// the upper bits of its payload.
///
/// # Errors
/// [`Error::Shape`] unless the shapes agree.
pub fn round_bf16(x: ArrayView2<'_, f32>, out: ArrayViewMut2<'_, f32>) -> Result<(), Error> {
    check::matrix("round_bf16", "out", &out, x.dim().into())?;
    elementwise::for_each(
        [x],
        [out],
        #[inline(always)]
        |[x], [out]| {
            for (out, &x) in out.iter_mut().zip(x) {
                let bits = x.to_bits();
                let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
                *out = f32::from_bits(
                    if x.is_nan() { bits | 0x40_0000 } else { rounded } & 0xffff_0000,
                );
            }
        },
    );
    Ok(())
}

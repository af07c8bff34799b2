//! Rounding to bf16 precision in f32 storage, so that a CPU run can mimic the operands of a GPU.

use ndarray::ArrayViewMut2;

use crate::elementwise;

/// Rounds to the nearest bf16, ties to even, stored as f32. A NaN becomes quiet and keeps the upper
/// bits of its payload.
pub fn round_bf16(x: ArrayViewMut2<'_, f32>) {
    elementwise::for_each(
        [],
        [x],
        #[inline(always)]
        |[], [x]| {
            for x in x {
                let bits = x.to_bits();
                let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
                *x = f32::from_bits(
                    if x.is_nan() { bits | 0x40_0000 } else { rounded } & 0xffff_0000,
                );
            }
        },
    );
}

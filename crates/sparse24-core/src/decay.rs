//! Masked decay: pruned weights are pulled to zero, so that they settle.
//!
//! Applied once an optimizer step, after unscaling, reduction and clipping, before Adam's moments (paper, equation 9), with the mask that
//! the forward used. Deliberately absent: decay on the weights, which the optimizer step owns because it needs the learning rate.

use ndarray::{ArrayView2, ArrayViewMut2, Zip};

use crate::{Error, mask::Mask, mask::check_shape};

/// g <- g + lambda * (1 - m) * w; shapes `[r, q]`; where the mask keeps, g is unchanged to the bit.
///
/// # Errors
/// [`Error::Shape`] unless all three shapes agree.
pub fn masked_decay(mut g: ArrayViewMut2<'_, f32>, w: ArrayView2<'_, f32>, mask: &Mask, lambda: f32) -> Result<(), Error> {
    let shape = [g.nrows(), g.ncols()];
    check_shape("masked decay", shape, [w.nrows(), w.ncols()])?;
    check_shape("masked decay", shape, mask.shape())?;
    Zip::indexed(&mut g).and(w).for_each(|(row, column), g, &w| {
        if !mask.keeps(row, column) {
            *g += lambda * w;
        }
    });
    Ok(())
}

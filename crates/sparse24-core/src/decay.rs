//! Masked decay on gradients: pruned weights are pulled towards zero, so that the mask settles.
//!
//! It is applied once per optimizer step, after unscaling, reduction and clipping and before Adam's
//! moments (the paper's equation 10), with the mask of the forward pass. The optimizer kernels of
//! the backends apply it in the same pass as AdamW; decay on weights is
//! [`MaskedDecay::OnWeights`](crate::op::MaskedDecay::OnWeights).

use ndarray::{ArrayView2, ArrayViewMut2, Zip};

use crate::{Error, mask::Mask, mask::check_shape};

/// g = g + lambda * (1 - m) * w, all `[r, q]`. Where the mask keeps, g is unchanged to the bit.
///
/// # Errors
/// [`Error::Shape`] unless all three shapes agree.
pub fn masked_decay(
    mut g: ArrayViewMut2<'_, f32>,
    w: ArrayView2<'_, f32>,
    mask: &Mask,
    lambda: f32,
) -> Result<(), Error> {
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

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

#[cfg(test)]
mod tests {
    use alloc::vec;

    use ndarray::Array2;

    use super::masked_decay;
    use crate::Mask;

    #[test]
    fn only_pruned_weights_decay() {
        let mask = Mask::from_tiles(4, 4, vec![0xa5c3]).expect("tiled");
        let w = Array2::from_shape_fn((4, 4), |(row, column)| {
            if (row, column) == (0, 0) { f32::NAN } else { (row + column) as f32 }
        });
        let mut g = Array2::from_elem((4, 4), -1.0_f32);
        masked_decay(g.view_mut(), w.view(), &mask, 0.5).expect("one shape");
        for ((row, column), &g) in g.indexed_iter() {
            let expected =
                if mask.keeps(row, column) { -1.0 } else { -1.0 + 0.5 * (row + column) as f32 };
            assert_eq!(g, expected, "({row}, {column})");
        }
        assert!(masked_decay(g.view_mut(), Array2::zeros((4, 8)).view(), &mask, 0.5).is_err());
        assert!(
            masked_decay(g.view_mut(), w.view(), &Mask::empty(8, 4).expect("tiled"), 0.5).is_err()
        );
    }
}

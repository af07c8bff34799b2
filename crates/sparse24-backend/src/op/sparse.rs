//! Masks and compressed operands.

use sparse24_core::{MaskKind, mvue::Estimator, philox::Site, prune::ValueMap};

use super::operations;
use crate::{Gradient24, MaskId, Tensor, Weight24};

operations! {
    /// Operations on masks and compressed operands.
    Sparse = SparseOp<'a> {
        /// See [`MaskSearch`].
        MaskSearch(MaskSearch),
        /// See [`PermutedMask`].
        PermutedMask(PermutedMask<'a>),
        /// See [`CompressWeight`].
        CompressWeight(CompressWeight),
        /// See [`MvueCompress`].
        MvueCompress(MvueCompress),
    }
}

/// mask = search(w), see [`sparse24_core::search::mask_search`].
#[derive(Debug, Clone, Copy)]
pub struct MaskSearch {
    /// w `[r, q]`.
    pub w: Tensor,
    /// The kind of mask.
    pub kind: MaskKind,
    /// Overwritten.
    pub mask: MaskId,
}

/// out = mask and column-wise mask of w in another order of rows, see
/// [`sparse24_core::permute::permuted_mask`].
#[derive(Debug, Clone, Copy)]
pub struct PermutedMask<'a> {
    /// w `[r, q]`.
    pub w: Tensor,
    /// The row-wise mask of the forward pass.
    pub mask: MaskId,
    /// The order of rows in which groups are formed: each of `0..r` once.
    pub order: &'a [u32],
    /// Overwritten.
    pub out: MaskId,
}

#[cfg(any(feature = "cuda", feature = "wgpu"))]
impl PermutedMask<'_> {
    /// The order of rows, and then the place of each row in it.
    pub(crate) fn order_and_places(&self) -> Vec<u32> {
        let r = self.order.len();
        let mut both = self.order.to_vec();
        both.resize(2 * r, 0);
        self.order.iter().zip(0..).for_each(|(&row, place)| both[r + row as usize] = place);
        both
    }
}

/// out = S(w): w under the mask, kept values mapped.
#[derive(Debug, Clone, Copy)]
pub struct CompressWeight {
    /// w `[r, q]`.
    pub w: Tensor,
    /// Its mask, with the structure that the orientation needs: backends do not check its bits.
    pub mask: MaskId,
    /// Which products the mask makes 2:4.
    pub orientation: Orientation,
    /// The map of kept values.
    pub map: ValueMap,
    /// Overwritten.
    pub out: Weight24,
}

/// Which products a mask makes 2:4. CUDA multiplies S(w) densely in the others, and wgpu in all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Orientation {
    /// Forward and dgrad: the mask is transposable.
    Both,
    /// Forward: the mask is row-wise.
    Forward,
    /// Neither as stored: dgrad's operand, 2:4 in another order of rows.
    Permuted,
}

/// out = MVUE(dz^T), see [`sparse24_core::mvue::compress`].
#[derive(Debug, Clone, Copy)]
pub struct MvueCompress {
    /// dZ `[p, r]`; groups run along tokens.
    pub dz: Tensor,
    /// Which random stream samples it.
    pub site: Site,
    /// The exact or the approximate estimator.
    pub estimator: Estimator,
    /// Overwritten.
    pub out: Gradient24,
}

//! Mask search: the exact transposable search, and the two largest of every group.
//!
//! Every mask has the bits of [`sparse24_core::search`], which defines the search and its ties.

use half::bf16;
use sparse24_core::MaskKind;

use crate::{
    Device, Error, Matrix, Scalar,
    launch::{Grid, arguments},
};

/// Threads per block: `THREADS` of the kernel.
const THREADS: usize = 128;

/// Largest number of resident blocks on a multiprocessor.
const RESIDENT: usize = 2048 / THREADS;

/// An element type of weights that masks are searched for.
pub trait Weight: Scalar {
    /// The kernels for this type.
    #[doc(hidden)]
    const KERNELS: Entries;
}

/// A kernel for each kind of mask.
#[doc(hidden)]
#[derive(Debug)]
pub struct Entries {
    transposable: &'static str,
    row_wise: &'static str,
    column_wise: &'static str,
}

impl Weight for f32 {
    const KERNELS: Entries = Entries {
        transposable: "mask_search_f32",
        row_wise: "row_mask_search_f32",
        column_wise: "column_mask_search_f32",
    };
}
impl Weight for bf16 {
    const KERNELS: Entries = Entries {
        transposable: "mask_search_bf16",
        row_wise: "row_mask_search_bf16",
        column_wise: "column_mask_search_bf16",
    };
}

/// Computes the mask of `w` `[r, q]` into `tiles` `[r/4, q/4]`, as
/// [`sparse24_core::Mask::from_tiles`] takes them.
///
/// A NaN counts as the largest magnitude; ties are broken as in core.
///
/// # Errors
/// [`Error::Semantics`] unless r and q are multiples of 4; [`Error::Shape`], [`Error::Stale`],
/// [`Error::Alignment`], [`Error::Alias`], [`Error::TooLarge`], [`Error::Driver`].
pub fn mask_search<T: Weight>(
    device: &mut Device,
    w: Matrix<T>,
    kind: MaskKind,
    tiles: Matrix<u16>,
) -> Result<(), Error> {
    const OPERATION: &str = "mask search";
    let shape @ [rows, columns] = check_tiled(OPERATION, w.shape())?;
    device
        .checks(OPERATION)
        .strided("w", w, w.shape(), 4 * size_of::<T>())?
        .output("the mask", tiles, shape, 2)?
        .limit("the number of tiles", tiles.elements(), u32::MAX as usize)?;
    let kernel = match kind {
        MaskKind::Transposable => T::KERNELS.transposable,
        MaskKind::RowWise => T::KERNELS.row_wise,
        MaskKind::ColumnWise => T::KERNELS.column_wise,
    };
    let (stride, resident) = (w.stride() as u64, (device.multiprocessors() * RESIDENT) as u32);
    let arguments = arguments![w, tiles, stride, rows as u32, columns as u32, resident];
    device.launch(kernel, grid(shape), &arguments)
}

/// A warp has 32 tiles of a row.
fn grid([rows, columns]: [usize; 2]) -> Grid {
    /// Largest second and third dimension of a grid.
    const MAX: usize = 65_535;
    let high = rows.div_ceil(THREADS / 32);
    let planes = high.div_ceil(MAX) as u32;
    let [x, y, _] = Grid::plane([columns.div_ceil(32), high.min(MAX)], 0).blocks;
    Grid { blocks: [x, y, planes], threads: THREADS as u32, shared: 0 }
}

/// The number of tiles of a matrix: `[rows/4, columns/4]`.
pub(crate) fn check_tiled(
    operation: &'static str,
    [rows, columns]: [usize; 2],
) -> Result<[usize; 2], Error> {
    if rows.is_multiple_of(4) && columns.is_multiple_of(4) {
        Ok([rows / 4, columns / 4])
    } else {
        Err(sparse24_core::Error::NotTiled { operation, rows, columns }.into())
    }
}

#[cfg(test)]
mod tests {
    use sparse24_core::search::CODES;

    use super::THREADS;

    #[test]
    fn constants_match_the_kernel() {
        let text = include_str!("../kernels/mask_search.cu");
        let table = text
            .split("CODES[128] = {")
            .nth(1)
            .and_then(|rest| rest.split('}').next())
            .expect("a table");
        let codes: Vec<u16> = table
            .split(',')
            .filter_map(|word| word.trim().strip_prefix("0x"))
            .map(|digits| u16::from_str_radix(digits, 16).expect("hexadecimal"))
            .collect();
        assert_eq!(codes, CODES);
        assert!(text.contains(&format!("THREADS = {THREADS},")));
    }
}

//! Masks of whole matrices: the exact transposable search, and the two largest of every group.
//!
//! Every mask is that of [`sparse24_core::search`] bit for bit. Deliberately absent: the definition
//! of the search and of its ties, which is core's.

use half::bf16;
use sparse24_core::MaskKind;

use crate::{
    Device, Error, Matrix, Scalar,
    launch::{Argument, Grid},
    operand::check_packed,
};

/// Threads of a block: `THREADS` of the kernel.
const THREADS: usize = 128;

/// Blocks that a multiprocessor holds at once, at most.
const RESIDENT: usize = 2048 / THREADS;

/// A storage type of weights that are searched.
pub trait Weight: Scalar {
    /// The kernels of this type.
    #[doc(hidden)]
    const KERNELS: Entries;
}

/// The kernel of every kind of mask.
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

/// The mask of `w` `[r, q]` into `tiles` `[r/4, q/4]`, which [`sparse24_core::Mask::from_tiles`]
/// takes.
///
/// NaN counts as the largest magnitude; ties are core's.
///
/// # Errors
/// [`Error::Semantics`] unless both lengths are multiples of 4; [`Error::Shape`], [`Error::Stale`],
/// [`Error::Alignment`], [`Error::Alias`], [`Error::TooLarge`], [`Error::Driver`].
pub fn mask_search<T: Weight>(
    device: &mut Device,
    w: Matrix<T>,
    kind: MaskKind,
    tiles: Matrix<u16>,
) -> Result<(), Error> {
    const OPERATION: &str = "mask search";
    let shape = check_tiled(OPERATION, w.shape())?;
    device.check_live(OPERATION, "w", w)?;
    device.check_aligned(OPERATION, "w", w, 4 * size_of::<T>())?;
    check_tiles(device, OPERATION, "the mask", tiles, shape)?;
    device.check_apart(OPERATION, ("the mask", tiles.span()), &[("w", w.span())])?;
    let kernel = match kind {
        MaskKind::Transposable => T::KERNELS.transposable,
        MaskKind::RowWise => T::KERNELS.row_wise,
        MaskKind::ColumnWise => T::KERNELS.column_wise,
    };
    let (found, limit) = (tiles.elements(), u32::MAX as usize);
    if found > limit {
        return Err(Error::TooLarge {
            operation: OPERATION,
            what: "the number of tiles",
            found,
            limit,
        });
    }
    let [rows, columns] = tiles.shape();
    let (rows, columns) = (rows as u32, columns as u32);
    let resident = (device.multiprocessors() * RESIDENT) as u32;
    let arguments = [
        w.into(),
        tiles.into(),
        Argument::U64(w.stride() as u64),
        rows.into(),
        columns.into(),
        resident.into(),
    ];
    device.launch(kernel, grid(tiles.shape()), &arguments)
}

/// A warp takes 32 tiles of a row.
fn grid([rows, columns]: [usize; 2]) -> Grid {
    // The second and the third dimension of a grid.
    const MOST: usize = 65_535;
    let high = rows.div_ceil(THREADS / 32);
    let planes = high.div_ceil(MOST) as u32;
    let [x, y, _] = Grid::plane([columns.div_ceil(32), high.min(MOST)], 0).blocks;
    Grid { blocks: [x, y, planes], threads: THREADS as u32, shared: 0 }
}

/// The shape of the tiles of a matrix.
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

/// Tiles are live, of this shape and without gaps.
pub(crate) fn check_tiles(
    device: &Device,
    operation: &'static str,
    operand: &'static str,
    tiles: Matrix<u16>,
    shape: [usize; 2],
) -> Result<(), Error> {
    check_packed(device, operation, operand, tiles, shape, size_of::<u16>())
}

#[cfg(test)]
mod tests {
    use sparse24_core::search::CODES;

    use super::THREADS;

    #[test]
    fn the_kernels_constants_are_those_of_core_and_launch() {
        let text = include_str!("../kernels/mask_search.cu");
        let table = text
            .split("CODES[128] = {")
            .nth(1)
            .and_then(|rest| rest.split('}').next())
            .expect("the table");
        let codes: Vec<u16> = table
            .split(',')
            .filter_map(|word| word.trim().strip_prefix("0x"))
            .map(|digits| u16::from_str_radix(digits, 16).expect("hexadecimal"))
            .collect();
        assert_eq!(codes, CODES);
        assert!(text.contains(&format!("THREADS = {THREADS},")));
    }
}

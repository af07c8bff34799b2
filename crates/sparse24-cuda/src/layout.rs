//! Hardware layouts of compressed matrices: the lane and warp that hold each value and nibble.
//!
//! Both sparse instructions, `wgmma.sp` with its sparse operand in registers and
//! `mma.sp::ordered_metadata`, use the same fragments. A matrix `[m, k]` is cut into blocks of 64
//! rows and 64 columns, block rows outermost; padding is zeros that keep the first two of their
//! group. A block has 4 KiB of values and 512 bytes of metadata.
//!
//! Invariant: a layout is a bijection from the padded logical matrix.

use half::bf16;
use sparse24_core::{compressed::Compressed24, group::Pattern};

/// Rows and columns of a block.
pub const BLOCK: usize = 64;
/// bf16 values of a block: two of every four elements.
pub const BLOCK_VALUES: usize = BLOCK * BLOCK / 2;
/// 32-bit words of metadata of a block: a nibble per group.
pub const BLOCK_METADATA: usize = BLOCK * BLOCK / 4 / 8;

/// Blocks that cover a matrix `[m, k]`: `[ceil(m/64), ceil(k/64)]`.
#[must_use]
pub const fn blocks([m, k]: [usize; 2]) -> [usize; 2] {
    [m.div_ceil(BLOCK), k.div_ceil(BLOCK)]
}

/// The order of values: `[m/64][k/64][warp 4][step 2][lane 32][8]`.
///
/// Warp w holds rows 16w..16w+16 of the block, step s its columns 32s..32s+32, of which 16 are kept
/// a row. Lane l holds of rows r = l/4 and r+8 the kept columns c = 2*(l%4), c+1, c+8 and c+9, in
/// the order (r,c), (r,c+1), (r+8,c), (r+8,c+1), (r,c+8), (r,c+9), (r+8,c+8), (r+8,c+9): sixteen
/// bytes, the four registers of one instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FragmentMajor;

impl FragmentMajor {
    /// The index of the kept value `[row, kept column]` of a matrix with `k` columns, of which k/2
    /// are kept.
    #[must_use]
    pub const fn index(self, [row, kept]: [usize; 2], k: usize) -> usize {
        let (block_row, block_column) = (row / BLOCK, kept / (BLOCK / 2));
        let (row, kept) = (row % BLOCK, kept % (BLOCK / 2));
        let (warp, step) = (row / 16, kept / 16);
        let (row, kept) = (row % 16, kept % 16);
        let lane = 4 * (row % 8) + kept % 8 / 2;
        let within = 4 * (kept / 8) + 2 * (row / 8) + kept % 2;
        (block_row * k.div_ceil(BLOCK) + block_column) * BLOCK_VALUES
            + ((warp * 2 + step) * 32 + lane) * 8
            + within
    }
}

/// The order of metadata: `[m/64][k/64][warp 4][lane 32]`, a word each.
///
/// The word of lane l has four nibbles of row r = l/4 of the warp's sixteen in its low half and of
/// row r+8 in its high half: those of the groups at columns 16h..16h+16 of step s, h = l%2 and s =
/// (l%4)/2, the first group in the lowest nibble. Instructions with selector s read the words of
/// the lanes with (l%4)/2 = s.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaneMajor;

impl LaneMajor {
    /// The word with the nibble of `[row, group]` of a matrix with `k` columns, and the nibble's
    /// shift in it.
    #[must_use]
    pub const fn index(self, [row, group]: [usize; 2], k: usize) -> (usize, u32) {
        let (block_row, block_column) = (row / BLOCK, group / (BLOCK / 4));
        let (row, group) = (row % BLOCK, group % (BLOCK / 4));
        let (warp, row) = (row / 16, row % 16);
        let (step, half, of) = (group / 8, group / 4 % 2, group % 4);
        let lane = 4 * (row % 8) + 2 * step + half;
        let word =
            (block_row * k.div_ceil(BLOCK) + block_column) * BLOCK_METADATA + warp * 32 + lane;
        (word, (16 * (row / 8) + 4 * of) as u32)
    }
}

/// Values and metadata in hardware order.
#[derive(Debug, Clone, PartialEq)]
pub struct Fragments {
    /// Values in [`FragmentMajor`] order.
    pub values: Vec<bf16>,
    /// Metadata in [`LaneMajor`] order.
    pub metadata: Vec<u32>,
}

/// Converts core's logical layout to hardware order. Padding is zeros that keep the first two.
#[must_use]
pub fn to_fragments(logical: &Compressed24<bf16>) -> Fragments {
    let [m, k] = logical.shape();
    let [block_rows, block_columns] = blocks([m, k]);
    let count = block_rows * block_columns;
    let first = u32::from(Pattern::ALL[0].nibble()) * 0x1111_1111;
    let (mut values, mut metadata) =
        (vec![bf16::ZERO; count * BLOCK_VALUES], vec![first; count * BLOCK_METADATA]);
    for ((row, kept), &value) in logical.values().indexed_iter() {
        values[FragmentMajor.index([row, kept], k)] = value;
    }
    for row in 0..m {
        for group in 0..k / 4 {
            let (word, shift) = LaneMajor.index([row, group], k);
            metadata[word] = metadata[word] & !(0xf << shift)
                | u32::from(logical.pattern(row, group).nibble()) << shift;
        }
    }
    Fragments { values, metadata }
}

#[cfg(test)]
mod tests {
    use ndarray::Array2;
    use sparse24_core::{MaskKind, search};

    use super::*;

    /// Derived by hand from the instruction's documentation: lane 5 of warp 2 in step 1 holds rows
    /// 33 and 41, kept columns 2, 3, 10, 11 of the step.
    #[test]
    fn a_lane_holds_what_the_instruction_reads() {
        let at = ((2 * 2 + 1) * 32 + 5) * 8;
        let held = [[33, 18], [33, 19], [41, 18], [41, 19], [33, 26], [33, 27], [41, 26], [41, 27]];
        for (i, place) in held.into_iter().enumerate() {
            assert_eq!(FragmentMajor.index(place, 64), at + i, "{place:?}");
        }
        // Lane 7: row 1 and 9 of the warp, step 1, second sixteen columns: groups 12..16.
        for of in 0..4 {
            assert_eq!(LaneMajor.index([33, 12 + of], 64), (2 * 32 + 7, 4 * of as u32));
            assert_eq!(LaneMajor.index([41, 12 + of], 64), (2 * 32 + 7, 16 + 4 * of as u32));
        }
    }

    /// In arrays of exactly that size, so no two share a place.
    #[test]
    fn fragments_hold_every_group_and_padding() {
        for (m, k) in [(64, 64), (4, 4), (68, 132), (0, 8)] {
            let dense = Array2::from_shape_fn((m, k), |(i, j)| {
                bf16::from_f32(((i * 31 + j * 17) % 101) as f32 - 50.0)
            });
            let mask = search::mask_search(dense.view(), MaskKind::Transposable).expect("tiled");
            let logical = Compressed24::encode(dense.view(), &mask).expect("row-wise");
            let Fragments { values, metadata } = to_fragments(&logical);
            let [rows, columns] = blocks([m, k]).map(|blocks| blocks * BLOCK);
            assert_eq!((values.len(), metadata.len()), (rows * columns / 2, rows * columns / 32));
            for (row, group) in (0..rows).flat_map(|row| (0..columns / 4).map(move |g| (row, g))) {
                let (word, shift) = LaneMajor.index([row, group], k);
                let found = [0, 1].map(|i| values[FragmentMajor.index([row, 2 * group + i], k)]);
                let (pattern, expected) = if row < m && group < k / 4 {
                    let kept = [0, 1].map(|i| logical.values()[[row, 2 * group + i]]);
                    (logical.pattern(row, group), kept)
                } else {
                    (Pattern::ALL[0], [bf16::ZERO; 2])
                };
                assert_eq!((metadata[word] >> shift & 0xf) as u8, pattern.nibble());
                assert_eq!(found, expected, "row {row}, group {group} of {m}x{k}");
            }
        }
    }
}

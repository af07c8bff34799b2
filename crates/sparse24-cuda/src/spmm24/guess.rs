//! Which plan should be the fastest, by what its pairs take one after the other on the GPU's
//! multiprocessors.
//!
//! Invariant: a guess is a plan that can be launched. Deliberately absent: the plan of every GPU,
//! which is the last resort.

use super::plan::{Form, ROWS, Wgmma, pairs};
use crate::layout::BLOCK;

/// Rows of pairs that are swept together, at least, and the bytes of A that stay in the L2 beside
/// the rest.
const LEAST_SWEPT: u32 = 16;
const SWEPT_BYTES: u64 = 24 << 20;
/// Parts into which a pair is divided at most.
const MOST_PARTS: u32 = 16;

// From measurements on an H200, in cycles: loads of A in a step of 64 along k, which hold up reads
// of B; what storing a column of sums takes that no product hides; the kernel that sums parts, and
// that for each column of each.
const LOADS: f64 = 160.0;
const STORE_BF16: f64 = 8.0;
const STORE_F32: f64 = 17.0;
const STORE_PART: f64 = 20.0;
const GATHER: f64 = 8000.0;
const GATHER_PART: f64 = 0.5;

/// The division of tiles of so many columns that should be fastest, and how many cycles it should
/// take.
pub(super) fn guess(
    columns: u32,
    form: Form,
    [m, n, k]: [usize; 3],
    residents: u32,
) -> (f64, Wgmma) {
    let [rows, across] = pairs(columns, [m, n]);
    let steps = k.div_ceil(BLOCK) as u32;
    // A last row of pairs with one block of rows costs half as much: it comes last, for the pairs
    // that are free first.
    let short = (1..=BLOCK).contains(&(m % ROWS as usize));
    let most = LEAST_SWEPT.max((SWEPT_BYTES / (u64::from(ROWS) * k as u64 * 9 / 8).max(1)) as u32);
    let sweep = if rows <= most { (rows - u32::from(short)).max(1) } else { most };
    let (count, width) = (rows * across, f64::from(columns));
    let (step, store) =
        (2.0 * width + LOADS, if form == Form::Straight { STORE_F32 } else { STORE_BF16 } * width);
    let divided_in = |divided: u32, parts: u32| {
        let whole = count - divided;
        let [whole_cost, part_cost] = [
            f64::from(steps) * step + store,
            f64::from(steps) / f64::from(parts) * step + STORE_PART * width,
        ];
        let mut busy = vec![0.0; residents as usize];
        for unit in 0..whole + divided * parts {
            let (tile, cost) = if unit < whole {
                (unit, whole_cost)
            } else {
                (whole + (unit - whole) / parts, part_cost)
            };
            let (first, within) = (tile / (sweep * across) * sweep, tile % (sweep * across));
            let last_row = first + within % sweep.min(rows - first) == rows - 1;
            busy[(unit % residents) as usize] += if short && last_row { cost / 2.0 } else { cost };
        }
        let gather = if divided > 0 {
            GATHER + f64::from(divided * parts) * width * GATHER_PART
        } else {
            0.0
        };
        (
            busy.into_iter().fold(0.0, f64::max) + gather,
            Wgmma { columns, sweep, divided, parts, residents },
        )
    };
    let left = count % residents;
    let most = if left > 0 { MOST_PARTS.min(steps) } else { 1 };
    (2..=most)
        .map(|parts| divided_in(left, parts))
        .chain([divided_in(0, 1)])
        .min_by(|(a, _), (b, _)| a.total_cmp(b))
        .expect("one at least")
}

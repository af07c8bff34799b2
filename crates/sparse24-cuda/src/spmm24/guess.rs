//! Predicts the fastest plan from the cycles that its tiles take on the multiprocessors.
//!
//! Invariant: a guess can be launched.

use super::instance::tiles;
use crate::{
    layout::BLOCK,
    plan::{Form, TILE_ROWS, Wgmma},
};

/// Fewest rows of tiles that are swept together, and the bytes of A that fit in the L2.
const MIN_SWEEP: u32 = 16;
const SWEPT_BYTES: u64 = 24 << 20;
/// Most parts of a split tile.
const MAX_PARTS: u32 = 16;

// Cycles, measured on an H200. Loads of A in a step of 64 along k, which delay reads of B:
const LOADS: f64 = 160.0;
// Storing a column of sums, as far as products do not hide it:
const STORE_BF16: f64 = 8.0;
const STORE_F32: f64 = 17.0;
const STORE_PART: f64 = 20.0;
// Adding up parts: the launch, and each column of each part:
const GATHER: f64 = 8000.0;
const GATHER_PART: f64 = 0.5;

/// The predicted cycles and the schedule that should be fastest for tiles of this width.
pub(super) fn guess(
    columns: u32,
    form: Form,
    [m, n, k]: [usize; 3],
    residents: u32,
) -> (f64, Wgmma) {
    let [rows, across] = tiles(columns, [m, n]);
    let steps = k.div_ceil(BLOCK) as u32;
    // A last row of tiles with a single block of rows costs half as much. It is scheduled last.
    let short = (1..=BLOCK).contains(&(m % TILE_ROWS as usize));
    let most =
        MIN_SWEEP.max((SWEPT_BYTES / (u64::from(TILE_ROWS) * k as u64 * 9 / 8).max(1)) as u32);
    let sweep = if rows <= most { (rows - u32::from(short)).max(1) } else { most };
    let (count, width) = (rows * across, f64::from(columns));
    let (step, store) =
        (2.0 * width + LOADS, if form == Form::Straight { STORE_F32 } else { STORE_BF16 } * width);
    let cost_of = |split: u32, parts: u32| {
        let whole = count - split;
        let [whole_cost, part_cost] = [
            f64::from(steps) * step + store,
            f64::from(steps) / f64::from(parts) * step + STORE_PART * width,
        ];
        let mut busy = vec![0.0; residents as usize];
        for unit in 0..whole + split * parts {
            let (tile, cost) = if unit < whole {
                (unit, whole_cost)
            } else {
                (whole + (unit - whole) / parts, part_cost)
            };
            let (first, within) = (tile / (sweep * across) * sweep, tile % (sweep * across));
            let last_row = first + within % sweep.min(rows - first) == rows - 1;
            busy[(unit % residents) as usize] += if short && last_row { cost / 2.0 } else { cost };
        }
        let gather =
            if split > 0 { GATHER + f64::from(split * parts) * width * GATHER_PART } else { 0.0 };
        (
            busy.into_iter().fold(0.0, f64::max) + gather,
            Wgmma { columns, sweep, split, parts, residents },
        )
    };
    let left = count % residents;
    let most = if left > 0 { MAX_PARTS.min(steps) } else { 1 };
    (2..=most)
        .map(|parts| cost_of(left, parts))
        .chain([cost_of(0, 1)])
        .min_by(|(a, _), (b, _)| a.total_cmp(b))
        .expect("at least one")
}

#[cfg(test)]
mod tests {
    use super::{
        super::instance::{INSTANCES, schedule},
        *,
    };
    use crate::Architecture;

    #[test]
    fn guesses_can_be_launched() {
        for instance in INSTANCES {
            for shape @ [m, n, _] in [
                [4, 4, 4],
                [64, 1, 64],
                [1600, 16384, 6400],
                [6400, 1600, 16384],
                [320, 1000, 1024],
                [30768, 8192, 4],
            ] {
                let (cost, wgmma) = guess(instance.columns, instance.form, shape, 66);
                let [rows, columns] = tiles(instance.columns, [m, n]);
                let fits = wgmma.sweep <= rows && wgmma.split <= rows * columns;
                assert!(cost > 0.0 && fits, "{shape:?}");
                let schedule =
                    schedule(wgmma, "a product", Architecture::Sm90a, instance.form, shape);
                assert!(schedule.is_ok(), "{shape:?}: {wgmma:?}");
                assert_eq!(wgmma.split == 0, wgmma.parts == 1, "{shape:?}");
            }
        }
    }
}

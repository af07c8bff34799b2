//! Predicts the fastest plan from the cycles that its tiles take on the multiprocessors.
//!
//! Invariant: a guess can be launched.

use super::instance::{Instance, Kernel};
use crate::{
    layout::BLOCK,
    plan::{Form, Tiling},
};

/// Fewest rows that are swept together, and the bytes of A that fit in the L2.
const MIN_SWEEP: u32 = 4096;
const SWEPT_BYTES: u64 = 24 << 20;
/// Most parts of a split tile.
const MAX_PARTS: u32 = 16;

// Cycles of wgmma.sp, measured on an H200. Loads of A in a step of 64 along k, which delay reads of
// B:
const LOADS: f64 = 160.0;
// Cycles of mma.sp, measured on an H100: for each element of a tile, and for each of its rows and
// columns.
const MMA: f64 = 0.0245;
const MMA_LOADS: f64 = 1.8;
// Storing a column of sums, as far as products do not hide it:
const STORE_BF16: f64 = 8.0;
const STORE_F32: f64 = 17.0;
const STORE_PART: f64 = 20.0;
// Adding up parts: the launch, and each column of each part:
const GATHER: f64 = 8000.0;
const GATHER_PART: f64 = 0.5;

/// The predicted cycles and the schedule that should be fastest for tiles of this kernel.
pub(super) fn guess(
    instance: &Instance,
    shape @ [m, _, k]: [usize; 3],
    residents: u32,
) -> (f64, Tiling) {
    let [rows, across] = instance.tiles([m, shape[1]]);
    let steps = k.div_ceil(BLOCK) as u32;
    let (height, width) = (f64::from(instance.rows), f64::from(instance.columns));
    // A last row of tiles with a single block of rows costs a pair half as much. It is scheduled
    // last.
    let is_pair = instance.kernel != Kernel::Mma;
    let short = is_pair && (1..=BLOCK).contains(&(m % instance.rows as usize));
    let swept = u64::from(instance.rows) * k as u64 * 9 / 8;
    let most = (MIN_SWEEP / instance.rows).max((SWEPT_BYTES / swept.max(1)) as u32);
    let sweep = if rows <= most { (rows - u32::from(short)).max(1) } else { most };
    let count = rows * across;
    let step = if is_pair {
        2.0 * width + LOADS
    } else {
        MMA * height * width + MMA_LOADS * (height + width)
    };
    let store = if instance.form == Form::Straight { STORE_F32 } else { STORE_BF16 } * width;
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
            Tiling {
                rows: instance.rows,
                columns: instance.columns,
                sweep,
                split,
                parts,
                residents,
            },
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
                let (cost, tiling) = guess(instance, shape, 66);
                let [rows, columns] = instance.tiles([m, n]);
                let fits = tiling.sweep <= rows && tiling.split <= rows * columns;
                assert!(cost > 0.0 && fits, "{shape:?}");
                let plan = instance.plan(tiling);
                let schedule =
                    schedule(plan, "a product", Architecture::Sm90a, instance.form, shape);
                assert!(schedule.is_ok(), "{shape:?}: {plan}");
                assert_eq!(tiling.split == 0, tiling.parts == 1, "{shape:?}");
            }
        }
    }
}

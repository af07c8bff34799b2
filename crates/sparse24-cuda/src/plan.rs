//! Plans of sparse products: which kernel computes a product, and how its tiles are scheduled.
//!
//! A plan is plain data that can be timed, written as text and read back. It fixes the order of
//! every sum, so a product with a given plan always has the same bits.

use std::{fmt, str::FromStr};

/// Which of the two sparse products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// [`spmm24_transposed`](crate::spmm24::spmm24_transposed).
    Transposed,
    /// [`spmm24`](crate::spmm24::spmm24()).
    Straight,
}

/// How a product is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Plan {
    /// With `mma.sp`, on every GPU from compute capability 8.0.
    Mma(Tiling),
    /// With `wgmma.sp`, on Hopper. A *pair* of thread blocks on neighbouring multiprocessors
    /// computes a tile and shares its dense operand.
    Wgmma(Tiling),
}

/// How a product is divided. The tiles left over for the last wave may be divided along k
/// (split-K).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tiling {
    /// Rows of a tile; 256 for [`Plan::Wgmma`].
    pub rows: u32,
    /// Columns of a tile.
    pub columns: u32,
    /// Rows of tiles that are swept along n together, so that their part of A stays in the L2.
    pub sweep: u32,
    /// How many of the last tiles are computed by split-K.
    pub split: u32,
    /// Parts along k of each split tile; 1 if none is split.
    pub parts: u32,
    /// Tiles that are computed at once.
    pub residents: u32,
}

/// Rows of a pair's tile: a block of 64 for each of its four warpgroups.
pub(crate) const PAIR_ROWS: u32 = 256;

impl Plan {
    /// For a sum without terms.
    pub(crate) const EMPTY: Self =
        Self::Mma(Tiling { rows: 128, columns: 128, sweep: 1, split: 0, parts: 1, residents: 1 });

    /// The f32 elements of scratch that split-K needs.
    #[must_use]
    pub const fn scratch(self) -> usize {
        let Tiling { rows, columns, split, parts, .. } = self.tiling();
        (split as usize)
            .saturating_mul(parts as usize)
            .saturating_mul(rows as usize)
            .saturating_mul(columns as usize)
    }

    /// How it divides a product.
    #[must_use]
    pub const fn tiling(self) -> Tiling {
        let (Self::Mma(tiling) | Self::Wgmma(tiling)) = self;
        tiling
    }

    /// [`Plan::EMPTY`] for k = 0, which the TMA kernels cannot handle.
    pub(crate) const fn unless_empty(self, k: usize) -> Self {
        if k == 0 { Self::EMPTY } else { self }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tiling { rows, columns, sweep, split, parts, residents } = self.tiling();
        match self {
            Self::Mma(_) => write!(f, "mma-{rows}x{columns}"),
            Self::Wgmma(_) => write!(f, "wgmma-{columns}"),
        }?;
        write!(f, "-{sweep}-{split}x{parts}-{residents}")
    }
}

impl FromStr for Plan {
    type Err = NoPlan;

    /// Reads what [`Display`](fmt::Display) writes.
    fn from_str(text: &str) -> Result<Self, NoPlan> {
        let plan = || {
            let fields: Vec<&str> = text.split('-').collect();
            let [kernel, tile, sweep, division, residents] = fields[..] else { return None };
            let number = |text: &str| text.parse().ok();
            let (kind, rows, columns): (fn(Tiling) -> Self, _, _) = match kernel {
                "mma" => tile.split_once('x').map(|(rows, columns)| {
                    (Self::Mma as fn(Tiling) -> Self, number(rows), number(columns))
                })?,
                "wgmma" => (Self::Wgmma, Some(PAIR_ROWS), number(tile)),
                _ => return None,
            };
            let (split, parts) = division.split_once('x')?;
            Some(kind(Tiling {
                rows: rows?,
                columns: columns?,
                sweep: number(sweep)?,
                split: number(split)?,
                parts: number(parts)?,
                residents: number(residents)?,
            }))
        };
        let plan = plan().filter(|plan| plan.to_string() == text);
        plan.ok_or_else(|| NoPlan(text.to_owned()))
    }
}

/// The text is not a plan of a sparse product.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a plan of a sparse product")]
pub struct NoPlan(String);

#[cfg(test)]
mod tests {
    use super::*;

    const TILING: Tiling =
        Tiling { rows: 256, columns: 384, sweep: 8, split: 0, parts: 1, residents: 66 };

    #[test]
    fn plans_round_trip_through_text() {
        let split = Tiling { split: 14, parts: 4, ..TILING };
        for plan in [Plan::Mma(split), Plan::Wgmma(TILING), Plan::Wgmma(split), Plan::EMPTY] {
            assert_eq!(plan.to_string().parse(), Ok(plan));
        }
        for text in [
            "",
            "mma",
            "wgmma",
            "mma-256-8-0x1-66",
            "wgmma-256x384-8-0x1-66",
            "wgmma-256a-8-0x1-66",
            "wgmma-256-8-0x1",
            "wgmma-256-+8-0x1-66",
        ] {
            assert!(text.parse::<Plan>().is_err(), "{text}");
        }
    }

    #[test]
    fn scratch_saturates() {
        let scratch = |split, parts| Plan::Wgmma(Tiling { split, parts, ..TILING }).scratch();
        assert_eq!(scratch(3, 5), 3 * 5 * 256 * 384);
        assert_eq!(scratch(u32::MAX, u32::MAX), usize::MAX);
    }
}

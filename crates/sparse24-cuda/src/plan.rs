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
    Mma,
    /// With `wgmma.sp`, on Hopper.
    Wgmma(Wgmma),
}

/// The schedule of a Hopper kernel. A *pair* of thread blocks on neighbouring multiprocessors
/// computes a tile and shares its dense operand; the tiles left over for the last wave are divided
/// along k (split-K).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Wgmma {
    /// Columns of a pair's tile, which has 256 rows.
    pub columns: u32,
    /// Rows of tiles that are swept along n together, so that their part of A stays in the L2.
    pub sweep: u32,
    /// How many of the last tiles are computed by split-K.
    pub split: u32,
    /// Parts along k of each split tile; 1 if none is split.
    pub parts: u32,
    /// Pairs that run at once.
    pub residents: u32,
}

/// Rows of a pair's tile: a block of 64 for each of its four warpgroups.
pub(crate) const TILE_ROWS: u32 = 256;

impl Plan {
    /// The f32 elements of scratch that split-K needs.
    #[must_use]
    pub const fn scratch(self) -> usize {
        match self {
            Self::Wgmma(Wgmma { columns, split, parts, .. }) => (split as usize)
                .saturating_mul(parts as usize)
                .saturating_mul(TILE_ROWS as usize)
                .saturating_mul(columns as usize),
            Self::Mma => 0,
        }
    }

    /// `Mma` for k = 0, which the TMA kernels cannot handle.
    pub(crate) const fn unless_empty(self, k: usize) -> Self {
        if k == 0 { Self::Mma } else { self }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mma => f.write_str("mma"),
            Self::Wgmma(Wgmma { columns, sweep, split, parts, residents }) => {
                write!(f, "wgmma-{columns}-{sweep}-{split}x{parts}-{residents}")
            }
        }
    }
}

impl FromStr for Plan {
    type Err = NoPlan;

    /// Reads what [`Display`](fmt::Display) writes.
    fn from_str(text: &str) -> Result<Self, NoPlan> {
        let wgmma = || {
            let fields: Vec<&str> = text.strip_prefix("wgmma-")?.split('-').collect();
            let [columns, sweep, division, residents] = fields[..] else { return None };
            let (split, parts) = division.split_once('x')?;
            let number = |text: &str| text.parse().ok();
            Some(Self::Wgmma(Wgmma {
                columns: number(columns)?,
                sweep: number(sweep)?,
                split: number(split)?,
                parts: number(parts)?,
                residents: number(residents)?,
            }))
        };
        let plan = if text == "mma" { Some(Self::Mma) } else { wgmma() };
        plan.filter(|plan| plan.to_string() == text).ok_or_else(|| NoPlan(text.to_owned()))
    }
}

/// The text is not a plan of a sparse product.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a plan of a sparse product")]
pub struct NoPlan(String);

#[cfg(test)]
mod tests {
    use super::*;

    const WGMMA: Wgmma = Wgmma { columns: 384, sweep: 8, split: 0, parts: 1, residents: 66 };

    #[test]
    fn plans_round_trip_through_text() {
        let split = Wgmma { split: 14, parts: 4, ..WGMMA };
        for plan in [Plan::Mma, Plan::Wgmma(WGMMA), Plan::Wgmma(split)] {
            assert_eq!(plan.to_string().parse(), Ok(plan));
        }
        for text in ["", "wgmma", "wgmma-256a-8-0x1-66", "wgmma-256-8-0x1", "wgmma-256-+8-0x1-66"] {
            assert!(text.parse::<Plan>().is_err(), "{text}");
        }
    }

    #[test]
    fn scratch_saturates() {
        let scratch = |split, parts| Plan::Wgmma(Wgmma { split, parts, ..WGMMA }).scratch();
        assert_eq!(scratch(3, 5), 3 * 5 * 256 * 384);
        assert_eq!(scratch(u32::MAX, u32::MAX), usize::MAX);
    }
}

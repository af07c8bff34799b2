//! The tiles or groups of one stored matrix, some rows at a time, on all threads.
//!
//! Invariant: the bytes hold whole rows, and the tile or group divides them. Sums have a fixed
//! order: within four rows, then over these.

use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::Dtype;
use sparse24_core::{MaskKind, prune::largest_two, search, tile::TilePattern};

use super::{Offence, Pruned, Reason, Search};

/// Rows and columns of a part: a tile, or a group along a row or a column.
pub(super) const fn shape(kind: MaskKind) -> [usize; 2] {
    match kind {
        MaskKind::Transposable => [4, 4],
        MaskKind::RowWise => [1, 4],
        MaskKind::ColumnWise => [4, 1],
    }
}

/// A float dtype that can be pruned.
#[derive(Debug, Clone, Copy)]
pub(super) enum Storage {
    F16,
    Bf16,
    F32,
    F64,
}

impl Storage {
    /// `None` for floats below 16 bits.
    pub(super) fn of(dtype: Dtype) -> Result<Option<Self>, Reason> {
        match dtype {
            Dtype::F16 => Ok(Some(Self::F16)),
            Dtype::BF16 => Ok(Some(Self::Bf16)),
            Dtype::F32 => Ok(Some(Self::F32)),
            Dtype::F64 => Ok(Some(Self::F64)),
            // Complex numbers are pairs; C64 prints as it is.
            _ if dtype.to_string().starts_with('F') => Ok(None),
            _ => Err(Reason::NotFloat),
        }
    }

    fn width(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    /// The first element of these bytes, exactly.
    fn value(self, bytes: &[u8]) -> f64 {
        fn first<const N: usize>(bytes: &[u8]) -> [u8; N] {
            *bytes.first_chunk().expect("the range of a tensor holds its elements")
        }
        match self {
            Self::F16 => f16::from_le_bytes(first(bytes)).to_f64(),
            Self::Bf16 => bf16::from_le_bytes(first(bytes)).to_f64(),
            Self::F32 => f32::from_le_bytes(first(bytes)).into(),
            Self::F64 => f64::from_le_bytes(first(bytes)),
        }
    }
}

/// How the elements of a matrix are stored, row-major, and the parts to look at.
#[derive(Debug)]
pub(super) struct Matrix {
    pub(super) storage: Storage,
    pub(super) columns: usize,
    pub(super) kind: MaskKind,
}

impl Matrix {
    /// Bytes of a row.
    pub(super) fn row(&self) -> usize {
        self.columns * self.storage.width()
    }

    /// Zeroes the elements of these rows that the search does not keep.
    pub(super) fn prune(&self, rows: &mut [u8], search: Search) -> Pruned {
        let bands = rows.par_chunks_mut(4 * self.row());
        let bands: Vec<_> = bands.map(|band| self.prune_band(band, search)).collect();
        bands.into_iter().fold(Pruned::default(), |mut sum, band| {
            sum += band;
            sum
        })
    }

    fn prune_band(&self, band: &mut [u8], search: Search) -> Pruned {
        let mut pruned = Pruned::default();
        for origin in self.origins(band) {
            let values = self.values(band, origin);
            let kept = choose(self.kind, search, &values.map(|value| value as f32));
            for (i, &value) in values.iter().enumerate().take(self.part_elements()) {
                let keeps = kept >> i & 1 == 1;
                if value.is_nan() {
                    pruned.nan += 1;
                    pruned.nan_pruned += u64::from(!keeps);
                } else if value.is_infinite() {
                    pruned.infinite += 1;
                    pruned.infinite_pruned += u64::from(!keeps);
                } else {
                    pruned.norm += value.abs();
                    pruned.kept_norm += if keeps { value.abs() } else { 0.0 };
                }
                if !keeps {
                    let at = self.offset(origin, i);
                    band[at..at + self.storage.width()].fill(0);
                }
            }
        }
        pruned
    }

    /// Finds the first part whose nonzeros no pattern covers; `first` is the first of these rows.
    pub(super) fn first_offence(&self, rows: &[u8], first: usize) -> Option<Offence> {
        let bands = rows.par_chunks(4 * self.row()).enumerate();
        bands.find_map_first(|(number, band)| {
            self.origins(band).find_map(|[row, column]| {
                let values = self.values(band, [row, column]).into_iter().enumerate();
                let nonzeros = values.fold(0_u16, |bits, (i, v)| bits | u16::from(v != 0.0) << i);
                (!covered(self.kind, nonzeros)).then(|| Offence {
                    kind: self.kind,
                    row: first + 4 * number + row,
                    column,
                    nonzeros: nonzeros.count_ones(),
                })
            })
        })
    }

    /// Elements of a part.
    fn part_elements(&self) -> usize {
        shape(self.kind).into_iter().product()
    }

    fn origins(&self, band: &[u8]) -> impl Iterator<Item = [usize; 2]> + use<> {
        let ([height, width], rows, columns) =
            (shape(self.kind), band.len() / self.row(), self.columns);
        (0..rows)
            .step_by(height)
            .flat_map(move |row| (0..columns).step_by(width).map(move |column| [row, column]))
    }

    /// Byte offset of element i of a part.
    fn offset(&self, [row, column]: [usize; 2], i: usize) -> usize {
        let [_, width] = shape(self.kind);
        ((row + i / width) * self.columns + column + i % width) * self.storage.width()
    }

    /// The elements of a part, row-major, padded with zeros.
    fn values(&self, band: &[u8], origin: [usize; 2]) -> [f64; 16] {
        let mut values = [0.0; 16];
        for (i, value) in values.iter_mut().enumerate().take(self.part_elements()) {
            *value = self.storage.value(&band[self.offset(origin, i)..]);
        }
        values
    }
}

/// Bit i is set if element i of the part is kept.
fn choose(kind: MaskKind, search: Search, part: &[f32; 16]) -> u16 {
    match (kind, search) {
        (MaskKind::Transposable, Search::Exact) => search::transposable(part).bits(),
        (MaskKind::Transposable, Search::Greedy) => search::greedy(part).bits(),
        (MaskKind::RowWise | MaskKind::ColumnWise, _) => {
            largest_two([part[0], part[1], part[2], part[3]]).bits().into()
        }
    }
}

/// Whether a valid pattern keeps all of these.
fn covered(kind: MaskKind, nonzeros: u16) -> bool {
    match kind {
        MaskKind::Transposable => {
            TilePattern::ALL.iter().any(|pattern| nonzeros & !pattern.bits() == 0)
        }
        MaskKind::RowWise | MaskKind::ColumnWise => nonzeros.count_ones() <= 2,
    }
}

//! The tiles or groups of one stored matrix.
//!
//! Invariant: the bytes hold `rows * columns` elements, and the tile or group divides the matrix.

use half::{bf16, f16};
use safetensors::Dtype;
use sparse24_core::{MaskKind, prune::largest_two, search, tile::TilePattern};

use super::{Offence, Pruned, Reason, Search, Verdict};

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

/// A stored matrix, processed part by part, row-major.
pub(super) struct Matrix<'a> {
    pub(super) bytes: &'a mut [u8],
    pub(super) storage: Storage,
    pub(super) shape: [usize; 2],
    pub(super) kind: MaskKind,
}

impl Matrix<'_> {
    /// Zeroes the elements that the search does not keep.
    pub(super) fn prune(self, search: Search) -> Pruned {
        let (mut norm, mut kept_norm, mut nan, mut nan_pruned) = (0.0, 0.0, 0, 0);
        for origin in self.origins() {
            let values = self.values(origin);
            let kept = choose(self.kind, search, &values.map(|value| value as f32));
            for (i, &value) in values.iter().enumerate().take(self.part_elements()) {
                let keeps = kept >> i & 1 == 1;
                if value.is_nan() {
                    nan += 1;
                    nan_pruned += u64::from(!keeps);
                } else if value.is_finite() {
                    norm += value.abs();
                    kept_norm += if keeps { value.abs() } else { 0.0 };
                }
                if !keeps {
                    let at = self.offset(origin, i);
                    self.bytes[at..at + self.storage.width()].fill(0);
                }
            }
        }
        Pruned { kept_norm: if norm > 0.0 { kept_norm / norm } else { 1.0 }, nan, nan_pruned }
    }

    /// Finds the first part whose nonzeros no pattern covers.
    pub(super) fn verify(self) -> Verdict {
        for [row, column] in self.origins() {
            let nonzeros = self
                .values([row, column])
                .iter()
                .enumerate()
                .fold(0_u16, |bits, (i, &v)| bits | u16::from(v != 0.0) << i);
            if !covered(self.kind, nonzeros) {
                return Verdict::Refuted(Offence {
                    kind: self.kind,
                    row,
                    column,
                    nonzeros: nonzeros.count_ones(),
                });
            }
        }
        Verdict::Holds
    }

    /// Elements of a part.
    fn part_elements(&self) -> usize {
        shape(self.kind).into_iter().product()
    }

    fn origins(&self) -> impl Iterator<Item = [usize; 2]> + use<> {
        let ([rows, columns], [height, width]) = (self.shape, shape(self.kind));
        (0..rows)
            .step_by(height)
            .flat_map(move |row| (0..columns).step_by(width).map(move |column| [row, column]))
    }

    /// Byte offset of element i of a part.
    fn offset(&self, [row, column]: [usize; 2], i: usize) -> usize {
        let [_, width] = shape(self.kind);
        ((row + i / width) * self.shape[1] + column + i % width) * self.storage.width()
    }

    /// The elements of a part, row-major, padded with zeros.
    fn values(&self, origin: [usize; 2]) -> [f64; 16] {
        let mut values = [0.0; 16];
        for (i, value) in values.iter_mut().enumerate().take(self.part_elements()) {
            *value = self.storage.value(&self.bytes[self.offset(origin, i)..]);
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

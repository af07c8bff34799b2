//! Prunes the weights of any safetensors file to 2:4, or verifies that they are.
//!
//! This concerns tensors that are two-dimensional, f32, f16, bf16 or f64, not empty, not an
//! embedding by name ([`is_embedding`]), of a shape that the kind divides (transposable: both
//! lengths by 4; row-wise: columns; column-wise: rows), and included by the caller. All others are
//! left unchanged and listed with the [`Reason`].
//!
//! A tensor is read as it is stored: row-wise groups run along its last dimension. That is the
//! contraction dimension of `[out, in]` weights (PyTorch's `Linear`); of `[in, out]` weights (the
//! `Conv1D` of Hugging Face's GPT-2) it is the first, column-wise. A transposable mask is both.
//!
//! Invariant: pruned elements become +0, and all other bytes stay: header, metadata, order, other
//! tensors. Of a sharded checkpoint, prune each file.

use std::{fmt, fs, path::Path};

use safetensors::Dtype;
use sparse24_core::MaskKind;

use crate::{
    Error, disk,
    tensors::{Entry, container},
};

mod matrix;

use matrix::{Matrix, Storage};

/// The tensors and the structure to prune or verify.
#[derive(Clone, Copy)]
pub struct Selection<'a> {
    /// The structure.
    pub kind: MaskKind,
    /// Whether to include a tensor of this name; narrows the rule of the module.
    pub include: &'a dyn Fn(&str) -> bool,
}

/// The search for the transposable pattern of a tile. Row- and column-wise pruning always keep the
/// two largest of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Search {
    /// The best of the 90 patterns ([`sparse24_core::search::transposable`]).
    Exact,
    /// The 2-approximation ([`sparse24_core::search::greedy`]).
    Greedy,
}

/// Treatment of two-dimensional float tensors, except embeddings, that cannot be pruned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unprunable {
    /// Copy and list them.
    Copy,
    /// Refuse the file.
    Refuse,
}

/// The reason why a tensor was left unchanged.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// The caller's filter excludes it.
    Excluded,
    /// Its elements are not floats.
    NotFloat,
    /// It is not a matrix.
    Dimensions(usize),
    /// It has no elements.
    Empty,
    /// Its floats are narrower than 16 bits.
    NarrowFloat,
    /// Its name is that of an embedding.
    Embedding,
    /// Its shape does not consist of whole tiles or groups.
    Indivisible(MaskKind),
}

impl Reason {
    /// Whether strict pruning must refuse it: an included matrix of floats, not an embedding.
    fn concerns_matrix(&self) -> bool {
        matches!(self, Self::NarrowFloat | Self::Indivisible(_))
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Excluded => f.write_str("not included"),
            Self::NotFloat => f.write_str("not of floats"),
            Self::Dimensions(found) => write!(f, "of dimension {found}, not 2"),
            Self::Empty => f.write_str("without elements"),
            Self::NarrowFloat => f.write_str("of floats below 16 bits"),
            Self::Embedding => f.write_str("an embedding, by its name"),
            Self::Indivisible(MaskKind::Transposable) => {
                f.write_str("its rows and columns are not both multiples of 4")
            }
            Self::Indivisible(MaskKind::RowWise) => {
                f.write_str("its columns are not a multiple of 4")
            }
            Self::Indivisible(MaskKind::ColumnWise) => {
                f.write_str("its rows are not a multiple of 4")
            }
        }
    }
}

/// One tensor of a file, in the file's order, with its outcome.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorReport<T> {
    /// Name in the file.
    pub name: String,
    /// Stored type.
    pub dtype: Dtype,
    /// Stored shape.
    pub shape: Vec<usize>,
    /// The result, or the reason why the tensor was left unchanged.
    pub outcome: Result<T, Reason>,
}

/// Result of pruning a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pruned {
    /// Kept share of the L1 norm, finite elements only; 1 for a tensor of zeros.
    pub kept_norm: f64,
    /// Number of NaN elements. A NaN counts as 2^124, so it is kept unless its tile or group has
    /// more of that magnitude than it may keep.
    pub nan: u64,
    /// Number of NaN elements that were pruned.
    pub nan_pruned: u64,
}

/// Result of verifying a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// A valid mask covers all nonzeros. (A kept element may be zero.)
    Holds,
    /// The first tile or group, row-major, whose nonzeros no valid pattern covers.
    Refuted(Offence),
}

/// A tile or group that is not 2:4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offence {
    /// The violated structure.
    pub kind: MaskKind,
    /// First row.
    pub row: usize,
    /// First column.
    pub column: usize,
    /// Number of elements that are not zero (a NaN is not zero).
    pub nonzeros: u32,
}

impl fmt::Display for Offence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, row, column, nonzeros } = *self;
        let [height, width] = matrix::shape(kind);
        let (last_row, last_column) = (row + height - 1, column + width - 1);
        match kind {
            MaskKind::Transposable => write!(
                f,
                "no transposable pattern covers the {nonzeros} nonzeros of the tile at rows \
                    {row}-{last_row}, "
            )?,
            MaskKind::RowWise => {
                write!(f, "{nonzeros} nonzeros, at most 2 expected, in the group at row {row}, ")?
            }
            MaskKind::ColumnWise => {
                return write!(
                    f,
                    "{nonzeros} nonzeros, at most 2 expected, in the group at rows \
                        {row}-{last_row}, column {column}"
                );
            }
        }
        write!(f, "columns {column}-{last_column}")
    }
}

/// Whether a name is that of an embedding: one of its dot-separated parts is `wte`, `wpe` or
/// `lm_head` (tied to `wte`), or one of the underscore-separated words of a part is `emb` or starts
/// with `embed`; case does not matter.
///
/// So `transformer.wte.weight`, `model.embed_tokens.weight`,
/// `bert.embeddings.word_embeddings.weight`, `tok_emb.weight` and `pos_embed` are; `member.weight`
/// is not.
#[must_use]
pub fn is_embedding(name: &str) -> bool {
    name.to_ascii_lowercase().split('.').any(|part| {
        matches!(part, "wte" | "wpe" | "lm_head")
            || part.split('_').any(|word| word == "emb" || word.starts_with("embed"))
    })
}

/// Prunes a safetensors file into another, which is written completely or not at all; kept elements
/// keep their bits. If the output is a symbolic link, its target is written.
///
/// f64 elements are rounded to f32 for the search. Returns a report for every tensor, in the file's
/// order.
///
/// # Errors
/// [`Error::Io`]; [`Error::File`] for a malformed file, one without a tensor to prune, an output
/// that is the input or exists and is not a regular file, and, with [`Unprunable::Refuse`], an
/// included matrix of floats, not an embedding, that cannot be pruned.
pub fn prune_file(
    input: &Path,
    output: &Path,
    selection: Selection<'_>,
    search: Search,
    unprunable: Unprunable,
) -> Result<Vec<TensorReport<Pruned>>, Error> {
    let mut bytes = read(input)?;
    if fs::canonicalize(output)
        .is_ok_and(|output| fs::canonicalize(input).is_ok_and(|input| input == output))
    {
        return Err(Error::file(
            output,
            "is the input; the unpruned weights would be lost, name another file",
        ));
    }
    let destination = disk::destination(output)?;
    let reports = for_each(input, &mut bytes, selection, |matrix| matrix.prune(search))?;
    let refused = |report: &&TensorReport<Pruned>| {
        report.outcome.as_ref().is_err_and(Reason::concerns_matrix)
    };
    if let (Unprunable::Refuse, Some(TensorReport { name, shape, outcome: Err(reason), .. })) =
        (unprunable, reports.iter().find(refused))
    {
        let count = reports.iter().filter(refused).count();
        let problem = format!(
            "strict pruning leaves no matrix out, but {count} cannot be pruned; the first is \
                `{name}` {shape:?}: {reason}"
        );
        return Err(Error::file(input, problem));
    }
    disk::write_atomically(&destination, &bytes)?;
    Ok(reports)
}

/// Verifies 2:4 tensor by tensor; returns a report for every tensor, in the file's order.
///
/// # Errors
/// [`Error::Io`]; [`Error::File`] for a malformed file, and one without a tensor to verify.
pub fn verify_file(
    path: &Path,
    selection: Selection<'_>,
) -> Result<Vec<TensorReport<Verdict>>, Error> {
    for_each(path, &mut read(path)?, selection, |matrix| matrix.verify())
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    disk::read(path).map_err(|e| e.expecting("a safetensors file"))
}

fn for_each<T>(
    path: &Path,
    bytes: &mut [u8],
    selection: Selection<'_>,
    mut each: impl FnMut(Matrix<'_>) -> T,
) -> Result<Vec<TensorReport<T>>, Error> {
    let entries = container::read(path, &mut &*bytes, bytes.len() as u64)?;
    let reports: Vec<_> = entries
        .into_iter()
        .map(|entry| {
            let outcome = admit(&entry, selection).map(|(storage, shape)| {
                each(Matrix {
                    bytes: &mut bytes[entry.range],
                    storage,
                    shape,
                    kind: selection.kind,
                })
            });
            TensorReport { name: entry.name, dtype: entry.dtype, shape: entry.shape, outcome }
        })
        .collect();
    if reports.iter().any(|report| report.outcome.is_ok()) {
        return Ok(reports);
    }
    let reason = match reports
        .iter()
        .find_map(|report| report.outcome.as_ref().err().map(|reason| (&report.name, reason)))
    {
        None => "it has no tensors".to_owned(),
        Some((name, reason)) => format!("of {}, the first is `{name}`: {reason}", reports.len()),
    };
    Err(Error::file(
        path,
        format!("holds no tensor that could be {} pruned ({reason})", selection.kind),
    ))
}

fn admit(entry: &Entry, selection: Selection<'_>) -> Result<(Storage, [usize; 2]), Reason> {
    if !(selection.include)(&entry.name) {
        return Err(Reason::Excluded);
    }
    let storage = Storage::of(entry.dtype)?;
    let &[rows, columns] = entry.shape.as_slice() else {
        return Err(Reason::Dimensions(entry.shape.len()));
    };
    if rows == 0 || columns == 0 {
        return Err(Reason::Empty);
    }
    let storage = storage.ok_or(Reason::NarrowFloat)?;
    if is_embedding(&entry.name) {
        return Err(Reason::Embedding);
    }
    let [height, width] = matrix::shape(selection.kind);
    if rows % height != 0 || columns % width != 0 {
        return Err(Reason::Indivisible(selection.kind));
    }
    Ok((storage, [rows, columns]))
}

#[cfg(test)]
mod tests;

//! 2:4 in safetensors files of any origin: prune their weights, or prove that they are pruned.
//!
//! Which tensors: two-dimensional, f32, f16, bf16 or f64, not empty, not an embedding by name
//! ([`is_embedding`]), of a shape that the kind divides (transposable: both lengths by 4; row-wise:
//! columns; column-wise: rows), and included by the caller. All others are left untouched and
//! listed with the [`Reason`].
//!
//! A tensor is read as it is stored: row-wise groups run along its last dimension. That is the
//! contraction dimension of `[out, in]` weights (PyTorch's `Linear`); of `[in, out]` weights (the
//! `Conv1D` of Hugging Face's GPT-2) it is the first, column-wise. A transposable mask is both.
//!
//! Invariant: everything but pruned elements, which become +0, keeps its bytes: header, metadata,
//! order, other tensors. Deliberately absent: compressed storage, sharded checkpoints (prune each
//! file), dtypes below 16 bits.

use std::{fmt, fs, path::Path};

use safetensors::Dtype;
use sparse24_core::MaskKind;

use crate::{
    Error, disk,
    tensors::{Entry, container},
};

mod matrix;

use matrix::{Matrix, Storage};

/// What to look at, and for which structure.
#[derive(Clone, Copy)]
pub struct Selection<'a> {
    /// The structure to give or to prove.
    pub kind: MaskKind,
    /// Whether a tensor of this name may be looked at; narrows the rule of the module.
    pub include: &'a dyn Fn(&str) -> bool,
}

/// How the transposable pattern of a tile is found; row- and column-wise pruning keep the two
/// largest of a group either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Search {
    /// The best of the 90 patterns ([`sparse24_core::search::transposable`]).
    Exact,
    /// The 2-approximation ([`sparse24_core::search::greedy`]).
    Greedy,
}

/// What becomes of two-dimensional float tensors, embeddings aside, that cannot be pruned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unprunable {
    /// They are copied and listed.
    Copy,
    /// The file is refused.
    Refuse,
}

/// Why a tensor was left alone.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// The caller's filter leaves it out.
    Excluded,
    /// Its elements are no floats.
    NotFloat,
    /// It is no matrix.
    Dimensions(usize),
    /// It has no elements.
    Empty,
    /// Its floats are narrower than 16 bits.
    NarrowFloat,
    /// Its name says that it is an embedding.
    Embedding,
    /// Its shape is not made of whole tiles or groups.
    Indivisible(MaskKind),
}

impl Reason {
    /// Whether it is a two-dimensional float tensor that is wanted, which strict pruning must
    /// prune. An embedding is not.
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

/// One tensor of a file, in the file's order, and what was done or found; or why it was left alone.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorReport<T> {
    /// Its name.
    pub name: String,
    /// Its dtype, as safetensors spells it.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<usize>,
    /// What was done or found, or why nothing.
    pub outcome: Result<T, Reason>,
}

/// What pruning did to a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pruned {
    /// Kept share of the L1 norm, finite elements only; 1 for a tensor of zeros.
    pub kept_norm: f64,
    /// How many elements are NaN. A NaN counts as 2^124, so it is kept unless a tile or group has
    /// more of such magnitude than it may keep.
    pub nan: u64,
    /// How many of these were pruned all the same.
    pub nan_pruned: u64,
}

/// What a proof found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Some valid mask covers all nonzeros. (A kept element may itself be zero, so nonzeros may be
    /// fewer than kept elements.)
    Holds,
    /// The first tile or group whose nonzeros no valid pattern covers, row-major.
    Refuted(Offence),
}

/// A tile or group that is not 2:4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offence {
    /// The structure that it lacks.
    pub kind: MaskKind,
    /// Its first row.
    pub row: usize,
    /// Its first column.
    pub column: usize,
    /// How many of its elements are not zero (a NaN is not zero).
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

/// Whether a name says "embedding": one of its dot-separated parts is `wte`, `wpe` or `lm_head`
/// (tied to `wte`), or one of the underscore-separated words of a part is `emb` or begins with
/// `embed`; letter case does not matter.
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

/// Prunes a safetensors file into another, which appears whole or not at all; kept elements are
/// unchanged to the bit.
///
/// An output that is a symbolic link stays one: what it leads to is written.
///
/// f64 elements are searched after rounding to f32. Reports on all tensors, in the file's order.
///
/// # Errors
/// [`Error::Io`]; [`Error::File`] for a malformed file, one without a tensor to prune, an output
/// that is the input or exists and is no regular file, and, with [`Unprunable::Refuse`], a
/// two-dimensional float tensor that is included and no embedding but cannot be pruned.
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

/// Proves or refutes 2:4, tensor by tensor: reports on all, in the file's order.
///
/// # Errors
/// [`Error::Io`]; [`Error::File`] for a malformed file, and one without a tensor that could be
/// pruned: it would prove nothing.
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

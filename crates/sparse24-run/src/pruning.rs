//! Prunes the weights of any safetensors file to 2:4, or verifies that they are.
//!
//! This concerns tensors that are two-dimensional, f32, f16, bf16 or f64, not empty, not an
//! embedding by name ([`name_reason`]), of a shape that the kind divides (transposable: both
//! lengths by 4; row-wise: columns; column-wise: rows), and included by the caller. All others are
//! left unchanged and listed with the [`Reason`].
//!
//! A tensor is read as it is stored: row-wise groups run along its last dimension. That is the
//! contraction dimension of `[out, in]` weights (PyTorch's `Linear`); of `[in, out]` weights (the
//! `Conv1D` of Hugging Face's GPT-2) it is the first, column-wise. A transposable mask is both.
//!
//! Invariant: pruned elements become +0, and all other bytes stay: header, metadata, order, other
//! tensors, and for a model in several files the index. No more than a piece of a tensor is in
//! memory: some megabytes, or four rows if these are longer.

use std::{
    fmt, fs,
    io::Read,
    ops::{AddAssign, Range},
    path::Path,
};

use safetensors::Dtype;
use sparse24_core::MaskKind;

use crate::{
    Error, Result,
    data::Progress,
    disk::{self, NewFile},
    tensors::{Entry, Shards, TensorFile},
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
    /// Treatment of embeddings and output heads.
    pub embeddings: Embeddings,
}

/// Treatment of embeddings and output heads, which are known by their names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Embeddings {
    /// Leave them unchanged.
    Skip,
    /// Treat them like other tensors.
    Include,
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
    /// Its name is that of the output head.
    Head,
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
            Self::Dimensions(found) => write!(f, "{found}-D; only 2-D tensors are pruned"),
            Self::Empty => f.write_str("without elements"),
            Self::NarrowFloat => f.write_str("of floats below 16 bits"),
            Self::Embedding => f.write_str("an embedding, by its name"),
            Self::Head => f.write_str("the output head, by its name"),
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

/// Result of pruning a tensor. Magnitudes from 2^124 on, infinities and NaN count as 2^124, so
/// they are kept unless their tile or group has more of them than it may keep.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Pruned {
    /// L1 norm, finite elements only.
    pub norm: f64,
    /// The part of it that was kept.
    pub kept_norm: f64,
    /// Number of NaN elements.
    pub nan: u64,
    /// Number of NaN elements that were pruned.
    pub nan_pruned: u64,
    /// Number of infinite elements.
    pub infinite: u64,
    /// Number of infinite elements that were pruned.
    pub infinite_pruned: u64,
}

impl Pruned {
    /// Kept share of the L1 norm; 1 for a tensor of zeros.
    #[must_use]
    pub fn kept_share(&self) -> f64 {
        if self.norm > 0.0 { self.kept_norm / self.norm } else { 1.0 }
    }
}

impl AddAssign for Pruned {
    fn add_assign(&mut self, more: Self) {
        self.norm += more.norm;
        self.kept_norm += more.kept_norm;
        self.nan += more.nan;
        self.nan_pruned += more.nan_pruned;
        self.infinite += more.infinite;
        self.infinite_pruned += more.infinite_pruned;
    }
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

/// The reason to leave a name out: it is that of the output head (a dot-separated part is `lm_head`
/// or `vocab_projector`, it ends with `predictions.decoder.weight`, or it is `output.weight`), or
/// of an embedding: a part is `wte`, `wpe`, `shared` or `relative_attention_bias`, or one of its
/// underscore-separated words is `emb` or starts with `embed`; case does not matter.
///
/// So `transformer.wte.weight`, `model.embed_tokens.weight`,
/// `bert.embeddings.word_embeddings.weight`, `tok_emb.weight` and `pos_embed` are; `member.weight`
/// and `attention.output.weight` are not.
#[must_use]
pub fn name_reason(name: &str) -> Option<Reason> {
    let name = name.to_ascii_lowercase();
    if name == "output.weight" || name.ends_with("predictions.decoder.weight") {
        return Some(Reason::Head);
    }
    name.split('.').find_map(|part| match part {
        "lm_head" | "vocab_projector" => Some(Reason::Head),
        "wte" | "wpe" | "shared" | "relative_attention_bias" => Some(Reason::Embedding),
        _ => {
            let is_embedding = |word: &str| word == "emb" || word.starts_with("embed");
            part.split('_').any(is_embedding).then_some(Reason::Embedding)
        }
    })
}

/// Prunes a safetensors file, or all of a model's folder, into another, which is written completely
/// or not at all; kept elements keep their bits.
///
/// An output file may exist; if it is a symbolic link, its target is written. An output folder is
/// new or empty. It gets files and index of the same names, and copies of the other files except
/// weights in other formats. `progress` is called with bytes done and bytes in all, and may stop.
///
/// f64 elements are rounded to f32 for the search. Returns a report for every tensor, in the order
/// of the files.
///
/// # Errors
/// [`Error::Io`]; [`Error::File`] for a malformed file or index, a model without a tensor to prune,
/// an output that is the input or exists and cannot be replaced, and, with [`Unprunable::Refuse`],
/// an included matrix of floats, not an embedding, that cannot be pruned; those of `progress`.
pub fn prune(
    input: &Path,
    output: &Path,
    selection: Selection<'_>,
    search: Search,
    unprunable: Unprunable,
    progress: Progress<'_>,
) -> Result<Vec<TensorReport<Pruned>>> {
    let model = Shards::open(input)?;
    if fs::canonicalize(output)
        .is_ok_and(|output| fs::canonicalize(input).is_ok_and(|input| input == output))
    {
        bail!(output, "is the input; the unpruned weights would be lost, name another file");
    }
    let plan = plan(&model, selection)?;
    let refused =
        |(_, outcome): &&Planned<'_>| outcome.as_ref().is_err_and(Reason::concerns_matrix);
    if let (Unprunable::Refuse, Some((Entry { name, shape, .. }, Err(reason)))) =
        (unprunable, plan.iter().find(refused))
    {
        let count = plan.iter().filter(refused).count();
        let matrices = if count == 1 { "1 matrix" } else { &format!("{count} matrices") };
        bail!(
            input,
            "--strict: {matrices} cannot be pruned; the first is `{name}` {shape:?}: {reason}"
        );
    }
    let (total, mut done) = (model.size(), 0);
    let (mut plan, mut reports) = (plan.into_iter(), Vec::new());
    let mut write = |file: &TensorFile, out: &mut NewFile, progress: Progress<'_>| {
        let mut buffer = Vec::new();
        file.read(0..file.start, &mut buffer)?;
        out.write(&buffer)?;
        for (entry, outcome) in plan.by_ref().take(file.entries.len()) {
            let mut pruned = Pruned::default();
            for piece in pieces(entry, outcome.as_ref().ok()) {
                file.read(piece, &mut buffer)?;
                if let Ok(matrix) = &outcome {
                    pruned += matrix.prune(&mut buffer, search);
                }
                out.write(&buffer)?;
                done += buffer.len() as u64;
                progress(done, total)?;
            }
            reports.push(report(entry, outcome.map(|_| pruned)));
        }
        Ok(())
    };
    let room = |path: &Path, more: u64| {
        disk::check_room(disk::parent(path), total + more, || "the pruned weights".to_owned())
    };
    if model.folder.is_none() {
        let destination = disk::destination(output)?;
        let is_used = fs::metadata(&destination).is_ok_and(|found| found.len() > 0);
        if is_used && TensorFile::open(&destination).is_err() {
            bail!(output, "exists and is not a safetensors file; remove it, or name another");
        }
        room(&destination, 0)?;
        disk::replace(&destination, |out| write(&model.files[0], out, progress))?;
        return Ok(reports);
    }
    let (companions, _) = model.companions()?;
    let size = |path| fs::metadata(path).map_or(0, |found| found.len());
    let more = companions.iter().map(size).sum();
    disk::fill_folder(output, |folder| {
        room(folder, more)?;
        let create = |path: &Path| {
            NewFile::create(folder.join(path.file_name().expect("a file has a name")))
        };
        for file in &model.files {
            let mut out = create(&file.path)?;
            write(file, &mut out, progress)?;
            out.sync()?;
        }
        for path in &companions {
            copy(path, create(path)?, || progress(total, total))?;
        }
        Ok(())
    })?;
    Ok(reports)
}

/// The names in a model's folder that [`prune`] leaves out: folders, hidden files and weights that
/// are not the model's. A file has none.
///
/// # Errors
/// [`Error::Io`]; [`Error::File`] for a malformed model.
pub fn left_out(input: &Path) -> Result<Vec<String>> {
    Ok(Shards::open(input)?.companions()?.1)
}

/// Verifies 2:4 tensor by tensor, in a file or all of a model's folder; returns a report for every
/// tensor, in the order of the files. `progress` is as for [`prune`].
///
/// # Errors
/// [`Error::Io`]; [`Error::File`] for a malformed file or index, and a model without a tensor to
/// verify; those of `progress`.
pub fn verify(
    path: &Path,
    selection: Selection<'_>,
    progress: Progress<'_>,
) -> Result<Vec<TensorReport<Verdict>>> {
    let model = Shards::open(path)?;
    let (total, mut done, mut buffer) = (model.size(), 0, Vec::new());
    let mut plan = plan(&model, selection)?.into_iter();
    let mut reports = Vec::with_capacity(plan.len());
    for file in &model.files {
        for (entry, outcome) in plan.by_ref().take(file.entries.len()) {
            let mut verdict = Verdict::Holds;
            if let Ok(matrix) = &outcome {
                for piece in pieces(entry, Some(matrix)) {
                    let first = (piece.start - entry.range.start) / matrix.row();
                    file.read(piece, &mut buffer)?;
                    if let Some(offence) = matrix.first_offence(&buffer, first) {
                        verdict = Verdict::Refuted(offence);
                        break;
                    }
                    progress(done + (buffer.len() + first * matrix.row()) as u64, total)?;
                }
            }
            done += entry.range.len() as u64;
            reports.push(report(entry, outcome.map(|_| verdict)));
        }
    }
    Ok(reports)
}

fn report<T>(entry: &Entry, outcome: Result<T, Reason>) -> TensorReport<T> {
    let Entry { name, dtype, shape, .. } = entry;
    TensorReport { name: name.clone(), dtype: *dtype, shape: shape.clone(), outcome }
}

/// Copies a file; `each` is called for every piece.
fn copy(from: &Path, mut to: NewFile, mut each: impl FnMut() -> Result) -> Result {
    let (mut file, _) = disk::open(from)?;
    let mut buffer = vec![0; PIECE];
    loop {
        match file.read(&mut buffer).map_err(|e| Error::io("read", from, e))? {
            0 => return to.sync(),
            read => to.write(&buffer[..read])?,
        }
        each()?;
    }
}

/// Bytes of a tensor that are in memory at a time, at least whole tiles.
const PIECE: usize = 1 << 23;

/// The bytes of a tensor in pieces.
fn pieces(entry: &Entry, matrix: Option<&Matrix>) -> impl Iterator<Item = Range<usize>> + use<> {
    let unit = matrix.map_or(1, |matrix| 4 * matrix.row());
    let (length, end) = ((PIECE / unit).max(1) * unit, entry.range.end);
    entry.range.clone().step_by(length).map(move |start| start..end.min(start + length))
}

/// A tensor with what to prune or verify, or the reason not to.
type Planned<'a> = (&'a Entry, Result<Matrix, Reason>);

/// Every tensor; an error if all have reasons.
fn plan<'a>(model: &'a Shards, selection: Selection<'_>) -> Result<Vec<Planned<'a>>> {
    let entries = model.files.iter().flat_map(|file| &file.entries);
    let plan: Vec<_> = entries.map(|entry| (entry, admit(entry, selection))).collect();
    let reason = match plan.first() {
        _ if plan.iter().any(|(_, outcome)| outcome.is_ok()) => return Ok(plan),
        Some((entry, Err(reason))) => {
            format!("of {}, the first is `{}`: {reason}", plan.len(), entry.name)
        }
        _ => "it has no tensors".to_owned(),
    };
    let problem = format!("holds no tensor for a {} mask ({reason})", selection.kind);
    Err(Error::file(&model.path, problem))
}

fn admit(entry: &Entry, selection: Selection<'_>) -> Result<Matrix, Reason> {
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
    if let (Embeddings::Skip, Some(reason)) = (selection.embeddings, name_reason(&entry.name)) {
        return Err(reason);
    }
    let [height, width] = matrix::shape(selection.kind);
    if rows % height != 0 || columns % width != 0 {
        return Err(Reason::Indivisible(selection.kind));
    }
    Ok(Matrix { storage, columns, kind: selection.kind })
}

#[cfg(test)]
mod tests;

//! `metrics.jsonl`: one JSON object per step, in ascending order.
//!
//! Invariant: steps increase strictly, and every line is whole, except possibly the last after a
//! crash. Each object is one write to the operating system, so it survives the process; with
//! [`MetricsLog::syncer`] before each checkpoint, a resume finds every step up to the checkpoint.

use std::{
    collections::{BTreeMap, VecDeque},
    fs::File,
    io::{BufRead, BufReader, ErrorKind, Read, Take, Write},
    iter, mem,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{Provenance, directory::PROVENANCE};
use crate::{
    Error, Result,
    checkpoint::PhaseKind,
    disk::{self, As, fault},
};

/// Metrics of one optimizer step. Absent values are left out of the object.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepMetrics {
    /// Optimizer step, from 1.
    pub step: u32,
    /// Kind of its phase.
    pub phase: PhaseKind,
    /// Mean training loss in nats per token; NaN, and `null` in the file, in a skipped step.
    #[serde(with = "null_is_nan")]
    pub loss: f32,
    /// Learning rate.
    pub lr: f32,
    /// L2 norm of the gradient before clipping; NaN in a skipped step.
    #[serde(with = "null_is_nan")]
    pub grad_norm: f32,
    /// Training tokens per second; NaN where the clock did not move.
    #[serde(with = "null_is_nan")]
    pub tokens_per_s: f64,
    /// Training tokens of this step, unless an earlier version wrote it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
    /// Share of mask bits that this step changed, in [0, 1]; sampled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flip_rate: Option<f64>,
    /// The same for each sparsifiable weight, by name; sampled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flip_rate_per_layer: Option<BTreeMap<String, f64>>,
    /// Validation loss after this step, in nats per token; sampled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub val_loss: Option<f64>,
    /// Scores of a fine-tuned model on the validation split, by name; sampled.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub scores: BTreeMap<String, f64>,
    /// Instruments; sampled at `run.instrument_every`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instruments: Option<Box<Instruments>>,
    /// In a skipped step, the value that was not finite.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
}

impl StepMetrics {
    /// Training tokens per second, if they are known and any machine could have that speed.
    #[must_use]
    pub fn speed(&self) -> Option<f64> {
        Some(self.tokens_per_s).filter(|speed| (1e-6..=1e15).contains(speed))
    }
}

/// Sample of the instruments of masks and sampled gradients (`run.instrument_every`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Instruments {
    /// Kept L1 norm over L1 norm, over all sparsifiable weights.
    pub kept: f64,
    /// Mask bits flipped per tile over the steps sampled so far, mean over all tiles.
    pub flips_per_tile: f64,
    /// Quantiles of the tiles' L1-norm gap: 10, 25, 50, 75 and 90 %.
    pub gap: [f32; 5],
    /// E|MVUE(dZ) - dZ|^2 / |dZ|^2 over all sparsified layers of the first micro-batch, if
    /// gradients are sampled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mvue_variance: Option<f64>,
    /// The same for each sparsifiable weight, by name.
    pub layers: BTreeMap<String, LayerInstruments>,
    /// Gap and flips of some tiles, evenly spaced over all weights.
    pub tiles: Vec<(f32, u32)>,
}

/// [`Instruments`] of one weight.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerInstruments {
    /// Kept L1 norm over L1 norm.
    pub kept: f64,
    /// Mask bits flipped per tile.
    pub flips_per_tile: f64,
    /// Median gap.
    pub gap: f32,
    /// E|MVUE(dZ) - dZ|^2 / |dZ|^2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mvue_variance: Option<f64>,
}

/// JSON has no NaN.
mod null_is_nan {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<T, S>(value: &T, to: S) -> Result<S::Ok, S::Error>
    where
        T: Copy + Into<f64> + Serialize,
        S: Serializer,
    {
        (*value).into().is_finite().then_some(value).serialize(to)
    }

    pub(super) fn deserialize<'de, T, D>(from: D) -> Result<T, D::Error>
    where
        T: From<f32> + Deserialize<'de>,
        D: Deserializer<'de>,
    {
        Ok(Option::deserialize(from)?.unwrap_or(f32::NAN.into()))
    }
}

/// Result of [`MetricsLog::resume`].
#[derive(Debug, Clone, PartialEq)]
pub struct Cut {
    /// The last step that remains; before the checkpoint's if lines were lost.
    pub last: Option<StepMetrics>,
    /// Lines removed after the checkpoint, including a broken last one.
    pub lines: usize,
    /// The first damage, and the name under which the damaged file is kept.
    pub damage: Option<String>,
    /// Steps without a line, up to the checkpoint's step.
    pub lost: Lost,
}

/// Steps that have no line.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Lost {
    /// Their number.
    pub count: u32,
    /// The first of them as text, such as `6 to 10, 12`; ends with `...` if there are more.
    pub list: String,
}

impl Lost {
    /// Adds the steps between two others.
    fn add_between(&mut self, before: u32, after: u32) {
        let (first, last) = (before.saturating_add(1), after.saturating_sub(1));
        if first > last {
            return;
        }
        self.count = self.count.saturating_add(last - before);
        let separator = if self.list.is_empty() { "" } else { ", " };
        let range = if first < last { format!("{first} to {last}") } else { first.to_string() };
        match self.list.len() {
            0..100 => self.list += &format!("{separator}{range}"),
            _ if !self.list.ends_with("...") => self.list += ", ...",
            _ => {}
        }
    }
}

/// An open `metrics.jsonl`.
#[derive(Debug)]
pub struct MetricsLog {
    path: PathBuf,
    file: File,
    /// The last step, and the byte offset of its line.
    last: Option<(u32, u64)>,
    end: u64,
}

impl MetricsLog {
    /// Creates the file.
    ///
    /// # Errors
    /// [`Error::Io`], also if the file exists.
    pub fn create(path: &Path) -> Result<Self> {
        drop(disk::open_as(path, As::New)?);
        // Somebody else may cut the file, and the next line must follow what is left.
        let file = disk::open_as(path, As::Appended)?;
        Ok(Self { path: path.to_owned(), file, last: None, end: 0 })
    }

    /// Opens the file after a checkpoint of `step`: later steps, and a last line broken by a crash,
    /// are removed atomically. If another line is not a metrics object of a later step than the
    /// previous one, the file is kept under another name, and its readable lines are carried over.
    ///
    /// # Errors
    /// [`Error::File`] for what is not a file, and for a damaged one of more than a GiB;
    /// [`Error::Io`].
    pub fn resume(path: &Path, step: u32) -> Result<(Self, Cut)> {
        let (mut last, mut line, mut end, mut lines) = (None, None, 0, 0);
        let mut lost = Lost::default();
        let step_of = |last: &Option<StepMetrics>| last.as_ref().map_or(0, |last| last.step);
        match Lines::open(path) {
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
            Ok(mut all) => {
                let (_, size) = disk::open(path)?;
                loop {
                    let metrics = match all.next() {
                        Ok(Some(metrics)) => metrics,
                        Ok(None) => break,
                        Err(Error::File { problem, .. }) if size <= LARGEST_MENDED => {
                            let damage = format!("{problem}; {}", Self::mend(path)?);
                            let (log, cut) = Self::resume(path, step)?;
                            return Ok((log, Cut { damage: Some(damage), ..cut }));
                        }
                        Err(error) => return Err(error),
                    };
                    if metrics.step <= step {
                        lost.add_between(step_of(&last), metrics.step);
                        line = Some((metrics.step, end));
                        (last, end) = (Some(metrics), all.end);
                    } else {
                        lines += 1;
                    }
                }
                lines += usize::from(all.is_broken);
            }
        }
        lost.add_between(step_of(&last), step.saturating_add(1));
        if lines > 0 {
            rewrite(path, end, &[])?;
        }
        Ok((
            Self {
                path: path.to_owned(),
                file: disk::open_as(path, As::Appended)?,
                last: line,
                end,
            },
            Cut { last, lines, damage: None, lost },
        ))
    }

    /// Renames a damaged file, and writes its readable lines again.
    fn mend(path: &Path) -> Result<String> {
        let (kept, name) = disk::keep(path)?;
        let mut lines = Lines::open(&kept)?;
        disk::replace(path, |new| lines.salvage(|_, line| new.write(line)).map(drop))?;
        Ok(format!("the file is kept as {name}, and its readable lines are carried over"))
    }

    /// Checks that the path still leads to the open file.
    ///
    /// # Errors
    /// [`Error::File`] if it does not; [`Error::Io`].
    pub(super) fn check_place(&self) -> Result {
        if disk::leads_to(&self.path, &self.file)? {
            return Ok(());
        }
        let problem = "was removed or replaced while the run wrote it, so metrics are lost; \
            resume the run if its checkpoints are still there";
        Err(Error::file(&self.path, problem))
    }

    /// Appends one step. If the last line is of the same step, it is replaced atomically.
    ///
    /// # Errors
    /// [`Error::File`] for a step before the last one, a line above 1 MiB, or a value that is not
    /// finite where NaN is not documented; [`Error::Io`]. All lines stay whole.
    pub fn append(&mut self, metrics: &StepMetrics) -> Result {
        let mut line = serde_json::to_vec(metrics).expect("numbers are JSON");
        let read = serde_json::from_slice::<StepMetrics>(&line);
        // An optional value that is not finite would be read as none.
        let is_whole =
            read.is_ok_and(|read| serde_json::to_vec(&read).ok().as_ref() == Some(&line));
        line.push(b'\n');
        let is_long = line.len() as u64 > LONGEST_LINE;
        if !is_whole || is_long || self.last.is_some_and(|(last, _)| metrics.step < last) {
            bail!(
                &self.path,
                "cannot hold step {}: a value is not finite, its line is longer than \
                    {LONGEST_LINE} bytes, or a later step is there",
                metrics.step
            );
        }
        match self.last {
            Some((step, begin)) if step == metrics.step => {
                rewrite(&self.path, begin, &line)?;
                self.file = disk::open_as(&self.path, As::Appended)?;
                self.end = begin;
            }
            _ => {
                let failed = |e| Error::io("write", &self.path, e);
                let before = self.file.metadata().map_err(failed)?.len();
                let written = fault::writer(&mut self.file, &self.path).write_all(&line);
                if let Err(e) = written {
                    // The next line must not follow part of this one.
                    let _ = self.file.set_len(before);
                    return Err(failed(e));
                }
            }
        }
        self.last = Some((metrics.step, self.end));
        self.end += line.len() as u64;
        Ok(())
    }

    /// A task that returns when all appended lines are on the device. Run it before a checkpoint is
    /// saved.
    ///
    /// # Errors
    /// [`Error::Io`], now and from the task.
    pub fn syncer(&self) -> Result<impl FnOnce() -> Result + Send + 'static> {
        let path = self.path.clone();
        let file = self.file.try_clone().map_err(|e| Error::io("sync", &path, e))?;
        Ok(move || file.sync_data().map_err(|e| Error::io("sync", path, e)))
    }

    /// Iterates over the steps of a file; a broken last line is left out. Collecting them takes
    /// several times the memory of their text.
    ///
    /// # Errors
    /// Same as [`MetricsLog::resume`]. No item after an error counts.
    pub fn steps(path: &Path) -> Result<impl Iterator<Item = Result<StepMetrics>> + use<>> {
        let mut lines = Lines::open(path)?;
        Ok(iter::from_fn(move || lines.next().transpose()))
    }

    /// Passes every readable step to `take`, skipping damaged lines.
    ///
    /// # Errors
    /// [`Error::File`] for a file that is too large for metrics; [`Error::Io`].
    pub fn salvage(path: &Path, mut take: impl FnMut(StepMetrics)) -> Result<Salvage> {
        if disk::open(path)?.1 > LARGEST {
            bail!(path, "is larger than 16 GiB, which metrics never are");
        }
        Lines::open(path)?.salvage(|metrics, _| {
            take(metrics);
            Ok(())
        })
    }
}

/// The lowest validation loss of a run so far, with the first step that has it. Losses that were
/// measured differently do not count.
#[derive(Debug, Default)]
pub(super) struct Best {
    pub(super) lowest: Option<(f64, u32)>,
    /// The best step before each change of what evaluations measure, if any.
    pub(super) former: Vec<u32>,
    /// The steps after which evaluations measure something else, ascending.
    pub(super) changes: VecDeque<u32>,
}

impl Best {
    /// Starts empty.
    pub(super) fn of(run: &Path) -> Result<Self> {
        let mut best = Self::default();
        for start in Provenance::readable(&run.join(PROVENANCE))? {
            best.resumed(start.after, start.measured_anew_after);
        }
        Ok(best)
    }

    /// Adds a start after a step; the steps after it are trained again.
    pub(super) fn resumed(&mut self, after: Option<u32>, measured_anew_after: Option<u32>) {
        self.changes.retain(|&step| Some(step) < after);
        self.changes.extend(measured_anew_after);
    }

    /// Adds the next step; returns whether it is the best so far.
    pub(super) fn next(&mut self, metrics: &StepMetrics) -> bool {
        while self.changes.front().is_some_and(|&step| step < metrics.step) {
            self.changes.pop_front();
            self.former.extend(self.lowest.take().map(|(_, step)| step));
        }
        let Some(loss) = metrics.val_loss else { return false };
        let is_best = self.lowest.is_none_or(|(lowest, _)| loss < lowest);
        if is_best {
            self.lowest = Some((loss, metrics.step));
        }
        is_best
    }
}

/// The damage that [`MetricsLog::salvage`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Salvage {
    /// Lines in the file.
    pub lines: usize,
    /// Lines that are not metrics of a later step than the line before.
    pub damaged: usize,
    /// The first of these lines, from 1; 0 if there is none.
    pub first: usize,
}

/// Replaces the bytes after the first `keep`.
fn rewrite(path: &Path, keep: u64, tail: &[u8]) -> Result {
    let (file, _) = disk::open(path)?;
    let mut kept = BufReader::new(file.take(keep));
    disk::replace(path, |new| {
        loop {
            let piece = kept.fill_buf().map_err(|e| Error::io("read", path, e))?;
            if piece.is_empty() {
                return new.write(tail);
            }
            new.write(piece)?;
            let length = piece.len();
            kept.consume(length);
        }
    })
}

/// Largest damaged file that is read to its end; a larger one may consist of holes.
const LARGEST_MENDED: u64 = 1 << 30;

/// Largest file that is read past damage.
const LARGEST: u64 = 16 << 30;

/// Longest line, enough for ten thousand layers.
const LONGEST_LINE: u64 = 1 << 20;

/// The lines of a file, validated.
struct Lines {
    path: PathBuf,
    reader: BufReader<Take<File>>,
    line: Vec<u8>,
    /// Byte offset after the last line read.
    end: u64,
    number: usize,
    step: Option<u32>,
    /// The last line was too long, and its end is yet to be found: the next read does that, so that
    /// a caller who stops at the error never waits for it.
    is_unfinished: bool,
    /// The last read found a last line without newline, or one that does not parse.
    is_broken: bool,
}

impl Lines {
    fn open(path: &Path) -> Result<Self> {
        let (file, size) = disk::open(path)?;
        Ok(Self {
            path: path.to_owned(),
            reader: BufReader::new(file.take(size)),
            line: Vec::new(),
            end: 0,
            number: 0,
            step: None,
            is_unfinished: false,
            is_broken: false,
        })
    }

    /// Passes every readable line to `take`.
    fn salvage(&mut self, mut take: impl FnMut(StepMetrics, &[u8]) -> Result) -> Result<Salvage> {
        let mut salvage = Salvage::default();
        loop {
            match self.next() {
                Ok(Some(metrics)) => {
                    take(metrics, &self.line)?;
                    continue;
                }
                Ok(None) if !self.is_broken => break,
                Ok(None) | Err(Error::File { .. }) => {}
                Err(error) => return Err(error),
            }
            salvage.damaged += 1;
            if salvage.damaged == 1 {
                salvage.first = self.number;
            }
        }
        salvage.lines = self.number;
        Ok(salvage)
    }

    fn next(&mut self) -> Result<Option<StepMetrics>> {
        let read_error = |e| Error::io("read", &self.path, e);
        self.is_broken = false;
        if mem::take(&mut self.is_unfinished) {
            self.reader.skip_until(b'\n').map_err(read_error)?;
        }
        self.line.clear();
        let length = (&mut self.reader)
            .take(LONGEST_LINE + 1)
            .read_until(b'\n', &mut self.line)
            .map_err(read_error)?;
        if length == 0 {
            return Ok(None);
        }
        self.number += 1;
        self.end += length as u64;
        if length as u64 > LONGEST_LINE {
            self.is_unfinished = self.line.last() != Some(&b'\n');
            bail!(
                &self.path,
                "line {} is longer than {LONGEST_LINE} bytes, too long for metrics",
                self.number
            );
        }
        let is_last = self.reader.fill_buf().map_err(read_error)?.is_empty();
        let is_whole = self.line.last() == Some(&b'\n');
        let problem = match serde_json::from_slice::<StepMetrics>(&self.line) {
            Ok(metrics) if is_whole && self.step.is_none_or(|step| step < metrics.step) => {
                self.step = Some(metrics.step);
                return Ok(Some(metrics));
            }
            Ok(metrics) if is_whole => {
                format!("step {} follows step {}", metrics.step, self.step.unwrap_or_default())
            }
            Err(e) if !is_last => e.to_string(),
            _ => {
                self.is_broken = true;
                return Ok(None);
            }
        };
        Err(Error::file(
            &self.path,
            format!("line {} is not the metrics of the next step: {problem}", self.number),
        ))
    }
}

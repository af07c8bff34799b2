//! `metrics.jsonl`: one object a step, in the order of the steps.
//!
//! Invariant: steps increase strictly, and every line but a crash's last is whole. Each object is
//! one write to the operating system, so it outlives the process; [`MetricsLog::syncer`] before a
//! checkpoint makes it outlive the machine, so that a resume finds every step up to the checkpoint.
//! Deliberately absent: what the numbers mean.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufRead, BufReader, ErrorKind, Read, Write},
    iter,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::Instruments;
use crate::{Error, checkpoint::PhaseKind, disk};

/// What one optimizer step measured. Absent values are left out of the object.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepMetrics {
    /// The optimizer step, from 1.
    pub step: u32,
    /// The kind of its phase.
    pub phase: PhaseKind,
    /// Mean training loss, nats a token; NaN, and `null` in the file, where a skipped step's was
    /// not finite.
    #[serde(with = "null_is_nan")]
    pub loss: f32,
    /// Learning rate.
    pub lr: f32,
    /// L2 norm of the gradient, before clipping; as with the loss.
    #[serde(with = "null_is_nan")]
    pub grad_norm: f32,
    /// Tokens trained on a second.
    pub tokens_per_s: f64,
    /// Share of mask bits that this step changed, in [0, 1]; sampled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flip_rate: Option<f64>,
    /// The same for each sparsifiable weight, by its name; sampled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flip_rate_per_layer: Option<BTreeMap<String, f64>>,
    /// Loss on the held-out split after this step, nats a token; sampled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub val_loss: Option<f64>,
    /// What `run.instrument_every` measures; sampled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instruments: Option<Box<Instruments>>,
    /// What was not finite in a step that was skipped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
}

/// JSON has no NaN.
mod null_is_nan {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(value: &f32, to: S) -> Result<S::Ok, S::Error> {
        value.is_finite().then_some(value).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f32, D::Error> {
        Ok(Option::deserialize(from)?.unwrap_or(f32::NAN))
    }
}

/// What [`MetricsLog::resume`] found.
#[derive(Debug, Clone, PartialEq)]
pub struct Cut {
    /// The last step that stays; before the checkpoint's if lines were lost.
    pub last: Option<StepMetrics>,
    /// Lines beyond the checkpoint that were cut, a broken last one included.
    pub lines: usize,
}

/// An open `metrics.jsonl`.
#[derive(Debug)]
pub struct MetricsLog {
    path: PathBuf,
    file: File,
    /// The step told last, and the byte at which its line begins.
    last: Option<(u32, u64)>,
    end: u64,
}

impl MetricsLog {
    /// Starts a new one.
    ///
    /// # Errors
    /// [`Error::Io`], also if the file exists.
    pub fn create(path: &Path) -> Result<Self, Error> {
        let file = File::options()
            .append(true)
            .create_new(true)
            .open(path)
            .map_err(|e| Error::io("create", path, e))?;
        Ok(Self { path: path.to_owned(), file, last: None, end: 0 })
    }

    /// Continues after a checkpoint of `step`: what was measured beyond it, and a last line that a
    /// crash left broken, is cut, so that no step is doubled. The cut is atomic.
    ///
    /// # Errors
    /// [`Error::File`] names the first line that is not the last and is no metrics object or not
    /// beyond the one before it; [`Error::Io`].
    pub fn resume(path: &Path, step: u32) -> Result<(Self, Cut), Error> {
        let (mut last, mut line, mut end, mut lines) = (None, None, 0, 0);
        match Lines::open(path) {
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
            Ok(mut all) => {
                while let Some(read) = all.next()? {
                    match read {
                        Line::Whole(metrics) if metrics.step <= step => {
                            line = Some((metrics.step, end));
                            (last, end) = (Some(metrics), all.end);
                        }
                        _ => lines += 1,
                    }
                }
            }
        }
        if lines > 0 {
            rewrite(path, end, &[])?;
        }
        Ok((
            Self { path: path.to_owned(), file: open(path)?, last: line, end },
            Cut { last, lines },
        ))
    }

    /// Appends one step. One that was told already, without everything that was measured of it, is
    /// told anew in its place, atomically.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn append(&mut self, metrics: &StepMetrics) -> Result<(), Error> {
        let mut line = serde_json::to_vec(metrics).expect("numbers are JSON");
        line.push(b'\n');
        match self.last {
            Some((step, begin)) if step == metrics.step => {
                rewrite(&self.path, begin, &line)?;
                self.file = open(&self.path)?;
                self.end = begin;
            }
            _ => self.file.write_all(&line).map_err(|e| Error::io("write", &self.path, e))?,
        }
        self.last = Some((metrics.step, self.end));
        self.end += line.len() as u64;
        Ok(())
    }

    /// A task that returns once all that was appended is on the device. Run it before each
    /// checkpoint is saved.
    ///
    /// # Errors
    /// [`Error::Io`], of the making and of the task.
    pub fn syncer(&self) -> Result<impl FnOnce() -> Result<(), Error> + Send + 'static, Error> {
        let path = self.path.clone();
        let file = self.file.try_clone().map_err(|e| Error::io("sync", &path, e))?;
        Ok(move || file.sync_data().map_err(|e| Error::io("sync", path, e)))
    }

    /// The steps of a file, one at a time; a broken last line is passed over.
    ///
    /// # Errors
    /// As [`MetricsLog::resume`]; an item's error is the last item that counts.
    pub fn steps(path: &Path) -> Result<impl Iterator<Item = Result<StepMetrics, Error>>, Error> {
        let mut lines = Lines::open(path)?;
        Ok(iter::from_fn(move || match lines.next() {
            Ok(Some(Line::Whole(metrics))) => Some(Ok(metrics)),
            Ok(_) => None,
            Err(error) => Some(Err(error)),
        }))
    }

    /// Passes every readable step to `take`, skipping damaged lines.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn salvage(path: &Path, mut take: impl FnMut(StepMetrics)) -> Result<Salvage, Error> {
        let (mut lines, mut salvage) = (Lines::open(path)?, Salvage::default());
        loop {
            match lines.next() {
                Ok(None) => break,
                Ok(Some(Line::Whole(metrics))) => take(metrics),
                Ok(Some(Line::Broken)) | Err(Error::File { .. }) => {
                    salvage.damaged += 1;
                    if salvage.damaged == 1 {
                        salvage.first = lines.number;
                    }
                }
                Err(error) => return Err(error),
            }
        }
        salvage.lines = lines.number;
        Ok(salvage)
    }

    /// All [`MetricsLog::steps`] at once, which take several times the memory of their text.
    ///
    /// # Errors
    /// As [`MetricsLog::resume`].
    pub fn read(path: &Path) -> Result<Vec<StepMetrics>, Error> {
        Self::steps(path)?.collect()
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

fn open(path: &Path) -> Result<File, Error> {
    File::options().append(true).create(true).open(path).map_err(|e| Error::io("open", path, e))
}

/// Replaces what follows the first `keep` bytes.
fn rewrite(path: &Path, keep: u64, tail: &[u8]) -> Result<(), Error> {
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

/// Ten thousand layers fit.
const LONGEST_LINE: u64 = 1 << 20;

enum Line {
    Whole(StepMetrics),
    /// The last line, which no newline ends or which does not parse.
    Broken,
}

/// The lines of a file, validated.
struct Lines {
    path: PathBuf,
    reader: BufReader<File>,
    line: Vec<u8>,
    /// Byte after the line read last.
    end: u64,
    number: usize,
    step: Option<u32>,
}

impl Lines {
    fn open(path: &Path) -> Result<Self, Error> {
        let (file, _) = disk::open(path)?;
        Ok(Self {
            path: path.to_owned(),
            reader: BufReader::new(file),
            line: Vec::new(),
            end: 0,
            number: 0,
            step: None,
        })
    }

    fn next(&mut self) -> Result<Option<Line>, Error> {
        let read_error = |e| Error::io("read", &self.path, e);
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
            if self.line.last() != Some(&b'\n') {
                self.reader.skip_until(b'\n').map_err(read_error)?;
            }
            return Err(Error::file(
                &self.path,
                format!(
                    "line {} is longer than {LONGEST_LINE} bytes: it is no metrics",
                    self.number
                ),
            ));
        }
        let is_last = self.reader.fill_buf().map_err(read_error)?.is_empty();
        let problem = match serde_json::from_slice::<StepMetrics>(&self.line) {
            Ok(_) if self.line.last() != Some(&b'\n') => return Ok(Some(Line::Broken)),
            Ok(metrics) if self.step.is_none_or(|step| step < metrics.step) => {
                self.step = Some(metrics.step);
                return Ok(Some(Line::Whole(metrics)));
            }
            Ok(metrics) => {
                format!("step {} follows step {}", metrics.step, self.step.unwrap_or_default())
            }
            Err(_) if is_last => return Ok(Some(Line::Broken)),
            Err(e) => e.to_string(),
        };
        Err(Error::file(
            &self.path,
            format!("line {} is no metrics of the next step: {problem}", self.number),
        ))
    }
}

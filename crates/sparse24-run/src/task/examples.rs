//! The examples of a task as tokens.

use std::path::{Path, PathBuf};

use blake3::Hash;
use rayon::prelude::*;

use super::{Labels, Task, read};
use crate::{Error, data::Tokenizer};

/// The tokens of an example, in an order that its model expects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// BERT: `[CLS] first [SEP]`, and `second [SEP]` in segment 1; `[CLS]` is read.
    Bert,
    /// GPT-2: first, then second; the last token is read.
    Gpt2,
}

/// The examples that a configuration names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskSource {
    /// The task.
    pub task: &'static Task,
    /// The folder of its files.
    pub folder: PathBuf,
    /// The order of an example's tokens.
    pub layout: Layout,
    /// Most tokens of an example.
    pub max_length: usize,
}

/// A labelled example.
#[derive(Debug, Clone, PartialEq)]
pub struct Example {
    /// Token ids, special ones among them.
    pub tokens: Vec<u32>,
    /// The token at which the second sentence begins; the number of tokens if there is none.
    pub second: usize,
    /// A class, or a number.
    pub label: f64,
}

/// The examples of a task.
#[derive(Debug)]
pub struct Examples {
    /// Where they came from.
    pub source: TaskSource,
    /// The training split.
    pub train: Vec<Example>,
    /// The validation split.
    pub validation: Vec<Example>,
    /// Names of the classes, in order; none for a number.
    pub classes: Vec<String>,
    /// Examples that were longer than the limit and were cut.
    pub cut: usize,
    tokenizer: Tokenizer,
    fingerprint: Hash,
}

impl Examples {
    /// Reads the files of a task. Of an example that is longer than the limit, the longer sentence
    /// is cut at its end.
    ///
    /// # Errors
    /// [`Error::File`] naming the line for files that are not the task's; [`Error::Io`].
    pub fn open(source: TaskSource, tokenizer: &Tokenizer) -> Result<Self, Error> {
        let TaskSource { task, folder, layout, max_length } = &source;
        let (layout, longest) = (*layout, *max_length);
        let [train, validation] = read::splits(task, folder)?;
        let mut classes: Vec<String> = match task.labels {
            Labels::Named(names) => names.iter().map(|&name| name.to_owned()).collect(),
            Labels::Found => {
                train.iter().flat_map(|file| &file.rows).map(|row| row.label.clone()).collect()
            }
            Labels::Value => Vec::new(),
        };
        if task.labels == Labels::Found {
            classes.sort_unstable();
            classes.dedup();
        }
        let rules = Rules { layout, tokenizer, classes: &classes, labels: task.labels, longest };
        let encode = |files: &[read::File]| -> Result<Vec<(Example, bool)>, Error> {
            let rows = files.iter().flat_map(|file| file.rows.iter().map(move |row| (file, row)));
            let rows: Vec<_> = rows.collect();
            rows.into_par_iter().map(|(file, row)| rules.example(&file.path, row)).collect()
        };
        let (train, validation) = (encode(&train)?, encode(&validation)?);
        let cut = train.iter().chain(&validation).filter(|(_, cut)| *cut).count();
        let [train, validation]: [Vec<Example>; 2] = [train, validation]
            .map(|split| split.into_iter().map(|(example, _)| example).collect());
        let fingerprint = fingerprint(task, tokenizer, [&train, &validation]);
        let tokenizer = tokenizer.clone();
        Ok(Self { source, train, validation, classes, cut, tokenizer, fingerprint })
    }

    /// The tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// BLAKE3 of, little endian: `sparse24 task`, the task's name, the tokenizer's fingerprint, and
    /// for each split the number of examples (u64), and of each the number of tokens (u64), the
    /// tokens (u32), the second sentence's beginning (u64) and the label (f64).
    #[must_use]
    pub fn fingerprint(&self) -> Hash {
        self.fingerprint
    }

    /// Tokens of the longest example.
    #[must_use]
    pub fn longest(&self) -> usize {
        let examples = self.train.iter().chain(&self.validation);
        examples.map(|example| example.tokens.len()).max().unwrap_or(0)
    }

    /// Outputs of a model for it.
    #[must_use]
    pub fn outputs(&self) -> usize {
        self.classes.len().max(1)
    }

    /// The scores of a model's outputs `[examples of the validation split, outputs]`, by name: the
    /// class is that of the largest output.
    ///
    /// # Panics
    /// Unless there are as many outputs.
    #[must_use]
    pub fn scores(&self, outputs: &[f32]) -> Vec<(&'static str, f64)> {
        let predictions: Vec<f64> = outputs
            .chunks_exact(self.outputs())
            .map(|row| match self.source.task.labels {
                Labels::Value => f64::from(row[0]),
                // Of equal outputs the first.
                _ => (1..row.len()).fold(0, |best, at| if row[at] > row[best] { at } else { best })
                    as f64,
            })
            .collect();
        let labels: Vec<f64> = self.validation.iter().map(|example| example.label).collect();
        let scores = self.source.task.scores.iter();
        scores.filter_map(|score| Some((score.name(), score.of(&predictions, &labels)?))).collect()
    }
}

/// How a row becomes an example.
struct Rules<'a> {
    layout: Layout,
    tokenizer: &'a Tokenizer,
    classes: &'a [String],
    labels: Labels,
    longest: usize,
}

impl Rules<'_> {
    /// The example of a row, and whether it was cut.
    fn example(&self, path: &Path, row: &read::Labelled) -> Result<(Example, bool), Error> {
        let refuse = |problem: String| Error::file(path, format!("line {}: {problem}", row.line));
        let encode =
            |text: &str| self.tokenizer.encode(text).map_err(|error| refuse(error.to_string()));
        let label = match self.labels {
            Labels::Value => row.label.parse().ok().filter(|label: &f64| label.is_finite()),
            _ => self.classes.iter().position(|name| *name == row.label).map(|class| class as f64),
        };
        let label = label.ok_or_else(|| {
            let expected = match self.labels {
                Labels::Value => "a number".to_owned(),
                Labels::Named(names) => names.join(" or "),
                Labels::Found => "a class of the training split".to_owned(),
            };
            refuse(format!("has the label {:?}, expected {expected}", row.label))
        })?;
        let mut first = encode(&row.first)?;
        let mut second = row.second.as_deref().map(encode).transpose()?;
        let specials = match (self.layout, &second) {
            (Layout::Gpt2, _) => 0,
            (_, None) => 2,
            (_, Some(_)) => 3,
        };
        let room = self.longest.saturating_sub(specials);
        let long = first.len() + second.as_ref().map_or(0, Vec::len) > room;
        while first.len() + second.as_ref().map_or(0, Vec::len) > room {
            let longer = second.as_mut().filter(|second| second.len() > first.len());
            longer.unwrap_or(&mut first).pop();
        }
        if first.is_empty() {
            return Err(refuse("has a sentence without tokens".to_owned()));
        }
        let mut tokens = Vec::with_capacity(self.longest);
        let separator = match self.layout {
            // The pair is one text.
            Layout::Gpt2 => None,
            Layout::Bert => {
                let [class, separator] = self.tokenizer.sentence_tokens();
                tokens.push(class);
                Some(separator)
            }
        };
        tokens.append(&mut first);
        tokens.extend(separator);
        let begins = tokens.len();
        if let Some(second) = &mut second {
            tokens.append(second);
            tokens.extend(separator);
        }
        Ok((Example { tokens, second: begins, label }, long))
    }
}

fn fingerprint(task: &Task, tokenizer: &Tokenizer, splits: [&[Example]; 2]) -> Hash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"sparse24 task").update(task.name.as_bytes());
    hasher.update(tokenizer.fingerprint().as_bytes());
    let mut bytes = Vec::new();
    for split in splits {
        hasher.update(&(split.len() as u64).to_le_bytes());
        for Example { tokens, second, label } in split {
            bytes.clear();
            bytes.extend((tokens.len() as u64).to_le_bytes());
            tokens.iter().for_each(|token| bytes.extend(token.to_le_bytes()));
            bytes.extend((*second as u64).to_le_bytes());
            bytes.extend(label.to_le_bytes());
            hasher.update(&bytes);
        }
    }
    hasher.finalize()
}

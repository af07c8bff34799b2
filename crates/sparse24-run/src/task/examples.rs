//! The examples of a task as tokens.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
};

use blake3::Hash;
use rayon::prelude::*;

use super::{
    Labels, Score, Task,
    example::{Example, Layout, Target, TaskSource},
    read,
    spans::Spans,
};
use crate::{Error, Result, data::Tokenizer};

/// The largest size of a label that is a number: sums of squares are finite in f32.
const MOST_VALUE: f64 = 1e15;

/// The examples of a split.
#[derive(Debug, Clone)]
pub enum Split {
    /// Sentences and pairs of them.
    Sentences(Vec<Example>),
    /// Windows of questions; none of a split that was not read.
    Spans(Option<Spans>),
}

impl Split {
    /// Number of examples.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Sentences(examples) => examples.len(),
            Self::Spans(spans) => spans.as_ref().map_or(0, Spans::len),
        }
    }

    /// Whether it has no example.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// An example by number.
    ///
    /// # Panics
    /// Unless it is below [`Self::len`].
    #[must_use]
    pub fn example(&self, number: usize) -> Cow<'_, Example> {
        match self {
            Self::Sentences(examples) => Cow::Borrowed(&examples[number]),
            Self::Spans(spans) => Cow::Owned(spans.as_ref().expect("an example").example(number)),
        }
    }

    /// Tokens of all examples.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        match self {
            Self::Sentences(examples) => {
                examples.iter().map(|example| example.tokens.len() as u64).sum()
            }
            Self::Spans(spans) => spans.as_ref().map_or(0, Spans::tokens),
        }
    }

    fn longest(&self) -> usize {
        match self {
            Self::Sentences(examples) => {
                examples.iter().map(|example| example.tokens.len()).max().unwrap_or(0)
            }
            Self::Spans(spans) => spans.as_ref().map_or(0, Spans::longest),
        }
    }
}

/// The examples of a task.
#[derive(Debug, Clone)]
pub struct Examples {
    /// Where they came from.
    pub source: TaskSource,
    /// The training split.
    pub train: Split,
    /// The validation split.
    pub validation: Split,
    /// Names of the classes, in order; none for a number or a span.
    pub classes: Vec<String>,
    /// Examples that were longer than the limit and were cut; of spans, questions.
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
    pub fn open(source: TaskSource, tokenizer: &Tokenizer) -> Result<Self> {
        let [train, validation] = read::splits(source.task, &source.folder)?;
        Self::read(source, [train?, validation?], tokenizer)
    }

    fn read(
        source: TaskSource,
        [train, validation]: [Vec<PathBuf>; 2],
        tokenizer: &Tokenizer,
    ) -> Result<Self> {
        let TaskSource { task, layout, max_length, .. } = &source;
        if task.labels == Labels::Span {
            let read = |path: &PathBuf| Spans::read(path, &source, tokenizer);
            let read = |paths: Vec<PathBuf>| paths.first().map(read).transpose();
            let spans = [read(train)?, read(validation)?];
            let cut = spans.iter().flatten().map(Spans::cut).sum();
            return Ok(Self::of(source, spans.map(Split::Spans), (Vec::new(), cut), tokenizer));
        }
        let (layout, longest) = (*layout, *max_length);
        let read = |paths: Vec<PathBuf>| -> Result<Vec<_>> {
            paths.iter().map(|path| read::sentences(task, path)).collect()
        };
        let (train, validation) = (read(train)?, read(validation)?);
        let mut classes: Vec<String> = match task.labels {
            Labels::Named(names) => names.iter().map(|&name| name.to_owned()).collect(),
            Labels::Found if !source.classes.is_empty() => source.classes.clone(),
            Labels::Found => {
                train.iter().flat_map(|file| &file.rows).map(|row| row.label.clone()).collect()
            }
            Labels::Value | Labels::Span => Vec::new(),
        };
        if task.labels == Labels::Found && source.classes.is_empty() {
            // "10" follows "9" if all are numbers, as where classes are trained by number.
            let number = |name: &String| name.parse::<i128>().ok();
            let are_numbers = classes.iter().all(|name| number(name).is_some());
            classes.sort_by_cached_key(|name| (number(name).filter(|_| are_numbers), name.clone()));
            classes.dedup();
        }
        let numbers = classes.iter().enumerate().map(|(number, name)| (&**name, number)).collect();
        let of = if source.classes.is_empty() { "the training split" } else { "the model" };
        let rules = Rules { layout, tokenizer, numbers, of, labels: task.labels, longest };
        let encode = |files: &[read::File]| -> Result<Vec<(Example, bool)>> {
            let rows = files.iter().flat_map(|file| file.rows.iter().map(move |row| (file, row)));
            let rows: Vec<_> = rows.collect();
            let examples = rows.into_par_iter().map(|(file, row)| rules.example(&file.path, row));
            // Of several errors, the first.
            examples.collect::<Vec<_>>().into_iter().collect()
        };
        let (train, validation) = (encode(&train)?, encode(&validation)?);
        let cut = train.iter().chain(&validation).filter(|(_, cut)| *cut).count();
        let [train, validation]: [Vec<Example>; 2] = [train, validation]
            .map(|split| split.into_iter().map(|(example, _)| example).collect());
        let splits = [train, validation].map(Split::Sentences);
        Ok(Self::of(source, splits, (classes, cut), tokenizer))
    }

    /// Like [`Self::open`], but for an evaluation: the training split is read only if the classes
    /// have to be found in it. For a task of spans, the path may be the validation file.
    ///
    /// # Errors
    /// Errors of [`Self::open`].
    pub fn open_validation(source: TaskSource, tokenizer: &Tokenizer) -> Result<Self> {
        let [train, validation] = read::splits(source.task, &source.folder)?;
        let finds = source.task.labels == Labels::Found && source.classes.is_empty();
        let train = if finds { train? } else { Vec::new() };
        Self::read(source, [train, validation?], tokenizer)
    }

    fn of(
        source: TaskSource,
        splits: [Split; 2],
        (classes, cut): (Vec<String>, usize),
        tokenizer: &Tokenizer,
    ) -> Self {
        let fingerprint = fingerprint(source.task, tokenizer, &splits);
        let ([train, validation], tokenizer) = (splits, tokenizer.clone());
        Self { source, train, validation, classes, cut, tokenizer, fingerprint }
    }

    /// The tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// BLAKE3 of, little endian: `sparse24 task`, the task's name, the tokenizer's fingerprint, and
    /// for each split the number of examples (u64), and of each the number of tokens (u64), the
    /// tokens (u32), the second sentence's beginning (u64) and the label (f64). Of a split of
    /// spans, after the number of windows: the most tokens of one and the stride; of each question
    /// the id, the number of its context, the tokens, and the number of answers with the first byte
    /// and the end of each; of each context the text and the tokens. Numbers are u64, and texts and
    /// tokens follow their lengths.
    #[must_use]
    pub fn fingerprint(&self) -> Hash {
        self.fingerprint
    }

    /// Tokens of the longest example.
    #[must_use]
    pub fn longest(&self) -> usize {
        self.train.longest().max(self.validation.longest())
    }

    /// Outputs of a model for it.
    #[must_use]
    pub fn outputs(&self) -> usize {
        match self.source.task.labels {
            Labels::Span => 2,
            _ => self.classes.len().max(1),
        }
    }

    /// Reduces a model's outputs for a validation example to the part that [`Self::judge`] needs:
    /// the class with the largest output, the value, or the best span of outputs `[length, 2]`.
    /// Keeping all outputs could take far more memory than the examples.
    ///
    /// # Panics
    /// If there are fewer outputs, or no such example.
    #[must_use]
    pub fn keep(&self, number: usize, outputs: &[f32]) -> Vec<f32> {
        match (&self.validation, self.source.task.labels) {
            (Split::Spans(spans), _) => spans.as_ref().expect("an example").best(number, outputs),
            (_, Labels::Value) => vec![outputs[0]],
            // Of equal outputs the first.
            _ => {
                let larger = |best, at| if outputs[at] > outputs[best] { at } else { best };
                vec![(1..outputs.len()).fold(0, larger) as f32]
            }
        }
    }

    /// The judgement of a model by what it predicts for the validation split: what [`Self::keep`]
    /// returns for each example.
    ///
    /// # Panics
    /// If it is of another number of examples.
    #[must_use]
    pub fn judge(&self, kept: &[f32]) -> Judgement {
        let scores = self.source.task.scores.iter();
        let defined =
            |(score, value): (&Score, Option<f64>)| Some((score.name().to_owned(), value?));
        match &self.validation {
            Split::Spans(None) => Judgement::default(),
            Split::Spans(Some(spans)) => {
                let (answers, right) = (spans.answers(kept), spans.right());
                let texts: Vec<&str> = answers.iter().map(|&(_, text)| text).collect();
                let scores = scores.map(|score| (score, score.of_answers(&texts, &right)));
                let owned = |(id, text): (&str, &str)| (id.to_owned(), text.to_owned());
                let answers = answers.into_iter().map(owned).collect();
                Judgement { scores: scores.filter_map(defined).collect(), answers }
            }
            Split::Sentences(examples) => {
                let predictions: Vec<f64> = kept.iter().copied().map(f64::from).collect();
                let labels = examples.iter().filter_map(|example| match example.target {
                    Target::Label(label) => Some(label),
                    Target::Span(_) => None,
                });
                let labels: Vec<f64> = labels.collect();
                let scores = scores.map(|score| (score, score.of(&predictions, &labels)));
                let scores = scores.filter_map(defined).collect();
                Judgement { scores, ..Judgement::default() }
            }
        }
    }
}

/// The judgement of a model's predictions.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Judgement {
    /// Scores by name; one that is undefined is absent.
    pub scores: BTreeMap<String, f64>,
    /// The predicted answer of each question, by id.
    pub answers: BTreeMap<String, String>,
}

/// How a row becomes an example.
struct Rules<'a> {
    layout: Layout,
    tokenizer: &'a Tokenizer,
    /// The number of each class, by its name.
    numbers: HashMap<&'a str, usize>,
    /// Owner of the classes, for messages.
    of: &'static str,
    labels: Labels,
    longest: usize,
}

impl Rules<'_> {
    /// The example of a row, and whether it was cut.
    fn example(&self, path: &Path, row: &read::Labelled) -> Result<(Example, bool)> {
        let refuse = |problem: String| Error::file(path, format!("line {}: {problem}", row.line));
        let encode =
            |text: &str| self.tokenizer.encode(text).map_err(|error| refuse(error.to_string()));
        let label = match self.labels {
            Labels::Value => row.label.parse().ok().filter(|label: &f64| label.abs() <= MOST_VALUE),
            _ => self.numbers.get(&*row.label).map(|&class| class as f64),
        };
        let label = label.ok_or_else(|| {
            let expected = match self.labels {
                Labels::Value => format!("a number from -{MOST_VALUE:e} to {MOST_VALUE:e}"),
                Labels::Named(names) => names.join(" or "),
                Labels::Found | Labels::Span => format!("a class of {}", self.of),
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
        let second_length = second.as_ref().map_or(0, Vec::len);
        let mut tokens = Vec::with_capacity(specials + first.len() + second_length);
        let separator = match self.layout {
            // The pair is one text.
            Layout::Gpt2 => None,
            Layout::Bert | Layout::CrammedBert => {
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
        Ok((Example { tokens, second: begins, target: Target::Label(label) }, long))
    }
}

fn fingerprint(task: &Task, tokenizer: &Tokenizer, splits: &[Split; 2]) -> Hash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"sparse24 task").update(task.name.as_bytes());
    hasher.update(tokenizer.fingerprint().as_bytes());
    let mut bytes = Vec::new();
    for split in splits {
        hasher.update(&(split.len() as u64).to_le_bytes());
        let examples = match split {
            Split::Sentences(examples) => examples,
            Split::Spans(spans) => {
                let spans = spans.iter();
                spans.for_each(|spans| {
                    spans.identify(|piece| {
                        hasher.update(piece);
                    });
                });
                continue;
            }
        };
        for Example { tokens, second, target } in examples {
            bytes.clear();
            bytes.extend((tokens.len() as u64).to_le_bytes());
            tokens.iter().for_each(|token| bytes.extend(token.to_le_bytes()));
            bytes.extend((*second as u64).to_le_bytes());
            match target {
                Target::Label(label) => bytes.extend(label.to_le_bytes()),
                Target::Span(span) => span.iter().for_each(|at| bytes.extend(at.to_le_bytes())),
            }
            hasher.update(&bytes);
        }
    }
    hasher.finalize()
}

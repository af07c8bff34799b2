//! Labelled sentences in files: columns apart by tabs, as GLUE has them, or comma-separated values.

use std::path::{Path, PathBuf};

use super::{Bare, Labels, Task};
use crate::{Error, Result, disk};

/// A labelled sentence, or pair of sentences.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Labelled {
    pub(super) first: String,
    pub(super) second: Option<String>,
    pub(super) label: String,
    /// Its line in its file, from 1, for messages.
    pub(super) line: u64,
}

/// The sentences of a file.
#[derive(Debug)]
pub(super) struct File {
    pub(super) path: PathBuf,
    pub(super) rows: Vec<Labelled>,
}

/// Largest file.
pub(super) const MOST: u64 = 1 << 30;
/// Bytes of the longest text in it.
pub(super) const LONGEST: usize = 1 << 20;

/// The training file of a task and its validation files, or the error for each that is missing or
/// ambiguous. For a task of spans, `folder` may be the validation file.
pub(super) fn splits(task: &Task, folder: &Path) -> Result<[Result<Vec<PathBuf>>; 2]> {
    if !disk::is_folder(folder)? {
        let problem = format!("is not a folder; expected one with the files of {}", task.name);
        let error = Error::file(folder, problem);
        let is_validation = task.labels == Labels::Span && disk::is_file(folder)?;
        return if is_validation { Ok([Err(error), Ok(vec![folder.into()])]) } else { Err(error) };
    }
    let find = |what: &str, groups: &[&[&'static str]]| {
        let refuse = |problem: String| Err(Error::file(folder, problem));
        let lacks = |name: &&&str| disk::is_file(&folder.join(name)).map(|is_file| !is_file);
        let exist = |names: &&&[&str]| Ok(disk::first(names.iter(), lacks)?.is_none());
        let Some(found) = disk::first(groups, exist)? else {
            let names: Vec<_> = groups.iter().map(|names| names.join(" and ")).collect();
            let (name, names) = (task.name, names.join(" or "));
            return refuse(format!("has no {what} file of {name}; expected {names}"));
        };
        let stem = |names: &[&'static str]| names[0].rsplit_once('.').map(|(stem, _)| stem);
        let is_other = |names: &&&[&'static str]| {
            Ok(names != &found && stem(names) == stem(found) && exist(names)?)
        };
        match disk::first(groups, is_other)? {
            Some(other) => refuse(format!("holds {} and {}; remove one", found[0], other[0])),
            None => Ok(found.iter().map(|name| folder.join(name)).collect()),
        }
    };
    let train: Vec<_> = task.train.iter().map(std::slice::from_ref).collect();
    Ok([find("training", &train), find("validation", task.validation)])
}

/// The sentences of a file.
pub(super) fn sentences(task: &Task, path: &Path) -> Result<File> {
    let bytes = disk::read_small(path, MOST)?;
    // GLUE's MRPC begins with a byte order mark.
    let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    let is_csv = path.extension().is_some_and(|extension| extension == "csv");
    let mut reader = csv::ReaderBuilder::new()
        .has_headers(false)
        .flexible(true)
        .delimiter(if is_csv { b',' } else { b'\t' })
        // Quotation marks in GLUE's files belong to the sentences.
        .quoting(is_csv)
        // Cells are trimmed. By default, a line that ends with CRLF would be counted too late.
        .terminator(csv::Terminator::Any(b'\n'))
        .from_reader(text);
    let refuse = |line: u64, problem: String| Error::file(path, format!("line {line}: {problem}"));
    let mut columns: Option<Columns> = None;
    let mut rows = Vec::new();
    for record in reader.records() {
        let record = record.map_err(|error| {
            let line = error.position().map_or(0, csv::Position::line);
            let problem = match error.kind() {
                csv::ErrorKind::Utf8 { .. } => "is not UTF-8".to_owned(),
                _ => error.to_string(),
            };
            refuse(line, problem)
        })?;
        if record.len() == 1 && record[0].trim().is_empty() {
            continue;
        }
        let line = record.position().map_or(0, csv::Position::line);
        let columns = match &columns {
            Some(columns) => columns,
            None => {
                let names: Vec<&str> = record.iter().map(str::trim).collect();
                let found = Columns::of(task, &names).map_err(|problem| refuse(line, problem))?;
                let names_columns = found.names_columns;
                let found = columns.insert(found);
                if names_columns {
                    continue;
                }
                found
            }
        };
        if record.len() != columns.count {
            let problem = format!(
                "has {} columns, expected {}; fix or delete the line",
                record.len(),
                columns.count
            );
            return Err(refuse(line, problem));
        }
        let cell = |column: usize| record[column].trim().to_owned();
        let row = Labelled {
            first: cell(columns.first),
            second: columns.second.map(cell),
            label: cell(columns.label),
            line,
        };
        for text in [Some(&row.first), row.second.as_ref(), Some(&row.label)].into_iter().flatten()
        {
            if text.len() > LONGEST {
                let length = text.len();
                return Err(refuse(
                    line,
                    format!("has a text of {length} bytes, expected at most {LONGEST}"),
                ));
            }
        }
        for (what, text) in [("sentence", &row.first), ("label", &row.label)] {
            if text.is_empty() {
                return Err(refuse(line, format!("has no {what}")));
            }
        }
        rows.push(row);
    }
    match rows.is_empty() {
        true => Err(Error::file(path, "holds no example")),
        false => Ok(File { path: path.to_owned(), rows }),
    }
}

/// Where a line has what a task needs.
#[derive(Debug)]
struct Columns {
    first: usize,
    second: Option<usize>,
    label: usize,
    count: usize,
    /// Whether the first line names the columns.
    names_columns: bool,
}

impl Columns {
    /// The columns of a file with this first line.
    fn of(task: &Task, line: &[&str]) -> Result<Self, String> {
        let find = |known: &[&str]| line.iter().position(|name| known.contains(name));
        let count = line.len();
        if let (Some(first), Some(label)) = (find(task.first), find(task.label)) {
            let second = find(task.second);
            // A task of users may have either.
            if second.is_some() || task.second.is_empty() || task.first.len() > 2 {
                return Ok(Self { first, second, label, count, names_columns: true });
            }
        }
        let of_width = task.bare.iter().find(|bare| bare.columns == count);
        let second = |bare: &Bare| (!task.second.is_empty()).then_some(bare.second);
        if let Some(bare) = of_width {
            let &Bare { first, label, .. } = bare;
            return Ok(Self { first, second: second(bare), label, count, names_columns: false });
        }
        let names = |known: &[&str]| known.join(" or ");
        let mut expected = vec![names(task.first), names(task.second), names(task.label)];
        expected.retain(|names| !names.is_empty());
        let mut problem = format!("does not name the columns {}", expected.join(", "));
        if let [Bare { columns, .. }] = task.bare {
            problem += &format!(", and has {count} columns instead of {columns}");
        }
        Err(problem)
    }
}

//! Arguments, listings and progress that `prune` and `verify` share.

use std::fmt::Write;

use regex::Regex;
use serde_json::{Value, json};
use sparse24_core::MaskKind;
use sparse24_run::{
    Error, ErrorKind,
    data::Progress,
    pruning::{Embeddings, Selection, TensorReport},
};

use crate::{
    failure::{Failure, Result},
    progress::WorkProgress,
    signals::Signals,
};

/// Which tensors to look at, and what to print of them.
#[derive(clap::Args, Debug)]
pub(crate) struct Choice {
    /// Only tensors whose name matches
    #[arg(long, value_name = "REGEX")]
    include: Option<Regex>,
    /// Leave out tensors whose name matches
    #[arg(long, value_name = "REGEX")]
    exclude: Option<Regex>,
    /// Include embeddings and the output head (lm_head)
    #[arg(long)]
    embeddings: bool,
    /// Print the list as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Print only the summary
    #[arg(long, conflicts_with = "json")]
    pub(crate) quiet: bool,
}

impl Choice {
    fn admits(&self, name: &str) -> bool {
        self.include.as_ref().is_none_or(|regex| regex.is_match(name))
            && !self.exclude.as_ref().is_some_and(|regex| regex.is_match(name))
    }

    /// Calls `work` with these tensors.
    pub(crate) fn select<T>(&self, kind: MaskKind, work: impl FnOnce(Selection<'_>) -> T) -> T {
        let embeddings = if self.embeddings { Embeddings::Include } else { Embeddings::Skip };
        work(Selection { kind, include: &|name| self.admits(name), embeddings })
    }
}

/// Does work whose progress is shown. A signal ends it; nothing is then left behind.
pub(crate) fn shown<T>(
    what: &'static str,
    work: impl FnOnce(Progress<'_>) -> Result<T, Error>,
) -> Result<T> {
    let signals = Signals::listen_for_stop()?;
    let mut progress = WorkProgress::new(what);
    let worked = work(&mut |done, all| {
        progress.update(done, all);
        signals.received().map_or(Ok(()), |_| Err(Error::Interrupted))
    });
    worked.map_err(|error| match signals.received() {
        Some(exit) if error.kind() == ErrorKind::Interrupted => {
            Failure::new(exit, "interrupted; nothing was written")
        }
        _ => error.into(),
    })
}

/// One line per tensor: word, name, dtype, shape and remark. `skipped` is the word for a tensor
/// that was left out.
pub(crate) fn lines<T>(
    reports: &[TensorReport<T>],
    skipped: &str,
    describe: impl Fn(&T) -> (&'static str, String),
) -> String {
    let width = reports.iter().map(|report| report.name.chars().count()).max().unwrap_or(0);
    let mut out = String::new();
    for TensorReport { name, dtype, shape, outcome } in reports {
        let (word, remark) = match outcome {
            Ok(outcome) => describe(outcome),
            Err(reason) => (skipped, reason.to_string()),
        };
        let kind = format!("{dtype} {shape:?}");
        let line = format!("{word:<8} {name:<width$}  {kind:<18}  {remark}");
        writeln!(out, "{}", line.trim_end()).expect("writing to a string cannot fail");
    }
    out
}

/// One object per tensor; `skipped` holds the reason if it was left out.
pub(crate) fn objects<T>(reports: &[TensorReport<T>], describe: impl Fn(&T) -> Value) -> Value {
    let object = |TensorReport { name, dtype, shape, outcome }: &TensorReport<T>| {
        let mut object = json!({ "name": name, "dtype": dtype.to_string(), "shape": shape });
        let more = match outcome {
            Ok(outcome) => describe(outcome),
            Err(reason) => json!({ "skipped": reason.to_string() }),
        };
        if let (Value::Object(object), Value::Object(more)) = (&mut object, more) {
            object.extend(more);
        }
        object
    };
    reports.iter().map(object).collect()
}

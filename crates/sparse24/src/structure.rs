//! Arguments and listings that `prune` and `verify` share.

use std::fmt::Write;

use regex::Regex;
use serde_json::{Value, json};
use sparse24_run::pruning::TensorReport;

/// Which tensors to look at.
#[derive(clap::Args, Debug)]
pub(crate) struct Filter {
    /// Only tensors whose name matches (embeddings are always left out)
    #[arg(long, value_name = "REGEX")]
    include: Option<Regex>,
}

impl Filter {
    pub(crate) fn admits(&self, name: &str) -> bool {
        self.include.as_ref().is_none_or(|regex| regex.is_match(name))
    }
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

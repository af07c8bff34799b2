//! What `prune` and `verify` share: which structure, which tensors, and how they are listed.

use std::fmt::Write;

use clap::ValueEnum;
use regex::Regex;
use serde_json::{Value, json};
use sparse24_core::MaskKind;
use sparse24_run::pruning::TensorReport;

/// A mask kind on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Structure {
    /// Two of four along rows and along columns, in every 4x4 tile
    Transposable,
    /// Two of four along the last dimension
    Row,
    /// Two of four along the first dimension
    Column,
}

impl From<Structure> for MaskKind {
    fn from(structure: Structure) -> Self {
        match structure {
            Structure::Transposable => Self::Transposable,
            Structure::Row => Self::RowWise,
            Structure::Column => Self::ColumnWise,
        }
    }
}

/// The tensors to look at.
#[derive(clap::Args, Debug)]
pub(crate) struct Filter {
    /// Only tensors in whose name this matches (embeddings are left out all the same)
    #[arg(long, value_name = "REGEX")]
    include: Option<Regex>,
}

impl Filter {
    /// Whether a name passes.
    pub(crate) fn admits(&self, name: &str) -> bool {
        self.include.as_ref().is_none_or(|regex| regex.is_match(name))
    }
}

/// One line a tensor: a word, the name, dtype, shape, and a remark; `skipped` is the word for those
/// left alone.
pub(crate) fn lines<T>(
    reports: &[TensorReport<T>],
    skipped: &str,
    describe: impl Fn(&T) -> (&'static str, String),
) -> String {
    let width = reports.iter().map(|report| report.name.chars().count()).max().unwrap_or(0);
    let mut out = String::new();
    for TensorReport { name, dtype, shape, outcome } in reports {
        let (word, remark) = match outcome {
            Ok(done) => describe(done),
            Err(reason) => (skipped, reason.to_string()),
        };
        let kind = format!("{dtype} {shape:?}");
        let line = format!("{word:<8} {name:<width$}  {kind:<18}  {remark}");
        writeln!(out, "{}", line.trim_end()).expect("a string takes all");
    }
    out
}

/// One object a tensor; those left alone have a `skipped` reason.
pub(crate) fn objects<T>(reports: &[TensorReport<T>], describe: impl Fn(&T) -> Value) -> Value {
    let object = |report: &TensorReport<T>| {
        let mut object = json!({ "name": report.name, "dtype": report.dtype.to_string(), "shape": report.shape });
        match &report.outcome {
            Ok(done) => {
                if let (Value::Object(object), Value::Object(more)) = (&mut object, describe(done))
                {
                    object.extend(more);
                }
            }
            Err(reason) => object["skipped"] = json!(reason.to_string()),
        }
        object
    };
    reports.iter().map(object).collect()
}

//! `sparse24 verify`: is this file 2:4?

use std::path::PathBuf;

use serde_json::json;
use sparse24_run::pruning::{Selection, Verdict, verify_file};

use crate::{
    failure::{Exit, Failure},
    output::{self, counted, say},
    structure::{Filter, Structure, lines, objects},
};

/// Prove or refute, tensor by tensor, that the matrices of a safetensors file are 2:4; exits 0 only
/// if all are
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The file to read
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The structure to prove
    #[arg(long, value_enum, default_value = "transposable")]
    mask: Structure,
    #[command(flatten)]
    filter: Filter,
    /// The list as one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let selection = Selection { kind: args.mask.into(), include: &|name| args.filter.admits(name) };
    let reports = verify_file(&args.file, selection)?;
    let refuted: Vec<_> =
        reports.iter().filter(|report| matches!(report.outcome, Ok(Verdict::Refuted(_)))).collect();
    let checked = reports.iter().filter(|report| report.outcome.is_ok()).count();
    if args.json {
        let tensors = objects(&reports, |verdict| match verdict {
            Verdict::Holds => json!({ "holds": true }),
            Verdict::Refuted(offence) => {
                json!({ "holds": false, "row": offence.row, "column": offence.column, "problem": offence.to_string() })
            }
        });
        say!(
            "{}",
            json!({ "mask": selection.kind.to_string(), "holds": refuted.is_empty(), "tensors": tensors })
        );
    } else {
        let listed = lines(&reports, "skipped", |verdict| match verdict {
            Verdict::Holds => ("holds", String::new()),
            Verdict::Refuted(offence) => ("refuted", offence.to_string()),
        });
        output::write(format_args!("{listed}"))?;
    }
    let (file, kind) = (args.file.display(), selection.kind);
    match refuted.first() {
        Some(first) => {
            let (of, are) =
                (counted(checked, "tensor"), if refuted.len() == 1 { "is" } else { "are" });
            let sentence = format!(
                "{file}: {} of {of} {are} not {kind}; the first is `{}`",
                refuted.len(),
                first.name
            );
            Err(Failure::new(Exit::Refuted, sentence))
        }
        None => {
            if !args.json {
                say!(
                    "{} proved {kind}, {} skipped",
                    counted(checked, "tensor"),
                    reports.len() - checked
                );
            }
            Ok(())
        }
    }
}

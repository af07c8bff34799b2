//! `sparse24 verify`: checks whether a file is 2:4.

use std::path::PathBuf;

use serde_json::json;
use sparse24_core::MaskKind;
use sparse24_run::pruning::{Selection, TensorReport, Verdict, verify_file};

use crate::{
    choice,
    failure::{Exit, Failure},
    output::{self, counted, say},
    structure::{Filter, lines, objects},
};

/// Verify, tensor by tensor, that the matrices of a safetensors file are 2:4
///
/// Exits with 0 only if all of them are.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// File to read
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Structure to verify
    #[arg(long, value_parser = choice::mask(), default_value = "transposable")]
    mask: MaskKind,
    #[command(flatten)]
    filter: Filter,
    /// Print the list as one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let selection = Selection { kind: args.mask, include: &|name| args.filter.admits(name) };
    let reports = verify_file(&args.file, selection)?;
    let refuted: Vec<_> =
        reports.iter().filter(|report| matches!(report.outcome, Ok(Verdict::Refuted(_)))).collect();
    let checked = reports.iter().filter(|report| report.outcome.is_ok()).count();
    let (kind, all) = (selection.kind.to_string(), counted(checked, "tensor"));
    if args.json {
        let tensors = objects(&reports, |verdict| match verdict {
            Verdict::Holds => json!({ "holds": true }),
            Verdict::Refuted(offence) => json!({
                "holds": false,
                "row": offence.row,
                "column": offence.column,
                "problem": offence.to_string(),
            }),
        });
        say!("{}", json!({ "mask": kind, "holds": refuted.is_empty(), "tensors": tensors }));
    } else {
        let listed = lines(&reports, "skipped", |verdict| match verdict {
            Verdict::Holds => ("holds", String::new()),
            Verdict::Refuted(offence) => ("refuted", offence.to_string()),
        });
        output::write(format_args!("{listed}"))?;
        if refuted.is_empty() {
            say!("{all} proved {kind}, {} skipped", reports.len() - checked);
        }
    }
    let Some(first) = refuted.first() else { return Ok(()) };
    let are = if refuted.len() == 1 { "is" } else { "are" };
    let (file, count, first) = (args.file.display(), refuted.len(), &first.name);
    let problem = format!("{file}: {count} of {all} {are} not {kind}; the first is `{first}`");
    let others = [("row", MaskKind::RowWise), ("column", MaskKind::ColumnWise)];
    let holding = others.into_iter().find(|&(_, kind)| {
        let reports = verify_file(&args.file, Selection { kind, ..selection });
        let is_refuted =
            |report: &TensorReport<_>| matches!(report.outcome, Ok(Verdict::Refuted(_)));
        reports.is_ok_and(|reports| !reports.iter().any(is_refuted))
    });
    let hint = match holding {
        Some((name, kind)) if kind != args.mask => format!("; all are {kind}: use --mask {name}"),
        _ => String::new(),
    };
    Err(Failure::new(Exit::Refuted, problem + &hint))
}

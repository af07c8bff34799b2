//! `sparse24 verify`: checks whether a file or the model of a folder is 2:4.

use std::path::PathBuf;

use serde_json::json;
use sparse24_core::MaskKind;
use sparse24_run::{
    disk,
    pruning::{TensorReport, Verdict, verify},
};

use crate::{
    choice,
    failure::{Exit, Failure, Result},
    output::{self, counted, json_line, say},
    structure::{Choice, lines, objects, shown},
};

/// Verify, tensor by tensor, that the matrices of safetensors files are 2:4
///
/// Exits with 0 only if all of them are.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Safetensors file, or model folder with one such file or with several and an index
    #[arg(value_name = "PATH")]
    file: PathBuf,
    /// Structure to verify
    #[arg(long, value_parser = choice::mask(), default_value = "transposable")]
    mask: MaskKind,
    #[command(flatten)]
    choice: Choice,
}

pub(crate) fn run(args: &Args) -> Result {
    let is_refuted = |report: &&TensorReport<_>| matches!(report.outcome, Ok(Verdict::Refuted(_)));
    let others = [("row", MaskKind::RowWise), ("column", MaskKind::ColumnWise)];
    let (reports, holding) = shown("verifying", |progress| {
        let mut verify = |kind| {
            args.choice.select(kind, |selection| verify(&args.file, selection, &mut *progress))
        };
        let reports = verify(args.mask)?;
        let holding = reports.iter().any(|report| is_refuted(&report)).then(|| {
            let others = others.into_iter().filter(|&(_, kind)| kind != args.mask);
            others.into_iter().find(|&(_, kind)| {
                verify(kind).is_ok_and(|reports| !reports.iter().any(|r| is_refuted(&r)))
            })
        });
        Ok((reports, holding.flatten()))
    })?;
    let refuted: Vec<_> = reports.iter().filter(is_refuted).collect();
    let checked = reports.iter().filter(|report| report.outcome.is_ok()).count();
    let (kind, all) = (args.mask.to_string(), counted(checked, "tensor"));
    if args.choice.json {
        let tensors = objects(&reports, |verdict| match verdict {
            Verdict::Holds => json!({ "holds": true }),
            Verdict::Refuted(offence) => json!({
                "holds": false,
                "row": offence.row,
                "column": offence.column,
                "problem": offence.to_string(),
            }),
        });
        let report = json!({ "mask": kind, "holds": refuted.is_empty(), "tensors": tensors });
        say!("{}", json_line(&report));
    } else {
        if !args.choice.quiet {
            let listed = lines(&reports, "skipped", |verdict| match verdict {
                Verdict::Holds => ("holds", String::new()),
                Verdict::Refuted(offence) => ("refuted", offence.to_string()),
            });
            output::write(format_args!("{listed}"))?;
        }
        if refuted.is_empty() {
            say!("{all} proved {kind}, {} skipped", reports.len() - checked);
        }
    }
    let Some(first) = refuted.first() else { return Ok(()) };
    let are = if refuted.len() == 1 { "is" } else { "are" };
    let (file, count, first) = (args.file.display(), refuted.len(), &first.name);
    let folder = if args.file.is_dir() { &*args.file } else { disk::parent(&args.file) };
    let hint = match holding {
        Some((name, kind)) => format!("; all are {kind}: use --mask {name}"),
        None if folder.join("masks.safetensors").is_file() => {
            "; a checkpoint holds weights before pruning: `sparse24 export` writes the 2:4 model"
                .to_owned()
        }
        None => String::new(),
    };
    let problem =
        format!("{file}: {count} of {all} {are} not {kind}; the first is `{first}`{hint}");
    Err(Failure::new(Exit::Refuted, problem))
}

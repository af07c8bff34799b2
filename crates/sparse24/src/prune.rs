//! `sparse24 prune`: prunes the weights of any safetensors file or model folder to 2:4.

use std::path::PathBuf;

use serde_json::json;
use sparse24_core::MaskKind;
use sparse24_run::pruning::{Pruned, Search, Unprunable, left_out, prune};

use crate::{
    choice,
    failure::{Exit, Failure, Result},
    output::{self, counted, json_line, note, say},
    structure::{Choice, lines, objects, shown},
};

/// Prune the matrices of safetensors files to 2:4; everything else is copied unchanged and listed
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Safetensors file, or model folder with one such file or with several and an index
    #[arg(value_name = "IN")]
    input: PathBuf,
    /// File to write, replacing an existing one; for a folder, a new or empty folder
    #[arg(value_name = "OUT")]
    output: PathBuf,
    /// Structure of the masks
    #[arg(long, value_parser = choice::mask())]
    mask: MaskKind,
    /// Search for a tile's pattern (transposable masks only)
    #[arg(long, value_parser = choice::search(), default_value = "exact")]
    search: Search,
    #[command(flatten)]
    choice: Choice,
    /// Fail if an included two-dimensional float tensor that is not an embedding cannot be pruned
    #[arg(long)]
    strict: bool,
}

pub(crate) fn run(args: &Args) -> Result {
    if args.search == Search::Greedy && args.mask != MaskKind::Transposable {
        let problem = "--search greedy: requires --mask transposable; other masks keep the two \
                       largest of each group, which is exact";
        return Err(Failure::new(Exit::Usage, problem));
    }
    let unprunable = if args.strict { Unprunable::Refuse } else { Unprunable::Copy };
    let reports = shown("pruning", |progress| {
        let (input, output) = (&args.input, &args.output);
        args.choice.select(args.mask, |selection| {
            prune(input, output, selection, args.search, unprunable, progress)
        })
    })?;
    let left_out = left_out(&args.input)?;
    let (kind, out) = (args.mask.to_string(), args.output.display().to_string());
    if args.choice.json {
        let describe = |pruned: &Pruned| {
            let Pruned { nan, nan_pruned, infinite, infinite_pruned, .. } = pruned;
            json!({
                "kept_norm": pruned.kept_share(),
                "nan": nan,
                "nan_pruned": nan_pruned,
                "infinite": infinite,
                "infinite_pruned": infinite_pruned,
            })
        };
        let tensors = objects(&reports, describe);
        let report = json!({ "mask": kind, "out": out, "tensors": tensors, "left_out": left_out });
        say!("{}", json_line(&report));
        return Ok(());
    }
    if !args.choice.quiet {
        let listed = lines(&reports, "copied", |pruned| ("pruned", remark(pruned)));
        output::write(format_args!("{listed}"))?;
    }
    let outcomes = || reports.iter().filter_map(|report| report.outcome.as_ref().ok());
    let pruned = outcomes().count();
    let odd: u64 = outcomes().map(|of| of.nan + of.infinite).sum();
    say!("{} pruned ({kind}), {} copied: {out}", counted(pruned, "tensor"), reports.len() - pruned);
    if args.choice.quiet && odd > 0 {
        note(format_args!("{odd} values of the pruned tensors are NaN or infinite"));
    }
    if !left_out.is_empty() {
        say!("left out: {}", left_out.join(", "));
    }
    Ok(())
}

fn remark(pruned: &Pruned) -> String {
    let share = 100.0 * pruned.kept_share();
    let mut remark = match pruned.nan {
        0 => format!("keeps {share:.1} % of its L1 norm"),
        _ => format!("keeps {share:.1} % of the L1 norm of its numbers"),
    };
    let odd = [
        (pruned.nan, pruned.nan_pruned, "NaN"),
        (pruned.infinite, pruned.infinite_pruned, "infinite"),
    ];
    for (count, pruned, what) in odd.into_iter().filter(|odd| odd.0 > 0) {
        remark += &match pruned {
            0 => format!("; {count} {what}, all kept"),
            _ => format!("; {count} {what}, {pruned} of them pruned, too many for a group or tile"),
        };
    }
    remark
}

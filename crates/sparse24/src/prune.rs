//! `sparse24 prune`: prunes the weights of any safetensors file to 2:4.

use std::path::PathBuf;

use serde_json::json;
use sparse24_core::MaskKind;
use sparse24_run::pruning::{Pruned, Search, Selection, Unprunable, prune_file};

use crate::{
    choice,
    failure::{Exit, Failure},
    output::{self, counted, say},
    structure::{Filter, lines, objects},
};

/// Prune the matrices of a safetensors file to 2:4; everything else is copied unchanged and listed
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// File to read
    #[arg(value_name = "IN.safetensors")]
    input: PathBuf,
    /// File to write; an existing one is replaced
    #[arg(value_name = "OUT.safetensors")]
    output: PathBuf,
    /// Structure of the masks
    #[arg(long, value_parser = choice::mask())]
    mask: MaskKind,
    /// Search for the pattern of a tile (transposable only)
    #[arg(long, value_parser = choice::search(), default_value = "exact")]
    search: Search,
    #[command(flatten)]
    filter: Filter,
    /// Fail if an included two-dimensional float tensor that is not an embedding cannot be pruned
    #[arg(long)]
    strict: bool,
    /// Print the list as one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    if args.search == Search::Greedy && args.mask != MaskKind::Transposable {
        let problem = "--search greedy: requires --mask transposable; other masks keep the two \
                       largest of each group, which is exact";
        return Err(Failure::new(Exit::Usage, problem));
    }
    let unprunable = if args.strict { Unprunable::Refuse } else { Unprunable::Copy };
    let selection = Selection { kind: args.mask, include: &|name| args.filter.admits(name) };
    let reports = prune_file(&args.input, &args.output, selection, args.search, unprunable)?;
    let (kind, out) = (selection.kind.to_string(), args.output.display().to_string());
    if args.json {
        let describe = |pruned: &Pruned| {
            let Pruned { kept_norm, nan, nan_pruned } = pruned;
            json!({ "kept_norm": kept_norm, "nan": nan, "nan_pruned": nan_pruned })
        };
        let tensors = objects(&reports, describe);
        say!("{}", json!({ "mask": kind, "out": out, "tensors": tensors }));
        return Ok(());
    }
    let listed = lines(&reports, "copied", |pruned| ("pruned", remark(pruned)));
    output::write(format_args!("{listed}"))?;
    let pruned = reports.iter().filter(|report| report.outcome.is_ok()).count();
    say!("{} pruned ({kind}), {} copied: {out}", counted(pruned, "tensor"), reports.len() - pruned);
    Ok(())
}

fn remark(Pruned { kept_norm, nan, nan_pruned }: &Pruned) -> String {
    let norm = format!("keeps {:.1} % of its L1 norm", 100.0 * kept_norm);
    match (nan, nan_pruned) {
        (0, _) => norm,
        (nan, 0) => format!("{norm}; {nan} NaN, all kept"),
        (nan, pruned) => {
            format!("{norm}; {nan} NaN, {pruned} of them pruned, too many for one group or tile")
        }
    }
}

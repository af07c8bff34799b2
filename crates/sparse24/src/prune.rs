//! `sparse24 prune`: 2:4 for the weights of any safetensors file.

use std::path::PathBuf;

use clap::ValueEnum;
use serde_json::json;
use sparse24_run::pruning::{Pruned, Search, Selection, Unprunable, prune_file};

use crate::{
    failure::{Exit, Failure},
    output::{self, counted, say},
    structure::{Filter, Structure, lines, objects},
};

/// Prune the matrices of a safetensors file to 2:4; all else is copied untouched and listed
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The file to read
    #[arg(value_name = "IN.safetensors")]
    input: PathBuf,
    /// The file to write; one that exists is replaced
    #[arg(value_name = "OUT.safetensors")]
    output: PathBuf,
    /// The structure to give
    #[arg(long, value_enum)]
    mask: Structure,
    /// How the pattern of a tile is found (transposable only)
    #[arg(long, value_enum, default_value = "exact")]
    search: SearchName,
    #[command(flatten)]
    filter: Filter,
    /// Refuse the file if a two-dimensional float tensor that is included, and no embedding, cannot
    /// be pruned
    #[arg(long)]
    strict: bool,
    /// The list as one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum SearchName {
    /// The best of the 90 patterns
    Exact,
    /// The 2-approximation: largest first, while there is room
    Greedy,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let search = match args.search {
        SearchName::Exact => Search::Exact,
        SearchName::Greedy if args.mask == Structure::Transposable => Search::Greedy,
        SearchName::Greedy => {
            let sentence = "--search greedy found with a --mask other than transposable: there the two largest of a group are exact already, leave it out";
            return Err(Failure::new(Exit::Usage, sentence));
        }
    };
    let unprunable = if args.strict { Unprunable::Refuse } else { Unprunable::Copy };
    let selection = Selection { kind: args.mask.into(), include: &|name| args.filter.admits(name) };
    let reports = prune_file(&args.input, &args.output, selection, search, unprunable)?;
    if args.json {
        let tensors = objects(
            &reports,
            |Pruned { kept_norm, nan, nan_pruned }| json!({ "kept_norm": kept_norm, "nan": nan, "nan_pruned": nan_pruned }),
        );
        say!(
            "{}",
            json!({ "mask": selection.kind.to_string(), "out": args.output.display().to_string(), "tensors": tensors })
        );
        return Ok(());
    }
    output::write(format_args!(
        "{}",
        lines(&reports, "copied", |pruned| ("pruned", remark(pruned)))
    ))?;
    let pruned = reports.iter().filter(|report| report.outcome.is_ok()).count();
    let (what, copied) = (counted(pruned, "tensor"), reports.len() - pruned);
    say!("{what} pruned ({}), {copied} copied: {}", selection.kind, args.output.display());
    Ok(())
}

fn remark(Pruned { kept_norm, nan, nan_pruned }: &Pruned) -> String {
    let norm = format!("keeps {:.1} % of its L1 norm", 100.0 * kept_norm);
    match (nan, nan_pruned) {
        (0, _) => norm,
        (nan, 0) => format!("{norm}; {nan} NaN, all kept"),
        (nan, pruned) => {
            format!("{norm}; {nan} NaN, {pruned} of them pruned, where too many stand together")
        }
    }
}

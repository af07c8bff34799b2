//! `sparse24 report`: an offline page, or one of its figures, about runs.

use std::path::PathBuf;

use sparse24_lab::report;
use sparse24_run::disk;

use crate::{
    failure::Result,
    output::{note, say},
};

/// Write a self-contained page about one or more runs, including unfinished and damaged ones
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Run directories; a folder of lambda-search or study contributes its results and one run of
    /// each arm
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// File to write [default: RUN/report.html of the first run]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Write one figure as an SVG file instead: NAME is its anchor in the page, or quickstart for
    /// loss and flip rate
    #[arg(long, value_name = "NAME", requires = "out")]
    figure: Option<String>,
}

pub(crate) fn run(args: &Args) -> Result {
    let first = &args.runs[0];
    let _confined = match args.out {
        None if first.is_dir() => Some(disk::confine(first)?),
        _ => None,
    };
    let out = args.out.clone().unwrap_or_else(|| first.join(report::FILE));
    match &args.figure {
        Some(figure) => report::write_figure(&args.runs, figure, &out)?,
        None => report::write(&args.runs, &out)?.into_iter().for_each(note),
    }
    say!("{}", out.display());
    Ok(())
}

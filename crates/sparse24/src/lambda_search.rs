//! `sparse24 lambda-search`: recommends a decay factor from the warm-up.

use std::path::{Path, PathBuf};

use sparse24_lab::{
    runs::{Keep, Progress},
    search::{Candidate, Plan, Search, SearchOptions, SearchResults},
};
use sparse24_run::config::Config;

use crate::{
    choice,
    configure::Configure,
    failure::{Exit, Failure, Result},
    output::{self, counted, note, print_json, say},
    ranks::check_alone,
    runs,
    signals::Signals,
};

/// Search for the masked-decay factor lambda, in the warm-up of the run that the settings describe
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    configure: Configure,
    /// Values of lambda [default: two per decade from 6e-7 to 6; on weights, up to 1/lr]
    #[arg(long, value_name = "A,B,..", value_delimiter = ',', allow_negative_numbers = true)]
    candidates: Option<Vec<f32>>,
    /// Step after which each run ends [default: the end of the warm-up]
    #[arg(long, value_name = "STEP")]
    until: Option<u32>,
    /// Steps whose samples of the flip rate count [default: the second half]
    #[arg(long, value_name = "A..B", value_parser = window)]
    window: Option<[u32; 2]>,
    /// Seeds for weights and data
    #[arg(long, value_name = "A,B,..", value_delimiter = ',')]
    seeds: Option<Vec<u64>>,
    /// Number of concurrent runs; they share the threads
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    jobs: u16,
    /// Files of finished runs to keep
    #[arg(long, value_parser = choice::keep(), default_value = "results")]
    keep: Keep,
    /// Folder for the runs and the results
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Print search.json to standard output
    #[arg(long)]
    json: bool,
}

fn window(text: &str) -> Result<[u32; 2], String> {
    let ends = text
        .split_once("..")
        .and_then(|(first, last)| Some([first.parse().ok()?, last.parse().ok()?]));
    ends.ok_or_else(|| "expected A..B, two steps".to_owned())
}

pub(crate) fn run(args: &Args) -> Result {
    check_alone("lambda-search")?;
    let config = args.configure.resolve()?;
    let Args { candidates, until, window, seeds, .. } = args;
    let options = SearchOptions {
        candidates: candidates.clone(),
        until: *until,
        window: *window,
        seeds: seeds.clone(),
    };
    let results = search(config, options, &args.out, args.jobs, args.keep, &[], &Signals::take()?)?;
    if args.json {
        print_json(&results)?;
    } else {
        say!("{HEADER}");
        for candidate in &results.candidates {
            say!("{}", row(candidate));
        }
        if let Some(lambda) = results.recommended {
            say!("");
            say!("recommended  {lambda:e}");
            say!(
                "next         sparse24 train ... --lambda auto --lambda-search {}",
                output::word(&args.out)
            );
        }
    }
    results.advice.as_ref().map_or(Ok(()), |advice| Err(infeasible(advice)))
}

/// The failure of a search that recommends nothing.
pub(crate) fn infeasible(advice: &str) -> Failure {
    Failure::new(Exit::Refuted, format!("no candidate is feasible (mu in 0.60 to 0.95): {advice}"))
}

/// Searches and prints the progress. If interrupted, the same command with the words `more`
/// continues it.
pub(crate) fn search(
    config: Config,
    options: SearchOptions,
    out: &Path,
    jobs: u16,
    keep: Keep,
    more: &[&Path],
    signals: &Signals,
) -> Result<SearchResults> {
    config.check_corpus()?;
    let plan = Plan::resolve(config, options)?;
    let mut search = Search::open(plan, out, keep)?;
    let SearchResults { until, window: [first, last], done, of, .. } = search.results();
    note(format_args!(
        "{} of {until} steps each, mu over steps {first} to {last}: {}",
        counted(of, "run"),
        out.display()
    ));
    if done > 0 {
        note(format_args!("{done} of them are done"));
    }
    let watchers = runs::watchers(jobs, signals)?;
    let members = search.runs().members().to_vec();
    let after = |member: usize, results: &SearchResults| {
        let arm = &members[member].arm;
        let judged = results.candidates.iter().find(|candidate| {
            format!("lambda-{:e}", candidate.lambda) == *arm && candidate.verdict.is_some()
        });
        match judged {
            Some(candidate) => note(format_args!("lambda {}", row(candidate).trim_end())),
            None => note(format_args!("{}: done", runs::name(&members[member]))),
        }
    };
    let progress = search.train(watchers, &after)?;
    let results = search.results();
    match progress {
        Progress::Finished => Ok(results),
        Progress::Stopped => Err(runs::interrupted(signals, results.done, results.of, more)),
    }
}

const HEADER: &str = "lambda         mu  95 % over layers   flip rate  verdict";

fn row(candidate: &Candidate) -> String {
    let Candidate { lambda, interval, verdict, flip_rate, failure, .. } = candidate;
    let mu = candidate.shown_mu().unwrap_or("-".to_owned());
    let interval = interval.map_or("-".to_owned(), |[low, high]| format!("[{low:.3}, {high:.3}]"));
    let flip_rate = flip_rate.map_or("-".to_owned(), |rate| format!("{rate:.6}"));
    let verdict = verdict.map_or("-".to_owned(), |verdict| verdict.to_string());
    let failed = failure.as_ref().map_or_else(String::new, |failed| {
        format!(" (seed {}, step {}: {})", failed.seed, failed.failure.step, failed.failure.what)
    });
    format!(
        "{:<10} {mu:>6}  {interval:<17}  {flip_rate:>9}  {verdict}{failed}",
        format!("{lambda:e}")
    )
}

//! `sparse24 lambda-search`: which decay factor the warm-up recommends.

use std::path::{Path, PathBuf};

use sparse24_lab::{
    search::{Candidate, Plan, Report, Search, Wanted},
    series::{Keep, Progress},
};
use sparse24_run::config::Config;

use crate::{
    configure::Configure,
    failure::{Exit, Failure},
    output::{counted, note, say},
    series::{self, Display, Kept},
    signals::Signals,
};

/// Search the factor lambda of masked decay in the warm-up of the run that the settings describe
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    configure: Configure,
    /// Values of lambda; by default those of the paper's scale
    #[arg(long, value_name = "A,B,..", value_delimiter = ',', allow_negative_numbers = true)]
    candidates: Option<Vec<f32>>,
    /// The step after which each run ends; the warm-up otherwise
    #[arg(long, value_name = "STEP")]
    until: Option<u32>,
    /// Steps whose samples of the flip rate count; the second half otherwise
    #[arg(long, value_name = "A..B", value_parser = window)]
    window: Option<[u32; 2]>,
    /// Seeds of weights and data
    #[arg(long, value_name = "A,B,..", value_delimiter = ',')]
    seeds: Option<Vec<u64>>,
    /// Runs at a time, which divide the threads
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    jobs: u16,
    /// What stays of finished runs
    #[arg(long, value_enum, default_value = "results")]
    keep: Kept,
    /// The folder of the search
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// search.json on standard output
    #[arg(long)]
    json: bool,
}

fn window(text: &str) -> Result<[u32; 2], String> {
    let ends = text
        .split_once("..")
        .and_then(|(first, last)| Some([first.parse().ok()?, last.parse().ok()?]));
    ends.ok_or_else(|| "expected A..B, two steps".to_owned())
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let config = args.configure.resolve()?;
    let Args { candidates, until, window, seeds, .. } = args;
    let wanted = Wanted {
        candidates: candidates.clone(),
        until: *until,
        window: *window,
        seeds: seeds.clone(),
    };
    let report =
        search(config, wanted, &args.out, args.jobs, args.keep.into(), &[], &Signals::take()?)?;
    if args.json {
        say!("{}", serde_json::to_string_pretty(&report).expect("plain values"));
    } else {
        say!("{HEADER}");
        for candidate in &report.candidates {
            say!("{}", row(candidate));
        }
        if let Some(lambda) = report.recommended {
            say!("\nrecommended  {lambda:e}");
            say!(
                "next         sparse24 train ... --lambda auto --lambda-search {}",
                crate::output::word(&args.out)
            );
        }
    }
    report.advice.as_ref().map_or(Ok(()), |advice| Err(infeasible(advice)))
}

/// The answer of a search that recommends nothing.
pub(crate) fn infeasible(advice: &str) -> Failure {
    Failure::new(Exit::Refuted, format!("no candidate is feasible (mu in 0.60 to 0.95): {advice}"))
}

/// Searches, in sight; interrupted, it is continued by the same command with these words more.
pub(crate) fn search(
    config: Config,
    wanted: Wanted,
    out: &Path,
    jobs: u16,
    keep: Keep,
    more: &[&Path],
    signals: &Signals,
) -> Result<Report, Failure> {
    config.check_corpus()?;
    let plan = Plan::resolve(config, wanted)?;
    let mut search = Search::open(plan, out, keep)?;
    let Report { until, window: [first, last], done, of, .. } = search.report();
    note(format_args!(
        "{}, each of {until} steps, mu over the steps {first} to {last}: {}",
        counted(of, "run"),
        out.display()
    ));
    if done > 0 {
        note(format_args!("{done} of them are done"));
    }
    let display = Display::new();
    let watchers = display.watchers(jobs, signals)?;
    let members = search.series().members().to_vec();
    let after = |member: usize, report: &Report| {
        let arm = &members[member].arm;
        let judged = report.candidates.iter().find(|candidate| {
            format!("lambda-{:e}", candidate.lambda) == *arm && candidate.verdict.is_some()
        });
        match judged {
            Some(candidate) => display.say(format!("lambda {}", row(candidate).trim_end())),
            None => display.say(format!("{}: done", series::name(&members[member]))),
        }
    };
    let progress = search.train(watchers, &after)?;
    let report = search.report();
    match progress {
        Progress::Finished => Ok(report),
        Progress::Stopped => Err(series::interrupted(signals, report.done, report.of, more)),
    }
}

const HEADER: &str = "lambda         mu  95 % over layers   flip rate  verdict";

fn row(candidate: &Candidate) -> String {
    let Candidate { lambda, mu, interval, verdict, flip_rate, failure, .. } = candidate;
    let mu = mu.map_or("-".to_owned(), |mu| format!("{mu:.3}"));
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

//! `sparse24 study`: arms compared with a reference, seed by seed.

use std::path::PathBuf;

use sparse24_lab::{
    report,
    runs::{Keep, Progress, RunResult},
    statistics::{mean, quantile},
    study::{Arm, Overrides, Plan, Study, StudyResults},
};

use crate::{
    choice,
    configure::quoted_path,
    failure::Result,
    output::{counted, note, print_json, say},
    ranks::check_alone,
    runs,
    signals::Signals,
};

/// Train variants of a run (arms) with several seeds and compare them seed by seed
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Study file with a reference, seeds, base settings and arms
    study: PathBuf,
    /// Folder for the runs and the results
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Corpus: a text file, a folder of text files, or token shards
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// A setting for all arms, e.g. `steps=500`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    settings: Vec<String>,
    /// Arm to compare the others with, instead of the one in the file
    #[arg(long, value_name = "ARM")]
    reference: Option<String>,
    /// Number of concurrent runs; they share the threads
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    jobs: u16,
    /// Files of finished runs to keep
    #[arg(long, value_parser = choice::keep(), default_value = "checkpoints")]
    keep: Keep,
    /// Print study.json to standard output
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result {
    check_alone("study")?;
    let mut settings = args.settings.clone();
    if let Some(path) = &args.data {
        settings.push(format!("data.path={}", quoted_path(path)?));
    }
    let plan = Plan::read(&args.study, &Overrides { settings, reference: args.reference.clone() })?;
    let signals = Signals::take()?;
    let mut study = Study::open(plan, &args.out, args.keep)?;
    let StudyResults { arms, seeds, done, of, .. } = study.results();
    note(format_args!(
        "{} x {}: {}, {done} of them done: {}",
        counted(arms.len(), "arm"),
        counted(seeds.len(), "seed"),
        counted(of, "run"),
        args.out.display()
    ));
    let watchers = runs::watchers(args.jobs, &signals)?;
    let members = study.runs().members().to_vec();
    let after = |member: usize, results: &StudyResults| {
        let (arm, at) = (member % results.arms.len(), member / results.arms.len());
        let result = match results.arms[arm].val_loss.by_seed[at] {
            Some(loss) => format!("validation loss {loss:.4}"),
            None => {
                let mut failures = results.arms[arm].failures.iter();
                let failed = failures.find(|failed| failed.seed == results.seeds[at]);
                let failure = &failed.expect("it has a loss or has failed").failure;
                format!("ended at step {}: {}", failure.step, failure.what)
            }
        };
        note(format_args!(
            "{}/{} {}: {result}",
            results.done,
            results.of,
            runs::name(&members[member])
        ));
    };
    let progress = study.train(watchers, &after)?;
    let results = study.results();
    if progress == Progress::Stopped {
        return Err(runs::interrupted(&signals, results.done, results.of, &[]));
    }
    let page = args.out.join(report::FILE);
    let written = report::write(std::slice::from_ref(&args.out), &page);
    if let Err(error) = &written {
        note(format_args!("the report was not written: {error}"));
    }
    if args.json {
        return print_json(&results);
    }
    print(&results, study.runs().results())?;
    if written.is_ok() {
        say!("report       {}", page.display());
    }
    Ok(())
}

fn print(results: &StudyResults, runs: &[Option<RunResult>]) -> Result {
    let width = results.arms.iter().map(|arm| arm.name.len()).max().unwrap_or(0).max(3);
    let reference = format!("minus {}, 95 %", results.reference);
    say!(
        "{:<width$}  validation loss      sd  {reference:<27}  flip rate     mu   tok/s    time",
        "arm"
    );
    for (at, arm) in results.arms.iter().enumerate() {
        let runs: Vec<_> = runs.iter().skip(at).step_by(results.arms.len()).flatten().collect();
        say!("{:<width$}  {}", arm.name, row(arm, &runs));
    }
    if let Some(best) = &results.best {
        // Where the reference is always the best, there is nothing to add.
        let left_out = best.left_out.as_ref().filter(|out| out.by_seed.iter().any(|&d| d != 0.0));
        let left_out = left_out.map_or_else(String::new, |left_out| {
            let by_seed: Vec<String> =
                left_out.by_seed.iter().map(|difference| format!("{difference:+.4}")).collect();
            let reference = &results.reference;
            format!(
                "; {reference} minus the arm that is best on the other seeds: {:+.4} (by seed {})",
                left_out.mean,
                by_seed.join(" ")
            )
        });
        let among =
            if best.among.len() < results.arms.len() { " that differ only in lambda" } else { "" };
        say!("");
        say!(
            "best arm     {} (lowest mean of {}{among}){left_out}",
            best.arm,
            counted(best.among.len(), "arm")
        );
    }
    for trend in &results.trends {
        let rank = |rank: Option<f64>| rank.map_or("-".to_owned(), |rank| format!("{rank:+.2}"));
        let (first, last) = (trend.lambdas[0], trend.lambdas[trend.lambdas.len() - 1]);
        let arms = counted(trend.arms.len(), "arm");
        say!(
            "with lambda  {arms} from {first:e} to {last:e}: Spearman {} with the flip rate, {} \
             with the loss",
            rank(trend.flip_rate),
            rank(trend.val_loss)
        );
    }
    Ok(())
}

fn row(arm: &Arm, runs: &[&RunResult]) -> String {
    let number = |value: Option<f64>, decimals: usize| {
        value.map_or("-".to_owned(), |value| format!("{value:.decimals$}"))
    };
    let difference =
        arm.difference.map_or_else(String::new, |interval| match (interval.low, interval.high) {
            (Some(low), Some(high)) => format!("{:+.4} [{low:+.4}, {high:+.4}]", interval.mean),
            _ => format!("{:+.4}", interval.mean),
        });
    let rates: Vec<f64> = runs.iter().map(|run| run.tokens_per_s).collect();
    let seconds: Vec<f64> = runs.iter().map(|run| run.seconds).collect();
    let failed = match arm.failures.len() {
        0 => String::new(),
        runs => format!("  {} ended early", counted(runs, "run")),
    };
    format!(
        "{:>15}  {:>6}  {difference:<27}  {:>9}  {:>5}  {:>6}  {:>4} s{failed}",
        number(arm.val_loss.mean, 4),
        number(arm.val_loss.deviation, 4),
        number(arm.flip_rate, 6),
        number(arm.mu, 3),
        number(quantile(&rates, 0.5), 0),
        number(mean(&seconds), 0),
    )
}

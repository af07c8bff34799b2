//! `sparse24 study`: arms against a reference, seed by seed.

use std::path::PathBuf;

use sparse24_lab::{
    report,
    series::{Progress, Told},
    statistics::{mean, quantile},
    study::{Arm, Overrides, Plan, Report, Study},
};

use crate::{
    failure::{Exit, Failure},
    output::{counted, note, say},
    series::{self, Display, Kept},
    signals::Signals,
};

/// Train arms with several seeds and compare them seed by seed
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The study file: a reference, seeds, base settings and arms
    study: PathBuf,
    /// The folder of the study
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// The corpus of all arms: a text file, a folder of text files, or prepared shards
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// One setting of the base, e.g. `steps=500`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    settings: Vec<String>,
    /// The arm that others are compared with, instead of the file's
    #[arg(long, value_name = "ARM")]
    reference: Option<String>,
    /// Runs at a time, which divide the threads
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    jobs: u16,
    /// What stays of finished runs
    #[arg(long, value_enum, default_value = "checkpoints")]
    keep: Kept,
    /// study.json on standard output
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let mut settings = args.settings.clone();
    if let Some(path) = &args.data {
        let name = path.to_str().ok_or_else(|| {
            Failure::new(
                Exit::Usage,
                format!("--data {}: the name is not UTF-8; rename it", path.display()),
            )
        })?;
        settings.push(format!("data.path={}", serde_json::Value::from(name)));
    }
    let plan = Plan::read(&args.study, &Overrides { settings, reference: args.reference.clone() })?;
    let signals = Signals::take()?;
    let mut study = Study::open(plan, &args.out, args.keep.into())?;
    let Report { arms, seeds, done, of, .. } = study.report();
    note(format_args!(
        "{} x {}: {}, {done} of them done: {}",
        counted(arms.len(), "arm"),
        counted(seeds.len(), "seed"),
        counted(of, "run"),
        args.out.display()
    ));
    let display = Display::new();
    let watchers = display.watchers(args.jobs, &signals)?;
    let members = study.series().members().to_vec();
    let after = |member: usize, report: &Report| {
        let (arm, at) = (member % report.arms.len(), member / report.arms.len());
        let result = match report.arms[arm].val_loss.by_seed[at] {
            Some(loss) => format!("validation loss {loss:.4}"),
            None => "ended at a loss that is not finite".to_owned(),
        };
        display.say(format!(
            "{}/{} {}: {result}",
            report.done,
            report.of,
            series::name(&members[member])
        ));
    };
    let progress = study.train(watchers, &after)?;
    let report = study.report();
    if progress == Progress::Stopped {
        return Err(series::interrupted(&signals, report.done, report.of, &[]));
    }
    let page = args.out.join(report::FILE);
    let written = report::write(std::slice::from_ref(&args.out), &page);
    if let Err(error) = &written {
        note(format_args!("no report was written: {error}"));
    }
    if args.json {
        say!("{}", serde_json::to_string_pretty(&report).expect("plain values"));
        return Ok(());
    }
    tell(&report, study.series().told())?;
    if written.is_ok() {
        say!("report       {}", page.display());
    }
    Ok(())
}

fn tell(report: &Report, told: &[Option<Told>]) -> Result<(), Failure> {
    let width = report.arms.iter().map(|arm| arm.name.len()).max().unwrap_or(0).max(3);
    let reference = format!("minus {}, 95 %", report.reference);
    say!("{:<width$}  val loss      sd  {reference:<27}  flip rate     mu   tok/s    time", "arm");
    for (at, arm) in report.arms.iter().enumerate() {
        let runs: Vec<&Told> = told.iter().skip(at).step_by(report.arms.len()).flatten().collect();
        say!("{:<width$}  {}", arm.name, row(arm, &runs));
    }
    if let Some(best) = &report.best {
        let left_out = best.left_out.as_ref().map_or_else(String::new, |left_out| {
            let by_seed: Vec<String> =
                left_out.by_seed.iter().map(|difference| format!("{difference:+.4}")).collect();
            let reference = &report.reference;
            format!(
                "; {reference} minus the best of the other seeds: {:+.4} (by seed {})",
                left_out.mean,
                by_seed.join(" ")
            )
        });
        let among =
            if best.among.len() < report.arms.len() { " that differ in lambda alone" } else { "" };
        say!(
            "\nlowest mean  {} of {}{among}{left_out}",
            best.arm,
            counted(best.among.len(), "arm")
        );
    }
    for trend in &report.trends {
        let told = |rank: Option<f64>| rank.map_or("-".to_owned(), |rank| format!("{rank:+.2}"));
        let (first, last) = (trend.lambdas[0], trend.lambdas[trend.lambdas.len() - 1]);
        let arms = counted(trend.arms.len(), "arm");
        say!(
            "with lambda  {arms} of {first:e} to {last:e}: Spearman {} of the flip rate, {} of the loss",
            told(trend.flip_rate),
            told(trend.val_loss)
        );
    }
    Ok(())
}

fn row(arm: &Arm, runs: &[&Told]) -> String {
    let number = |value: Option<f64>, decimals: usize| {
        value.map_or("-".to_owned(), |value| format!("{value:.decimals$}"))
    };
    let difference =
        arm.difference.map_or_else(String::new, |interval| match (interval.low, interval.high) {
            (Some(low), Some(high)) => format!("{:+.4} [{low:+.4}, {high:+.4}]", interval.mean),
            _ => format!("{:+.4}", interval.mean),
        });
    let rates: Vec<f64> = runs.iter().map(|told| told.tokens_per_s).collect();
    let seconds: Vec<f64> = runs.iter().map(|told| told.seconds).collect();
    let failed = match arm.failures.len() {
        0 => String::new(),
        runs => format!("  {} not finite", counted(runs, "run")),
    };
    format!(
        "{:>8}  {:>6}  {difference:<27}  {:>9}  {:>5}  {:>6}  {:>4} s{failed}",
        number(arm.val_loss.mean, 4),
        number(arm.val_loss.deviation, 4),
        number(arm.flip_rate, 6),
        number(arm.mu, 3),
        number(quantile(&rates, 0.5), 0),
        number(mean(&seconds), 0),
    )
}

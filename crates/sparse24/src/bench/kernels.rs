//! The cases that were asked for, one after the other, in sight.

use std::{
    io::{IsTerminal, stderr},
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};
use regex::Regex;
use serde_json::json;
use sparse24_cuda::{
    Device, Settings,
    bench::{Bench, Case, Effort, Outcome, Record, Report, Size, cases},
};
use sparse24_run::Error;
use sparse24_train::backend::BackendSettings;

use super::{Args, table};
use crate::{
    failure::{Exit, Failure},
    output::{self, counted, note, say},
    signals::Signals,
};

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let sizes = if args.size.is_empty() { Size::all() } else { args.size.clone() };
    let all = cases(&sizes);
    let count = all.len();
    let wanted = |case: &Case| {
        args.kernel.is_empty() || args.kernel.iter().any(|kernel| kernel.is_match(case.kernel))
    };
    let cases: Vec<Case> = all.into_iter().filter(wanted).collect();
    if args.list {
        return list(&cases, args);
    }
    if cases.is_empty() {
        let kernels = args.kernel.iter().map(Regex::as_str).collect::<Vec<_>>().join("`, `");
        let sentence = format!(
            "--kernel: no name of a kernel in {} has a match of `{kernels}`; --list names them",
            counted(count, "case")
        );
        return Err(Failure::new(Exit::Usage, sentence));
    }
    let effort = if args.quick { Effort::Quick } else { Effort::Thorough };
    let signals = Signals::take()?;
    let BackendSettings { gpu: ordinal, libraries, .. } = args.over(BackendSettings::default());
    let device = Device::open(&Settings { ordinal, libraries, ..Settings::default() })
        .map_err(Error::from)?;
    let mut bench = Bench::new(device, effort).map_err(Error::from)?;
    let mut live = Live::new(cases.len());
    let mut end = Ok(());
    for case in &cases {
        if signals.received().is_some() {
            break;
        }
        live.begin(case);
        match bench.run(case) {
            Ok(record) => live.end(record),
            Err(error) => {
                end = Err(error);
                break;
            }
        }
    }
    live.finish();
    // What was found is told whatever the GPU has come to.
    let report = end.and_then(|()| bench.report());
    let (report, end) = match report {
        Ok(report) => (report, Ok(())),
        Err(error) => (bench.found(), Err(Error::from(error))),
    };
    if args.json {
        say!("{}", serde_json::to_string_pretty(&report).expect("plain values"));
    } else {
        output::write(format_args!("{}", table::of(&report)))?;
    }
    verdict(&report, cases.len(), end.map_err(Failure::from), signals.received())
}

fn list(cases: &[Case], args: &Args) -> Result<(), Failure> {
    if args.json {
        let case = |case: &Case| json!({ "kernel": case.kernel, "shape": case.shape, "entries": case.entries });
        let cases: Vec<_> = cases.iter().map(case).collect();
        say!("{}", serde_json::to_string_pretty(&cases).expect("plain values"));
    } else {
        for case in cases {
            say!("{:<26} {}", case.kernel, case.shape);
        }
    }
    Ok(())
}

/// What the exit code tells: a kernel that is wrong comes first.
fn verdict(
    report: &Report,
    asked: usize,
    end: Result<(), Failure>,
    stopped: Option<Exit>,
) -> Result<(), Failure> {
    let that =
        |is: fn(&Outcome) -> bool| report.cases.iter().filter(move |record| is(&record.outcome));
    let (mut failed, mut unmeasured) = (
        that(|outcome| matches!(outcome, Outcome::Failed { .. })),
        that(|outcome| matches!(outcome, Outcome::Unmeasured { .. })),
    );
    if let Some(Record { kernel, shape, outcome: Outcome::Failed { difference } }) = failed.next() {
        let of = counted(report.cases.len(), "case");
        let sentence = format!(
            "{} of {of} failed; the first is {kernel} {shape}: {difference}",
            1 + failed.count()
        );
        return Err(Failure::new(Exit::Refuted, sentence));
    }
    end?;
    if let Some(exit) = stopped {
        return Err(Failure::new(
            exit,
            format!("interrupted after {} of {}", report.cases.len(), counted(asked, "case")),
        ));
    }
    match unmeasured.next() {
        Some(Record { kernel, shape, outcome: Outcome::Unmeasured { reason } }) => {
            let of = counted(report.cases.len(), "case");
            let sentence = format!(
                "{} of {of} could not run; the first is {kernel} {shape}: {reason}",
                1 + unmeasured.count()
            );
            Err(Failure::new(Exit::Device, sentence))
        }
        _ => Ok(()),
    }
}

/// A live line on a terminal, plain lines elsewhere, of which one comes at most so often.
struct Live {
    bar: Option<ProgressBar>,
    told: Instant,
    done: usize,
    count: usize,
    last: String,
}

const INTERVAL: Duration = Duration::from_secs(10);

impl Live {
    fn new(count: usize) -> Self {
        let bar = stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{bar:20.cyan/blue} {pos}/{len} {wide_msg}")
                .expect("the template is well formed");
            ProgressBar::new(count as u64).with_style(style.progress_chars("━╸─"))
        });
        Self { bar, told: Instant::now(), done: 0, count, last: String::new() }
    }

    fn begin(&self, case: &Case) {
        if let Some(bar) = &self.bar {
            bar.set_message(format!("{} {}   {}", case.kernel, case.shape, self.last));
        }
    }

    fn end(&mut self, record: &Record) {
        self.done += 1;
        self.last = format!("(before: {})", table::brief(record));
        match &self.bar {
            Some(bar) if matches!(record.outcome, Outcome::Failed { .. }) => {
                bar.println(table::brief(record))
            }
            Some(_) => {}
            None if self.told.elapsed() >= INTERVAL => {
                self.told = Instant::now();
                note(format_args!("{}/{} {}", self.done, self.count, table::brief(record)));
            }
            None => {}
        }
        if let Some(bar) = &self.bar {
            bar.inc(1);
        }
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

//! `sparse24 bench`: runs the selected kernel cases one after the other.

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

use indicatif::ProgressBar;
use regex::Regex;
use serde_json::json;
use sparse24_cuda::{
    Device, Settings,
    bench::{self, Bench, Effort, Outcome, Record, Report, Size, peer_kernels, products},
};
use sparse24_run::Error;
use sparse24_train::backend::BackendSettings;

use super::{
    Args,
    layers::{Layer, layers},
    operations::{Operation, operations},
    table,
};
use crate::{
    failure::{Exit, Failure, Result},
    output::{self, counted, note, print_json, say},
    progress,
    signals::Signals,
};

/// An operation of a backend, a kernel below with all its plans and competitors, or a layer.
enum Case {
    Operation(Operation),
    Product(bench::Case),
    Layer(Layer),
}

impl Case {
    /// Name, shape, and prefixes of the names of its kernels.
    fn names(&self) -> (&'static str, &str, &'static [&'static str]) {
        match self {
            Self::Operation(case) => (case.kernel, &case.shape, case.entries),
            Self::Product(case) => (case.kernel, &case.shape, case.entries),
            Self::Layer(case) => (case.kernel, &case.shape, &[]),
        }
    }
}

/// The cases for some sizes, without duplicates, grouped by kernel.
fn cases(sizes: &[Size]) -> Vec<Case> {
    let operations = sizes.iter().flat_map(operations).map(Case::Operation);
    let of_kernels = |size| products(size).into_iter().chain(peer_kernels(size));
    let products = sizes.iter().flat_map(of_kernels).map(Case::Product);
    let all = operations.chain(products).chain(sizes.iter().flat_map(layers).map(Case::Layer));
    let (mut kernels, mut seen, mut cases) = (Vec::new(), HashSet::new(), Vec::new());
    for case in all {
        let (kernel, shape, _) = case.names();
        if seen.insert((kernel, shape.to_owned())) {
            if !kernels.contains(&kernel) {
                kernels.push(kernel);
            }
            cases.push(case);
        }
    }
    cases.sort_by_key(|case| kernels.iter().position(|&kernel| kernel == case.names().0));
    cases
}

pub(super) fn run(args: &Args) -> Result {
    let sizes = if args.size.is_empty() { Size::all() } else { args.size.clone() };
    let all = cases(&sizes);
    let count = counted(all.len(), "case");
    let is_selected = |case: &Case| {
        args.kernel.is_empty() || args.kernel.iter().any(|kernel| kernel.is_match(case.names().0))
    };
    let cases: Vec<Case> = all.into_iter().filter(is_selected).collect();
    if cases.is_empty() {
        let kernels = args.kernel.iter().map(Regex::as_str).collect::<Vec<_>>().join("`, `");
        let problem = format!("--kernel: none of {count} matches `{kernels}`; see --list");
        return Err(Failure::new(Exit::Usage, problem));
    }
    if args.list {
        return list(&cases, args);
    }
    let effort = if args.quick { Effort::Quick } else { Effort::Thorough };
    let signals = Signals::take()?;
    let settings = args.override_settings(BackendSettings::default());
    let device = Device::open(&Settings { ordinal: settings.gpu, ..Settings::default() });
    let device = device.map_err(Error::from)?;
    let mut bench = Bench::new(device, effort).map_err(Error::from)?;
    let mut progress = Progress::new(cases.len());
    let completed =
        cases.iter().take_while(|_| signals.received().is_none()).try_for_each(|case| {
            progress.start(case);
            let record = match case {
                Case::Product(case) => bench.run(case),
                Case::Operation(case) => {
                    let prepared = case.prepare(settings.clone(), |bytes| bench.set_count(bytes));
                    bench.time(case.kernel, &case.shape, prepared)
                }
                Case::Layer(case) => {
                    let prepared = case.prepare(settings.clone());
                    bench.time(case.kernel, &case.shape, prepared)
                }
            };
            record.map(|record| progress.finish_case(record))
        });
    progress.finish();
    // Results are printed even if the GPU fails.
    let (report, completed) = match completed.and_then(|()| bench.report()) {
        Ok(report) => (report, Ok(())),
        Err(error) => (bench.found(), Err(Failure::from(Error::from(error)))),
    };
    if args.json {
        print_json(&report)?;
    } else {
        output::write(format_args!("{}", table::format(&report)))?;
    }
    verdict(&report, cases.len(), completed, signals.received())
}

fn list(cases: &[Case], args: &Args) -> Result {
    if args.json {
        let case = |case: &Case| {
            let (kernel, shape, entries) = case.names();
            json!({ "kernel": kernel, "shape": shape, "entries": entries })
        };
        return print_json(&cases.iter().map(case).collect::<Vec<_>>());
    }
    for case in cases {
        let (kernel, shape, _) = case.names();
        say!("{kernel:<26} {shape}");
    }
    Ok(())
}

/// The result of the command. A wrong kernel takes precedence over errors and interruptions.
fn verdict(report: &Report, asked: usize, completed: Result, stopped: Option<Exit>) -> Result {
    let of = counted(report.cases.len(), "case");
    let refuse = |exit, verb: &str, select: fn(&Outcome) -> Option<&str>| {
        let mut found = report.cases.iter().filter_map(|case| Some((case, select(&case.outcome)?)));
        let Some((Record { kernel, shape, .. }, why)) = found.next() else { return Ok(()) };
        let count = 1 + found.count();
        let problem = format!("{count} of {of} {verb}; the first is {kernel} {shape}: {why}");
        Err(Failure::new(exit, problem))
    };
    refuse(Exit::Refuted, "failed", |outcome| match outcome {
        Outcome::Failed { difference } => Some(difference),
        _ => None,
    })?;
    completed?;
    if let Some(exit) = stopped {
        let problem =
            format!("interrupted after {} of {}", report.cases.len(), counted(asked, "case"));
        return Err(Failure::new(exit, problem));
    }
    refuse(Exit::Device, "could not run", |outcome| match outcome {
        Outcome::Unmeasured { reason } => Some(reason),
        _ => None,
    })
}

/// A live line on a terminal, plain lines at intervals elsewhere.
struct Progress {
    bar: Option<ProgressBar>,
    printed: Instant,
    done: usize,
    count: usize,
    last: String,
}

const INTERVAL: Duration = Duration::from_secs(10);

impl Progress {
    fn new(count: usize) -> Self {
        let bar = progress::bar("{bar:20.cyan/blue} {pos}/{len} {wide_msg}");
        if let Some(bar) = &bar {
            bar.set_length(count as u64);
        }
        Self { bar, printed: Instant::now(), done: 0, count, last: String::new() }
    }

    fn start(&self, case: &Case) {
        if let Some(bar) = &self.bar {
            let (kernel, shape, _) = case.names();
            bar.set_message(format!("{kernel} {shape}   {}", self.last));
        }
    }

    fn finish_case(&mut self, record: &Record) {
        self.done += 1;
        let brief = table::brief(record);
        if let Some(bar) = &self.bar {
            if matches!(record.outcome, Outcome::Failed { .. }) {
                bar.println(&brief);
            }
            bar.inc(1);
        } else if self.printed.elapsed() >= INTERVAL {
            self.printed = Instant::now();
            note(format_args!("{}/{} {brief}", self.done, self.count));
        }
        self.last = format!("(before: {brief})");
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

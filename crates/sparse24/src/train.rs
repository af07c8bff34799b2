//! `sparse24 train`: trains a run from its first step to its last.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use sparse24_lab::{
    report,
    runs::{Keep, difference},
    search::{SearchOptions, SearchResults},
};
use sparse24_run::{
    Error,
    config::{Config, NEUTRAL, dotted, table_of},
    data::TokenizerKind,
    disk,
    interchange::Format,
    run::{
        Asked, Ended, Given, LambdaOrigin, Observer, Part, Provenance, Resume, Run, RunDirectory,
        StepMetrics, Summary, covers, facts, has_config, open_data, open_data_with, run_config,
    },
};
use sparse24_train::model::ModelSpec;

use crate::{
    configure::Configure,
    failure::{Exit, Failure, Result},
    lambda_search,
    output::{counted, json_line, note, note_outside, say, word},
    progress::{Progress, WorkProgress},
    ranks::{Member, Ranks},
    runs,
    signals::{self, Signals},
    tensorboard::{self, Events},
    threads::on_threads,
    weights::Initial,
};

/// Pre-train a model; by default a small GPT-2 with fully sparse training on the embedded corpus
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    configure: Configure,
    /// Run directory [default: runs/PRESET-TIME]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Start with the weights and shape of a model: a run, a checkpoint or a Hugging Face folder
    #[arg(long, value_name = "PATH")]
    init_from: Option<PathBuf>,
    /// Replay the kernel choices of a run (or of a plans.json) instead of timing kernels: with the
    /// same seed, build and GPU model, the bits are the same
    #[arg(long, value_name = "RUN")]
    plans: Option<PathBuf>,
    /// Factor of masked decay, or auto for the one that a search from random weights recommends
    #[arg(long, value_name = "auto|VALUE", allow_negative_numbers = true)]
    lambda: Option<String>,
    /// Finished search for --lambda auto [default: search first, in the run directory]
    #[arg(long, value_name = "DIR")]
    lambda_search: Option<PathBuf>,
    /// Resume the run in --out if there is one, so that one command serves the first start and
    /// every restart
    #[arg(long, requires = "out")]
    resume_or_start: bool,
    #[command(flatten)]
    reporting: Reporting,
    #[command(flatten)]
    ranks: Ranks,
}

/// How a run reports its progress and result.
#[derive(clap::Args, Debug, Clone)]
pub(crate) struct Reporting {
    /// Print the summary as one JSON object
    #[arg(long)]
    json: bool,
    /// Also write TensorBoard event files to RUN/tensorboard; a run that has any continues them
    #[arg(long)]
    tensorboard: bool,
}

pub(crate) fn run(args: &Args) -> Result {
    signals::load()?;
    // The model to start from may be on the machine of rank 0 alone, and decides settings.
    let settings = match args.init_from {
        None => Some(args.configure.resolve()?),
        Some(_) => None,
    };
    let threads = settings.as_ref().map_or(0, |config| config.backend.threads);
    let asked = settings.as_ref().map_or_else(|| args.configure.asked(), |s| Ok(s.decisive()))?;
    args.ranks.join(&facts(asked), |member| match member.leads() {
        true => lead(args, member),
        false => member.follow(threads),
    })
}

/// Starts the run, or resumes it if that is asked for.
fn lead(args: &Args, member: Member) -> Result {
    let there = match args.out.as_deref().filter(|_| args.resume_or_start) {
        Some(out) if has_config(out)? => Some((out, run_config(out)?)),
        _ => None,
    };
    let (mut initial, mut given) = (None, Vec::new());
    match (args.init_from.as_deref(), &there) {
        (None, _) => {}
        // The run already has weights; its own settings replace the initial model's.
        (_, Some((_, there))) => {
            let mut settings = dotted(table_of(there));
            settings.retain(|key, _| key.starts_with("model.") || key.starts_with("data."));
            given.extend(settings.into_iter().map(|(key, value)| format!("{key}={value}")));
        }
        (Some(path), None) if path.as_os_str() == "resume" && !path.exists() => {
            let problem = "resume: does not exist; to continue a run, use `sparse24 resume RUN`";
            return Err(Failure::new(Exit::Input, problem));
        }
        (Some(path), None) => given = initial.insert(Initial::read(path)?).settings(),
    }
    let mut config = args.configure.resolve_over(&given)?;
    let searches = set_lambda(args, &mut config)?;
    if let Some((out, there)) = there {
        let settings = changed_settings(args, config, &there, out)?;
        let how = Resume { settings, keeps_data: true, ..Resume::default() };
        return resume(out, &how, &args.reporting, member);
    }
    if searches && args.init_from.is_some() {
        let problem = "--lambda auto: a search starts from random weights, so its result does not \
                       hold for --init-from; set --lambda to a number";
        return Err(Failure::new(Exit::Usage, problem));
    }
    let world = member.world();
    if world > 1 && args.configure.sets("batch.replicas") && config.batch.replicas.get() == 1 {
        let problem =
            format!("batch.replicas: expected a multiple of the number of ranks, {world}, found 1");
        return Err(Failure::new(Exit::Usage, problem));
    }
    config.check_corpus()?;
    initial.as_mut().map_or(Ok(()), |initial| initial.check(&config))?;
    let claimed = args.out.is_none().then(|| Claimed::new(&config.preset)).transpose()?;
    let out = args.out.clone().or(claimed.as_ref().map(|claimed| claimed.0.clone()));
    let out = out.expect("named or claimed");
    // Taken once, so that no signal is lost between the search and the run.
    let signals = Signals::take()?;
    // The default directory contains the time, so the command that continues must name it.
    let named = [Path::new("--out"), &out];
    let more = if args.out.is_some() { &named[..0] } else { &named };
    let lambda = match searches {
        true => Some(choose_lambda(args, &mut config, &out, more, &signals)?),
        false => None,
    };
    on_threads(member.threads(config.backend.threads), || {
        let mut progress = WorkProgress::new("reading the shards, once");
        let tokenizer = initial.as_ref().and_then(|initial| initial.tokenizer.as_ref());
        let data = open_data_with(&config, tokenizer, &mut |done, all| {
            progress.update(done, all);
            signals.received().map_or(Ok(()), |_| Err(Error::Interrupted))
        });
        drop(progress);
        let interrupted = |exit| {
            let again = runs::again(more);
            let sentence = format!("interrupted before the first step; continue with: {again}");
            Failure::new(exit, sentence)
        };
        let data = match (data, signals.received()) {
            (Err(Error::Interrupted), Some(exit)) => return Err(interrupted(exit)),
            (data, _) => data?,
        };
        let remarks = initial.as_ref().map(|initial| initial.remarks(data.tokenizer()));
        let initial = initial.map(|initial| initial.for_data(&config, &data)).transpose()?;
        if let Some(exit) = signals.received() {
            return Err(interrupted(exit));
        }
        let given = Given {
            weights: initial.as_deref(),
            plans: args.plans.as_deref(),
            lambda: lambda.as_ref(),
        };
        let run = Run::start_in(member.group, config, data, given, &out);
        let run = run.map_err(|error| match has_config(&out) {
            Ok(true) if args.resume_or_start => {
                let path = out.display();
                let problem = format!(
                    "{path}: another process has started this run in the meantime ({error}); \
                     run the command again once that process has ended"
                );
                Failure::new(Exit::Io, problem)
            }
            _ => error.into(),
        })?;
        remarks.iter().flatten().for_each(note);
        drive(run, &args.reporting, signals)
    })
}

/// Returns the settings, each `key=value`, that the command line changes in a run. Refuses changes
/// to settings that affect bits.
fn changed_settings(
    args: &Args,
    mut config: Config,
    run: &Config,
    out: &Path,
) -> Result<Vec<String>> {
    let keys = args.configure.keys()?;
    let (asked, mut there) = (config.decisive(), run.decisive());
    let of_another_method = asked.get("method.name") != there.get("method.name");
    // The first start may have chosen these itself.
    for (key, is_chosen) in [
        ("batch.replicas", !asked.contains_key("batch.replicas")),
        // Another method has a lambda of its own.
        ("method.lambda", args.lambda.as_deref() == Some("auto") || of_another_method),
        // Prepared data name their own tokenizer, so a default is not compared.
        ("data.tokenizer", !keys.contains("data.tokenizer")),
    ] {
        if is_chosen {
            there.remove(key);
            there.extend(asked.get(key).map(|value| (key.to_owned(), value.clone())));
        }
    }
    if let Some((key, values)) = difference(&asked, &there) {
        let [asked, there] = values.map(|value| value.unwrap_or("its default"));
        let path = word(out);
        let problem = format!(
            "{key}: expected {there} as in the run {path}, found {asked}; to change it, run \
             `sparse24 resume {path} --set {key}=...`"
        );
        return Err(Failure::new(Exit::Usage, problem));
    }
    for (path, there) in [
        (&mut config.data.path, &run.data.path),
        (&mut config.run.flip_reference, &run.run.flip_reference),
    ] {
        if disk::is_same_place(path, there) {
            path.clone_from(there);
        }
    }
    let [asked, there] = [&config, run].map(|config| dotted(table_of(config)));
    let is_named = |key: &str| keys.iter().any(|name| covers(name, key));
    // A run keeps its preset.
    let is_changed = |key: &&str| *key != "preset" && is_named(key) && asked[*key] != there[*key];
    let changed = NEUTRAL.into_iter().filter(is_changed);
    Ok(changed.map(|key| format!("{key}={}", asked[key])).collect())
}

/// Sets lambda if `--lambda` is a number. Returns whether it asks for a search instead.
fn set_lambda(args: &Args, config: &mut Config) -> Result<bool> {
    let refuse = |problem: String| Err(Failure::new(Exit::Usage, problem));
    let asked = args.lambda.as_deref();
    if args.lambda_search.is_some() && asked != Some("auto") {
        return refuse("--lambda-search: requires --lambda auto".to_owned());
    }
    let Some(asked) = asked else { return Ok(false) };
    if config.lambda().is_none() {
        let name = &config.method.name;
        return refuse(format!("--lambda: the method {name} has no masked decay"));
    }
    if asked != "auto" {
        let Ok(value) = asked.parse() else {
            return refuse(format!("--lambda: expected auto or a number, found {asked:?}"));
        };
        config.method.lambda = value;
        config.check()?;
    }
    Ok(asked == "auto")
}

/// Sets the lambda that a search recommends, and returns its origin.
fn choose_lambda(
    args: &Args,
    config: &mut Config,
    out: &Path,
    more: &[&Path],
    signals: &Signals,
) -> Result<LambdaOrigin> {
    let folder = args.lambda_search.clone().unwrap_or_else(|| out.join("lambda-search"));
    let found = if args.lambda_search.is_some() {
        SearchResults::read(&folder)?
    } else {
        RunDirectory::check_free(out)?;
        let (wanted, keep) = (SearchOptions::default(), Keep::Results);
        let report =
            lambda_search::search(config.clone(), wanted, &folder, 1, keep, more, signals)?;
        if let Some(advice) = &report.advice {
            return Err(lambda_search::infeasible(&format!(
                "{advice}; for other candidates, run `sparse24 lambda-search --candidates A,B,C \
                 --out DIR` with these settings, then this command with --lambda-search DIR"
            )));
        }
        report
    };
    let origin = found.origin(&folder, config, &open_data(config)?)?;
    note(format_args!(
        "lambda {:e} (mu = {:.3}), recommended by the search in {}",
        origin.lambda,
        origin.mu,
        folder.display()
    ));
    config.method.lambda = origin.lambda;
    Ok(origin)
}

/// Continues a run as rank 0.
pub(crate) fn resume(path: &Path, how: &Resume, reporting: &Reporting, member: Member) -> Result {
    if !has_config(path)? && RunDirectory::check_free(path).is_ok() {
        let path = word(path);
        let problem = format!(
            "{path}: there is no run yet, as there is no config.toml; `sparse24 train --out \
             {path}` starts one, and with --resume-or-start also resumes it"
        );
        return Err(Failure::new(Exit::NoRun, problem));
    }
    // For the thread count; the run reads its configuration again under its lock.
    let config = run_config(path)?.with_settings(&how.settings)?;
    on_threads(member.threads(config.backend.threads), || {
        let run = Run::resume_in(member.group, path, how, |config| {
            note_outside("data.path", &config.data.path);
            note_outside("run.flip_reference", &config.run.flip_reference);
            Ok(())
        })?;
        let signals = Signals::take()?;
        if run.trainer().step() == config.steps {
            let more = config.steps.saturating_mul(2);
            note(format!("for more steps, set them, e.g. `--set steps={more}`"));
        }
        drive(run, reporting, signals)
    })
}

/// Trains a run to its end and reports its progress.
pub(crate) fn drive(run: Run, reporting: &Reporting, signals: Signals) -> Result {
    let model = run.trainer().recipe().model.clone();
    let (summary, report) = finish(run, reporting.tensorboard, signals)?;
    conclude(&summary, &model, report.as_deref(), reporting)
}

/// Trains a run to its end and writes its report; the path of the report if it was written.
pub(crate) fn finish(
    mut run: Run,
    tensorboard: bool,
    signals: Signals,
) -> Result<(Summary, Option<PathBuf>)> {
    let config = run.config().clone();
    note_start(&run, &config);
    run.interrupt_on(signals.any());
    let (path, report) = (run.path().to_owned(), run.path().join(report::FILE));
    let keeps_report = run.lost_metrics() > 0 && keep_report(&run, &report)?;
    let has_events = tensorboard || run.path().join(tensorboard::FOLDER).is_dir();
    let events = has_events.then(|| Events::create(run.path(), run.trainer().step())).transpose();
    let events = events.map_err(|problem| Failure::new(Exit::Io, problem))?;
    let mut watcher =
        Watcher { progress: Progress::new(run.trainer().step(), config.steps), signals, events };
    let ended = run.train(&mut watcher);
    watcher.progress.finish();
    // After a failure too: that is when the report is needed most.
    let (path, report) = match run.place() {
        Some(moved) if moved != path => (moved.clone(), moved.join(report::FILE)),
        _ => (path, report),
    };
    let again = format!("`sparse24 report {}` writes one", word(&path));
    let written = if keeps_report { Ok(()) } else { report::write(&[path], &report).map(drop) };
    if let Err(error) = &written {
        note(format_args!("no report was written: {error}; {again}"));
    }
    let report = written.is_ok().then_some(report);
    match ended? {
        Ended::Finished(summary) => {
            let run = run.place().unwrap_or(summary.run);
            Ok((Summary { run, ..summary }, report))
        }
        Ended::Stopped { step } => {
            let exit = watcher.signals.received().unwrap_or(Exit::Interrupted);
            let sentence = format!("interrupted after step {step}");
            let next = match run.place() {
                Some(path) => format!("resume with: sparse24 resume {}", word(&path)),
                None => "the run directory was moved or removed meanwhile".to_owned(),
            };
            Err(Failure::new(exit, format!("{sentence}; {next}")))
        }
    }
}

/// Keeps a report that shows metrics the run has lost, unless it was made after the loss (it then
/// counts the missing steps). Returns whether it stays in place because no step is left to report.
fn keep_report(run: &Run, report: &Path) -> Result<bool, Error> {
    let missing = report::missing(run.lost_metrics() as usize);
    let is_since = |page: Vec<u8>| String::from_utf8_lossy(&page).contains(&missing);
    if !disk::exists(report)? || disk::read_small(report, 64 << 20).is_ok_and(is_since) {
        return Ok(false);
    }
    let is_finished = run.trainer().step() >= run.config().steps;
    let name = if is_finished { report::FILE.to_owned() } else { disk::keep(report)?.1 };
    note(format_args!("the report, which shows the lost metrics, is kept as {name}"));
    Ok(is_finished)
}

/// Prints what will be trained, on what, and with which settings.
fn note_start(run: &Run, config: &Config) {
    let trainer = run.trainer();
    let parameters: usize = trainer.parameters().iter().map(|p| p.weight.elements()).sum();
    let (recipe, device) = (trainer.recipe(), trainer.backend().device());
    let lambda = config.lambda().map_or_else(String::new, |lambda| format!(" (lambda {lambda:e})"));
    note(format_args!(
        "{parameters} parameters, {} tokens a step, {} of {}{lambda} on {}: {}",
        recipe.tokens_per_step(),
        counted(config.steps as usize, "step"),
        config.method.name,
        run.data().source().display(),
        run.path().display()
    ));
    if run.data().scan().is_some() && config.data.tokenizer == TokenizerKind::Byte {
        note(
            "the token files name no tokenizer, so their ids are read as bytes; set \
             data.tokenizer if they are not",
        );
    }
    let products = match recipe.method.sparse_phase().product_words() {
        [sparse, _] if sparse.is_empty() => String::new(),
        [_, dense] if dense.is_empty() => {
            format!("; sparse products are {}", device.sparse_products)
        }
        [sparse, dense] => {
            let how = device.sparse_products;
            format!("; sparse products ({sparse}) are {how}; the others ({dense}) are dense")
        }
    };
    note(format_args!("{} ({}){products}", device.backend, device.description));
    let mut overrides = config.overrides();
    // They would fill the screen.
    overrides.retain(|setting| !setting.starts_with("task.classes="));
    let mut overrides = overrides.join(" ");
    if !overrides.is_empty() {
        overrides.insert_str(0, " with ");
    }
    note(format_args!("{}; preset {}{overrides}", Provenance::build(), config.preset));
    config.remarks().iter().chain(run.notices()).for_each(note);
}

struct Watcher {
    progress: Progress,
    signals: Signals,
    events: Option<Events>,
}

impl Observer for Watcher {
    fn stepped(&mut self, metrics: &StepMetrics) {
        self.progress.step(metrics);
        if let Some(Err(error)) = self.events.as_mut().map(|events| events.append(metrics)) {
            let step = metrics.step;
            note(format_args!("TensorBoard file ends before step {step}: {error}"));
            self.events = None;
        }
    }

    fn working(&mut self, part: Part, done: usize, of: usize) {
        self.progress.work(part, done, of);
    }

    fn said(&mut self, line: &str) {
        note(line);
    }

    fn asked(&mut self) -> Asked {
        self.signals.asked()
    }
}

fn conclude(
    summary: &Summary,
    model: &ModelSpec,
    report: Option<&Path>,
    reporting: &Reporting,
) -> Result {
    if reporting.json {
        say!("{}", json_line(summary));
        return Ok(());
    }
    let (steps, run) = (counted(summary.steps as usize, "step"), word(&summary.run));
    say!("validation loss {:.4} after {steps}, {:.0} s", summary.val_loss, summary.seconds);
    if !summary.run.is_dir() {
        note(format_args!(
            "{}: the run directory was moved or removed meanwhile",
            summary.run.display()
        ));
        return Ok(());
    }
    for (name, score) in &summary.scores {
        say!("{name:15} {score:.4}");
    }
    say!("run directory   {}", summary.run.display());
    if let Some(report) = report {
        say!("report          {}", report.display());
    }
    let has_text = model.generates() && summary.run.join("tokenizer.json").is_file();
    let is_exportable = Format::of(model).is_ok();
    let translates = matches!(model, ModelSpec::Transformer(_));
    let next = [
        (has_text, format!("sample {run}")),
        (translates, format!("translate {run} --input FILE")),
        (is_exportable, format!("export {run} DIR")),
    ];
    let next: Vec<_> =
        next.iter().filter(|(is, _)| *is).map(|(_, next)| format!("sparse24 {next}")).collect();
    if !next.is_empty() {
        say!("next            {}", next.join(" | "));
    }
    Ok(())
}

/// A new directory `runs/<name>-<UTC time>`, with a number if another run has that name. It is
/// removed in the end if it is still empty.
pub(crate) struct Claimed(pub(crate) PathBuf);

impl Claimed {
    pub(crate) fn new(prefix: &str) -> Result<Self> {
        let time = sparse24_run::run::timestamp(std::time::SystemTime::now());
        let name = Path::new("runs").join(format!("{prefix}-{time}"));
        let failed = |path: &Path, error: io::Error| {
            Failure::new(Exit::Io, format!("cannot create {}: {error}", path.display()))
        };
        fs::create_dir_all("runs").map_err(|error| failed(Path::new("runs"), error))?;
        let (mut path, mut number) = (name.clone(), 1);
        loop {
            match fs::create_dir(&path) {
                Ok(()) => return Ok(Self(path)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(failed(&path, error)),
            }
            number += 1;
            path.clone_from(&name);
            path.as_mut_os_string().push(format!("-{number}"));
        }
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        // Anything but an empty directory stays.
        let _ = fs::remove_dir(&self.0);
    }
}

//! `sparse24 train`: a run from its first step to its last.

use std::path::{Path, PathBuf};

use sparse24_lab::{
    report,
    search::{Report, Wanted},
    series::Keep,
};
use sparse24_run::{
    Error,
    config::Config,
    run::{
        Asked, Ended, Given, LambdaOrigin, Observer, Provenance, Run, RunDirectory, StepMetrics,
        Summary, open_dataset,
    },
};
use sparse24_train::method::PhaseKind;

use crate::{
    configure::Configure,
    failure::{Exit, Failure},
    lambda_search,
    output::{counted, note, say, word},
    progress::{Progress, Seen},
    series,
    signals::Signals,
    tensorboard::{self, Events},
    weights,
};

/// Pre-train a model: with nothing else, a small GPT-2 with fully sparse training on the embedded
/// corpus
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    configure: Configure,
    /// The run directory; runs/PRESET-TIME otherwise
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Begin with the weights of a run, a checkpoint or a Hugging Face GPT-2
    #[arg(long, value_name = "PATH")]
    init_from: Option<PathBuf>,
    /// Replay the timed choices of a run (or of a plans.json) instead of timing: with its seed, a
    /// GPU gives its bits
    #[arg(long, value_name = "RUN")]
    plans: Option<PathBuf>,
    /// The factor of masked decay, or auto for what a search recommends
    #[arg(long, value_name = "auto|VALUE", allow_negative_numbers = true)]
    lambda: Option<String>,
    /// The finished search of --lambda auto; otherwise one is made first, in the run directory
    #[arg(long, value_name = "DIR")]
    lambda_search: Option<PathBuf>,
    #[command(flatten)]
    telling: Telling,
}

/// How a run tells what it does.
#[derive(clap::Args, Debug, Clone)]
pub(crate) struct Telling {
    /// The summary as one JSON object on standard output
    #[arg(long)]
    json: bool,
    /// Also write event files for TensorBoard, to RUN/tensorboard; a run that has some goes on with
    /// them
    #[arg(long)]
    tensorboard: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let mut config = args.configure.resolve()?;
    config.check_corpus()?;
    let out = args.out.clone().unwrap_or_else(|| default_directory(&config));
    // One pair of ears for the search and the run: what comes between the two is heard as well.
    let signals = Signals::take()?;
    // The directory of a run that gets none has the time in its name.
    let named = [Path::new("--out"), &out];
    let more = if args.out.is_some() { &named[..0] } else { &named };
    let lambda = choose_lambda(args, &mut config, &out, more, &signals)?;
    on_threads(&config.clone(), || {
        let dataset = open_dataset(&config)?;
        let vocabulary = dataset.vocabulary() as usize;
        let initial = args
            .init_from
            .as_deref()
            .map(|path| weights::read(path, &config, vocabulary))
            .transpose()?;
        if let Some(exit) = signals.received() {
            return Err(Failure::new(
                exit,
                format!("interrupted before the first step; go on with: {}", series::again(more)),
            ));
        }
        let given = Given {
            weights: initial.as_deref(),
            plans: args.plans.as_deref(),
            lambda: lambda.as_ref(),
        };
        let run = Run::start(config, dataset, given, &out).map_err(|error| match (&args.init_from, error) {
            (Some(path), Error::Parameter { name, problem }) => {
                let sentence = format!("{}: {name}: {problem}; the weights to begin with must have the model's shape", path.display());
                Failure::new(Exit::Input, sentence)
            }
            (_, error) => error.into(),
        })?;
        drive(run, &args.telling, signals)
    })
}

/// Sets lambda as asked; gives where it comes from, if from a search.
fn choose_lambda(
    args: &Args,
    config: &mut Config,
    out: &Path,
    more: &[&Path],
    signals: &Signals,
) -> Result<Option<LambdaOrigin>, Failure> {
    let refuse = |problem: &str| Err(Failure::new(Exit::Usage, problem));
    let asked = args.lambda.as_deref();
    if args.lambda_search.is_some() && asked != Some("auto") {
        return refuse("--lambda-search: is for --lambda auto, which is not asked for");
    }
    let Some(asked) = asked else { return Ok(None) };
    if asked != "auto" {
        let Ok(value) = asked.parse() else {
            return refuse(&format!("--lambda: expected auto or a number, found {asked:?}"));
        };
        config.method.lambda = value;
        config.check()?;
        return Ok(None);
    }
    let folder = args.lambda_search.clone().unwrap_or_else(|| out.join("lambda-search"));
    let found = match &args.lambda_search {
        Some(folder) => Report::read(folder)?,
        None => {
            RunDirectory::check_free(out)?;
            let report = lambda_search::search(
                config.clone(),
                Wanted::default(),
                &folder,
                1,
                Keep::Results,
                more,
                signals,
            )?;
            if let Some(advice) = &report.advice {
                // What the advice asks for are options of the other command.
                let way = "to do so, run `sparse24 lambda-search --candidates A,B,C --out DIR` with these settings, \
                           then this command with --lambda-search DIR";
                return Err(lambda_search::infeasible(&format!("{advice}; {way}")));
            }
            report
        }
    };
    let origin = found.origin(&folder, config, &open_dataset(config)?)?;
    note(format_args!(
        "lambda {:e} (mu = {:.3}), by the search in {}",
        origin.lambda,
        origin.mu,
        folder.display()
    ));
    config.method.lambda = origin.lambda;
    Ok(Some(origin))
}

/// Runs on the configured number of threads.
pub(crate) fn on_threads(
    config: &Config,
    work: impl FnOnce() -> Result<(), Failure> + Send,
) -> Result<(), Failure> {
    let refused = |error: sparse24_cpu::Error| {
        Failure::new(Exit::Io, format!("backend.threads: {error}; ask for fewer"))
    };
    sparse24_cpu::on_threads(config.backend.threads, work).map_err(refused)?
}

/// Trains a run to its end, in sight.
pub(crate) fn drive(mut run: Run, telling: &Telling, signals: Signals) -> Result<(), Failure> {
    let config = run.config().clone();
    let recipe = run.trainer().recipe();
    let parameters: usize =
        run.trainer().parameter_shapes().map(|(_, [rows, columns])| rows * columns).sum();
    let device = run.trainer().backend().device();
    note(format_args!(
        "{} parameters, {} tokens a step, {} of {} on {}: {}",
        parameters,
        recipe.tokens_per_step(),
        counted(config.steps as usize, "step"),
        config.method.name,
        run.dataset().source().display(),
        run.path().display()
    ));
    let is_sparse = recipe.method.phases.iter().any(|phase| phase.kind() == PhaseKind::Sparse);
    let products = if is_sparse {
        format!("; sparse products are {}", device.sparse_products)
    } else {
        String::new()
    };
    note(format_args!("{} ({}){products}", device.backend, device.description));
    let overrides = config.overrides();
    let with =
        if overrides.is_empty() { String::new() } else { format!(" with {}", overrides.join(" ")) };
    note(format_args!("{}; preset {}{with}", Provenance::build(), config.preset));
    if let Some(remark) = config.remark() {
        note(remark);
    }
    for notice in run.notices() {
        note(notice);
    }
    run.interrupt_on(signals.any());
    let is_told = telling.tensorboard || run.path().join(tensorboard::FOLDER).is_dir();
    let events = is_told.then(|| Events::begin(run.path(), run.trainer().step())).transpose();
    let events = events.map_err(|problem| Failure::new(Exit::Io, problem))?;
    let mut watcher =
        Watcher { progress: Progress::new(run.trainer().step(), config.steps), signals, events };
    let ended = run.train(&mut watcher);
    watcher.progress.finish();
    // However it ended: a page of a run that failed is wanted most.
    if let Err(error) = report::write(&[run.path().to_owned()], &run.path().join(report::FILE)) {
        note(format_args!("no report was written: {error}"));
    }
    match (ended?, watcher.signals.received()) {
        (Ended::Finished(summary), _) => conclude(&summary, telling),
        (Ended::Stopped { step }, exit) => {
            let sentence = format!(
                "interrupted after step {step}; resume with: sparse24 resume {}",
                word(run.path())
            );
            Err(Failure::new(exit.unwrap_or(Exit::Interrupted), sentence))
        }
    }
}

struct Watcher {
    progress: Progress,
    signals: Signals,
    events: Option<Events>,
}

impl Observer for Watcher {
    fn stepped(&mut self, metrics: &StepMetrics) {
        self.progress.step(Seen {
            step: metrics.step,
            phase: metrics.phase,
            loss: f64::from(metrics.loss),
            flip_rate: metrics.flip_rate,
            tokens_per_second: metrics.tokens_per_s,
            validation_loss: metrics.val_loss,
        });
        if let Some(Err(error)) = self.events.as_mut().map(|events| events.append(metrics)) {
            self.progress.say(&format!(
                "TensorBoard's event file ends before step {}: {error}",
                metrics.step
            ));
            self.events = None;
        }
    }

    fn said(&mut self, line: &str) {
        self.progress.say(line);
    }

    fn asked(&mut self) -> Asked {
        self.signals.asked()
    }
}

fn conclude(summary: &Summary, telling: &Telling) -> Result<(), Failure> {
    if telling.json {
        say!("{}", serde_json::to_string(summary).expect("plain values"));
        return Ok(());
    }
    say!(
        "validation loss {:.4} after {}, {:.0} s",
        summary.val_loss,
        counted(summary.steps as usize, "step"),
        summary.seconds
    );
    say!("run directory   {}", summary.run.display());
    say!("report          {}", summary.run.join(report::FILE).display());
    let run = word(&summary.run);
    let sample = if summary.run.join("tokenizer.json").is_file() {
        format!("sparse24 sample {run} | ")
    } else {
        String::new()
    };
    say!("next            {sample}sparse24 export {run} DIR");
    Ok(())
}

/// `runs/<preset>-<UTC time>`.
fn default_directory(config: &Config) -> PathBuf {
    let time = sparse24_run::run::timestamp(std::time::SystemTime::now());
    Path::new("runs").join(format!("{}-{time}", config.preset))
}

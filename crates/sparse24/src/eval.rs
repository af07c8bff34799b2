//! `sparse24 eval`: the validation loss of models.

use std::{
    cell::RefCell,
    path::{Path, PathBuf},
};

use serde::Serialize;
use sparse24_run::{
    Error, disk,
    run::{Model, RunData, Scores},
    task::{Examples, Judgement, Labels, Split},
};
use sparse24_train::{
    method::PhaseKind,
    nn::BatchShape,
    objective::{Batch, DataError, Evaluation},
};

use crate::{
    configure::{Computing, load},
    failure::{Exit, Failure, Result},
    output::{counted, json_line, note, note_outside, say, word},
    progress::WorkProgress,
    threads::on_threads,
};

/// Compute the mean loss of runs or checkpoints over the validation split
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Run directories or checkpoints
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    #[command(flatten)]
    choice: Choice,
    #[command(flatten)]
    computing: Computing,
    /// Data to use instead of the run's: a text file, a folder of text files, or token shards
    /// (only shards if the model has no tokenizer); for a fine-tuned model, a folder of its task,
    /// or a file of questions
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// Validation tokens to evaluate, in evenly spaced sequences; 0 is all
    #[arg(long, value_name = "NUMBER", default_value = "0")]
    tokens: usize,
    /// Write the answers of a question-answering task to this file, as JSON for SQuAD's evaluation
    /// script
    #[arg(long, value_name = "FILE")]
    predictions: Option<PathBuf>,
    /// Also translate the validation split of a Transformer, and print the BLEU score
    #[arg(long)]
    bleu: bool,
    /// Print one JSON object per run
    #[arg(long)]
    json: bool,
}

/// A model that the user names.
#[derive(clap::Args, Debug)]
pub(crate) struct Which {
    /// Run directory or checkpoint
    pub(crate) run: PathBuf,
    #[command(flatten)]
    choice: Choice,
}

/// The checkpoint and the weights of a run.
#[derive(clap::Args, Debug)]
struct Choice {
    /// Take the run's checkpoint with the lowest validation loss, not the newest
    #[arg(long)]
    best: bool,
    /// Take the moving average of the weights, which a run with optimizer.ema_decay keeps; in a
    /// sparse phase, it is pruned by the masks of the weights
    #[arg(long)]
    ema: bool,
}

impl Which {
    pub(crate) fn read(&self) -> Result<Model, Error> {
        self.choice.read(&self.run)
    }
}

impl Choice {
    fn read(&self, run: &Path) -> Result<Model, Error> {
        let model = if self.best { Model::read_best(run) } else { Model::read(run) }?;
        if self.ema { model.averaged() } else { Ok(model) }
    }
}

/// Data that show how many of its sequences were evaluated.
struct Shown<'a> {
    data: Box<dyn Evaluation + 'a>,
    progress: RefCell<WorkProgress>,
}

impl Evaluation for Shown<'_> {
    fn sequences(&self) -> usize {
        self.data.sequences()
    }

    fn fill(&self, first: usize, shape: BatchShape, batch: &mut Batch) -> Result<(), DataError> {
        self.progress.borrow_mut().update(first as u64, self.sequences() as u64);
        self.data.fill(first, shape, batch)
    }
}

#[derive(Serialize)]
struct Report {
    run: String,
    step: u32,
    phase: PhaseKind,
    /// Whether the weights are their moving average.
    #[serde(skip_serializing_if = "<&bool as std::ops::Not>::not")]
    ema: bool,
    loss: f64,
    /// Absent unless targets are tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    perplexity: Option<f64>,
    /// Number of targets.
    tokens: usize,
    /// Their kind.
    targets: &'static str,
    #[serde(skip_serializing_if = "Scores::is_empty")]
    scores: Scores,
    /// BLAKE3 of the masks.
    #[serde(skip_serializing_if = "Option::is_none")]
    masks: Option<String>,
    /// The corpus in words.
    #[serde(skip)]
    data: String,
}

pub(crate) fn run(args: &Args) -> Result {
    if args.predictions.is_some() && args.runs.len() > 1 {
        let problem = "--predictions: writes the answers of a single run; name only one";
        return Err(Failure::new(Exit::Usage, problem));
    }
    let predictions = args.predictions.as_deref().map(disk::new_file).transpose()?;
    let is_table = args.runs.len() > 1 && !args.json;
    let width = args.runs.iter().map(|run| word(run).len()).max().unwrap_or(0);
    if is_table {
        say!("{:width$}  {:>8}  phase     loss  perplexity   targets", "run", "step");
    }
    let mut failures = Vec::new();
    for run in &args.runs {
        let report = match evaluate(args, run, predictions.as_deref()) {
            Ok(report) => report,
            Err(failure) if args.runs.len() == 1 || failure.exit() == Exit::Unread => {
                return Err(failure);
            }
            Err(failure) => {
                failure.message().into_iter().for_each(note);
                failures.push(failure);
                continue;
            }
        };
        let Report {
            run, step, phase, ema, loss, perplexity, tokens, targets, scores, data, ..
        } = &report;
        let average = if *ema { ", moving average" } else { "" };
        let perplexity = perplexity.map_or("-".to_owned(), |value| format!("{value:.2}"));
        let scores: String =
            scores.iter().map(|(name, score)| format!("  {name} {score:.4}")).collect();
        if args.json {
            say!("{}", json_line(&report));
        } else if is_table {
            let result = format!("{loss:.4}  {perplexity:>10}  {tokens:>8}{scores}");
            say!("{run:width$}  {step:>8}  {phase:6}  {result}");
        } else if *targets != "tokens" {
            let loss = format!("loss {loss:.4} over {tokens} {targets} of {data}");
            say!("step {step} ({phase}{average}): {loss}{scores}");
        } else {
            say!(
                "step {step} ({phase}{average}): loss {loss:.4} nats per token, \
                 perplexity {perplexity}, over {tokens} tokens of {data}{scores}"
            );
        }
    }
    match failures.first() {
        None => Ok(()),
        Some(first) => Err(Failure::new(
            first.exit(),
            format!("{} of {} not evaluated", failures.len(), counted(args.runs.len(), "run")),
        )),
    }
}

fn evaluate(args: &Args, run: &Path, predictions: Option<&Path>) -> Result<Report> {
    let model = args.computing.choose(args.choice.read(run)?)?;
    let config = model.config.clone();
    on_threads(config.backend.threads, || {
        let data = match &args.data {
            None => {
                note_outside("data.path", &config.data.path);
                model.data()?
            }
            Some(path) => model.other_data(path)?,
        };
        if args.tokens > 0 && matches!(data, RunData::Task(_) | RunData::Images(_)) {
            let problem = "--tokens: a fine-tuned model or a DeiT is evaluated on all examples";
            return Err(Failure::new(Exit::Usage, problem));
        }
        let (found, expected) = match &data {
            RunData::Task(examples) => (examples.outputs(), config.task.outputs),
            data => (data.vocabulary() as usize, model.recipe().model.vocabulary()),
        };
        if found != expected && matches!(data, RunData::Task(_) | RunData::Images(_)) {
            let source = data.source().display();
            let problem = format!("{source}: has {found} classes, the model {expected}");
            return Err(Failure::new(Exit::Input, problem));
        }
        if found > expected {
            let problem = format!(
                "{}: has {found} token ids, but the model {expected}; name data with the ids of \
                 those it was trained on",
                data.source().display()
            );
            return Err(Failure::new(Exit::Input, problem));
        }
        if let RunData::Task(Examples { source, classes, .. }) = &data
            && source.task.labels == Labels::Found
            && source.classes.is_empty()
        {
            let names = classes.join(", ");
            note(format_args!(
                "the model's classes have no names; they are assumed to be, in order, {names:.999}"
            ));
        }
        let (step, phase) = (model.checkpoint.state.step, model.phase().kind());
        let masks = model.checkpoint.mask_hash().map(|hash| hash.to_hex().to_string());
        let mut trainer = load(match &data {
            RunData::Pairs(pairs) => model.for_sentences(pairs.validation.longest()),
            _ => model,
        })?;
        let recipe = trainer.recipe();
        let size = recipe.batch.size;
        let progress = RefCell::new(WorkProgress::new("evaluating"));
        let shown = Shown { data: data.evaluation(recipe, args.tokens), progress };
        let (metrics, Judgement { mut scores, answers }) =
            data.judge(&mut trainer, &shown, size)?;
        if args.bleu {
            drop(shown);
            let mut progress = WorkProgress::new("translating");
            let show = |done, all| progress.update(done as u64, all as u64);
            let Some(bleu) = data.bleu(&mut trainer, show)? else {
                let problem = format!("--bleu: {} does not translate", word(run));
                return Err(Failure::new(Exit::Usage, problem));
            };
            scores.insert("bleu".to_owned(), bleu);
        }
        let loss = metrics.loss();
        if !loss.is_finite() {
            let problem = format!("the loss of step {step} on this data is {loss}");
            return Err(Failure::new(Exit::NonFinite, problem));
        }
        if let Some(path) = predictions {
            if answers.is_empty() {
                let problem = format!("--predictions: {} answers no questions", word(run));
                return Err(Failure::new(Exit::Usage, problem));
            }
            let text = serde_json::to_vec_pretty(&answers).expect("texts");
            disk::write_atomically(path, &text)?;
        }
        let targets = match &data {
            RunData::Text(_) | RunData::Pairs(_) => "tokens",
            RunData::Images(_) => "images",
            RunData::Task(of) if matches!(of.validation, Split::Spans(_)) => "windows",
            RunData::Task(_) => "examples",
        };
        Ok(Report {
            run: word(run),
            step,
            phase,
            ema: args.choice.ema,
            loss,
            perplexity: (targets == "tokens").then(|| loss.exp()),
            tokens: metrics.targets,
            targets,
            scores,
            masks,
            data: data.source().display().to_string(),
        })
    })
}

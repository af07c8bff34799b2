//! `sparse24 eval`: the validation loss of a model.

use std::{cell::RefCell, path::PathBuf};

use serde::Serialize;
use sparse24_run::{data::EvaluationWindows, run::Model};
use sparse24_train::{
    method::PhaseKind,
    nn::BatchShape,
    objective::{Batch, DataError, Evaluation},
};

use crate::{
    failure::{Exit, Failure},
    output::say,
    progress::WorkProgress,
    train::on_threads,
};

/// Compute the mean loss of a run or a checkpoint over the whole validation split
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Run directory or checkpoint
    run: PathBuf,
    /// Data to use instead of the run's: a text file, a folder of text files, or prepared shards
    /// (only shards if the model has no tokenizer)
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// Validation tokens to evaluate, in evenly spaced sequences; 0 is all
    #[arg(long, value_name = "NUMBER", default_value = "0")]
    tokens: usize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Windows that show how many were evaluated.
struct Shown<'a> {
    windows: EvaluationWindows<'a>,
    progress: RefCell<WorkProgress>,
}

impl Evaluation for Shown<'_> {
    fn sequences(&self) -> usize {
        self.windows.count()
    }

    fn fill(&self, first: usize, shape: BatchShape, batch: &mut Batch) -> Result<(), DataError> {
        self.progress.borrow_mut().update(first as u64, self.windows.count() as u64);
        Evaluation::fill(&self.windows, first, shape, batch)
    }
}

#[derive(Serialize)]
struct Report {
    step: u32,
    phase: PhaseKind,
    loss: f64,
    perplexity: f64,
    tokens: usize,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let model = Model::read(&args.run)?;
    let config = model.config.clone();
    on_threads(&config, || {
        let dataset = match &args.data {
            None => model.dataset()?,
            Some(path) => model.other_dataset(path)?,
        };
        let (found, expected) = (dataset.vocabulary() as usize, model.recipe().model.vocabulary());
        if found > expected {
            let problem = format!(
                "the data has {found} token ids, but the model has {expected}: evaluate with the \
                 run's own tokenizer"
            );
            return Err(Failure::new(Exit::Input, problem));
        }
        let windows = dataset.evaluation_windows(config.model.sequence_length, args.tokens);
        let (step, phase) = (model.checkpoint.state.step, model.phase().kind());
        let mut trainer = model.into_trainer()?;
        let size = trainer.recipe().batch.size;
        let progress = RefCell::new(WorkProgress::new("evaluating"));
        let loss = trainer.evaluate(&Shown { windows, progress }, size)?.loss();
        if !loss.is_finite() {
            let problem = format!("the loss of step {step} on this data is {loss}");
            return Err(Failure::new(Exit::NonFinite, problem));
        }
        let (perplexity, tokens) = (loss.exp(), windows.predictions());
        if args.json {
            let report = Report { step, phase, loss, perplexity, tokens };
            say!("{}", serde_json::to_string(&report).expect("plain values"));
        } else {
            say!(
                "step {step} ({phase}): loss {loss:.4} nats per token, \
                 perplexity {perplexity:.2}, over {tokens} tokens of {}",
                dataset.source().display()
            );
        }
        Ok(())
    })
}

//! `sparse24 eval`: the loss of a model on a held-out split.

use std::path::PathBuf;

use serde::Serialize;
use sparse24_run::run::Model;
use sparse24_train::method::PhaseKind;

use crate::{
    failure::{Exit, Failure},
    output::say,
    train::on_threads,
};

/// Mean loss of a run or a checkpoint over the whole held-out split
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// A run directory or a checkpoint
    run: PathBuf,
    /// Other data than the run's: a text file, a folder or prepared shards; only the latter without
    /// a tokenizer
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// One JSON object
    #[arg(long)]
    json: bool,
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
        let vocabulary = model.recipe().model.vocabulary();
        if dataset.vocabulary() as usize > vocabulary {
            let problem = format!(
                "the data have {} token ids, the model has {vocabulary}: evaluate with the run's own tokenizer",
                dataset.vocabulary()
            );
            return Err(Failure::new(Exit::Input, problem));
        }
        let windows = dataset.evaluation_windows(config.model.sequence_length);
        let (step, phase) = (model.checkpoint.state.step, model.phase().kind());
        let mut trainer = model.into_trainer()?;
        let size = trainer.recipe().batch.size;
        let loss = trainer.evaluate(&windows, size)?.loss();
        if !loss.is_finite() {
            return Err(Failure::new(
                Exit::NonFinite,
                format!("the loss of step {step} on these data is {loss}"),
            ));
        }
        let report =
            Report { step, phase, loss, perplexity: loss.exp(), tokens: windows.predictions() };
        if args.json {
            say!("{}", serde_json::to_string(&report).expect("plain values"));
        } else {
            say!(
                "step {step} ({phase}): loss {loss:.4} nats a token, perplexity {:.2}, over {} tokens",
                report.perplexity,
                report.tokens
            );
        }
        Ok(())
    })
}

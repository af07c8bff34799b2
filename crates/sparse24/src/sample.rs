//! `sparse24 sample`: text from a model.

use std::path::PathBuf;

use sparse24_run::run::Model;
use sparse24_train::trainer::Sampler;

use crate::{
    failure::{Exit, Failure},
    output,
    train::on_threads,
};

/// Let a run or a checkpoint continue a text
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// A run directory or a checkpoint
    run: PathBuf,
    /// What it continues; a new line otherwise, or the tokenizer's first token where it has none
    #[arg(long)]
    prompt: Option<String>,
    /// Tokens to draw
    #[arg(long, default_value_t = 256, allow_negative_numbers = true)]
    tokens: usize,
    /// Divides the logits; 0 always takes the likeliest token
    #[arg(long, default_value_t = 0.8, allow_negative_numbers = true)]
    temperature: f32,
    /// Only so many of the likeliest tokens can be drawn
    #[arg(long, default_value_t = 200, allow_negative_numbers = true)]
    top_k: usize,
    /// Of the draws
    #[arg(long, default_value_t = 1337, allow_negative_numbers = true)]
    seed: u64,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    if !(args.temperature.is_finite() && args.temperature >= 0.0) {
        return Err(Failure::new(
            Exit::Usage,
            format!(
                "--temperature: expected a finite number of at least 0, found {}",
                args.temperature
            ),
        ));
    }
    if args.top_k == 0 {
        return Err(Failure::new(Exit::Usage, "--top-k: expected at least 1, found 0"));
    }
    let mut model = Model::read(&args.run)?;
    let Some(tokenizer) = model.tokenizer.take() else {
        let problem = format!(
            "{} has no tokenizer.json: it was trained on token ids without one",
            args.run.display()
        );
        return Err(Failure::new(Exit::Input, problem));
    };
    let config = model.config.clone();
    on_threads(&config, || {
        let mut tokens = match &args.prompt {
            None => tokenizer.encode("\n").unwrap_or_else(|_| vec![0]),
            Some(prompt) => tokenizer
                .encode(prompt)
                .map_err(|error| Failure::new(Exit::Usage, format!("--prompt: {error}")))?,
        };
        if tokens.is_empty() {
            return Err(Failure::new(
                Exit::Usage,
                "--prompt: expected at least one character, found an empty text",
            ));
        }
        let mut trainer = model.into_trainer()?;
        let sampler = Sampler { temperature: args.temperature, top_k: args.top_k, seed: args.seed };
        let mut printed = Printed::default();
        printed.show(&tokenizer.decode(&tokens)?)?;
        for _ in 0..args.tokens {
            // A vocabulary may be padded beyond the tokenizer's.
            let logits = trainer.next_logits(&tokens)?;
            let next =
                sampler.draw(&logits[..tokenizer.vocabulary() as usize], tokens.len() as u32);
            tokens.push(next);
            printed.show(&tokenizer.decode(&[next])?)?;
        }
        printed.end()
    })
}

/// Bytes on their way to the terminal: whole characters only.
#[derive(Default)]
struct Printed {
    pending: Vec<u8>,
}

impl Printed {
    fn show(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        // What is no UTF-8 and cannot become any is replaced; an unfinished character waits.
        let mut waiting = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            waiting = chunk.invalid().len();
            if waiting > 0 {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        let unfinished = waiting > 0
            && std::str::from_utf8(&self.pending).is_err_and(|error| error.error_len().is_none());
        if unfinished {
            text.pop();
        }
        let keep = if unfinished { waiting } else { 0 };
        self.pending.drain(..self.pending.len() - keep);
        output::write(format_args!("{text}"))
    }

    fn end(&self) -> Result<(), Failure> {
        output::line(format_args!("{}", if self.pending.is_empty() { "" } else { "\u{fffd}" }))
    }
}

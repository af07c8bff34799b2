//! `sparse24 sample`: generates text with a model.

use std::path::PathBuf;

use sparse24_run::run::{Model, Sampler};

use crate::{
    failure::{Exit, Failure},
    output,
    train::on_threads,
};

/// Generate text with a run or a checkpoint
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Run directory or checkpoint
    run: PathBuf,
    /// Text to continue [default: a new line, or token 0 if the tokenizer has none]
    #[arg(long)]
    prompt: Option<String>,
    /// Number of tokens to generate
    #[arg(long, default_value_t = 256, allow_negative_numbers = true)]
    tokens: usize,
    /// Divisor of the logits; 0 always takes the most likely token
    #[arg(long, default_value_t = 0.8, allow_negative_numbers = true)]
    temperature: f32,
    /// Sample only from this many most likely tokens
    #[arg(long, default_value_t = 200, allow_negative_numbers = true)]
    top_k: usize,
    /// Seed for the random draws
    #[arg(long, default_value_t = 1337, allow_negative_numbers = true)]
    seed: u64,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let &Args { temperature, top_k, seed, .. } = args;
    let wrong = |problem: String| Err(Failure::new(Exit::Usage, problem));
    if !(temperature.is_finite() && temperature >= 0.0) {
        return wrong(format!(
            "--temperature: expected a finite number of at least 0, found {temperature}"
        ));
    }
    if top_k == 0 {
        return wrong("--top-k: expected at least 1, found 0".to_owned());
    }
    let mut model = Model::read(&args.run)?;
    let Some(tokenizer) = model.tokenizer.take() else {
        let run = args.run.display();
        let problem = format!("{run} has no tokenizer.json: it was trained on bare token ids");
        return Err(Failure::new(Exit::Input, problem));
    };
    let config = model.config.clone();
    on_threads(&config, || {
        let mut tokens = match &args.prompt {
            None => tokenizer.encode("\n").unwrap_or_else(|_| vec![0]),
            Some(prompt) => match tokenizer.encode(prompt) {
                Ok(tokens) if tokens.is_empty() => {
                    return wrong("--prompt: expected at least one character, found none".into());
                }
                Ok(tokens) => tokens,
                Err(error) => return wrong(format!("--prompt: {error}")),
            },
        };
        let mut trainer = model.into_trainer()?;
        let sampler = Sampler { temperature, top_k, seed };
        let mut output = CharacterStream::default();
        output.write(&tokenizer.decode(&tokens)?)?;
        for _ in 0..args.tokens {
            // The model's vocabulary may be padded beyond the tokenizer's.
            let logits = trainer.next_logits(&tokens)?;
            let next =
                sampler.draw(&logits[..tokenizer.vocabulary() as usize], tokens.len() as u32);
            tokens.push(next);
            output.write(&tokenizer.decode(&[next])?)?;
        }
        output.finish()
    })
}

/// Writes bytes to standard output as whole characters.
#[derive(Default)]
struct CharacterStream {
    pending: Vec<u8>,
}

impl CharacterStream {
    /// Replaces invalid UTF-8 and keeps an incomplete last character for the next call.
    fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.pending.extend_from_slice(bytes);
        let last = self.pending.utf8_chunks().last().map_or(&[][..], |chunk| chunk.invalid());
        let is_incomplete =
            std::str::from_utf8(last).is_err_and(|error| error.error_len().is_none());
        let end = self.pending.len() - if is_incomplete { last.len() } else { 0 };
        let whole: Vec<u8> = self.pending.drain(..end).collect();
        output::write(format_args!("{}", String::from_utf8_lossy(&whole)))
    }

    fn finish(&self) -> Result<(), Failure> {
        output::line(format_args!("{}", if self.pending.is_empty() { "" } else { "\u{fffd}" }))
    }
}

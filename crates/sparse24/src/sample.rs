//! `sparse24 sample`: generates text with a model.

use std::path::PathBuf;

use serde_json::json;
use sparse24_run::{config::ModelKind, run::Sampler};

use crate::{
    configure::{Computing, load},
    eval::Which,
    failure::{Exit, Failure, Result},
    output::{self, json_line, say},
    threads::on_threads,
    translate,
};

/// Generate text with a run or a checkpoint
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    computing: Computing,
    /// Text to continue [default: a line feed; if the tokenizer has none, the end of a document, or
    /// token 0]
    #[arg(long)]
    prompt: Option<String>,
    /// File with the text to continue
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    prompt_file: Option<PathBuf>,
    /// Number of texts, with consecutive seeds
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    num_samples: u32,
    /// Number of tokens to generate
    #[arg(long, default_value_t = 256, allow_negative_numbers = true)]
    tokens: usize,
    /// Divisor of the logits; 0 always takes the most likely token
    #[arg(long, default_value_t = 0.8, allow_negative_numbers = true)]
    temperature: f32,
    /// Number of most likely tokens to sample from
    #[arg(long, default_value_t = 200, allow_negative_numbers = true)]
    top_k: usize,
    /// Seed for the random draws
    #[arg(long, default_value_t = 1337, allow_negative_numbers = true)]
    seed: u64,
    /// Print one JSON object per text
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result {
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
    let mut model = args.computing.choose(args.which.read()?)?;
    if !model.recipe().model.generates() {
        let is_tuned = model.recipe().model.prediction().is_some();
        let what = match model.config.model.kind {
            ModelKind::Deit => "a DeiT, which classifies images",
            _ if is_tuned => "fine-tuned to predict classes or values",
            ModelKind::Transformer => "a Transformer, which `sparse24 translate` runs",
            _ => "a BERT",
        };
        let problem = format!("{} does not generate text: it is {what}", args.which.run.display());
        return Err(Failure::new(Exit::Input, problem));
    }
    let Some(tokenizer) = model.tokenizer.take() else {
        let run = args.which.run.display();
        let problem = format!("{run} has no tokenizer.json, so it cannot read or write text");
        return Err(Failure::new(Exit::Input, problem));
    };
    let config = model.config.clone();
    let given = match &args.prompt_file {
        None => args.prompt.clone(),
        Some(path) => Some(translate::read(path)?),
    };
    on_threads(config.backend.threads, || {
        let prompt = match &given {
            None => tokenizer.start_of_text(),
            Some(prompt) => match tokenizer.encode(prompt) {
                Ok(tokens) if tokens.is_empty() => {
                    return wrong(
                        "--prompt: expected text of at least one token, found none".into(),
                    );
                }
                Ok(tokens) => tokens,
                Err(error) => return wrong(format!("--prompt: {error}")),
            },
        };
        let mut trainer = load(model)?;
        for number in 0..u64::from(args.num_samples) {
            let sampler = Sampler { temperature, top_k, seed: seed.wrapping_add(number) };
            let mut tokens = prompt.clone();
            let mut next = || -> Result<u32> {
                // The model's vocabulary may be padded beyond the tokenizer's.
                let logits = trainer.next_logits(&tokens)?;
                let logits = &logits[..tokenizer.vocabulary() as usize];
                if !logits.iter().all(|logit| logit.is_finite()) {
                    let problem = "the model's logits are not finite, so its weights are unusable";
                    return Err(Failure::new(Exit::NonFinite, problem));
                }
                tokens.push(sampler.draw(logits, tokens.len() as u32));
                Ok(tokens[tokens.len() - 1])
            };
            if args.json {
                let drawn = (0..args.tokens).map(|_| next()).collect::<Result<Vec<_>, _>>()?;
                let text = |tokens: &[u32]| -> Result<String> {
                    Ok(String::from_utf8_lossy(&tokenizer.decode(tokens)?).into_owned())
                };
                let (prompt, text) = (text(&prompt)?, text(&drawn)?);
                let (seed, tokens) = (sampler.seed, drawn.len());
                let text = json!({"seed": seed, "prompt": prompt, "text": text, "tokens": tokens});
                say!("{}", json_line(&text));
                continue;
            }
            if number > 0 {
                say!("---------------");
            }
            let mut output = CharacterStream::default();
            output.write(&tokenizer.decode(&prompt)?)?;
            for _ in 0..args.tokens {
                output.write(&tokenizer.decode(&[next()?])?)?;
            }
            output.finish()?;
        }
        Ok(())
    })
}

/// Writes bytes to standard output as whole characters.
#[derive(Default)]
struct CharacterStream {
    pending: Vec<u8>,
}

impl CharacterStream {
    /// Replaces invalid UTF-8 and keeps an incomplete last character for the next call.
    fn write(&mut self, bytes: &[u8]) -> Result {
        self.pending.extend_from_slice(bytes);
        let last = self.pending.utf8_chunks().last().map_or(&[][..], |chunk| chunk.invalid());
        let is_incomplete =
            std::str::from_utf8(last).is_err_and(|error| error.error_len().is_none());
        let end = self.pending.len() - if is_incomplete { last.len() } else { 0 };
        let whole: Vec<u8> = self.pending.drain(..end).collect();
        output::write_made(&String::from_utf8_lossy(&whole))
    }

    fn finish(&self) -> Result {
        output::line(format_args!("{}", if self.pending.is_empty() { "" } else { "\u{fffd}" }))
    }
}

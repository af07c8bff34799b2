//! `sparse24 import`: turns a Hugging Face GPT-2 into a run at step 0.

use std::path::PathBuf;

use sparse24_run::{
    config::preset,
    data::{Tokenizer, TokenizerKind},
    run::save_imported,
};
use sparse24_train::nn::Bias;

use crate::{
    choice,
    failure::{Exit, Failure},
    output::{counted, say},
    weights,
};

/// Convert a Hugging Face GPT-2 to a run that can be evaluated, sampled or trained from
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Folder with config.json and model.safetensors, or the latter with the former beside it
    path: PathBuf,
    /// Run directory to create
    out: PathBuf,
    /// byte or gpt2 [default: chosen by the vocabulary size]
    #[arg(long, value_parser = choice::tokenizer())]
    tokenizer: Option<TokenizerKind>,
}

/// Vocabulary size of GPT-2.
const GPT2: usize = 50_257;
/// The same, padded to a multiple of 64 as in nanoGPT and llm.c. Any other size could be any
/// tokenizer.
const GPT2_PADDED: usize = 50_304;

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let (shape, tensors, bias) = weights::read_gpt2(&args.path)?;
    if matches!(args.tokenizer, Some(TokenizerKind::Character)) {
        let problem = "--tokenizer: a Hugging Face folder does not hold the characters of a char \
                       tokenizer; expected byte or gpt2, or leave it out";
        return Err(Failure::new(Exit::Usage, problem));
    }
    let kind = args.tokenizer.or(match shape.vocab_size {
        GPT2 | GPT2_PADDED => Some(TokenizerKind::Gpt2),
        256 => Some(TokenizerKind::Byte),
        _ => None,
    });
    let tokenizer = kind.map(|kind| Tokenizer::for_text(kind, "")).transpose()?;
    let mut config = preset::imported();
    if let Some(tokenizer) = &tokenizer {
        let (kind, tokens) = (tokenizer.kind(), tokenizer.vocabulary());
        if tokens as usize > shape.vocab_size {
            let problem = format!(
                "--tokenizer: {} has {tokens} tokens, but the model only {}; leave it out",
                kind.name(),
                shape.vocab_size
            );
            return Err(Failure::new(Exit::Usage, problem));
        }
        config.data.tokenizer = kind;
    }
    config.model.layers = shape.n_layer;
    config.model.heads = shape.n_head;
    config.model.d_model = shape.n_embd;
    config.model.d_ff = shape.n_inner;
    config.model.sequence_length = shape.n_positions;
    config.model.activation = shape.activation;
    config.model.bias = bias == Bias::Present;
    config
        .check()
        .map_err(|error| Failure::new(Exit::Input, format!("{}: {error}", args.path.display())))?;
    let count = counted(tensors.len(), "tensor");
    let checkpoint = save_imported(&config, tensors, tokenizer.as_ref(), &args.out)?;
    say!("imported {count} into {}", checkpoint.display());
    if bias == Bias::Absent {
        say!("all biases are zero, so the model has none (model.bias = false)");
    }
    Ok(())
}

//! `sparse24 import`: a Hugging Face GPT-2 becomes a run at step 0.

use std::path::PathBuf;

use sparse24_run::{
    config::preset,
    data::{Tokenizer, TokenizerKind},
    run::save_imported,
};
use sparse24_train::nn::linear24::Bias;

use crate::{
    failure::{Exit, Failure},
    output::{counted, say},
    prepare::tokenizer_names,
    weights,
};

/// Turn a Hugging Face GPT-2 into a run directory, to evaluate, sample or train from
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// A folder with config.json and model.safetensors, or the latter with the former beside it
    path: PathBuf,
    /// The new run directory
    out: PathBuf,
    /// byte, char or gpt2; by the size of the vocabulary otherwise
    #[arg(long, value_parser = tokenizer_names())]
    tokenizer: Option<TokenizerKind>,
}

/// The vocabulary of GPT-2.
const GPT2: usize = 50_257;
/// The same, padded to a multiple of 64 as nanoGPT and llm.c do. Of other sizes nobody knows which
/// ids they hold.
const GPT2_PADDED: usize = 50_304;

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let (shape, tensors, bias) = weights::read_gpt2(&args.path)?;
    if matches!(args.tokenizer, Some(TokenizerKind::Character)) {
        let problem = "--tokenizer: a char tokenizer's characters stand in no Hugging Face folder, expected byte or gpt2, or leave it out";
        return Err(Failure::new(Exit::Usage, problem));
    }
    let tokenizer = match (args.tokenizer, shape.vocab_size) {
        (Some(kind), _) => Some(Tokenizer::for_text(kind, "")?),
        (None, GPT2 | GPT2_PADDED) => Some(Tokenizer::for_text(TokenizerKind::Gpt2, "")?),
        (None, 256) => Some(Tokenizer::Byte),
        (None, _) => None,
    };
    if let Some(tokenizer) =
        tokenizer.as_ref().filter(|tokenizer| tokenizer.vocabulary() as usize > shape.vocab_size)
    {
        let (name, tokens) = (tokenizer.kind().name(), tokenizer.vocabulary());
        let problem = format!(
            "--tokenizer: {name} has {tokens} tokens, the model only {}; leave it out",
            shape.vocab_size
        );
        return Err(Failure::new(Exit::Usage, problem));
    }
    let mut config = preset::imported();
    config.model.layers = shape.n_layer;
    config.model.heads = shape.n_head;
    config.model.d_model = shape.n_embd;
    config.model.d_ff = shape.n_inner;
    config.model.sequence_length = shape.n_positions;
    config.model.bias = bias == Bias::Present;
    if let Some(tokenizer) = &tokenizer {
        config.data.tokenizer = tokenizer.kind();
    }
    config
        .check()
        .map_err(|error| Failure::new(Exit::Input, format!("{}: {error}", args.path.display())))?;
    let count = counted(tensors.len(), "tensor");
    let checkpoint = save_imported(&config, tensors, tokenizer.as_ref(), &args.out)?;
    say!("imported {count} into {}", checkpoint.display());
    if bias == Bias::Absent {
        say!("all of its biases are zero: the model has none (model.bias = false)");
    }
    Ok(())
}

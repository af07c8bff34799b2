//! `sparse24 import`: turns a Hugging Face GPT-2 into a run at step 0.

use std::path::PathBuf;

use sparse24_run::{
    config::{Config, preset},
    data::{Tokenizer, TokenizerKind},
    run::save_imported,
};

use crate::{
    choice,
    failure::{Exit, Failure},
    output::{counted, say},
    weights::Initial,
};

/// Convert a Hugging Face GPT-2 to a run that can be evaluated, sampled or trained from
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Folder with config.json and model.safetensors (or several files and an index), or a weights
    /// file with config.json beside it
    path: PathBuf,
    /// Run directory to create
    out: PathBuf,
    /// Tokenizer of the model: byte or gpt2 [default: the folder's, or that of the vocabulary size]
    #[arg(long, value_parser = choice::tokenizer())]
    tokenizer: Option<TokenizerKind>,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    if matches!(args.tokenizer, Some(TokenizerKind::Character | TokenizerKind::WordPiece)) {
        let problem = "--tokenizer: the name does not give the vocabulary; expected byte or gpt2, \
                       or leave it out";
        return Err(Failure::new(Exit::Usage, problem));
    }
    let initial = Initial::read_gpt2(&args.path, args.tokenizer)?;
    let remarks = initial.remarks(None);
    let Initial { weights, spec, kind, .. } = initial;
    let tokenizer = kind.map(|kind| Tokenizer::for_text(kind, "")).transpose()?;
    let mut settings = Config::shape(&spec);
    if let Some(tokenizer) = &tokenizer {
        let (kind, tokens) = (tokenizer.kind(), tokenizer.vocabulary());
        if tokens as usize > spec.vocabulary {
            let problem = format!(
                "--tokenizer: {} has {tokens} tokens, but the model only {}; leave it out",
                kind.name(),
                spec.vocabulary
            );
            return Err(Failure::new(Exit::Usage, problem));
        }
        settings.push(format!("data.tokenizer={}", kind.name()));
    }
    let config = preset::imported()
        .with_settings(&settings)
        .map_err(|error| Failure::new(Exit::Input, format!("{}: {error}", args.path.display())))?;
    let count = counted(weights.len(), "tensor");
    let checkpoint = save_imported(&config, weights, tokenizer.as_ref(), &args.out)?;
    say!("imported {count} into {}", checkpoint.display());
    for remark in remarks {
        say!("{remark}");
    }
    Ok(())
}

//! `sparse24 prepare`: a text, encoded once for many runs.

use std::path::PathBuf;

use clap::ValueEnum;
use serde_json::json;
use sparse24_train::data::{Corpus, Tokenizer, TokenizerKind, VALIDATION_FRACTION, prepare};

use crate::{failure::Failure, output::say};

/// Encode a text file or folder into token shards (train.bin, val.bin, tokenizer.json)
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// A UTF-8 text file, or a folder of them
    #[arg(long, value_name = "PATH")]
    data: PathBuf,
    /// How text becomes tokens
    #[arg(long, value_enum)]
    tokenizer: TokenizerName,
    /// The folder to make; one that exists must be empty or prepared earlier
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// The share to hold out, from the end of the text
    #[arg(long, value_name = "SHARE", default_value_t = VALIDATION_FRACTION)]
    validation: f64,
    /// The summary as one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum TokenizerName {
    /// Bytes of UTF-8: 256
    Byte,
    /// The characters of the text
    Char,
    /// GPT-2's byte-pair encoding: 50257
    Gpt2,
}

impl From<TokenizerName> for TokenizerKind {
    fn from(name: TokenizerName) -> Self {
        match name {
            TokenizerName::Byte => Self::Byte,
            TokenizerName::Char => Self::Character,
            TokenizerName::Gpt2 => Self::Gpt2,
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let corpus = Corpus::open(&args.data)?;
    let tokenizer = Tokenizer::for_text(args.tokenizer.into(), corpus.text())?;
    let dataset = prepare(&corpus, tokenizer, args.validation, &args.out)?;
    let (train, validation, vocabulary) = (dataset.train().len(), dataset.validation().len(), dataset.vocabulary());
    if args.json {
        let summary = json!({
            "out": args.out.display().to_string(),
            "train_tokens": train,
            "validation_tokens": validation,
            "vocabulary": vocabulary,
            "fingerprint": dataset.fingerprint().to_string(),
        });
        say!("{summary}");
    } else {
        let out = args.out.display();
        say!("{train} tokens to train on and {validation} held out, of a vocabulary of {vocabulary}: {out}");
        say!("train on them with `sparse24 train --data {out} --set data.tokenizer={}`", TokenizerKind::from(args.tokenizer).name());
    }
    Ok(())
}

//! `sparse24 prepare`: a text, encoded once for many runs.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde_json::json;
use sparse24_run::{
    ErrorKind,
    data::{Corpus, Tokenizer, TokenizerKind, VALIDATION_FRACTION, prepare},
};

use crate::{
    failure::Failure,
    output::{say, word},
    signals::Signals,
};

/// Encode a text file or folder into token shards (train.bin, val.bin, tokenizer.json)
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// A UTF-8 text file, or a folder of them
    #[arg(long, value_name = "PATH")]
    data: PathBuf,
    /// How text becomes tokens: bytes of UTF-8 (256), the characters of the text, or GPT-2's
    /// byte-pair encoding (50257)
    #[arg(long, value_parser = tokenizer_names())]
    tokenizer: TokenizerKind,
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

/// A tokenizer by its name.
pub(crate) fn tokenizer_names() -> impl TypedValueParser<Value = TokenizerKind> {
    PossibleValuesParser::new(TokenizerKind::ALL.map(TokenizerKind::name)).map(|name| {
        TokenizerKind::ALL.into_iter().find(|kind| kind.name() == name).expect("one of these names")
    })
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let signals = Signals::to_stop()?;
    let corpus = Corpus::open(&args.data)?;
    let tokenizer = Tokenizer::for_text(args.tokenizer, corpus.text())?;
    let prepared = prepare(&corpus, tokenizer, args.validation, &args.out, &signals.any());
    let dataset = prepared.map_err(|error| match signals.received() {
        Some(exit) if error.kind() == ErrorKind::Interrupted => {
            Failure::new(exit, format!("interrupted; {} is as it was", args.out.display()))
        }
        _ => error.into(),
    })?;
    let (train, validation, vocabulary) =
        (dataset.train().len(), dataset.validation().len(), dataset.vocabulary());
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
        say!(
            "{train} tokens to train on and {validation} held out, of a vocabulary of {vocabulary}: {out}"
        );
        let out = word(&args.out);
        say!(
            "train on them with `sparse24 train --data {out} --set data.tokenizer={}`",
            args.tokenizer.name()
        );
    }
    Ok(())
}

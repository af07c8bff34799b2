//! `sparse24 prepare`: encodes a text once for many runs.

use std::path::PathBuf;

use serde_json::json;
use sparse24_run::{
    ErrorKind,
    data::{Corpus, Tokenizer, TokenizerKind, VALIDATION_FRACTION, prepare},
};

use crate::{
    choice,
    failure::Failure,
    output::{say, word},
    signals::Signals,
};

/// Encode a text file or folder into token shards (train.bin, val.bin, tokenizer.json)
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// UTF-8 text file, or folder of them
    #[arg(long, value_name = "PATH")]
    data: PathBuf,
    /// UTF-8 bytes (256 tokens), the characters of the text, or GPT-2's byte-pair encoding (50257
    /// tokens)
    #[arg(long, value_parser = choice::tokenizer())]
    tokenizer: TokenizerKind,
    /// Folder to create; an existing one must be empty or prepared earlier
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Share of the text for validation, taken from its end
    #[arg(long, value_name = "SHARE", default_value_t = VALIDATION_FRACTION)]
    validation: f64,
    /// Print the summary as one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let signals = Signals::listen_for_stop()?;
    let corpus = Corpus::open(&args.data)?;
    let tokenizer = Tokenizer::for_text(args.tokenizer, corpus.text())?;
    let prepared = prepare(&corpus, tokenizer, args.validation, &args.out, &signals.any());
    let out = args.out.display();
    let dataset = prepared.map_err(|error| match signals.received() {
        Some(exit) if error.kind() == ErrorKind::Interrupted => {
            Failure::new(exit, format!("interrupted; {out} is unchanged"))
        }
        _ => error.into(),
    })?;
    let (train, validation) = (dataset.train().len(), dataset.validation().len());
    let vocabulary = dataset.vocabulary();
    if args.json {
        let summary = json!({
            "out": out.to_string(),
            "train_tokens": train,
            "validation_tokens": validation,
            "vocabulary": vocabulary,
            "fingerprint": dataset.fingerprint().to_string(),
        });
        say!("{summary}");
    } else {
        say!("{train} training and {validation} validation tokens, vocabulary {vocabulary}: {out}");
        say!("train on them with `sparse24 train --data {}`", word(&args.out));
    }
    Ok(())
}

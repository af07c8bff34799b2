//! `sparse24 prepare`: encodes a text once for many runs.

use std::path::PathBuf;

use serde_json::json;
use sparse24_run::{
    Error, ErrorKind,
    data::{
        DEFAULT_PIECES, FEWEST, HeldOut, Preparation, Tokenizer, TokenizerKind, TokenizerSource,
    },
};

use crate::{
    failure::{Exit, Failure, Result},
    output::{note, say, word},
    progress::WorkProgress,
    signals::Signals,
};

/// Encode a corpus into token shards (train.bin, val.bin, tokenizer.json)
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// File, or folder of files: UTF-8 text, .jsonl or .parquet; text and .jsonl also as .zst
    #[arg(long, value_name = "PATH")]
    data: PathBuf,
    /// byte: UTF-8 bytes (256 tokens); char: the characters of the text; wordpiece: BERT's pieces
    /// of words in lower case, trained on the text; bpe: merged bytes, trained on the text; gpt2:
    /// its byte-pair encoding (50257 tokens); or a file: vocab.txt or tokenizer.json with
    /// WordPiece, or tokenizer.json of a run
    #[arg(long, value_name = "NAME|FILE")]
    tokenizer: TokenizerSource,
    /// Maximum number of tokens of wordpiece or bpe; bpe has at least 260
    #[arg(long, value_name = "NUMBER", default_value_t = DEFAULT_PIECES as u32,
        value_parser = clap::value_parser!(u32).range(100..=1_000_000))]
    pieces: u32,
    /// Folder to create
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Text that separates the documents of a text file [default: a corpus of text is one document]
    #[arg(long, value_name = "STRING")]
    separator: Option<String>,
    /// Field of .jsonl files, or column of .parquet files, that holds the text
    #[arg(long, value_name = "NAME", default_value = "text")]
    field: String,
    /// Share of the tokens, or number of them, for validation, taken from the end [default: 0.1,
    /// but at most 2000000 tokens]
    #[arg(long, value_name = "SHARE|TOKENS")]
    validation: Option<HeldOut>,
    /// Replace a folder that was prepared earlier
    #[arg(long)]
    force: bool,
    /// Print the summary as one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result {
    let is_bpe = matches!(args.tokenizer, TokenizerSource::Kind(TokenizerKind::Bpe));
    if is_bpe && args.pieces < FEWEST {
        let problem = format!(
            "--pieces {}: expected at least {FEWEST} for bpe, which starts with all bytes and four \
             special tokens",
            args.pieces
        );
        return Err(Failure::new(Exit::Usage, problem));
    }
    let signals = Signals::listen_for_stop()?;
    let preparation = Preparation {
        data: &args.data,
        tokenizer: args.tokenizer.clone(),
        pieces: args.pieces as usize,
        separator: args.separator.as_deref(),
        field: &args.field,
        validation: args.validation,
        force: args.force,
    };
    let mut progress = WorkProgress::new("encoding").in_bytes();
    let prepared = preparation.write(&args.out, &mut |done, all| {
        progress.update(done, all);
        if signals.received().is_some() { Err(Error::Interrupted) } else { Ok(()) }
    });
    drop(progress);
    let out = args.out.display();
    let dataset = prepared.map_err(|error| match signals.received() {
        Some(exit) if error.kind() == ErrorKind::Interrupted => {
            Failure::new(exit, format!("interrupted; {out} is unchanged"))
        }
        _ => error.into(),
    })?;
    let (train, validation) = (dataset.train().len(), dataset.validation().len());
    let vocabulary = dataset.vocabulary();
    let all = train + validation;
    let asked = HeldOut::of(args.validation, all);
    if !(asked / 2..=asked.saturating_mul(2)).contains(&validation) {
        note(format_args!(
            "{validation} of {all} tokens are for validation, not {asked}: the split is between \
             two documents"
        ));
    }
    if let TokenizerSource::File(path) = &args.tokenizer {
        // The shards are written, so this may not fail.
        Tokenizer::read(path).ok().and_then(|read| read.remark()).into_iter().for_each(note);
    }
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

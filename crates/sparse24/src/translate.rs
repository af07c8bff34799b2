//! `sparse24 translate`: translates sentences with a Transformer.

use std::{
    fmt::Display,
    fs::{self, File},
    io::{self, BufRead, BufReader, Read as _},
    path::{Path, PathBuf},
};

use serde_json::json;
use sparse24_run::{
    data::END,
    disk,
    translation::{BeamSearch, Bleu, words},
};

use crate::{
    configure::{Computing, load},
    eval::Which,
    failure::{Exit, Failure, Result},
    output::{counted, json_line, note, say, write_made},
    progress::WorkProgress,
    signals::Signals,
    threads::on_threads,
};

/// Translate sentences, one per line, with a run or a checkpoint
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    computing: Computing,
    /// File with the sentences [default: standard input]
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,
    /// File for the translations, in the order of the input [default: standard output]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// File with reference translations: also print the BLEU score
    #[arg(long, value_name = "FILE")]
    bleu: Option<PathBuf>,
    /// Beam size: number of hypotheses per sentence
    #[arg(long, default_value_t = 4, allow_negative_numbers = true)]
    beam: usize,
    /// Length penalty: the log probability of a translation is divided by its length to this power
    #[arg(long, default_value_t = 0.6, allow_negative_numbers = true)]
    length_penalty: f64,
    /// Print one JSON object per sentence
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result {
    let &Args { beam, length_penalty, .. } = args;
    let wrong = |problem: String| Err(Failure::new(Exit::Usage, problem));
    if !length_penalty.is_finite() {
        return wrong(format!(
            "--length-penalty: expected a finite number, found {length_penalty}"
        ));
    }
    let destination = args.out.as_deref().map(disk::destination).transpose()?;
    let out = args.out.as_ref().and_then(|out| fs::canonicalize(out).ok());
    let mut read_files = [&args.input, &args.bleu].into_iter().flatten();
    if let Some(path) = read_files.find(|path| out.is_some() && fs::canonicalize(path).ok() == out)
    {
        return wrong(format!("--out: would replace {}, which is read", path.display()));
    }
    let mut model = args.computing.choose(args.which.read()?)?;
    let recipe = model.recipe();
    let run = args.which.run.display();
    let Some(longest) = model.config.pair_source().map(|source| source.longest) else {
        let problem = format!("{run} does not translate: it is not a Transformer");
        return Err(Failure::new(Exit::Input, problem));
    };
    let vocabulary = recipe.model.vocabulary();
    let Some(tokenizer) = model.tokenizer.take() else {
        let problem = format!("{run} has no tokenizer.json, so it cannot read or write text");
        return Err(Failure::new(Exit::Input, problem));
    };
    debug_assert!(tokenizer.vocabulary() as usize <= vocabulary);
    let input = match &args.input {
        Some(path) => read(path)?,
        None => lines(io::stdin().lock(), "standard input")?,
    };
    let references = args.bleu.as_deref().map(read).transpose()?;
    let lines: Vec<&str> = input.lines().map(str::trim).collect();
    let name = args.input.as_deref().map_or("standard input".into(), Path::to_string_lossy);
    if let (Some(path), Some(text)) = (&args.bleu, &references)
        && text.lines().count() != lines.len()
    {
        let (found, expected) = (text.lines().count(), lines.len());
        let problem = format!(
            "--bleu {}: has {}, but {name} has {expected}; expected a reference for each",
            path.display(),
            counted(found, "line")
        );
        return Err(Failure::new(Exit::Input, problem));
    }
    let mut sources = Vec::with_capacity(lines.len());
    for (line, number) in lines.iter().zip(1..) {
        let refuse = |problem: String| {
            Failure::new(Exit::Input, format!("{name}: line {number}: {problem}"))
        };
        let mut ids = tokenizer.encode(line).map_err(|error| refuse(error.to_string()))?;
        ids.push(END);
        if ids.len() > longest {
            return Err(refuse(format!(
                "has {} tokens, but the model reads at most {}; split the sentence",
                ids.len() - 1,
                longest - 1
            )));
        }
        sources.push(ids);
    }
    let model = model.for_sentences(sources.iter().map(Vec::len).max().unwrap_or(0));
    let config = model.config.clone();
    let signals = Signals::listen_for_stop()?;
    on_threads(config.backend.threads, || {
        let mut trainer = load(model)?;
        let most = trainer.recipe().batch.size;
        if !(1..=most).contains(&beam) {
            return wrong(format!("--beam: expected 1 to {most} for this model, found {beam}"));
        }
        trainer.interrupt_on(signals.any());
        let vocabulary = tokenizer.vocabulary() as usize;
        let search = BeamSearch { beam, length_penalty, vocabulary };
        // An empty line stays empty.
        let is_text = |number: &usize| sources[*number].len() > 1;
        let numbers: Vec<usize> = (0..sources.len()).filter(is_text).collect();
        let texts: Vec<&[u32]> = numbers.iter().map(|&number| &sources[number][..]).collect();
        let mut progress = WorkProgress::new("translating");
        let all = texts.len() as u64;
        let found = search
            .translate(&mut trainer, &texts, |done| progress.update(done as u64, all))
            .map_err(|error| match signals.received() {
                Some(exit) => Failure::new(exit, "interrupted; nothing was written"),
                None => error.into(),
            })?;
        drop(progress);
        let mut translations = vec![(String::new(), 0.0); sources.len()];
        for (&number, translation) in numbers.iter().zip(&found) {
            let text = tokenizer.decode(&translation.tokens)?;
            let text = String::from_utf8_lossy(&text).replace(['\n', '\r'], " ");
            translations[number] = (text, translation.score);
        }
        let written = |(source, (text, score)): (&&str, &(String, f64))| match args.json {
            true => json_line(&json!({"source": source, "translation": text, "score": score})),
            false => text.clone(),
        };
        let written: Vec<String> = lines.iter().zip(&translations).map(written).collect();
        match &destination {
            Some(path) => {
                let text: String = written.iter().map(|line| format!("{line}\n")).collect();
                disk::write_atomically(path, text.as_bytes())?;
            }
            None => {
                for line in &written {
                    write_made(&format!("{line}\n"))?;
                }
            }
        }
        if let Some(text) = &references {
            let mut bleu = Bleu::default();
            for ((found, _), reference) in translations.iter().zip(text.lines()) {
                bleu.add([found, &words(&tokenizer, reference)]);
            }
            let line = format!("BLEU {:.2} ({})", bleu.score(), Bleu::SIGNATURE);
            // Standard output holds the translations, unless they are in a file.
            if args.out.is_some() { say!("{line}") } else { note(line) }
        }
        Ok(())
    })
}

/// Reads a file of lines.
pub(crate) fn read(path: &Path) -> Result<String> {
    let name = path.display();
    let file = File::open(path).map_err(|error| {
        Failure::new(Exit::Input, format!("{name}: cannot be read as text: {error}"))
    })?;
    lines(BufReader::new(file), name)
}

/// Bytes of the longest line: a device may have one without an end.
const LONGEST: u64 = 1 << 20;

fn lines(mut from: impl BufRead, name: impl Display) -> Result<String> {
    let (mut text, mut line, mut number) = (String::new(), Vec::new(), 0);
    loop {
        line.clear();
        number += 1;
        let refuse = |problem: &str| {
            Err(Failure::new(Exit::Input, format!("{name}: line {number}: {problem}")))
        };
        match (&mut from).take(LONGEST + 1).read_until(b'\n', &mut line) {
            Ok(0) => return Ok(text),
            Ok(length) if length as u64 > LONGEST => return refuse("is longer than 1 MiB"),
            Ok(_) => match str::from_utf8(&line) {
                Ok(line) => text += line,
                Err(_) => return refuse("cannot be read as text: it is not UTF-8"),
            },
            Err(error) => return refuse(&format!("cannot be read: {error}")),
        }
    }
}

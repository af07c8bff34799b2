//! `sparse24 prepare`: what it writes, and its refusals.

use std::{fs, path::PathBuf};

use crate::support::Place;

#[test]
fn a_text_becomes_shards() {
    let place = Place::new();
    place.write("text", "to be, or not to be\n".repeat(50));
    for (tokenizer, vocabulary) in [("byte", 256), ("char", 9), ("gpt2", 50_257)] {
        let line = format!("prepare --data text --tokenizer {tokenizer} --out made/here --json");
        let summary = place.json(&line);
        assert_eq!(summary["vocabulary"], vocabulary);
        assert_eq!(summary["out"], "made/here");
        let [train, validation] =
            ["train_tokens", "validation_tokens"].map(|key| summary[key].as_u64().unwrap());
        if tokenizer != "gpt2" {
            assert_eq!([train, validation], [900, 100]);
        }
        let files: Vec<_> = place.tree("made/here").into_keys().collect();
        assert_eq!(files, ["tokenizer.json", "train.bin", "val.bin"].map(PathBuf::from));
        let shard = fs::metadata(place.path("made/here/val.bin")).unwrap();
        assert_eq!(shard.len(), 128 + 2 * validation);
    }
    let answer = place.answer("prepare --data text --tokenizer byte --out half --validation 0.5");
    assert!(answer.starts_with("500 training and 500 validation tokens"), "{answer}");
    assert!(answer.contains("`sparse24 train --data half`"), "{answer}");
}

#[test]
fn unusable_texts_folders_and_shares_are_refused() {
    let place = Place::new();
    place.write("one", "x");
    place.write("spaces", " ".repeat(300_000) + "x");
    for folder in ["mine", "nanogpt"] {
        fs::create_dir(place.path(folder)).unwrap();
    }
    place.write("mine/thesis.tex", "years of work");
    place.write("nanogpt/train.bin", [1, 0]);
    for (arguments, code, pattern) in [
        ("nowhere --out out", 3, "nowhere: does not exist"),
        ("one --out out", 3, "one: *1 characters"),
        ("spaces --out out --tokenizer gpt2", 3, "spaces: *byte 262144"),
        ("text --out mine", 3, "mine: *`thesis.tex`"),
        ("text --out nanogpt", 3, "nanogpt: *tokenizer.json"),
        ("text --out one", 3, "one: *not a folder"),
        ("text --out one/out", 4, "cannot create one: "),
        ("text --out out --tokenizer word", 2, "'word'*byte, char, gpt2"),
        ("text --out out --validation=0", 2, "--validation*0"),
        ("text --out out --validation=1", 2, "--validation*1"),
        ("text --out out --validation=NaN", 2, "--validation*NaN"),
    ] {
        let tokenizer = if arguments.contains("--tokenizer") { "" } else { "--tokenizer byte" };
        place.refuses(&format!("prepare {tokenizer} --data {arguments}"), code, pattern);
    }
}

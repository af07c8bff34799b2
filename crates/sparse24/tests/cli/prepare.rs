//! `sparse24 prepare`: what it writes, and its refusals.

use std::{fs, path::PathBuf};

use crate::support::Place;

#[test]
fn a_text_becomes_shards() {
    let place = Place::new();
    place.write("text", "to be, or not to be\n".repeat(50));
    for (tokenizer, vocabulary) in [("byte", 256), ("char", 9), ("gpt2", 50_257)] {
        let line =
            format!("prepare --data text --tokenizer {tokenizer} --out made/here --force --json");
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
fn a_vocabulary_is_trained_and_taken_from_files() {
    let place = Place::new();
    place.write("text", "The lower, the NEWER the lowest -- newest\n".repeat(50));
    let line = "prepare --data text --json --tokenizer";
    let trained = place.json(&format!("{line} wordpiece --pieces 100 --out trained"));
    let pieces_of = |summary: &serde_json::Value| summary["vocabulary"].as_u64().unwrap();
    assert!((30..=100).contains(&pieces_of(&trained)), "{trained}");
    let pieces = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\nlower\n";
    place.write("vocab.txt", pieces);
    for (file, expected) in [("trained/tokenizer.json", pieces_of(&trained)), ("vocab.txt", 7)] {
        let again = place.json(&format!("{line} {file} --out again --force"));
        assert_eq!(pieces_of(&again), expected, "{file}");
        assert_eq!(again["fingerprint"] == trained["fingerprint"], file != "vocab.txt", "{file}");
    }
}

#[test]
fn documents_become_shards() {
    let place = Place::new();
    let documents: Vec<String> = (0..40).map(|n| format!("document {n}\n")).collect();
    place.write("text.txt", documents.join("<|endoftext|>\n"));
    let line = |text: &String| serde_json::json!({ "body": text }).to_string();
    place.write("lines.jsonl", documents.iter().map(line).collect::<Vec<_>>().join("\n"));
    let trees = [
        ("text.txt --separator <|endoftext|> --validation 20", "one"),
        ("lines.jsonl --field body --validation 20", "two"),
    ]
    .map(|(arguments, out)| {
        let line = format!("prepare --data {arguments} --tokenizer gpt2 --out {out} --json");
        let summary = place.json(&line);
        // Four tokens a document, and its end.
        assert_eq!(
            (&summary["train_tokens"], &summary["validation_tokens"]),
            (&140.into(), &20.into())
        );
        place.tree(out)
    });
    assert!(trees[0] == trees[1]);
    let validation = trees[0][&PathBuf::from("val.bin")].as_ref().unwrap();
    assert!(validation.ends_with(&50_256_u16.to_le_bytes()));
    place.refuses("train --data lines.jsonl --out run", 3, "lines.jsonl: *`sparse24 prepare`");
}

#[test]
fn unusable_texts_folders_and_shares_are_refused() {
    let place = Place::new();
    place.write("one", "x");
    place.write("spaces", " ".repeat(300_000) + "x");
    place.write("mine/thesis.tex", "years of work");
    place.write("nanogpt/train.bin", [1, 0]);
    place.write("text", "to be, or not to be\n".repeat(50));
    place.write("lines.jsonl", "{}");
    place.write("cut.jsonl", "{\"text\": 1\n");
    // The library of Parquet panics at a page that needs a dictionary.
    let page = b"PAR1\x15\0\x15\x06\x15\x06\x2c\x15\x02\x15\x10\x15\x06\x15\x06\0\0\x01\x02\0";
    let footer = b"\x15\x02\x19\x2c\x48\x01m\x15\x02\0\x15\x0c\x25\0\x18\x04text\0\x16\x02\x19\x1c\
        \x19\x1c\x26\x08\x1c\x15\x0c\x19\x15\0\x19\x18\x04text\x15\0\x16\x02\x16\x02\x16\x28\
        \x26\x08\0\0\x16\0\x16\x02\0\0";
    place.write("a.parquet", [page, &footer[..], &[footer.len() as u8, 0, 0, 0], b"PAR1"].concat());
    place.answer("prepare --tokenizer byte --data text --out made");
    for (arguments, code, pattern) in [
        ("nowhere --out out", 3, "nowhere: does not exist"),
        ("one --out out", 3, "one: *1 token"),
        ("spaces --out out --tokenizer gpt2", 3, "spaces: *byte 262144"),
        ("text --out mine", 3, "mine: *`thesis.tex`"),
        ("text --out nanogpt", 3, "nanogpt: *tokenizer.json"),
        ("text --out made", 3, "made: holds prepared data*--force"),
        ("text --out out --separator=", 2, "--separator*empty"),
        ("text --out out --field body", 2, "--field: found body, but text has only plain text"),
        ("lines.jsonl --out out", 3, "lines.jsonl: line 1: *`text`*--field"),
        ("cut.jsonl --out out", 3, "cut.jsonl: line 1: *at column 10"),
        ("a.parquet --out out", 3, "a.parquet: row 1: damaged data"),
        ("text --out out --validation 5000", 3, "text: 1000 tokens*5000"),
        ("text --out one", 3, "one: *not a folder"),
        ("text --out one/out", 4, "cannot create one: "),
        ("text --out out --tokenizer word", 2, "'word'*byte, char, wordpiece, bpe, gpt2*file"),
        ("text --out out --tokenizer text", 3, "text: not a WordPiece vocabulary*same piece"),
        ("text --out out --tokenizer lines.jsonl", 3, "lines.jsonl: not a WordPiece"),
        ("text --out out --tokenizer wordpiece --pieces 5", 2, "--pieces*5"),
        ("text --out out --tokenizer bpe --pieces 259", 2, "--pieces 259: *at least 260"),
        ("text --out out --validation=0", 2, "--validation*0"),
        ("text --out out --validation=1", 2, "--validation*1"),
        ("text --out out --validation=NaN", 2, "NaN*--validation*share"),
    ] {
        let tokenizer = if arguments.contains("--tokenizer") { "" } else { "--tokenizer byte" };
        place.refuses(&format!("prepare {tokenizer} --data {arguments}"), code, pattern);
    }
}

/// Another vocabulary, even of the same size, gives the ids other meanings.
#[test]
fn other_data_keep_the_tokenizer_of_the_run() {
    let place = Place::new();
    for (name, text) in [("text", "abc"), ("fewer", "ab"), ("other", "abd"), ("more", "abcd")] {
        place.write(name, text.repeat(1500));
        place.answer(&format!("prepare --data {name} --tokenizer char --out {name}-shards"));
    }
    place.train("run", "");
    place.train("shards-run", "--set data.path=text-shards");
    let tokenizer = place.read("run/tokenizer.json");
    let is_kept = |run: &str| {
        assert_eq!(place.read(&format!("{run}/tokenizer.json")), tokenizer);
        place.answer(&format!("eval {run}/checkpoints/step-00000012 --data text"));
    };
    let resume = |run: &str, data: &str| {
        format!("resume {run} --set data.path={data} --set steps=14 --set run.keep_last=9")
    };
    place.refuses(&resume("run", "other"), 3, "other: the character 'd'*3 characters");
    is_kept("run");
    place.answer(&resume("run", "fewer"));
    is_kept("run");
    let line = resume("shards-run", "more-shards");
    place.refuses(&line, 3, "tokens of 3*tokens of 4*changes the shape or meaning");
    let line = resume("shards-run", "other-shards");
    let pattern = "with a tokenizer*--allow data.tokenizer`";
    for more in ["", " --allow data"] {
        place.refuses(&format!("{line}{more}"), 3, pattern);
        is_kept("shards-run");
    }
    let finished = "resume shards-run --set data.path=other-shards --allow data.tokenizer";
    place.refuses(finished, 3, "is finished*more steps than 12");
    let resume_kept = |line: &str, number: u32| {
        let notes = place.notes(&format!("{line} --allow data.tokenizer"));
        let kept = format!("tokenizer.json is kept as tokenizer.{number}.json for earlier");
        assert!(notes.contains(&kept), "{notes}");
    };
    resume_kept(&line, 1);
    let other = place.read("other-shards/tokenizer.json");
    assert_eq!(place.read("shards-run/tokenizer.1.json"), tokenizer);
    assert_eq!(place.read("shards-run/tokenizer.json"), other);
    // As if it had died before it saved.
    place.rewind("shards-run", [14]);
    place.answer("resume shards-run");
    // Data without a tokenizer.
    let ids: Vec<u8> = (0..4500_u16).flat_map(|id| (id % 3).to_le_bytes()).collect();
    for split in ["train", "val"] {
        place.write(&format!("foreign/{split}.bin"), &ids);
    }
    resume_kept(&resume("shards-run", "foreign").replace("14", "16"), 2);
    assert_eq!(place.read("shards-run/tokenizer.2.json"), other);
    place.answer("eval shards-run");
    // A start that dies has not yet written its configuration.
    place.train("died", "--set data.path=foreign");
    place.remove("died/config.toml");
    place.remove("died/report.html");
    place.remove("died/checkpoints");
    place.write("died/metrics.jsonl", "");
    place.train("died", "--set data.path=foreign");
    // The run's tokenizer is not used as one of another kind.
    place.train("bytes", "--set data.tokenizer=byte");
    place.refuses("resume bytes --set data.tokenizer=char --set steps=14", 3, "changes the shape");
}

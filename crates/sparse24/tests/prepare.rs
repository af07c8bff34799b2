//! `sparse24 prepare`: what it writes, and its refusals.

#[path = "cli/support.rs"]
#[expect(dead_code, reason = "the tests of the command need more of it")]
mod support;
use support::Place;

fn names(place: &Place, folder: &str) -> Vec<String> {
    let tree = place.tree(folder);
    tree.keys().map(|path| path.to_str().unwrap().to_owned()).collect()
}

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
        let files = ["here", "here/tokenizer.json", "here/train.bin", "here/val.bin"];
        assert_eq!(names(&place, "made"), files);
        let shard = std::fs::metadata(place.path("made/here/val.bin")).unwrap();
        assert_eq!(shard.len(), 128 + 2 * validation);
    }
    let answer = place.answer("prepare --data text --tokenizer byte --out half --validation 0.5");
    assert!(answer.starts_with("500 training and 500 validation tokens"), "{answer}");
    assert!(answer.contains("`sparse24 train --data half "), "{answer}");
}

#[test]
fn unusable_texts_folders_and_shares_are_refused() {
    let place = Place::new();
    place.write("latin1", b"caf\xe9 au lait");
    place.write("empty", "");
    place.write("one", "x");
    place.write("spaces", " ".repeat(300_000) + "x");
    for folder in ["mine", "nanogpt"] {
        std::fs::create_dir(place.path(folder)).unwrap();
    }
    place.write("mine/thesis.tex", "years of work");
    place.write("nanogpt/train.bin", [1, 0]);
    for (arguments, code, pattern) in [
        ("nowhere --out out", 3, "nowhere: does not exist"),
        ("latin1 --out out", 3, "latin1: *UTF-8*0xe9*3"),
        ("empty --out out", 3, "empty: "),
        ("one --out out", 3, "one: *1 characters"),
        ("text --out mine", 3, "mine: *`thesis.tex`"),
        ("text --out nanogpt", 3, "nanogpt: *tokenizer.json"),
        ("text --out one", 3, "one: *not a folder"),
        ("text --out one/out", 4, "cannot create one: "),
        ("text --out out --validation=0", 2, "--validation*0"),
        ("text --out out --validation=1", 2, "--validation*1"),
        ("text --out out --validation=-0.5", 2, "--validation*-0.5"),
        ("text --out out --validation=NaN", 2, "--validation*NaN"),
    ] {
        place.refuses(&format!("prepare --tokenizer byte --data {arguments}"), code, pattern);
    }
    for (arguments, code, pattern) in [
        ("text --tokenizer word", 2, "'word'*byte, char, gpt2"),
        ("spaces --tokenizer gpt2", 3, "spaces: *byte 262144"),
    ] {
        place.refuses(&format!("prepare --data {arguments} --out out"), code, pattern);
    }
}

#[cfg(unix)]
#[test]
fn a_folder_without_write_permission_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new();
    std::fs::create_dir(place.path("locked")).unwrap();
    std::fs::set_permissions(place.path("locked"), std::fs::Permissions::from_mode(0o555)).unwrap();
    if std::fs::write(place.path("locked/probe"), "").is_ok() {
        eprintln!("skipped: this user may write anywhere");
        return;
    }
    let line = "prepare --data text --tokenizer byte --out locked/out";
    place.refuses(line, 4, "cannot create *locked/out");
}

//! `sparse24 prepare` as its user meets it: what it writes, and every way in which it refuses.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use serde_json::Value;

fn prepare(args: &[&str], folder: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_sparse24"))
        .arg("prepare")
        .args(args)
        .current_dir(folder)
        .output()
        .unwrap()
}

fn refusal(args: &[&str], folder: &Path, code: i32) -> String {
    let output = prepare(args, folder);
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{message}");
    assert!(output.stdout.is_empty(), "a refusal prints to standard error alone");
    message
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_text_becomes_shards() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    fs::write(root.join("text"), "to be, or not to be\n".repeat(50)).unwrap();
    for (tokenizer, vocabulary) in [("byte", 256), ("char", 9), ("gpt2", 50_257)] {
        let output = prepare(
            &["--data", "text", "--tokenizer", tokenizer, "--out", "made/here", "--json"],
            root,
        );
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(summary["vocabulary"], vocabulary);
        let [train, validation] =
            ["train_tokens", "validation_tokens"].map(|key| summary[key].as_u64().unwrap());
        if tokenizer != "gpt2" {
            assert_eq!([train, validation], [900, 100]);
        }
        assert_eq!(names(&root.join("made/here")), ["tokenizer.json", "train.bin", "val.bin"]);
        assert_eq!(names(&root.join("made")), ["here"], "something half-written is left");
        assert_eq!(
            fs::metadata(root.join("made/here/val.bin")).unwrap().len(),
            128 + 2 * validation
        );
    }
    let output = prepare(
        &["--data", "text", "--tokenizer", "byte", "--out", "half", "--validation", "0.5"],
        root,
    );
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.starts_with("500 tokens to train on and 500 held out, of a vocabulary of 256: half"),
        "{text}"
    );
}

#[test]
fn every_refusal_says_why_and_leaves_nothing() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    fs::write(root.join("text"), "to be\n".repeat(50)).unwrap();
    fs::write(root.join("latin1"), b"caf\xe9 au lait").unwrap();
    fs::write(root.join("empty"), "").unwrap();
    fs::write(root.join("one"), "x").unwrap();
    fs::create_dir(root.join("mine")).unwrap();
    fs::write(root.join("mine/thesis.tex"), "years of work").unwrap();
    fs::create_dir(root.join("nanogpt")).unwrap();
    fs::write(root.join("nanogpt/train.bin"), [1, 0]).unwrap();
    let before = names(root);
    let args = |data, out| ["--data", data, "--tokenizer", "byte", "--out", out];
    for (data, out, code, expected) in [
        ("nowhere", "out", 3, "error: nowhere: does not exist, expected a text file"),
        ("latin1", "out", 3, "error: latin1: is not UTF-8 text: byte 0xe9 at offset 3"),
        ("empty", "out", 3, "error: empty: holds no text"),
        ("one", "out", 3, "error: one: 1 characters are too few"),
        ("text", "mine", 3, "mine: is not empty and holds `thesis.tex`"),
        ("text", "nanogpt", 3, "nanogpt: holds token files without a tokenizer.json of sparse24"),
        ("text", "one", 3, "one: exists and is not a folder"),
        ("text", "one/out", 4, "error: cannot create one: "),
    ] {
        let message = refusal(&args(data, out), root, code);
        assert!(message.contains(expected) && message.lines().count() == 1, "{message}");
        assert_eq!(names(root), before, "{message}");
    }
    for share in ["0", "1", "-0.5", "NaN"] {
        let share = format!("--validation={share}");
        let message = refusal(&[&args("text", "out")[..], &[&share]].concat(), root, 2);
        assert!(
            message.starts_with(
                "error: the share to hold out (data.validation_share, or --validation of prepare): expected more than 0 and less than 1"
            ),
            "{message}"
        );
    }
    let message = refusal(&["--data", "text", "--tokenizer", "word", "--out", "out"], root, 2);
    assert!(
        message.contains("invalid value 'word'") && message.contains("byte, char, gpt2"),
        "{message}"
    );
    fs::write(root.join("spaces"), " ".repeat(300_000) + "x").unwrap();
    let message = refusal(&["--data", "spaces", "--tokenizer", "gpt2", "--out", "out"], root, 3);
    assert!(
        message.starts_with("error: spaces: the run of white space around byte 262144"),
        "{message}"
    );
    assert!(!root.join("out").exists());
    assert_eq!(fs::read(root.join("mine/thesis.tex")).unwrap(), b"years of work");
}

#[cfg(unix)]
#[test]
fn an_unwritable_place_is_said() {
    use std::os::unix::fs::PermissionsExt;
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    fs::write(root.join("text"), "to be\n".repeat(50)).unwrap();
    fs::create_dir(root.join("locked")).unwrap();
    fs::set_permissions(root.join("locked"), fs::Permissions::from_mode(0o555)).unwrap();
    if fs::write(root.join("locked/probe"), "").is_ok() {
        eprintln!("skipped: this user may write anywhere");
        return;
    }
    let message =
        refusal(&["--data", "text", "--tokenizer", "byte", "--out", "locked/out"], root, 4);
    assert!(message.contains("cannot create") && message.contains("locked/out"), "{message}");
}

//! Every way in which `sparse24 train` and `estimate` refuse to begin, or stop.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader},
    process::Stdio,
};

use crate::support::{Place, TINY, sentence};

#[test]
fn data_that_cannot_be_used_are_refused_by_name() {
    let place = Place::new();
    place.write("empty", "");
    place.write("blank", " \n\t\n");
    place.write("one", "x");
    place.write("short", "the quick brown");
    place.write("latin1", b"plenty of text, and then a caf\xe9");
    fs::create_dir(place.path("folder")).unwrap();
    fs::create_dir(place.path("mixed")).unwrap();
    place.write("mixed/a", "good text");
    place.write("mixed/b", b"\x89PNG");
    for (data, code, message) in [
        (
            "nowhere",
            3,
            "nowhere: does not exist, expected a text file, a folder of them, or a folder of token shards",
        ),
        ("empty", 3, "empty: holds no text; a corpus needs at least one context and a token"),
        ("blank", 3, "blank: holds no text; a corpus needs at least one context and a token"),
        ("folder", 3, "folder: holds no text; a corpus needs at least one context and a token"),
        ("one", 3, "one: 1 characters are too few to hold out a share of 0.1 for validation"),
        ("short", 3, "short: has 13 tokens to train on; a context of 64 needs at least 65"),
        (
            "latin1",
            3,
            "latin1: is not UTF-8 text: byte 0xe9 at offset 30; convert it or take it out of the corpus",
        ),
        (
            "mixed",
            3,
            "mixed/b: is not UTF-8 text: byte 0x89 at offset 0; convert it or take it out of the corpus",
        ),
    ] {
        let more = "--set data.tokenizer=byte --set model.sequence_length=64";
        place.refuses(&format!("train {TINY} {more} --data {data} --out new"), code, message);
        place.refuses(&format!("estimate {TINY} {more} --data {data}"), code, message);
    }
    place.write("spaces", " ".repeat(300_000) + "x");
    let message = "spaces: the run of white space around byte 262144 has more than the 262144 white-space characters that gpt2 can split; shorten it";
    place.refuses(
        &format!("train {TINY} --set data.tokenizer=gpt2 --data spaces --out new"),
        3,
        message,
    );
    let more = "--set data.tokenizer=byte --set data.validation_share=0.07";
    let message = "short: has 1 validation tokens, expected at least 2";
    place.write("short", "the quick brow");
    place.refuses(&format!("train {TINY} {more} --data short --out new"), 3, message);
}

#[cfg(feature = "cuda")]
#[test]
fn an_estimate_is_not_of_another_device() {
    let place = Place::new();
    let message = "backend.name: found \"cuda\", but memory and time are counted for the CPU alone; name that: --backend cpu";
    place.refuses(&format!("estimate {TINY} --backend cuda"), 2, message);
}

#[test]
fn shards_that_cannot_be_used_are_refused_by_name() {
    let place = Place::new();
    place.answer("prepare --data text --tokenizer char --out prepared");
    let train = format!("train {TINY} --data prepared --out new");
    let whole = fs::read(place.path("prepared/train.bin")).unwrap();
    let damaged = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        bytes
    };
    for (bytes, message) in [
        (
            whole[..whole.len() - 2].to_vec(),
            "prepared/train.bin: its header tells of 3600 tokens, 7328 bytes in all, but it holds 7326: 2 bytes are missing",
        ),
        (
            [&whole[..], &[0; 4]].concat(),
            "prepared/train.bin: its header tells of 3600 tokens, * but it holds 7332: 4 bytes are too many",
        ),
        (
            whole[..100].to_vec(),
            "prepared/train.bin: holds 100 bytes; the header of a token shard alone takes 128",
        ),
        (
            damaged(0),
            "prepared/train.bin: the magic of this token shard is damaged, the rest of its header is intact",
        ),
        (
            damaged(20),
            "prepared/train.bin: the checksum at offset 96 does not match the header: the file is damaged",
        ),
        (
            damaged(130),
            "prepared/train.bin: the tokens from offset 128 on do not match their checksum: the file is damaged",
        ),
        (damaged(131), "prepared/train.bin: token * at position 1 is beyond the vocabulary of 27"),
        (vec![0, 0, 1, 0], "prepared/train.bin: not a token shard of sparse24*"),
    ] {
        place.write("prepared/train.bin", bytes);
        place.refuses(&train, 3, message);
    }
    place.write("prepared/train.bin", &whole);
    place.write("prepared/tokenizer.json", r#"{"sparse24_tokenizer":1,"kind":"word"}"#);
    place.refuses(&train, 3, "prepared/tokenizer.json: is not a tokenizer of sparse24 *: unknown variant `word`, expected *");
    place.write(
        "prepared/tokenizer.json",
        r#"{"sparse24_tokenizer":1,"kind":"char","characters":"ab"}"#,
    );
    place.refuses(&train, 3, "prepared/train.bin: has a vocabulary of 27, expected 2");
    fs::remove_file(place.path("prepared/tokenizer.json")).unwrap();
    place.refuses(
        &train,
        3,
        "prepared/train.bin: needs the tokenizer.json that was prepared with it",
    );

    place.answer("prepare --data text --tokenizer char --out again");
    let message = "data.tokenizer: `byte` is asked for, but again was prepared with `char`: set data.tokenizer=char";
    place.refuses(
        &format!("train {TINY} --set data.tokenizer=byte --data again --out new"),
        2,
        message,
    );

    fs::create_dir(place.path("foreign")).unwrap();
    let ids: Vec<u8> = [7_u16, 255, 300, 1].iter().flat_map(|id| id.to_le_bytes()).collect();
    place.write("foreign/train.bin", &ids);
    let train = format!("train {TINY} --set data.tokenizer=byte --data foreign --out new");
    place.refuses(
        &train,
        3,
        "foreign/train.bin: token 300 at position 2 is beyond the vocabulary of 256",
    );
    place.write("foreign/train.bin", &ids[..7]);
    place.refuses(&train, 3, "foreign/train.bin: holds 7 bytes without a known header; raw u16 tokens would take one byte less or more");
    place.write("foreign/train.bin", &ids[..4]);
    place.refuses(
        &train,
        3,
        "foreign/val.bin: does not exist, expected token shards for training and validation",
    );
}

#[test]
fn a_place_that_cannot_be_written_is_refused() {
    let place = Place::new();
    place.train("run", "");
    fs::create_dir(place.path("mine")).unwrap();
    place.write("mine/thesis.tex", "years of work");
    for (out, code, message) in [
        (
            "run",
            3,
            r#"run: already holds "*", expected a new or empty run directory; choose another, or resume this one"#,
        ),
        (
            "mine",
            3,
            r#"mine: already holds "thesis.tex", expected a new or empty run directory; choose another, or resume this one"#,
        ),
        ("text", 3, "text: is a file, expected a new or empty run directory; choose another"),
        ("text/run", 4, "cannot create text/run: * (os error *)"),
        ("/proc/run", 4, "cannot create /proc/run: * (os error *)"),
    ] {
        place.refuses(&format!("train {TINY} --out {out}"), code, message);
    }
    fs::create_dir(place.path("empty")).unwrap();
    place.train("empty", "");
}

#[test]
fn a_directory_in_use_is_refused() {
    let place = Place::new();
    place.train("run", "");
    place.write("run/lock", "4711\n");
    let lock = File::options().write(true).open(place.path("run/lock")).unwrap();
    lock.lock().unwrap();
    let message =
        "run: is in use by another process (pid 4711); wait for it, or choose another directory";
    place.refuses("resume run", 3, message);
    // Whoever only reads may.
    place.answer("eval run");
    // Not by closing the file: a process that another test is starting may still hold a copy of it.
    lock.unlock().unwrap();
    place.answer("resume run");

    fs::create_dir(place.path("new")).unwrap();
    let lock = File::create(place.path("new/lock")).unwrap();
    lock.lock().unwrap();
    let message =
        "new: is in use by another process (pid unknown); wait for it, or choose another directory";
    place.refuses(&format!("train {TINY} --out new"), 3, message);
}

#[test]
fn two_processes_never_write_one_run() {
    let place = Place::new();
    let line = format!("train {TINY} --set batch.gradient_accumulation_steps=1000000 --out run");
    let mut first = place.command(&line).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(first.stderr.take().unwrap());
    said.read_line(&mut String::new()).unwrap();
    let message = format!(
        "run: is in use by another process (pid {}); wait for it, or choose another directory",
        first.id()
    );
    let second = place.command("resume run").output().unwrap();
    assert_eq!((second.status.code(), sentence(&second)), (Some(3), format!("error: {message}")));
    first.kill().unwrap();
    first.wait().unwrap();
    // Such a step would take minutes.
    place.write(
        "run/config.toml",
        place.read("run/config.toml").replace("_steps = 1000000", "_steps = 1"),
    );
    place.answer("resume run");
}

#[test]
fn a_model_beyond_the_memory_is_refused() {
    let place = Place::new();
    let message = "model: needs * MiB of memory, this machine has *; lower it or batch.size";
    if cfg!(target_os = "linux") {
        place.refuses(&format!("train {TINY} --set model.d_model=16777216 --out new"), 2, message);
        place.refuses(&format!("train {TINY} --set batch.size=16777216 --out new"), 2, message);
    }
}

#[test]
fn plans_that_cannot_be_replayed_are_refused_by_name() {
    let place = Place::new();
    place.train("run", "");
    assert!(!place.path("run/plans.json").exists(), "nothing is timed on a CPU");
    fs::create_dir(place.path("folder")).unwrap();
    place.write("none", "{}");
    let elsewhere = r#"{"device": "NVIDIA Z1 (sm_999), cuBLASLt 130100", "gemm wgrad 8x8x8 strides 8, 8, 8": "0"}"#;
    place.write("elsewhere", elsewhere);
    for (plans, message) in [
        ("nowhere", "nowhere: does not exist, expected a run directory or a plans.json"),
        ("folder", "folder/plans.json: does not exist, expected a run directory or a plans.json"),
        ("text", "text: not an object of plans: *"),
        (
            "elsewhere",
            r#"elsewhere: plan "device": nothing is timed on this backend; do without them"#,
        ),
    ] {
        place.refuses(&format!("train {TINY} --plans {plans} --out new"), 3, message);
        assert!(!place.path("new").exists());
    }
    place.train("new", "--plans none");
    place.write("run/plans.json", elsewhere);
    place.refuses(
        "resume run",
        3,
        r#"run/plans.json: plan "device": nothing is timed on this backend; do without them"#,
    );
    place.write("run/plans.json", r#"{"gemm": 1}"#);
    place.refuses("resume run", 3, "run/plans.json: not an object of plans: *");
    fs::remove_file(place.path("run/plans.json")).unwrap();
    place.answer("resume run");
}

#[test]
fn threads_that_the_system_does_not_start_are_no_panic() {
    let place = Place::new();
    if !cfg!(target_os = "linux") {
        return;
    }
    // Two stacks of this size do not fit, and what is left holds whatever the first thread needs
    // besides.
    let mut command = std::process::Command::new("sh");
    let script = format!(
        "ulimit -v 2000000 && RUST_MIN_STACK=1000000000 exec \"$0\" train {TINY} --set backend.threads=4096 --out new"
    );
    command.args(["-c", &script, env!("CARGO_BIN_EXE_sparse24")]).current_dir(place.path(""));
    let message = "backend.threads: the operating system does not start 4096 threads (0 is one a core); ask for fewer";
    place.refuses_command(command, 4, message);
}

#[test]
#[cfg(unix)]
fn a_name_that_no_configuration_can_hold_is_refused() {
    use std::os::unix::ffi::OsStrExt;
    let place = Place::new();
    let name = std::ffi::OsStr::from_bytes(b"na\xffme.txt");
    std::fs::copy(place.path("text"), place.path("").join(name)).unwrap();
    let mut command = place.command("config --data");
    command.arg(name);
    place.refuses_command(command, 2, "--data *: the name is not UTF-8; rename it");
}

#[test]
fn a_preset_of_a_large_corpus_is_not_trained_on_the_embedded_text() {
    let place = Place::new();
    for preset in ["gpt2-124m", "gpt2-350m", "gpt2-774m", "gpt2-1558m"] {
        let message = format!(
            "data.path: the preset \"{preset}\" is for a large corpus and not for the embedded text; name one with --data"
        );
        place.refuses(&format!("train --preset {preset}"), 2, &message);
        place.refuses(
            &format!("train --preset {preset} --set data.path= --steps 3 --out new"),
            2,
            &message,
        );
        place.answer(&format!("config --preset {preset}"));
    }
    place.json("estimate --preset gpt2-124m --json");
    place.train("run", "--preset gpt2-124m --set batch.gradient_accumulation_steps=1");
}

#[test]
fn a_command_that_does_not_exist_is_refused() {
    let place = Place::new();
    place.refuses("trian", 2, "unrecognized subcommand 'trian'; tip: *'train'; --help tells all");
    place.refuses(
        "resume",
        2,
        "the following required arguments were not provided: <RUN>; --help tells all",
    );
    place.refuses(
        "import one",
        2,
        "the following required arguments were not provided: <OUT>; --help tells all",
    );
    place.refuses("presets more", 2, "unexpected argument 'more' found; --help tells all");
    place.refuses(
        "verify text --include (",
        2,
        "invalid value '(' for '--include <REGEX>': * unclosed group; --help tells all",
    );
    let output = place.command("").output().unwrap();
    assert_eq!(output.status.code(), Some(2), "no command: the help, as an error");
    assert!(String::from_utf8(output.stderr.clone()).unwrap().contains("Usage: sparse24"));
}

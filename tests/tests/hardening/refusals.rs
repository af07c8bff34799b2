//! What a refusal says of a known attack: the file, the place in it, what was found, what was
//! expected.

use std::{fs, path::Path};

use sparse24_core::MaskKind;
use sparse24_run::{
    Error,
    config::Config,
    data::{Dataset, Tokenizer, shard},
    interchange::Gpt2Config,
    pruning::{Selection, verify_file},
    run::MetricsLog,
};

/// The message about a file with these bytes, without the folder that it lies in.
fn message<T: std::fmt::Debug>(
    name: &str,
    bytes: &[u8],
    load: impl Fn(&Path) -> Result<T, Error>,
) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    fs::write(&path, bytes).unwrap();
    let message = load(&path).unwrap_err().to_string();
    let folder = format!("{}/", folder.path().display());
    assert!(message.contains(&folder), "no path: {message}");
    message.replace(&folder, "")
}

fn config(text: &str) -> String {
    message("run.toml", text.as_bytes(), |path| Config::resolve(None, Some(path), &[]))
}

fn set(setting: &str) -> String {
    Config::resolve(None, None, &[setting.to_owned()]).unwrap_err().to_string()
}

#[test]
fn configurations() {
    for (text, expected) in [
        (
            "[optimizer]\nlearning_rate = nan\n",
            "run.toml: optimizer.learning_rate: expected a finite number of at least 0, found NaN",
        ),
        (
            "[optimizer]\nmax_grad_norm = 1e39\n",
            "run.toml: optimizer.max_grad_norm: expected a finite number of at least 0, found inf",
        ),
        (
            "[model]\ndropout = inf\n",
            "run.toml: model.dropout: expected a number in [0, 1), found inf",
        ),
        (
            "[data]\nvalidation_share = nan\n",
            "run.toml: data.validation_share: expected a share above 0 and below 1, found NaN",
        ),
        ("steps = 1\nsteps = 2\n", "run.toml: line 2: duplicate key"),
        ("x = 1 # \u{1}\n", "run.toml: line 1: "),
        ("\n\u{1b} = 1", "run.toml: line 2: "),
        ("[model]\n\"\\u001b[2J\" = 1\n", "run.toml: model: \"\\u{1b}[2J\" is not known (known: "),
    ] {
        let message = config(text);
        assert!(message.starts_with(expected), "{text:?}: {message}");
    }
    let message = config(&"#\n".repeat(1 << 15).replacen('#', "##", 1));
    assert_eq!(message, "run.toml: holds 65537 bytes, expected at most 65536");
    assert!(config("a = 1\r\n").starts_with("run.toml: configuration: \"a\" is not known"));
}

#[test]
fn settings() {
    assert!(set("model.d_model.x=1").starts_with("configuration: \"model.d_model\" is not known"));
    assert!(set(".steps=1").starts_with("configuration: \"\" is not known"));
    assert!(set("steps.x=1").starts_with("steps: expected a whole number, found {"));
    let long = set(&format!("{}=1", "k".repeat(100_000)));
    assert!(
        long.starts_with("configuration: \"kkk")
            && long.contains(" [...] ")
            && long.ends_with(", steps)"),
        "{long}"
    );
    let deep = set(&format!("x{}=1", ".x".repeat(100_000)));
    assert!(deep.starts_with("configuration: \"x.x") && deep.len() < 1000, "{deep}");
}

#[test]
fn safetensors() {
    let selection = Selection { kind: MaskKind::RowWise, include: &|_| true };
    let refusal = |length: u64, header: &str| {
        let bytes = [&length.to_le_bytes(), header.as_bytes(), &[0; 64]].concat();
        message("w.safetensors", &bytes, |path| verify_file(path, selection))
            .replace("w.safetensors: not a valid safetensors file: ", "")
    };
    let of = |header: &str| refusal(header.len() as u64, header);
    assert_eq!(
        refusal(u64::MAX, "{}"),
        "header length 18446744073709551615 exceeds the limit of 16777216 bytes"
    );
    assert_eq!(refusal(67, "{}"), "header length 67 exceeds the 66 bytes after it");
    for (header, expected) in [
        (r#"{"w":["F32",[4,4],[0,64]]}"#, "tensor `w`: expected an object"),
        (r#"{"\u001b[2J":0}"#, "the name \"\\u{1b}[2J\" has control characters, expected none"),
        (r#"{"w":{"dtype":"F32","dtype":"F16"}}"#, "tensor `w`: duplicate field `dtype`"),
        (
            r#"{"w":{"dtype":"F32","shape":[4,4],"data_offsets":[0,18446744073709551616]}}"#,
            "tensor `w`: ",
        ),
        (
            r#"{"w":{"dtype":"F32","shape":[4,4],"data_offsets":[0,18446744073709551615]}}"#,
            "tensor `w` F32 [4, 4] takes 64 bytes, its",
        ),
        (
            r#"{"w":{"dtype":"F32","shape":[9223372036854775808,4],"data_offsets":[0,64]}}"#,
            "tensor `w` cannot have the shape [",
        ),
    ] {
        let message = of(header);
        assert!(
            message.strip_prefix("malformed header: ").unwrap_or(&message).starts_with(expected),
            "{message}"
        );
    }
    let message = of(&format!("{{\"{}\":0}}", "n".repeat(5000)));
    assert!(message.contains("a name of 5000 bytes, expected at most 4096"), "{message}");
}

#[test]
fn tokens() {
    let mut bytes: Vec<u8> =
        [20_240_801_u32, 7, 1].iter().flat_map(|number| number.to_le_bytes()).collect();
    bytes.resize(1024, 0);
    bytes.extend([0xff; 4]);
    assert_eq!(
        message("train.bin", &bytes, |path| shard::read(path, Some(256))),
        "train.bin: token 4294967295 at position 0 is beyond the vocabulary of 256"
    );
    let folder = tempfile::tempdir().unwrap();
    ["train.bin", "val.bin"]
        .iter()
        .for_each(|name| fs::write(folder.path().join(name), &bytes).unwrap());
    let message_of_folder =
        Dataset::from_folder(folder.path(), None, None).unwrap_err().to_string();
    assert!(message_of_folder.ends_with(
        ": holds the token 4294967295, which no vocabulary has; not a folder of token shards"
    ));
    let tokenizer = r#"{"sparse24_tokenizer":1,"kind":"char","characters":"abca"}"#;
    let message = message("tokenizer.json", tokenizer.as_bytes(), Tokenizer::load);
    assert!(message.contains("`characters` must ascend, but 'c' comes before 'a'"), "{message}");
}

#[test]
fn lists_of_numbers() {
    let line = r#"{"step":1,"phase":"dense","loss":0,"lr":0,"grad_norm":0,"tokens_per_s":0}"#;
    let read = |text: &str| message("metrics.jsonl", text.as_bytes(), MetricsLog::read);
    assert!(
        read(&format!("{line}\n{line}\n"))
            .ends_with("line 2 is no metrics of the next step: step 1 follows step 1")
    );
    let long = format!("{line}\n{}\n", " ".repeat(1 << 20));
    assert_eq!(
        read(&long),
        "metrics.jsonl: line 2 is longer than 1048576 bytes, too long for metrics"
    );
    let sound = r#"{"model_type":"gpt2","n_layer":2,"n_head":4,"n_embd":32,"n_positions":64,"vocab_size":256"#;
    for (field, expected) in [
        (
            r#","layer_norm_epsilon":"1e-5""#,
            "layer_norm_epsilon is \"1e-5\", expected 0.00001; no other value is supported",
        ),
        (r#","layer_norm_epsilon":1e999"#, "not a GPT-2 configuration: number out of range"),
        (
            r#","n_inner":18446744073709551615"#,
            "n_inner is 18446744073709551615, expected 1..=16777216",
        ),
        (
            r#","n_inner":4.5"#,
            "not a GPT-2 configuration: invalid type: floating point `4.5`, expected usize",
        ),
        (r#","n_layer":2"#, "not a GPT-2 configuration: duplicate field `n_layer`"),
    ] {
        let message =
            message("config.json", format!("{sound}{field}}}").as_bytes(), Gpt2Config::read);
        assert!(message.starts_with(&format!("config.json: {expected}")), "{message}");
    }
}

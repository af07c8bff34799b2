//! Facts that the errors about known attacks contain: the file, the place in it, the value found
//! and the one expected.

use std::fs;

use sparse24_run::{config::Config, data::shard::Shard};
use sparse24_tests::hardening::tensors;

use super::loaders::{LOADERS, MODEL, loader};

type Facts<'a> = &'a [&'a str];

/// A file or one loader, the file's bytes, and the facts that every error about them contains.
type Case<'a> = (&'static str, Vec<u8>, Facts<'a>);

fn refused(cases: Vec<Case<'_>>) {
    for (name, bytes, facts) in cases {
        let folder = tempfile::tempdir().unwrap();
        for (loader, file, load) in LOADERS.iter().filter(|l| l.0 == name || l.1 == name) {
            let path = folder.path().join(file);
            fs::write(&path, &bytes).unwrap();
            let message = load(&path).unwrap_err().to_string();
            for fact in [&[folder.path().to_str().unwrap()], facts].concat() {
                assert!(message.contains(fact), "{loader}: {message:?} lacks {fact:?}");
            }
            assert!(message.len() < 2500, "{loader}: {message}");
        }
    }
}

#[test]
fn configurations() {
    let case =
        |text: &str, facts: Facts<'static>| ("Config::resolve", text.as_bytes().to_vec(), facts);
    refused(vec![
        case("[optimizer]\nlearning_rate = nan\n", &["optimizer.learning_rate", "NaN"]),
        case("[optimizer]\nmax_grad_norm = 1e39\n", &["optimizer.max_grad_norm", "1e39"]),
        case("steps = 1\nsteps = 2\n", &["line 2"]),
        case("x = 1 # \u{1}\n", &["line 1"]),
        case("\n\u{1b} = 1", &["line 2"]),
        case("[model]\n\"\\u001b[2J\" = 1\n", &["model", "\\u{1b}[2J"]),
        case(&"#".repeat((1 << 16) + 1), &["65537", "65536"]),
        case("a = 1\r\n", &["\"a\""]),
    ]);
}

#[test]
fn settings() {
    let (long, deep) = ("k".repeat(100_000) + "=1", "x".to_owned() + &".x".repeat(100_000) + "=1");
    for (setting, fact) in [
        ("model.layers.x=1", "\"model.layers\""),
        (".steps=1", "\"\""),
        ("steps.x=1", "steps: "),
        (&long, "kkk"),
        (&deep, "x.x.x"),
    ] {
        let error = Config::resolve(None, None, &[setting.to_owned()]).unwrap_err().to_string();
        assert!(error.contains(fact) && error.len() < 1000, "{error}");
    }
}

#[test]
fn safetensors() {
    for (header, facts) in tensors::headers().iter().filter(|(_, facts)| !facts.is_empty()) {
        let facts: Vec<&str> = facts.split('*').collect();
        refused(vec![(MODEL, tensors::file(header, &[0; 64]), &facts)]);
    }
    let claims = |length: u64, facts| {
        let bytes = [&length.to_le_bytes()[..], b"{}", &[0; 64]].concat();
        refused(vec![(MODEL, bytes, facts)]);
    };
    claims(u64::MAX, &["18446744073709551615", "16777216"]);
    claims(67, &["67", "66"]);
    refused(vec![(MODEL, vec![0; 7], &["7 bytes cannot hold"])]);
}

#[test]
fn tokens() {
    let mut bytes = [20_240_801_u32, 7, 1].map(u32::to_le_bytes).concat();
    bytes.resize(1024, 0);
    bytes.extend([0xff; 4]);
    let tokenizer = r#"{"sparse24_tokenizer":1,"kind":"char","characters":"abca"}"#;
    let folder = tempfile::tempdir().unwrap();
    let paths = ["train.bin", "val.bin"].map(|name| folder.path().join(name));
    paths.iter().for_each(|path| fs::write(path, &bytes).unwrap());
    let errors = [
        loader("Dataset::from_folder")(&paths[0]).unwrap_err(),
        Shard::open(&paths[0], Some(256))
            .and_then(|shard| shard.copy_to(0, 1, &mut Vec::new()))
            .unwrap_err(),
    ];
    assert!(errors.iter().all(|error| error.to_string().contains("4294967295")));
    assert!(errors[1].to_string().contains("position 0"));
    refused(vec![("tokenizer.json", tokenizer.into(), &["`characters`", "'c'", "'a'"])]);
}

#[test]
fn metrics_and_shapes() {
    let line = r#"{"step":1,"phase":"dense","loss":0,"lr":0,"grad_norm":0,"tokens_per_s":0}"#;
    let metrics =
        |text: String, facts: Facts<'static>| ("MetricsLog::steps", text.into_bytes(), facts);
    let sound = "\"model_type\":\"gpt2\",\"n_layer\":2,\"n_head\":4,\"n_embd\":32,\
        \"n_positions\":64,\"vocab_size\":256";
    let with = |field: &str, facts: Facts<'static>| {
        ("config.json", format!("{{{sound},{field}}}").into_bytes(), facts)
    };
    refused(vec![
        metrics(format!("{line}\n{line}\n{line}\n"), &["line 2", "step 1"]),
        metrics(format!("{line}\n{}\n", " ".repeat(1 << 20)), &["line 2", "1048576"]),
        with(r#""layer_norm_epsilon":"1e-5""#, &["layer_norm_epsilon", "1e-5", "0.00001"]),
        with(r#""layer_norm_epsilon":1e999"#, &["out of range"]),
        with(r#""n_inner":18446744073709551615"#, &["n_inner", "18446744073709551615", "16777216"]),
        with(r#""n_inner":4.5"#, &["4.5"]),
        with(r#""n_layer":2"#, &["`n_layer`"]),
        with(r#""id2label":{"x":"a"}"#, &["id2label", "x"]),
    ]);
}

//! Files as large as a loader reads, made to take as much memory as they can: a loader holds at
//! most twice the file and 64 MiB at a time, both copies of a growing buffer counted. Each case
//! prints the memory and the time that it took (`--nocapture`).

use std::{collections::BTreeMap, fs, path::Path, time::Instant};

use sparse24_core::op::Activation;
use sparse24_lab::{report::View, search::SearchResults};
use sparse24_run::{
    Error,
    checkpoint::{self, NamedTensor},
    config::Config,
    data::Tokenizer,
    interchange::{FORMATS, folder_tokenizer, import, shapes},
    run::{Given, Model, Provenance, Resume, Run, open_data, save_imported},
};
use sparse24_tests::hardening::{
    checkpoint::{closed, forge, sound},
    memory_bound, tensors,
};
use sparse24_train::{
    model::{Gpt2Spec, ModelSpec, Sparsify},
    nn::Bias,
};

use super::loaders::{LOADERS, MODEL, loader};

/// Loads a folder of these files and returns whether that works; panics if it holds too much.
fn held<T>(what: &str, files: &[(&str, &[u8])], load: impl Fn(&Path) -> Result<T, Error>) -> bool {
    let total = files.iter().map(|(_, bytes)| bytes.len()).sum();
    held_within(memory_bound(total), what, files, load)
}

/// Like [`held`], with another bound.
fn held_within<T>(
    bound: u64,
    what: &str,
    files: &[(&str, &[u8])],
    load: impl Fn(&Path) -> Result<T, Error>,
) -> bool {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    let total: usize = files.iter().map(|(_, bytes)| bytes.len()).sum();
    let (mut outcome, start) = (None, Instant::now());
    let used = allocation_counter::measure(|| outcome = Some(load(folder.path()))).bytes_max;
    let (outcome, seconds) = (outcome.unwrap(), start.elapsed().as_secs_f64());
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let end = if outcome.is_ok() { "loaded" } else { "refused" };
    let (held, size) = (mib(used), mib(total as u64));
    println!("{what}: {held:.1} MiB held for {size:.1} MiB, {end} in {seconds:.2} s");
    assert!(used <= bound, "{what}: held {used} bytes for {total}");
    assert!(outcome.as_ref().err().is_none_or(|error| error.to_string().len() < 2500));
    outcome.is_ok()
}

/// Every loader of this file holds little memory; returns how many of them accept the bytes.
fn all_hold(what: &str, name: &str, bytes: &[u8]) -> usize {
    let loaders = LOADERS.iter().filter(|(_, file, _)| *file == name);
    loaders
        .filter(|(loader, file, load)| {
            let load = |folder: &Path| load(&folder.join(file));
            held(&format!("{what}, {loader}"), &[(name, bytes)], load)
        })
        .count()
}

/// `count` copies of a text in which `#` is replaced by the number of the copy, from 1.
fn numbered(count: usize, text: &str) -> String {
    (1..=count).map(|number| text.replace('#', &number.to_string())).collect()
}

/// A JSON object of as many of these entries as fit into this many bytes.
fn object(bytes: usize, entry: &str) -> String {
    let count = bytes / (entry.len() + if entry.contains('#') { 7 } else { 1 });
    format!("{{{}}}", numbered(count, &format!("{entry},")).trim_end_matches(','))
}

#[test]
fn headers_of_safetensors() {
    const LONGEST: usize = 1 << 24;
    let long = |dimensions: &str| {
        let entry =
            format!(r##""#":{{"dtype":"F4","shape":[{dimensions}],"data_offsets":[0,0]}}"##);
        object(LONGEST, &entry)
    };
    let half = LONGEST / 2 - 200;
    for (what, header) in [
        ("shortest entries", long("")),
        ("one dimension", long("0")),
        ("five dimensions", long("0,0,0,0,0")),
        ("64 dimensions", long(&["0"; 64].join(","))),
        ("entries as lists", object(LONGEST, r##""#":["F4",[0],[0,0]]"##)),
        (
            "one name twice",
            object(LONGEST, r#""":{"dtype":"F4","shape":[0],"data_offsets":[0,0]}"#),
        ),
        ("a long name", format!("{{\"{}\":0}}", "n".repeat(2 * half))),
        ("a long escaped name", format!("{{\"{}\":0}}", "\\n".repeat(half))),
        ("a long type", format!(r#"{{"w":{{"dtype":"{}"}}}}"#, "F".repeat(2 * half))),
        ("a long field", format!(r#"{{"w":{{"{}":0}}}}"#, "\\u0041".repeat(half / 3))),
        ("long metadata", format!(r#"{{"__metadata__":{{"a":"{}"}}}}"#, "\\n".repeat(half))),
        ("nested metadata", format!(r#"{{"__metadata__":{}"#, "[".repeat(2 * half))),
        ("a long shape", format!(r#"{{"w":{{"shape":[{}0]}}}}"#, "0,".repeat(half))),
        ("a long number", format!(r#"{{"w":{{"shape":[{}]}}}}"#, "9".repeat(2 * half))),
    ] {
        assert!(header.len() <= LONGEST, "{what}");
        assert_eq!(all_hold(what, MODEL, &tensors::file(&header, &[])), 0, "{what} was accepted");
    }
}

/// A file of these tensors, all zero, of a type with its bits per element.
fn weights(dtype: (&'static str, usize), shapes: &[(String, Vec<usize>)]) -> Vec<u8> {
    let entry = |(name, shape): &(String, Vec<usize>)| (name.clone(), dtype, shape.clone());
    tensors::holding(&shapes.iter().map(entry).collect::<Vec<_>>(), 0)
}

const SMALL: Gpt2Spec = Gpt2Spec {
    layers: 1,
    heads: 1,
    d_model: 1024,
    d_ff: 16_384,
    sequence_length: 4,
    vocabulary: 4,
    activation: Activation::Gelu,
    bias: Bias::Absent,
    sparsify: Sparsify::Ffn,
    prediction: None,
};

#[test]
fn many_tensors_and_large_ones() {
    let many: Vec<_> =
        (0..100_000).map(|number| (format!("layer.{number}.weight"), vec![1, 4])).collect();
    let bytes = weights(("F32", 32), &many);
    // The imports ask for a tensor that it has not.
    assert_eq!(all_hold("many tensors", MODEL, &bytes), 2);
    assert!(held("imported", &[(MODEL, &bytes)], |folder| import(folder, &FORMATS[0], &many)));
    // The largest is transposed, and stored at half the width.
    let expected = shapes(&ModelSpec::Gpt2(SMALL)).unwrap();
    let mut stored = expected.clone();
    stored.iter_mut().filter(|(name, _)| name.starts_with("h.")).for_each(|(_, s)| s.reverse());
    let bytes = weights(("F16", 16), &stored);
    let import_gpt2 = |folder: &Path| import(folder, &FORMATS[0], &expected);
    assert!(held("half width", &[(MODEL, &bytes)], import_gpt2));
    assert_eq!(all_hold("large tensors", MODEL, &bytes), 2);
    // One parameter of three tensors.
    let name = |layer: &str| format!("encoder.layer.0.attention.self.{layer}.weight");
    let parts = ["query", "key", "value"].map(|part| (name(part), vec![2048, 2048]));
    let bytes = weights(("F16", 16), &parts);
    let qkv = [(name("qkv"), vec![3 * 2048, 2048])];
    assert!(held("three parts", &[(MODEL, &bytes)], |folder| import(folder, &FORMATS[1], &qkv)));
}

/// A checkpoint holds little memory; returns whether it loads.
fn checkpoint_loads(what: &str, saved: &Path) -> bool {
    let paths: Vec<_> = fs::read_dir(saved).unwrap().map(|entry| entry.unwrap().path()).collect();
    let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    let files: Vec<_> = paths.iter().map(|path| (name(path), fs::read(path).unwrap())).collect();
    let files: Vec<_> =
        files.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice())).collect();
    held(what, &files, checkpoint::load)
}

#[test]
fn checkpoints() {
    let tensor = |name: &str| {
        let (name, shape, values) = (name.to_owned(), vec![4096, 2048], vec![0.5; 4096 * 2048]);
        NamedTensor { name, shape, values }
    };
    let folder = tempfile::tempdir().unwrap();
    let large = checkpoint::Checkpoint {
        weights: vec![tensor("a"), tensor("b")],
        first_moments: vec![tensor("a")],
        second_moments: Vec::new(),
        masks: Vec::new(),
        ..sound()
    };
    let saved = checkpoint::save(folder.path(), &large).unwrap();
    drop(large);
    assert!(checkpoint_loads("a checkpoint", &saved));
    // Manifests whose checksum is right.
    let part = format!(r#"["",0,"{}"]"#, "0".repeat(64));
    let of_one = |parts: String| format!(r#"{{"state.json":{parts}}}"#);
    for (what, files) in [
        ("many parts", of_one(format!("[{}]", vec![part; 50_000].join(",")))),
        ("a long part", of_one(format!(r#"[["{}""#, "\\n".repeat(2_000_000)))),
        ("a long hash", of_one(format!(r#"[["",0,"{}"]]"#, "0".repeat(4_000_000)))),
        ("nested", of_one("[".repeat(4_000_000))),
        ("many files", object(4_100_000, r##""#":[]"##)),
    ] {
        let fields = r#""format":"sparse24-checkpoint","format_version":2,"step":1"#;
        let manifest = closed(&format!("{{{fields},\"files\":{files}"));
        assert!(manifest.len() < 4 << 20, "{what}");
        assert_eq!(all_hold(what, "manifest.json", &manifest), 0, "{what} was accepted");
    }
    for (key, value) in [("plan", "\"\""), ("config", "\"\"")] {
        let folder = tempfile::tempdir().unwrap();
        let saved = checkpoint::save(folder.path(), &sound()).unwrap();
        let state = fs::read_to_string(saved.join("state.json")).unwrap();
        let entries = numbered(90_000, &format!("\"#\":{value},"));
        let state =
            state.replacen(&format!("\"{key}\": {{"), &format!("\"{key}\": {{{entries}"), 1);
        assert!(state.len() > 600_000, "{key} is not where it was");
        forge(&saved, "state.json", state.as_bytes());
        assert!(checkpoint_loads(key, &saved));
    }
}

#[test]
fn configurations() {
    const LONGEST: usize = 1 << 16;
    for (what, text) in [
        ("keys", numbered(LONGEST / 9, "k#=1\n")),
        ("tables", numbered(LONGEST / 9, "[t#]\n")),
        ("arrays of tables", "[[a]]\n".repeat(LONGEST / 6)),
        ("an array", format!("a=[{}]", "0,".repeat(LONGEST / 2 - 3))),
        ("inline tables", format!("a=[{}]", "{},".repeat(LONGEST / 3 - 3))),
        ("nested arrays", "a=".to_owned() + &"[".repeat(LONGEST - 2)),
        ("dots", "a".to_owned() + &".a".repeat(LONGEST / 2 - 3) + "=1"),
        ("dotted headers", numbered(LONGEST / 170, &format!("[k#{}]\n", ".a".repeat(80)))),
        ("a long key", "k".repeat(LONGEST - 2) + "=1"),
        ("a long string", format!("preset=\"{}\"", "\\n".repeat(LONGEST / 2 - 8))),
        ("errors", "=\n".repeat(LONGEST / 2)),
        ("control characters", "\u{1}".repeat(LONGEST)),
        ("line feeds", "\n".repeat(LONGEST)),
    ] {
        assert!(text.len() <= LONGEST, "{what}");
        all_hold(what, "config.toml", text.as_bytes());
        all_hold(what, "study.toml", text.as_bytes());
        let setting = [text.replace('\n', " ")];
        held(what, &[], |_| Config::resolve(None, None, &setting));
    }
    let sound = "\"model_type\":\"gpt2\",\"n_layer\":2,\"n_head\":4,\"n_embd\":32,\
        \"n_positions\":64,\"vocab_size\":256";
    let half = (1 << 19) - 100;
    for (what, field) in [
        ("keys", format!("\"x\":{}", object(2 * half, r##""#":0"##))),
        ("an array", format!(r#""x":[{}0]"#, "0,".repeat(half))),
        ("an array for a choice", format!(r#""activation_function":[{}0]"#, "0,".repeat(half))),
        ("objects for a choice", format!(r#""activation_function":[{}0]"#, "{},".repeat(half / 3))),
        ("objects", format!(r#""x":[{}0]"#, r#"{"":0},"#.repeat(2 * half / 7))),
        ("a long string", format!(r#""activation_function":"{}""#, "\\n".repeat(half))),
        ("nested", format!(r#""x":{}"#, "[".repeat(2 * half))),
    ] {
        all_hold(what, "config.json", format!("{{{sound},{field}}}").as_bytes());
    }
}

#[test]
fn tokens() {
    let ids = vec![1; 32 << 20];
    let raw: [(&str, &[u8]); 2] = [("train.bin", &ids), ("val.bin", &ids[..64])];
    let open = loader("Dataset::from_folder");
    assert!(held("raw tokens", &raw, |folder| open(&folder.join("train.bin"))));
    let mut wide = [20_240_801_u32, 7, 8 << 20].map(u32::to_le_bytes).concat();
    wide.resize(1024 + (32 << 20), 0);
    assert!(all_hold("llm.c's tokens", "train.bin", &wide) > 0);
    let tokenizer =
        |text: String| format!(r#"{{"sparse24_tokenizer":1,"kind":"char","characters":"{text}"}}"#);
    let escaped = |letter: char| -> String {
        letter.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect()
    };
    let half = 6_500_000;
    for (what, text, accepted) in [
        ("all characters", tokenizer(('\u{80}'..=char::MAX).collect()), 1),
        ("all characters, escaped", tokenizer((' '..=char::MAX).map(escaped).collect()), 1),
        ("one character", tokenizer("a".repeat(2 * half)), 0),
        ("one character, escaped", tokenizer("\\n".repeat(half)), 0),
        ("a long kind", format!(r#"{{"kind":"{}"}}"#, "\\n".repeat(half)), 0),
        ("a long field", format!(r#"{{"{}":0}}"#, "\\n".repeat(half)), 0),
    ] {
        assert_eq!(all_hold(what, "tokenizer.json", text.as_bytes()), accepted, "{what}");
    }
}

const SPECIAL: &str = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]";

/// Lists and objects take up to a hundred times their bytes.
#[test]
fn values() {
    let view = |folder: &Path| View::read(&[folder.to_owned()]).map(drop);
    let starts = |folder: &Path| Provenance::read(&folder.join("provenance.json")).map(drop);
    let search = |folder: &Path| SearchResults::read(folder).map(drop);
    let read = |folder: &Path| Tokenizer::read(&folder.join("tokenizer.json")).map(drop);
    let words = |folder: &Path| Tokenizer::read(&folder.join("vocab.txt")).map(drop);
    let compared = |folder: &Path| folder_tokenizer(folder, &ModelSpec::Gpt2(SMALL)).map(drop);
    let command = r##"[{"version":"","git":"","started":"","command":#}]"##;
    let cells = "[#".to_owned() + &",{}".repeat(99) + "]";
    let nested = "[".repeat(100) + "0" + &"]".repeat(100);
    let mut most = BTreeMap::new();
    for entry in [&nested, "[0]", r#"{"":0}"#, "0", "\"\"", "\"#\":0"] {
        // The most that is parsed, and far more.
        for bytes in [1 << 16, 1 << 18, 1 << 19, 16 << 20] {
            let list = match entry.contains('#') {
                true => object(bytes, entry),
                false => format!("[{}0]", format!("{entry},").repeat(bytes / (entry.len() + 1))),
            };
            for (name, pattern, load) in [
                ("provenance.json", "#", &view as &dyn Fn(&Path) -> Result<(), Error>),
                ("provenance.json", &cells, &view),
                ("provenance.json", command, &starts),
                ("study.json", r##"{"arms":#}"##, &view),
                ("study.json", r##"{"arms":[],"trends":#}"##, &view),
                ("search.json", r##"{"candidates":#}"##, &view),
                ("search.json", r##"{"seeds":#}"##, &search),
                ("tokenizer.json", r##"{"model":#}"##, &read),
                ("tokenizer.json", r##"{"model":{"vocab":#}}"##, &compared),
                ("vocab.json", "#", &compared),
                ("tokenizer_config.json", r##"{"x":#}"##, &words),
            ] {
                let text = pattern.replace('#', &list);
                let beside = [("vocab.txt", SPECIAL), ("merges.txt", ""), ("log.txt", "")];
                let beside = beside.map(|(name, text)| (name, text.as_bytes()));
                let files = [&[(name, text.as_bytes())], &beside[..]].concat();
                let what = format!("{name}, {bytes} bytes of {entry:.9}");
                let used = allocation_counter::measure(|| {
                    held(&what, &files, load);
                });
                let most = most.entry((name, pattern)).or_insert(0);
                if bytes < 1 << 20 {
                    *most = used.bytes_max.max(*most);
                }
            }
        }
    }
    // Lists were parsed: each file has taken several times its bytes.
    for (case, most) in most {
        assert!(most > 2 << 20, "{case:?}: {most} bytes at most");
    }
}

/// Vocabularies may need more: as much as SECURITY.md names.
#[test]
fn vocabularies() {
    let letters: Vec<char> = ('='..='Z').chain('a'..='z').collect();
    let mut pieces: Vec<String> = letters.iter().map(char::to_string).collect();
    // Each joins one before it and a letter.
    for at in 0..940_000 / letters.len() - 1 {
        let next: Vec<_> = letters.iter().map(|letter| format!("{}{letter}", pieces[at])).collect();
        pieces.extend(next);
    }
    let ours = |kind: &str, pieces: &[String]| {
        let list = serde_json::to_string(pieces).unwrap();
        format!(r#"{{"sparse24_tokenizer":1,"kind":"{kind}","{kind}":{list}}}"#)
    };
    let words = |end: &str| {
        let lines = pieces.iter().map(|piece| format!("\n{piece}{end}"));
        SPECIAL.to_owned() + &lines.collect::<String>()
    };
    for (what, name, text, accepted) in [
        ("BPE", "tokenizer.json", ours("bpe", &pieces[letters.len()..]), true),
        ("dictionary", "tokenizer.json", ours("dictionary", &pieces), true),
        ("WordPiece", "vocab.txt", words(""), true),
        ("long pieces", "vocab.txt", words(&"x".repeat(60)), false),
    ] {
        let load = |folder: &Path| Tokenizer::read(&folder.join(name));
        let files = [(name, text.as_bytes())];
        assert_eq!(held_within(300 << 20, what, &files, load), accepted, "{what}");
    }
}

const TINY: [&str; 6] = [
    "model.layers=1",
    "model.heads=2",
    "model.d_model=8",
    "model.d_ff=16",
    "model.sequence_length=8",
    "batch.size=2",
];

/// Checkpoints with small tensors whose settings describe a large model.
#[test]
fn settings_of_larger_models_than_the_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let [path, other] = ["run", "other"].map(|name| folder.path().join(name));
    let resolved = |preset, more: &[&str]| {
        let settings: Vec<_> = TINY.iter().chain(more).map(|&setting| setting.to_owned()).collect();
        Config::resolve(preset, None, &settings).unwrap()
    };
    let weights = |config: &Config, vocabulary| {
        let shapes = shapes(&config.recipe(vocabulary).unwrap().model).unwrap();
        let zero = |(name, shape): (String, Vec<usize>)| {
            let values = vec![0.0; shape.iter().product()];
            NamedTensor { name, shape, values }
        };
        shapes.into_iter().map(zero).collect::<Vec<_>>()
    };
    let held = |what: &str, load: &dyn Fn() -> Result<(), Error>| {
        let mut outcome = None;
        let used = allocation_counter::measure(|| outcome = Some(load())).bytes_max;
        println!("{what}: {used} bytes held");
        assert!(used <= memory_bound(0), "{what}: {used} bytes");
        outcome.unwrap().err().map_or_else(String::new, |error| error.to_string())
    };
    let sound = resolved(None, &[]);
    let data = open_data(&sound).unwrap();
    let given = weights(&sound, data.vocabulary() as usize);
    let given = Given { weights: Some(&given), ..Given::default() };
    drop(Run::start(sound, data.clone(), given, &path).unwrap());
    let saved = path.join("checkpoints/step-00000000");
    let state = fs::read_to_string(saved.join("state.json")).unwrap();
    for (key, small, large, expected) in [
        ("model.d_ff", 16, 400_000, "h.0.mlp.c_fc.weight: expected the shape [400000, 8]"),
        ("model.sequence_length", 8, 40_000, "wpe.weight: expected the shape [40000, 8]"),
        ("model.layers", 1, 4096, "h.1.ln_1.weight: its weight is missing"),
    ] {
        let config = resolved(None, &[&format!("{key}={large}")]);
        let [from, to] = [small, large].map(|value| format!("\"{key}\": \"{value}\""));
        assert!(state.contains(&from), "{state}");
        forge(&saved, "state.json", state.replace(&from, &to).as_bytes());
        fs::write(path.join("config.toml"), config.to_toml()).unwrap();
        let (config, data) = (&config, &data);
        type Load<'a> = (&'a str, &'a dyn Fn() -> Result<(), Error>);
        let loads: [Load<'_>; 3] = [
            ("read", &|| Model::read(&path)?.into_trainer().map(drop)),
            ("resumed", &|| Run::resume(&path, &Resume::default()).map(drop)),
            ("given", &|| Run::start(config.clone(), data.clone(), given, &other).map(drop)),
        ];
        for (what, load) in loads {
            let problem = held(&format!("{key}, {what}"), load);
            assert!(problem.contains(expected), "{key}, {what}: {problem}");
        }
    }
    // Positions that are computed have no tensor.
    let long = resolved(
        Some("transformer-multi30k-cpu"),
        &["method.name=dense", "model.sequence_length=524288"],
    );
    save_imported(&long, weights(&long, 300), None, &other).unwrap();
    let read = || Model::read(&other)?.for_sentences(20).into_trainer().map(drop);
    assert_eq!(held("a Transformer", &read), "");
}

#[test]
fn metrics() {
    let line = |more: &str| {
        let fields = r##""step":#,"phase":"dense","loss":0,"lr":0,"grad_norm":0,"tokens_per_s":0"##;
        format!("{{{fields}{more}}}\n")
    };
    let layers = object(1_080_000, r##""#":0"##);
    let layers = format!(",\"flip_rate_per_layer\":{layers}");
    let sampled = |step: usize| line(&layers).replacen('#', &step.to_string(), 1);
    let sample = r#""kept":0,"flips_per_tile":0,"gap""#;
    let samples = format!(
        r#","instruments":{{{sample}:[0,0,0,0,0],"layers":{{"":{{{sample}:0}}}},"tiles":[]}}"#
    );
    let config = Config::resolve(None, None, &TINY.map(str::to_owned)).unwrap();
    let data = open_data(&config).unwrap();
    let evaluated = line(r#","val_loss":0,"flip_rate":0"#);
    for (what, text) in [
        ("steps", numbered(400_000, &line(""))),
        ("evaluations", numbered(400_000, &evaluated)),
        ("layers", (1..40).map(sampled).collect()),
        ("one layer", numbered(300_000, &line(r#","flip_rate_per_layer":{"":0}"#))),
        ("instruments", numbered(300_000, &line(&samples))),
        ("no line", "x".repeat(64 << 20)),
        ("a long line", line(&" ".repeat(32 << 20)).replace('#', "1")),
    ] {
        all_hold(what, "metrics.jsonl", text.as_bytes());
        let view = |folder: &Path| View::read(&[folder.to_owned()]);
        assert!(held(&format!("{what}, report"), &[("metrics.jsonl", text.as_bytes())], view));
        let toml = config.to_toml();
        let files = [("metrics.jsonl", text.as_bytes()), ("config.toml", toml.as_bytes())];
        assert!(!held(&format!("{what}, best checkpoint"), &files, Model::read_best));
        let compared = |folder: &Path| {
            let mut config = config.clone();
            config.run.flip_reference = folder.display().to_string();
            Run::start(config, data.clone(), Given::default(), &folder.join("run")).map(drop)
        };
        let is_reference = held(&format!("{what}, reference of flip rates"), &files, compared);
        assert_eq!(is_reference, what == "evaluations");
    }
}

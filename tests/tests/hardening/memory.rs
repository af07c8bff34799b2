//! Files as large as a loader reads, made to take as much memory as they can.
//!
//! Invariant: a loader holds at most twice the file and 64 MiB at a time, counted with both copies
//! of what grows. Each case prints what it held and how long it took (`--nocapture` shows it).

use std::{fmt::Write, fs, path::Path, time::Instant};

use sparse24_core::MaskKind;
use sparse24_run::{
    Error,
    checkpoint::{self, NamedTensor},
    config::Config,
    data::{Dataset, Tokenizer, shard},
    interchange::{Gpt2Config, import},
    pruning::{Search, Selection, Unprunable, prune_file, verify_file},
    run::MetricsLog,
};
use sparse24_tests::hardening::{
    checkpoint::{forge, sealed, sound},
    memory_bound,
};
use sparse24_train::nn::linear24::Bias;

/// What `load` holds at a time of a folder with these files, and whether it loads.
fn held<T>(what: &str, files: &[(&str, &[u8])], load: impl Fn(&Path) -> Result<T, Error>) -> bool {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    let total: usize = files.iter().map(|(_, bytes)| bytes.len()).sum();
    let mut outcome = None;
    let began = Instant::now();
    let used = allocation_counter::measure(|| outcome = Some(load(folder.path()))).bytes_max;
    let outcome = outcome.unwrap();
    let seconds = began.elapsed().as_secs_f64();
    let ended = if outcome.is_ok() { "loaded" } else { "refused" };
    println!(
        "{what}: {:.1} MiB held for {:.1} MiB, {ended} in {seconds:.2} s",
        mib(used),
        mib(total as u64)
    );
    assert!(used <= memory_bound(total), "{what}: held {used} bytes for {total}");
    if let Err(error) = &outcome {
        let message = error.to_string();
        assert!(message.len() < 2500, "{message}");
    }
    outcome.is_ok()
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

const FILE: &str = "model.safetensors";

fn selection() -> Selection<'static> {
    Selection { kind: MaskKind::RowWise, include: &|_| true }
}

fn safetensors(header: &str, data: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &vec![0; data]].concat()
}

/// As many of these entries as fit into the longest header; `#` in one is its number.
fn header(entry: &str) -> String {
    let mut header = String::from("{");
    for number in 0.. {
        let entry = entry.replace('#', &number.to_string());
        if header.len() + entry.len() + 2 > 1 << 24 {
            break;
        }
        let _ = write!(header, "{}{entry}", if number == 0 { "" } else { "," });
    }
    header + "}"
}

#[test]
fn headers_of_safetensors() {
    let long = |dimensions: &str| {
        format!(r##""#":{{"dtype":"F4","shape":[{dimensions}],"data_offsets":[0,0]}}"##)
    };
    let attacks = [
        ("shortest entries", header(&long(""))),
        ("one dimension", header(&long("0"))),
        ("five dimensions", header(&long("0,0,0,0,0"))),
        ("64 dimensions", header(&long(&["0"; 64].join(",")))),
        ("entries as lists", header(r##""#":["F4",[0],[0,0]]"##)),
        ("one name twice", header(&long("0").replace('#', ""))),
        ("a long name", format!("{{\"{}\":0}}", "n".repeat(16_000_000))),
        ("a long escaped name", format!("{{\"{}\":0}}", "\\n".repeat(8_000_000))),
        ("a long type", format!(r#"{{"w":{{"dtype":"{}"}}}}"#, "F".repeat(16_000_000))),
        ("a long field", format!(r#"{{"w":{{"{}":0}}}}"#, "\\u0041".repeat(2_700_000))),
        ("long metadata", format!(r#"{{"__metadata__":{{"a":"{}"}}}}"#, "\\n".repeat(8_000_000))),
        ("nested metadata", format!(r#"{{"__metadata__":{}"#, "[".repeat(16_000_000))),
        ("a long shape", format!(r#"{{"w":{{"shape":[{}0]}}}}"#, "0,".repeat(8_000_000))),
        ("a long number", format!(r#"{{"w":{{"shape":[{}]}}}}"#, "9".repeat(16_000_000))),
    ];
    for (what, header) in attacks {
        let bytes = safetensors(&header, 0);
        let verified =
            held(what, &[(FILE, &bytes)], |folder| verify_file(&folder.join(FILE), selection()));
        let imported = held(what, &[(FILE, &bytes)], |folder| {
            import(folder, &[("wte.weight".to_owned(), vec![1, 1])])
        });
        assert!(!verified && !imported, "{what} was accepted");
    }
}

#[test]
fn a_hundred_thousand_tensors() {
    let mut header = String::from("{");
    for number in 0..100_000 {
        let begin = 16 * number;
        let _ = write!(
            header,
            r#""layer.{number}.weight":{{"dtype":"F32","shape":[1,4],"data_offsets":[{begin},{}]}},"#,
            begin + 16
        );
    }
    header.pop();
    let bytes = safetensors(&(header + "}"), 1_600_000);
    let path = |folder: &Path| folder.join(FILE);
    assert!(held("verified", &[(FILE, &bytes)], |folder| verify_file(&path(folder), selection())));
    assert!(held("pruned", &[(FILE, &bytes)], |folder| {
        prune_file(&path(folder), &folder.join("out"), selection(), Search::Exact, Unprunable::Copy)
    }));
    let expected: Vec<_> =
        (0..100_000).map(|number| (format!("layer.{number}.weight"), vec![1, 4])).collect();
    assert!(held("imported", &[(FILE, &bytes)], |folder| import(folder, &expected)));
}

#[test]
fn large_tensors() {
    // The largest is one that is transposed, and stored at half the width.
    let config = Gpt2Config {
        n_layer: 1,
        n_head: 1,
        n_embd: 1024,
        n_positions: 4,
        vocab_size: 4,
        n_inner: 16_384,
    };
    let expected = config.parameters(Bias::Absent);
    let mut header = String::from("{");
    let mut end = 0;
    for (name, shape) in &expected {
        let begin = end;
        end += 2 * shape.iter().product::<usize>();
        let stored: Vec<_> = if name.starts_with("h.") {
            shape.iter().rev().copied().collect()
        } else {
            shape.clone()
        };
        let _ = write!(
            header,
            r#""{name}":{{"dtype":"F16","shape":{stored:?},"data_offsets":[{begin},{end}]}},"#
        );
    }
    header.pop();
    let bytes = safetensors(&(header + "}"), end);
    assert!(held("half-width weights", &[(FILE, &bytes)], |folder| import(folder, &expected)));
    assert!(held("verified", &[(FILE, &bytes)], |folder| verify_file(
        &folder.join(FILE),
        selection()
    )));
}

#[test]
fn checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let tensor = |name: &str| NamedTensor {
        name: name.to_owned(),
        shape: vec![4096, 2048],
        values: vec![0.5; 4096 * 2048],
    };
    let checkpoint = checkpoint::Checkpoint {
        weights: vec![tensor("a"), tensor("b")],
        first_moments: vec![tensor("a")],
        second_moments: Vec::new(),
        masks: Vec::new(),
        ..sound()
    };
    let saved = checkpoint::save(folder.path(), &checkpoint).unwrap();
    drop(checkpoint);
    let read = |name: &str| fs::read(saved.join(name)).unwrap();
    let names = [
        "model.safetensors",
        "optimizer.safetensors",
        "masks.safetensors",
        "state.json",
        "manifest.json",
    ];
    let files = names.map(|name| (name, read(name)));
    let files = files.each_ref().map(|(name, bytes)| (*name, bytes.as_slice()));
    assert!(held("a checkpoint", &files, checkpoint::load));
    // Behind a checksum that is right.
    let manifest = |text: String| {
        sealed(format!("{text},\n  \"checksum\": \"{}\"\n}}\n", "0".repeat(64)).as_bytes())
    };
    let part = format!(r#"["",0,"{}"]"#, "0".repeat(64));
    let attacks = [
        ("many parts", format!("[{}]", vec![part; 50_000].join(","))),
        ("a long part", format!(r#"[["{}""#, "\\n".repeat(2_000_000))),
        ("a long hash", format!(r#"[["",0,"{}"]]"#, "0".repeat(4_000_000))),
        ("nested", "[".repeat(4_000_000)),
    ];
    for (what, files) in attacks {
        let text = format!(
            r#"{{"format":"sparse24-checkpoint","format_version":1,"step":1,"files":{{"state.json":{files}}}"#
        );
        assert!(!held(what, &[("manifest.json", &manifest(text))], checkpoint::load));
    }
    let files: Vec<_> = (0..355_000).map(|number| format!(r#""{number}":[]"#)).collect();
    let text = format!(
        r#"{{"format":"sparse24-checkpoint","format_version":1,"step":1,"files":{{{}}}"#,
        files.join(",")
    );
    assert!(text.len() > 4_000_000 && text.len() < 4 << 20);
    assert!(!held("many files", &[("manifest.json", &manifest(text))], checkpoint::load));
    let state = String::from_utf8(read("state.json")).unwrap();
    let entries = |value: &str| {
        (0..90_000).map(|number| format!(r#""{number}":{value}"#)).collect::<Vec<_>>().join(",")
    };
    for (what, key, value) in
        [("counters", "method", "0"), ("choices", "plan", "\"\""), ("settings", "config", "\"\"")]
    {
        let folder = tempfile::tempdir().unwrap();
        let saved = checkpoint::save(folder.path(), &sound()).unwrap();
        let state = state.replacen(
            &format!("\"{key}\": {{"),
            &format!("\"{key}\": {{{},", entries(value)),
            1,
        );
        forge(&saved, "state.json", state.as_bytes());
        let bytes = names.map(|name| (name, fs::read(saved.join(name)).unwrap()));
        assert!(held(
            what,
            &bytes.each_ref().map(|(name, bytes)| (*name, bytes.as_slice())),
            checkpoint::load
        ));
    }
}

#[test]
fn configurations() {
    let longest = 1 << 16;
    let attacks = [
        ("keys", (0..longest / 9).map(|number| format!("k{number}=1\n")).collect::<String>()),
        ("tables", (0..longest / 9).map(|number| format!("[t{number}]\n")).collect()),
        ("arrays of tables", "[[a]]\n".repeat(longest / 6)),
        ("an array", format!("a=[{}]", "0,".repeat(longest / 2 - 3))),
        ("inline tables", format!("a=[{}]", "{},".repeat(longest / 3 - 3))),
        ("nested arrays", "a=".to_owned() + &"[".repeat(longest - 2)),
        ("dots", "a".to_owned() + &".a".repeat(longest / 2 - 3) + "=1"),
        (
            "dotted headers",
            (0..longest / 170).map(|number| format!("[k{number}{}]\n", ".a".repeat(80))).collect(),
        ),
        ("a long key", "k".repeat(longest - 2) + "=1"),
        ("a long string", format!("preset=\"{}\"", "\\n".repeat(longest / 2 - 8))),
        ("errors", "=\n".repeat(longest / 2)),
        ("control characters", "\u{1}".repeat(longest)),
        ("line feeds", "\n".repeat(longest)),
    ];
    for (what, text) in attacks {
        held(what, &[("config.toml", text.as_bytes())], |folder| {
            Config::resolve(None, Some(&folder.join("config.toml")), &[])
        });
        held(what, &[("config.toml", text.as_bytes())], |folder| {
            Config::read(&folder.join("config.toml"))
        });
        held(what, &[], |_| Config::resolve(None, None, &[text.replace('\n', " ")]));
    }
    let sound = r#""model_type":"gpt2","n_layer":2,"n_head":4,"n_embd":32,"n_positions":64,"vocab_size":256"#;
    let mebibyte = 1 << 20;
    let attacks = [
        ("keys", (0..mebibyte / 11).map(|number| format!(r#","{number}":0"#)).collect::<String>()),
        ("an array", format!(r#","x":[{}0]"#, "0,".repeat(mebibyte / 2 - 80))),
        (
            "an array for a choice",
            format!(r#","activation_function":[{}0]"#, "0,".repeat(mebibyte / 2 - 80)),
        ),
        (
            "objects for a choice",
            format!(r#","activation_function":[{}0]"#, "{},".repeat(mebibyte / 3 - 80)),
        ),
        ("objects", format!(r#","x":[{}0]"#, r#"{"":0},"#.repeat(mebibyte / 7 - 80))),
        (
            "a long string",
            format!(r#","activation_function":"{}""#, "\\n".repeat(mebibyte / 2 - 80)),
        ),
        ("nested", format!(r#","x":{}"#, "[".repeat(mebibyte - 200))),
    ];
    for (what, fields) in attacks {
        held(what, &[("config.json", format!("{{{sound}{fields}}}").as_bytes())], Gpt2Config::read);
    }
}

#[test]
fn tokens() {
    let ids = vec![1; 32 << 20];
    assert!(held("raw tokens", &[("train.bin", &ids), ("val.bin", &ids[..64])], |folder| {
        Dataset::open(Some(folder), None, 0.1)
    }));
    let mut wide: Vec<u8> =
        [20_240_801_u32, 7, 8 << 20].iter().flat_map(|number| number.to_le_bytes()).collect();
    wide.resize(1024 + (32 << 20), 0);
    assert!(held("llm.c's tokens", &[("x.bin", &wide)], |folder| shard::read(
        &folder.join("x.bin"),
        None
    )));
    let tokenizer =
        |text: String| format!(r#"{{"sparse24_tokenizer":1,"kind":"char","characters":"{text}"}}"#);
    let all: String = (' '..=char::MAX)
        .map(|c| if c.is_ascii() { "".to_owned() } else { format!("{c}") })
        .collect();
    let escaped: String = (' '..=char::MAX)
        .flat_map(|c| c.encode_utf16(&mut [0; 2]).to_vec())
        .map(|unit| format!("\\u{unit:04x}"))
        .collect();
    for (what, text, is_sound) in [
        ("all characters", tokenizer(all), true),
        ("all characters, escaped", tokenizer(escaped), true),
        ("one character", tokenizer("a".repeat(13_000_000)), false),
        ("one character, escaped", tokenizer("\\n".repeat(6_500_000)), false),
        ("a long kind", format!(r#"{{"kind":"{}"}}"#, "\\n".repeat(6_500_000)), false),
        ("a long field", format!(r#"{{"{}":0}}"#, "\\n".repeat(6_500_000)), false),
    ] {
        let loads = held(what, &[("tokenizer.json", text.as_bytes())], |folder| {
            Tokenizer::load(&folder.join("tokenizer.json"))
        });
        assert_eq!(loads, is_sound, "{what}");
    }
}

#[test]
fn metrics() {
    let line = |step: usize, more: &str| {
        format!(
            "{{\"step\":{step},\"phase\":\"dense\",\"loss\":0,\"lr\":0,\"grad_norm\":0,\"tokens_per_s\":0{more}}}\n"
        )
    };
    let layers: Vec<_> = (0..90_000).map(|number| format!("\"{number}\":0")).collect();
    let attacks = [
        ("steps", (1..400_000).map(|step| line(step, "")).collect::<String>()),
        (
            "layers",
            (1..40)
                .map(|step| {
                    line(step, &format!(",\"flip_rate_per_layer\":{{{}}}", layers.join(",")))
                })
                .collect(),
        ),
        (
            "one layer",
            (1..300_000).map(|step| line(step, r#","flip_rate_per_layer":{"":0}"#)).collect(),
        ),
        ("no line", "x".repeat(64 << 20)),
        (
            "a long line",
            line(1, "").trim_end_matches("}\n").to_owned() + &" ".repeat(32 << 20) + "}\n",
        ),
    ];
    for (what, text) in attacks {
        held(what, &[("metrics.jsonl", text.as_bytes())], |folder| {
            MetricsLog::steps(&folder.join("metrics.jsonl"))?.try_for_each(|step| step.map(drop))
        });
        held(what, &[("metrics.jsonl", text.as_bytes())], |folder| {
            MetricsLog::resume(&folder.join("metrics.jsonl"), 7)
        });
    }
}

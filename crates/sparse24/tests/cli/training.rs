//! `sparse24 train`: what a run leaves behind and prints, for every kind of configuration.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Stdio,
};

use serde_json::{Value, json};

use crate::support::{Place, SAVED, TINY, checkpoint};

#[test]
fn a_run_directory_has_the_documented_files_and_metrics() {
    let place = Place::new();
    let summary = place.train("runs/one", "--set run.eval_every=5");
    let names: Vec<_> = place.tree("runs/one").into_keys().collect();
    let files =
        "manifest.json masks.safetensors model.safetensors optimizer.safetensors state.json";
    let mut expected: Vec<_> = "config.toml log.txt metrics.jsonl provenance.json report.html \
        tokenizer.json checkpoints"
        .split_whitespace()
        .map(PathBuf::from)
        .collect();
    // The last sparse one and the last one.
    for step in ["checkpoints/step-00000010", "checkpoints/step-00000012"].map(Path::new) {
        expected.push(step.to_owned());
        expected.extend(files.split(' ').map(|file| step.join(file)));
    }
    expected.sort();
    assert_eq!(names, expected);
    assert!(place.path("runs/one/lock").is_file());

    let metrics = place.metrics("runs/one");
    let mut flips = 0.0;
    for (line, step) in metrics.iter().zip(1..) {
        let keys = ["step", "phase", "loss", "lr", "grad_norm", "tokens_per_s", "tokens"];
        let mut keys = BTreeSet::from(keys);
        if step == 1 || step % 3 == 0 {
            keys.extend(["flip_rate", "flip_rate_per_layer"]);
        }
        if [5, 10, 12].contains(&step) {
            keys.insert("val_loss");
        }
        let found = line.as_object().unwrap().keys().map(String::as_str);
        assert_eq!(found.collect::<BTreeSet<_>>(), keys, "step {step}");
        // floor(5 * 12 / 6) = 10.
        let phase = if step <= 10 { "sparse" } else { "dense" };
        let facts = [&line["step"], &line["phase"], &line["tokens"]];
        assert_eq!(facts, [&json!(step), &json!(phase), &json!(72)]);
        for number in ["loss", "lr", "grad_norm", "tokens_per_s"] {
            assert!(line[number].as_f64().unwrap() > 0.0, "{number} of {line}");
        }
        if let Some(rate) = line["flip_rate"].as_f64() {
            let layers = line["flip_rate_per_layer"].as_object().unwrap();
            assert!(layers.contains_key("h.1.mlp.c_proj.weight") && layers.len() == 4, "{line}");
            let mean = layers.values().map(|rate| rate.as_f64().unwrap()).sum::<f64>() / 4.0;
            // All four have 512 weights, so the rate is the mean of theirs: four roundings of
            // numbers below 1.
            assert!((rate - mean).abs() <= 4.0 * f64::EPSILON, "{line}");
            assert!((0.0..=1.0).contains(&rate), "{line}");
            flips += rate;
        }
    }
    assert_eq!(metrics.len(), 12);
    assert!(flips > 0.0, "a learning rate this large changes masks");
    let number = |value: &Value| value.as_f64().unwrap();
    assert!(number(&metrics[11]["loss"]) < number(&metrics[0]["loss"]), "the loss falls");

    assert_eq!([&summary["run"], &summary["steps"]], [&json!("runs/one"), &json!(12)]);
    for key in ["loss", "val_loss"] {
        let difference = number(&summary[key]) - number(&metrics[11][key]);
        assert!(difference.abs() <= 1e-6, "{key} of {summary}");
    }
    assert!(number(&summary["seconds"]) > 0.0);

    let start = &place.value("runs/one/provenance.json")[0];
    for key in ["version", "started", "system", "device", "simd"] {
        assert!(start[key].as_str().is_some_and(|text| !text.is_empty()), "{key} of {start}");
    }
    assert_eq!([&start["command"][1], &start["threads"]], [&json!("train"), &json!(1)]);
    let log = place.read("runs/one/log.txt");
    for part in ["started", "step 10: saved ", "step 10: sparse training ends", "step 12: saved "] {
        assert!(log.contains(part), "{part:?} is missing in {log}");
    }
    let path = format!("path = {:?}", place.path("text").to_str().unwrap());
    assert!(place.read("runs/one/config.toml").contains(&path), "the data path is absolute");
}

#[test]
fn plain_lines_are_printed_without_a_terminal() {
    let place = Place::new();
    let line = format!("train {TINY} --out run --set run.eval_every=4 --set run.flip_every=4");
    let (out, err) = place.exits(&line, 0);
    assert!(![&err, &out].iter().any(|text| text.contains(['\u{1b}', '\r'])), "{err}{out}");
    let lines: Vec<&str> = err.lines().collect();
    assert!(
        lines[0].ends_with("72 tokens a step, 12 steps of fst (lambda 6e-3) on text: run"),
        "{err}"
    );
    assert!(lines[1].starts_with("cpu (") && lines[1].contains("sparse products"), "{err}");
    assert!(lines[2].starts_with("version ") && lines[2].contains("; preset quickstart"), "{err}");
    let settings: Vec<&str> = lines[2].split(' ').filter(|word| word.contains('=')).collect();
    for setting in
        ["steps=12", "model.d_model=16", "data.tokenizer=\"char\"", "optimizer.learning_rate=0.02"]
    {
        assert!(settings.contains(&setting), "{setting} is missing in {err}");
    }
    let is_default =
        |setting: &&str| setting.starts_with("preset=") || setting.starts_with("method.name=");
    assert!(!settings.iter().any(is_default), "{err}");
    assert!(lines[3].starts_with("step 1/12 sparse loss ") && lines[3].contains(" flip "), "{err}");
    // A line has only what was measured since the one before: losses at 4, 8, 10 and 12.
    for (step, phase, has_flip) in
        [(4, "sparse", true), (8, "sparse", true), (10, "sparse", false), (12, "dense", true)]
    {
        let start = format!("step {step}/12 {phase} loss ");
        let line = lines.iter().find(|line| line.starts_with(&start)).expect("a line");
        assert!(line.contains(" validation ") && line.contains(" flip ") == has_flip, "{err}");
    }
    assert!(lines.iter().any(|line| line.starts_with("step 10: sparse training ends")), "{err}");
    assert!(lines.last().unwrap().ends_with("ETA 0:00"), "{err}");
    assert!(out.starts_with("validation loss ") && out.contains("run directory   run\n"), "{out}");
    let notes = place.notes(&format!("train {TINY} --method dense --out dense"));
    assert!(!notes.contains("sparse products"), "{notes}");
    let notes = place.notes(&format!("train {TINY} --method s-ste --out s-ste"));
    let names = ["sparse products (forward, wgrad) are ", "; the others (dgrad) are dense\n"];
    assert!(names.iter().all(|name| notes.contains(name)), "{notes}");
    let metrics = place.metrics("dense");
    assert!(metrics.iter().all(|line| line["phase"] == "dense"));
    assert!(metrics[2]["flip_rate"].is_f64(), "flip rates are sampled for comparison");
    assert_eq!(place.checkpoints("dense").len(), 1);
}

#[test]
fn the_default_directory_has_the_preset_and_the_time_in_its_name() {
    let place = Place::new();
    let summary = place.json(&format!("train {TINY} --json"));
    let run = summary["run"].as_str().unwrap();
    let time = run.strip_prefix("runs/quickstart-").unwrap_or_else(|| panic!("{run}"));
    assert_eq!(time.len(), "20260131-235959".len(), "{run}");
    assert_eq!(place.metrics(run).len(), 12);
}

#[test]
fn runs_started_together_have_directories_of_their_own() {
    let place = Place::new();
    let start = |_| place.command(&format!("train {TINY}")).stderr(Stdio::null()).spawn().unwrap();
    let runs: Vec<_> = (0..5).map(start).collect();
    for mut run in runs {
        assert!(run.wait().unwrap().success());
    }
    assert_eq!(fs::read_dir(place.path("runs")).unwrap().count(), 5);
    // A start that fails leaves no directory.
    place.refuses(&format!("train {TINY} --data missing"), 3, "missing");
}

#[test]
fn the_same_seed_gives_the_same_bits() {
    let place = Place::new();
    place.train("one", "");
    place.train("two", "--set backend.threads=2");
    place.train("other", "--seed 2");
    assert!(place.model("one", 12) == place.model("two", 12), "the number of threads matters");
    assert!(place.model("one", 12) != place.model("other", 12), "the seed does not matter");
}

#[test]
fn every_kind_of_model_trains_and_resumes() {
    let place = Place::new();
    for (name, settings) in [
        ("gated", "--set model.activation=swiglu --set model.bias=true --set model.dropout=0.2"),
        ("accumulation", "--set batch.gradient_accumulation_steps=3 --set batch.size=2"),
        ("attention", "--set model.sparsify=ffn-and-attention --set model.layers=1"),
        ("bf16", "--set backend.arithmetic=bf16"),
        ("byte", "--set data.tokenizer=byte"),
        ("wsd", "--set optimizer.schedule=wsd --set optimizer.cooldown_steps=3"),
        ("linear", "--set optimizer.schedule=linear"),
        ("adam", "--set optimizer.name=adam --set optimizer.schedule=inverse-sqrt"),
        ("sgd", "--set optimizer.name=sgd --set optimizer.no_weight_decay=vectors-and-embeddings"),
        (
            "lion",
            "--set optimizer.name=lion --set optimizer.schedule=triangle \
             --set optimizer.warmup_steps=0 --set batch.final_gradient_accumulation_steps=3",
        ),
    ] {
        place.train(name, &format!("{settings} {SAVED}"));
        let metrics = place.metrics(name);
        let [first, last] = [0, 11].map(|step| metrics[step]["loss"].as_f64().unwrap());
        assert!(last < first, "{name}: the loss went from {first} to {last}");
        place.repeats(name);
    }
    let masks = place.path(&checkpoint("attention", 10)).join("masks.safetensors");
    let masks = fs::read(masks).unwrap();
    let masks = safetensors::SafeTensors::deserialize(&masks).unwrap();
    let names: BTreeSet<&str> = masks.iter().map(|(name, _)| name).collect();
    let layers = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"];
    assert!(names.into_iter().eq(layers.map(|name| format!("h.0.{name}.weight"))));
}

#[test]
fn prepared_and_foreign_shards_train() {
    let place = Place::new();
    place.answer("prepare --data text --tokenizer char --out prepared");
    place.train("text-run", "");
    place.train("shard-run", "--data prepared");
    // The state and the manifest also record the fingerprint of the data.
    place.answer("eval shard-run");
    let [text, shards] = ["text-run", "shard-run"].map(|run| {
        let mut files = place.saved(run, 12);
        files.retain(|name, _| name.extension().is_some_and(|kind| kind == "safetensors"));
        files
    });
    assert!(text == shards, "the same tokens train the same model");
    let ids: Vec<u8> = (0..2000_u16).flat_map(|i| (i * 7 % 50).to_le_bytes()).collect();
    for name in ["web_train_000001.bin", "web_train_000002.bin", "web_val_000000.bin"] {
        place.write(&format!("foreign/{name}"), &ids);
    }
    place.train("foreign-run", "--data foreign");
    let line = format!("train {TINY} --set data.tokenizer=byte --data foreign --out bytes");
    assert!(place.notes(&line).contains("their ids are read as bytes"));
    assert!(place.has("foreign-run/data.json"));
    let shard = place.path("foreign/web_val_000000.bin");
    let line = format!("train --data {} --out x", shard.display());
    place.refuses(&line, 3, "token shard*name a folder");
}

#[test]
fn a_warm_up_as_long_as_the_run_is_reported() {
    let place = Place::new();
    for (warmup, is_reported) in [(11, false), (12, true)] {
        let setting = format!("optimizer.warmup_steps={warmup}");
        let notes = place.notes(&format!("train {TINY} --set {setting} --out run{warmup}"));
        let is_remark = |line: &str| {
            line.contains(&format!("optimizer.warmup_steps = {warmup}"))
                && line.contains("steps = 12")
        };
        assert_eq!(notes.lines().any(is_remark), is_reported, "{notes}");
    }
}

#[test]
fn the_end_of_a_sparse_phase_that_a_resume_cut_is_kept() {
    let place = Place::trained(SAVED);
    place.rewind("run", [10, 12]);
    place.answer("resume run --set steps=9");
    let phase = |step: usize| place.metrics("run")[step - 1]["phase"].clone();
    assert_eq!([phase(8), phase(9)], ["sparse", "dense"]);
    let notes = place.notes("resume run --set steps=30 --set run.keep_last=1");
    assert!(notes.contains("sparse training continues until step 25"), "{notes}");
    assert_eq!(place.checkpoints("run"), ["step-00000008", "step-00000025", "step-00000030"]);
}

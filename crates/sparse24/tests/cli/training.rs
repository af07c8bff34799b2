//! `sparse24 train`: what a run leaves behind, and what every kind of configuration does.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::support::{Place, TINY};

#[test]
fn a_run_directory_holds_what_the_guide_says() {
    let place = Place::new();
    let summary = place.train("runs/one", "--set run.eval_every=5");
    let names: BTreeSet<_> = fs::read_dir(place.path("runs/one"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    let expected = [
        "checkpoints",
        "config.toml",
        "lock",
        "log.txt",
        "metrics.jsonl",
        "provenance.json",
        "report.html",
        "tokenizer.json",
    ];
    assert_eq!(names.iter().map(|name| name.to_str().unwrap()).collect::<Vec<_>>(), expected);
    let checkpoints: Vec<_> = place.tree("runs/one/checkpoints").into_keys().collect();
    let files = [
        "",
        "/manifest.json",
        "/masks.safetensors",
        "/model.safetensors",
        "/optimizer.safetensors",
        "/state.json",
    ];
    let expected = ["step-00000010", "step-00000012"]
        .map(|step| files.map(|file| PathBuf::from(format!("{step}{file}"))));
    assert_eq!(checkpoints, expected.concat(), "the one at the switch and the last");

    let metrics = place.metrics("runs/one");
    assert_eq!(
        metrics.iter().map(|line| line["step"].as_u64().unwrap()).collect::<Vec<_>>(),
        (1..=12).collect::<Vec<_>>()
    );
    for line in &metrics {
        let step = line["step"].as_u64().unwrap();
        let mut expected =
            BTreeSet::from(["step", "phase", "loss", "lr", "grad_norm", "tokens_per_s"]);
        if step == 1 || step % 3 == 0 {
            expected.extend(["flip_rate", "flip_rate_per_layer"]);
        }
        if [5, 10, 12].contains(&step) {
            expected.insert("val_loss");
        }
        assert_eq!(
            line.as_object().unwrap().keys().map(String::as_str).collect::<BTreeSet<_>>(),
            expected,
            "step {step}"
        );
        // floor(5 * 12 / 6) = 10.
        assert_eq!(line["phase"], if step <= 10 { "sparse" } else { "dense" }, "step {step}");
        for number in ["loss", "lr", "grad_norm", "tokens_per_s"] {
            assert!(line[number].as_f64().unwrap() > 0.0, "{number} of {line}");
        }
        if let Some(rate) = line["flip_rate"].as_f64() {
            let layers: Vec<f64> = line["flip_rate_per_layer"]
                .as_object()
                .unwrap()
                .values()
                .map(|rate| rate.as_f64().unwrap())
                .collect();
            assert!(
                line["flip_rate_per_layer"]["h.1.mlp.c_proj.weight"].is_f64(),
                "a layer goes by its name"
            );
            assert_eq!(layers.len(), 4, "two linear layers in each of two blocks");
            let mean = layers.iter().sum::<f64>() / 4.0;
            // All four have 512 weights, so the rate is the mean of theirs: four roundings of
            // numbers below 1.
            assert!(
                (rate - mean).abs() <= 4.0 * f64::EPSILON && (0.0..=1.0).contains(&rate),
                "{rate} of {layers:?}"
            );
        }
    }
    let flips: f64 = metrics.iter().filter_map(|line| line["flip_rate"].as_f64()).sum();
    assert!(flips > 0.0, "a learning rate this large moves masks");
    let (first, last) =
        (metrics[0]["loss"].as_f64().unwrap(), metrics[11]["loss"].as_f64().unwrap());
    assert!(last < first, "the loss went from {first} to {last}");

    assert_eq!((&summary["run"], &summary["steps"]), (&Value::from("runs/one"), &Value::from(12)));
    let close = |a: &Value, b: &Value| (a.as_f64().unwrap() - b.as_f64().unwrap()).abs() <= 1e-6;
    assert!(
        close(&summary["loss"], &metrics[11]["loss"])
            && close(&summary["val_loss"], &metrics[11]["val_loss"]),
        "{summary}"
    );
    assert!(summary["seconds"].as_f64().unwrap() > 0.0);

    let provenance: Value = serde_json::from_str(&place.read("runs/one/provenance.json")).unwrap();
    let start = &provenance.as_array().unwrap()[0];
    for key in ["version", "started", "system", "device", "simd"] {
        assert!(start[key].as_str().is_some_and(|text| !text.is_empty()), "{key} of {start}");
    }
    assert_eq!((&start["command"][1], &start["threads"]), (&Value::from("train"), &Value::from(1)));
    let log = place.read("runs/one/log.txt");
    for said in [
        "started",
        "step 10: saved ",
        "step 10: sparse training ends, dense fine-tuning begins",
        "step 12: saved ",
    ] {
        assert!(log.contains(said), "{said:?} is missing in {log}");
    }
    let config = place.read("runs/one/config.toml");
    let text = place.path("text");
    assert!(
        config.contains(&format!("path = {:?}", text.to_str().unwrap())),
        "the data are found from anywhere: {config}"
    );
}

#[test]
fn a_pipe_sees_plain_lines() {
    let place = Place::new();
    let output =
        place.command(&format!("train {TINY} --out run --set run.eval_every=4")).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let (told, answer) =
        (String::from_utf8(output.stderr).unwrap(), String::from_utf8(output.stdout).unwrap());
    assert!(
        !told.contains(['\u{1b}', '\r']) && !answer.contains(['\u{1b}', '\r']),
        "{told}{answer}"
    );
    let lines: Vec<&str> = told.lines().collect();
    assert!(lines[0].ends_with("72 tokens a step, 12 steps of fst on text: run"), "{told}");
    assert!(lines[1].starts_with("cpu (") && lines[1].contains("computed densely"), "{told}");
    assert!(
        lines[2].starts_with("version ")
            && lines[2].contains(" commit ")
            && lines[2].contains("; preset quickstart with "),
        "{told}"
    );
    let settings: Vec<&str> = lines[2].split(' ').filter(|word| word.contains('=')).collect();
    for set in
        ["steps=12", "model.d_model=16", "data.tokenizer=\"char\"", "optimizer.learning_rate=0.02"]
    {
        assert!(settings.contains(&set), "{set} is missing in {told}");
    }
    assert!(
        !settings
            .iter()
            .any(|setting| setting.starts_with("preset=") || setting.starts_with("method.name=")),
        "{told}"
    );
    assert!(
        lines[3].starts_with("step 1/12 sparse loss ") && lines[3].contains(" flip "),
        "{told}"
    );
    assert!(
        lines
            .iter()
            .any(|line| line.starts_with("step 8/12 sparse loss ") && line.contains(" val ")),
        "{told}"
    );
    assert!(lines.contains(&"step 10: sparse training ends, dense fine-tuning begins"), "{told}");
    assert!(
        lines.last().unwrap().starts_with("step 12/12 dense loss ") && told.contains("ETA 0:00"),
        "{told}"
    );
    assert!(
        answer.starts_with("validation loss ") && answer.contains("run directory   run\n"),
        "{answer}"
    );
}

#[test]
fn a_line_tells_only_what_was_measured_since_the_one_before() {
    let place = Place::new();
    let output = place
        .command(&format!("train {TINY} --method dense --out run --set run.eval_every=1"))
        .output()
        .unwrap();
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(!told.contains("sparse products"), "a dense run has none: {told}");
    for step in 1..=12 {
        let line = told.lines().find(|line| line.starts_with(&format!("step {step}/12 "))).unwrap();
        assert!(
            line.contains(" val ") && line.contains(" flip ") == (step == 1 || step % 3 == 0),
            "{told}"
        );
    }
}

#[test]
fn a_run_without_a_place_gets_one() {
    let place = Place::new();
    let summary = place.json(&format!("train {TINY} --json"));
    let run = summary["run"].as_str().unwrap();
    let time = run.strip_prefix("runs/quickstart-").unwrap_or_else(|| panic!("{run}"));
    assert_eq!(time.len(), "20260131-235959".len(), "{run}");
    assert_eq!(place.metrics(run).len(), 12);
}

#[test]
fn the_same_seed_gives_the_same_bits() {
    let place = Place::new();
    place.train("one", "");
    place.train("two", "--set backend.threads=2");
    place.train("other", "--seed 2");
    let model = |run: &str| {
        fs::read(place.path(run).join("checkpoints/step-00000012/model.safetensors")).unwrap()
    };
    assert!(model("one") == model("two"), "the threads decide nothing");
    assert!(model("one") != model("other"), "the seed decides everything");
}

#[test]
fn a_dense_run_has_one_phase_and_no_masks() {
    let place = Place::new();
    place.train("run", "--method dense");
    let metrics = place.metrics("run");
    assert!(metrics.iter().all(|line| line["phase"] == "dense"));
    assert!(metrics[2]["flip_rate"].is_f64(), "flip rates are sampled in dense runs too");
    assert_eq!(
        place.tree("run/checkpoints").keys().filter(|path| path.ends_with("manifest.json")).count(),
        1
    );
}

#[test]
fn every_kind_of_model_trains_and_resumes() {
    let place = Place::new();
    for (name, settings) in [
        ("geglu", "--set model.activation=geglu"),
        ("swiglu", "--set model.activation=swiglu --set model.bias=true"),
        ("bias", "--set model.bias=true"),
        ("dropout", "--set model.dropout=0.2"),
        ("accumulation", "--set batch.gradient_accumulation_steps=3 --set batch.size=2"),
        ("attention", "--set model.sparsify=ffn-and-attention --set model.layers=1"),
        ("bf16", "--set backend.arithmetic=bf16"),
        ("byte", "--set data.tokenizer=byte"),
    ] {
        let settings = format!("{settings} --checkpoint-every 4 --set run.keep_last=9");
        place.train(name, &settings);
        let metrics = place.metrics(name);
        let [first, last] = [0, 11].map(|step| metrics[step]["loss"].as_f64().unwrap());
        assert!(last < first, "{name}: the loss went from {first} to {last}");
        let end = place.tree(&format!("{name}/checkpoints/step-00000012"));
        for step in ["08", "10", "12"] {
            fs::remove_dir_all(place.path(&format!("{name}/checkpoints/step-000000{step}")))
                .unwrap();
        }
        let summary = place.json(&format!("resume {name} --json"));
        assert_eq!(summary["steps"], 12, "{name}");
        assert!(
            place.tree(&format!("{name}/checkpoints/step-00000012")) == end,
            "{name}: a resume at step 4 ends elsewhere"
        );
    }
    let at_switch = place.tree("attention/checkpoints/step-00000010");
    let masks = at_switch[Path::new("masks.safetensors")].as_ref().unwrap();
    let masks = safetensors::SafeTensors::deserialize(masks).unwrap();
    let mut names: Vec<&str> = masks.iter().map(|(name, _)| name).collect();
    names.sort_unstable();
    assert_eq!(
        names,
        [
            "h.0.attn.c_attn.weight",
            "h.0.attn.c_proj.weight",
            "h.0.mlp.c_fc.weight",
            "h.0.mlp.c_proj.weight"
        ]
    );
}

#[test]
fn prepared_and_foreign_shards_train() {
    let place = Place::new();
    place.answer("prepare --data text --tokenizer char --out prepared");
    place.train("text-run", "");
    place.train("shard-run", "--data prepared");
    let end = |run: &str| place.tree(&format!("{run}/checkpoints/step-00000012"));
    assert!(end("text-run") == end("shard-run"), "the same tokens train the same model");
    fs::create_dir(place.path("foreign")).unwrap();
    let ids: Vec<u8> = (0..2000_u16).flat_map(|i| (i * 7 % 50).to_le_bytes()).collect();
    for name in ["foreign/train.bin", "foreign/val.bin"] {
        place.write(name, &ids);
    }
    place.train("foreign-run", "--data foreign");
    assert!(!place.path("foreign-run/tokenizer.json").exists(), "ids without a tokenizer");
    place.answer("eval foreign-run");
    place.refuses(
        "sample foreign-run",
        3,
        "foreign-run has no tokenizer.json: it was trained on token ids without one",
    );
}

#[test]
fn a_warm_up_longer_than_the_run_is_said() {
    let place = Place::new();
    for (warmup, is_said) in [(11, false), (12, true), (150, true)] {
        let output = place
            .command(&format!(
                "train {TINY} --set optimizer.warmup_steps={warmup} --out run{warmup}"
            ))
            .output()
            .unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(0), "{told}");
        let remark = format!(
            "warm-up (optimizer.warmup_steps = {warmup}) does not end within the run (steps = 12)"
        );
        assert_eq!(told.lines().any(|line| line == remark), is_said, "{told}");
    }
}

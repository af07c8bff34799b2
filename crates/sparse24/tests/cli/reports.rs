//! `sparse24 presets`, `estimate`, `doctor`, and how the command answers in general.

use std::{env, fs, process::Stdio};

use serde_json::{Value, json};

use crate::support::{Place, TINY, is_outside, sentence};

#[test]
fn presets_are_listed_with_their_sources() {
    let place = Place::new();
    let presets = place.json("presets --json");
    let presets = presets.as_array().unwrap();
    let names: Vec<&str> = presets.iter().map(|preset| preset["name"].as_str().unwrap()).collect();
    let large = [
        ("bert-base", 6e-6),
        ("bert-crammed", 6e-6),
        ("deit-tiny", 2e-3),
        ("deit-small", 2e-3),
        ("deit-base", 1e-3),
        ("transformer-multi30k", 6e-4),
        ("transformer-base", 1e-6),
        ("gpt2-124m", 6e-5),
        ("gpt2-350m", 2e-4),
        ("gpt2-774m", 2e-4),
        ("gpt2-1558m", 6e-5),
    ];
    let small = [
        "quickstart",
        "shakespeare-char-cpu",
        "shakespeare-char",
        "bert-tiny-cpu",
        "deit-cifar-cpu",
        "transformer-multi30k-cpu",
    ];
    assert_eq!(names, [&small[..], &large.map(|(name, _)| name)].concat());
    let listed = place.answer("presets");
    for preset in presets {
        for key in ["name", "summary", "source"] {
            let text = preset[key].as_str().unwrap();
            assert!(!text.is_empty() && listed.contains(text), "{key} of {preset}");
        }
        assert_eq!(preset["config"]["preset"], preset["name"]);
    }
    for (preset, tokens) in [("bert-base", 256 * 512), ("gpt2-124m", 512 * 1024)] {
        let estimate = place.json(&format!("estimate --preset {preset} --json"));
        assert_eq!(estimate["tokens_per_step"], tokens, "{preset}");
    }
    for (preset, (_, paper)) in presets[small.len()..].iter().zip(large) {
        let lambda = preset["config"]["method"]["lambda"].as_f64().unwrap();
        assert!((lambda - paper).abs() <= paper * f64::from(f32::EPSILON), "{preset}");
    }
}

#[test]
fn an_estimate_counts_what_training_then_has() {
    let place = Place::new();
    let estimate = place.json(&format!("estimate {TINY} --json"));
    // Per layer 2 * 16 * 32 weights of the feed-forward block, 4 * 16 * 16 of attention, two norms;
    // tables of 27 and 12 rows; a last norm.
    assert_eq!(estimate["sparsifiable"], 2 * 1024);
    assert_eq!(estimate["parameters"], 2 * (1024 + 1024 + 32) + 39 * 16 + 16);
    let parts = ["weight", "gradient", "moment", "sparse", "activation", "scratch"];
    let bytes = parts.map(|part| estimate[format!("{part}_bytes")].as_u64().unwrap());
    assert_eq!(estimate["device_bytes"], bytes.iter().sum::<u64>());
    assert!(estimate["seconds"].as_f64().unwrap() > 0.0, "{estimate}");
    #[cfg(feature = "cuda")]
    {
        let cuda = place.json(&format!("estimate {TINY} --backend cuda --json"));
        assert_eq!(cuda["parameters"], estimate["parameters"]);
        assert!(cuda["overhead_bytes"].as_u64().unwrap() > 0 && cuda["seconds"].is_null());
    }
    let lines = place.answer(&format!("estimate {TINY}"));
    for part in ["4800 (2048 of them sparsifiable)", "per step     72 tokens", "for 12 steps"] {
        assert!(lines.contains(part), "{part:?} is missing in {lines}");
    }
    let moments = ["adamw", "adam", "sgd", "lion"].map(|name| {
        let line = format!("estimate {TINY} --set optimizer.name={name} --json");
        place.json(&line)["moment_bytes"].as_u64().unwrap() / 4800
    });
    assert_eq!(moments, [8, 8, 4, 4], "f32 moments of 4800 parameters");
    let notes = place.notes(&format!("train {TINY} --out run"));
    assert!(notes.starts_with("4800 parameters, 72 tokens a step, "), "{notes}");
    let largest = "--set model.d_model=16777216 --set model.heads=1 --set model.layers=4096";
    let largest = place.json(&format!("estimate {largest} --json"));
    assert_eq!(largest["device_bytes"], u64::MAX, "what no machine can hold is no panic");
}

#[test]
fn the_doctor_tells_what_is_there_and_leaves_nothing() {
    let place = Place::new();
    let before = place.tree("");
    let report = place.json("doctor --json");
    assert!(report["threads"].as_u64().unwrap() >= 1 && report["problem"].is_null(), "{report}");
    let products = "computed without the pruned values";
    let cpu = json!({ "name": "cpu", "sparse_products": products, "problem": null });
    let backends = report["backends"].as_array().unwrap();
    let names: Vec<&str> = backends.iter().map(|of| of["name"].as_str().unwrap()).collect();
    let gpus = [("cuda", cfg!(feature = "cuda")), ("wgpu", cfg!(feature = "wgpu"))];
    let gpus = gpus.into_iter().filter_map(|(name, is_built)| is_built.then_some(name));
    assert_eq!((&backends[0], names), (&cpu, ["cpu"].into_iter().chain(gpus).collect()));
    let is_either = |of: &Value, key: &str| of[key].is_string() != of["problem"].is_string();
    for backend in &backends[1..] {
        assert!(is_either(backend, "sparse_products"), "{backend}");
        let is_required = env::var_os("SPARSE24_REQUIRE_WGPU").is_some();
        assert!(
            backend["name"] != "wgpu" || !is_required || backend["problem"].is_null(),
            "{backend}"
        );
    }
    if cfg!(feature = "cuda") {
        let cuda = &report["cuda"];
        let libraries = cuda["libraries"].as_array().unwrap();
        assert!(libraries.iter().all(|library| is_either(library, "file")), "{cuda}");
        assert!(cuda["gpus"].as_array().unwrap().is_empty() || cuda["problem"].is_null(), "{cuda}");
    }
    let lines = place.answer("doctor --out deep/er");
    for part in [
        "backend cpu   ready; sparse products are computed without the pruned values",
        "runs          deep/er can be written",
    ] {
        assert!(lines.contains(part), "{lines}");
    }
    assert!(place.tree("") == before);

    let (_, err) = place.exits("doctor --gpu 99", 1);
    assert_eq!(err, "error: --gpu 99: no backend can open this GPU\n");
    let problem = "text is not a folder: runs cannot be written to text/runs";
    let (_, err) = place.exits("doctor --out text/runs", 1);
    assert_eq!(err, format!("error: {problem}\n"));
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("nowhere", place.path("link")).unwrap();
        let (_, err) = place.exits("doctor --out link/runs", 1);
        assert!(err.contains("link is not a folder"), "{err}");
    }
    let (out, _) = place.exits("doctor --out text/runs --json", 1);
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(report["problem"], problem);
    if cfg!(target_os = "linux") {
        let (_, err) = place.exits("doctor --out /proc/runs", 1);
        assert!(err.starts_with("error: /proc cannot be written: "), "{err}");
    }
}

#[test]
fn help_and_version_are_answers() {
    let place = Place::new();
    let version = concat!("sparse24 ", env!("CARGO_PKG_VERSION"), ", ");
    assert!(place.answer("--version").starts_with(version));
    let help = place.answer("--help");
    let (_, commands) = help.split_once("Commands:\n").unwrap();
    let commands: Vec<&str> = commands
        .lines()
        .map_while(|line| line.strip_prefix("  "))
        .filter_map(|line| line.split(' ').next().filter(|name| !name.is_empty()))
        .collect();
    assert_eq!(commands.len(), 25 + 1, "with `help`: {commands:?}");
    for command in &commands[..25] {
        let help = place.answer(&format!("{command} --help"));
        assert!(help.contains(&format!("Usage: sparse24 {command}")), "{help}");
    }
}

#[cfg(unix)]
#[test]
fn a_closed_pipe_is_no_panic() {
    let place = Place::new();
    let closed = || std::io::pipe().unwrap().1;
    // Training goes on when nobody watches.
    let mut command = place.command(&format!("train {TINY} --out run --set run.eval_every=1"));
    let status = command.stderr(closed()).stdout(Stdio::null()).status().unwrap();
    assert_eq!(status.code(), Some(0));
    assert_eq!(place.metrics("run").len(), 12);
    for line in ["presets", "config", "eval run", "sample run --tokens 5", "doctor"] {
        let output = place.command(line).stdout(closed()).stderr(Stdio::piped()).output().unwrap();
        assert_eq!(output.status.code(), Some(141), "{line}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.lines().all(is_outside), "{line}: {said}");
    }
    if let Ok(full) = fs::File::options().write(true).open("/dev/full") {
        let output = place.command("presets").stdout(full).stderr(Stdio::piped()).output().unwrap();
        assert_eq!(output.status.code(), Some(4));
        assert!(sentence(&output).starts_with("error: cannot write to standard output: No space"));
    }
}

//! `sparse24 presets`, `estimate`, `doctor`, and how the command answers in general.

use std::{
    fs,
    process::{Command, Stdio},
};

use serde_json::Value;

use crate::support::{Place, TINY};

#[test]
fn presets_are_listed_with_their_sources() {
    let place = Place::new();
    let presets = place.json("presets --json");
    let presets = presets.as_array().unwrap();
    let names: Vec<&str> = presets.iter().map(|preset| preset["name"].as_str().unwrap()).collect();
    assert_eq!(
        names,
        [
            "quickstart",
            "shakespeare-char-cpu",
            "shakespeare-char",
            "gpt2-124m",
            "gpt2-350m",
            "gpt2-774m",
            "gpt2-1558m"
        ]
    );
    let listed = place.answer("presets");
    for preset in presets {
        for key in ["name", "summary", "source"] {
            let text = preset[key].as_str().unwrap();
            assert!(!text.is_empty() && listed.contains(text), "{key} of {preset}");
        }
        assert_eq!(preset["config"]["preset"], preset["name"]);
    }
    for (preset, expected) in presets.iter().zip([
        &["sparse24"][..],
        &["nanoGPT", "tanh", "lambda 6e-5", "ours"],
        &["nanoGPT", "tanh", "lambda 6e-5", "ours"],
        &["2by4-pretrain-acc-examples", "table 2", "tanh"],
        &["2by4-pretrain-acc-examples", "table 2", "tanh"],
        &["2by4-pretrain-acc-examples", "table 2", "tanh"],
        &["2by4-pretrain-acc-examples", "table 2", "tanh"],
    ]) {
        let source = preset["source"].as_str().unwrap();
        assert!(expected.iter().all(|part| source.contains(part)), "{source}");
    }
    let lambdas: Vec<f64> = presets[3..]
        .iter()
        .map(|preset| preset["config"]["method"]["lambda"].as_f64().unwrap())
        .collect();
    for (lambda, paper) in lambdas.into_iter().zip([6e-5, 2e-4, 2e-4, 6e-5]) {
        assert!(
            (lambda - paper).abs() <= paper * f64::from(f32::EPSILON),
            "{lambda} instead of the paper's {paper}"
        );
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
    assert_eq!(
        (&estimate["tokens_per_step"], &estimate["steps"]),
        (&Value::from(72), &Value::from(12))
    );
    let sum: u64 = ["weight", "gradient", "moment", "sparse", "activation", "scratch"]
        .iter()
        .map(|of| estimate[format!("{of}_bytes")].as_u64().unwrap())
        .sum();
    assert_eq!(estimate["device_bytes"], sum);
    for positive in [
        "flops_per_step",
        "gflops_measured",
        "seconds_per_step",
        "seconds",
        "sparse_share",
        "checkpoint_bytes",
    ] {
        assert!(estimate[positive].as_f64().unwrap() > 0.0, "{positive} of {estimate}");
    }
    #[cfg(feature = "cuda")]
    {
        let cuda =
            place.json(&format!("estimate {TINY} --backend cuda --set model.d_ff=32 --json"));
        assert_eq!(cuda["parameters"], estimate["parameters"]);
        assert!(cuda["overhead_bytes"].as_u64().unwrap() > 0 && cuda["seconds"].is_null());
    }
    let lines = place.answer(&format!("estimate {TINY}"));
    for said in [
        "parameters   4800 (2048 of them sparsifiable)",
        "memory ",
        "checkpoint ",
        "a step       72 tokens",
        "for 12 steps",
    ] {
        assert!(lines.contains(said), "{said:?} is missing in {lines}");
    }
    let output = place.command(&format!("train {TINY} --out run")).output().unwrap();
    assert!(
        String::from_utf8(output.stderr)
            .unwrap()
            .starts_with("4800 parameters, 72 tokens a step, ")
    );
    let largest = place.json(
        "estimate --set model.d_model=16777216 --set model.heads=1 --set \
                 model.layers=4096 --json",
    );
    assert_eq!(largest["device_bytes"], u64::MAX, "what no machine can hold is no panic");
}

#[test]
fn the_doctor_tells_what_is_there_and_leaves_nothing() {
    let place = Place::new();
    let before = place.tree("");
    let report = place.json("doctor --json");
    assert!(report["threads"].as_u64().unwrap() >= 1 && report["problem"].is_null(), "{report}");
    let cpu = serde_json::json!({ "name": "cpu", "sparse_products": "computed densely with pruned \
                 values", "problem": null });
    assert_eq!(report["backends"][0], cpu);
    assert_eq!(
        report["backends"].as_array().unwrap().len(),
        if cfg!(feature = "cuda") { 2 } else { 1 }
    );
    if cfg!(feature = "cuda") {
        let backend = &report["backends"][1];
        assert!(
            backend["name"] == "cuda"
                && backend["sparse_products"].is_string() != backend["problem"].is_string(),
            "{backend}"
        );
        let cuda = &report["cuda"];
        let libraries = cuda["libraries"].as_array().unwrap();
        assert!(
            libraries
                .iter()
                .all(|library| library["file"].is_string() != library["problem"].is_string()),
            "{cuda}"
        );
        assert!(cuda["gpus"].as_array().unwrap().is_empty() || cuda["problem"].is_null(), "{cuda}");
        assert!(
            libraries[0]["file"].is_string()
                || cuda["problem"].as_str().unwrap().contains("tried libcuda.so, libcuda.so.1"),
            "{cuda}"
        );
    }
    let lines = place.answer("doctor --out deep/er");
    assert!(
        lines.contains(
            "backend cpu   ready; sparse products are computed densely with pruned values"
        ) && lines.contains("runs          deep/er can be written"),
        "{lines}"
    );
    assert!(place.tree("") == before);

    let output = place.command("doctor --out text/runs").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        crate::support::sentence(&output),
        "error: text is not a folder: runs cannot be written to text/runs"
    );
    let output = place.command("doctor --out text/runs --json").output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (output.status.code(), &report["problem"]),
        (Some(1), &Value::from("text is not a folder: runs cannot be written to text/runs"))
    );
    if cfg!(target_os = "linux") {
        let output = place.command("doctor --out /proc/runs").output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(crate::support::sentence(&output).starts_with("error: /proc cannot be written: "));
    }
}

#[test]
fn help_and_version_are_answers() {
    let place = Place::new();
    assert_eq!(place.answer("--version"), format!("sparse24 {}\n", env!("CARGO_PKG_VERSION")));
    let commands = [
        "train", "resume", "eval", "sample", "prepare", "prune", "verify", "presets", "config",
        "import", "export", "estimate", "doctor", "bench",
    ];
    let help = place.answer("--help");
    for command in commands {
        assert!(help.contains(&format!("\n  {command} ")), "{help}");
        assert!(
            place.answer(&format!("{command} --help")).contains("Usage: sparse24"),
            "{command}"
        );
    }
}

#[cfg(unix)]
#[test]
fn a_closed_pipe_is_no_panic() {
    let place = Place::new();
    place.train("run", "");
    let closed = |line: &str| {
        let mut command = place.command(line);
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        command.stdout(writer).stderr(Stdio::piped()).output().unwrap()
    };
    for line in
        ["presets", "config", "estimate --json", "eval run", "sample run --tokens 5", "doctor"]
    {
        let output = closed(line);
        assert_eq!(output.status.code(), Some(141), "{line}");
        assert!(output.stderr.is_empty(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    }
    if let Ok(full) = fs::File::options().write(true).open("/dev/full") {
        let output = place.command("presets").stdout(full).stderr(Stdio::piped()).output().unwrap();
        assert_eq!(output.status.code(), Some(4));
        assert_eq!(
            crate::support::sentence(&output),
            "error: cannot write to standard output: No space left on device (os error 28)"
        );
    }
    // Training goes on when nobody watches.
    let mut command: Command =
        place.command(&format!("train {TINY} --out unwatched --set run.eval_every=1"));
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let status = command.stderr(writer).stdout(Stdio::null()).status().unwrap();
    assert_eq!(status.code(), Some(0));
    assert_eq!(place.metrics("unwatched").len(), 12);
}

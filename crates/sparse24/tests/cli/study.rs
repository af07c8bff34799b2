//! `sparse24 study`: its results, their reproduction after interruptions, and its refusals.

use std::{fs, path::Path};

use serde_json::Value;

use crate::support::{Place, TINY, is_like};

/// Three arms and three seeds of the tiny configuration.
const STUDY: &str = r#"
reference = "dense"
seeds = [1, 2, 3]
[[arms]]
name = "dense"
method.name = "dense"
[[arms]]
name = "fst"
[[arms]]
name = "strong"
method.lambda = 0.3
"#;

fn place() -> Place {
    let place = Place::new();
    place.write("study.toml", STUDY);
    place
}

fn line(more: &str) -> String {
    format!("study study.toml {TINY} {more}")
}

#[test]
fn a_study_pairs_its_runs() {
    let place = place();
    let found = place.json(&line("--out s --json"));
    assert_eq!(found, serde_json::from_str::<Value>(&place.read("s/study.json")).unwrap());
    let seeds = [1, 2, 3];
    let loss = |arm: &str, seed: u32| {
        place.metrics(&format!("s/{arm}/seed-{seed}"))[11]["val_loss"].as_f64().unwrap()
    };
    let arms = found["arms"].as_array().unwrap();
    for (arm, name) in arms.iter().zip(["dense", "fst", "strong"]) {
        assert_eq!(arm["name"], name);
        let by_seed: Vec<f64> = arm["val_loss"]["by_seed"]
            .as_array()
            .unwrap()
            .iter()
            .map(|loss| loss.as_f64().unwrap())
            .collect();
        assert_eq!(by_seed, seeds.map(|seed| loss(name, seed)));
    }
    let differences = seeds.map(|seed| loss("strong", seed) - loss("dense", seed));
    let mean = differences.iter().sum::<f64>() / 3.0;
    let deviation = (differences.iter().map(|d| (d - mean).powi(2)).sum::<f64>() / 2.0).sqrt();
    // t(0.975) with two degrees of freedom.
    let half = 4.302_652_729_749_464 * deviation / 3.0_f64.sqrt();
    let interval = &arms[2]["difference"];
    for (key, expected) in [("mean", mean), ("low", mean - half), ("high", mean + half)] {
        assert!(
            (interval[key].as_f64().unwrap() - expected).abs() <= 1e-12,
            "{key}: {interval}, expected {expected}"
        );
    }
    assert!(arms[0].get("difference").is_none(), "the reference has no difference");
    // Sampled at 1, 3, 6, 9 and, in the dense phase, 12.
    let rate = |arm: &str, steps: usize| {
        let sampled = |seed| {
            place
                .metrics(&format!("s/{arm}/seed-{seed}"))
                .into_iter()
                .filter_map(|line| line["flip_rate"].as_f64())
                .take(steps)
                .sum::<f64>()
        };
        seeds.map(sampled).iter().sum::<f64>()
    };
    assert!((arms[1]["mu"].as_f64().unwrap() - rate("fst", 4) / rate("dense", 4)).abs() <= 1e-12);
    assert!((arms[1]["flip_rate"].as_f64().unwrap() - rate("fst", 4) / 12.0).abs() <= 1e-12);
    // A run of a study equals the run of `train`.
    place.train("alone", "--lambda 0.3 --seed 2");
    assert!(place.tree("s/strong/seed-2/checkpoints") == place.tree("alone/checkpoints"));
    let lines = place.read("s/study.csv");
    assert!(lines.starts_with("arm,seed,steps,") && lines.contains("\ndense,1,12,"), "{lines}");
    assert_eq!(lines.lines().count(), 10);
    let answer = place.answer(&line("--out s"));
    assert!(
        answer.starts_with("arm     val loss      sd  minus dense, 95 % ")
            && answer.contains("\nlowest mean  "),
        "{answer}"
    );
}

#[test]
fn a_finished_study_is_not_trained_again() {
    let place = place();
    place.answer(&line("--out one"));
    place.answer(&line("--out many --jobs 4 --keep results"));
    assert_eq!(
        place.read("one/study.json"),
        place.read("many/study.json"),
        "jobs and threads do not change results"
    );
    assert!(place.path("one/fst/seed-1/checkpoints/step-00000010").exists());
    assert!(!place.path("many/fst/seed-1/checkpoints").exists());
    let before = place.tree("many");
    place.answer(&line("--out many"));
    assert!(place.tree("many") == before, "finished runs need no checkpoints");
    let begun_without = place.read("many/study.json");
    place.answer(&line("--set run.instrument_every=3 --out many"));
    assert_eq!(place.read("many/study.json"), begun_without, "instruments may be enabled later");
    assert!(
        place.read("many/report.html").contains("Lowest mean loss among "),
        "the page has the results of the study"
    );
    let study = place.read("many/study.toml");
    assert!(
        study.starts_with("reference = \"dense\"\nseeds = [1, 2, 3]")
            || study.contains("reference = \"dense\""),
        "{study}"
    );
    place.answer("study many/study.toml --out again --keep results");
    assert_eq!(
        place.read("again/study.json"),
        place.read("one/study.json"),
        "the resolved file is a study"
    );
}

/// Only the small files of some finished runs are copied, as to another machine.
#[test]
fn a_study_continues_from_the_small_files_of_finished_runs() {
    let place = place();
    place.answer(&line("--out whole --keep results"));
    fs::create_dir_all(place.path("carried")).unwrap();
    fs::copy(place.path("whole/study.toml"), place.path("carried/study.toml")).unwrap();
    for run in ["dense/seed-1", "strong/seed-3", "fst/seed-2"] {
        fs::create_dir_all(place.path(&format!("carried/{run}"))).unwrap();
        for file in ["config.toml", "metrics.jsonl", "provenance.json"] {
            fs::copy(
                place.path(&format!("whole/{run}/{file}")),
                place.path(&format!("carried/{run}/{file}")),
            )
            .unwrap();
        }
    }
    let output = place.command(&line("--out carried")).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.starts_with("3 arms x 3 seeds: 9 runs, 3 of them done: carried\n"), "{said}");
    assert_eq!(said.matches(": starts\n").count(), 6, "{said}");
    assert_eq!(place.read("carried/study.json"), place.read("whole/study.json"));
}

/// The last line of metrics is written before the last checkpoint.
#[test]
fn a_run_killed_before_its_last_checkpoint_is_resumed() {
    let place = place();
    place.answer(&line("--set run.keep_last=2 --out s"));
    let before = place.tree("s");
    for (lost, goes_on) in [
        (&["step-00000012"][..], "resumes after step 10"),
        (&["step-00000010", "step-00000012"], "starts"),
    ] {
        for step in lost {
            fs::remove_dir_all(place.path("s/fst/seed-2/checkpoints").join(step)).unwrap();
        }
        let output = place.command(&line("--set run.keep_last=2 --out s")).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(
            said.contains("9 runs, 8 of them done")
                && said.contains(&format!("fst seed 2: {goes_on}\n")),
            "{said}"
        );
        let after = place.tree("s");
        let is_end = |path: &Path| {
            path.starts_with("fst/seed-2/checkpoints/step-00000012")
                || path.starts_with("study.json")
        };
        assert!(
            before
                .iter()
                .filter(|(path, _)| is_end(path))
                .all(|(path, contents)| after.get(path) == Some(contents))
        );
    }
}

#[test]
fn arms_and_seeds_are_added_and_the_reference_may_change() {
    let place = place();
    place.answer(&line("--out s"));
    let before = place.tree("s/fst");
    let more = STUDY.replace("[1, 2, 3]", "[1, 2, 3, 4]")
        + "[[arms]]\nname = \"weak\"\nmethod.lambda = 1e-9\n";
    place.write("study.toml", &more);
    let found = place.json(&line("--out s --reference fst --json"));
    assert_eq!((&found["done"], &found["reference"]), (&Value::from(16), &Value::from("fst")));
    assert!(
        found["arms"][1].get("difference").is_none()
            && found["arms"][0]["difference"]["pairs"] == 4
    );
    assert_eq!(found["trends"][0]["arms"], serde_json::json!(["weak", "fst", "strong"]));
    let after = place.tree("s/fst");
    assert!(
        before.iter().all(|(path, contents)| after[path] == *contents),
        "finished runs are unchanged"
    );
    for (from, to, message) in [
        (
            "0.3",
            "0.2",
            "s/study.toml: * arm strong: method.lambda = 0.3*, found arm strong: method.lambda = \
             0.2*",
        ),
        ("[1, 2, 3, 4]", "[1, 2, 4]", "s/study.toml: * seed 3, found no seed 3; *"),
        ("\"weak\"", "\"feeble\"", "s/study.toml: * arm weak, found no arm weak; *"),
    ] {
        place.write("study.toml", more.replace(from, to));
        place.refuses(&line("--out s"), 3, message);
    }
    place.write("study.toml", &more);
    place.refuses(
        &line("--set steps=13 --out s"),
        3,
        "s/study.toml: * base steps = 12, found base steps = 13; *",
    );
    place.write("text", crate::support::text(2));
    place.refuses(&line("--out s"), 3, "s/study.toml: * data = *, found data = *; *");
}

#[test]
fn a_run_with_a_non_finite_loss_is_a_result() {
    let place = place();
    place.write(
        "study.toml",
        STUDY.replace("method.lambda = 0.3", "optimizer.learning_rate = 1e30"),
    );
    let output = place.command(&line("--out s --jobs 2")).output().unwrap();
    let (said, answer) =
        (String::from_utf8(output.stderr).unwrap(), String::from_utf8(output.stdout).unwrap());
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(
        said.contains("strong seed 1: ended at a loss that is not finite\n")
            && answer.contains("  3 runs not finite"),
        "{said}{answer}"
    );
    let found: Value = serde_json::from_str(&place.read("s/study.json")).unwrap();
    let strong = &found["arms"][2];
    assert_eq!(
        (&strong["val_loss"]["mean"], strong["failures"].as_array().unwrap().len()),
        (&Value::Null, 3)
    );
    assert!(strong["failures"][1]["what"].as_str().unwrap().contains("not finite"), "{strong}");
    let before = place.tree("s");
    place.answer(&line("--out s"));
    assert!(place.tree("s") == before, "it is not tried again");
}

/// The loss of a single step is finite, but the validation loss after its update is not.
#[test]
fn a_run_with_a_non_finite_validation_loss_is_a_result() {
    let place = place();
    let diverging = "--set optimizer.learning_rate=1e12 --set steps=1";
    let message = "step 1: the validation loss is *; training stopped after the step, nothing was \
                 saved yet; *";
    let output = place.command(&format!("train {TINY} {diverging} --out run")).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        output.status.code() == Some(5)
            && is_like(said.lines().last().unwrap(), &format!("error: {message}")),
        "{said}"
    );
    assert!(place.read("run/report.html").contains("unfinished"));
    place.write(
        "study.toml",
        STUDY.replace("method.lambda = 0.3", "optimizer.learning_rate = 1e12"),
    );
    for _ in ["it is found", "it is not tried again"] {
        let found = place.json(&line("--set steps=1 --out s --json"));
        let failures = found["arms"][2]["failures"].as_array().unwrap();
        assert_eq!(
            (&found["done"], failures.len(), &failures[0]["step"]),
            (&Value::from(9), 3, &Value::from(1))
        );
        assert!(
            failures[0]["what"].as_str().unwrap().starts_with("the validation loss is "),
            "{failures:?}"
        );
    }
}

#[test]
fn impossible_studies_are_refused_before_anything_runs() {
    let place = place();
    for (from, to, message) in [
        ("[1, 2, 3]", "[1]", "seeds: expected at least 2, found 1*"),
        ("\"fst\"", "\"a/b\"", "arms: \"a/b\" is not a folder name*"),
        ("method.lambda", "method.lamda", "arms.strong: method: \"lamda\" * \"lambda\"? *"),
        ("\"strong\"", "\"fst\"", "arms: \"fst\" is listed twice*"),
        ("reference = \"dense\"", "reference = \"bert\"", "reference: \"bert\" is not known *"),
        ("method.lambda = 0.3", "model.heads = 3", "arms.strong: model.heads: * 16, found 3"),
    ] {
        place.write("study.toml", STUDY.replace(from, to));
        place.refuses(&line("--out s"), 2, &format!("study.toml: {message}"));
    }
    place.write("study.toml", STUDY);
    for (line, code, message) in [
        (line("--reference bert --out s"), 2, "study.toml: reference: \"bert\" is not known *"),
        (line("--set steps=0 --out s"), 2, "study.toml: base: steps: *"),
        ("study nowhere.toml --out s".into(), 3, "nowhere.toml: *a study: a TOML file *"),
        (line("--data nowhere --out s"), 3, "nowhere: *"),
    ] {
        place.refuses(&line, code, message);
    }
}

#[cfg(unix)]
mod signals {
    use std::process::Stdio;

    use super::*;
    use crate::{
        interruption::{LONG, attempts},
        signals::{interrupted, send, tells},
    };

    /// A step takes minutes, a micro-step a millisecond; the signal stops both parallel runs.
    #[test]
    fn a_signal_stops_all_runs_and_prints_how_to_continue() {
        let place = place();
        for (signal, exit) in [("-INT", 130), ("-TERM", 143)] {
            let out = format!("s{exit}");
            let line = line(&format!(
                "--set batch.gradient_accumulation_steps=1000000 --jobs 2 --out {out}"
            ));
            let (code, said) = interrupted(&place, &line, signal, 1);
            assert_eq!(code, Some(exit), "{said}");
            assert_eq!(
                said.lines().last().unwrap(),
                format!("interrupted with 0 of 9 runs done; continue with: sparse24 {line}"),
                "{said}"
            );
        }
    }

    #[test]
    fn an_interrupted_study_ends_like_one_that_was_not() {
        let place = place();
        let settings = format!("{LONG} --set run.checkpoint_every=0 --jobs 2");
        let shorter = STUDY.replace("[1, 2, 3]", "[1, 2]");
        place.write("study.toml", &shorter);
        place.answer(&line(&format!("{settings} --out whole")));
        let out = attempts(|attempt| {
            let out = format!("stopped-{attempt}");
            let mut child = place
                .command(&line(&format!("{settings} --out {out}")))
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            if tells(1, &mut child, &place.path(&format!("{out}/fst/seed-1"))) {
                send("-TERM", &child);
            }
            (child.wait().unwrap().code() == Some(143)).then_some(out)
        });
        assert!(
            place.path(&format!("{out}/study.json")).exists(),
            "the results so far can be read"
        );
        place.answer(&line(&format!("{settings} --out {out}")));
        assert_eq!(place.read(&format!("{out}/study.json")), place.read("whole/study.json"));
        let at_end = |out: &str| place.tree(&format!("{out}/fst/seed-1/checkpoints/step-00000600"));
        assert!(
            at_end(&out) == at_end("whole")
                && at_end(&out).contains_key(Path::new("model.safetensors"))
        );
    }
}

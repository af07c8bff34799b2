//! `sparse24 study`: its runs and results, the same after interruptions, and its refusals.

use serde_json::{Value, json};

use crate::support::{Place, TINY, is_like, text};

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

/// The tests of `sparse24_lab::study` compute the results from other runs.
#[test]
fn a_study_trains_its_runs_once() {
    let place = place();
    let found = place.json(&line("--out s --json"));
    assert_eq!(found, place.value("s/study.json"));
    for (arm, name) in found["arms"].as_array().unwrap().iter().zip(["dense", "fst", "strong"]) {
        let loss = |seed| place.metrics(&format!("s/{name}/seed-{seed}"))[11]["val_loss"].take();
        let losses = [1, 2, 3].map(loss);
        assert_eq!((&arm["name"], &arm["val_loss"]["by_seed"]), (&json!(name), &json!(losses)));
    }
    // A run of a study equals the run of `train`.
    place.train("alone", "--lambda 0.3 --seed 2");
    assert!(place.tree("s/strong/seed-2/checkpoints") == place.tree("alone/checkpoints"));
    let lines = place.read("s/study.csv");
    assert!(lines.starts_with("arm,seed,steps,") && lines.contains("\ndense,1,12,"), "{lines}");
    let answer = place.answer(&line("--out s"));
    assert!(answer.starts_with("arm     validation loss      sd  minus dense, 95 % "), "{answer}");
    assert!(answer.contains("\nbest arm     "), "{answer}");

    let results = place.read("s/study.json");
    place.answer(&line("--out many --jobs 4 --keep results"));
    assert_eq!(place.read("many/study.json"), results, "jobs do not change results");
    assert!(place.has("s/fst/seed-1/checkpoints/step-00000010"));
    assert!(!place.has("many/fst/seed-1/checkpoints"));
    place.refuses("eval many/fst/seed-1", 3, "seed-1: *were not kept (`--keep results`)");
    let before = place.tree("many");
    place.answer(&line("--out many"));
    assert!(place.tree("many") == before, "finished runs need no checkpoints");
    place.answer(&line("--set run.instrument_every=3 --out many"));
    assert_eq!(place.read("many/study.json"), results, "instruments may be enabled later");
    let page = place.read("many/report.html");
    assert!(page.contains("Lowest mean loss among "), "the page has the results of the study");
    place.answer("study many/study.toml --out again --keep results");
    assert_eq!(place.read("again/study.json"), results, "the resolved file is a study");

    // Only the small files of some finished runs are copied, as to another machine.
    place.write("carried/study.toml", place.read("s/study.toml"));
    for run in ["dense/seed-1", "strong/seed-3", "fst/seed-2"] {
        for file in ["config.toml", "metrics.jsonl", "provenance.json"] {
            let file = format!("{run}/{file}");
            place.write(&format!("carried/{file}"), place.read(&format!("s/{file}")));
        }
    }
    let notes = place.notes(&line("--out carried"));
    assert!(notes.starts_with("3 arms x 3 seeds: 9 runs, 3 of them done: carried\n"), "{notes}");
    assert_eq!(notes.matches(": starts\n").count(), 6, "{notes}");
    assert_eq!(place.read("carried/study.json"), results);

    place.answer("prepare --data text --tokenizer char --out shards");
    let tiny = TINY.replace("data.path=text --set data.tokenizer=char", "data.path=shards");
    place.answer(&format!("study study.toml {tiny} --set steps=1 --out prepared"));
    assert!(place.read("prepared/study.toml").contains("tokenizer = \"char\""));
}

#[test]
fn a_study_grows_but_does_not_change() {
    let place = place();
    place.answer(&line("--out s"));
    let before = place.tree("s/fst");
    let wide = "[[arms]]\nname = \"wide\"\nmodel.d_ff = 16777216\nmodel.layers = 4000\n";
    place.write("study.toml", STUDY.to_owned() + wide);
    let study = place.tree("s");
    let (_, err) = place.exits(&line("--out s"), 2);
    assert!(err.contains("error: model: needs ") && place.tree("s") == study, "{err}");
    let more = STUDY.replace("[1, 2, 3]", "[1, 2, 3, 4]")
        + "[[arms]]\nname = \"weak\"\nmethod.lambda = 1e-9\n";
    place.write("study.toml", &more);
    let found = place.json(&line("--out s --reference fst --json"));
    assert_eq!([&found["done"], &found["reference"]], [&json!(16), &json!("fst")]);
    assert!(found["arms"][1].get("difference").is_none(), "the reference has no difference");
    assert_eq!(found["arms"][0]["difference"]["pairs"], 4);
    assert_eq!(found["trends"][0]["arms"], json!(["weak", "fst", "strong"]));
    let after = place.tree("s/fst");
    assert!(before.iter().all(|(path, contents)| after[path] == *contents), "a run has changed");
    let started = "s/study.toml: was started with ";
    place.refuses(
        &line("--set steps=13 --out s"),
        3,
        &format!("{started}base steps = 12, found base steps = 13; *"),
    );
    place.write("text", text(2));
    place.refuses(&line("--out s"), 3, &format!("{started}data = *, found data = *; *"));
}

#[test]
fn a_loss_that_is_not_finite_ends_a_run_and_is_a_result() {
    let place = place();
    // The loss of the first step is finite, but the validation loss after its update is not.
    let diverging = "--set optimizer.learning_rate=1e12 --set steps=1";
    let (_, err) = place.exits(&format!("train {TINY} {diverging} --out run"), 5);
    let message = "error: step 1: the validation loss is *; training stopped after the step, \
                   nothing was saved yet; *";
    assert!(is_like(err.lines().last().unwrap(), message), "{err}");
    assert!(place.read("run/report.html").contains("unfinished"));

    let rate = |rate: &str| STUDY.replace("method.lambda = 0.3", rate);
    for (steps, rate, what) in [
        (12, rate("optimizer.learning_rate = 1e30"), "not finite"),
        (1, rate("optimizer.learning_rate = 1e12"), "the validation loss is "),
    ] {
        place.write("study.toml", rate);
        let line = line(&format!("--set steps={steps} --out s{steps} --jobs 2"));
        let (out, err) = place.exits(&line, 0);
        assert!(is_like(&err, &format!("strong seed 1: ended at step *{what}")), "{err}");
        assert!(out.contains("  3 runs ended early"), "{out}");
        let found = place.value(&format!("s{steps}/study.json"));
        let strong = &found["arms"][2];
        assert_eq!([&found["done"], &strong["val_loss"]["mean"]], [&json!(9), &Value::Null]);
        let failures = strong["failures"].as_array().unwrap();
        assert_eq!(failures.len(), 3);
        assert!(failures[1]["what"].as_str().unwrap().contains(what), "{strong}");
        let before = place.tree("");
        place.answer(&line);
        assert!(place.tree("") == before, "it is not tried again");
    }
}

/// A missing or damaged file is named, with the remedy, and nothing is computed without it.
#[test]
fn damaged_members_are_named() {
    let place = place();
    place.answer(&line("--out s"));
    let again = "*to train it again";
    for (file, damage, pattern) in [
        ("study.toml", "x = [".to_owned(), "s/study.toml: *unclosed array"),
        (
            "fst/seed-2/metrics.jsonl",
            place
                .read("s/fst/seed-2/metrics.jsonl")
                .lines()
                .skip(1)
                .map(|l| l.to_owned() + "\n")
                .collect(),
            "s/fst/seed-2/metrics.jsonl: lacks step 1 before step 2",
        ),
        ("fst/seed-2/metrics.jsonl", "{}\n{}\n".to_owned(), "s/fst/seed-2/metrics.jsonl: *line 1"),
    ] {
        let (name, whole) = (format!("s/{file}"), place.read(&format!("s/{file}")));
        place.write(&name, damage);
        let again = if file == "study.toml" { "" } else { again };
        let code = if file == "study.toml" { 2 } else { 3 };
        place.refuses(&line("--out s"), code, &format!("{pattern}{again}"));
        place.write(&name, whole);
    }
    place.write("s/fst/seed-2/provenance.json", "");
    place.answer(&line("--out s"));
    place.remove("s/strong/seed-3/config.toml");
    let (_, err) = place.exits(&line("--out s"), 3);
    let lost = "s/strong/seed-3: is a run that has lost its config.toml; *copy config.toml from";
    assert!(is_like(&err, &format!("*{lost}*")), "{err}");
    place.remove("s/strong/seed-3/provenance.json");
    let (_, err) = place.exits(&line("--out s"), 3);
    assert!(is_like(&err, &format!("*s/strong/seed-3: *config.toml{again}")), "{err}");
}

/// The tests of `sparse24_lab::study` have every reason.
#[test]
fn impossible_studies_are_refused_before_anything_runs() {
    let place = place();
    let unknown = "study.toml: reference: \"bert\" is not known *";
    for (line, code, message) in [
        (line("--reference bert --out s"), 2, unknown),
        (line("--set steps=0 --out s"), 2, "study.toml: base: steps: *"),
        ("study nowhere.toml --out s".into(), 3, "nowhere.toml: *a study: a TOML file *"),
        (line("--data nowhere --out s"), 3, "nowhere: *"),
    ] {
        place.refuses(&line, code, message);
    }
    place.write("study.toml", STUDY.replace("method.lambda = 0.3", "model.heads = 3"));
    place.refuses(&line("--out s"), 2, "study.toml: arms.strong: model.heads: * 16, found 3");
    if std::env::var_os("SPARSE24_REQUIRE_WGPU").is_some() {
        let large = "backend.name = \"wgpu\"\nbatch.size = 1048576";
        place.write("study.toml", STUDY.replace("method.lambda = 0.3", large));
        let (_, said) = place.exits(&line("--out s"), 2);
        assert!(is_like(&said, "batch.size: *tensors of at most*arm strong"), "{said}");
        assert!(!place.has("s/study.toml"));
    }
}

#[cfg(unix)]
mod signals {
    use std::path::Path;

    use super::*;
    use crate::running::{LONG, attempts, interrupted, reached, send};

    /// A step takes minutes, a micro-step a millisecond; the signal stops both parallel runs.
    #[test]
    fn a_signal_stops_all_runs_and_prints_how_to_continue() {
        let place = place();
        for (signal, exit) in [("-INT", 130), ("-TERM", 143)] {
            let line = line(&format!(
                "--set batch.gradient_accumulation_steps=1000000 --jobs 2 --out s{exit}"
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
        let settings = format!("{LONG} --set run.checkpoint_every=0 --set steps=300 --jobs 2");
        place.write("study.toml", STUDY.replace("[1, 2, 3]", "[1, 2]"));
        place.answer(&line(&format!("{settings} --out whole")));
        let out = attempts(|attempt| {
            let out = format!("stopped-{attempt}");
            let line = line(&format!("{settings} --out {out}"));
            let mut child = reached(&place, &line, &format!("{out}/fst/seed-1"), 1)?;
            send("-TERM", &child);
            (child.wait().unwrap().code() == Some(143)).then_some(out)
        });
        assert!(place.path(&out).join("study.json").exists(), "the results so far can be read");
        place.rename("text", "moved");
        let line = line(&format!("{settings} --data moved --out {out}"));
        let (_, said) = place.exits(&line, 3);
        let pattern = "seed-1: is a run with data.path*change data.path in the run's config.toml";
        assert!(is_like(&said, pattern) && !said.contains("remove"), "{said}");
        for run in ["dense", "fst", "strong"]
            .iter()
            .flat_map(|arm| [1, 2].map(|seed| format!("{out}/{arm}/seed-{seed}/config.toml")))
        {
            if place.has(&run) {
                place.edit(&run, "/text\"", "/moved\"");
            }
        }
        place.answer(&line);
        assert_eq!(place.read(&format!("{out}/study.json")), place.read("whole/study.json"));
        let end = |out: &str| place.saved(&format!("{out}/fst/seed-1"), 300);
        assert!(end(&out) == end("whole"));
        assert!(end(&out).contains_key(Path::new("model.safetensors")));
    }
}

//! Every training method through the command: listed, trained, resumed, evaluated and exported;
//! and choices set separately.

use serde_json::{Value, json};

use crate::support::{Place, SAVED};

const NAMES: [&str; 9] =
    ["dense", "half", "ste", "ste-row-wise", "sr-ste", "fst", "step", "bi-mask", "s-ste"];

#[test]
fn the_list_of_methods_names_every_choice_and_source() {
    let place = Place::new();
    let rows = place.json("presets --methods --json");
    let rows = rows.as_array().unwrap();
    assert!(rows.iter().map(|row| row["name"].as_str().unwrap()).eq(NAMES));
    let listed = place.answer("presets --methods");
    for row in rows {
        let words = ["name", "forward", "dgrad", "wgrad", "decay", "source"].map(|key| &row[key]);
        for text in words.into_iter().chain(row["phases"].as_array().unwrap()) {
            let text = text.as_str().unwrap();
            assert!(!text.is_empty() && listed.contains(text), "{text:?} of {row}");
        }
    }
    for (name, key, value) in [
        ("fst", "phases", json!(["sparse:5/6", "dense"])),
        ("fst", "refresh", json!("every 40 steps")),
        ("step", "phases", json!(["dense:settled", "frozen"])),
        ("bi-mask", "dgrad", json!("permuted")),
        ("s-ste", "forward", json!("soft-threshold")),
        ("half", "width", json!("1/2")),
        ("sr-ste", "lambda", json!(2e-4)),
        ("step", "lambda", Value::Null),
    ] {
        assert_eq!(rows.iter().find(|row| row["name"] == name).unwrap()[key], value, "{name}");
    }
}

/// The first masks of the quickstart, which the page of sparse24-web shows, too.
#[test]
fn eval_has_the_hash_of_masks() {
    let place = Place::new();
    place.answer("train --method ste --steps 1 --out one");
    let first = "9ca03c96ec17c8d48f717325c0c1959db6ece445af7f052e39adaa4fb0d88da3";
    assert_eq!(place.json("eval one --json --tokens 64")["masks"], first);
}

#[test]
fn every_method_trains_resumes_and_exports() {
    let place = Place::new();
    for name in NAMES {
        let trained = place.train(name, &format!("--method {name} {SAVED}"));
        place.repeats(name);
        let evaluated = place.json(&format!("eval {name} --json"));
        assert_eq!(evaluated["loss"], trained["val_loss"], "{name}");

        let sparse = format!("export {name} {name}-24 --sparse24");
        if evaluated["phase"] == "dense" {
            assert!(["dense", "half", "fst"].contains(&name));
            place.refuses(&sparse, 3, &format!("{name}: step 12*dense phase"));
        } else {
            let answer = place.answer(&sparse);
            let (told, verify) = answer.trim_end().rsplit_once('\n').unwrap();
            assert!(told.contains("4 weights"), "{answer}");
            // Every mask but that of ste is row-wise.
            assert_eq!(verify.contains(" --mask column"), name != "ste", "{answer}");
            place.answer(verify.strip_prefix("sparse24 ").unwrap());
        }
        place.answer(&format!("export {name} {name}-dense --dense"));
    }
    assert!(place.read("bi-mask/config.toml").contains("lambda = 0.0002\n"));
    // The forward operands of S-STE are thresholded and scaled, not only masked.
    assert!(place.tree("s-ste-24") != place.tree("ste-row-wise-24"));
    let log = place.read("step/log.txt");
    assert!(log.lines().any(|line| line.contains("step 6: dense training ends")), "{log}");
    let state = place.value("step/checkpoints/step-00000012/state.json");
    assert_eq!(state["phase_ends"][0]["step"], 6);
}

#[test]
fn every_choice_can_be_set_separately() {
    let place = Place::new();
    let mut losses: Vec<Value> = Vec::new();
    for (settings, sparse_steps) in [
        ("", 10),
        ("--set method.wgrad=dense", 10),
        ("--set method.wgrad=mvue-approximate", 10),
        ("--set method.dgrad=dense", 10),
        ("--set method.forward=row-wise", 10),
        ("--set method.forward=soft-threshold", 10),
        ("--set method.decay=none", 10),
        ("--set method.decay=on-weights --set method.lambda=1", 10),
        ("--set method.refresh=1", 10),
        (r#"--set method.phases=["sparse"]"#, 12),
        (r#"--set method.phases=["sparse"] --set method.wgrad=dense"#, 12),
        (r#"--set method.phases=["dense:1/6","sparse"]"#, 10),
        (r#"--set method.phases=["dense:1/6","frozen:0.5","dense"]"#, 4),
        (r#"--method dense --set method.phases=["sparse"] --set method.wgrad=mvue"#, 0),
    ] {
        let run = format!("run{}", losses.len());
        let loss =
            place.train(&run, &format!("--set method.lambda=0.1 {settings}"))["val_loss"].take();
        let metrics = place.metrics(&run);
        let sparse = metrics.iter().filter(|step| step["phase"] == "sparse").count();
        assert_eq!(sparse, sparse_steps, "{settings}");
        assert!(!losses.contains(&loss), "{settings}: the same run as one before");
        losses.push(loss);
    }
}

/// Adam's variance and its bias correction stay frozen across adjacent frozen phases.
#[test]
fn a_frozen_phase_may_be_divided() {
    let place = Place::new();
    let model = |run: &str, phases: &str| {
        place.train(run, &format!("--method ste-row-wise --set method.phases=[{phases}]"));
        place.model(run, 12)
    };
    let whole = model("whole", r#""dense:1/4","frozen""#);
    assert!(model("halves", r#""dense:1/4","frozen:1/2","frozen""#) == whole);
    let empty = model("empty", r#""dense:1/4","frozen:1/2","sparse:1/2","frozen""#);
    assert!(empty == whole, "a phase without a step changes nothing");
    assert!(model("sparse", r#""dense:1/4","sparse:1/2","frozen""#) != whole);
}

/// The bias correction stays that of the last step that changed the variance, even if the run is
/// extended or freezes the variance only after a resume.
#[test]
fn a_frozen_variance_keeps_its_correction() {
    let place = Place::new();
    let train = |run: &str, steps: u32, phases: &str| {
        let settings = format!("--set steps={steps} --set method.phases=[{phases}]");
        let schedule = "--set optimizer.decay_steps=16";
        place.train(run, &format!("--method ste-row-wise {schedule} {settings}"));
    };
    train("whole", 16, r#""dense:3/16","frozen""#);
    train("longer", 12, r#""dense:1/4","frozen""#);
    place.answer("resume longer --set steps=16");
    train("later", 3, r#""dense""#);
    let later = r#"--set method.phases=["dense:1/16","frozen"]"#;
    place.answer(&format!("resume later --set steps=16 {later}"));
    for run in ["longer", "later"] {
        assert!(place.model(run, 16) == place.model("whole", 16), "{run}");
    }
}

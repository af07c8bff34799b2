//! Every method of the table through the command: listed, trained, resumed, evaluated, exported;
//! and choices set alone.

use std::fs;

use serde_json::Value;

use crate::support::Place;

const NAMES: [&str; 9] =
    ["dense", "half", "ste", "ste-row-wise", "sr-ste", "fst", "step", "bi-mask", "s-ste"];

#[test]
fn the_table_of_methods_names_every_choice_and_source() {
    let place = Place::new();
    let rows = place.json("presets --methods --json");
    let rows = rows.as_array().unwrap();
    assert!(rows.iter().map(|row| row["name"].as_str().unwrap()).eq(NAMES));
    let listed = place.answer("presets --methods");
    for row in rows {
        for key in ["name", "forward", "dgrad", "wgrad", "decay", "source"] {
            let text = row[key].as_str().unwrap();
            assert!(!text.is_empty() && listed.contains(text), "{key} of {row}");
        }
        for phase in row["phases"].as_array().unwrap() {
            assert!(listed.contains(phase.as_str().unwrap()), "{phase}");
        }
    }
    let of = |name: &str| rows.iter().find(|row| row["name"] == name).unwrap();
    assert_eq!(of("fst")["phases"], Value::from(vec!["sparse:5/6", "dense"]));
    assert_eq!(of("step")["phases"], Value::from(vec!["dense:settled", "frozen"]));
    assert_eq!(
        (&of("bi-mask")["dgrad"], &of("s-ste")["forward"]),
        (&Value::from("permuted"), &Value::from("soft-threshold"))
    );
    assert_eq!(
        (&of("half")["width"], &of("fst")["refresh"]),
        (&Value::from("1/2"), &Value::from("every 40 steps"))
    );
}

#[test]
fn every_method_trains_and_resumes_and_its_last_model_is_what_it_says() {
    let place = Place::new();
    for name in NAMES {
        let trained = place
            .train(name, &format!("--method {name} --checkpoint-every 5 --set run.keep_last=9"));
        let last = format!("{name}/checkpoints/step-00000012");
        let whole = place.tree(&last);
        for checkpoint in fs::read_dir(place.path(&format!("{name}/checkpoints"))).unwrap() {
            let path = checkpoint.unwrap().path();
            if !path.ends_with("step-00000005") {
                fs::remove_dir_all(path).unwrap();
            }
        }
        let resumed = place.json(&format!("resume {name} --json"));
        assert_eq!(
            (&resumed["trained"], &resumed["val_loss"]),
            (&Value::from(7), &trained["val_loss"]),
            "{name}"
        );
        assert!(place.tree(&last) == whole, "{name}: another last checkpoint");
        let evaluated = place.json(&format!("eval {name} --json"));
        assert_eq!(evaluated["loss"], trained["val_loss"], "{name}");

        let sparse = format!("export {name} {name}-24 --sparse24");
        if evaluated["phase"] == "dense" {
            assert!(["dense", "half", "fst"].contains(&name));
            place.refuses(
                &sparse,
                3,
                &format!("{name}: step 12 is of a dense phase, its weights have left their masks*"),
            );
        } else {
            let said = place.answer(&sparse);
            let (told, verify) = said.trim_end().rsplit_once('\n').unwrap();
            assert!(
                told.ends_with("4 weights were read back and proved 2:4; to verify them again:"),
                "{said}"
            );
            assert_eq!(verify.contains(" --mask column"), name != "ste", "{verify}");
            place.answer(verify.strip_prefix("sparse24 ").unwrap());
        }
        place.answer(&format!("export {name} {name}-dense"));
    }
    // What S-STE multiplies by is not its weights under their masks.
    let bytes = |name: &str| place.tree(&format!("{name}-24"));
    assert!(bytes("s-ste") != bytes("ste-row-wise"));
    let log = place.read("step/log.txt");
    assert!(log.contains("step 6: dense training ends, sparse training begins"), "{log}");
    let state: Value =
        serde_json::from_str(&place.read("step/checkpoints/step-00000012/state.json")).unwrap();
    assert_eq!(state["phase_ends"][0]["step"], 6);
}

#[test]
fn every_choice_can_be_set_alone() {
    let place = Place::new();
    let mut losses: Vec<(usize, String)> = Vec::new();
    for (at, (settings, sparse_steps)) in [
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
    ]
    .into_iter()
    .enumerate()
    {
        let summary =
            place.train(&format!("run{at}"), &format!("--set method.lambda=0.1 {settings}"));
        let metrics = place.metrics(&format!("run{at}"));
        assert_eq!(
            metrics.iter().filter(|step| step["phase"] == "sparse").count(),
            sparse_steps,
            "{settings}"
        );
        let loss = summary["val_loss"].to_string();
        assert!(
            losses.iter().all(|(_, other)| *other != loss),
            "{settings}: no other run than one before"
        );
        losses.push((at, loss));
    }
}

#[test]
fn choices_are_compared_by_a_resume_and_may_be_missing_in_old_runs() {
    let place = Place::new();
    place.train("run", "");
    let config = place.read("run/config.toml");
    place.write("run/config.toml", config.replace("decay = \"\"", "decay = \"none\""));
    let message = "*: was saved with no method.decay, the run has method.decay = \"none\" now; undo that, continue so with --allow method.decay, or *";
    place.refuses("resume run", 3, message);
    let old: Vec<&str> = config
        .lines()
        .filter(|line| {
            ![
                "decay = \"\"",
                "forward = ",
                "dgrad = ",
                "wgrad = ",
                "phases = ",
                "d_ff_ratio = ",
                "kind = ",
            ]
            .iter()
            .any(|new| line.starts_with(new))
        })
        .collect();
    assert_eq!(old.len() + 7, config.lines().count());
    place.write("run/config.toml", old.join("\n"));
    place.answer("resume run");
}

/// Steps 1 to 4 and 9 to 12 are sparse; one checkpoint besides is kept.
#[test]
fn the_model_of_each_sparse_phase_is_kept() {
    let place = Place::new();
    place.train("run", r#"--set method.phases=["sparse:1/3","dense:2/3","sparse"] --checkpoint-every 2 --set run.keep_last=1"#);
    let kept = fs::read_dir(place.path("run/checkpoints"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut kept: Vec<String> = kept.collect();
    kept.sort();
    assert_eq!(kept, ["step-00000004", "step-00000012"]);
    assert!(place.path("run/checkpoints/step-00000004/masks.safetensors").is_file());
}

/// Adam's variance is frozen where it was, and so is its bias correction, however the phase is
/// divided.
#[test]
fn a_frozen_phase_goes_on_in_the_next() {
    let place = Place::new();
    let model = |run: &str, phases: &str| {
        place.train(run, &format!("--method ste-row-wise --set method.phases=[{phases}]"));
        fs::read(place.path(&format!("{run}/checkpoints/step-00000012/model.safetensors"))).unwrap()
    };
    let whole = model("whole", r#""dense:1/4","frozen""#);
    assert!(model("halves", r#""dense:1/4","frozen:1/2","frozen""#) == whole);
    assert!(
        model("between", r#""dense:1/4","frozen:1/2","sparse:1/2","frozen""#) == whole,
        "a phase without a step changes nothing"
    );
    assert!(model("sparse", r#""dense:1/4","sparse:1/2","frozen""#) != whole);
}

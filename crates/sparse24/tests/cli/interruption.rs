//! `sparse24 resume`: after kills, after damage and after changes, and its refusals.

use std::fs;

use serde_json::json;

use crate::{
    running::{LONG, attempts, lines, reached},
    support::{Place, SAVED, TINY, checkpoint, text},
};

/// Kills a command once the metrics of the run have `seen` lines. Returns the last number of lines,
/// or none if the command ended first.
fn kill(place: &Place, line: &str, run: &str, seen: usize) -> Option<usize> {
    let mut child = reached(place, line, run, seen)?;
    child.kill().unwrap();
    (!child.wait().unwrap().success()).then(|| lines(place, run))
}

#[test]
fn a_killed_run_ends_like_an_uninterrupted_one() {
    let place = Place::new();
    let settings = format!("{LONG} --checkpoint-every 9");
    place.train("whole", &settings);
    assert_eq!(place.checkpoints("whole").len(), 3, "the last sparse one and the last two");
    let (run, killed) = attempts(|attempt| {
        let run = format!("killed-{attempt}");
        let first = kill(&place, &format!("train {TINY} {settings} --out {run}"), &run, 20)?;
        let second = kill(&place, &format!("resume {run}"), &run, 450)?;
        Some((run, [first, second]))
    });
    let summary = place.json(&format!("resume {run} --json"));
    assert_eq!([&summary["run"], &summary["steps"]], [&json!(run), &json!(600)]);
    for step in [500, 600] {
        let is_equal = place.saved(&run, step) == place.saved("whole", step);
        assert!(is_equal, "step {step} differs, killed after {killed:?}");
    }
    let names = place.checkpoints(&run);
    assert!(names.iter().all(|name| name.starts_with("step-")), "leftovers of saves: {names:?}");
    assert_eq!(place.timeless(&run), place.timeless("whole"), "killed after {killed:?}");
    let provenance = place.value(&format!("{run}/provenance.json"));
    let starts = provenance.as_array().unwrap().iter().map(|start| start["initial"].clone());
    let starts: Vec<_> = starts.collect();
    assert_eq!((starts.len(), &starts[0], &starts[2]), (3, &json!("random"), &json!("checkpoint")));
    let log = place.read(&format!("{run}/log.txt"));
    assert_eq!(log.matches("resumed after step ").count(), 2, "{log}");
}

#[test]
fn a_run_without_checkpoints_resumes_only_from_random_weights() {
    let place = Place::trained("");
    place.train("next", "--init-from run");
    fs::remove_dir_all(place.path("next/checkpoints")).unwrap();
    for line in ["resume next", "resume next --fall-back"] {
        place.refuses(line, 3, "next: *checkpoint*--init-from");
    }
    let (end, metrics) = (place.saved("run", 12), place.read("run/metrics.jsonl"));
    place.rewind("run", [10, 12]);
    place.refuses("resume run", 3, "run: *step 12*checkpoints*new run");
    assert_eq!(place.read("run/metrics.jsonl"), metrics, "nothing is lost");
    // As if it was killed before its first save.
    place.write("run/log.txt", "");
    let notes = place.notes("resume run");
    assert!(notes.contains("the metrics up to step 12 are kept as metrics.1.jsonl"), "{notes}");
    assert_eq!(place.read("run/metrics.1.jsonl"), metrics);
    assert!(place.saved("run", 12) == end);
    // Refused only if a second save was due before the last step.
    for (every, last, code) in [(5, 12, 3), (6, 12, 0), (u32::MAX, u32::MAX, 0)] {
        let _ = fs::remove_dir_all(place.path("run/checkpoints"));
        place.write("run/log.txt", "");
        let last = format!("\"step\":{last},");
        place.write("run/metrics.jsonl", metrics.replace("\"step\":12,", &last));
        place.exits(&format!("resume run --set run.checkpoint_every={every}"), code);
    }
    place.rewind("run", [10, 12]);
    fs::remove_file(place.path("run/provenance.json")).unwrap();
    place.refuses("resume run", 3, "run/provenance.json");
}

#[test]
fn a_damaged_checkpoint_is_named_and_set_aside_when_asked() {
    let place = Place::trained(SAVED);
    let (end, metrics) = (place.saved("run", 12), place.timeless("run"));
    let file = |step| format!("{}/model.safetensors", checkpoint("run", step));
    let damage = |step| {
        let bytes = fs::read(place.path(&file(step))).unwrap();
        place.write(&file(step), &bytes[..100]);
    };
    damage(12);
    let named = format!("run: *{}: *byte 100", file(12));
    place.refuses("resume run", 3, &format!("{named}*`sparse24 resume run --fall-back`"));
    let line = "resume run --set steps=14 --allow data";
    place.refuses(line, 3, &format!("{named}*`sparse24 {line} --fall-back`"));
    for line in ["eval run", "sample run", "export run out"] {
        let older = format!("{named}*name an older one, such as *{}", checkpoint("run", 10));
        place.refuses(line, 3, &older);
    }
    damage(10);
    let notes = place.notes("resume run --fall-back");
    let log = place.read("run/log.txt");
    for step in [10, 12] {
        for text in [&notes, &log] {
            assert!(
                text.lines().any(|line| line.contains(&file(step)) && line.contains("byte 100"))
            );
        }
        let aside = format!("run/checkpoints/damaged-step-000000{step}.1/model.safetensors");
        assert_eq!(fs::read(place.path(&aside)).unwrap().len(), 100);
    }
    assert!(log.contains("resumed after step 8"), "{log}");
    assert!(place.saved("run", 12) == end && place.timeless("run") == metrics);
    [4, 8, 10, 12].into_iter().for_each(damage);
    place.refuses("resume run --fall-back", 3, "run: *checkpoint*new run");
    place.refuses("resume run", 3, "run: *newest checkpoint is damaged*no other is intact*new run");
    place.refuses("eval run", 3, "run: *newest checkpoint*is damaged*no other that is intact");
}

#[test]
fn a_resume_changes_settings_from_there_on() {
    let place = Place::trained(SAVED);
    let model = "run/checkpoints/step-00000012: *model.d_model = 32*changes the shape or meaning";
    place.refuses("resume run --set model.d_model=32", 3, model);
    place.refuses("resume run --set modle.layers=2", 2, "modle");
    place.refuses("resume run --set steps", 2, "KEY=VALUE");
    let notes = place.notes("resume run --set steps=14 --set run.keep_last=1 --set seed=1337");
    let is_said = |what: &str| notes.lines().any(|line| line == what);
    assert!(is_said("the run continues with steps = 14 instead of steps = 12"), "{notes}");
    let rise = |step: usize| {
        let rate = place.metrics("run")[step - 1]["lr"].as_f64().unwrap();
        format!("the learning rate rises from {rate:.2e} to ")
    };
    let because = ", because the decay now ends with step ";
    assert!(notes.contains(&rise(12)) && notes.contains(because), "{notes}");
    assert!(is_said("from here on with steps=14, run.keep_last=1"), "{notes}");
    let changed = |start: usize| place.value("run/provenance.json")[start]["changed"].clone();
    assert_eq!(changed(1), json!({"steps": "14", "run.keep_last": "1"}));
    assert_eq!(place.metrics("run").len(), 14);
    assert!(place.read("run/config.toml").contains("steps = 14"));
    let provenance = place.read("run/provenance.json");
    let notes = place.notes("resume run --set steps=14 --set seed=1337");
    assert!(notes.contains("is finished") && !notes.contains("from here on"), "{notes}");
    assert_eq!(place.read("run/provenance.json"), provenance);
    // Without --allow, since the new setting is the run's own now, also where no checkpoint has it.
    place.answer("resume run");
    let (settings, finished) =
        (place.read("run/config.toml"), "run: is finished*more steps than 14");
    place.refuses("resume run --set batch.size=9", 3, finished);
    assert_eq!(place.read("run/config.toml"), settings);
    place.answer("resume run --set steps=16 --set run.keep_last=9 --set batch.size=5");
    let end = place.model("run", 16);
    place.rewind("run", [16]);
    let notes = place.notes("resume run");
    assert!(place.model("run", 16) == end && notes.contains(&rise(14)), "{notes}");
    let tokens = place.metrics("run").into_iter().map(|step| step["tokens"].as_u64().unwrap());
    let state = place.value(&format!("{}/state.json", checkpoint("run", 16)));
    assert_eq!(state["tokens_seen"], tokens.sum::<u64>());
    // Back to a value that checkpoints leave out, and to another method with its own lambda.
    let notes = place.notes(
        "resume run --set run.eval_tokens=24 --set steps=18 --set optimizer.learning_rate=1e-2",
    );
    assert!(notes.contains(&rise(16)) && !notes.contains(because), "{notes}");
    place.answer("resume run --set run.eval_tokens=0 --set method.name=sr-ste --set steps=20");
    // To one whose operands need a scale, and to one without masked decay.
    place.answer("resume run --set method.name=s-ste --set steps=21");
    let notes = place.notes("resume run --set method.name=fst --set steps=22");
    assert!(notes.contains("the run continues with method.lambda = "), "{notes}");
    let notes = place.notes("resume run --set method.name=dense --set steps=23");
    assert!(!notes.contains("the run continues with method.lambda"), "{notes}");
    place.edit("run/config.toml", "size = 5", "size = 4");
    place.refuses("resume run", 3, "batch.size = 5*now has batch.size = 4*--allow batch.size");
}

#[test]
fn a_resume_with_other_settings_loses_nothing() {
    let place = Place::trained(SAVED);
    place.edit("run/config.toml", "keep_last = 9", "keep_last = 1");
    place.rewind("run", [10, 12]);
    let config = place.read("run/config.toml");
    for steps in [5, 8] {
        place.write("run/config.toml", config.replace("steps = 12", &format!("steps = {steps}")));
        let pattern = format!(
            "run/checkpoints/step-00000008: *8*12*steps = {steps}*`--set steps=12`*more than 8"
        );
        place.refuses("resume run --allow steps", 3, &pattern);
    }
    // Of 9 steps, the last two are dense.
    place.write("run/config.toml", config.replace("steps = 12", "steps = 9"));
    let notes = place.notes("resume run --allow steps");
    assert!(notes.contains("dense training starts now, because the run was shortened"), "{notes}");
    assert_eq!(place.checkpoints("run"), ["step-00000008", "step-00000009"], "the last 2:4 model");
    fs::remove_dir_all(place.path("run/checkpoints")).unwrap();
    place.refuses("resume run", 3, "run: *step 9*checkpoint");
    fs::remove_file(place.path("run/metrics.jsonl")).unwrap();
    place.answer("resume run");
    assert_eq!(place.metrics("run").len(), 9, "with nothing left to lose, it starts again");
}

#[test]
fn a_resume_of_a_finished_run_changes_nothing() {
    let place = Place::new();
    let trained = place.train("run", "");
    let files = || {
        let files = ["run/metrics.jsonl", "run/provenance.json"].map(|file| place.read(file));
        (place.tree("run/checkpoints"), files)
    };
    let before = files();
    let resumed = place.json("resume run --json");
    for key in ["run", "steps", "loss", "val_loss"] {
        assert_eq!(resumed[key], trained[key], "{key}");
    }
    assert_eq!([&trained["trained"], &resumed["trained"]], [&json!(12), &json!(0)]);
    let (out, err) = place.exits("resume run", 0);
    assert!(err.lines().any(|line| line.contains("finished") && line.contains("step 12")), "{err}");
    assert!(out.contains("run directory   run\n"), "{out}");
    assert!(files() == before);
}

#[test]
fn a_run_resumes_from_another_folder_and_after_its_data_moved() {
    let place = Place::trained(SAVED);
    let end = place.saved("run", 12);
    place.rewind("run", [10, 12]);
    fs::create_dir(place.path("elsewhere")).unwrap();
    let mut command = place.command("resume ../run");
    assert!(command.current_dir(place.path("elsewhere")).output().unwrap().status.success());
    assert!(place.saved("run", 12) == end);
    // A run whose data path leaves its own folder.
    place.folder("here");
    let mut command = place.command(&format!("train {TINY} --set data.path=../text --out ."));
    assert!(command.current_dir(place.path("here")).output().unwrap().status.success());
    place.answer("eval here");
    place.rewind("run", [10, 12]);
    fs::rename(place.path("text"), place.path("elsewhere/text")).unwrap();
    place.refuses("resume run", 3, "/text: does not exist");
    // None of these settings decides a bit.
    for (from, to) in [
        ("/text\"", "/elsewhere/text\""),
        ("threads = 1", "threads = 2"),
        ("checkpoint_every = 4", "checkpoint_every = 5"),
        ("preset = \"", "preset = \"my "),
    ] {
        place.edit("run/config.toml", from, to);
    }
    place.answer("resume run");
    assert!(place.saved("run", 12) == end);
}

#[test]
fn folders_that_are_no_runs_and_changed_configurations_are_refused() {
    let place = Place::trained("");
    fs::create_dir(place.path("folder")).unwrap();
    for run in ["nowhere", "folder"] {
        let pattern = format!("{run}: *config.toml*`sparse24 train --out {run}`*--resume-or-start");
        place.refuses(&format!("resume {run}"), 9, &pattern);
    }
    place.refuses("resume text", 3, "text: *config.toml");
    #[cfg(unix)]
    {
        // For root too, the system refuses to show these.
        std::os::unix::fs::symlink("loop", place.path("loop")).unwrap();
        for command in ["resume", "eval", "eval --best", "report", "train --resume-or-start --out"]
        {
            let (_, err) = place.exits(&format!("{command} loop"), 4);
            assert!(err.contains("error: cannot read loop/config.toml: "), "{command}: {err}");
        }
        fs::remove_file(place.path("loop")).unwrap();
    }
    // Checkpoints of a loop of one's own are not those of a start that died.
    place.write("own/lock", "");
    place.folder("own/checkpoints/step-00000002");
    place.refuses(&format!("train {TINY} --out own"), 3, "own: already *checkpoints");
    for inside in ["run/checkpoints", "run/checkpoints/step-00000012"] {
        let pattern = format!("{inside}: *config.toml*name run");
        place.refuses(&format!("resume {inside}"), 3, &pattern);
    }
    let config = place.read("run/config.toml");
    // The advice is what brings it back.
    place.write("run/config.toml", "");
    for line in ["resume run", "eval run", "train --out run", "train --out run --resume-or-start"] {
        let pattern = "run: is a run that has lost its config.toml; *first command*another --out";
        place.refuses(line, 3, pattern);
    }
    place.answer(&format!("train {TINY} --out again"));
    fs::copy(place.path("again/config.toml"), place.path("run/config.toml")).unwrap();
    place.answer("resume run");
    place.answer("resume run --set steps=14 --set seed=5");
    let (changed, end) = (place.read("run/config.toml"), place.saved("run", 14));
    fs::copy(place.path("again/config.toml"), place.path("run/config.toml")).unwrap();
    place.refuses("resume run", 3, "run/checkpoints/step-00000014: *`--set steps=14`");
    let pattern = "with `--set seed=5`*`sparse24 resume run *--allow seed --set steps=N`";
    place.refuses("resume run --set steps=14", 3, pattern);
    place.answer("resume run --set steps=14 --set seed=5");
    assert!(place.read("run/config.toml") == changed && place.saved("run", 14) == end);
    fs::remove_dir_all(place.path("run")).unwrap();
    place.train("run", "");
    for (from, to, pattern) in [
        ("steps = 12", "", "config.toml: is incomplete*missing*`steps`*provenance.json"),
        ("layers = 2", "layres = 2", "config.toml: *model: *\"layres\"*\"layers\""),
        // Valid, but not what was trained.
        ("steps = 12", "steps = 13", "steps = 12*steps = 13*--allow steps"),
        (
            "lambda = 0.006",
            "lambda = 1",
            "method.lambda = 0.006*method.lambda = 1.0*--allow method.lambda",
        ),
        (
            "decay = \"\"",
            "decay = \"none\"",
            "no method.decay*method.decay = \"none\"*--allow method.decay",
        ),
        ("d_model = 16", "d_model = 32", "model.d_model = 16*model.d_model = 32*weights"),
        ("\"char\"", "\"byte\"", "data.tokenizer = \"char\"*data.tokenizer = \"byte\"*weights"),
    ] {
        assert!(config.contains(from));
        place.write("run/config.toml", config.replacen(from, to, 1));
        let file = if pattern.starts_with("config") { "" } else { "checkpoints/step-00000012: *" };
        place.refuses("resume run", 3, &format!("run/{file}{pattern}"));
    }
    place.write("run/config.toml", config);
    fs::remove_dir_all(place.path("run/checkpoints")).unwrap();
    place.refuses(
        "resume run",
        3,
        "run: *up to step 12*none of the checkpoints*folder checkpoints",
    );
    place.refuses("eval run", 3, "run: *checkpoints*log.txt*are lost; restore");
}

#[test]
fn other_settings_and_data_are_allowed_by_name_unless_weights_depend_on_them() {
    let place = Place::trained(SAVED);
    let original = place.read("text");
    let saved = "run/checkpoints/step-00000012: *";
    let tokens = format!("{saved}3600 + 400 tokens*27*fingerprint");
    place.write("text", original.replacen('q', "p", 1));
    let advice = "undo the change, *`sparse24 resume run *--allow data.path --set steps=N`";
    place.refuses("resume run", 3, &format!("{tokens}*{advice}"));
    place.refuses("resume run --allow data", 3, "run: is finished*or data, set more steps than 12");
    let typed = "--set steps=14 --set method.phases=[\"sparse\"] --allow optimizer";
    let printed = "--set steps=14 --set 'method.phases=[\"sparse\"]' --allow optimizer";
    let pattern = format!("{tokens}*`sparse24 resume run {printed} --allow data.path`");
    place.refuses(&format!("resume run {typed}"), 3, &pattern);
    place.write("text", original.replace('q', "é"));
    place.rename("run/tokenizer.json", "kept");
    let problem = "run/tokenizer.json: is missing or damaged, and cannot be rebuilt";
    place.refuses("resume run", 3, problem);
    place.rename("kept", "run/tokenizer.json");
    for line in ["resume run", "resume run --allow data"] {
        place.refuses(line, 3, "text: the character 'é'*27 characters");
    }
    place.write("text", text(2));
    place.edit("run/config.toml", "steps = 12", "steps = 15");
    place.edit("run/config.toml", "learning_rate = 0.02", "learning_rate = 0.01");
    let pattern = format!(
        "{saved}optimizer.learning_rate = 0.02*steps = 12*optimizer.learning_rate = 0.01*\
         steps = 15*--allow optimizer.learning_rate --allow steps --allow data"
    );
    place.refuses("resume run", 3, &pattern);
    let line = "resume run --allow optimizer --allow data";
    place.refuses(line, 3, "steps = 12*steps = 15");
    place.refuses("resume run --allow step", 2, "--allow: *\"step\"*did you mean \"steps\"");
    let pattern = format!("{saved}*name = \"adamw\"*name = \"lion\"*");
    place.refuses("resume run --set optimizer.name=lion --allow optimizer", 3, &pattern);
    // A model too large for any machine is refused before it is allocated.
    let pattern = format!("{saved}d_ff = 32*d_ff = 16777216*");
    let line = "resume run --set model.d_ff=16777216 --set model.layers=4000";
    place.refuses(line, 3, &pattern);
    let notes = place.notes("resume run --allow optimizer --allow data --allow steps");
    for text in [notes, place.read("run/log.txt")] {
        let is_noted = |line: &str| line.contains("steps = 15") && line.contains("steps = 12");
        assert!(text.lines().any(is_noted) && text.contains("resumed after step 12"), "{text}");
    }
    assert_eq!(place.metrics("run").len(), 15);
    place.answer("resume run");
    // Without a checkpoint that has the change, which an older version recorded under another key.
    place.write("other", text(3));
    place.answer("resume run --set steps=16 --set data.path=other");
    place.rewind("run", [16]);
    let mut starts = place.value("run/provenance.json");
    let changed = starts.as_array_mut().unwrap().last_mut().unwrap()["changed"].as_object_mut();
    let changed = changed.unwrap();
    let path = changed.remove("data.path").unwrap();
    changed.insert("data".to_owned(), path.as_str().unwrap().trim_matches('"').into());
    place.write("run/provenance.json", starts.to_string());
    place.answer("resume run");
}

#[test]
fn a_longer_sparse_phase_is_reported_and_keeps_earlier_2_4_models() {
    let place = Place::trained("--checkpoint-every 4 --set run.keep_last=1");
    let sparse = place.saved("run", 10);
    for (from, to, until, kept) in [
        (12, 18, Some(15), &[10, 15, 18][..]),
        // The phase has ended by then.
        (18, 19, None, &[10, 15, 19]),
    ] {
        let [from, to] = [from, to].map(|steps| format!("\nsteps = {steps}\n"));
        place.edit("run/config.toml", &from, &to);
        let notes = place.notes("resume run --allow steps");
        let notice = notes.lines().find(|line| line.contains("until step "));
        assert_eq!(notice.is_some(), until.is_some(), "{notes}");
        if let (Some(notice), Some(until)) = (notice, until) {
            assert!(notice.contains(&format!("until step {until}")), "{notice}");
            assert!(place.read("run/log.txt").contains(notice));
        }
        let names: Vec<_> = kept.iter().map(|step| format!("step-{step:08}")).collect();
        assert_eq!(place.checkpoints("run"), names);
    }
    assert!(place.saved("run", 10) == sparse);
}

#[test]
fn old_checkpoints_are_removed_unless_asked_for_or_the_last_sparse_one() {
    let place = Place::new();
    for (run, settings, kept) in [
        (
            "multiples",
            "--checkpoint-every 1 --set run.keep_last=2 --set run.keep_every=3",
            &[3, 6, 9, 10, 11, 12][..],
        ),
        // Steps 1 to 4 and 9 to 12 are sparse.
        (
            "phases",
            r#"--checkpoint-every 2 --set run.keep_last=1
               --set method.phases=["sparse:1/3","dense:2/3","sparse"]"#,
            &[4, 12],
        ),
    ] {
        place.train(run, settings);
        let names: Vec<_> = kept.iter().map(|step| format!("step-{step:08}")).collect();
        assert_eq!(place.checkpoints(run), names, "{run}");
    }
    // Given weights are saved before the first step, which is no multiple to keep.
    place.train("given", "--init-from phases --checkpoint-every 6 --set run.keep_every=6");
    assert!(!place.checkpoints("given").contains(&"step-00000000".to_owned()));
}

/// Somebody removes or replaces what a run writes.
#[cfg(unix)]
#[test]
fn files_that_are_lost_meanwhile_are_an_error() {
    let place = Place::new();
    for what in ["removed", "replaced", "folder"] {
        let (run, output) = attempts(|attempt| {
            let run = format!("{what}-{attempt}");
            let line = format!("train {TINY} {LONG} --checkpoint-every 100 --out {run}");
            let child = reached(&place, &line, &run, 20)?;
            let metrics = place.path(&run).join("metrics.jsonl");
            match what {
                "removed" => fs::remove_file(metrics).unwrap(),
                "replaced" => {
                    fs::copy(&metrics, place.path("copy")).unwrap();
                    fs::rename(place.path("copy"), metrics).unwrap();
                }
                _ => fs::rename(place.path(&run), place.path("aside")).unwrap(),
            }
            if what == "folder" {
                fs::remove_dir_all(place.path("aside")).unwrap();
            }
            Some((run, child.wait_with_output().unwrap()))
        });
        let (out, err) = (&output.stdout, String::from_utf8(output.stderr).unwrap());
        assert_eq!(output.status.code(), Some(3), "{what}: {err}");
        assert!(out.is_empty() && err.contains("metrics.jsonl: was removed or replaced"), "{err}");
        if what != "folder" {
            let notes = place.notes(&format!("resume {run}"));
            assert!(notes.contains("resumed after step 100"), "{notes}");
        }
    }
}

/// A run goes on in its directory, wherever that is; the summary names what is there.
#[cfg(target_os = "linux")]
#[test]
fn a_run_whose_directory_moves_meanwhile_is_finished() {
    use std::{process::Stdio, thread, time::Duration};

    let place = Place::new();
    let (moved, output) = attempts(|attempt| {
        let (run, moved) = (format!("run-{attempt}"), format!("moved-{attempt}"));
        let mut command = place.command(&format!("train {TINY} {LONG} --out {run}"));
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        while lines(&place, &run) < 20 {
            if child.try_wait().unwrap().is_some() {
                return None;
            }
            thread::sleep(Duration::from_millis(1));
        }
        fs::rename(place.path(&run), place.path(&moved)).unwrap();
        Some((moved, child.wait_with_output().unwrap()))
    });
    let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(output.status.success() && out.contains(&format!("/{moved}\n")), "{out}{err}");
    assert_eq!(place.metrics(&moved).len(), 600);
    place.answer(&format!("eval {moved}"));

    let (moved, said) = attempts(|attempt| {
        let (run, moved) = (format!("stopped-{attempt}"), format!("aside-{attempt}"));
        let child = reached(&place, &format!("train {TINY} {LONG} --out {run}"), &run, 20)?;
        fs::rename(place.path(&run), place.path(&moved)).unwrap();
        crate::running::send("-TERM", &child);
        let said = String::from_utf8(child.wait_with_output().unwrap().stderr).unwrap();
        said.contains("interrupted").then_some((moved, said))
    });
    let (_, advice) = said.trim_end().rsplit_once("sparse24 ").unwrap();
    assert!(advice.ends_with(&moved), "{said}");
    place.answer(advice);
}

/// Damage that is more than the half line of a kill.
#[test]
fn damaged_metrics_are_kept_and_readable_lines_go_on() {
    let place = Place::trained(SAVED);
    let metrics = place.read("run/metrics.jsonl");
    let lines: Vec<_> = metrics.split_inclusive('\n').collect();
    let rows = [
        ("\0".repeat(3 << 20) + &lines[6..10].concat(), "line 1 ", vec![8, 9, 10]),
        (metrics.replacen("\"loss\"", "\"lots\"", 1), "line 1 ", (2..=10).collect()),
        ([lines[0], lines[0], lines[1]].concat(), "step 1 follows step 1", vec![1, 2]),
        ("{}\n{}\n".to_owned(), "missing field", Vec::new()),
    ];
    for (number, (damaged, problem, readable)) in (1..).zip(rows) {
        place.rewind("run", [12]);
        place.write("run/metrics.jsonl", &damaged);
        let notes = place.notes("resume run");
        let name = format!("metrics.{number}.jsonl");
        let is_said = |line: &str| line.contains(problem) && line.contains(&name);
        assert!(notes.lines().any(is_said), "{notes}");
        assert!(place.read("run/log.txt").contains(&name));
        assert_eq!(place.read(&format!("run/{name}")), damaged);
        let steps = place.metrics("run").into_iter().map(|line| line["step"].as_u64().unwrap());
        assert!(steps.eq(readable.into_iter().chain([11, 12])), "{damaged}");
    }
}

#[test]
fn a_damaged_file_of_a_run_is_named_or_repaired() {
    let place = Place::trained("");
    let metrics = place.read("run/metrics.jsonl");
    // A kill may leave half a line.
    place.write("run/metrics.jsonl", format!("{metrics}{{\"step\":13,\"ph"));
    place.answer("resume run");
    assert_eq!(place.read("run/metrics.jsonl"), metrics);
    // A tokenizer is made again from the data.
    let whole = place.read("run/tokenizer.json");
    for damage in ["", r#"{"sparse24_tokenizer":1,"kind":"char","characters":"ab"}"#] {
        place.write("run/tokenizer.json", damage);
        let notes = place.notes("resume run");
        assert!(notes.contains("tokenizer.json"), "{notes}");
        assert_eq!(place.read("run/tokenizer.json"), whole);
    }
    for (number, damage) in (1..).zip(["", "{}"]) {
        place.write("run/provenance.json", damage);
        let notes = place.notes("resume run --allow run");
        let kept = format!("provenance.{number}.json");
        assert!(notes.contains(&format!("it is kept as {kept}")), "{notes}");
        assert_eq!(place.read(&format!("run/{kept}")), damage);
        assert_eq!(place.value("run/provenance.json").as_array().unwrap().len(), 1);
    }
    // Where the clock does not move, the speed is not a number.
    place.rewind("run", [12]);
    let (speed, rest) = metrics.split_once("\"tokens_per_s\":").unwrap();
    let rest = rest.trim_start_matches(|c: char| c.is_ascii_digit() || ".e+".contains(c));
    place.write("run/metrics.jsonl", format!("{speed}\"tokens_per_s\":null{rest}"));
    place.answer("resume run");
    assert_eq!(place.metrics("run").len(), 12);
    place.answer("report run");
}

/// Settings that did not exist yet are absent.
#[test]
fn a_run_of_an_earlier_version_is_resumed() {
    let place = Place::trained("");
    let new = [
        "decay = ",
        "forward = ",
        "dgrad = ",
        "wgrad = ",
        "phases = ",
        "d_ff_ratio = ",
        "kind = ",
        "instrument_every = ",
    ];
    let config = place.read("run/config.toml");
    let is_old = |line: &&str| !new.iter().any(|new| line.starts_with(new));
    let old: Vec<&str> = config.lines().filter(is_old).collect();
    assert_eq!(old.len() + new.len(), config.lines().count());
    place.write("run/config.toml", old.join("\n"));
    place.answer("resume run");
    place.answer("report run");
}

//! `sparse24 resume`: after kills, after damage and after changes, and its refusals.

use std::{fs, process::Stdio, thread, time::Duration};

use serde_json::{Value, json};

use crate::support::{Place, TINY, checkpoint};

/// Settings of a run of 600 steps of a few milliseconds, 500 of them sparse.
pub(crate) const LONG: &str = "--set steps=600 --set model.d_model=32 --set model.d_ff=64 \
    --set model.sequence_length=16 --set batch.gradient_accumulation_steps=2 \
    --set model.dropout=0.1 --set run.flip_every=5 --set run.eval_every=75 \
    --set method.refresh=7 --set run.keep_last=2";

/// Starts a command and kills it once the metrics of the run have `seen` lines. Returns the last
/// number of lines, or none if the command ended first.
fn kill(place: &Place, line: &str, run: &str, seen: usize) -> Option<usize> {
    let mut child =
        place.command(line).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let metrics = place.path(run).join("metrics.jsonl");
    let lines = || {
        fs::read(&metrics).map_or(0, |bytes| bytes.iter().filter(|&&byte| byte == b'\n').count())
    };
    while lines() < seen && child.try_wait().unwrap().is_none() {
        thread::sleep(Duration::from_millis(1));
    }
    let _ = child.kill();
    (!child.wait().unwrap().success()).then(lines)
}

/// The first result of up to ten attempts to reach a process before it ends. Each has hundreds of
/// milliseconds to do so.
pub(crate) fn attempts<T>(attempt: impl FnMut(usize) -> Option<T>) -> T {
    (0..10).find_map(attempt).expect("ten processes ended before they were reached")
}

/// The metrics without times.
pub(crate) fn timeless(place: &Place, run: &str) -> Vec<Value> {
    let mut metrics = place.metrics(run);
    for line in &mut metrics {
        assert!(line.as_object_mut().unwrap().remove("tokens_per_s").is_some());
    }
    metrics
}

#[test]
fn a_killed_run_ends_like_an_uninterrupted_one() {
    let place = Place::new();
    let settings = format!("{LONG} --checkpoint-every 9");
    place.train("whole", &settings);
    assert_eq!(place.checkpoints("whole").len(), 3, "the last sparse one and the last two");
    // Killed in the sparse phase, resumed, and killed in the dense phase, where frequent
    // checkpoints slow it down enough.
    let (run, killed) = attempts(|attempt| {
        let run = format!("killed-{attempt}");
        let config = format!("{run}/config.toml");
        let resume = format!("resume {run}");
        let first = kill(&place, &format!("train {TINY} {settings} --out {run}"), &run, 20)?;
        let second = kill(&place, &resume, &run, 450)?;
        place.edit(&config, "checkpoint_every = 9\n", "checkpoint_every = 1\n");
        let third = kill(&place, &resume, &run, second.max(503))?;
        place.edit(&config, "checkpoint_every = 1\n", "checkpoint_every = 9\n");
        Some((run, [first, second, third]))
    });
    let summary = place.json(&format!("resume {run} --json"));
    assert_eq!([&summary["run"], &summary["steps"]], [&json!(run), &json!(600)]);
    for step in [500, 600] {
        let [found, expected] = [&run, "whole"].map(|run| place.tree(&checkpoint(run, step)));
        assert!(found == expected, "step {step} differs, killed after {killed:?}");
    }
    let names = place.checkpoints(&run);
    assert!(names.iter().all(|name| name.starts_with("step-")), "leftovers of saves: {names:?}");
    assert_eq!(timeless(&place, &run), timeless(&place, "whole"), "killed after {killed:?}");
    let provenance: Value =
        serde_json::from_str(&place.read(&format!("{run}/provenance.json"))).unwrap();
    let initial: Vec<&Value> =
        provenance.as_array().unwrap().iter().map(|start| &start["initial"]).collect();
    assert_eq!((initial[0], initial.len()), (&json!("random"), 4));
    assert!(initial[2..].iter().all(|initial| *initial == "checkpoint"), "{initial:?}");
    let log = place.read(&format!("{run}/log.txt"));
    assert_eq!(log.matches("resumed after step ").count(), 3, "{log}");
}

#[test]
fn a_run_killed_before_its_first_checkpoint_starts_again() {
    let place = Place::new();
    let settings = format!("{LONG} --checkpoint-every 0");
    place.train("whole", &settings);
    let run = attempts(|attempt| {
        let run = format!("killed-{attempt}");
        kill(&place, &format!("train {TINY} {settings} --out {run}"), &run, 3)?;
        (!place.path(&run).join("checkpoints").exists()).then_some(run)
    });
    place.answer(&format!("resume {run}"));
    assert!(place.tree(&format!("{run}/checkpoints")) == place.tree("whole/checkpoints"));
    assert_eq!(timeless(&place, &run), timeless(&place, "whole"));
}

#[test]
fn a_run_without_checkpoints_resumes_only_from_random_weights() {
    let place = Place::new();
    place.train("run", "");
    place.train("next", "--init-from run");
    fs::remove_dir_all(place.path("next/checkpoints")).unwrap();
    for line in ["resume next", "resume next --fall-back"] {
        place.refuses(line, 3, "next: *checkpoint*--init-from");
    }
    let end = place.tree(&checkpoint("run", 12));
    place.rewind("run", [10, 12]);
    place.answer("resume run");
    assert!(place.tree(&checkpoint("run", 12)) == end);
    place.rewind("run", [10, 12]);
    fs::remove_file(place.path("run/provenance.json")).unwrap();
    place.refuses("resume run", 3, "run/provenance.json");
}

#[test]
fn a_resume_falls_back_when_asked() {
    let place = Place::new();
    place.train("run", "--checkpoint-every 4 --set run.keep_last=9");
    let (end, metrics) = (place.tree(&checkpoint("run", 12)), timeless(&place, "run"));
    let damage = |step| {
        let path = format!("{}/model.safetensors", checkpoint("run", step));
        let bytes = fs::read(place.path(&path)).unwrap();
        place.write(&path, &bytes[..100]);
    };
    damage(12);
    damage(10);
    let notes = place.notes("resume run --fall-back");
    let log = place.read("run/log.txt");
    for step in [10, 12] {
        let file = format!("{}/model.safetensors", checkpoint("run", step));
        for text in [&notes, &log] {
            assert!(text.lines().any(|line| line.contains(&file) && line.contains("byte 100")));
        }
        let aside = format!("run/checkpoints/damaged-step-000000{step}.1/model.safetensors");
        assert_eq!(fs::read(place.path(&aside)).unwrap().len(), 100);
    }
    assert!(log.contains("resumed after step 8"), "{log}");
    assert!(place.tree(&checkpoint("run", 12)) == end && timeless(&place, "run") == metrics);
    [4, 8, 10, 12].into_iter().for_each(damage);
    place.refuses("resume run --fall-back", 3, "run: *checkpoint*new run");
}

#[test]
fn a_resume_with_other_settings_loses_nothing() {
    let place = Place::new();
    place.train("run", "--checkpoint-every 4 --set run.keep_last=9");
    place.edit("run/config.toml", "keep_last = 9", "keep_last = 1");
    place.rewind("run", [10, 12]);
    let config = place.read("run/config.toml");
    for steps in [5, 8] {
        place.write("run/config.toml", config.replace("steps = 12", &format!("steps = {steps}")));
        let pattern = format!("run/checkpoints/step-00000008: *8*12*steps = {steps}");
        place.refuses("resume run --allow steps", 3, &pattern);
    }
    // Of 9 steps, the last two are dense.
    place.write("run/config.toml", config.replace("steps = 12", "steps = 9"));
    place.answer("resume run --allow steps");
    assert_eq!(place.checkpoints("run"), ["step-00000008", "step-00000009"], "the last 2:4 model");
    fs::remove_dir_all(place.path("run/checkpoints")).unwrap();
    place.refuses("resume run", 3, "run: *9 steps*checkpoint");
    assert_eq!(place.metrics("run").len(), 9);
    fs::remove_file(place.path("run/metrics.jsonl")).unwrap();
    place.answer("resume run");
    assert_eq!(place.metrics("run").len(), 9, "with nothing left to lose, it starts again");
}

#[test]
fn lost_metrics_are_reported() {
    let place = Place::new();
    place.train("run", "--checkpoint-every 4 --set run.keep_last=9");
    place.rewind("run", [12]);
    let whole = place.read("run/metrics.jsonl");
    place.write("run/metrics.jsonl", whole.split_inclusive('\n').take(5).collect::<String>());
    let notes = place.notes("resume run");
    for text in [notes, place.read("run/log.txt")] {
        let is_lost = |line: &str| line.contains("metrics.jsonl") && line.contains("6 to 10");
        assert!(text.lines().any(is_lost) && text.contains("resumed after step 10"), "{text}");
    }
    let steps: Vec<_> =
        place.metrics("run").iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [1, 2, 3, 4, 5, 11, 12]);
}

#[test]
fn a_resume_of_a_finished_run_changes_nothing() {
    let place = Place::new();
    let trained = place.train("run", "");
    let files = || (place.tree("run/checkpoints"), place.read("run/metrics.jsonl"));
    let before = files();
    let resumed = place.json("resume run --json");
    for key in ["run", "steps", "loss", "val_loss"] {
        assert_eq!(resumed[key], trained[key], "{key}");
    }
    assert_eq!([&trained["trained"], &resumed["trained"]], [&json!(12), &json!(0)]);
    assert_eq!(trained["val_loss"], place.json("eval run --json")["loss"]);
    let (code, out, err) = place.run("resume run");
    assert_eq!(code, Some(0), "{err}");
    assert!(err.lines().any(|line| line.contains("finished") && line.contains("step 12")), "{err}");
    assert!(out.contains("run directory   run\n"), "{out}");
    assert!(files() == before);
}

#[test]
fn a_run_resumes_from_another_folder_and_after_its_data_moved() {
    let place = Place::new();
    place.train("run", "--checkpoint-every 4 --set run.keep_last=9");
    let end = place.tree(&checkpoint("run", 12));
    place.rewind("run", [10, 12]);
    fs::create_dir(place.path("elsewhere")).unwrap();
    let mut command = place.command("resume ../run");
    assert!(command.current_dir(place.path("elsewhere")).output().unwrap().status.success());
    assert!(place.tree(&checkpoint("run", 12)) == end);
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
    assert!(place.tree(&checkpoint("run", 12)) == end);
}

#[test]
fn folders_that_are_no_runs_and_changed_configurations_are_refused() {
    let place = Place::new();
    fs::create_dir(place.path("folder")).unwrap();
    for run in ["nowhere", "folder", "text"] {
        place.refuses(&format!("resume {run}"), 3, &format!("{run}: *config.toml"));
    }
    place.train("run", "");
    for inside in ["run/checkpoints", "run/checkpoints/step-00000012"] {
        let pattern = format!("{inside}: *config.toml*name run");
        place.refuses(&format!("resume {inside}"), 3, &pattern);
    }
    let config = place.read("run/config.toml");
    let saved = "run/checkpoints/step-00000012: *";
    for (from, to, pattern) in [
        ("steps = 12", "steps = 0", "run/config.toml: *steps: *1*0"),
        ("steps = 12", "steps = \"x\"", "run/config.toml: *steps: *\"x\""),
        ("steps = 12", "", "run/config.toml: *missing*`steps`"),
        ("steps = 12", "stepz = 12", "run/config.toml: *\"stepz\"*\"steps\""),
        ("layers = 2", "layres = 2", "run/config.toml: *model: *\"layres\"*\"layers\""),
        ("[model]", "[model", "run/config.toml: *line 5"),
        ("\"fst\"", "\"fts\"", "run/config.toml: *method.name: *\"fts\"*\"fst\""),
        // Valid, but not what was trained.
        ("steps = 12", "steps = 13", &format!("{saved}steps = 12*steps = 13*--allow steps")),
        ("seed = 1337", "seed = 1", &format!("{saved}seed = 1337*seed = 1 *--allow seed")),
        (
            "lambda = 0.00006",
            "lambda = 1",
            &format!("{saved}method.lambda = 0.00006*method.lambda = 1.0*--allow method.lambda"),
        ),
        (
            "d_model = 16",
            "d_model = 32",
            &format!("{saved}model.d_model = 16*model.d_model = 32*weights"),
        ),
        (
            "\"char\"",
            "\"byte\"",
            &format!("{saved}data.tokenizer = \"char\"*data.tokenizer = \"byte\"*weights"),
        ),
    ] {
        assert!(config.contains(from));
        place.write("run/config.toml", config.replacen(from, to, 1));
        place.refuses("resume run", 3, pattern);
    }
    place.write("run/config.toml", &config);
    place.answer("resume run");
}

#[test]
fn allowed_settings_and_data_may_differ() {
    let place = Place::new();
    place.train("run", "--checkpoint-every 4 --set run.keep_last=9");
    place.edit("run/config.toml", "steps = 12", "steps = 15");
    place.edit("run/config.toml", "learning_rate = 0.02", "learning_rate = 0.01");
    place.write("text", crate::support::text(2));
    let pattern = "run/checkpoints/step-00000012: *optimizer.learning_rate = 0.02*steps = 12*\
                   optimizer.learning_rate = 0.01*steps = 15*\
                   --allow optimizer.learning_rate --allow steps --allow data";
    place.refuses("resume run", 3, pattern);
    let line = "resume run --allow optimizer --allow data";
    place.refuses(line, 3, "steps = 12*steps = 15");
    place.refuses("resume run --allow step", 2, "--allow: *\"step\"*did you mean \"steps\"");
    let notes = place.notes(&format!("{line} --allow steps"));
    for text in [notes, place.read("run/log.txt")] {
        let is_noted = |line: &str| line.contains("steps = 15") && line.contains("steps = 12");
        assert!(text.lines().any(is_noted) && text.contains("resumed after step 12"), "{text}");
    }
    assert_eq!(place.metrics("run").len(), 15);
    place.answer("resume run");
}

#[test]
fn a_longer_sparse_phase_is_reported_and_keeps_earlier_2_4_models() {
    let place = Place::new();
    place.train("run", "--checkpoint-every 4 --set run.keep_last=1");
    let sparse = place.tree(&checkpoint("run", 10));
    for (from, to, until, kept) in [
        (12, 18, Some(15), &[10, 15, 18][..]),
        (18, 24, Some(20), &[10, 15, 20, 24]),
        // The phase has ended by then.
        (24, 25, None, &[10, 15, 20, 25]),
    ] {
        let [from, to] = [from, to].map(|steps| format!("\nsteps = {steps}\n"));
        place.edit("run/config.toml", &from, &to);
        let notes = place.notes("resume run --allow steps");
        let notice = notes.lines().find(|line| line.contains("until step "));
        match until {
            None => assert!(notice.is_none(), "{notes}"),
            Some(until) => {
                let notice = notice.expect("a notice");
                assert!(notice.contains(&format!("until step {until}")), "{notice}");
                assert!(place.read("run/log.txt").contains(notice));
            }
        }
        let names: Vec<_> = kept.iter().map(|step| format!("step-{step:08}")).collect();
        assert_eq!(place.checkpoints("run"), names);
    }
    assert!(place.tree(&checkpoint("run", 10)) == sparse);
}

#[test]
fn old_checkpoints_are_removed_unless_asked_for() {
    let place = Place::new();
    place.train("run", "--checkpoint-every 1 --set run.keep_last=2 --set run.keep_every=3");
    assert_eq!(
        place.checkpoints("run"),
        [3, 6, 9, 10, 11, 12].map(|step| format!("step-{step:08}")),
        "multiples of 3, the last sparse one, the last two"
    );
}

#[test]
fn a_damaged_file_of_a_run_is_named_or_repaired() {
    let place = Place::new();
    place.train("run", "");
    for (file, contents, pattern) in
        [("metrics.jsonl", "{\"step\": 1}\n{}\n", "line 1*`phase`"), ("provenance.json", "{}", "")]
    {
        let file = format!("run/{file}");
        let whole = place.read(&file);
        place.write(&file, contents);
        place.refuses("resume run", 3, &format!("{file}: *{pattern}"));
        place.write(&file, whole);
    }
    // A tokenizer is made again from the data.
    let whole = place.read("run/tokenizer.json");
    for damage in ["", "{}", r#"{"sparse24_tokenizer":1,"kind":"char","characters":"ab"}"#] {
        place.write("run/tokenizer.json", damage);
        let notes = place.notes("resume run");
        assert!(notes.contains("tokenizer.json"), "{notes}");
        assert_eq!(place.read("run/tokenizer.json"), whole);
    }
    // A kill may leave half a line.
    let whole = place.read("run/metrics.jsonl");
    place.write("run/metrics.jsonl", format!("{whole}{{\"step\":13,\"ph"));
    place.answer("resume run");
    assert_eq!(place.read("run/metrics.jsonl"), whole);
}

#[test]
fn other_data_is_refused() {
    let place = Place::new();
    place.train("run", "--checkpoint-every 4");
    let text = place.read("text");
    let saved = "run/checkpoints/step-00000012: *3600 + 400 tokens*27*fingerprint";
    for other in [crate::support::text(2), text.replacen('q', "p", 1)] {
        place.write("text", other);
        place.refuses("resume run", 3, &format!("{saved}*--allow data"));
    }
    place.write("text", text.replace('q', "p"));
    for line in ["resume run", "resume run --allow data"] {
        place.refuses(line, 3, &format!("{saved}*26*weights"));
    }
    place.write("text", "");
    place.refuses("resume run", 3, "/text: ");
    place.write("text", text);
    place.answer("resume run");
}

#[test]
fn a_damaged_newest_checkpoint_is_named_and_the_one_before_it_is_used() {
    let place = Place::new();
    place.train("run", "--checkpoint-every 4 --set run.keep_last=9");
    let newest = checkpoint("run", 12);
    let end = place.tree(&newest);
    let flip = |at: usize| move |bytes: &mut Vec<u8>| bytes[at] ^= 1;
    type Change<'a> = &'a dyn Fn(&mut Vec<u8>);
    let changes: [(&str, Change<'_>, &str); 5] = [
        ("model.safetensors", &|bytes| *bytes.last_mut().unwrap() ^= 1, "\"ln_f.weight\"*bytes "),
        ("model.safetensors", &|bytes| bytes.truncate(100), "byte 100"),
        ("optimizer.safetensors", &flip(20), "\"header\"*bytes 0.."),
        ("state.json", &flip(20), "\"state\"*bytes 0.."),
        ("manifest.json", &flip(20), "bytes 0.."),
    ];
    for (file, change, pattern) in changes {
        let file = format!("{newest}/{file}");
        let whole = fs::read(place.path(&file)).unwrap();
        let mut bytes = whole.clone();
        change(&mut bytes);
        place.write(&file, bytes);
        let pattern = format!("run: *{file}: *{pattern}*`sparse24 resume run --fall-back`");
        place.refuses("resume run", 3, &pattern);
        for line in ["eval run", "sample run", "export run out"] {
            place.refuses(line, 3, &format!("run: *{newest}*{file}: "));
        }
        place.write(&file, whole);
    }
    place.rewind("run", [12]);
    place.answer("resume run");
    assert!(place.tree(&newest) == end);
}

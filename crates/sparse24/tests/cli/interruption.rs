//! `sparse24 resume`: kills, and every way in which it refuses.

use std::{fs, path::Path, process::Stdio, thread, time::Duration};

use serde_json::Value;

use crate::support::{Place, TINY};

/// 600 steps of a few milliseconds: the switch is after 500.
pub(crate) const LONG: &str = "--set steps=600 --set model.d_model=32 --set model.d_ff=64 --set model.sequence_length=16 --set batch.gradient_accumulation_steps=2 \
    --set model.dropout=0.1 --set run.flip_every=5 --set run.eval_every=75 --set method.refresh=7 --set run.keep_last=2";

/// Starts a run (or resumes it) and kills it once it has told of `seen` steps; none if it ended
/// first, else the last step it told of.
fn kill(place: &Place, line: &str, run: &str, seen: usize) -> Option<usize> {
    let mut child =
        place.command(line).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let metrics = place.path(run).join("metrics.jsonl");
    let told = || {
        fs::read(&metrics).map_or(0, |bytes| bytes.iter().filter(|&&byte| byte == b'\n').count())
    };
    while told() < seen && child.try_wait().unwrap().is_none() {
        thread::sleep(Duration::from_millis(1));
    }
    let _ = child.kill();
    (!child.wait().unwrap().success()).then(told)
}

/// Makes a killed process of the first attempt that does not end before: each leaves hundreds of
/// milliseconds to kill it in.
pub(crate) fn attempts<T>(attempt: impl FnMut(usize) -> Option<T>) -> T {
    (0..10).find_map(attempt).expect("ten runs have ended before they could be killed")
}

/// Changes the interval of the checkpoints, which decides no bit.
fn save_every(place: &Place, run: &str, from: u32, to: u32) {
    let config = place.read(&format!("{run}/config.toml"));
    let changed = config
        .replace(&format!("checkpoint_every = {from}\n"), &format!("checkpoint_every = {to}\n"));
    assert_ne!(config, changed);
    place.write(&format!("{run}/config.toml"), changed);
}

/// The metrics without what clocks say.
pub(crate) fn timeless(place: &Place, run: &str) -> Vec<Value> {
    let mut metrics = place.metrics(run);
    for line in &mut metrics {
        assert!(line.as_object_mut().unwrap().remove("tokens_per_s").is_some());
    }
    metrics
}

#[test]
fn a_killed_run_ends_like_one_that_was_not() {
    let place = Place::new();
    let settings = format!("{LONG} --checkpoint-every 9");
    place.train("whole", &settings);
    let whole = place.tree("whole/checkpoints");
    assert_eq!(
        whole.keys().filter(|path| path.ends_with("manifest.json")).count(),
        3,
        "the switch and the last two"
    );
    // In the sparse phase; then, resumed, beyond the switch, where a checkpoint a step makes it
    // slow enough to be killed before its end.
    let (run, before, after) = attempts(|attempt| {
        let run = format!("killed-{attempt}");
        let before = kill(&place, &format!("train {TINY} {settings} --out {run}"), &run, 20)?;
        let told = kill(&place, &format!("resume {run}"), &run, 450)?;
        save_every(&place, &run, 9, 1);
        let after = kill(&place, &format!("resume {run}"), &run, told.max(503))?;
        save_every(&place, &run, 1, 9);
        Some((run, before, after))
    });
    let summary = place.json(&format!("resume {run} --json"));
    assert_eq!(
        (&summary["run"], &summary["steps"]),
        (&Value::from(run.as_str()), &Value::from(600))
    );
    let ended = place.tree(&format!("{run}/checkpoints"));
    for (path, contents) in whole
        .iter()
        .filter(|(path, _)| path.starts_with("step-00000500") || path.starts_with("step-00000600"))
    {
        assert!(
            ended[path] == *contents,
            "{} differs, killed after {before} and {after}",
            path.display()
        );
    }
    assert!(
        ended.keys().all(|path| path.to_str().unwrap().starts_with("step-")),
        "nothing is left of a save: {:?}",
        ended.keys()
    );
    assert_eq!(
        timeless(&place, &run),
        timeless(&place, "whole"),
        "killed after {before} and {after}"
    );
    let provenance: Value =
        serde_json::from_str(&place.read(&format!("{run}/provenance.json"))).unwrap();
    let initial: Vec<&Value> =
        provenance.as_array().unwrap().iter().map(|start| &start["initial"]).collect();
    assert_eq!(initial[0], "random");
    assert!(
        initial.len() == 4 && initial[2..].iter().all(|initial| *initial == "checkpoint"),
        "one entry a start: {initial:?}"
    );
    let log = place.read(&format!("{run}/log.txt"));
    assert_eq!(log.matches("resumed after step ").count(), 3, "{log}");
}

#[test]
fn a_run_killed_before_its_first_checkpoint_begins_anew() {
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
fn a_run_from_given_weights_never_resumes_from_others() {
    let place = Place::new();
    place.train("run", "");
    place.train("next", "--init-from run");
    fs::remove_dir_all(place.path("next/checkpoints")).unwrap();
    let message = "next: has no checkpoint left, and its given initial weights cannot be recreated; start a new run with `sparse24 train --init-from`";
    for line in ["resume next", "resume next --fall-back"] {
        place.refuses(line, 3, message);
    }
    let end = place.tree("run/checkpoints/step-00000012");
    fs::remove_dir_all(place.path("run/checkpoints")).unwrap();
    place.answer("resume run");
    assert!(place.tree("run/checkpoints/step-00000012") == end, "random weights are made again");
    fs::remove_dir_all(place.path("run/checkpoints")).unwrap();
    fs::remove_file(place.path("run/provenance.json")).unwrap();
    place.refuses("resume run", 3, "cannot read run/provenance.json: *");
}

#[test]
fn a_resume_falls_back_when_asked() {
    let place = Place::new();
    let checkpoint = |step: u32| format!("run/checkpoints/step-{step:08}");
    place.train("run", "--checkpoint-every 4 --set run.keep_last=9");
    let (end, metrics) = (place.tree(&checkpoint(12)), timeless(&place, "run"));
    let damage = |step| {
        let path = format!("{}/model.safetensors", checkpoint(step));
        let bytes = fs::read(place.path(&path)).unwrap();
        place.write(&path, &bytes[..100]);
    };
    damage(12);
    damage(10);
    let output = place.command("resume run --fall-back").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    for step in [10, 12] {
        let line = format!(
            "skipped a damaged checkpoint: {}/model.safetensors: ends at byte 100, the manifest says",
            checkpoint(step)
        );
        assert!(said.contains(&line) && place.read("run/log.txt").contains(&line), "{said}");
    }
    assert!(place.read("run/log.txt").contains("resumed after step 8"));
    assert!(
        place.tree(&checkpoint(12)) == end && timeless(&place, "run") == metrics,
        "it ends as before"
    );
    for step in ["10", "12"] {
        let aside = format!("run/checkpoints/damaged-step-000000{step}.1/model.safetensors");
        assert_eq!(
            fs::read(place.path(&aside)).unwrap().len(),
            100,
            "is left to whoever can mend it"
        );
    }
    for step in [4, 8, 10, 12] {
        damage(step);
    }
    place.refuses("resume run --fall-back", 3, "run: has no intact checkpoint; start a new run");
}

#[test]
fn a_resume_loses_nothing_to_other_settings() {
    let place = Place::new();
    place.train("run", "--checkpoint-every 4 --set run.keep_last=9");
    let config = place.read("run/config.toml").replace("keep_last = 9", "keep_last = 1");
    for step in [10, 12] {
        fs::remove_dir_all(place.path(&format!("run/checkpoints/step-{step:08}"))).unwrap();
    }
    for steps in [5, 8] {
        place.write("run/config.toml", config.replace("steps = 12", &format!("steps = {steps}")));
        let message = format!(
            "run/checkpoints/step-00000008: has done 8 of 12 steps, the run has steps = {steps} now; ask for more than 8"
        );
        place.refuses("resume run --allow steps", 3, &message);
    }
    // Of 9 steps, the eighth is dense.
    place.write("run/config.toml", config.replace("steps = 12", "steps = 9"));
    place.answer("resume run --allow steps");
    let mut left: Vec<_> = fs::read_dir(place.path("run/checkpoints"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    left.sort();
    assert_eq!(left, ["step-00000008", "step-00000009"], "the last 2:4 model stays");
    fs::remove_dir_all(place.path("run/checkpoints")).unwrap();
    let message = "run: holds metrics of 9 steps but no checkpoint; restore its checkpoints, or start a new run";
    place.refuses("resume run", 3, message);
    assert_eq!(place.metrics("run").len(), 9);
    fs::remove_file(place.path("run/metrics.jsonl")).unwrap();
    place.answer("resume run");
    assert_eq!(place.metrics("run").len(), 9, "nothing is left to lose, so it begins anew");
}

#[test]
fn lost_metrics_are_told() {
    let place = Place::new();
    place.train("run", "--checkpoint-every 4 --set run.keep_last=9");
    fs::remove_dir_all(place.path("run/checkpoints/step-00000012")).unwrap();
    let whole = place.read("run/metrics.jsonl");
    place.write(
        "run/metrics.jsonl",
        whole.lines().take(5).map(|line| format!("{line}\n")).collect::<String>(),
    );
    let output = place.command("resume run").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    for line in ["metrics.jsonl has lost the steps 6 to 10", "resumed after step 10"] {
        assert!(
            said.lines().any(|said| said == line) && place.read("run/log.txt").contains(line),
            "{said}"
        );
    }
    let steps: Vec<_> =
        place.metrics("run").iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [1, 2, 3, 4, 5, 11, 12]);
}

#[test]
fn a_finished_run_stays_as_it_is() {
    let place = Place::new();
    let trained = place.train("run", "");
    let (checkpoints, metrics) = (place.tree("run/checkpoints"), place.read("run/metrics.jsonl"));
    let resumed = place.json("resume run --json");
    for key in ["run", "steps", "loss", "val_loss"] {
        assert_eq!(resumed[key], trained[key], "{key}");
    }
    assert_eq!((&trained["trained"], &resumed["trained"]), (&Value::from(12), &Value::from(0)));
    assert_eq!(trained["val_loss"], place.json("eval run --json")["loss"], "to the last digit");
    let output = place.command("resume run").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.lines().any(|line| line == "the run is finished: step 12 was its last"), "{said}");
    assert!(String::from_utf8(output.stdout).unwrap().contains("run directory   run\n"));
    assert!(
        place.tree("run/checkpoints") == checkpoints && place.read("run/metrics.jsonl") == metrics
    );
}

#[test]
fn a_run_resumes_from_anywhere_and_after_a_move_of_its_data() {
    let place = Place::new();
    place.train("run", "--checkpoint-every 4 --set run.keep_last=9");
    let end = place.tree("run/checkpoints/step-00000012");
    let rewind = || {
        for step in ["step-00000010", "step-00000012"] {
            fs::remove_dir_all(place.path("run/checkpoints").join(step)).unwrap();
        }
    };
    rewind();
    fs::create_dir(place.path("elsewhere")).unwrap();
    let mut command = place.command("resume ../run");
    assert!(
        command.current_dir(place.path("elsewhere")).output().unwrap().status.success(),
        "the data were named relative to another folder"
    );
    assert!(place.tree("run/checkpoints/step-00000012") == end);
    rewind();
    fs::rename(place.path("text"), place.path("elsewhere/text")).unwrap();
    place.refuses("resume run", 3, "*/text: does not exist, expected a text file, a folder of them, or a folder of token shards");
    place.write(
        "run/config.toml",
        place
            .read("run/config.toml")
            .replace("/text\"", "/elsewhere/text\"")
            .replace("threads = 1", "threads = 2")
            .replace("checkpoint_every = 4", "checkpoint_every = 5")
            .replace("preset = \"", "preset = \"my "),
    );
    place.answer("resume run");
    assert!(
        place.tree("run/checkpoints/step-00000012") == end,
        "where data lie, how many threads compute and what is saved decide nothing"
    );
}

#[test]
fn what_is_no_run_is_refused() {
    let place = Place::new();
    fs::create_dir(place.path("folder")).unwrap();
    for run in ["nowhere", "folder", "text"] {
        place.refuses(
            &format!("resume {run}"),
            3,
            &format!("{run}: is not a run directory: it holds no config.toml"),
        );
    }
    place.train("run", "");
    for inside in ["run/checkpoints", "run/checkpoints/step-00000012"] {
        let message = format!(
            "{inside}: is not a run directory: it holds no config.toml; it lies in a run, name run"
        );
        place.refuses(&format!("resume {inside}"), 3, &message);
    }
    let config = place.read("run/config.toml");
    let differs = |was: &str, is: &str| {
        format!("run/checkpoints/step-00000012: was saved with {was}, the run has {is} now")
    };
    let choice = |was: &str, is: &str, key: &str| {
        format!(
            "{}; undo that, continue so with --allow {key}, or start a new run",
            differs(was, is)
        )
    };
    let shape = |was: &str, is: &str| {
        format!("{}, which its weights do not fit; undo that, or start a new run", differs(was, is))
    };
    for (from, to, message) in [
        ("steps = 12", "steps = 0", "run/config.toml: steps: expected at least 1, found 0"),
        (
            "steps = 12",
            "steps = \"x\"",
            r#"run/config.toml: steps: expected a whole number, found "x""#,
        ),
        ("steps = 12", "", "run/config.toml: configuration: missing field `steps`"),
        (
            "steps = 12",
            "stepz = 12",
            r#"run/config.toml: configuration: "stepz" is not known; did you mean "steps"? *"#,
        ),
        (
            "layers = 2",
            "layres = 2",
            r#"run/config.toml: model: "layres" is not known; did you mean "layers"? *"#,
        ),
        ("[model]", "[model", "run/config.toml: line 5: *"),
        (
            "\"fst\"",
            "\"fts\"",
            r#"run/config.toml: method.name: "fts" is not known; did you mean "fst"? *"#,
        ),
        // Possible, but not what the run was.
        ("steps = 12", "steps = 13", &choice("steps = 12", "steps = 13", "steps")),
        ("seed = 1337", "seed = 1", &choice("seed = 1337", "seed = 1", "seed")),
        (
            "lambda = 0.00006",
            "lambda = 1",
            &choice("method.lambda = 0.00006", "method.lambda = 1.0", "method.lambda"),
        ),
        ("d_model = 16", "d_model = 32", &shape("model.d_model = 16", "model.d_model = 32")),
        (
            "\"char\"",
            "\"byte\"",
            &shape("data.tokenizer = \"char\", data of *", "data.tokenizer = \"byte\", data of *"),
        ),
    ] {
        assert!(config.contains(from));
        place.write("run/config.toml", config.replacen(from, to, 1));
        place.refuses("resume run", 3, message);
    }
    place.write("run/config.toml", &config);
    place.answer("resume run");
}

#[test]
fn what_is_allowed_may_differ() {
    let place = Place::new();
    place.train("run", "--checkpoint-every 4 --set run.keep_last=9");
    let config = place.read("run/config.toml");
    place.write(
        "run/config.toml",
        config
            .replace("steps = 12", "steps = 15")
            .replace("learning_rate = 0.02", "learning_rate = 0.01"),
    );
    place.write("text", crate::support::text(2));
    let message = "run/checkpoints/step-00000012: was saved with optimizer.learning_rate = 0.02, steps = 12, data of *, the run has \
                   optimizer.learning_rate = 0.01, steps = 15, data of * now; undo that, continue so with \
                   --allow optimizer.learning_rate --allow steps --allow data, or start a new run";
    place.refuses("resume run", 3, message);
    place.refuses(
        "resume run --allow optimizer --allow data",
        3,
        "*: was saved with steps = 12, the run has steps = 15 now; *",
    );
    place.refuses(
        "resume run --allow step",
        2,
        r#"--allow: "step" is not known; did you mean "steps"? *"#,
    );
    let output =
        place.command("resume run --allow optimizer --allow data --allow steps").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    for line in ["the run continues with steps = 15, it had steps = 12", "resumed after step 12"] {
        assert!(
            said.lines().any(|said| said == line) && place.read("run/log.txt").contains(line),
            "{said}"
        );
    }
    assert_eq!(place.metrics("run").len(), 15);
    place.answer("resume run");
}

#[test]
fn sparse_training_that_goes_on_is_told_and_leaves_the_2_4_models_of_before() {
    let place = Place::new();
    place.train("run", "--checkpoint-every 4 --set run.keep_last=1");
    let raise = |from: u32, to: u32| {
        let config = place.read("run/config.toml");
        place.write(
            "run/config.toml",
            config.replace(&format!("\nsteps = {from}\n"), &format!("\nsteps = {to}\n")),
        );
        let output = place.command("resume run --allow steps").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let mut kept: Vec<_> = fs::read_dir(place.path("run/checkpoints"))
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        kept.sort();
        (String::from_utf8(output.stderr).unwrap(), kept)
    };
    let names =
        |steps: &[u32]| steps.iter().map(|step| format!("step-{step:08}")).collect::<Vec<_>>();
    let sparse = place.tree("run/checkpoints/step-00000010");
    for (from, to, until, expected) in
        [(12, 18, 15, &[10, 15, 18][..]), (18, 24, 20, &[10, 15, 20, 24])]
    {
        let (said, kept) = raise(from, to);
        let notice =
            format!("sparse training goes on until step {until}: the phases are shares of steps");
        assert!(
            said.lines().any(|line| line == notice) && place.read("run/log.txt").contains(&notice),
            "{said}"
        );
        assert_eq!(kept, names(expected));
    }
    // The phase has ended by then.
    let (said, kept) = raise(24, 25);
    assert!(!said.contains("sparse training goes on"), "{said}");
    assert_eq!(kept, names(&[10, 15, 20, 25]));
    assert!(place.tree("run/checkpoints/step-00000010") == sparse);
}

#[test]
fn old_checkpoints_go_and_those_asked_for_stay() {
    let place = Place::new();
    place.train("run", "--checkpoint-every 1 --set run.keep_last=2 --set run.keep_every=3");
    let mut kept: Vec<_> = fs::read_dir(place.path("run/checkpoints"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    kept.sort();
    assert_eq!(
        kept,
        [3, 6, 9, 10, 11, 12].map(|step| format!("step-{step:08}")),
        "multiples of 3, the switch, the last two"
    );
}

#[test]
fn a_damaged_file_of_a_run_is_named() {
    let place = Place::new();
    place.train("run", "");
    for (file, contents, message) in [
        (
            "metrics.jsonl",
            "{\"step\": 1}\n{}\n",
            "run/metrics.jsonl: line 1 is no metrics of the next step: missing field `phase` *",
        ),
        ("provenance.json", "{}", "run/provenance.json: not a list of starts: *"),
    ] {
        let whole = place.read(&format!("run/{file}"));
        place.write(&format!("run/{file}"), contents);
        place.refuses("resume run", 3, message);
        place.write(&format!("run/{file}"), whole);
    }
    // The data tell what the tokenizer was.
    let whole = place.read("run/tokenizer.json");
    for damage in ["", "{}", r#"{"sparse24_tokenizer":1,"kind":"char","characters":"ab"}"#] {
        place.write("run/tokenizer.json", damage);
        let said = String::from_utf8(place.command("resume run").output().unwrap().stderr).unwrap();
        assert!(
            said.contains(
                "\ntokenizer.json was missing or damaged, and was written again from the data\n"
            ),
            "{said}"
        );
        assert_eq!(place.read("run/tokenizer.json"), whole);
    }
    // Half a line is what a kill leaves, and is no damage.
    let whole = place.read("run/metrics.jsonl");
    place.write("run/metrics.jsonl", format!("{whole}{{\"step\":13,\"ph"));
    place.answer("resume run");
    assert_eq!(place.read("run/metrics.jsonl"), whole);
}

#[test]
fn other_data_are_refused() {
    let place = Place::new();
    place.train("run", "--checkpoint-every 4");
    let text = place.read("text");
    let other = "run/checkpoints/step-00000012: was saved with data of 3600 + 400 tokens of 27 (fingerprint *), the run has data of 3600 + 400 tokens of 27 (fingerprint *) now; \
                 undo that, continue so with --allow data, or start a new run";
    place.write("text", crate::support::text(2));
    place.refuses("resume run", 3, other);
    place.write("text", text.replacen('q', "p", 1));
    place.refuses("resume run", 3, other);
    place.write("text", text.replace('q', "p"));
    let message = "*, the run has data of 3600 + 400 tokens of 26 (fingerprint * now, which its weights do not fit; undo that, or start a new run";
    for line in ["resume run", "resume run --allow data"] {
        place.refuses(line, 3, message);
    }
    place.write("text", "");
    place.refuses(
        "resume run",
        3,
        "*/text: holds no text; a corpus needs at least one context and a token",
    );
    place.write("text", text);
    place.answer("resume run");
}

#[test]
fn a_damaged_newest_checkpoint_is_named_and_the_one_before_it_serves() {
    let place = Place::new();
    place.train("run", "--checkpoint-every 4 --set run.keep_last=9");
    let newest = Path::new("run/checkpoints/step-00000012");
    let end = place.tree(newest.to_str().unwrap());
    let damage = |file: &str, change: &dyn Fn(&mut Vec<u8>), problem: &str| {
        let path = place.path(newest.join(file).to_str().unwrap());
        let whole = fs::read(&path).unwrap();
        let mut bytes = whole.clone();
        change(&mut bytes);
        fs::write(&path, bytes).unwrap();
        let file = newest.join(file);
        let problem = format!(
            "its newest checkpoint is damaged ({}: {problem}); restore it, or continue from the one before it with `sparse24 resume run --fall-back`",
            file.display()
        );
        place.refuses("resume run", 3, &format!("run: {problem}"));
        let problem = format!(
            "run: its newest checkpoint {} is damaged ({}: *); name an older one",
            newest.display(),
            file.display()
        );
        for line in ["eval run", "sample run", "export run out"] {
            place.refuses(line, 3, &problem);
        }
        fs::write(&path, whole).unwrap();
    };
    damage(
        "model.safetensors",
        &|bytes| *bytes.last_mut().unwrap() ^= 1,
        r#"is damaged in "ln_f.weight", bytes *"#,
    );
    damage(
        "model.safetensors",
        &|bytes| bytes.truncate(100),
        "ends at byte 100, the manifest says *",
    );
    damage(
        "optimizer.safetensors",
        &|bytes| bytes[20] ^= 1,
        r#"is damaged in "header", bytes 0..*"#,
    );
    damage("masks.safetensors", &|bytes| bytes.push(0), "ends at byte *, the manifest says *");
    damage("state.json", &|bytes| bytes[20] ^= 1, r#"is damaged in "state", bytes 0..*"#);
    damage("manifest.json", &|bytes| bytes[20] ^= 1, "is damaged, bytes 0..*: checksum *");
    damage(
        "manifest.json",
        &|bytes| bytes.clear(),
        "does not end with its checksum at byte 0: cut or damaged",
    );
    fs::remove_dir_all(place.path(newest.to_str().unwrap())).unwrap();
    place.answer("resume run");
    assert!(place.tree(newest.to_str().unwrap()) == end);
}

//! `sparse24 lambda-search`, and runs that take their lambda from it.

use std::fs;

use serde_json::Value;

use crate::{
    interruption::timeless,
    support::{Place, TINY},
};

/// A search over the first nine steps, of which the second half counts.
const SEARCH: &str = "--set run.flip_every=1 --until 9";

fn search(place: &Place, more: &str) -> Value {
    serde_json::from_str(&searched(place, &format!("{more} --json"))).unwrap()
}

/// Standard output of a search, whether it recommends a lambda or not.
fn searched(place: &Place, more: &str) -> String {
    let output = place.command(&format!("lambda-search {TINY} {SEARCH} {more}")).output().unwrap();
    assert!(
        [Some(0), Some(1)].contains(&output.status.code()),
        "{more}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

/// The flip rates of a run from step `first` on.
fn rates(place: &Place, run: &str, first: u64) -> Vec<f64> {
    let sampled =
        place.metrics(run).into_iter().filter(|line| line["step"].as_u64().unwrap() >= first);
    sampled.map(|line| line["flip_rate"].as_f64().unwrap()).collect()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

#[test]
fn a_search_compares_the_first_steps_of_whole_runs() {
    let place = Place::new();
    let found = search(&place, "--candidates 0.3,1e-2,0 --seeds 7,8 --out s");
    assert_eq!(found, serde_json::from_str::<Value>(&place.read("s/search.json")).unwrap());
    assert_eq!(
        (&found["done"], &found["of"], &found["until"]),
        (&Value::from(8), &Value::from(8), &Value::from(9))
    );
    assert_eq!(
        (&found["window"], &found["bootstrap"]["layers"]),
        (&serde_json::json!([5, 9]), &Value::from(4))
    );
    let lambdas: Vec<f64> = found["candidates"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["lambda"].as_f64().unwrap())
        .collect();
    assert_eq!(lambdas, [0.0, 1e-2, 0.3]);

    let dense: Vec<f64> = ["7", "8"]
        .iter()
        .flat_map(|seed| rates(&place, &format!("s/dense/seed-{seed}"), 5))
        .collect();
    for (candidate, arm) in
        found["candidates"].as_array().unwrap().iter().zip(["0e0", "1e-2", "3e-1"])
    {
        let sparse: Vec<f64> = ["7", "8"]
            .iter()
            .flat_map(|seed| rates(&place, &format!("s/lambda-{arm}/seed-{seed}"), 5))
            .collect();
        assert_eq!((sparse.len(), dense.len()), (10, 10));
        let (expected, mu) = (mean(&sparse) / mean(&dense), candidate["mu"].as_f64().unwrap());
        assert!((mu - expected).abs() <= 1e-12, "{candidate}, expected {expected}");
        let verdict = match mu {
            ..0.6 => "too-strong",
            0.6..=0.95 => "feasible",
            ..1.0 => "too-weak",
            _ => "explosion",
        };
        assert_eq!(candidate["verdict"], verdict);
        let [low, high] = [0, 1].map(|end| candidate["interval"][end].as_f64().unwrap());
        assert!(low <= mu && mu <= high && low < high, "{candidate}");
    }

    // The steps equal those of the run that needs lambda, and those of a dense run.
    place.train("whole", "--set run.flip_every=1 --set method.lambda=0.3 --seed 8");
    assert_eq!(timeless(&place, "s/lambda-3e-1/seed-8"), timeless(&place, "whole")[..9]);
    let of_dense = place.metrics("s/dense/seed-8");
    place.train("dense", "--set run.flip_every=1 --method dense --seed 8");
    assert_eq!(timeless(&place, "s/dense/seed-8"), timeless(&place, "dense")[..9]);
    assert_eq!(of_dense.len(), 9);
    assert!(!place.path("s/dense/seed-8/checkpoints").exists(), "only results are kept");
}

#[test]
fn a_finished_search_is_read_and_a_longer_one_continues() {
    let place = Place::new();
    let line = format!("lambda-search {TINY} {SEARCH} --out s");
    let answer = searched(&place, "--candidates 1e-2,1 --out s");
    assert!(
        answer.starts_with("lambda         mu  95 % over layers   flip rate  verdict\n1e-2 "),
        "{answer}"
    );
    let before = place.tree("s");
    assert_eq!(searched(&place, "--candidates 1,1e-2 --out s"), answer);
    assert!(place.tree("s") == before, "finished runs are not trained again");
    searched(&place, "--candidates 1,1e-2,0.1 --jobs 2 --keep checkpoints --out s");
    let after = place.tree("s");
    let unchanged = |path: &&std::path::PathBuf| {
        !path.starts_with("search.toml") && !path.starts_with("search.json")
    };
    assert!(
        before.keys().filter(unchanged).all(|path| after[path] == before[path]),
        "the runs of the other candidates are unchanged"
    );
    assert!(
        place.path("s/lambda-1e-1/seed-1337/checkpoints/step-00000009/manifest.json").is_file()
    );
    for (more, message) in [
        ("--candidates 1e-2,1", "s/search.toml: * arm lambda-1e-1, found no arm lambda-1e-1; *"),
        ("--candidates 1e-2,1,0.1 --until 8", "s/search.toml: * until = 9, found until = 8; *"),
        (
            "--candidates 1e-2,1,0.1 --set model.heads=4",
            "s/search.toml: * model.heads = 2, found model.heads = 4; *",
        ),
        (
            "--candidates 1e-2,1,0.1 --set data.validation_share=0.2",
            "s/search.toml: was started with data = *",
        ),
    ] {
        let line =
            line.replace("--until 9", "").replace("--out", &format!("--until 9 {more} --out"));
        let line = if more.contains("--until") { line.replacen("--until 9", "", 1) } else { line };
        place.refuses(&line, 3, message);
    }
    place.refuses(
        &format!("lambda-search {TINY} {SEARCH} --out ."),
        3,
        ".: already holds * but no search.toml*",
    );
    // A run directory with other settings.
    fs::remove_dir_all(place.path("s/lambda-1e-1")).unwrap();
    place.train("s/lambda-1e-1/seed-1337", "--set run.flip_every=1");
    let message = "s/lambda-1e-1/seed-1337: is a run with method.lambda = *, expected *";
    place.refuses(&format!("{line} --candidates 1e-2,1,0.1"), 3, message);
}

#[test]
fn without_a_feasible_candidate_there_is_advice() {
    let place = Place::new();
    let output = place
        .command(&format!("lambda-search {TINY} {SEARCH} --candidates 100,1000 --out s --json"))
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    let advice = "the masks flip too little even at 1e2; try smaller candidates";
    assert_eq!(
        said.lines().last().unwrap(),
        format!("error: no candidate is feasible (mu in 0.60 to 0.95): {advice}")
    );
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&found["recommended"], &found["advice"]), (&Value::Null, &Value::from(advice)));
    place.refuses(
        &format!("train {TINY} --lambda auto --lambda-search s --out run"),
        3,
        &format!("s/search.json: recommends no lambda: {advice}"),
    );
}

/// A run this short with this learning rate needs more decay than the scale of the paper has.
#[test]
fn a_run_whose_search_finds_nothing_names_the_next_command() {
    let place = Place::new();
    let line = format!(
        "train {TINY} --set optimizer.warmup_steps=8 --set run.flip_every=1 --lambda auto --out run"
    );
    let output = place.command(&line).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    let message = "no candidate is feasible (mu in 0.60 to 0.95): *; to do so, run `sparse24 \
                 lambda-search --candidates A,B,C --out DIR` \
                   with these settings, then this command with --lambda-search DIR";
    assert!(
        crate::support::is_like(said.lines().last().unwrap(), &format!("error: {message}")),
        "{said}"
    );
    let left: Vec<_> =
        fs::read_dir(place.path("run")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["lambda-search"], "no run was started");
}

#[test]
fn impossible_searches_are_refused() {
    let place = Place::new();
    for (more, message) in [
        ("--method dense", "method.name: dense has no masked decay*"),
        (
            "--method dense --set method.decay=on-gradients",
            "method.decay: needs a phase whose forward is pruned, and dense has none*",
        ),
        (
            r#"--set method.phases=["dense:11/12","sparse"]"#,
            "window: no sampled step of 5..9 is sparse, *",
        ),
        ("--candidates 1,x", "invalid value 'x' for '--candidates <A,B,..>': *"),
        ("--candidates -1", "candidates: *found -1"),
        ("--window 3", "invalid value '3' for '--window <A..B>': expected A..B, two steps; *"),
        ("--window 3..10", "window: *1..9, found 3..10"),
        ("--jobs 0", "invalid value '0' for '--jobs <JOBS>': *"),
        ("--set run.flip_every=0 --window 2..9", "run.flip_every: is 0*at most 8"),
        (
            "--preset gpt2-124m --set data.path=",
            "data.path: the preset \"gpt2-124m\" is for a large corpus *",
        ),
    ] {
        place.refuses(&format!("lambda-search {TINY} {SEARCH} {more} --out s"), 2, message);
    }
}

/// Nine candidates over two decades, at least one of which is feasible.
const GRID: &str = "--candidates 1e-3,3e-3,6e-3,1e-2,1.5e-2,2e-2,3e-2,5e-2,1e-1 --seeds 1,2,3";

#[test]
fn a_run_takes_its_lambda_from_a_search() {
    let place = Place::new();
    let found = search(&place, &format!("{GRID} --out s"));
    let lambda = found["recommended"].as_f64().unwrap();
    place.train("run", "--lambda auto --lambda-search s --seed 5");
    let provenance: Value = serde_json::from_str(&place.read("run/provenance.json")).unwrap();
    let origin = &provenance[0]["lambda"];
    assert_eq!(
        (origin["lambda"].as_f64(), origin["search"].as_str()),
        (Some(lambda), Some("s")),
        "{origin}"
    );
    let candidate = found["candidates"]
        .as_array()
        .unwrap()
        .iter()
        .find(|c| c["lambda"].as_f64() == Some(lambda))
        .unwrap();
    assert_eq!((&origin["mu"], &origin["interval"]), (&candidate["mu"], &candidate["interval"]));
    place.train("given", &format!("--lambda {lambda} --seed 5"));
    let end = |run: &str| place.tree(&format!("{run}/checkpoints/step-00000012"));
    assert!(
        end("run") == end("given")
            && place.read("run/config.toml") == place.read("given/config.toml"),
        "only the value matters"
    );
    place.train("preset", "--seed 5");
    assert!(end("run") != end("preset"), "lambda from the search is used");
    let whole = end("run");
    fs::remove_dir_all(place.path("s")).unwrap();
    fs::remove_dir_all(place.path("run/checkpoints/step-00000012")).unwrap();
    place.answer("resume run");
    assert!(end("run") == whole, "a resume needs no search");

    for (more, code, message) in [
        ("--lambda x", 2, "--lambda: expected auto or a number, found \"x\""),
        ("--lambda -1", 2, "method.lambda: expected a finite number of at least 0, found -1"),
        ("--lambda-search s", 2, "--lambda-search: requires --lambda auto"),
        ("--lambda 1 --lambda-search s", 2, "--lambda-search: requires --lambda auto"),
        (
            "--lambda auto --lambda-search s",
            3,
            "s/search.json: does not exist, expected the results of `sparse24 lambda-search --out`",
        ),
        ("--lambda auto --method dense", 2, "method.name: dense has no masked decay*"),
    ] {
        place.refuses(&format!("train {TINY} {more} --out new"), code, message);
    }
}

#[test]
fn a_search_for_other_settings_or_data_is_refused() {
    let place = Place::new();
    search(&place, &format!("{GRID} --out s"));
    let train = format!("train {TINY} --lambda auto --lambda-search s --out run");
    place.refuses(
        &format!("{train} --set optimizer.beta1=0.8"),
        3,
        "s/search.json: searched with optimizer.beta1 = *",
    );
    place.refuses(
        &format!("{train} --set data.tokenizer=byte"),
        3,
        "s/search.json: searched with data.tokenizer = \"char\", but the run has \"byte\"*",
    );
    place.write("text", crate::support::text(2));
    place.refuses(&train, 3, "s/search.json: searched on data other *");
}

/// The grid for decay on weights goes up to 1/lr, so some candidate is feasible for any model.
#[test]
fn lambda_auto_searches_before_the_run() {
    let place = Place::new();
    let settings =
        "--set optimizer.warmup_steps=8 --set run.flip_every=1 --set method.decay=on-weights";
    let said = String::from_utf8(
        place
            .command(&format!("train {TINY} {settings} --lambda auto --out run"))
            .output()
            .unwrap()
            .stderr,
    )
    .unwrap();
    let found: Value = serde_json::from_str(&place.read("run/lambda-search/search.json")).unwrap();
    assert_eq!((found["done"].as_u64(), found["until"].as_u64()), (Some(9), Some(8)));
    let lambda = found["recommended"].as_f64().unwrap() as f32;
    assert!(said.contains(&format!("lambda {lambda:e} (mu = ")), "{said}");
    assert!(place.read("run/provenance.json").contains("\"search\": \"run/lambda-search\""));
    place.train("given", &format!("{settings} --lambda {lambda}"));
    let end = |run: &str| place.tree(&format!("{run}/checkpoints/step-00000012"));
    assert!(end("run") == end("given"));
    fs::create_dir(place.path("taken")).unwrap();
    place.write("taken/thesis", "");
    place.refuses(
        &format!("train {TINY} {settings} --lambda auto --out taken"),
        3,
        "taken: already holds \"thesis\", expected a new or empty *",
    );
    let message = "run: already holds *, expected a new or empty run directory; choose another, \
                 or resume this one";
    place.refuses(&format!("train {TINY} {settings} --lambda auto --out run"), 3, message);
}

/// The rates of the reference are replaced by tiny ones.
#[test]
fn a_flip_rate_explosion_is_logged_during_training() {
    let place = Place::new();
    place.train("dense", "--method dense --set run.flip_every=1");
    place.train("fst", "--set run.flip_every=1");
    let calm: Vec<String> = place
        .metrics("dense")
        .into_iter()
        .map(|mut line| {
            line["flip_rate"] = Value::from(1e-6);
            line.to_string()
        })
        .collect();
    place.write("dense/metrics.jsonl", calm.join("\n") + "\n");
    let line = format!(
        "train {TINY} --set run.flip_every=1 --set run.flip_reference=dense --checkpoint-every 7 \
         --set run.keep_last=9 --out run"
    );
    let output = place.command(&line).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    let warnings: Vec<&str> =
        said.lines().filter(|line| line.contains("flip-rate explosion")).collect();
    assert!(
        warnings.len() == 1 && warnings[0].starts_with("step 5: flip-rate explosion: mu = "),
        "five samples are one explosion: {said}"
    );
    assert!(place.read("run/log.txt").contains(warnings[0]));
    let end = |run: &str| place.tree(&format!("{run}/checkpoints/step-00000012"));
    assert!(end("run") == end("fst"), "the comparison changes no result");
    // An explosion that was logged before the checkpoint is not logged again, and a missing
    // reference does not prevent a resume.
    fs::remove_dir_all(place.path("run/checkpoints/step-00000010")).unwrap();
    fs::remove_dir_all(place.path("run/checkpoints/step-00000012")).unwrap();
    place.answer("resume run");
    assert_eq!(place.read("run/log.txt").matches("flip-rate explosion").count(), 1);
    fs::remove_dir_all(place.path("run/checkpoints/step-00000012")).unwrap();
    fs::remove_dir_all(place.path("dense")).unwrap();
    place.answer("resume run");
    assert!(
        place.read("run/log.txt").contains("flip rates are not compared")
            && end("run") == end("fst")
    );
}

#[test]
fn only_a_dense_run_of_the_same_schedule_is_a_reference() {
    let place = Place::new();
    place.train("sparse", "");
    place.train("other", "--method dense --set optimizer.learning_rate=0.01");
    place.train("unsampled", "--method dense --set run.flip_every=0");
    place.write("unsampled/metrics.jsonl", "");
    for (reference, message) in [
        (
            "nowhere",
            "run.flip_reference: *nowhere: is not a run directory: it holds no config.toml",
        ),
        ("sparse", "run.flip_reference: *sparse is a sparse run, expected a dense one"),
        (
            "other",
            "run.flip_reference: *other is a run with optimizer.learning_rate = *, expected *, so \
             that steps match",
        ),
        (
            "unsampled",
            "run.flip_reference: *unsampled has no samples of the flip rate, expected a run with \
             run.flip_every above 0",
        ),
    ] {
        place.refuses(
            &format!("train {TINY} --set run.flip_reference={reference} --out run"),
            2,
            message,
        );
    }
}

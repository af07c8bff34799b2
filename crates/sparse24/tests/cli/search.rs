//! `sparse24 lambda-search`, and runs that take their lambda from it.

use serde_json::{Value, json};

use crate::support::{Place, SAVED, TINY, is_like, text};

/// A search over the first nine steps, of which the second half counts.
const SEARCH: &str = "--set run.flip_every=1 --until 9";

/// The last line of standard error of a command that finds no lambda.
fn finds_none(place: &Place, line: &str) -> String {
    let (_, err) = place.exits(line, 1);
    err.lines().last().unwrap().to_owned()
}

#[test]
fn a_search_trains_the_first_steps_of_whole_runs_once() {
    let place = Place::new();
    let line = |more: &str| format!("lambda-search {TINY} {SEARCH} --out s --candidates {more}");
    let seeds = "0.3,1e-2,0 --seeds 7,8";
    // It may find no feasible lambda.
    place.run(&line(seeds));
    let found = place.value("s/search.json");
    assert_eq!([&found["done"], &found["of"], &found["until"]], [&json!(8), &json!(8), &json!(9)]);
    assert_eq!([&found["window"], &found["bootstrap"]["layers"]], [&json!([5, 9]), &json!(4)]);
    let lambdas = found["candidates"].as_array().unwrap().iter();
    let lambdas: Vec<f64> = lambdas.map(|c| c["lambda"].as_f64().unwrap()).collect();
    assert_eq!(lambdas, [0.0, 1e-2, 0.3]);
    assert!(place.read("s/dense/seed-7/config.toml").contains("lambda = 0.00006\n"));
    // The steps equal those of the run that needs lambda, and those of a dense run.
    for (arm, method) in [("lambda-3e-1", "--set method.lambda=0.3"), ("dense", "--method dense")] {
        place.train(arm, &format!("--set run.flip_every=1 {method} --seed 8"));
        assert_eq!(place.timeless(&format!("s/{arm}/seed-8")), place.timeless(arm)[..9]);
    }
    assert!(!place.has("s/dense/seed-8/checkpoints"), "only results are kept");

    let before = place.tree("s");
    let (_, answer, _) = place.run(&line(seeds));
    assert!(answer.starts_with("lambda "), "{answer}");
    assert!(place.tree("s") == before, "finished runs are not trained again");
    place.run(&line("0.3,1e-2,0,0.1 --seeds 7,8 --jobs 2 --keep checkpoints"));
    let after = place.tree("s");
    let mut of_runs = before.iter().filter(|(path, _)| !path.to_str().unwrap().contains("search."));
    assert!(of_runs.all(|(path, contents)| after[path] == *contents), "a run has changed");
    let added = "s/lambda-1e-1/seed-7";
    assert!(place.path(&format!("{added}/checkpoints/step-00000009/manifest.json")).is_file());

    place.refuses(&line("1e-2"), 3, "s/search.toml: *arm lambda-0e0, found no arm lambda-0e0; *");
    place.remove(added);
    place.train(added, "--set run.flip_every=1");
    let message = format!("{added}: is a run with method.lambda = *, expected *");
    place.refuses(&line("0.3,1e-2,0,0.1 --seeds 7,8"), 3, &message);
}

#[test]
fn without_a_feasible_candidate_there_is_advice() {
    let place = Place::new();
    let line = format!("lambda-search {TINY} {SEARCH} --candidates 100,1000 --out s --json");
    let advice = "the masks flip too little even at 1e2; try smaller candidates";
    assert_eq!(
        finds_none(&place, &line),
        format!("error: no candidate is feasible (mu in 0.60 to 0.95): {advice}")
    );
    let found = place.value("s/search.json");
    assert_eq!([&found["recommended"], &found["advice"]], [&Value::Null, &json!(advice)]);
    let line = format!("train {TINY} --lambda auto --lambda-search s --out run");
    place.refuses(&line, 3, &format!("s/search.json: recommends no lambda: {advice}"));
    // Nothing flips, in any of the default candidates' runs.
    let settings = "--set optimizer.learning_rate=0 --set optimizer.min_learning_rate=0 \
                    --set run.flip_every=1";
    let error = finds_none(&place, &format!("train {TINY} {settings} --lambda auto --out run"));
    let next = "no candidate is feasible*`sparse24 lambda-search --candidates A,B,C --out DIR`*\
                --lambda-search DIR";
    assert!(is_like(&error, next), "{error}");
    let left: Vec<_> =
        place.tree("run").into_keys().filter(|p| p.components().count() == 1).collect();
    assert_eq!(left, [std::path::Path::new("lambda-search")], "no run was started");
}

/// The tests of `sparse24_lab::search` have every reason.
#[test]
fn impossible_searches_are_refused() {
    let place = Place::new();
    for (more, message) in [
        ("--method dense", "method.name: dense has no masked decay*"),
        ("--candidates 1,x", "invalid value 'x' for '--candidates <A,B,..>': *"),
        ("--candidates -1", "candidates: *found -1"),
        ("--window 3", "invalid value '3' for '--window <A..B>': expected A..B, two steps; *"),
        ("--window 3..10", "window: *1..9, found 3..10"),
        ("--jobs 0", "invalid value '0' for '--jobs <JOBS>': *"),
        ("--preset gpt2-124m --set data.path=", "data.path: the preset \"gpt2-124m\" is for *"),
    ] {
        place.refuses(&format!("lambda-search {TINY} {SEARCH} {more} --out s"), 2, message);
    }
}

/// Nine candidates over two decades, at least one of which is feasible.
#[test]
fn a_run_takes_its_lambda_from_a_search_with_its_settings_and_data() {
    let place = Place::new();
    let grid = "--candidates 1e-3,3e-3,6e-3,1e-2,1.5e-2,2e-2,3e-2,5e-2,1e-1 --seeds 1,2,3";
    let found = place.json(&format!("lambda-search {TINY} {SEARCH} {grid} --out s --json"));
    assert_eq!(found, place.value("s/search.json"));
    let lambda = found["recommended"].as_f64().unwrap();
    place.train("run", "--lambda auto --lambda-search s --seed 5");
    let origin = &place.value("run/provenance.json")[0]["lambda"];
    assert_eq!((origin["lambda"].as_f64(), origin["search"].as_str()), (Some(lambda), Some("s")));
    let mut candidates = found["candidates"].as_array().unwrap().iter();
    let candidate = candidates.find(|c| c["lambda"].as_f64() == Some(lambda)).unwrap();
    assert_eq!([&origin["mu"], &origin["interval"]], [&candidate["mu"], &candidate["interval"]]);
    place.train("given", &format!("--lambda {lambda} --seed 5"));
    let end = place.saved("run", 12);
    assert!(end == place.saved("given", 12), "only the value matters");
    assert_eq!(place.read("run/config.toml"), place.read("given/config.toml"));

    let auto = "--lambda auto --lambda-search s";
    let other = "s/search.json: searched with ";
    for (more, code, message) in [
        ("--lambda x", 2, "--lambda: expected auto or a number, found \"x\""),
        ("--lambda -1", 2, "method.lambda: expected a finite number of at least 0, found -1"),
        ("--lambda 1 --lambda-search s", 2, "--lambda-search: requires --lambda auto"),
        ("--lambda auto --init-from run", 2, "--lambda auto: *does not hold for --init-from"),
        ("--lambda auto --method dense", 2, "--lambda: *dense has no masked decay"),
        ("--lambda 1e-4 --method ste", 2, "--lambda: *ste has no masked decay"),
        (&format!("{auto} --set optimizer.beta1=0.8"), 3, &format!("{other}optimizer.beta1 = *")),
        (
            &format!("{auto} --set data.tokenizer=byte"),
            3,
            &format!("{other}data.tokenizer = \"char\", but the run has \"byte\"*"),
        ),
    ] {
        place.refuses(&format!("train {TINY} {more} --out new"), code, message);
    }
    place.answer("prepare --data text --tokenizer char --out shards");
    place.answer(&format!("train {TINY} {auto} --data shards --out prepared"));
    let corpus = place.read("text");
    place.write("text", text(2));
    let line = format!("train {TINY} {auto} --out new");
    place.refuses(&line, 3, "s/search.json: searched on data other *");
    place.write("text", corpus);
    place.remove("s");
    place.refuses(&line, 3, "s/search.json: does not exist, expected the results of *");
    place.rewind("run", [12]);
    place.answer("resume run");
    assert!(place.saved("run", 12) == end, "a resume needs no search");
}

/// The grid for decay on weights goes up to 1/lr, so some candidate is feasible for any model.
#[test]
fn lambda_auto_searches_before_the_run() {
    let place = Place::new();
    let settings =
        "--set optimizer.warmup_steps=8 --set run.flip_every=1 --set method.decay=on-weights";
    let line = format!("train {TINY} {settings} --lambda auto --out");
    let notes = place.notes(&format!("{line} run"));
    let found = place.value("run/lambda-search/search.json");
    assert_eq!([&found["done"], &found["until"]], [&json!(9), &json!(8)]);
    let lambda = found["recommended"].as_f64().unwrap() as f32;
    assert!(notes.contains(&format!("lambda {lambda:e} (mu = ")), "{notes}");
    assert!(place.read("run/provenance.json").contains("\"search\": \"run/lambda-search\""));
    place.train("given", &format!("{settings} --lambda {lambda}"));
    assert!(place.saved("run", 12) == place.saved("given", 12));
    // A report of the search is no run.
    place.rename("run/lambda-search", "again/lambda-search");
    place.answer("report run --out again/report.html");
    place.answer(&format!("{line} again"));
    place.write("taken/thesis", "");
    for out in ["taken", "run"] {
        let message = format!("{out}: already holds *, expected a new or empty run directory; *");
        place.refuses(&format!("{line} {out}"), 3, &message);
    }
}

/// The rates of the reference are replaced by tiny ones.
#[test]
fn a_flip_rate_explosion_is_logged_once_and_changes_no_result() {
    let place = Place::new();
    place.train("dense", "--method dense --set run.flip_every=1");
    place.train("fst", "--set run.flip_every=1");
    let mut calm = place.metrics("dense");
    calm.iter_mut().for_each(|line| line["flip_rate"] = json!(1e-6));
    let calm: String = calm.iter().map(|line| format!("{line}\n")).collect();
    place.write("dense/metrics.jsonl", calm);
    let reference = "--set run.flip_every=1 --set run.flip_reference=dense";
    let notes = place.notes(&format!("train {TINY} {reference} {SAVED} --out run"));
    let warnings: Vec<&str> =
        notes.lines().filter(|line| line.contains("flip-rate explosion")).collect();
    assert!(
        warnings.len() == 1 && warnings[0].starts_with("step 5: flip-rate explosion: mu = "),
        "five samples are one explosion: {notes}"
    );
    let log = || place.read("run/log.txt");
    assert!(log().contains(warnings[0]));
    assert!(place.saved("run", 12) == place.saved("fst", 12));
    // An explosion that was logged before the checkpoint is not logged again, and a missing
    // reference does not prevent a resume.
    place.rewind("run", [10, 12]);
    place.answer("resume run");
    assert_eq!(log().matches("flip-rate explosion").count(), 1);
    place.rewind("run", [12]);
    place.remove("dense");
    place.answer("resume run");
    assert!(log().contains("flip rates are not compared"));
    assert!(place.saved("run", 12) == place.saved("fst", 12));
}

#[test]
fn decay_that_does_nothing_is_reported_after_the_warm_up() {
    let place = Place::new();
    for (settings, is_weak) in [
        ("--lambda 1e-4", true),
        ("--lambda 1e-4 --set steps=99", false),
        ("--lambda 1e-4 --set optimizer.warmup_steps=200", false),
        ("--lambda 1", false),
        ("--lambda 1e-4 --set method.decay=on-weights", true),
        ("--lambda 0", false),
        ("--method sr-ste", true),
    ] {
        let notes = place.notes(&format!("train {TINY} --set steps=130 {settings} --out run"));
        let is_reported = |text: &str| text.contains("step 100: masked decay is probably too weak");
        assert_eq!(is_reported(&notes), is_weak, "{settings}: {notes}");
        assert_eq!(is_reported(&place.read("run/log.txt")), is_weak, "{settings}");
        place.remove("run");
    }
    let notes = place.notes(&format!("train {TINY} --method ste --set method.lambda=1 --out run"));
    assert!(notes.contains("method.lambda has no effect: ste "), "{notes}");
}

#[test]
fn only_a_dense_run_of_the_same_schedule_is_a_reference() {
    let place = Place::new();
    place.train("sparse", "");
    place.train("other", "--method dense --set optimizer.learning_rate=0.01");
    place.train("unsampled", "--method dense --set run.flip_every=0");
    place.write("unsampled/metrics.jsonl", "");
    for (reference, message) in [
        ("nowhere", "is not a run directory: it holds no config.toml"),
        ("sparse", "is a sparse run, expected a dense one"),
        ("other", "is a run with optimizer.learning_rate = *, expected *, so that steps match"),
        ("unsampled", "has no samples of the flip rate, expected a run with run.flip_every *"),
    ] {
        let line = format!("train {TINY} --set run.flip_reference={reference} --out run");
        place.refuses(&line, 2, &format!("run.flip_reference: *{reference}*{message}"));
    }
}

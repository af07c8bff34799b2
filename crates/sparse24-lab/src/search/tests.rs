//! Defaults of a search, what it refuses, and the computation of mu.

use sparse24_run::checkpoint::Fingerprint;
use sparse24_train::method::PhaseKind;

use super::*;
use crate::runs::{Failed, Failure, Sample};

fn config(settings: &str) -> Config {
    let tiny = "steps=600 optimizer.warmup_steps=100 run.flip_every=10 model.layers=1 \
                model.d_model=8 model.heads=2 model.d_ff=16";
    let settings: Vec<String> =
        [tiny, settings].join(" ").split_whitespace().map(str::to_owned).collect();
    Config::resolve(None, None, &settings).unwrap()
}

fn resolve(settings: &str, options: SearchOptions) -> Plan {
    Plan::resolve(config(settings), options).unwrap()
}

#[test]
fn the_default_is_the_second_half_of_the_warm_up() {
    let plan = resolve("", SearchOptions::default());
    assert_eq!((plan.until, plan.window, plan.seeds.as_slice()), (100, [51, 100], &[1337][..]));
    assert_eq!(plan.candidates, GRID.map(|lambda| lambda as f32));
    let plan =
        resolve("method.decay=on-weights optimizer.learning_rate=1e-3", SearchOptions::default());
    assert_eq!(plan.candidates, [0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0], "up to 1/lr");
    let plan = resolve("optimizer.warmup_steps=0", SearchOptions::default());
    assert_eq!((plan.until, plan.window), (30, [16, 30]), "a twentieth of the run");
    assert_eq!(
        resolve("optimizer.warmup_steps=900", SearchOptions::default()).until,
        600,
        "at most the run"
    );
}

#[test]
fn searches_that_are_impossible_are_refused() {
    let none = SearchOptions::default;
    let until = |step: u32| SearchOptions { until: Some(step), ..none() };
    let window = |window: [u32; 2]| SearchOptions { window: Some(window), ..none() };
    let seeds = |seeds: &[u64]| SearchOptions { seeds: Some(seeds.to_vec()), ..none() };
    let candidates = |values: &[f32]| SearchOptions { candidates: Some(values.to_vec()), ..none() };
    let dense_half = r#"method.phases=["dense:1/2","sparse"]"#;
    let dense_eighth = r#"method.phases=["dense:1/8","sparse"] run.flip_every=60"#;
    let step = "method.name=step method.decay=on-weights";
    for (settings, options, key, expected) in [
        ("method.name=dense", none(), "method.name", "dense has no masked decay"),
        (r#"method.phases=["dense"]"#, none(), "method.name", "fst prunes in no phase"),
        ("", candidates(&[]), "candidates", "at least one"),
        ("", candidates(&[1.0, -1.0]), "candidates", "found -1"),
        ("", candidates(&[f32::NAN]), "candidates", "found NaN"),
        ("", candidates(&[6e-5, 1.0, 6e-5]), "candidates", "6e-5 is listed twice"),
        ("", until(0), "until", "1 to 600, found 0"),
        ("", until(601), "until", "1 to 600, found 601"),
        ("", window([50, 101]), "window", "1..100, found 50..101"),
        ("", window([60, 50]), "window", "found 60..50"),
        ("", window([0, 50]), "window", "found 0..50"),
        ("", seeds(&[]), "seeds", "at least 1, found 0"),
        ("", seeds(&[3, 1, 3]), "seeds", "3 is listed twice"),
        ("", seeds(&[u64::MAX]), "seeds", "at most 9223372036854775807"),
        ("run.flip_every=0", none(), "run.flip_every", "is 0, so no step of the window 51..100"),
        ("run.flip_every=60", window([61, 100]), "run.flip_every", "expected at most 40"),
        (dense_half, none(), "window", "no sampled step of 51..100 is sparse"),
        (dense_eighth, none(), "window", "no sampled step of 51..100 is sparse"),
        (step, until(60), "window", "no sampled step of 31..60 is sparse"),
    ] {
        match Plan::resolve(config(settings), options).unwrap_err() {
            Error::Setting { key: found, problem } => {
                assert!(found == key && problem.contains(expected), "{found}: {problem}");
            }
            other => panic!("{other}"),
        }
    }
}

/// The variance of STEP can settle after a tenth of the run, which is step 60.
#[test]
fn a_window_that_can_be_sparse_is_searched() {
    resolve(
        "method.name=step method.decay=on-weights",
        SearchOptions { until: Some(70), ..SearchOptions::default() },
    );
    resolve(r#"method.phases=["dense:1/8","sparse"] run.flip_every=80"#, SearchOptions::default());
}

fn result(rates: &[(u32, f64, f64)]) -> Option<RunResult> {
    let names = ["h.0.mlp.c_fc.weight", "h.0.mlp.c_proj.weight"];
    let sample = |&(step, first, second): &(u32, f64, f64)| Sample {
        step,
        phase: PhaseKind::Sparse,
        rate: (first + second) / 2.0,
        layers: names.map(str::to_owned).into_iter().zip([first, second]).collect(),
    };
    Some(RunResult {
        steps: 100,
        loss: Some(1.0),
        val_loss: None,
        samples: rates.iter().map(sample).collect(),
        tokens_per_s: 1.0,
        seconds: 1.0,
        failure: None,
        builds: Vec::new(),
    })
}

fn plan() -> Plan {
    let options = SearchOptions {
        candidates: Some(vec![1.0, 2.0]),
        seeds: Some(vec![1, 2]),
        ..SearchOptions::default()
    };
    let data = DatasetIdentity {
        fingerprint: Fingerprint::of(b""),
        training_tokens: 1,
        held_out_tokens: 1,
        vocabulary: 3,
    };
    Plan { data: Some(data), ..resolve("", options) }
}

/// The results of two candidates and two seeds; the reference of a seed is its first run.
fn found(runs: [Option<RunResult>; 6]) -> SearchResults {
    let plan = plan();
    SearchResults::of(&plan, &plan.members(), &runs)
}

/// Rates are binary fractions, so every expectation is exact. Step 50 is before the window.
#[test]
fn mu_is_a_ratio_of_means_over_the_window() {
    let dense = |a, b| result(&[(50, 9.0, 9.0), (60, a, a), (70, b, b)]);
    let found = found([
        dense(0.25, 0.75),
        result(&[(50, 0.0, 0.0), (60, 0.5, 0.25), (70, 0.5, 0.25)]),
        result(&[(60, 0.5, 0.5), (70, 0.5, 0.5)]),
        dense(0.5, 0.5),
        result(&[(60, 0.5, 0.25), (70, 0.5, 0.25)]),
        result(&[(60, 1.0, 1.0), (70, 0.0, 0.0)]),
    ]);
    assert_eq!((found.done, found.of, found.bootstrap.layers), (6, 6, 2));
    assert_eq!(
        (found.dense.flip_rate, found.dense.by_seed.as_slice()),
        (Some(0.5), &[Some(0.5), Some(0.5)][..])
    );
    let [first, second] = found.candidates.as_slice() else { panic!("two candidates") };
    assert_eq!(
        (first.mu, first.flip_rate, first.verdict),
        (Some(0.75), Some(0.375), Some(Verdict::Feasible))
    );
    assert_eq!(first.by_seed, [Some(0.75), Some(0.75)]);
    // Two layers, of 1 and 0.5, are both drawn, or one of them twice.
    assert_eq!(first.interval, Some([0.5, 1.0]));
    assert_eq!(
        (second.mu, second.interval, second.verdict),
        (Some(1.0), Some([1.0, 1.0]), Some(Verdict::Explosion))
    );
    assert_eq!((found.recommended, found.advice.as_deref()), (Some(1.0), None));
}

/// Each has skipped a step that the other has sampled.
#[test]
fn mu_is_over_the_steps_that_both_have() {
    let dense = || result(&[(60, 0.5, 0.5), (70, 0.9, 0.9)]);
    let sparse = || result(&[(60, 0.25, 0.25), (80, 0.9, 0.9)]);
    let found = found([dense(), sparse(), sparse(), dense(), sparse(), sparse()]);
    assert_eq!((found.candidates[0].mu, found.candidates[0].flip_rate), (Some(0.5), Some(0.25)));
}

#[test]
fn mu_is_absent_without_measurements() {
    let (dense, half) = (|| result(&[(60, 0.5, 0.5)]), || result(&[(60, 0.25, 0.25)]));
    let unfinished = found([dense(), half(), half(), dense(), None, half()]);
    assert_eq!(
        (unfinished.done, unfinished.recommended, &unfinished.advice),
        (5, None, &None),
        "not before all are done"
    );
    let [first, second] = unfinished.candidates.as_slice() else { panic!("two candidates") };
    assert_eq!((first.mu, first.verdict), (None, None));
    assert_eq!(first.by_seed, [Some(0.5), None]);
    assert_eq!(second.verdict, Some(Verdict::TooStrong));

    let failure = Failure { step: 61, what: "the loss is NaN".to_owned() };
    let failed = half().map(|run| RunResult { failure: Some(failure.clone()), ..run });
    let failed = found([dense(), failed, half(), dense(), half(), half()]);
    let first = &failed.candidates[0];
    assert_eq!((first.mu, first.verdict), (None, Some(Verdict::Explosion)));
    assert_eq!(first.failure, Some(Failed { seed: 1, failure }));
    assert!(failed.advice.unwrap().contains("does not fall steadily"));

    // A candidate that is dense at every sampled step has nothing to compare.
    let in_dense_phase = || {
        let mut run = half().unwrap();
        run.samples.iter_mut().for_each(|sample| sample.phase = PhaseKind::Dense);
        Some(run)
    };
    let first = &found([dense(), in_dense_phase(), half(), dense(), in_dense_phase(), half()])
        .candidates[0];
    assert_eq!(
        (first.mu, first.verdict),
        (None, None),
        "a lack of measurements is not an explosion"
    );
}

#[test]
fn a_search_of_an_earlier_version_continues() {
    let plan = plan();
    let text = toml::to_string(&plan).unwrap().replace("d_model =", "width =");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join(DESCRIPTION);
    std::fs::write(&file, text).unwrap();
    assert_eq!(Plan::read(&file).unwrap().identity(), plan.identity());
}

#[test]
fn damaged_results_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(FILE), "{}").unwrap();
    let refused = SearchResults::read(folder.path()).unwrap_err().to_string();
    assert!(refused.contains("search.json") && refused.contains("missing field"), "{refused}");
}

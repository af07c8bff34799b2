//! What a search asks for by default, what it refuses, and how mu is made of what runs told.

use super::*;
use crate::series::{Failure, Sample};
use sparse24_run::checkpoint::Fingerprint;
use sparse24_train::method::PhaseKind;

fn config(settings: &str) -> Config {
    let tiny = "steps=600 optimizer.warmup_steps=100 run.flip_every=10 model.layers=1 model.d_model=8 model.heads=2 model.d_ff=16";
    let settings: Vec<String> =
        [tiny, settings].join(" ").split_whitespace().map(str::to_owned).collect();
    Config::resolve(None, None, &settings).unwrap()
}

fn resolve(settings: &str, wanted: Wanted) -> Plan {
    Plan::resolve(config(settings), wanted).unwrap()
}

#[test]
fn the_default_is_the_second_half_of_the_warm_up() {
    let plan = resolve("", Wanted::default());
    assert_eq!((plan.until, plan.window, plan.seeds.as_slice()), (100, [51, 100], &[1337][..]));
    assert_eq!(plan.candidates, [6e-7, 2e-6, 6e-6, 2e-5, 6e-5, 2e-4, 6e-4, 2e-3]);
    let plan = resolve("method.decay=on-weights optimizer.learning_rate=1e-3", Wanted::default());
    assert_eq!(plan.candidates, [0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0], "up to 1/lr");
    let plan = resolve("optimizer.warmup_steps=0", Wanted::default());
    assert_eq!((plan.until, plan.window), (30, [16, 30]), "a twentieth of the run");
    assert_eq!(
        resolve("optimizer.warmup_steps=900", Wanted::default()).until,
        600,
        "at most the run"
    );
}

#[test]
fn what_cannot_be_searched_is_refused() {
    let none = Wanted::default;
    let candidates = |values: &[f32]| Wanted { candidates: Some(values.to_vec()), ..none() };
    for (settings, wanted, expected) in [
        (
            "method.name=dense",
            none(),
            "method.name: dense has no masked decay, so that there is no lambda to search",
        ),
        ("", candidates(&[]), "candidates: expected at least one value of lambda"),
        (
            "",
            candidates(&[1.0, -1.0]),
            "candidates: expected finite numbers of at least 0, found -1",
        ),
        (
            "",
            candidates(&[f32::NAN]),
            "candidates: expected finite numbers of at least 0, found NaN",
        ),
        ("", candidates(&[6e-5, 1.0, 6e-5]), "candidates: 6e-5 is named twice"),
        (
            "",
            Wanted { until: Some(0), ..none() },
            "until: expected a step of the run, 1 to 600, found 0",
        ),
        (
            "",
            Wanted { until: Some(601), ..none() },
            "until: expected a step of the run, 1 to 600, found 601",
        ),
        (
            "",
            Wanted { window: Some([50, 101]), ..none() },
            "window: expected steps A..B of 1..100, where the runs end, found 50..101",
        ),
        (
            "",
            Wanted { window: Some([60, 50]), ..none() },
            "window: expected steps A..B of 1..100, where the runs end, found 60..50",
        ),
        (
            "",
            Wanted { window: Some([0, 50]), ..none() },
            "window: expected steps A..B of 1..100, where the runs end, found 0..50",
        ),
        ("", Wanted { seeds: Some(vec![]), ..none() }, "seeds: expected at least 1, found 0"),
        ("", Wanted { seeds: Some(vec![3, 1, 3]), ..none() }, "seeds: 3 is named twice"),
        (
            "",
            Wanted { seeds: Some(vec![u64::MAX]), ..none() },
            "seeds: expected at most 9223372036854775807, found 18446744073709551615",
        ),
        (
            "run.flip_every=0",
            none(),
            "run.flip_every: is 0, so that no step of the window 51..100 is sampled; expected at most 50",
        ),
        (
            "run.flip_every=60",
            Wanted { window: Some([61, 100]), ..none() },
            "run.flip_every: is 60, so that no step of the window 61..100 is sampled; expected at most 40",
        ),
        (
            r#"method.phases=["dense"]"#,
            none(),
            "method.name: fst prunes in no phase, so that there is no lambda to search",
        ),
        (
            r#"method.phases=["dense:1/2","sparse"]"#,
            none(),
            "window: no sampled step of 51..100 is sparse, so that there are no masks to compare; expected steps of a sparse phase (--until, --window)",
        ),
        (
            r#"method.phases=["dense:1/8","sparse"] run.flip_every=60"#,
            none(),
            "window: no sampled step of 51..100 is sparse, so that there are no masks to compare; expected steps of a sparse phase (--until, --window)",
        ),
        (
            "method.name=step method.decay=on-weights",
            Wanted { until: Some(60), ..none() },
            "window: no sampled step of 31..60 is sparse, so that there are no masks to compare; expected steps of a sparse phase (--until, --window)",
        ),
    ] {
        let refused = Plan::resolve(config(settings), wanted).unwrap_err().to_string();
        assert_eq!(refused, expected);
    }
}

/// STEP's variance may have settled after a tenth of the run, which is step 60.
#[test]
fn a_window_that_may_be_sparse_is_searched() {
    resolve(
        "method.name=step method.decay=on-weights",
        Wanted { until: Some(70), ..Wanted::default() },
    );
    resolve(r#"method.phases=["dense:1/8","sparse"] run.flip_every=80"#, Wanted::default());
}

#[test]
fn each_seed_has_one_reference_and_all_candidates() {
    let wanted =
        Wanted { candidates: Some(vec![2e-3, 6e-5]), seeds: Some(vec![5, 4]), ..Wanted::default() };
    let plan = resolve("method.lambda=0.5", wanted);
    let members = plan.members();
    let told: Vec<_> = members
        .iter()
        .map(|member| (member.arm.as_str(), member.config.seed, member.until))
        .collect();
    let of_seed =
        |seed| [("dense", seed, 100), ("lambda-6e-5", seed, 100), ("lambda-2e-3", seed, 100)];
    assert_eq!(told, [of_seed(5), of_seed(4)].concat());
    assert_eq!(
        (members[0].config.method.name.as_str(), members[2].config.method.lambda),
        ("dense", 2e-3)
    );
    let but_method = |member: &Member| Config {
        method: plan.base.method.clone(),
        seed: 0,
        ..member.config.clone()
    };
    assert!(
        members.iter().all(|member| but_method(member) == but_method(&members[0])),
        "the schedule is that of the whole run"
    );
    let other =
        resolve("method.lambda=0.1", Wanted { seeds: Some(vec![4, 5]), ..Wanted::default() });
    assert_eq!(settings(&other.base), settings(&plan.base), "lambda is what is searched");
}

fn told(rates: &[(u32, f64, f64)]) -> Option<Told> {
    let names = ["h.0.mlp.c_fc.weight", "h.0.mlp.c_proj.weight"];
    let sample = |&(step, first, second): &(u32, f64, f64)| Sample {
        step,
        phase: PhaseKind::Sparse,
        rate: (first + second) / 2.0,
        layers: names.map(str::to_owned).into_iter().zip([first, second]).collect(),
    };
    Some(Told {
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
    let wanted =
        Wanted { candidates: Some(vec![1.0, 2.0]), seeds: Some(vec![1, 2]), ..Wanted::default() };
    let data = DatasetIdentity {
        fingerprint: Fingerprint::of(b""),
        training_tokens: 1,
        held_out_tokens: 1,
        vocabulary: 3,
    };
    Plan { data: Some(data), ..resolve("", wanted) }
}

/// Rates of binary fractions, so that every expectation is exact. Step 50 lies before the window.
#[test]
fn mu_is_a_ratio_of_means_over_the_window() {
    let plan = plan();
    let dense = |a, b| told(&[(50, 9.0, 9.0), (60, a, a), (70, b, b)]);
    let all = [
        dense(0.25, 0.75),
        told(&[(50, 0.0, 0.0), (60, 0.5, 0.25), (70, 0.5, 0.25)]),
        told(&[(60, 0.5, 0.5), (70, 0.5, 0.5)]),
        dense(0.5, 0.5),
        told(&[(60, 0.5, 0.25), (70, 0.5, 0.25)]),
        told(&[(60, 1.0, 1.0), (70, 0.0, 0.0)]),
    ];
    let report = Report::of(&plan, &plan.members(), &all);
    assert_eq!((report.done, report.of, report.bootstrap.layers), (6, 6, 2));
    assert_eq!(
        (report.dense.flip_rate, report.dense.by_seed.as_slice()),
        (Some(0.5), &[Some(0.5), Some(0.5)][..])
    );
    let [first, second] = report.candidates.as_slice() else { panic!("two candidates") };
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
    assert_eq!((report.recommended, report.advice.as_deref()), (Some(1.0), None));
}

/// Each has skipped a step that the other has sampled.
#[test]
fn mu_is_of_the_steps_that_both_have() {
    let plan = plan();
    let (dense, sparse) =
        (told(&[(60, 0.5, 0.5), (70, 0.9, 0.9)]), told(&[(60, 0.25, 0.25), (80, 0.9, 0.9)]));
    let all = [dense.clone(), sparse.clone(), sparse.clone(), dense, sparse.clone(), sparse];
    let report = Report::of(&plan, &plan.members(), &all);
    assert_eq!((report.candidates[0].mu, report.candidates[0].flip_rate), (Some(0.5), Some(0.25)));
}

#[test]
fn what_was_not_measured_is_no_number() {
    let plan = plan();
    let (dense, half) = (told(&[(60, 0.5, 0.5)]), told(&[(60, 0.25, 0.25)]));
    let all = [dense.clone(), half.clone(), half.clone(), dense.clone(), None, half.clone()];
    let report = Report::of(&plan, &plan.members(), &all);
    assert_eq!(
        (report.done, report.recommended, report.advice.clone()),
        (5, None, None),
        "not before all are done"
    );
    assert_eq!((report.candidates[0].mu, report.candidates[0].verdict), (None, None));
    assert_eq!(report.candidates[0].by_seed, [Some(0.5), None]);
    assert_eq!(report.candidates[1].verdict, Some(Verdict::TooStrong));
    let failed = half.clone().map(|told| Told {
        failure: Some(Failure { step: 61, what: "the loss is NaN".to_owned() }),
        ..told
    });
    let report = Report::of(
        &plan,
        &plan.members(),
        &[dense.clone(), failed, half.clone(), dense.clone(), half.clone(), half.clone()],
    );
    assert_eq!(
        (report.candidates[0].mu, report.candidates[0].verdict),
        (None, Some(Verdict::Explosion))
    );
    assert_eq!(
        report.candidates[0].failure.as_ref().map(|failed| (failed.seed, failed.failure.step)),
        Some((1, 61))
    );
    assert!(report.advice.unwrap().contains("does not fall steadily"));
    // A candidate that is dense at every sampled step has nothing to compare.
    let in_dense_phase = |told: Option<Told>| {
        told.map(|told| Told {
            samples: told
                .samples
                .into_iter()
                .map(|sample| Sample { phase: PhaseKind::Dense, ..sample })
                .collect(),
            ..told
        })
    };
    let all = [
        dense.clone(),
        in_dense_phase(half.clone()),
        half.clone(),
        dense,
        in_dense_phase(half.clone()),
        half,
    ];
    let report = Report::of(&plan, &plan.members(), &all);
    assert_eq!(
        (report.candidates[0].mu, report.candidates[0].verdict),
        (None, None),
        "not measured is no explosion"
    );
}

#[test]
fn a_report_comes_back_from_its_file() {
    let plan = plan();
    let dense = told(&[(60, 0.3, 0.7)]);
    let all = [dense.clone(), told(&[(60, 0.1, 0.77)]), None, dense, None, None];
    let report = Report::of(&plan, &plan.members(), &all);
    let folder = tempfile::tempdir().unwrap();
    report.write(folder.path()).unwrap();
    assert_eq!(Report::read(folder.path()).unwrap(), report);
    std::fs::write(folder.path().join(FILE), "{}").unwrap();
    let refused = Report::read(folder.path()).unwrap_err().to_string();
    assert!(refused.contains("search.json: is no result of a search: missing field"), "{refused}");
}

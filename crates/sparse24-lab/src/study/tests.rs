//! Study files that are refused, and the computation of the results.

use std::{collections::BTreeMap, fs, path::Path};

use sparse24_train::method::PhaseKind;

use super::{plan::Plan, results::csv, *};
use crate::runs::{Failure, Sample};

/// Three arms that differ in lambda, beside dense.
const STUDY: &str = r#"
reference = "dense"
seeds = [1, 2, 3]
[base]
preset = "quickstart"
steps = 60
[[arms]]
name = "dense"
method.name = "dense"
[[arms]]
name = "weak"
method.lambda = 1e-5
[[arms]]
name = "strong"
method = { lambda = 1e-3 }
[[arms]]
name = "middle"
method.lambda = 1e-4
"#;

fn read(text: &str, overrides: &Overrides) -> Result<Plan, String> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("study.toml");
    fs::write(&file, text).unwrap();
    let prefix = format!("{}: ", file.display());
    Plan::read(&file, overrides).map_err(|error| {
        error.to_string().strip_prefix(&prefix).expect("the file is named").to_owned()
    })
}

fn plan() -> Plan {
    read(STUDY, &Overrides::default()).unwrap()
}

/// Keys that earlier versions wrote.
const OLD_KEYS: [(&str, &str); 2] = [("d_model =", "width ="), ("d_ff =", "ffn_width =")];

#[test]
fn a_study_of_an_earlier_version_continues() {
    let plan = plan();
    let new = plan.to_toml().replace("[arms.method]\nlambda = 0.001", "[arms.model]\nd_ff = 64");
    let old = OLD_KEYS.iter().fold(new.clone(), |text, (new, old)| text.replace(new, old));
    assert!(new.contains("d_ff = 64") && old.contains("ffn_width = 64"), "{old}");
    let folder = tempfile::tempdir().unwrap();
    let identity = |text: &str| {
        let file = folder.path().join("study.toml");
        fs::write(&file, text).unwrap();
        Plan::read_resolved(&file).unwrap().identity()
    };
    assert_eq!(identity(&old), identity(&new));
}

#[test]
fn impossible_studies_are_refused() {
    let strong = "method = { lambda = 1e-3 }";
    let one_arm = STUDY.split_once("[[arms]]\nname = \"weak\"").unwrap().0;
    for (from, to, expected) in [
        (STUDY, "seeds = 7 7", "line 1: "),
        (STUDY, "seeds = [1, 2]", "arms: expected at least two of [[arms]]"),
        (STUDY, one_arm, "arms: expected at least two to compare, found 1"),
        (
            "reference =",
            "refrence =",
            "study: \"refrence\" is not known; did you mean \"reference\"?",
        ),
        ("\"dense\"\nseeds", "\"dens\"\nseeds", "reference: \"dens\" is not known; did you mean"),
        ("reference = \"dense\"", "", "reference: expected the name of an arm, found nothing"),
        ("seeds = [1, 2, 3]", "", "seeds: expected an array of integers"),
        ("[1, 2, 3]", "[1]", "seeds: expected at least 2, found 1"),
        ("[1, 2, 3]", "[1, 2, 1]", "seeds: 1 is listed twice"),
        ("[1, 2, 3]", "[1, -2]", "seeds: expected integers of at least 0, found -2"),
        ("steps = 60", "stepps = 60", "base: configuration: \"stepps\" is not known"),
        ("steps = 60", "steps = 0", "base: steps: "),
        ("\"quickstart\"", "\"gpt2-124m\"", "data.path: "),
        ("lambda = 1e-3", "lamda = 1e-3", "arms.strong: method: \"lamda\" is not known"),
        ("lambda = 1e-3", "lambda = -1.0", "arms.strong: method.lambda: "),
        (strong, "seed = 3", "arms.strong.seed: must be the same for all arms"),
        (strong, "data.path = \"x\"", "arms.strong.data: must be the same for all arms"),
        ("\"strong\"", "\"../strong\"", "arms: \"../strong\" is not a folder name"),
        ("\"strong\"", "\"WEAK\"", "arms: \"WEAK\" is listed twice"),
        ("name = \"strong\"", "", "arms, number 3: name: expected a name, found nothing"),
    ] {
        let refused = read(&STUDY.replace(from, to), &Overrides::default()).unwrap_err();
        assert!(refused.starts_with(expected), "{refused}\nexpected {expected}");
    }
    let absent = Plan::read(Path::new("absent.toml"), &Overrides::default());
    assert!(absent.unwrap_err().to_string().starts_with("absent.toml: "));
}

fn result(val_loss: f64, rates: &[(u32, PhaseKind, f64)]) -> Option<RunResult> {
    let sample = |&(step, phase, rate): &(u32, PhaseKind, f64)| Sample {
        step,
        phase,
        rate,
        layers: BTreeMap::new(),
    };
    Some(RunResult {
        steps: 60,
        loss: Some(2.5),
        val_loss: Some(val_loss),
        samples: rates.iter().map(sample).collect(),
        tokens_per_s: 1234.5,
        seconds: 6.78,
        failure: None,
        builds: Vec::new(),
    })
}

/// A dense run.
fn dense(val_loss: f64) -> Option<RunResult> {
    result(val_loss, &[20, 40, 60].map(|step| (step, PhaseKind::Dense, 0.5)))
}

/// A sparse run whose last phase is dense.
fn sparse(val_loss: f64, rate: f64) -> Option<RunResult> {
    result(
        val_loss,
        &[
            (20, PhaseKind::Sparse, rate),
            (40, PhaseKind::Sparse, rate),
            (60, PhaseKind::Dense, 9.0),
        ],
    )
}

/// Losses are binary fractions. The middle arm is best twice and by far worst once.
fn results() -> Vec<Option<RunResult>> {
    let of_seed = |d: f64, weak: f64, strong: f64, middle: f64| {
        [dense(d), sparse(weak, 0.5), sparse(strong, 0.125), sparse(middle, 0.25)]
    };
    [of_seed(2.0, 2.25, 2.5, 1.5), of_seed(2.125, 2.5, 2.5, 1.625), of_seed(2.25, 2.25, 2.5, 2.75)]
        .concat()
}

#[test]
fn differences_are_paired() {
    let plan = plan();
    let results = StudyResults::of(&plan, &self::results());
    assert_eq!((results.done, results.of), (12, 12));
    let [dense, weak, strong, middle] = results.arms.as_slice() else { panic!("four arms") };
    assert_eq!(weak.difference.unwrap().mean, (0.25 + 0.375 + 0.0) / 3.0);
    assert_eq!(
        (dense.val_loss.mean, dense.val_loss.deviation, dense.difference),
        (Some(2.125), Some(0.125), None)
    );
    // Over the sparse samples; the rate of the reference is 0.5.
    assert_eq!(
        [weak, strong, middle].map(|arm| (arm.flip_rate, arm.mu)),
        [(Some(0.5), Some(1.0)), (Some(0.125), Some(0.25)), (Some(0.25), Some(0.5))]
    );
    assert_eq!(
        (dense.flip_rate, dense.mu),
        (Some(0.5), Some(1.0)),
        "over all samples if no phase is sparse"
    );
    assert_eq!(strong.settings, BTreeMap::from([("method.lambda".to_owned(), "0.001".to_owned())]));

    let [trend] = results.trends.as_slice() else {
        panic!("expected one group of arms: {:?}", results.trends)
    };
    assert_eq!(
        (trend.arms.as_slice(), trend.flip_rate),
        (&["weak", "middle", "strong"].map(str::to_owned)[..], Some(-1.0))
    );
    assert_eq!(trend.val_loss, Some(0.5), "means 2.33, 1.96 and 2.5");
}

/// The arm for each seed is chosen on the other seeds.
#[test]
fn the_best_is_chosen_on_other_seeds() {
    let plan = plan();
    let best = StudyResults::of(&plan, &results()).best.unwrap();
    assert_eq!(
        (best.arm.as_str(), best.among.len()),
        ("middle", 4),
        "no arm differs from dense only in lambda, so all are candidates"
    );
    // Without seed 1: means dense 2.1875, middle 2.1875: the first of equals, dense. Without seed
    // 2: dense 2.125, middle 2.125. Without seed 3: middle.
    assert_eq!(
        best.left_out.unwrap(),
        LeftOut { mean: -0.5 / 3.0, by_seed: vec![0.0, 0.0, 2.25 - 2.75] }
    );
    assert_eq!(
        StudyResults::of(&plan, &[results()[..11].to_vec(), vec![None]].concat()).best,
        None,
        "not before all are done"
    );
}

/// A lambda is compared with the best lambda, even if dense training is better.
#[test]
fn a_lambda_is_compared_with_lambdas() {
    let plan =
        read(STUDY, &Overrides { reference: Some("weak".to_owned()), ..Overrides::default() })
            .unwrap();
    let mut all = results();
    for of_seed in all.chunks_mut(4) {
        of_seed[0] = dense(1.0);
    }
    let best = StudyResults::of(&plan, &all).best.unwrap();
    assert_eq!(
        (best.arm.as_str(), best.among),
        ("middle", ["weak", "strong", "middle"].map(str::to_owned).to_vec())
    );
    // Without seed 1: weak 2.375, middle 2.1875; without 2: weak 2.25, middle 2.125; without 3:
    // weak 2.375, middle 1.5625.
    assert_eq!(best.left_out.unwrap().by_seed, [2.25 - 1.5, 2.5 - 1.625, 2.25 - 2.75]);
}

#[test]
fn a_run_that_failed_is_a_result() {
    let plan = plan();
    let mut all = results();
    let failure = Failure { step: 31, what: "the loss is NaN".to_owned() };
    all[6] = all[6].clone().map(|run| RunResult {
        val_loss: None,
        steps: 30,
        failure: Some(failure),
        ..run
    });
    let results = StudyResults::of(&plan, &all);
    let strong = &results.arms[2];
    assert_eq!(
        (strong.val_loss.by_seed.as_slice(), strong.failures[0].seed),
        (&[Some(2.5), None, Some(2.5)][..], 2)
    );
    assert_eq!(strong.difference.unwrap().pairs, 2);
    assert_eq!(results.best.as_ref().unwrap().arm, "middle");
    let lines = csv(&plan, &all);
    assert!(
        lines.starts_with("arm,seed,steps,")
            && lines.contains("\ndense,1,60,2,2.5,0.5,1,1234,6.8,\n"),
        "{lines}"
    );
    assert!(lines.contains("\nstrong,2,30,,2.5,0.125,0.25,1234,6.8,31\n"), "{lines}");
    assert_eq!(lines.lines().count(), 13);
    let nothing = StudyResults::of(&plan, &vec![None; 12]);
    let arm = &nothing.arms[1];
    assert_eq!((nothing.done, arm.val_loss.mean, arm.difference, arm.mu), (0, None, None, None));
}

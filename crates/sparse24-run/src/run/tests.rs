//! Metrics, what a resume cuts from them, the log and provenance.

use std::{
    fs,
    time::{Duration, UNIX_EPOCH},
};

use super::*;
use crate::{
    checkpoint::PhaseKind,
    disk::fault::{self, Fault, Plan},
    error::problem,
};
use sparse24_train::backend::Device;

pub(super) fn metrics(step: u32) -> StepMetrics {
    StepMetrics {
        step,
        phase: PhaseKind::Sparse,
        loss: 4.25,
        lr: 1e-3,
        grad_norm: 0.1 + step as f32,
        tokens_per_s: 12_345.678,
        tokens: step.is_multiple_of(2).then_some(768),
        flip_rate: step.is_multiple_of(2).then_some(0.012_5),
        flip_rate_per_layer: step
            .is_multiple_of(2)
            .then(|| [("a".to_owned(), 0.01), ("b".to_owned(), 0.015)].into()),
        val_loss: None,
        scores: Default::default(),
        instruments: None,
        skipped: None,
    }
}

#[test]
fn metrics_are_one_object_a_step() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("metrics.jsonl");
    let mut log = MetricsLog::create(&path).unwrap();
    log.append(&metrics(1)).unwrap();
    log.append(&metrics(2)).unwrap();
    log.syncer().unwrap()().unwrap();
    let text = fs::read_to_string(&path).unwrap();
    assert_eq!(
        text,
        "{\"step\":1,\"phase\":\"sparse\",\"loss\":4.25,\"lr\":0.001,\
         \"grad_norm\":1.1,\"tokens_per_s\":12345.678}\n\
         {\"step\":2,\"phase\":\"sparse\",\"loss\":4.25,\"lr\":0.001,\
         \"grad_norm\":2.1,\"tokens_per_s\":12345.678,\"tokens\":768,\
         \"flip_rate\":0.0125,\"flip_rate_per_layer\":{\"a\":0.01,\"b\":0.015}}\n"
    );
    let read: Result<Vec<_>, _> = MetricsLog::steps(&path).unwrap().collect();
    assert_eq!(read.unwrap(), [metrics(1), metrics(2)]);
    assert!(problem(MetricsLog::create(&path)).starts_with("cannot create "));
    let refused: [fn(&mut StepMetrics); 5] = [
        |metrics| metrics.step = 1,
        |metrics| metrics.lr = f32::NAN,
        |metrics| metrics.val_loss = Some(f64::INFINITY),
        |metrics| metrics.scores = [("f1".to_owned(), f64::NAN)].into(),
        |metrics| metrics.scores = [("x".repeat(1 << 20), 1.0)].into(),
    ];
    for (case, change) in refused.iter().enumerate() {
        let mut changed = metrics(3);
        change(&mut changed);
        assert!(problem(log.append(&changed)).contains("cannot hold step"), "{case}");
    }
    assert_eq!(fs::read_to_string(&path).unwrap(), text);
    log.append(&StepMetrics { loss: f32::NAN, ..metrics(3) }).unwrap();
}

#[test]
fn a_cut_that_fails_changes_nothing() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("metrics.jsonl");
    let mut log = MetricsLog::create(&path).unwrap();
    (1..=5).for_each(|step| log.append(&metrics(step)).unwrap());
    let before = fs::read(&path).unwrap();
    for operation in 0..4 {
        fault::plan(Plan::Fail(operation, Fault::NoSpace));
        assert!(problem(MetricsLog::resume(&path, 3)).starts_with("cannot write "));
        assert_eq!(fs::read(&path).unwrap(), before);
        assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 1, "operation {operation}");
    }
    // Nor does half a line.
    fault::plan(Plan::Fail(0, Fault::Full));
    assert!(problem(log.append(&metrics(6))).starts_with("cannot write "));
    assert_eq!(fs::read(&path).unwrap(), before);
}

#[test]
fn provenance_names_its_libraries() {
    let device = Device { backend: "cpu", description: String::new(), sparse_products: "" };
    let libraries = Provenance::of_start(&device, Initial::Random).libraries;
    assert!(libraries.get("serde_json").is_some_and(|v| v.starts_with('1')), "{libraries:?}");
    assert_eq!(libraries.contains_key("tiktoken-rs"), cfg!(feature = "tokenizers"));
    assert_eq!(libraries.contains_key("private-gemm-x86"), cfg!(target_arch = "x86_64"));
}

#[test]
fn nothing_is_drawn_without_logits_or_at_no_temperature() {
    for (temperature, logits) in [(0.0, &[][..]), (-1.0, &[0.0]), (f32::NAN, &[0.0])] {
        let sampler = Sampler { temperature, top_k: 1, seed: 0 };
        let drawn = std::panic::catch_unwind(|| sampler.draw(logits, 0));
        assert!(drawn.is_err(), "{temperature}");
    }
}

#[test]
fn hostile_logits_are_ordered() {
    const INF: f32 = f32::INFINITY;
    for (temperature, logits, expected) in [
        (1.0, [0.0, INF, 1.0, INF], 1),
        (INF, [0.0, INF, 1.0, INF], 1),
        (1.0, [-INF, -INF, 1.0, -INF], 2),
        (INF, [-INF, -INF, 1.0, -INF], 2),
        (1.0, [-INF; 4], 0),
        (0.0, [-1.0, -0.0, 0.0, -INF], 1),
    ] {
        let sampler = Sampler { temperature, top_k: 3, seed: 0 };
        let are_all = (0..64).all(|position| sampler.draw(&logits, position) == expected);
        assert!(are_all, "{temperature} {logits:?}");
    }
}

#[test]
fn the_log_stamps_each_line() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("log.txt");
    Log::open(&path).unwrap().line("first\nline").unwrap();
    Log::open(&path).unwrap().line("second").unwrap();
    let text = fs::read_to_string(&path).unwrap();
    let lines: Vec<_> = text.lines().map(|line| line.split_once(' ').unwrap()).collect();
    assert_eq!(lines.iter().map(|line| line.1).collect::<Vec<_>>(), ["first line", "second"]);
    assert!(lines.iter().all(|line| line.0.len() == 20 && line.0.ends_with('Z')), "{text}");
}

#[test]
fn a_save_is_found_near_the_beginning_of_a_log() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("log.txt");
    for (hole, expected) in [(0, true), (1 << 25, false)] {
        fs::File::create(&path).unwrap().set_len(hole).unwrap();
        assert!(!Log::reports_save(&path));
        Log::open(&path).unwrap().line("step 4: saved step-00000004").unwrap();
        assert_eq!(Log::reports_save(&path), expected, "after {hole} bytes");
    }
}

#[test]
fn a_timestamp_is_in_utc() {
    let time = UNIX_EPOCH + Duration::from_secs(951_782_400);
    assert_eq!(timestamp(time), "20000229-000000");
}

//! `metrics.jsonl`, read and continued.
//!
//! Invariant: a resume keeps the steps up to its own, and no others.

use std::fs;

use sparse24_run::run::{MetricsLog, StepMetrics};

use super::{place, refused, values};

pub(super) fn log(bytes: &[u8]) {
    let path = place::file("metrics.jsonl", bytes);
    let all = match MetricsLog::read(&path) {
        Ok(all) => all,
        Err(error) => {
            refused(&error, "metrics.jsonl");
            refused(&MetricsLog::resume(&path, u32::MAX).unwrap_err(), "metrics.jsonl");
            assert_eq!(fs::read(&path).unwrap(), bytes, "what is refused is not cut");
            return;
        }
    };
    assert!(all.is_sorted_by(|a, b| a.step < b.step));
    let middle = all.get(all.len() / 2).map_or(0, |metrics| metrics.step);
    for step in [u32::MAX, middle, 0] {
        let (mut log, cut) = MetricsLog::resume(&path, step).unwrap();
        let kept: Vec<_> = all.iter().filter(|metrics| metrics.step <= step).cloned().collect();
        assert_eq!(told(cut.last.as_slice()), told(kept.last().map_or(&[], std::slice::from_ref)));
        assert_eq!(told(&MetricsLog::read(&path).unwrap()), told(&kept));
        if let Some(next) = all.iter().find(|metrics| metrics.step > step) {
            log.append(next).unwrap();
            assert_eq!(
                MetricsLog::read(&path).unwrap().last().map(|last| last.step),
                Some(next.step),
                "what is appended is read"
            );
        }
    }
}

/// As text, in which the loss of a skipped step equals itself.
fn told(metrics: &[StepMetrics]) -> String {
    format!("{metrics:?}")
}

pub(super) fn log_variants() -> Vec<Vec<u8>> {
    let first = r#"{"step":1,"phase":"sparse","loss":3.5,"lr":0.001,"grad_norm":1.0,"tokens_per_s":1.0,"flip_rate":0.25,
        "flip_rate_per_layer":{"h.0.mlp.c_fc.weight":0.5},"val_loss":3.25,
        "instruments":{"kept":0.8,"flips_per_tile":0.5,"gap":[0.1,0.2,0.3,0.4,0.5],"mvue_variance":0.7,
            "layers":{"h.0.mlp.c_fc.weight":{"kept":0.9,"flips_per_tile":0.25,"gap":0.3,"mvue_variance":0.6}},"tiles":[[0.5,3]]},
        "skipped":"gradient"}"#;
    let path = place::file("metrics.jsonl", format!("{}\n", first.replace('\n', "")).as_bytes());
    assert_eq!(MetricsLog::read(&path).expect("is sound").len(), 1);
    let second =
        r#"{"step":2,"phase":"dense","loss":3.0,"lr":0.001,"grad_norm":1.0,"tokens_per_s":1.0}"#;
    values::files(
        values::json(first, &["dense", "sparse", "prepared"])
            .iter()
            .map(|first| format!("{first}\n{second}\n")),
    )
}

pub(super) fn log_seeds() -> Vec<Vec<u8>> {
    let line = |step: u64| {
        format!(
            r#"{{"step":{step},"phase":"sparse","loss":3.5,"lr":0.001,"grad_norm":1.0,"tokens_per_s":100.5}}"#
        )
    };
    let lines = |steps: &[u64]| steps.iter().map(|&step| line(step) + "\n").collect::<String>();
    let sampled = line(2).replace("100.5}", r#"1.0,"flip_rate":0.25,"flip_rate_per_layer":{"h.0.mlp.c_fc.weight":0.5},"val_loss":3.25}"#);
    let mut seeds: Vec<Vec<u8>> = [
        String::new(),
        "\n".to_owned(),
        lines(&[1, 2, 3]),
        lines(&[1]) + &sampled + "\n" + &lines(&[3]),
        lines(&[1, 2]) + &line(3),
        lines(&[1, 2]) + &line(3)[..30],
        lines(&[1, 2]) + &"\0".repeat(100),
        lines(&[1, 1]),
        lines(&[2, 1]),
        lines(&[1]) + "\n" + &lines(&[2]),
        lines(&[1, 4_294_967_295, 4_294_967_296]),
        lines(&[1, 2]).replace('\n', "\r\n"),
        lines(&[1]).replace("3.5", "1e999") + &lines(&[2]),
        lines(&[1]).replace("3.5", "null") + &lines(&[2]),
        lines(&[1]).replace("3.5", "NaN") + &lines(&[2]),
        lines(&[1]).replace("1.0", "1.0,\"grad_norm\":1.0") + &lines(&[2]),
        lines(&[1]).replace("phase", "\\u001b[2J") + &lines(&[2]),
        "[".repeat(5000) + "\n" + &lines(&[2]),
        "x".repeat(5000) + "\n" + &lines(&[2]),
    ]
    .map(String::into_bytes)
    .into();
    seeds.push([lines(&[1]).as_bytes(), b"\xff\n", lines(&[2]).as_bytes()].concat());
    seeds
}

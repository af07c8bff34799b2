//! Losses and gradients that are not finite, and losses that stand out: where the run stops, what
//! it says and what it keeps.

use std::process::Output;

use crate::support::{Place, TINY, is_like};

/// The weights are enormous after the first update.
const DIVERGES: &str = "--set optimizer.learning_rate=1e30";

/// What a run that stops by itself says last.
fn stops(place: &Place, line: &str) -> String {
    let Output { status, stderr, .. } = place.command(line).output().unwrap();
    let said = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(5), "{said}");
    said.lines().last().unwrap().to_owned()
}

#[test]
fn what_is_not_finite_stops_training_before_the_update_and_names_its_layer() {
    let place = Place::new();
    let said = stops(&place, &format!("train {TINY} {DIVERGES} --checkpoint-every 1 --out run"));
    let pattern = "error: step 2: a gradient is not finite, beginning with that of h.1.*; training stopped before the update, \
                   the checkpoint of step 1 is kept; lower optimizer.learning_rate or lengthen optimizer.warmup_steps";
    assert!(is_like(&said, pattern), "{said}");
    let unsaved =
        stops(&place, &format!("train {TINY} {DIVERGES} --checkpoint-every 0 --out unsaved"));
    assert_eq!(unsaved, said.replace("the checkpoint of step 1 is kept", "nothing was saved yet"));
    assert!(!place.path("unsaved/checkpoints").exists(), "nothing that is not finite was saved");
    assert!(place.read("run/log.txt").contains(said.strip_prefix("error: ").unwrap()));
    assert_eq!(place.metrics("run").len(), 1);
    assert_eq!(stops(&place, "resume run"), said, "the same step has the same loss");
    stops(
        &place,
        &format!(
            "train {TINY} --set optimizer.learning_rate=1e12 --set run.eval_every=0 --checkpoint-every 1 --out high"
        ),
    );
    let said = stops(&place, "eval high");
    assert!(said.starts_with("error: the loss of step 1 on these data is "), "{said}");
    let config = place.read("run/config.toml");
    assert!(config.contains("on_nonfinite = \"stop\""));
    place.write(
        "run/config.toml",
        config.replace("on_nonfinite = \"stop\"", "on_nonfinite = \"skip\""),
    );
    assert!(
        stops(&place, "resume run").contains("and 10 steps were skipped already"),
        "what stops a run may be changed"
    );
}

#[test]
fn steps_are_skipped_within_a_limit() {
    let place = Place::new();
    let said = stops(
        &place,
        &format!(
            "train {TINY} {DIVERGES} --checkpoint-every 1 --on-nonfinite skip --set run.skip_limit=4 --out run"
        ),
    );
    let pattern = "error: step 6: a gradient is not finite, beginning with that of h.1.*, and 4 steps were skipped already, \
                   as many as run.skip_limit allows; training stopped before the update, the checkpoint of step 5 is kept";
    assert!(is_like(&said, pattern), "{said}");
    let metrics = place.metrics("run");
    assert_eq!(metrics.len(), 5);
    assert!(metrics[0].get("skipped").is_none() && metrics[0]["loss"].is_number());
    for line in &metrics[1..] {
        assert!(line["loss"].is_null() && line["grad_norm"].is_null(), "{line}");
        assert!(
            line["skipped"]
                .as_str()
                .unwrap()
                .starts_with("a gradient is not finite, beginning with that of h.1."),
            "{line}"
        );
    }
    assert!(
        place.read("run/log.txt").contains("step 3: skipped, because a gradient is not finite")
    );
    let of = |step: u32, file: &str| {
        place
            .tree(&format!("run/checkpoints/step-{step:08}"))
            .remove(std::path::Path::new(file))
            .unwrap()
    };
    assert!(
        of(4, "model.safetensors") == of(5, "model.safetensors"),
        "a skipped step changes no weight"
    );
    assert_eq!(stops(&place, "resume run"), said, "the count goes on");
    place.train("all", &format!("{DIVERGES} --on-nonfinite skip --set run.skip_limit=99"));
    assert_eq!(place.metrics("all").len(), 12);
}

#[test]
fn a_loss_that_stands_out_stops_the_run_where_that_is_asked_for() {
    let place = Place::new();
    place.train("calm", "--checkpoint-every 1");
    let losses: Vec<f64> =
        place.metrics("calm").iter().map(|line| line["loss"].as_f64().unwrap()).collect();
    let spike = |window: &[f64], loss: f64| {
        let mean = window.iter().sum::<f64>() / window.len() as f64;
        let deviation =
            (window.iter().map(|l| (l - mean).powi(2)).sum::<f64>() / window.len() as f64).sqrt();
        (loss - mean) / deviation >= 0.5
    };
    let step = 1
        + (3..12)
            .find(|&at| spike(&losses[at - 3..at], losses[at]))
            .expect("a loss above the mean of the three before it");
    let said = stops(
        &place,
        &format!(
            "train {TINY} --checkpoint-every 1 --set run.spike_z=0.5 --set run.spike_window=3 --out run"
        ),
    );
    let kept = step - 1;
    let pattern = format!(
        "error: step {step}: the loss * lies * standard deviations above *, the mean of the 3 before it, run.spike_z allows 0.5; \
         training stopped after the step, the checkpoint of step {kept} is kept"
    );
    assert!(is_like(&said, &pattern), "{said}");
    assert_eq!(stops(&place, "resume run"), said, "the losses before it are those of the metrics");
}

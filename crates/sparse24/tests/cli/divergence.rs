//! Losses and gradients that are not finite, and loss spikes: where a run stops, what it reports
//! and what it keeps.

use crate::support::{Place, TINY, is_like};

/// Makes the weights enormous in the first update.
const DIVERGES: &str = "--set optimizer.learning_rate=1e30";

/// The last line of a run that stops with code 5.
fn stops(place: &Place, line: &str) -> String {
    let (_, err) = place.exits(line, 5);
    err.lines().last().unwrap().to_owned()
}

fn assert_like(text: &str, pattern: &str) {
    assert!(is_like(text, pattern), "expected {pattern}, found {text}");
}

#[test]
fn a_gradient_that_is_not_finite_stops_training_before_the_update_and_is_named() {
    let place = Place::new();
    let train = format!("train {TINY} {DIVERGES} --out");
    let error = stops(&place, &format!("{train} run --checkpoint-every 1"));
    assert_like(
        &error,
        "step 2: *gradient is not finite*h.1.*step 1 is kept*optimizer.learning_rate",
    );
    let unsaved = stops(&place, &format!("{train} unsaved --checkpoint-every 0"));
    assert!(!unsaved.contains("step 1 is kept"), "{unsaved}");
    assert!(!place.has("unsaved/checkpoints"), "a diverged state was saved");
    assert!(place.read("run/log.txt").contains(error.strip_prefix("error: ").unwrap()));
    assert_eq!(place.metrics("run").len(), 1);
    assert_eq!(stops(&place, "resume run"), error, "a repeated step has the same loss");

    let high = "--set optimizer.learning_rate=1e12 --checkpoint-every 1";
    stops(&place, &format!("train {TINY} {high} --out high"));
    assert_like(&stops(&place, "eval high"), "loss of step 1");
    // The policy may be changed for a resume.
    place.edit("run/config.toml", "on_nonfinite = \"stop\"", "on_nonfinite = \"skip\"");
    assert_like(&stops(&place, "resume run"), "run.skip_limit allows (10)");
}

#[test]
fn steps_are_skipped_within_a_limit() {
    let place = Place::new();
    let skip = format!("{DIVERGES} --on-nonfinite skip --set run.skip_limit");
    let error = stops(&place, &format!("train {TINY} {skip}=4 --checkpoint-every 1 --out run"));
    assert_like(
        &error,
        "step 6: *gradient is not finite*h.1.*run.skip_limit allows (4)*step 5 is kept",
    );
    let metrics = place.metrics("run");
    assert_eq!(metrics.len(), 5);
    assert!(metrics[0].get("skipped").is_none() && metrics[0]["loss"].is_number());
    for line in &metrics[1..] {
        assert!(line["loss"].is_null() && line["grad_norm"].is_null(), "{line}");
        assert_like(line["skipped"].as_str().unwrap(), "gradient is not finite*h.1.");
    }
    assert_like(&place.read("run/log.txt"), "step 3: skipped");
    assert!(place.model("run", 4) == place.model("run", 5), "a skipped step changed a weight");
    assert_eq!(stops(&place, "resume run"), error, "the count of skipped steps is saved");
    place.train("all", &format!("{skip}=99"));
    assert_eq!(place.metrics("all").len(), 12);
}

#[test]
fn a_loss_spike_stops_the_run_if_asked_for() {
    let place = Place::new();
    place.train("calm", "--checkpoint-every 1");
    let losses: Vec<f64> =
        place.metrics("calm").iter().map(|line| line["loss"].as_f64().unwrap()).collect();
    let is_spike = |&at: &usize| {
        let window = &losses[at - 3..at];
        let mean = window.iter().sum::<f64>() / 3.0;
        let deviation = (window.iter().map(|l| (l - mean).powi(2)).sum::<f64>() / 3.0).sqrt();
        (losses[at] - mean) / deviation >= 0.5
    };
    let kept = (3..12).find(is_spike).expect("a loss above the mean of the three before it");
    let spike = "--set run.spike_z=0.5 --set run.spike_window=3";
    let error = stops(&place, &format!("train {TINY} --checkpoint-every 1 {spike} --out run"));
    let step = kept + 1;
    assert_like(
        &error,
        &format!("step {step}: *standard deviations*3 before*run.spike_z*0.5*step {kept} is kept"),
    );
    assert_eq!(stops(&place, "resume run"), error, "the window is read from the metrics");
}

//! `metrics.jsonl`, read and continued: a resume keeps the steps up to its own, and no others; of a
//! damaged file it keeps a copy.

use std::path::Path;

use serde_json::json;
use sparse24_run::{
    Error,
    run::{MetricsLog, StepMetrics},
};

use super::{Files, document::Document, file, files, path, read, refused};

fn collected(path: &Path) -> Result<Vec<StepMetrics>, Error> {
    MetricsLog::steps(path)?.collect()
}

pub(super) fn log(bytes: &[u8]) -> bool {
    let path = file("metrics.jsonl", bytes);
    let all = match collected(&path) {
        Ok(all) => all,
        Err(error) => {
            let (_, cut) = MetricsLog::resume(&path, u32::MAX).unwrap();
            assert!(cut.damage.is_some_and(|damage| damage.contains("kept as metrics.1.jsonl")));
            let kept = path.with_file_name("metrics.1.jsonl");
            assert_eq!(read(&kept), bytes, "a damaged file is kept");
            std::fs::remove_file(kept).unwrap();
            collected(&path).expect("its readable lines are kept");
            return refused(&error, "metrics.jsonl");
        }
    };
    assert!(all.is_sorted_by(|a, b| a.step < b.step));
    let middle = all.get(all.len() / 2).map_or(0, |metrics| metrics.step);
    for step in [u32::MAX, middle, 0] {
        let (mut log, cut) = MetricsLog::resume(&path, step).unwrap();
        let (kept, lost) = all.split_at(all.partition_point(|metrics| metrics.step <= step));
        // As text, since the NaN of a skipped step is not equal to itself.
        let text = |metrics: &[StepMetrics]| format!("{metrics:?}");
        assert_eq!(text(cut.last.as_slice()), text(&kept[kept.len().saturating_sub(1)..]));
        assert_eq!(text(&collected(&path).unwrap()), text(kept));
        if let Some(next) = lost.first() {
            log.append(next).unwrap();
            let last = collected(&path).unwrap().pop().map(|last| last.step);
            assert_eq!(last, Some(next.step), "an appended step is read");
        }
    }
    true
}

/// The lines of two steps, the first with everything that a line can hold.
fn sound() -> [String; 2] {
    let path = path("sound.jsonl");
    let _ = std::fs::remove_file(&path);
    let mut log = MetricsLog::create(&path).unwrap();
    let mut step = json!({"step": 1, "phase": "sparse", "loss": 3.5, "lr": 0.001, "grad_norm": 1.0,
        "tokens_per_s": 1.0, "flip_rate": 0.25, "flip_rate_per_layer": {"h.0": 0.5},
        "val_loss": 3.25, "skipped": "gradient", "instruments": {"kept": 0.8, "flips_per_tile": 0.5,
            "gap": [0.1, 0.2, 0.3, 0.4, 0.5], "mvue_variance": 0.7, "tiles": [[0.5, 3]],
            "layers": {"h.0": {"kept": 0.9, "flips_per_tile": 0.25, "gap": 0.3,
                "mvue_variance": 0.6}}}});
    log.append(&serde_json::from_value(step.clone()).expect("metrics")).unwrap();
    let sampled = ["flip_rate", "flip_rate_per_layer", "val_loss", "instruments", "skipped"];
    sampled.iter().for_each(|key| drop(step.as_object_mut().unwrap().remove(*key)));
    step["step"] = 2.into();
    log.append(&serde_json::from_value(step).expect("metrics")).unwrap();
    let text = String::from_utf8(read(path)).unwrap();
    let (first, second) = text.split_once('\n').expect("two lines");
    [first.to_owned(), second.trim_end().to_owned()]
}

pub(super) fn log_variants() -> Files {
    let [first, second] = sound();
    let document = Document::json(&first, &["dense", "sparse", "prepared"]);
    document.variants(|first| format!("{first}\n{second}\n").into_bytes())
}

pub(super) fn log_seeds() -> Files {
    let [first, second] = sound();
    let both = format!("{first}\n{second}\n");
    let third = second.replace("\"step\":2", "\"step\":3");
    let beyond = second.replace("\"step\":2", "\"step\":4294967296");
    let mut seeds = files(&[&both, "", "\n", &second, &format!("{second}\n{first}\n")]);
    seeds.extend(files(&[&format!("{first}\n{first}\n"), &format!("{first}\n\n{second}\n")]));
    for end in ["\0\0\0\0", &third[..30], &third, &beyond, &"x".repeat(5000), "[[[\n{}\n"] {
        seeds.push([&both, end].concat().into_bytes());
    }
    seeds.push([first.as_bytes(), b"\xff\n", second.as_bytes()].concat());
    seeds
}

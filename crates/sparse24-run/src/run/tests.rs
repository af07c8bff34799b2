//! Locking, the messages of every refusal, and what a resume cuts from the metrics.

use std::{
    fs,
    time::{Duration, UNIX_EPOCH},
};

use super::*;
use crate::{
    Error,
    checkpoint::PhaseKind,
    disk::fault::{self, Fault, Plan},
};

fn problem<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    result.unwrap_err().to_string()
}

fn metrics(step: u32) -> StepMetrics {
    StepMetrics {
        step,
        phase: PhaseKind::Sparse,
        loss: 4.25,
        lr: 1e-3,
        grad_norm: 0.1 + step as f32,
        tokens_per_s: 12_345.678,
        flip_rate: step.is_multiple_of(2).then_some(0.012_5),
        flip_rate_per_layer: step
            .is_multiple_of(2)
            .then(|| [("a".to_owned(), 0.01), ("b".to_owned(), 0.015)].into()),
        val_loss: None,
        instruments: None,
        skipped: None,
    }
}

#[test]
fn a_new_directory_is_made_with_its_parents_and_locked() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("runs/first");
    let run = RunDirectory::create(&path).unwrap();
    let expected = format!(
        "is in use by another process (pid {}); wait for it, or choose another directory",
        std::process::id()
    );
    assert!(
        problem(RunDirectory::create(&path)).ends_with(&expected),
        "{}",
        problem(RunDirectory::create(&path))
    );
    run.write(&run.config(), b"steps = 3\n").unwrap();
    assert!(problem(RunDirectory::open(&path)).ends_with(&expected));
    assert_eq!(fs::read(run.config()).unwrap(), b"steps = 3\n");
    drop(run);
    let expected = "already holds \"config.toml\", expected a new or empty run directory; choose \
        another, or resume this one";
    assert!(
        problem(RunDirectory::create(&path)).ends_with(expected),
        "{}",
        problem(RunDirectory::create(&path))
    );
    assert_eq!(RunDirectory::open(&path).unwrap().path(), path);
}

#[test]
fn what_is_no_run_directory_is_refused() {
    let temporary = tempfile::tempdir().unwrap();
    let file = temporary.path().join("file");
    fs::write(&file, "").unwrap();
    assert!(
        problem(RunDirectory::create(&file))
            .ends_with("is a file, expected a new or empty run directory; choose another")
    );
    assert!(problem(RunDirectory::create(&file.join("run"))).starts_with("cannot create "));
    assert!(
        problem(RunDirectory::open(&file))
            .ends_with("is not a run directory: there is no such directory")
    );
    assert!(
        problem(RunDirectory::open(temporary.path()))
            .ends_with("is not a run directory: it holds no \"config.toml\"")
    );
    assert!(
        !temporary.path().join("lock").exists(),
        "a directory that is not ours gets no lock file"
    );
}

#[test]
fn opening_recovers_the_checkpoints() {
    let temporary = tempfile::tempdir().unwrap();
    let run = RunDirectory::create(temporary.path()).unwrap();
    run.write(&run.config(), b"").unwrap();
    let unfinished = run.checkpoints().join(".tmp-step-00000004");
    fs::create_dir_all(&unfinished).unwrap();
    drop(run);
    RunDirectory::open(temporary.path()).unwrap();
    assert!(!unfinished.exists());
}

#[test]
fn a_failed_write_keeps_the_old_contents() {
    let temporary = tempfile::tempdir().unwrap();
    let run = RunDirectory::create(temporary.path()).unwrap();
    run.write(&run.config(), b"old").unwrap();
    for operation in 0..4 {
        fault::plan(Plan::Fail(operation, Fault::NoSpace));
        assert!(problem(run.write(&run.config(), b"new")).contains("No space left on device"));
        assert_eq!(fs::read(run.config()).unwrap(), b"old");
        assert_eq!(
            fs::read_dir(run.path()).unwrap().count(),
            2,
            "operation {operation} leaves nothing aside"
        );
    }
    fault::plan(Plan::Healthy);
    run.write(&run.config(), b"new").unwrap();
    assert_eq!(fs::read(run.config()).unwrap(), b"new");
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
         \"grad_norm\":2.1,\"tokens_per_s\":12345.678,\
         \"flip_rate\":0.0125,\"flip_rate_per_layer\":{\"a\":0.01,\"b\":0.015}}\n"
    );
    assert_eq!(MetricsLog::read(&path).unwrap(), [metrics(1), metrics(2)]);
    assert!(problem(MetricsLog::create(&path)).starts_with("cannot create "));
}

#[test]
fn a_resume_cuts_what_lies_beyond_the_checkpoint() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("metrics.jsonl");
    let lines: Vec<_> =
        (1..=5).map(|step| serde_json::to_string(&metrics(step)).unwrap() + "\n").collect();
    let whole = lines.concat();
    // A crash may leave the file cut at any byte; these are every fifth and those around the ends
    // of lines.
    let near_end = |at: usize| {
        whole.as_bytes()[at.saturating_sub(1)..(at + 1).min(whole.len())].contains(&b'\n')
    };
    for end in (0..=whole.len()).filter(|&at| at % 5 == 0 || near_end(at)) {
        fs::write(&path, &whole[..end]).unwrap();
        let kept = (1..=3).filter(|&n| lines[..n].concat().len() <= end).count();
        let (mut log, cut) = MetricsLog::resume(&path, 3).unwrap();
        assert_eq!(cut.last, (kept > 0).then(|| metrics(kept as u32)), "{end} bytes");
        assert_eq!(cut.lines > 0, lines[..kept].concat().len() < end, "{end} bytes");
        log.append(&metrics(4)).unwrap();
        assert_eq!(
            fs::read_to_string(&path).unwrap(),
            lines[..kept].concat() + &lines[3],
            "{end} bytes"
        );
        assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 1);
    }
    assert_eq!(MetricsLog::resume(&path, 0).unwrap().1, Cut { last: None, lines: 4 });
    fs::remove_file(&path).unwrap();
    assert_eq!(MetricsLog::resume(&path, 3).unwrap().1, Cut { last: None, lines: 0 });
}

#[test]
fn a_cut_that_fails_changes_nothing() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("metrics.jsonl");
    let mut log = MetricsLog::create(&path).unwrap();
    (1..=5).for_each(|step| log.append(&metrics(step)).unwrap());
    let before = fs::read(&path).unwrap();
    fault::plan(Plan::Fail(0, Fault::NoSpace));
    assert!(problem(MetricsLog::resume(&path, 3)).starts_with("cannot write "));
    assert_eq!(fs::read(&path).unwrap(), before);
    assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 1);
}

#[test]
fn damaged_metrics_name_the_line() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("metrics.jsonl");
    let line = |step| serde_json::to_string(&metrics(step)).unwrap() + "\n";
    fs::write(&path, line(1) + "{}\n" + &line(3)).unwrap();
    let message = problem(MetricsLog::resume(&path, 3));
    assert!(
        message
            .contains("metrics.jsonl: line 2 is no metrics of the next step: missing field `step`"),
        "{message}"
    );
    fs::write(&path, line(2) + &line(2)).unwrap();
    assert!(
        problem(MetricsLog::read(&path))
            .ends_with("line 2 is no metrics of the next step: step 2 follows step 2")
    );
    fs::write(&path, line(2) + "{\n").unwrap();
    assert_eq!(MetricsLog::resume(&path, 3).unwrap().1, Cut { last: Some(metrics(2)), lines: 1 });
}

#[test]
fn provenance_lists_every_start() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("provenance.json");
    let first = Provenance::now("cpu", "avx2", 2, Initial::Random);
    assert_eq!((first.version.as_str(), first.threads), (env!("CARGO_PKG_VERSION"), 2));
    assert!(first.command[0].contains("sparse24"), "{:?}", first.command);
    assert!(
        first.libraries.get("serde_json").is_some_and(|v| v.starts_with('1')),
        "{:?}",
        first.libraries
    );
    first.record(&path).unwrap();
    let second = Provenance { device: "other".into(), ..first.clone() };
    second.record(&path).unwrap();
    assert_eq!(Provenance::read(&path).unwrap(), [first.clone(), second]);
    fs::write(&path, "{}").unwrap();
    assert!(
        problem(first.record(&path)).contains("provenance.json: not a list of starts: "),
        "{}",
        problem(first.record(&path))
    );
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
fn a_timestamp_is_in_utc() {
    let time = UNIX_EPOCH + Duration::from_secs(951_782_400);
    assert_eq!(timestamp(time), "20000229-000000");
}

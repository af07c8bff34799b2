//! Signals during training: SIGHUP, SIGINT and SIGTERM save and stop, SIGUSR1 saves and continues;
//! each is handled within a micro-step.
#![cfg(unix)]

use std::{
    fs,
    io::{BufRead, BufReader},
    process::Stdio,
};

use crate::{
    running::{LONG, attempts, interrupted, reached, send},
    support::{Place, TINY, checkpoint, text},
};

/// The signals that stop, with their exit codes. Without SIGHUP where this process, and so its
/// children, ignore it, as under `nohup`.
pub(crate) fn stops() -> impl Iterator<Item = (&'static str, i32)> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.map_or(0, |mask| u64::from_str_radix(mask.trim(), 16).unwrap());
    let stops = [("-HUP", 129), ("-INT", 130), ("-TERM", 143)];
    stops.into_iter().skip((ignored & 1) as usize)
}

/// The last line names the step and the command that resumes.
fn assert_resumable(notes: &str, step: usize, run: &str) {
    let last = notes.lines().last().unwrap();
    assert!(last.contains(&format!("after step {step};")), "{notes}");
    assert!(last.ends_with(&format!(": sparse24 resume {run}")), "{notes}");
}

/// Runs a command, which reaches `step`, and signals it there; returns its exit code and standard
/// error.
fn signalled(
    place: &Place,
    line: &str,
    run: &str,
    step: usize,
    signal: &str,
) -> Option<(Option<i32>, String)> {
    let child = reached(place, line, run, step)?;
    send(signal, &child);
    if signal != "-USR1" {
        // As `timeout` does, to the process and to its group.
        send(signal, &child);
    }
    let output = child.wait_with_output().unwrap();
    Some((output.status.code(), String::from_utf8(output.stderr).unwrap()))
}

#[test]
fn a_signalled_run_saves_and_ends_like_an_undisturbed_one() {
    let place = Place::new();
    let settings = format!("{LONG} --checkpoint-every 0");
    place.train("whole", &settings);
    for (signal, expected) in stops().chain([("-USR1", 0)]) {
        let run = attempts(|attempt| {
            let run = format!("run{signal}-{attempt}");
            let line = format!("train {TINY} {settings} --out {run}");
            let (code, notes) = signalled(&place, &line, &run, 20, signal)?;
            let log = place.read(&format!("{run}/log.txt"));
            if code == Some(0) {
                // The other two saves are at the end of the sparse phase and of the run; the signal
                // may also come after the last step.
                let is_saved = log.matches(": saved ").count() == 3;
                return (expected == 0 && is_saved).then_some(run);
            }
            let step = place.metrics(&run).len();
            assert_eq!(code, Some(expected), "{notes}");
            assert_resumable(&notes, step, &run);
            assert!(log.contains(&format!("stopped after step {step}")), "{log}");
            assert!(place.path(&checkpoint(&run, step as u32)).join("manifest.json").is_file());
            place.answer(&format!("resume {run}"));
            Some(run)
        });
        assert!(place.saved(&run, 600) == place.saved("whole", 600), "{run}");
        assert_eq!(place.timeless(&run), place.timeless("whole"), "{run}");
    }
}

/// The step takes minutes, a micro-step a millisecond.
#[test]
fn a_signal_abandons_the_current_step() {
    let place = Place::new();
    for (signal, exit) in stops() {
        let run = format!("run{exit}");
        let line =
            format!("train {TINY} --set batch.gradient_accumulation_steps=1000000 --out {run}");
        let (code, notes) = interrupted(&place, &line, signal, 1);
        assert_eq!(code, Some(exit), "{notes}");
        assert_resumable(&notes, 0, &run);
        assert!(place.path(&checkpoint(&run, 0)).join("manifest.json").is_file());
    }
}

/// A micro-step takes seconds.
#[test]
fn a_second_signal_ends_at_once() {
    let place = Place::new();
    for (signal, exit) in stops() {
        attempts(|attempt| {
            let line = format!("train {TINY} --set batch.size=100000 --out run{exit}-{attempt}");
            let (code, notes) = interrupted(&place, &line, signal, 2);
            assert_eq!(code, Some(exit), "{notes}");
            // Otherwise the first signal came between two micro-steps and was handled.
            (!notes.contains("interrupted")).then_some(())
        });
    }
}

/// Nearly all of the time is spent in evaluations. The step before an abandoned one is neither lost
/// nor reported twice.
#[test]
fn a_signal_abandons_the_current_evaluation() {
    let place = Place::new();
    let settings = "--set data.validation_share=0.99 --set run.eval_every=1 --set steps=40 \
                    --set model.d_model=64 --set model.sequence_length=32";
    place.train("whole", settings);
    for signal in ["-TERM", "-USR1"] {
        let run = attempts(|attempt| {
            let run = format!("run{signal}-{attempt}");
            let line = format!("train {TINY} {settings} --out {run}");
            let mut child = reached(&place, &line, &run, 3)?;
            send(signal, &child);
            let metrics = place.path(&format!("{run}/metrics.jsonl"));
            let lacks_evaluation = || {
                let text = fs::read_to_string(&metrics).unwrap_or_default();
                let last = text.lines().last();
                last.is_some_and(|line| line.ends_with('}') && !line.contains("val_loss"))
            };
            // With SIGUSR1, a line lacks its evaluation only while the state is saved.
            let mut was_lacking = false;
            let code = loop {
                if let Some(status) = child.try_wait().unwrap() {
                    break status.code();
                }
                was_lacking |= lacks_evaluation();
            };
            if signal == "-USR1" {
                assert_eq!(code, Some(0));
                return was_lacking.then_some(run);
            }
            let is_stopped = code == Some(143) && lacks_evaluation();
            place.answer(&format!("resume {run}"));
            is_stopped.then_some(run)
        });
        assert!(place.saved(&run, 40) == place.saved("whole", 40));
        assert_eq!(place.timeless(&run), place.timeless("whole"));
    }
}

/// With `--allow`, a finished run is evaluated again, for a second.
#[test]
fn a_signal_reaches_the_evaluation_of_a_finished_run() {
    let place = Place::new();
    place.write("text", text(1).repeat(200));
    place.train("run", "--set steps=1 --set data.validation_share=0.9");
    let (code, notes) = interrupted(&place, "resume run --allow run", "-TERM", 1);
    assert_eq!(code, Some(143), "{notes}");
    assert_resumable(&notes, 1, "run");
    let (code, notes) = interrupted(&place, "resume run --allow run", "-USR1", 1);
    assert_eq!(code, Some(0), "{notes}");
    assert!(notes.contains("the run is finished"), "{notes}");
}

/// The text is read again between the search and the run, long enough for the signal.
#[test]
fn a_signal_between_a_search_and_its_run_is_not_lost() {
    let place = Place::new();
    place.write("text", text(1).repeat(200));
    let settings = "--set optimizer.warmup_steps=8 --set run.flip_every=1 \
                    --set method.decay=on-weights --set data.validation_share=0.01 \
                    --set steps=40000";
    let line = format!("train {TINY} {settings} --lambda auto --out run");
    let mut child = place.command(&line).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains(" by the search in ")));
    send("-TERM", &child);
    let last = lines.map(Result::unwrap).last().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(143), "{last}");
    assert!(last.starts_with("interrupted "), "{last}");
    assert!(last.contains(": sparse24 train ") || last.contains(": sparse24 resume "), "{last}");
    assert!(place.path("run/lambda-search/search.json").is_file());
}

/// Encodes for seconds; signalled as soon as its handler is installed.
#[cfg(target_os = "linux")]
#[test]
fn a_signal_leaves_nothing_of_a_prepare() {
    let place = Place::new();
    place.write("text", "to be, or not to be\n".repeat(1 << 20));
    let count = || fs::read_dir(place.path("")).unwrap().count();
    let before = count();
    for (number, signal, exit) in [(2, "-INT", 130), (15, "-TERM", 143)] {
        attempts(|_| {
            let mut command = place.command("prepare --data text --tokenizer gpt2 --out out");
            let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
            let status = format!("/proc/{}/status", child.id());
            let listens = || {
                let status = fs::read_to_string(&status).unwrap_or_default();
                let caught =
                    status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap_or("0");
                u64::from_str_radix(caught.trim(), 16).unwrap() >> (number - 1) & 1 == 1
            };
            while !listens() && child.try_wait().unwrap().is_none() {
                std::thread::yield_now();
            }
            if listens() {
                send(signal, &child);
            }
            let output = child.wait_with_output().unwrap();
            if output.status.success() {
                place.remove("out");
                return None;
            }
            let notes = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(exit), "{notes}");
            assert!(notes.lines().last().unwrap().starts_with("interrupted; out "), "{notes}");
            assert_eq!(count(), before, "something half-written is left");
            Some(())
        });
    }
}

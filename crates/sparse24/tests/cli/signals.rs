//! Signals while a run trains: SIGINT and SIGTERM save and stop, SIGUSR1 saves and goes on, and
//! each is heard within a micro-step.
#![cfg(unix)]

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use crate::{
    interruption::{LONG, attempts, timeless},
    support::{Place, TINY},
};

/// To who may have ended, but was not waited for: else its number may be another's.
pub(crate) fn send(signal: &str, child: &Child) {
    assert!(
        Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success()
    );
}

/// Waits until a run has told of so many steps; false if it ended before.
pub(crate) fn tells(steps: usize, child: &mut Child, run: &Path) -> bool {
    let told = || {
        fs::read(run.join("metrics.jsonl"))
            .map_or(0, |bytes| bytes.iter().filter(|&&byte| byte == b'\n').count())
    };
    while told() < steps {
        if child.try_wait().unwrap().is_some() {
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Starts a run and sends it a signal once it has told of 20 steps; none if it ended first, else
/// its exit code and what it said.
fn signalled(place: &Place, line: &str, run: &str, signal: &str) -> Option<(i32, String)> {
    let mut child =
        place.command(line).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    if tells(20, &mut child, &place.path(run)) {
        send(signal, &child);
    }
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    (!output.status.success()).then(|| (output.status.code().expect("it exits by itself"), said))
}

#[test]
fn a_signal_saves_and_says_how_to_go_on() {
    let place = Place::new();
    let settings = format!("{LONG} --checkpoint-every 0");
    place.train("whole", &settings);
    for (signal, code) in [("-INT", 130), ("-TERM", 143)] {
        let (run, found, said) = attempts(|attempt| {
            let run = format!("stopped{signal}-{attempt}");
            let (code, said) =
                signalled(&place, &format!("train {TINY} {settings} --out {run}"), &run, signal)?;
            Some((run, code, said))
        });
        let step = place.metrics(&run).len();
        assert_eq!(found, code, "{said}");
        assert_eq!(
            said.lines().last().unwrap(),
            format!("interrupted after step {step}; resume with: sparse24 resume {run}"),
            "{said}"
        );
        assert!(
            place.read(&format!("{run}/log.txt")).contains(&format!("stopped after step {step}"))
        );
        assert!(
            place.path(&format!("{run}/checkpoints/step-{step:08}/manifest.json")).is_file(),
            "not a step is lost"
        );
        place.answer(&format!("resume {run}"));
        let at_end = |run: &str| place.tree(&format!("{run}/checkpoints/step-00000600"));
        assert!(at_end(&run) == at_end("whole"), "stopped after {step}");
        assert_eq!(timeless(&place, &run), timeless(&place, "whole"), "stopped after {step}");
    }
}

/// Begins a run, waits for its first line, and sends it as many signals, a tenth of a second apart;
/// gives its code and what it said.
pub(crate) fn interrupted(
    place: &Place,
    line: &str,
    signal: &str,
    times: usize,
) -> (Option<i32>, String) {
    let mut child = place.command(line).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap());
    let mut lines = String::new();
    said.read_line(&mut lines).unwrap();
    send(signal, &child);
    for _ in 1..times {
        thread::sleep(Duration::from_millis(100));
        send(signal, &child);
    }
    said.read_to_string(&mut lines).unwrap();
    (child.wait().unwrap().code(), lines)
}

/// The step takes minutes, one of its micro-steps a millisecond.
#[test]
fn a_signal_abandons_the_step_under_way() {
    let place = Place::new();
    for (signal, exit) in [("-INT", 130), ("-TERM", 143)] {
        let run = format!("run{exit}");
        let line =
            format!("train {TINY} --set batch.gradient_accumulation_steps=1000000 --out {run}");
        let (code, said) = interrupted(&place, &line, signal, 1);
        assert_eq!(code, Some(exit), "{said}");
        assert_eq!(
            said.lines().last().unwrap(),
            format!("interrupted after step 0; resume with: sparse24 resume {run}"),
            "{said}"
        );
        assert!(place.path(&format!("{run}/checkpoints/step-00000000/manifest.json")).is_file());
    }
}

/// A micro-step takes seconds.
#[test]
fn a_second_signal_ends_at_once() {
    let place = Place::new();
    for (signal, exit) in [("-INT", 130), ("-TERM", 143)] {
        attempts(|attempt| {
            let run = format!("run{exit}-{attempt}");
            let line = format!(
                "train {TINY} --set batch.size=200 --set model.d_model=512 --set model.d_ff=2048 --out {run}"
            );
            let (code, said) = interrupted(&place, &line, signal, 2);
            assert_eq!(code, Some(exit), "{said}");
            // Else it was between two micro-steps at the first signal, and had saved at the second.
            (!said.contains("interrupted")).then_some(())
        });
    }
}

/// One save, and a run that ends like one that nobody asked.
#[test]
fn sigusr1_saves_and_the_run_goes_on() {
    let place = Place::new();
    let settings = format!("{LONG} --checkpoint-every 0");
    place.train("whole", &settings);
    attempts(|attempt| {
        let run = format!("asked-{attempt}");
        let mut child = place
            .command(&format!("train {TINY} {settings} --out {run}"))
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        if tells(5, &mut child, &place.path(&run)) {
            send("-USR1", &child);
        }
        assert!(child.wait().unwrap().success());
        let log = place.read(&format!("{run}/log.txt"));
        let at_end = |run: &str| place.tree(&format!("{run}/checkpoints/step-00000600"));
        assert!(at_end(&run) == at_end("whole"));
        assert_eq!(timeless(&place, &run), timeless(&place, "whole"));
        // The others are of the switch and of the end; a signal may also come after the last step.
        (log.matches(": saved ").count() == 3).then_some(())
    });
}

/// Nearly all of the time goes by in evaluations: a step that is done and not evaluated is neither
/// lost nor told twice.
#[test]
fn a_signal_abandons_the_evaluation_under_way() {
    let place = Place::new();
    let settings = "--set data.validation_share=0.99 --set run.eval_every=1 --set steps=40 --set model.d_model=64 --set model.sequence_length=32";
    place.train("whole", settings);
    let whole = place.tree("whole/checkpoints/step-00000040");
    for signal in ["-TERM", "-USR1"] {
        let run = attempts(|attempt| {
            let run = format!("run{signal}-{attempt}");
            let mut child = place
                .command(&format!("train {TINY} {settings} --out {run}"))
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            let metrics = place.path(&format!("{run}/metrics.jsonl"));
            if tells(3, &mut child, &place.path(&run)) {
                send(signal, &child);
            }
            let mut early = false;
            let code = loop {
                if let Some(status) = child.try_wait().unwrap() {
                    break status.code();
                }
                // A line without its evaluation, while the run waits for the signal's checkpoint or
                // goes on.
                let text = fs::read_to_string(&metrics).unwrap_or_default();
                early |= text
                    .lines()
                    .last()
                    .is_some_and(|line| line.ends_with('}') && !line.contains("val_loss"));
            };
            if signal == "-USR1" {
                assert_eq!(code, Some(0));
                return early.then_some(run);
            }
            let text = fs::read_to_string(&metrics).unwrap();
            let stopped = code == Some(143) && !text.lines().last().unwrap().contains("val_loss");
            place.answer(&format!("resume {run}"));
            stopped.then_some(run)
        });
        assert!(place.tree(&format!("{run}/checkpoints/step-00000040")) == whole);
        assert_eq!(timeless(&place, &run), timeless(&place, "whole"));
    }
}

/// A finished run is evaluated once more, for a second.
#[test]
fn a_signal_reaches_the_evaluation_of_a_finished_run() {
    let place = Place::new();
    place.write("text", crate::support::text(1).repeat(200));
    place.train("run", "--set steps=1 --set data.validation_share=0.9");
    for (signal, exit, end) in [
        ("-INT", 130, "interrupted after step 1; resume with: sparse24 resume run"),
        ("-TERM", 143, "interrupted after step 1; resume with: sparse24 resume run"),
        ("-USR1", 0, "the run is finished: step 1 was its last"),
    ] {
        let (code, said) = interrupted(&place, "resume run", signal, 1);
        assert_eq!((code, said.lines().last()), (Some(exit), Some(end)), "{signal}: {said}");
    }
}

/// The text is read once more between the search and the run, which is as long as a signal could be
/// lost.
#[test]
fn a_signal_between_a_search_and_its_run_is_heard() {
    let place = Place::new();
    place.write("text", crate::support::text(1).repeat(200));
    let settings = "--set optimizer.warmup_steps=8 --set run.flip_every=1 --set method.decay=on-weights --set data.validation_share=0.01";
    let line = format!("train {TINY} {settings} --set steps=40000 --lambda auto --out run");
    let mut child = place.command(&line).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains(", by the search in ")));
    send("-TERM", &child);
    let last = lines.map(Result::unwrap).last().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(143), "{last}");
    assert!(
        last.starts_with("interrupted ") && last.contains("; go on with: sparse24 train ")
            || last.contains("resume with: "),
        "{last}"
    );
    assert!(place.path("run/lambda-search/search.json").is_file());
}

/// Seconds of encoding; signalled as soon as it listens.
#[cfg(target_os = "linux")]
#[test]
fn a_signal_leaves_nothing_of_a_prepare() {
    let place = Place::new();
    place.write("text", "to be, or not to be\n".repeat(1 << 20));
    let names = || fs::read_dir(place.path("")).unwrap().count();
    let before = names();
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
            // One that has ended listens no more, and lets itself be waited for.
            while !listens() && child.try_wait().unwrap().is_none() {
                thread::yield_now();
            }
            if listens() {
                send(signal, &child);
            }
            let output = child.wait_with_output().unwrap();
            let said = String::from_utf8(output.stderr).unwrap();
            if output.status.success() {
                fs::remove_dir_all(place.path("out")).unwrap();
                return None;
            }
            assert_eq!(
                (output.status.code(), said.as_str()),
                (Some(exit), "interrupted; out is as it was\n")
            );
            assert_eq!(names(), before, "something half-written is left");
            Some(())
        });
    }
}

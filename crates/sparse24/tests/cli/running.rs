//! Processes that are stopped while they run.

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use crate::support::{Place, is_outside};

/// Settings of a run of 600 steps of a few milliseconds, 500 of them sparse.
pub(crate) const LONG: &str = "--set steps=600 --set model.d_model=32 --set model.d_ff=64 \
    --set model.sequence_length=16 --set batch.gradient_accumulation_steps=2 \
    --set model.dropout=0.1 --set run.flip_every=5 --set run.eval_every=75 \
    --set method.refresh=7 --set run.keep_last=2";

/// The first result of up to ten attempts to reach a process before it ends. Each has hundreds of
/// milliseconds to do so.
pub(crate) fn attempts<T>(attempt: impl FnMut(usize) -> Option<T>) -> T {
    (0..10).find_map(attempt).expect("ten processes ended before they were reached")
}

/// The number of lines in the metrics of a run.
pub(crate) fn lines(place: &Place, run: &str) -> usize {
    fs::read(place.path(run).join("metrics.jsonl"))
        .map_or(0, |bytes| bytes.iter().filter(|&&byte| byte == b'\n').count())
}

/// Starts a command and waits until the metrics of a run have this many lines; none if the process
/// ended before.
pub(crate) fn reached(place: &Place, line: &str, run: &str, steps: usize) -> Option<Child> {
    reached_by(place, place.command(line), run, steps)
}

pub(crate) fn reached_by(
    place: &Place,
    mut command: Command,
    run: &str,
    steps: usize,
) -> Option<Child> {
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    while lines(place, run) < steps {
        if child.try_wait().unwrap().is_some() {
            return None;
        }
        thread::sleep(Duration::from_millis(1));
    }
    Some(child)
}

/// Sends a signal. The child must not have been waited for: its id could be another process's.
pub(crate) fn send(signal: &str, child: &Child) {
    let status = Command::new("kill").args([signal, &child.id().to_string()]).status();
    assert!(status.unwrap().success());
}

/// Starts a command, waits for its first line, and sends a signal `times` times, each after the one
/// before was acknowledged. Returns its exit code and standard error.
pub(crate) fn interrupted(
    place: &Place,
    line: &str,
    signal: &str,
    times: usize,
) -> (Option<i32>, String) {
    let mut child = place.command(line).stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut lines = String::new();
    while lines.lines().all(is_outside) && stderr.read_line(&mut lines).unwrap() > 0 {}
    send(signal, &child);
    for _ in 1..times {
        while !lines.contains("; press Ctrl-C again") && !lines.contains("; send the signal again")
        {
            if stderr.read_line(&mut lines).unwrap() == 0 {
                break;
            }
        }
        send(signal, &child);
    }
    stderr.read_to_string(&mut lines).unwrap();
    (child.wait().unwrap().code(), lines)
}

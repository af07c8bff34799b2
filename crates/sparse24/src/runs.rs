//! Progress of several runs at a time: a live line for each on a terminal, plain lines elsewhere;
//! and the message of a command that was interrupted.

use std::{
    path::Path,
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant},
};

use indicatif::ProgressBar;
use sparse24_lab::runs::{Member, Watcher};
use sparse24_run::run::{Asked, Observer, Part, StepMetrics};

use crate::{
    failure::{Exit, Failure, Result},
    output::{note, word},
    progress,
    signals::Signals,
};

/// Creates a watcher per job; each receives the signals of the process.
pub(crate) fn watchers(jobs: u16, signals: &Signals) -> Result<Vec<Box<dyn Watcher>>> {
    let watcher = |_| {
        let (signals, printed) = (signals.another()?, Instant::now());
        Ok(Box::new(Worker { signals, bar: None, name: String::new(), until: 0, printed }) as _)
    };
    (0..jobs).map(watcher).collect()
}

pub(crate) fn name(member: &Member) -> String {
    format!("{} seed {}", member.arm, member.config.seed)
}

/// Watches one run at a time.
struct Worker {
    signals: Signals,
    /// All runs of this worker share a line.
    bar: Option<ProgressBar>,
    name: String,
    until: u32,
    printed: Instant,
}

/// Shortest time between plain lines about a run.
const INTERVAL: Duration = Duration::from_secs(60);

impl Watcher for Worker {
    fn flag(&self) -> Arc<AtomicBool> {
        self.signals.any()
    }

    fn started(&mut self, member: &Member, after: u32) {
        (self.name, self.until, self.printed) = (name(member), member.until, Instant::now());
        if self.bar.is_none() {
            self.bar = progress::bar("{prefix:24!} {bar:6.cyan/blue} {pos}/{len} {wide_msg}");
        }
        match &self.bar {
            Some(bar) => {
                bar.set_length(u64::from(member.until));
                bar.set_position(u64::from(after));
                bar.set_prefix(self.name.clone());
                bar.set_message("");
            }
            None if after > 0 => note(format_args!("{}: resumes after step {after}", self.name)),
            None => note(format_args!("{}: starts", self.name)),
        }
    }
}

impl Observer for Worker {
    fn stepped(&mut self, metrics: &StepMetrics) {
        let flips = metrics.flip_rate.map_or_else(String::new, |rate| format!(" flip {rate:.5}"));
        let line = format!("{} loss {:.4}{flips}", metrics.phase, metrics.loss);
        match &self.bar {
            Some(bar) => {
                bar.set_position(u64::from(metrics.step));
                bar.set_message(line);
            }
            None if self.printed.elapsed() >= INTERVAL => {
                self.printed = Instant::now();
                note(format_args!("{}: step {}/{} {line}", self.name, metrics.step, self.until));
            }
            None => {}
        }
    }

    fn working(&mut self, part: Part, done: usize, of: usize) {
        if part == Part::Step {
            return;
        }
        let line = progress::described(part, done, of);
        match &self.bar {
            Some(bar) => bar.set_message(line),
            None if self.printed.elapsed() >= INTERVAL => {
                self.printed = Instant::now();
                note(format_args!("{}: {line}", self.name));
            }
            None => {}
        }
    }

    // The run's log has its messages; for several runs at a time they would be too much.

    fn asked(&mut self) -> Asked {
        self.signals.asked()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// The failure of a command that was stopped by a signal; the same command, with the words `more`,
/// continues it.
pub(crate) fn interrupted(signals: &Signals, done: usize, of: usize, more: &[&Path]) -> Failure {
    let sentence =
        format!("interrupted with {done} of {of} runs done; continue with: {}", again(more));
    Failure::new(signals.received().unwrap_or(Exit::Interrupted), sentence)
}

/// The command line of this process, followed by `more`.
pub(crate) fn again(more: &[&Path]) -> String {
    let words = std::env::args_os()
        .skip(1)
        .map(|argument| word(Path::new(&argument)))
        .chain(more.iter().map(word));
    ["sparse24".to_owned()].into_iter().chain(words).collect::<Vec<_>>().join(" ")
}

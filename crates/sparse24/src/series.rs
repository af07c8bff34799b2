//! What a person sees of several runs: a live line for each on a terminal, plain lines elsewhere;
//! and how such a command ends.

use std::{
    path::Path,
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant},
};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use sparse24_lab::series::{Keep, Member, Watcher};
use sparse24_run::run::{Asked, Observer, StepMetrics};

use crate::{
    failure::{Exit, Failure},
    output::{note, word},
    signals::Signals,
};

/// What stays of finished runs.
#[derive(clap::ValueEnum, Debug, Clone, Copy)]
pub(crate) enum Kept {
    /// Everything.
    Checkpoints,
    /// All but their checkpoints.
    Results,
}

impl From<Kept> for Keep {
    fn from(kept: Kept) -> Self {
        match kept {
            Kept::Checkpoints => Self::Checkpoints,
            Kept::Results => Self::Results,
        }
    }
}

/// Lines that stay, above those that live.
#[derive(Clone)]
pub(crate) struct Display {
    bars: Option<MultiProgress>,
}

impl Display {
    pub(crate) fn new() -> Self {
        let is_terminal = std::io::IsTerminal::is_terminal(&std::io::stderr());
        Self {
            bars: is_terminal
                .then(|| MultiProgress::with_draw_target(ProgressDrawTarget::stderr())),
        }
    }

    /// A line that stays.
    pub(crate) fn say(&self, line: impl AsRef<str>) {
        match &self.bars {
            // Nobody may be reading any more.
            Some(bars) => drop(bars.println(line)),
            None => note(line.as_ref()),
        }
    }

    /// So many watchers of runs, whom the process's signals reach.
    pub(crate) fn watchers(
        &self,
        jobs: u16,
        signals: &Signals,
    ) -> Result<Vec<Box<dyn Watcher>>, Failure> {
        let watcher = |_| {
            let signals = signals.another()?;
            Ok(Box::new(Worker {
                display: self.clone(),
                signals,
                bar: None,
                name: String::new(),
                until: 0,
                told: Instant::now(),
            }) as _)
        };
        (0..jobs).map(watcher).collect()
    }
}

/// Which run, in words.
pub(crate) fn name(member: &Member) -> String {
    format!("{} seed {}", member.arm, member.config.seed)
}

/// One run at a time.
struct Worker {
    display: Display,
    signals: Signals,
    bar: Option<ProgressBar>,
    name: String,
    until: u32,
    told: Instant,
}

/// How often a plain line tells of a run at most.
const INTERVAL: Duration = Duration::from_secs(60);

impl Watcher for Worker {
    fn flag(&self) -> Arc<AtomicBool> {
        self.signals.any()
    }

    fn began(&mut self, member: &Member, after: u32) {
        (self.name, self.until, self.told) = (name(member), member.until, Instant::now());
        match &self.display.bars {
            Some(bars) => {
                let style = ProgressStyle::with_template(
                    "{prefix:28} {bar:20.cyan/blue} {pos}/{len} {msg}",
                )
                .expect("the template is well formed");
                // One run after the other has the place of this worker.
                let bar = self.bar.get_or_insert_with(|| {
                    bars.add(ProgressBar::new(0).with_style(style.progress_chars("━╸─")))
                });
                bar.set_length(u64::from(member.until));
                bar.set_position(u64::from(after));
                bar.set_prefix(self.name.clone());
                bar.set_message("");
            }
            None if after > 0 => note(format_args!("{}: goes on after step {after}", self.name)),
            None => note(format_args!("{}: begins", self.name)),
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
            None if self.told.elapsed() >= INTERVAL => {
                self.told = Instant::now();
                note(format_args!("{}: step {}/{} {line}", self.name, metrics.step, self.until));
            }
            None => {}
        }
    }

    fn said(&mut self, _: &str) {
        // It stands in the run's log; of many runs at a time it is too much.
    }

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

/// The end of a command that a signal has stopped, which the same command, and these words,
/// continue.
pub(crate) fn interrupted(signals: &Signals, done: usize, of: usize, more: &[&Path]) -> Failure {
    let sentence =
        format!("interrupted with {done} of {of} runs done; go on with: {}", again(more));
    Failure::new(signals.received().unwrap_or(Exit::Interrupted), sentence)
}

/// The line of this command, with these words more.
pub(crate) fn again(more: &[&Path]) -> String {
    let words = std::env::args_os()
        .skip(1)
        .map(|argument| word(Path::new(&argument)))
        .chain(more.iter().map(|path| word(path)));
    ["sparse24".to_owned()].into_iter().chain(words).collect::<Vec<_>>().join(" ")
}

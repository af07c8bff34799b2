//! Progress of a training run: a live line on a terminal, plain lines elsewhere.

use std::{
    io::{IsTerminal, stderr},
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};
use sparse24_run::run::{Part, StepMetrics};

use crate::output::{LIVE, note};

/// A progress display over `total` steps.
pub(crate) struct Progress {
    total: u32,
    first: u32,
    started: Instant,
    printed: Option<Instant>,
    /// When the present step or evaluation began.
    part_began: Instant,
    bar: Option<ProgressBar>,
    /// The last sample; with plain lines, none since the last line.
    flip_rate: Option<f64>,
    validation_loss: Option<f64>,
    /// Whether it warned that the run will take absurdly long.
    warned: bool,
}

/// A part of a run that goes on.
pub(crate) fn described(part: Part, done: usize, of: usize) -> String {
    let share = 100 * done / of.max(1);
    match part {
        Part::Step => format!("micro-step {done}/{of}"),
        Part::Evaluation => format!("evaluating {share} %"),
        Part::Translation => format!("translating for BLEU {share} %"),
    }
}

/// A live line without a length, on a terminal; see indicatif for the template.
pub(crate) fn bar(template: &str) -> Option<ProgressBar> {
    let style = ProgressStyle::with_template(template).expect("the template is well formed");
    let bar = ProgressBar::new(0).with_style(style.progress_chars("━╸─"));
    stderr().is_terminal().then(|| LIVE.add(bar))
}

/// The shortest time between two plain lines.
const INTERVAL: Duration = Duration::from_secs(5);

/// A run that takes longer was hardly meant.
const ABSURD: Duration = Duration::from_secs(365 * 24 * 3600);

/// The shortest time between two plain lines within a step or an evaluation.
const LONG_INTERVAL: Duration = Duration::from_secs(30);

impl Progress {
    /// Starts after `first` steps, with a live line if standard error is a terminal.
    pub(crate) fn new(first: u32, total: u32) -> Self {
        let bar = bar("{bar:12.cyan/blue} {pos}/{len} {prefix} {wide_msg}");
        if let Some(bar) = &bar {
            bar.set_length(u64::from(total));
            bar.set_position(u64::from(first));
        }
        Self {
            total,
            first,
            started: Instant::now(),
            printed: None,
            part_began: Instant::now(),
            bar,
            flip_rate: None,
            validation_loss: None,
            warned: false,
        }
    }

    pub(crate) fn step(&mut self, metrics: &StepMetrics) {
        self.flip_rate = metrics.flip_rate.or(self.flip_rate);
        self.validation_loss = metrics.val_loss.or(self.validation_loss);
        let (line, remaining) = (self.line(metrics), self.remaining(metrics.step));
        let eta = remaining.map_or("-".to_owned(), clock);
        match &self.bar {
            Some(bar) => {
                bar.set_position(u64::from(metrics.step));
                bar.set_prefix(format!("ETA {eta}"));
                bar.set_message(line);
                if let Some(loss) = metrics.val_loss {
                    let scores = scores(metrics);
                    note(format_args!("step {}: validation loss {loss:.4}{scores}", metrics.step));
                }
            }
            None if metrics.val_loss.is_some()
                || self.printed.is_none_or(|at| at.elapsed() >= INTERVAL) =>
            {
                self.printed = Some(Instant::now());
                note(format_args!("step {}/{} {line} ETA {eta}", metrics.step, self.total));
                (self.flip_rate, self.validation_loss) = (None, None);
            }
            None => {}
        }
        if !self.warned && remaining.is_some_and(|remaining| remaining > ABSURD) {
            self.warned = true;
            note(format_args!(
                "at this pace the run takes {eta}; `sparse24 estimate` shows what a step costs"
            ));
        }
    }

    /// The time of the steps after this one; none before the first pace is known. A resume may
    /// first evaluate a step of the process before it.
    fn remaining(&self, step: u32) -> Option<Duration> {
        let pace = self.started.elapsed().checked_div(step - self.first)?;
        Some(pace.saturating_mul(self.total - step))
    }

    /// Shows that a step or an evaluation goes on, if it takes more than a second.
    pub(crate) fn work(&mut self, part: Part, done: usize, of: usize) {
        if done == 0 {
            self.part_began = Instant::now();
        }
        if self.part_began.elapsed() < Duration::from_secs(1) {
            return;
        }
        let what = described(part, done, of);
        match &self.bar {
            Some(bar) => bar.set_message(what),
            None if self.part_began.elapsed() >= LONG_INTERVAL
                && self.printed.is_none_or(|at| at.elapsed() >= LONG_INTERVAL) =>
            {
                self.printed = Some(Instant::now());
                note(what);
            }
            None => {}
        }
    }

    /// Leaves the live line on the terminal.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }

    fn line(&self, metrics: &StepMetrics) -> String {
        let mut line = format!("{} loss {:.4}", metrics.phase, metrics.loss);
        if let Some(loss) = self.validation_loss {
            line += &format!(" validation {loss:.4}{}", scores(metrics));
        }
        if let Some(rate) = self.flip_rate {
            line += &format!(" flip {rate:.5}");
        }
        line + &format!(" {} tok/s", thousands(metrics.tokens_per_s))
    }
}

/// The scores of a fine-tuned model, each after a comma.
pub(crate) fn scores(metrics: &StepMetrics) -> String {
    metrics.scores.iter().map(|(name, score)| format!(", {name} {score:.4}")).collect()
}

/// The progress of work other than training, which starts to show after a second.
pub(crate) struct WorkProgress {
    what: &'static str,
    started: Instant,
    printed: Option<Instant>,
    bar: Option<ProgressBar>,
    is_bytes: bool,
}

impl WorkProgress {
    pub(crate) fn new(what: &'static str) -> Self {
        let is_bytes = false;
        Self { what, started: Instant::now(), printed: None, bar: None, is_bytes }
    }

    /// Shows a rate too.
    pub(crate) fn in_bytes(mut self) -> Self {
        self.is_bytes = true;
        self
    }

    pub(crate) fn update(&mut self, done: u64, total: u64) {
        if self.started.elapsed() < Duration::from_secs(1) {
            return;
        }
        let time = self.started.elapsed();
        let mut pace = String::new();
        if self.is_bytes {
            pace = format!(", {:.1} MB/s", done as f64 / 1e6 / time.as_secs_f64());
        }
        let left = time.as_secs_f64() * total.saturating_sub(done) as f64 / done.max(1) as f64;
        pace += &format!(", ETA {}", clock(Duration::from_secs_f64(left.min(1e9))));
        if self.bar.is_none() {
            self.bar = bar("{prefix} {bar:12.cyan/blue} {percent} %{wide_msg}");
        }
        if let Some(bar) = &self.bar {
            bar.set_prefix(self.what);
            bar.set_length(total);
            bar.set_position(done);
            bar.set_message(pace);
        } else if self.printed.unwrap_or(self.started).elapsed() >= INTERVAL {
            self.printed = Some(Instant::now());
            note(format_args!("{}: {} %{pace}", self.what, 100 * done / total.max(1)));
        }
    }
}

impl Drop for WorkProgress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn thousands(rate: f64) -> String {
    if rate >= 1e4 { format!("{:.1}k", rate / 1e3) } else { format!("{rate:.0}") }
}

fn clock(time: Duration) -> String {
    let whole = time.as_secs_f64().round() as u64;
    let (hours, minutes, seconds) = (whole / 3600, whole / 60 % 60, whole % 60);
    if hours >= 100 {
        format!("{} days", hours / 24)
    } else if hours > 0 {
        format!("{hours}:{minutes:02}:{seconds:02}")
    } else {
        format!("{minutes}:{seconds:02}")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_step_before_a_resume_has_no_pace() {
        let metrics = |step| {
            serde_json::from_value(json!({ "step": step, "phase": "sparse", "loss": 2.5, "lr": 0.1,
                "grad_norm": 1, "tokens_per_s": 950, "val_loss": 2.25 }))
            .unwrap()
        };
        let progress = Progress::new(7, 8);
        assert_eq!(progress.line(&metrics(7)), "sparse loss 2.5000 950 tok/s");
        assert_eq!([7, 8].map(|step| progress.remaining(step)), [None, Some(Duration::ZERO)]);
    }

    #[test]
    fn times_and_rates_are_short() {
        let times = [0.4, 61.0, 3723.0, 1e7].map(|time| clock(Duration::from_secs_f64(time)));
        assert_eq!(times, ["0:00", "1:01", "1:02:03", "115 days"]);
        assert_eq!([thousands(950.0), thousands(35_420.0)], ["950", "35.4k"]);
    }
}

//! What a person sees while training: a live line on a terminal, plain lines elsewhere.

use std::{
    io::{IsTerminal, stderr},
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};
use sparse24_train::method::PhaseKind;

use crate::output::note;

/// One step, as far as a progress line tells it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen {
    /// Optimizer steps done.
    pub(crate) step: u32,
    /// Of the step.
    pub(crate) phase: PhaseKind,
    /// Of the step's batches.
    pub(crate) loss: f64,
    /// Of the last sample.
    pub(crate) flip_rate: Option<f64>,
    /// Of the step.
    pub(crate) tokens_per_second: f64,
    /// If the held-out split was evaluated after the step.
    pub(crate) validation_loss: Option<f64>,
}

/// A progress display over `total` steps.
pub(crate) struct Progress {
    total: u32,
    first: u32,
    began: Instant,
    printed: Option<Instant>,
    bar: Option<ProgressBar>,
    flip_rate: Option<f64>,
    validation_loss: Option<f64>,
}

/// How often plain lines are printed at most.
const INTERVAL: Duration = Duration::from_secs(5);

impl Progress {
    /// Begins after `first` steps; a live line if standard error is a terminal.
    pub(crate) fn new(first: u32, total: u32) -> Self {
        let bar = stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{bar:30.cyan/blue} {pos}/{len} {msg}")
                .expect("the template is well formed");
            let bar = ProgressBar::new(u64::from(total)).with_style(style.progress_chars("━╸─"));
            bar.set_position(u64::from(first));
            bar
        });
        Self {
            total,
            first,
            began: Instant::now(),
            printed: None,
            bar,
            flip_rate: None,
            validation_loss: None,
        }
    }

    /// Shows a step.
    pub(crate) fn step(&mut self, seen: Seen) {
        self.flip_rate = seen.flip_rate.or(self.flip_rate);
        self.validation_loss = seen.validation_loss.or(self.validation_loss);
        let line = self.line(&seen);
        match &self.bar {
            Some(bar) => {
                bar.set_position(u64::from(seen.step));
                bar.set_message(line);
            }
            None if seen.validation_loss.is_some()
                || self.printed.is_none_or(|at| at.elapsed() >= INTERVAL) =>
            {
                self.printed = Some(Instant::now());
                note(format_args!("step {}/{} {line}", seen.step, self.total));
                // A line that stays tells what was measured since the one before it.
                (self.flip_rate, self.validation_loss) = (None, None);
            }
            None => {}
        }
    }

    /// A line that stays, above the live one.
    pub(crate) fn say(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.println(line),
            None => note(line),
        }
    }

    /// Ends the live line where it stands.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }

    fn line(&self, seen: &Seen) -> String {
        // A resume begins with the evaluation of a step that was done before.
        let left = match seen.step - self.first {
            0 => None,
            done => Some(
                self.began.elapsed().as_secs_f64() / f64::from(done)
                    * f64::from(self.total - seen.step),
            ),
        };
        let mut line = format!("{} loss {:.4}", seen.phase, seen.loss);
        if let Some(loss) = self.validation_loss {
            line += &format!(" val {loss:.4}");
        }
        if let Some(rate) = self.flip_rate {
            line += &format!(" flip {rate:.5}");
        }
        line + &format!(
            " {} tok/s ETA {}",
            thousands(seen.tokens_per_second),
            left.map_or("-".to_owned(), clock)
        )
    }
}

fn thousands(rate: f64) -> String {
    if rate >= 1e4 { format!("{:.1}k", rate / 1e3) } else { format!("{rate:.0}") }
}

fn clock(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    if whole >= 3600 {
        format!("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60)
    } else {
        format!("{}:{:02}", whole / 60, whole % 60)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_was_done_before_tells_no_pace() {
        let seen = |step| Seen {
            step,
            phase: PhaseKind::Sparse,
            loss: 2.5,
            flip_rate: None,
            tokens_per_second: 950.0,
            validation_loss: Some(2.25),
        };
        let progress = Progress::new(7, 8);
        assert_eq!(progress.line(&seen(7)), "sparse loss 2.5000 950 tok/s ETA -");
        assert_eq!(progress.line(&seen(8)), "sparse loss 2.5000 950 tok/s ETA 0:00");
    }

    #[test]
    fn times_and_rates_read_well() {
        assert_eq!([clock(0.4), clock(61.0), clock(3723.0)], ["0:00", "1:01", "1:02:03"]);
        assert_eq!([thousands(950.0), thousands(35_420.0)], ["950", "35.4k"]);
    }
}

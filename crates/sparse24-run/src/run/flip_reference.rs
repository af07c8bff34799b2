//! Detects flip-rate explosion: compares the flip rate of a sparse phase with that of a stored
//! dense run at the same steps. The result depends only on the samples, so a resumed run finds the
//! same, and it changes no result.

use std::{
    collections::{BTreeMap, VecDeque},
    path::Path,
};

use super::{MetricsLog, StepMetrics, components::run_config, directory::METRICS};
use crate::{Error, Result, config::Config};
use sparse24_train::method::PhaseKind;

/// Number of matched samples for mu; a single one has the noise of a few hundred flips.
const WINDOW: usize = 5;

/// A dense run as the reference of flip rates.
#[derive(Debug)]
pub(super) struct FlipReference {
    rates: BTreeMap<u32, f64>,
    /// Flip rates of this run and of the reference.
    recent: VecDeque<[f64; 2]>,
    above: bool,
}

impl FlipReference {
    /// Reads the reference that a configuration names, if any.
    ///
    /// # Errors
    /// [`Error::Setting`] for a run that is not dense, has another model, data order or schedule,
    /// or has no samples.
    pub(super) fn open(config: &Config) -> Result<Option<Self>> {
        if config.run.flip_reference.is_empty() {
            return Ok(None);
        }
        let path = Path::new(&config.run.flip_reference);
        let refuse = |problem: String| Error::setting("run.flip_reference", problem);
        let unread = |error: Error| refuse(error.to_string());
        let of_reference = run_config(path).map_err(unread)?;
        let matters = |config: &Config| {
            let mut settings = config.decisive();
            settings.retain(|key, _| {
                key != "seed"
                    && !["method.", "run.", "backend."]
                        .iter()
                        .any(|section| key.starts_with(section))
            });
            settings
        };
        let (found, wanted) = (matters(&of_reference), matters(config));
        if let Some((key, value)) =
            wanted.iter().find(|(key, value)| found.get(*key) != Some(value))
        {
            let there = found.get(key).map_or("nothing", String::as_str);
            return Err(refuse(format!(
                "{} is a run with {key} = {there}, expected {value}, so that steps match",
                path.display()
            )));
        }
        let mut rates = BTreeMap::new();
        for metrics in MetricsLog::steps(&path.join(METRICS)).map_err(unread)? {
            let metrics = metrics.map_err(unread)?;
            if metrics.phase == PhaseKind::Sparse {
                let problem = format!("{} is a sparse run, expected a dense one", path.display());
                return Err(refuse(problem));
            }
            rates.extend(metrics.flip_rate.map(|rate| (metrics.step, rate)));
        }
        if rates.is_empty() {
            return Err(refuse(format!(
                "{} has no samples of the flip rate, expected a run with run.flip_every above 0",
                path.display()
            )));
        }
        Ok(Some(Self { rates, recent: VecDeque::new(), above: false }))
    }

    /// Returns mu when it reaches 1 or more, over the last samples of a sparse phase at steps that
    /// the reference has too.
    pub(super) fn next(&mut self, metrics: &StepMetrics) -> Option<f64> {
        let rate = metrics.flip_rate.filter(|_| metrics.phase == PhaseKind::Sparse)?;
        self.recent.push_back([rate, *self.rates.get(&metrics.step)?]);
        if self.recent.len() > WINDOW {
            self.recent.pop_front();
        }
        let [sparse, dense] =
            [0, 1].map(|side| self.recent.iter().map(|pair| pair[side]).sum::<f64>());
        let was_above = std::mem::replace(
            &mut self.above,
            self.recent.len() == WINDOW && sparse >= dense && sparse > 0.0,
        );
        (self.above && !was_above).then_some(sparse / dense)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::tests::metrics;

    fn sample(step: u32, rate: f64) -> StepMetrics {
        StepMetrics { flip_rate: Some(rate), ..metrics(step) }
    }

    fn reference() -> FlipReference {
        FlipReference {
            rates: (1..=100).map(|step| (2 * step, 0.5)).collect(),
            recent: VecDeque::new(),
            above: false,
        }
    }

    /// Rates at the steps 2, 4, ...: the steps at which mu reached 1, and mu.
    fn explosions(rates: &[f64]) -> Vec<(u32, f64)> {
        let mut reference = reference();
        (1..)
            .zip(rates)
            .filter_map(|(at, &rate)| Some((2 * at, reference.next(&sample(2 * at, rate))?)))
            .collect()
    }

    #[test]
    fn an_explosion_is_named_once_a_stretch() {
        assert_eq!(explosions(&[0.4; 20]), []);
        assert_eq!(explosions(&[0.5; 20]), [(10, 1.0)], "mu = 1 is one, over five samples");
        // Means of five: 0.55 at the third of 0.75, 0.45 at the second 0, 0.6 at the last.
        let (low, high, zero) = ([0.25; 5], [0.75; 4], [0.0; 3]);
        assert_eq!(explosions(&[&low[..], &high, &zero, &high].concat()), [(16, 1.1), (32, 1.2)]);
    }

    #[test]
    fn steps_that_do_not_match_do_not_count() {
        let mut reference = reference();
        for step in 1..=100 {
            let phase = if step % 2 == 0 { PhaseKind::Dense } else { PhaseKind::Sparse };
            let metrics = StepMetrics { phase, ..sample(step, 0.9) };
            assert_eq!(reference.next(&metrics), None, "the reference has even steps");
        }
        assert!(reference.recent.is_empty());
    }
}

//! The search for the decay factor lambda (section 4.3 of the paper): the first steps of a run with
//! each candidate, beside a dense one.
//!
//! mu = mean sparse flip rate / mean dense flip rate over a window of the warm-up;
//! [`sparse24_core::lambda`] has the rule. Invariant: all runs of a seed have the same initial
//! weights and data, and the schedule of the whole run. Deliberately absent: terminals.

mod report;

use std::{collections::BTreeMap, path::Path};

use serde::{Deserialize, Serialize};
use sparse24_core::lambda::GRID;

pub use report::{Bootstrap, Candidate, Dense, FILE, Report, Verdict};

use crate::series::{Description, Folder, Keep, Member, Progress, Series, Told, Watcher};
use sparse24_run::{
    Error,
    checkpoint::DatasetIdentity,
    config::{Config, MethodConfig, read_table, renamed},
    disk,
    run::{of_dataset, open_dataset},
};
use sparse24_train::{
    method::{Ends, Phase, Until},
    optim::MaskedDecay,
};

/// What is asked of a search besides the run that lambda is for; what is absent has a default.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Wanted {
    /// Values of lambda.
    pub candidates: Option<Vec<f32>>,
    /// The step after which each run ends.
    pub until: Option<u32>,
    /// The first and the last step whose samples count.
    pub window: Option<[u32; 2]>,
    /// Of weights and data.
    pub seeds: Option<Vec<u64>>,
}

/// A search, resolved: what `search.toml` holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// In order.
    candidates: Vec<f32>,
    until: u32,
    window: [u32; 2],
    seeds: Vec<u64>,
    /// The run that lambda is for.
    base: Config,
    /// Its data, once they were read.
    data: Option<DatasetIdentity>,
}

/// Where decay acts on weights: these over the peak learning rate, at 1 of which one step takes all
/// of a pruned weight.
const ON_WEIGHTS: [f32; 8] = [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0];

/// To two digits, since a grid is read by people.
fn round(value: f32) -> f32 {
    format!("{value:.1e}").parse().expect("a number is written as one")
}

/// The arm of the reference runs.
const DENSE: &str = "dense";
const DESCRIPTION: &str = "search.toml";

impl Plan {
    /// Fills in what is not asked for.
    ///
    /// # Errors
    /// [`Error::Setting`] for a method without masked decay or masks, and for candidates, steps or
    /// seeds that cannot be searched.
    pub fn resolve(base: Config, wanted: Wanted) -> Result<Self, Error> {
        let method = base.method_value()?;
        let refuse = |problem: &str| {
            Err(Error::setting(
                "method.name",
                format!("{} {problem}, so that there is no lambda to search", base.method.name),
            ))
        };
        let candidates = match (method.decay, wanted.candidates) {
            (MaskedDecay::None, _) => return refuse("has no masked decay"),
            _ if method.phases.iter().all(|phase| phase.mask().is_none()) => {
                return refuse("prunes in no phase");
            }
            (_, Some(candidates)) => candidates,
            (MaskedDecay::OnGradients(_), None) => GRID.map(|lambda| lambda as f32).to_vec(),
            (MaskedDecay::OnWeights(_), None) => {
                ON_WEIGHTS.map(|share| round(share / base.optimizer.learning_rate)).to_vec()
            }
        };
        let warmup = base.optimizer.warmup_steps;
        let until = wanted
            .until
            .unwrap_or(if warmup > 0 { warmup } else { base.steps / 20 }.clamp(1, base.steps));
        let window = wanted.window.unwrap_or([until / 2 + 1, until]);
        let seeds = wanted.seeds.unwrap_or_else(|| vec![base.seed]);
        let mut plan = Self { candidates, until, window, seeds, base, data: None };
        plan.candidates.sort_by(f32::total_cmp);
        plan.check()?;
        Ok(plan)
    }

    fn check(&self) -> Result<(), Error> {
        let refuse = |key: &str, problem: String| Err(Error::setting(key, problem));
        let Self { candidates, until, window: [first, last], seeds, base, .. } = self;
        if candidates.is_empty() {
            return refuse("candidates", "expected at least one value of lambda".to_owned());
        }
        if let Some(lambda) =
            candidates.iter().find(|lambda| !(lambda.is_finite() && **lambda >= 0.0))
        {
            return refuse(
                "candidates",
                format!("expected finite numbers of at least 0, found {lambda}"),
            );
        }
        if let Some(twice) = candidates.windows(2).find(|pair| pair[0] == pair[1]) {
            return refuse("candidates", format!("{:e} is named twice", twice[0]));
        }
        check_seeds("seeds", seeds, 1)?;
        if !(1..=base.steps).contains(until) {
            return refuse(
                "until",
                format!("expected a step of the run, 1 to {}, found {until}", base.steps),
            );
        }
        if !(1..=*last).contains(first) || last > until {
            return refuse(
                "window",
                format!(
                    "expected steps A..B of 1..{until}, where the runs end, found {first}..{last}"
                ),
            );
        }
        let every = base.run.flip_every;
        let is_sampled = |step: u32| step == 1 || (every > 0 && step.is_multiple_of(every));
        if !(*first..=*last).any(is_sampled) {
            let problem = format!(
                "is {every}, so that no step of the window {first}..{last} is sampled; expected at most {}",
                last - first + 1
            );
            return refuse("run.flip_every", problem);
        }
        let method = base.method_value()?;
        let earliest = |(phase, of): (usize, &Phase)| match of.until {
            Until::VarianceSettled { earliest, .. } => {
                Some((phase, earliest.of(base.steps).max(1)))
            }
            Until::Fraction(_) => None,
        };
        // A phase that ends by a criterion ends somewhere between the two.
        let ends = [Ends::new(), method.phases.iter().enumerate().filter_map(earliest).collect()];
        let is_sparse = |step: u32| {
            ends.iter()
                .any(|ends| method.phases[method.phase_at(step, base.steps, ends)].mask().is_some())
        };
        if !(*first..=*last).any(|step| is_sampled(step) && is_sparse(step)) {
            let problem = format!(
                "no sampled step of {first}..{last} is sparse, so that there are no masks to compare; expected steps of a sparse phase (--until, --window)"
            );
            return refuse("window", problem);
        }
        Ok(())
    }

    /// The runs: for each seed the reference first, so that each candidate can be judged as soon as
    /// it is done.
    fn members(&self) -> Vec<Member> {
        let dense = MethodConfig { name: DENSE.to_owned(), ..preset_method() };
        let of_seed = |&seed: &u64| {
            let config = Config { seed, ..self.base.clone() };
            let reference = Member {
                arm: DENSE.to_owned(),
                config: Config { method: dense.clone(), ..config.clone() },
                until: self.until,
            };
            let candidate = move |lambda: &f32| {
                let mut config = config.clone();
                config.method.lambda = *lambda;
                Member { arm: arm(*lambda), config, until: self.until }
            };
            [reference].into_iter().chain(self.candidates.iter().map(candidate)).collect::<Vec<_>>()
        };
        self.seeds.iter().flat_map(of_seed).collect()
    }

    fn decides(&self) -> BTreeMap<String, String> {
        let mut decides = BTreeMap::from([
            ("until".to_owned(), self.until.to_string()),
            ("window".to_owned(), format!("{}..{}", self.window[0], self.window[1])),
        ]);
        decides.extend(
            self.candidates
                .iter()
                .map(|lambda| (format!("candidates\u{1}{lambda:e}"), String::new())),
        );
        decides.extend(self.seeds.iter().map(|seed| (format!("seeds\u{1}{seed}"), String::new())));
        decides.extend(self.data.map(|data| ("data".to_owned(), data.fingerprint.to_string())));
        decides.extend(settings(&self.base));
        decides
    }
}

/// No decay, no mask, no choice that an arm made: what `dense` is laid on.
fn preset_method() -> MethodConfig {
    sparse24_run::config::preset::PRESETS[0].config().method
}

/// The folder of a candidate's runs.
fn arm(lambda: f32) -> String {
    format!("lambda-{lambda:e}")
}

/// What decides a bit of the runs, but what a search varies.
fn settings(config: &Config) -> BTreeMap<String, String> {
    let mut settings = config.decisive();
    settings.retain(|key, _| !["method.lambda", "seed"].contains(&key.as_str()));
    settings
}

/// Refuses fewer seeds than `least`, one that is named twice, and one that TOML cannot hold.
pub(crate) fn check_seeds(key: &str, seeds: &[u64], least: usize) -> Result<(), Error> {
    if seeds.len() < least {
        let why = if least > 1 { ", since one difference has no interval" } else { "" };
        return Err(Error::setting(
            key,
            format!("expected at least {least}, found {}{why}", seeds.len()),
        ));
    }
    if let Some((_, twice)) =
        seeds.iter().enumerate().find(|(at, seed)| seeds[..*at].contains(seed))
    {
        return Err(Error::setting(key, format!("{twice} is named twice")));
    }
    match seeds.iter().find(|seed| i64::try_from(**seed).is_err()) {
        Some(seed) => {
            Err(Error::setting(key, format!("expected at most {}, found {seed}", i64::MAX)))
        }
        None => Ok(()),
    }
}

/// A search in its folder.
pub struct Search {
    plan: Plan,
    series: Series,
}

impl Search {
    /// Begins or continues a search; nothing is trained yet.
    ///
    /// # Errors
    /// [`Error::File`] for a folder that is in use, holds something else, or another search, with
    /// the difference; those of the data.
    pub fn open(mut plan: Plan, path: &Path, keep: Keep) -> Result<Self, Error> {
        plan.data = Some(of_dataset(&open_dataset(&plan.base)?));
        let text = toml::to_string(&plan).expect("a search is a TOML table");
        let parse = |file: &Path| {
            let mut table = read_table(file, "a search as it was resolved")?;
            if let Some(toml::Value::Table(base)) = table.get_mut("base") {
                renamed::update(base);
            }
            let before: Plan = toml::Value::Table(table)
                .try_into()
                .map_err(|e: toml::de::Error| Error::file(file, e.message()))?;
            Ok(before.decides())
        };
        let description = Description {
            file: DESCRIPTION,
            text: &text,
            decides: plan.decides(),
            lists: &["candidates", "seeds"],
            parse: &parse,
        };
        let folder = Folder::open(path, &description)?;
        let search = Self { series: Series::open(folder, plan.members(), keep)?, plan };
        search.write()?;
        Ok(search)
    }

    /// The runs.
    #[must_use]
    pub fn series(&self) -> &Series {
        &self.series
    }

    /// What is known so far.
    #[must_use]
    pub fn report(&self) -> Report {
        Report::of(&self.plan, self.series.members(), self.series.told())
    }

    /// Trains what is not done; after each run, `done` gets its index and what is known then, which
    /// `search.json` holds as well.
    ///
    /// # Errors
    /// As [`Series::train`].
    pub fn train(
        &mut self,
        watchers: Vec<Box<dyn Watcher>>,
        done: &(dyn Fn(usize, &Report) + Sync),
    ) -> Result<Progress, Error> {
        let (plan, members, path) =
            (&self.plan, self.series.members().to_vec(), self.series.path().to_owned());
        let after = |member: usize, told: &[Option<Told>]| {
            let report = Report::of(plan, &members, told);
            report.write(&path)?;
            done(member, &report);
            Ok(())
        };
        self.series.train(watchers, &after)
    }

    fn write(&self) -> Result<(), Error> {
        self.report().write(self.series.path())
    }
}

impl Report {
    fn write(&self, folder: &Path) -> Result<(), Error> {
        let mut text = serde_json::to_vec_pretty(self).expect("numbers and strings are JSON");
        text.push(b'\n');
        let path = folder.join(FILE);
        // Nothing is written where nothing is new.
        if disk::read_small(&path, text.len() as u64).is_ok_and(|found| found == text) {
            Ok(())
        } else {
            disk::write_atomically(&path, &text)
        }
    }
}

#[cfg(test)]
mod tests;

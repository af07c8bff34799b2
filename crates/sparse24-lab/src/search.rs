//! The search for the decay factor lambda (section 4.3 of the paper): the first steps of a run with
//! each candidate, and of a dense run.
//!
//! mu = mean sparse flip rate / mean dense flip rate over a window of the warm-up, judged by the
//! rule of [`sparse24_core::lambda`]. Invariant: all runs of a seed have the same initial weights
//! and data, and the schedule of the whole run.

mod results;

use std::path::Path;

use serde::{Deserialize, Serialize};
use sparse24_core::lambda::GRID;

pub use results::{Bootstrap, Candidate, Dense, FILE, SearchResults, Verdict};

use sparse24_run::{
    Error,
    checkpoint::DatasetIdentity,
    config::{Config, MethodConfig, read_table, renamed},
    run::{of_data, open_data},
};
use sparse24_train::{
    method::{Ends, Phase, Until},
    optim::MaskedDecay,
};

use crate::{
    Result,
    runs::{
        Folder, Identity, Keep, Member, Progress, RunResult, RunSet, Settings, Watcher, write_json,
    },
};

/// Options of a search; those that are absent have defaults.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SearchOptions {
    /// Values of lambda; by default [`GRID`] or, for decay on weights, shares of 1/lr.
    pub candidates: Option<Vec<f32>>,
    /// The step after which each run ends; by default the end of the warm-up.
    pub until: Option<u32>,
    /// First and last step whose samples count; by default the second half.
    pub window: Option<[u32; 2]>,
    /// Seeds for weights and data; by default the seed of the run.
    pub seeds: Option<Vec<u64>>,
}

/// A resolved search: the contents of `search.toml`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Ascending.
    candidates: Vec<f32>,
    until: u32,
    window: [u32; 2],
    seeds: Vec<u64>,
    /// The run that needs lambda.
    base: Config,
    /// None before the dataset is opened.
    data: Option<DatasetIdentity>,
}

/// Candidates for decay on weights, times the peak learning rate; at 1, one step removes all of a
/// pruned weight.
const ON_WEIGHTS: [f32; 8] = [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0];

/// Rounds to two digits, for readable grids.
fn round(value: f32) -> f32 {
    format!("{value:.1e}").parse().expect("a formatted number is a number")
}

/// The arm of the dense reference runs.
const DENSE: &str = "dense";
const DESCRIPTION: &str = "search.toml";

impl Plan {
    /// Fills in the defaults.
    ///
    /// # Errors
    /// [`Error::Setting`] for a method without masked decay or masks, and for candidates, steps or
    /// seeds that cannot be searched.
    pub fn resolve(base: Config, options: SearchOptions) -> Result<Self> {
        let method = base.method_value()?;
        let refuse = |problem: &str| {
            let problem =
                format!("{} {problem}, so there is no lambda to search", base.method.name);
            Err(Error::setting("method.name", problem))
        };
        let candidates = match (method.decay, options.candidates) {
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
        let until = options.until.unwrap_or_else(|| base.warmup_end());
        let window = options.window.unwrap_or([until / 2 + 1, until]);
        let seeds = options.seeds.unwrap_or_else(|| vec![base.seed]);
        let mut plan = Self { candidates, until, window, seeds, base, data: None };
        plan.candidates.sort_by(f32::total_cmp);
        plan.check()?;
        Ok(plan)
    }

    fn check(&self) -> Result {
        let refuse = |key: &str, problem: String| Err(Error::setting(key, problem));
        let Self { candidates, until, window: [first, last], seeds, base, .. } = self;
        let is_valid = |lambda: &f32| lambda.is_finite() && *lambda >= 0.0;
        if candidates.is_empty() {
            return refuse("candidates", "expected at least one value of lambda".to_owned());
        }
        if let Some(lambda) = candidates.iter().find(|lambda| !is_valid(lambda)) {
            let problem = format!("expected finite numbers of at least 0, found {lambda}");
            return refuse("candidates", problem);
        }
        if let Some(twice) = candidates.windows(2).find(|pair| pair[0] == pair[1]) {
            return refuse("candidates", format!("{:e} is listed twice", twice[0]));
        }
        check_seeds(seeds, 1)?;
        let steps = base.steps;
        if !(1..=steps).contains(until) {
            let problem = format!("expected a step of the run, 1 to {steps}, found {until}");
            return refuse("until", problem);
        }
        if !(1..=*last).contains(first) || last > until {
            let problem =
                format!("expected steps A..B within the runs, 1..{until}, found {first}..{last}");
            return refuse("window", problem);
        }
        let every = base.run.flip_every;
        let sampled: Vec<u32> = (*first..=*last)
            .filter(|step| *step == 1 || (every > 0 && step.is_multiple_of(every)))
            .collect();
        if sampled.is_empty() {
            let most = last - first + 1;
            let problem = format!(
                "is {every}, so no step of the window {first}..{last} is sampled; expected at most \
                 {most}"
            );
            return refuse("run.flip_every", problem);
        }
        let method = base.method_value()?;
        let earliest = |(phase, of): (usize, &Phase)| match of.until {
            Until::VarianceSettled { earliest, .. } => Some((phase, earliest.of(steps).max(1))),
            Until::Fraction(_) => None,
        };
        // A phase that ends by a criterion ends between these two.
        let ends = [Ends::new(), method.phases.iter().enumerate().filter_map(earliest).collect()];
        let is_sparse =
            |step: u32, ends| method.phases[method.phase_at(step, steps, ends)].mask().is_some();
        if !sampled.iter().any(|step| ends.iter().any(|ends| is_sparse(*step, ends))) {
            let problem = format!(
                "no sampled step of {first}..{last} is sparse, so there are no masks to compare; \
                 expected steps of a sparse phase (--until, --window)"
            );
            return refuse("window", problem);
        }
        Ok(())
    }

    /// The runs; the reference of a seed is first, so each candidate can be judged once it is done.
    fn members(&self) -> Vec<Member> {
        let dense = dense();
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

    /// Reads `search.toml`, which an earlier version may have written.
    fn read(file: &Path) -> Result<Self> {
        let mut table = read_table(file, "a resolved search")?;
        if let Some(toml::Value::Table(base)) = table.get_mut("base") {
            renamed::update(base);
        }
        let plan = toml::Value::Table(table).try_into();
        plan.map_err(|e: toml::de::Error| Error::file(file, e.message()))
    }

    fn identity(&self) -> Identity {
        let mut settings = settings(&self.base);
        let [first, last] = self.window;
        settings.insert("until".to_owned(), self.until.to_string());
        settings.insert("window".to_owned(), format!("{first}..{last}"));
        settings.extend(self.data.map(|data| ("data".to_owned(), data.fingerprint.to_string())));
        let arms = self.candidates.iter().map(|lambda| (arm(*lambda), Settings::new()));
        Identity { settings, arms: arms.collect(), seeds: self.seeds.iter().copied().collect() }
    }
}

/// No decay, no mask, no choice of an arm.
fn dense() -> MethodConfig {
    let config = Config::default().with_settings(&["method.name=dense".to_owned()]);
    config.expect("a method").method
}

fn arm(lambda: f32) -> String {
    format!("lambda-{lambda:e}")
}

/// The settings that decide the results of a run, except those that a search varies.
fn settings(config: &Config) -> Settings {
    let mut settings = config.decisive();
    settings.retain(|key, _| !["method.lambda", "seed"].contains(&key.as_str()));
    settings
}

/// Checks that there are `least` seeds, that no seed is listed twice, and that TOML can hold each.
///
/// # Errors
/// [`Error::Setting`].
pub fn check_seeds(seeds: &[u64], least: usize) -> Result {
    let refuse = |problem: String| Err(Error::setting("seeds", problem));
    if seeds.len() < least {
        let why = if least > 1 { ", since one difference has no interval" } else { "" };
        return refuse(format!("expected at least {least}, found {}{why}", seeds.len()));
    }
    let mut before = seeds.iter().enumerate();
    if let Some((_, twice)) = before.find(|(at, seed)| seeds[..*at].contains(seed)) {
        return refuse(format!("{twice} is listed twice"));
    }
    match seeds.iter().find(|seed| i64::try_from(**seed).is_err()) {
        Some(seed) => refuse(format!("expected at most {}, found {seed}", i64::MAX)),
        None => Ok(()),
    }
}

/// A search in its folder.
pub struct Search {
    plan: Plan,
    runs: RunSet,
}

impl Search {
    /// Starts or continues a search, without training yet.
    ///
    /// # Errors
    /// [`Error::File`] for a folder that holds something else, or a search with other settings;
    /// [`Error::Io`], also for one in use; errors from opening the dataset.
    pub fn open(mut plan: Plan, path: &Path, keep: Keep) -> Result<Self> {
        plan.data = Some(of_data(&open_data(&plan.base)?));
        let text = toml::to_string(&plan).expect("a search is a TOML table");
        let read = |file: &Path| Ok(Plan::read(file)?.identity());
        let folder = Folder::open(path, DESCRIPTION, text, &plan.identity(), read)?;
        Ok(Self { runs: RunSet::open(folder, plan.members(), keep)?, plan })
    }

    /// The runs of the search.
    #[must_use]
    pub fn runs(&self) -> &RunSet {
        &self.runs
    }

    /// The results so far.
    #[must_use]
    pub fn results(&self) -> SearchResults {
        SearchResults::of(&self.plan, self.runs.members(), self.runs.results())
    }

    /// Trains the runs that are not done. Writes `search.json` before the first run and after each;
    /// after each, also passes the run's index and the results so far to `done`.
    ///
    /// # Errors
    /// Errors from [`RunSet::train`].
    pub fn train(
        &mut self,
        watchers: Vec<Box<dyn Watcher>>,
        done: &(dyn Fn(usize, &SearchResults) + Sync),
    ) -> Result<Progress> {
        let (plan, members) = (&self.plan, self.runs.members().to_vec());
        let file = self.runs.path().join(FILE);
        let after = |member: Option<usize>, results: &[Option<RunResult>]| {
            let results = SearchResults::of(plan, &members, results);
            write_json(&file, &results)?;
            member.into_iter().for_each(|member| done(member, &results));
            Ok(())
        };
        self.runs.train(watchers, &after)
    }
}

#[cfg(test)]
mod tests;

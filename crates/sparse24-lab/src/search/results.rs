//! The results of a search: mu of each candidate with its interval, the verdicts, and a
//! recommendation or advice; written to `search.json`.
//!
//! Invariant: a function of the results of the runs, without a clock. The interval is a bootstrap
//! over layers: it shows how much mu differs between them.

use std::{collections::BTreeSet, path::Path};

use serde::{Deserialize, Serialize};
use sparse24_core::{
    lambda::{self, FEASIBLE},
    philox::{Purpose, Site, Stream},
};

use super::{DENSE, Plan, arm, settings};
use crate::{
    Result,
    runs::{Build, Failed, Failure, Member, RunResult, Sample, Settings, builds, difference},
    statistics::{LEVEL, mean, quantile},
};
use sparse24_run::{
    Error,
    checkpoint::DatasetIdentity,
    config::Config,
    disk, json,
    run::{LambdaOrigin, RunData, of_same_data},
};
use sparse24_train::method::PhaseKind;

/// File name of the results in a search's folder.
pub const FILE: &str = "search.json";

/// `search.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SearchResults {
    /// Version of the format, 1.
    pub format: u32,
    /// Number of runs that are done.
    pub done: usize,
    /// Number of runs.
    pub of: usize,
    /// The lambda to train with; none before all runs are done or if none is feasible.
    pub recommended: Option<f32>,
    /// Candidates to try next, if none is feasible.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
    /// Method of the run that needs lambda.
    pub method: String,
    /// Optimizer steps of that run.
    pub steps: u32,
    /// The step after which each run ends.
    pub until: u32,
    /// First and last step whose samples count.
    pub window: [u32; 2],
    /// Steps between samples.
    pub flip_every: u32,
    /// Seeds for weights and data.
    pub seeds: Vec<u64>,
    /// The dense reference.
    pub dense: Dense,
    /// In ascending order of lambda.
    pub candidates: Vec<Candidate>,
    /// Parameters of the intervals.
    pub bootstrap: Bootstrap,
    /// Identity of the dataset.
    pub data: Option<DatasetIdentity>,
    /// The distinct builds that ran.
    pub builds: Vec<Build>,
    /// The settings that decide results, except lambda and the seed.
    pub config: Settings,
}

/// Flip rates of the reference runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dense {
    /// Mean over the window and the seeds.
    pub flip_rate: Option<f64>,
    /// Mean over the window, for each seed.
    pub by_seed: Vec<Option<f64>>,
}

/// Results of one lambda.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Candidate {
    /// The decay factor.
    pub lambda: f32,
    /// Mean sparse over mean dense flip rate, over the window and the seeds.
    pub mu: Option<f64>,
    /// Bootstrap interval of mu over layers.
    pub interval: Option<[f64; 2]>,
    /// None before its runs are done, or if mu is unknown and no run failed.
    pub verdict: Option<Verdict>,
    /// Mean over the window and the seeds.
    pub flip_rate: Option<f64>,
    /// mu for each seed.
    pub by_seed: Vec<Option<f64>>,
    /// The first of its runs that ended early.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<Failed>,
}

impl Candidate {
    /// mu with three decimal places, or more if rounding would change its verdict.
    #[must_use]
    pub fn shown_mu(&self) -> Option<String> {
        let mu = self.mu?;
        let verdict = Ok(lambda::verdict(mu));
        let mut shown = (3..).map(|digits| format!("{mu:.digits$}"));
        shown.find(|shown| shown.parse().map(lambda::verdict) == verdict)
    }
}

/// [`lambda::Verdict`], as written to files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// mu < 0.60.
    TooStrong,
    /// mu in [0.60, 0.95].
    Feasible,
    /// mu in (0.95, 1).
    TooWeak,
    /// mu >= 1, or a run that failed.
    Explosion,
}

impl core::fmt::Display for Verdict {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::TooStrong => "too strong",
            Self::Feasible => "feasible",
            Self::TooWeak => "too weak",
            Self::Explosion => "flip-rate explosion",
        })
    }
}

impl From<lambda::Verdict> for Verdict {
    fn from(verdict: lambda::Verdict) -> Self {
        match verdict {
            lambda::Verdict::TooStrong => Self::TooStrong,
            lambda::Verdict::Feasible => Self::Feasible,
            lambda::Verdict::TooWeak => Self::TooWeak,
            lambda::Verdict::Explosion => Self::Explosion,
        }
    }
}

/// Parameters of the bootstrap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bootstrap {
    /// Number of resamples.
    pub resamples: u32,
    /// Number of sparsifiable weights.
    pub layers: usize,
}

const RESAMPLES: u32 = 2000;

/// Mean flips per step of each layer, in a window of one run.
type Flips = Vec<f64>;

/// Flips and layer sizes of a search.
struct Layers(Vec<(String, u64)>);

impl Layers {
    /// Mean flips over the samples that `counts` selects; none of a failed run or without samples.
    fn flips(&self, run: &RunResult, counts: impl Fn(&Sample) -> bool) -> Option<Flips> {
        let samples: Vec<_> = run.samples.iter().filter(|sample| counts(sample)).collect();
        let flips = |(name, weights): &(String, u64)| {
            let rates: Option<Vec<f64>> =
                samples.iter().map(|sample| sample.layers.get(name).copied()).collect();
            Some(mean(&rates?)? * *weights as f64)
        };
        if run.failure.is_some() { None } else { self.0.iter().map(flips).collect() }
    }

    fn rate(&self, flips: &Flips) -> f64 {
        flips.iter().sum::<f64>() / self.0.iter().map(|(_, weights)| weights).sum::<u64>() as f64
    }

    fn mu(&self, sparse: &Flips, dense: &Flips) -> Option<f64> {
        Some(self.rate(sparse) / self.rate(dense)).filter(|mu| mu.is_finite())
    }

    /// Mean over the seeds; none unless all have flips.
    fn pooled(&self, seeds: &[Option<Flips>]) -> Option<Flips> {
        let seeds: Vec<&Flips> = seeds.iter().map(Option::as_ref).collect::<Option<_>>()?;
        let sum = |layer: usize| seeds.iter().map(|flips| flips[layer]).sum::<f64>();
        Some((0..self.0.len()).map(|layer| sum(layer) / seeds.len() as f64).collect())
    }
}

impl SearchResults {
    /// Computes the results from the runs that are done.
    pub(super) fn of(plan: &Plan, members: &[Member], results: &[Option<RunResult>]) -> Self {
        let vocabulary =
            plan.base.model.vocabulary(plan.data.map_or(1, |data| data.vocabulary), None);
        let recipe = plan.base.recipe(vocabulary).expect("the plan was checked");
        let layers = Layers(recipe.model.sparsifiable().expect("the plan was checked"));
        let runs = |name: &str| -> Vec<(u64, Option<&RunResult>)> {
            let of_arm = members.iter().zip(results).filter(|(member, _)| member.arm == name);
            of_arm.map(|(member, run)| (member.config.seed, run.as_ref())).collect()
        };
        let in_window = |sample: &Sample| (plan.window[0]..=plan.window[1]).contains(&sample.step);
        let references = runs(DENSE);
        let candidate = |&lambda: &f32| {
            let runs = runs(&arm(lambda));
            let pairs = runs.iter().zip(&references).map(|((_, run), (_, reference))| {
                let (run, reference) = ((*run)?, (*reference)?);
                // Compared where the candidate is sparse and both have a sample: skipped steps have
                // none.
                let sparse: BTreeSet<u32> = run
                    .samples
                    .iter()
                    .filter(|sample| in_window(sample) && sample.phase == PhaseKind::Sparse)
                    .map(|sample| sample.step)
                    .collect();
                let steps: BTreeSet<u32> = reference
                    .samples
                    .iter()
                    .map(|sample| sample.step)
                    .filter(|step| sparse.contains(step))
                    .collect();
                let counts = |sample: &Sample| steps.contains(&sample.step);
                Some((layers.flips(run, counts)?, layers.flips(reference, counts)?))
            });
            let (sparse, dense): (Vec<_>, Vec<_>) = pairs.map(Option::unzip).unzip();
            let by_seed = sparse.iter().zip(&dense);
            let by_seed = by_seed.map(|(s, d)| layers.mu(s.as_ref()?, d.as_ref()?)).collect();
            let (pooled, reference) = (layers.pooled(&sparse), layers.pooled(&dense));
            let both = pooled.as_ref().zip(reference.as_ref());
            let mu = both.and_then(|(sparse, dense)| layers.mu(sparse, dense));
            let is_done = runs.iter().chain(&references).all(|(_, run)| run.is_some());
            let failure = runs.iter().find_map(|(seed, run)| {
                Some(Failed { seed: *seed, failure: (*run)?.failure.clone()? })
            });
            Candidate {
                lambda,
                mu,
                interval: mu.and(both).and_then(|(sparse, dense)| bootstrap(sparse, dense)),
                // A failed run is an explosion; without measurements there is no verdict.
                verdict: (is_done && (mu.is_some() || failure.is_some()))
                    .then(|| lambda::verdict(mu.unwrap_or(f64::NAN)).into()),
                flip_rate: pooled.as_ref().map(|flips| layers.rate(flips)),
                by_seed,
                failure,
            }
        };
        let candidates: Vec<_> = plan.candidates.iter().map(candidate).collect();
        let failed =
            references.iter().find_map(|(seed, run)| Some((seed, (*run)?.failure.as_ref()?)));
        let dense: Vec<_> =
            references.iter().map(|(_, run)| layers.flips((*run)?, in_window)).collect();
        let rate = |flips: &Option<Flips>| flips.as_ref().map(|flips| layers.rate(flips));
        let done = results.iter().flatten().count();
        let is_done = done == members.len();
        let mu: Vec<_> = candidates.iter().map(|one| one.mu.unwrap_or(f64::NAN)).collect();
        let recommended =
            lambda::recommend(&mu).filter(|_| is_done).map(|at| candidates[at].lambda);
        Self {
            format: 1,
            done,
            of: members.len(),
            recommended,
            advice: (is_done && recommended.is_none()).then(|| match failed {
                Some((seed, Failure { step, what })) => format!(
                    "the dense run of seed {seed} ended at step {step} ({what}); fix its settings"
                ),
                _ => advice(&candidates),
            }),
            method: plan.base.method.name.clone(),
            steps: plan.base.steps,
            until: plan.until,
            window: plan.window,
            flip_every: plan.base.run.flip_every,
            seeds: plan.seeds.clone(),
            dense: Dense {
                flip_rate: rate(&layers.pooled(&dense)),
                by_seed: dense.iter().map(rate).collect(),
            },
            candidates,
            bootstrap: Bootstrap { resamples: RESAMPLES, layers: layers.0.len() },
            data: plan.data,
            builds: builds(results),
            config: settings(&plan.base),
        }
    }

    /// Reads the results in a search's folder.
    ///
    /// # Errors
    /// [`Error::File`] if the folder holds no results or damaged ones; [`Error::Io`].
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(FILE);
        let _confined = folder.is_dir().then(|| disk::confine(folder)).transpose()?;
        let text = disk::read_small(&path, 1 << 24)
            .map_err(|e| e.expecting("the results of `sparse24 lambda-search --out`"))?;
        json::parse(&text, json::VALUES)
            .map_err(|e| Error::file(path, format!("is not the result of a search: {e}")))
    }

    /// The recommended lambda for a run, with its origin.
    ///
    /// # Errors
    /// [`Error::File`] for a search that is unfinished, recommends nothing, or was made with other
    /// settings or data; settings of `run` and the seed may differ.
    pub fn origin(&self, folder: &Path, config: &Config, data: &RunData) -> Result<LambdaOrigin> {
        let refuse = |problem: String| Err(Error::file(folder.join(FILE), problem));
        let Self { done, of, .. } = self;
        if done < of {
            return refuse(format!(
                "is of a search with {done} of {of} runs done; continue it with `sparse24 \
                 lambda-search`"
            ));
        }
        let but_run = |settings: &Settings| -> Settings {
            let kept = settings.iter().filter(|(key, _)| !key.starts_with("run."));
            kept.map(|(key, value)| (key.clone(), value.clone())).collect()
        };
        let (searched, wanted) = (but_run(&self.config), but_run(&settings(config)));
        if let Some((key, values)) = difference(&searched, &wanted) {
            let [searched, wanted] = values.map(|value| value.unwrap_or("nothing"));
            return refuse(format!(
                "searched with {key} = {searched}, but the run has {wanted}; search again"
            ));
        }
        let are_same = |searched| Ok::<_, Error>(of_same_data(data, searched)? == searched);
        if !self.data.map(are_same).transpose()?.unwrap_or(false) {
            let problem = "searched on data other than the run's, or on shards of its text; \
                search again, or give the run these shards";
            return refuse(problem.to_owned());
        }
        let found = self.recommended.and_then(|lambda| {
            let candidate = self.candidates.iter().find(|one| one.lambda == lambda)?;
            Some((candidate, candidate.mu?))
        });
        match found {
            Some((candidate, mu)) => Ok(LambdaOrigin {
                lambda: candidate.lambda,
                search: folder.display().to_string(),
                mu,
                interval: candidate.interval,
                until: self.until,
                window: self.window,
                seeds: self.seeds.clone(),
            }),
            None => refuse(format!(
                "recommends no lambda: {}",
                self.advice.as_deref().unwrap_or("none is feasible")
            )),
        }
    }
}

/// The percentile interval of mu over layers drawn with replacement: draw k of resample b is word
/// k % 4 of Philox call k / 4 at step b.
fn bootstrap(sparse: &[f64], dense: &[f64]) -> Option<[f64; 2]> {
    let layers = sparse.len();
    let resample = |b: u32| {
        let stream = Stream::new(0, Site::new(Purpose::Bootstrap, 0), 0, b);
        let draw = |k: usize| {
            ((u64::from(stream.words(k as u32 / 4)[k % 4]) * layers as u64) >> 32) as usize
        };
        let (sparse_sum, dense_sum) = (0..layers)
            .map(draw)
            .fold((0.0, 0.0), |(s, d), layer| (s + sparse[layer], d + dense[layer]));
        Some(sparse_sum / dense_sum).filter(|mu| mu.is_finite())
    };
    let all: Vec<f64> = (0..RESAMPLES).map(resample).collect::<Option<_>>()?;
    let tail = (1.0 - LEVEL) / 2.0;
    Some([quantile(&all, tail)?, quantile(&all, 1.0 - tail)?])
}

/// Where a feasible lambda may be if no candidate is feasible.
fn advice(candidates: &[Candidate]) -> String {
    let (low, high) = (candidates[0].lambda, candidates[candidates.len() - 1].lambda);
    let is_weak = |one: &Candidate| one.mu.is_some_and(|mu| mu > *FEASIBLE.end());
    let is_strong = |one: &Candidate| one.mu.is_some_and(|mu| mu < *FEASIBLE.start());
    let crossing = || candidates.windows(2).find(|pair| is_weak(&pair[0]) && is_strong(&pair[1]));
    if candidates.iter().all(|one| one.mu.is_none()) {
        "no flip rate was measured: sample more often (run.flip_every), at sparse steps".to_owned()
    } else if candidates.iter().all(is_strong) {
        format!("the masks flip too little even at {low:e}; try smaller candidates")
    } else if candidates.iter().all(is_weak) {
        format!(
            "the masks flip as in dense training even at {high:e}; try larger candidates, or a \
             later window"
        )
    } else if let Some([weak, strong]) = crossing() {
        let (weak, strong) = (weak.lambda, strong.lambda);
        format!("mu crosses the band between {weak:e} and {strong:e}; try candidates between them")
    } else {
        "mu does not fall steadily with lambda; sample more steps (--until, --window, \
         run.flip_every) or more seeds"
            .to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates(mu: &[Option<f64>]) -> Vec<Candidate> {
        let candidate = |(at, mu): (usize, &Option<f64>)| Candidate {
            lambda: (1 + at) as f32,
            mu: *mu,
            interval: None,
            verdict: None,
            flip_rate: None,
            by_seed: Vec::new(),
            failure: None,
        };
        mu.iter().enumerate().map(candidate).collect()
    }

    #[test]
    fn advice_names_where_to_search() {
        for (mu, expected) in [
            ([Some(0.5), Some(0.3), Some(0.1)], "too little even at 1e0; try smaller"),
            ([Some(1.2), Some(1.0), Some(0.96)], "even at 3e0; try larger"),
            ([Some(1.2), Some(0.97), Some(0.5)], "between 2e0 and 3e0"),
            ([Some(0.5), Some(1.5), None], "does not fall steadily"),
            ([None, None, None], "no flip rate was measured"),
        ] {
            let found = advice(&candidates(&mu));
            assert!(found.contains(expected), "{mu:?}: {found}");
        }
    }

    #[test]
    fn a_shown_mu_has_its_verdict() {
        for (mu, expected) in [(0.775, "0.775"), (0.99996, "0.99996"), (0.9501, "0.9501")] {
            assert_eq!(candidates(&[Some(mu)])[0].shown_mu().unwrap(), expected);
        }
    }

    /// Layers with equal mu give a point. Otherwise the interval contains the mean and is within
    /// the range of the layers.
    #[test]
    fn the_bootstrap_draws_layers() {
        assert_eq!(bootstrap(&[1.0, 2.0, 3.0], &[2.0, 4.0, 6.0]), Some([0.5, 0.5]));
        assert_eq!(bootstrap(&[0.0, 0.0], &[0.0, 0.0]), None, "nothing flips");
        let (sparse, dense) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], [10.0; 8]);
        let [low, high] = bootstrap(&sparse, &dense).unwrap();
        assert!(0.1 < low && low < 0.45 && 0.45 < high && high < 0.8, "{low} {high}");
        // The mean of 8 draws of 0.1, .. 0.8 has standard deviation 0.081.
        assert!((high - low - 2.0 * 1.96 * 0.081).abs() <= 0.02, "{low} {high}");
        assert_eq!(bootstrap(&sparse, &dense), Some([low, high]), "there is no other randomness");
    }
}

//! What a search found: mu of each candidate with its interval, the verdicts, and a recommendation
//! or advice. `search.json` holds it.
//!
//! Invariant: a function of what the runs told, with no clock in it. The interval is a bootstrap
//! over layers: it says how much mu differs between them.

use std::{collections::BTreeMap, path::Path};

use serde::{Deserialize, Serialize};
use sparse24_core::{
    lambda::{self, FEASIBLE},
    philox::{Purpose, Site, Stream},
};

use super::{DENSE, Plan, arm, settings};
use crate::{
    series::{self, Build, Failure, Member, Told},
    statistics::{LEVEL, quantile},
};
use sparse24_run::{
    Error,
    checkpoint::DatasetIdentity,
    config::Config,
    data::Dataset,
    disk,
    run::{LambdaOrigin, of_dataset},
};
use sparse24_train::method::PhaseKind;

/// The name of the results in a search's folder.
pub const FILE: &str = "search.json";

/// `search.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// 1.
    pub format: u32,
    /// Runs that are done.
    pub done: usize,
    /// Runs in all.
    pub of: usize,
    /// The lambda to train with; none before all runs are done.
    pub recommended: Option<f32>,
    /// What to try, where none is feasible.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
    /// Of the run that lambda is for.
    pub method: String,
    /// T of that run.
    pub steps: u32,
    /// Where the runs end.
    pub until: u32,
    /// The first and the last step whose samples count.
    pub window: [u32; 2],
    /// Steps between samples.
    pub flip_every: u32,
    /// Of weights and data.
    pub seeds: Vec<u64>,
    /// The reference.
    pub dense: Dense,
    /// By lambda.
    pub candidates: Vec<Candidate>,
    /// How the intervals were made.
    pub bootstrap: Bootstrap,
    /// The data.
    pub data: Option<DatasetIdentity>,
    /// What ran.
    pub builds: Vec<Build>,
    /// What decides a bit of the runs, but lambda and the seed.
    pub config: BTreeMap<String, String>,
}

/// The reference runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dense {
    /// Mean over window and seeds.
    pub flip_rate: Option<f64>,
    /// Of each seed.
    pub by_seed: Vec<Option<f64>>,
}

/// What was found of one lambda.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Candidate {
    /// The factor.
    pub lambda: f32,
    /// Mean sparse over mean dense flip rate, over window and seeds.
    pub mu: Option<f64>,
    /// Of mu, over layers.
    pub interval: Option<[f64; 2]>,
    /// What the rule says of it; none before its runs are done, and where none failed and mu is
    /// none.
    pub verdict: Option<Verdict>,
    /// Mean over window and seeds.
    pub flip_rate: Option<f64>,
    /// mu of each seed.
    pub by_seed: Vec<Option<f64>>,
    /// The first run of it that ended early.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<Failed>,
}

/// [`lambda::Verdict`] in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// mu < 0.60.
    TooStrong,
    /// mu in [0.60, 0.95].
    Feasible,
    /// mu in (0.95, 1).
    TooWeak,
    /// mu >= 1, or a run without a number.
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

/// A run that ended at a loss that is not finite.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failed {
    /// Whose run.
    pub seed: u64,
    /// Where and why.
    #[serde(flatten)]
    pub failure: Failure,
}

/// How intervals were made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bootstrap {
    /// Draws of layers.
    pub resamples: u32,
    /// Sparsifiable weights.
    pub layers: usize,
}

const RESAMPLES: u32 = 2000;

/// Mean flips a step of one arm and seed in the window, by layer.
type Flips = Vec<f64>;

impl Report {
    /// What the runs have told so far.
    pub(super) fn of(plan: &Plan, members: &[Member], told: &[Option<Told>]) -> Self {
        let weights = weights(plan);
        let total: u64 = weights.iter().map(|(_, weights)| weights).sum();
        let runs = |name: &str| -> Vec<(u64, Option<&Told>)> {
            let of_arm = members.iter().zip(told).filter(|(member, _)| member.arm == name);
            of_arm.map(|(member, told)| (member.config.seed, told.as_ref())).collect()
        };
        // At the steps that the candidate is sparse and both have: elsewhere there is nothing to
        // compare.
        let flips = |told: &Told, steps: &dyn Fn(u32) -> bool| -> Option<Flips> {
            let in_window: Vec<_> =
                told.samples.iter().filter(|sample| steps(sample.step)).collect();
            let of_layer = |(name, weights): &(String, u64)| {
                let rates: Option<Vec<f64>> =
                    in_window.iter().map(|sample| sample.layers.get(name).copied()).collect();
                Some(crate::statistics::mean(&rates?)? * *weights as f64)
            };
            if told.failure.is_some() { None } else { weights.iter().map(of_layer).collect() }
        };
        let in_window = |step: u32| (plan.window[0]..=plan.window[1]).contains(&step);
        let rate = |flips: &Flips| flips.iter().sum::<f64>() / total as f64;
        let pooled = |all: &[Option<Flips>]| -> Option<Flips> {
            let all: Vec<&Flips> = all.iter().map(Option::as_ref).collect::<Option<_>>()?;
            Some(
                (0..weights.len())
                    .map(|layer| {
                        all.iter().map(|flips| flips[layer]).sum::<f64>() / all.len() as f64
                    })
                    .collect(),
            )
        };
        let references = runs(DENSE);
        let candidate = |&lambda: &f32| {
            let runs = runs(&arm(lambda));
            let pairs = runs.iter().zip(&references).map(|((_, told), (_, reference))| {
                let (told, reference) = ((*told)?, (*reference)?);
                // A skipped step has no sample.
                let both = |step| {
                    let is_sparse = told
                        .samples
                        .iter()
                        .any(|sample| sample.step == step && sample.phase == PhaseKind::Sparse);
                    in_window(step)
                        && is_sparse
                        && reference.samples.iter().any(|sample| sample.step == step)
                };
                Some((flips(told, &both)?, flips(reference, &both)?))
            });
            let (sparse, dense): (Vec<_>, Vec<_>) = pairs.map(Option::unzip).unzip();
            let mu = |sparse: &Flips, dense: &Flips| {
                Some(rate(sparse) / rate(dense)).filter(|mu| mu.is_finite())
            };
            let by_seed =
                sparse.iter().zip(&dense).map(|(s, d)| mu(s.as_ref()?, d.as_ref()?)).collect();
            let (pooled, reference) = (pooled(&sparse), pooled(&dense));
            let both = pooled.as_ref().zip(reference.as_ref());
            let mu = both.and_then(|(sparse, dense)| mu(sparse, dense));
            let is_done = runs.iter().chain(&references).all(|(_, told)| told.is_some());
            let failure = runs.iter().find_map(|(seed, told)| {
                Some(Failed { seed: *seed, failure: (*told)?.failure.clone()? })
            });
            Candidate {
                lambda,
                mu,
                interval: mu.and(both).and_then(|(sparse, dense)| bootstrap(sparse, dense)),
                // A run that failed is an explosion; what was not measured is nothing.
                verdict: (is_done && (mu.is_some() || failure.is_some()))
                    .then(|| lambda::verdict(mu.unwrap_or(f64::NAN)).into()),
                flip_rate: pooled.as_ref().map(rate),
                by_seed,
                failure,
            }
        };
        let candidates: Vec<_> = plan.candidates.iter().map(candidate).collect();
        let dense: Vec<_> =
            references.iter().map(|(_, told)| flips((*told)?, &in_window)).collect();
        let done = told.iter().flatten().count();
        let is_done = done == members.len();
        let mu: Vec<_> =
            candidates.iter().map(|candidate| candidate.mu.unwrap_or(f64::NAN)).collect();
        let recommended =
            lambda::recommend(&mu).filter(|_| is_done).map(|at| candidates[at].lambda);
        Self {
            format: 1,
            done,
            of: members.len(),
            recommended,
            advice: (is_done && recommended.is_none()).then(|| advice(&candidates)),
            method: plan.base.method.name.clone(),
            steps: plan.base.steps,
            until: plan.until,
            window: plan.window,
            flip_every: plan.base.run.flip_every,
            seeds: plan.seeds.clone(),
            dense: Dense {
                flip_rate: pooled(&dense).as_ref().map(rate),
                by_seed: dense.iter().map(|flips| flips.as_ref().map(rate)).collect(),
            },
            candidates,
            bootstrap: Bootstrap { resamples: RESAMPLES, layers: weights.len() },
            data: plan.data,
            builds: series::builds(told),
            config: settings(&plan.base),
        }
    }

    /// The results in a search's folder.
    ///
    /// # Errors
    /// [`Error::File`] if the folder holds none, or something else; [`Error::Io`].
    pub fn read(folder: &Path) -> Result<Self, Error> {
        let path = folder.join(FILE);
        let text = disk::read_small(&path, 1 << 24)
            .map_err(|e| e.expecting("the results of `sparse24 lambda-search --out`"))?;
        serde_json::from_slice(&text)
            .map_err(|e| Error::file(path, format!("is no result of a search: {e}")))
    }

    /// The recommended lambda for a run, and where it comes from.
    ///
    /// # Errors
    /// [`Error::File`] for a search that is not finished, recommends nothing, or was made for other
    /// settings or data; `run` and the seed may differ.
    pub fn origin(
        &self,
        folder: &Path,
        config: &Config,
        dataset: &Dataset,
    ) -> Result<LambdaOrigin, Error> {
        let refuse = |problem: String| Err(Error::file(folder.join(FILE), problem));
        if self.done < self.of {
            return refuse(format!(
                "is of a search with {} of {} runs done; go on with `sparse24 lambda-search`",
                self.done, self.of
            ));
        }
        let matters = |settings: BTreeMap<String, String>| {
            settings
                .into_iter()
                .filter(|(key, _)| !key.starts_with("run."))
                .collect::<BTreeMap<_, _>>()
        };
        let (searched, wanted) = (matters(self.config.clone()), matters(settings(config)));
        if let Some(key) =
            searched.keys().chain(wanted.keys()).find(|key| searched.get(*key) != wanted.get(*key))
        {
            let told = |settings: &BTreeMap<String, String>| {
                settings.get(key).map_or("nothing".to_owned(), Clone::clone)
            };
            return refuse(format!(
                "searched with {key} = {}, the run has {}; search anew",
                told(&searched),
                told(&wanted)
            ));
        }
        if self.data.is_none_or(|searched| searched.fingerprint != of_dataset(dataset).fingerprint)
        {
            return refuse("searched on other data than the run's; search anew".to_owned());
        }
        let found = self
            .recommended
            .and_then(|lambda| self.candidates.iter().find(|candidate| candidate.lambda == lambda));
        match found.and_then(|candidate| Some((candidate, candidate.mu?))) {
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

/// The sparsifiable weights of the model, by name.
fn weights(plan: &Plan) -> Vec<(String, u64)> {
    let vocabulary = plan.data.map_or(1, |data| data.vocabulary as usize);
    let model = plan.base.recipe(vocabulary).expect("it was checked").model;
    model.sparsifiable().expect("it was checked")
}

/// The percentile interval of mu over layers that are drawn with replacement: draw k of resample b
/// is word k % 4 of call k / 4 at step b.
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

/// Where a feasible lambda may lie, when none of the candidates is one.
fn advice(candidates: &[Candidate]) -> String {
    let (low, high) = (candidates[0].lambda, candidates[candidates.len() - 1].lambda);
    let is_weak = |candidate: &Candidate| candidate.mu.is_some_and(|mu| mu > *FEASIBLE.end());
    let is_strong = |candidate: &Candidate| candidate.mu.is_some_and(|mu| mu < *FEASIBLE.start());
    if candidates.iter().all(|candidate| candidate.mu.is_none()) {
        return "no flip rate was measured: sample more often (run.flip_every), at steps that are sparse".to_owned();
    }
    if candidates.iter().all(is_strong) {
        return format!("the masks flip too little even at {low:e}; try smaller candidates");
    }
    if candidates.iter().all(is_weak) {
        return format!(
            "the masks flip as in dense training even at {high:e}; try larger candidates, or a later window"
        );
    }
    match candidates.windows(2).find(|pair| is_weak(&pair[0]) && is_strong(&pair[1])) {
        Some(pair) => format!("mu passes the band between {:e} and {:e}; try candidates between them", pair[0].lambda, pair[1].lambda),
        None => "mu does not fall steadily with lambda; sample more steps (--until, --window, run.flip_every) or more seeds".to_owned(),
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
    fn advice_says_where_to_look() {
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

    /// Of layers whose mu is all the same the interval is a point; else it lies within the layers'
    /// own, and holds the mean.
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

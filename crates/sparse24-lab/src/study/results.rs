//! The results of a study: `study.json`, and `study.csv` with a line per run.
//!
//! Invariant: `study.json` is a function of the results of the runs, without a clock. Values are
//! computed from the runs that are done; unknown values are absent or null.

use std::{collections::BTreeMap, fmt::Write};

use serde::Serialize;
use sparse24_run::{checkpoint::DatasetIdentity, config::dotted, task::Score};
use sparse24_train::method::PhaseKind;

use super::plan::{Plan, PlannedArm};
use crate::{
    runs::{Build, Failed, RunResult, Sample, Settings, builds},
    statistics::{Interval, deviation, mean},
};

/// `study.json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StudyResults {
    /// Version of the format, 1.
    pub format: u32,
    /// Name of the arm that the others are compared with.
    pub reference: String,
    /// Seeds for weights and data.
    pub seeds: Vec<u64>,
    /// Optimizer steps of the base.
    pub steps: u32,
    /// Number of runs that are done.
    pub done: usize,
    /// Number of runs.
    pub of: usize,
    /// In the order of the study file.
    pub arms: Vec<Arm>,
    /// None before all runs are done.
    pub best: Option<Best>,
    /// One for each group of arms that differ only in lambda.
    pub trends: Vec<Trend>,
    /// Identity of the dataset.
    pub data: Option<DatasetIdentity>,
    /// The distinct builds that ran.
    pub builds: Vec<Build>,
}

/// Results of one arm.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Arm {
    /// Unique name.
    pub name: String,
    /// Its settings in the study file.
    pub settings: Settings,
    /// Validation loss at the end.
    pub val_loss: ValLoss,
    /// Validation loss minus the reference's, over the seeds that both have; none for the
    /// reference.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub difference: Option<Interval>,
    /// Mean over samples and seeds, in sparse phases if there are any.
    pub flip_rate: Option<f64>,
    /// Flip rate over that of the reference at the same steps and seeds.
    pub mu: Option<f64>,
    /// Flip rate of each seed.
    pub by_seed: Vec<Option<f64>>,
    /// Runs that ended early.
    pub failures: Vec<Failed>,
}

/// Validation loss after the last step, nats per token.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ValLoss {
    /// Over the seeds that have a loss.
    pub mean: Option<f64>,
    /// Standard deviation over seeds (n-1).
    pub deviation: Option<f64>,
    /// In the order of the seeds.
    pub by_seed: Vec<Option<f64>>,
}

/// The reference compared with the best arm.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Best {
    /// The arm with the lowest mean loss among those that have a loss for each seed.
    pub arm: String,
    /// The candidates: the reference and the arms that differ from it only in lambda, or all arms
    /// if there are none.
    pub among: Vec<String>,
    /// None if the reference lacks a loss.
    pub left_out: Option<LeftOut>,
}

/// The reference's loss minus that of the arm that is best on the other seeds, for each seed, so
/// the choice is not made on the losses that it is judged by.
///
/// There is no interval: the choices share most seeds, so the differences are not independent.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LeftOut {
    /// Mean over the seeds.
    pub mean: f64,
    /// In the order of the seeds.
    pub by_seed: Vec<f64>,
}

/// Correlations with lambda over arms that differ only in it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Trend {
    /// Names, in ascending order of lambda.
    pub arms: Vec<String>,
    /// Their values of lambda.
    pub lambdas: Vec<f32>,
    /// Spearman's rank correlation with the mean flip rate.
    pub flip_rate: Option<f64>,
    /// Spearman's rank correlation with the mean validation loss.
    pub val_loss: Option<f64>,
}

impl StudyResults {
    /// Computes the results from the runs that are done, in the order of [`Plan::members`].
    pub(super) fn of(plan: &Plan, results: &[Option<RunResult>]) -> Self {
        let reference = runs(plan, results, plan.reference());
        let arm = |(at, planned): (usize, &PlannedArm)| {
            let runs = runs(plan, results, at);
            let by_seed: Vec<_> = runs.iter().map(|run| (*run)?.val_loss).collect();
            let losses: Vec<f64> = by_seed.iter().copied().flatten().collect();
            let pairs: Vec<_> = runs
                .iter()
                .zip(&reference)
                .filter_map(|(run, reference)| Some(((*run)?, (*reference)?)))
                .collect();
            let differences: Vec<f64> = pairs
                .iter()
                .filter_map(|(run, reference)| Some(run.val_loss? - reference.val_loss?))
                .collect();
            let samples = runs.iter().flatten().flat_map(|run| compared(run));
            let failed = |(&seed, run): (&u64, &Option<&RunResult>)| {
                Some(Failed { seed, failure: (*run)?.failure.clone()? })
            };
            Arm {
                name: planned.name.clone(),
                settings: dotted(planned.settings.clone()),
                difference: if at == plan.reference() { None } else { Interval::of(&differences) },
                val_loss: ValLoss { mean: mean(&losses), deviation: deviation(&losses), by_seed },
                flip_rate: mean(&samples.map(|sample| sample.rate).collect::<Vec<_>>()),
                mu: mu(&pairs),
                by_seed: runs.iter().map(|run| flip_rate((*run)?)).collect(),
                failures: plan.seeds.iter().zip(&runs).filter_map(failed).collect(),
            }
        };
        let arms: Vec<_> = plan.arms.iter().enumerate().map(arm).collect();
        let done = results.iter().flatten().count();
        Self {
            format: 1,
            reference: plan.reference.clone(),
            seeds: plan.seeds.clone(),
            steps: plan.base.steps,
            done,
            of: results.len(),
            best: if done == results.len() { best(plan, &arms) } else { None },
            trends: trends(&plan.arms, &arms),
            arms,
            data: plan.data,
            builds: builds(results),
        }
    }
}

/// The results of an arm, in the order of the seeds.
fn runs<'a>(
    plan: &Plan,
    results: &'a [Option<RunResult>],
    arm: usize,
) -> Vec<Option<&'a RunResult>> {
    results.chunks(plan.arms.len()).map(|of_seed| of_seed[arm].as_ref()).collect()
}

/// The samples by which arms are compared: those of sparse phases, or all if there are none.
fn compared(run: &RunResult) -> impl Iterator<Item = &Sample> {
    let is_sparse = |sample: &Sample| sample.phase == PhaseKind::Sparse;
    let has_sparse = run.samples.iter().any(is_sparse);
    run.samples.iter().filter(move |sample| !has_sparse || is_sparse(sample))
}

fn flip_rate(run: &RunResult) -> Option<f64> {
    mean(&compared(run).map(|sample| sample.rate).collect::<Vec<_>>())
}

/// Mean flip rate over that of the reference, at the steps that both have.
fn mu(pairs: &[(&RunResult, &RunResult)]) -> Option<f64> {
    let (mut sum, mut of_reference) = (0.0, 0.0);
    for (run, reference) in pairs {
        let rates: BTreeMap<u32, f64> =
            reference.samples.iter().map(|sample| (sample.step, sample.rate)).collect();
        for sample in compared(run) {
            if let Some(rate) = rates.get(&sample.step) {
                sum += sample.rate;
                of_reference += rate;
            }
        }
    }
    Some(sum / of_reference).filter(|mu| mu.is_finite())
}

/// The arm with the lowest mean loss over the seeds that `counts` selects.
fn lowest<'a>(
    losses: &'a [(&Arm, Vec<f64>)],
    counts: impl Fn(usize) -> bool,
) -> Option<&'a (&'a Arm, Vec<f64>)> {
    let mean_of = |(_, by_seed): &(&Arm, Vec<f64>)| {
        let counted = by_seed.iter().enumerate().filter(|(at, _)| counts(*at));
        mean(&counted.map(|(_, loss)| *loss).collect::<Vec<_>>())
    };
    losses
        .iter()
        .filter(|arm| mean_of(arm).is_some())
        .min_by(|a, b| mean_of(a).partial_cmp(&mean_of(b)).expect("losses are finite"))
}

fn best(plan: &Plan, arms: &[Arm]) -> Option<Best> {
    let reference = plan.reference();
    let group = but_lambda(&plan.arms[reference]);
    let peers = plan.arms.iter().zip(arms).filter(|(planned, _)| but_lambda(planned) == group);
    let mut among: Vec<&Arm> = peers.map(|(_, arm)| arm).collect();
    if among.len() < 2 {
        among = arms.iter().collect();
    }
    let whole = |arm: &Arm| arm.val_loss.by_seed.iter().copied().collect::<Option<Vec<f64>>>();
    let losses: Vec<_> = among.iter().filter_map(|&arm| Some((arm, whole(arm)?))).collect();
    let (arm, _) = lowest(&losses, |_| true)?;
    let left_out = whole(&arms[reference]).and_then(|of_reference| {
        let difference =
            |(seed, loss): (usize, &f64)| Some(loss - lowest(&losses, |at| at != seed)?.1[seed]);
        let differences = of_reference.iter().enumerate().map(difference);
        let by_seed = differences.collect::<Option<Vec<_>>>()?;
        Some(LeftOut { mean: mean(&by_seed)?, by_seed })
    });
    Some(Best {
        arm: arm.name.clone(),
        among: among.iter().map(|arm| arm.name.clone()).collect(),
        left_out,
    })
}

/// The settings that decide an arm's results, except lambda.
fn but_lambda(planned: &PlannedArm) -> Settings {
    let mut settings = planned.config.decisive();
    settings.remove("method.lambda");
    settings
}

/// Trends over the groups of at least three arms that differ only in lambda.
fn trends(planned: &[PlannedArm], arms: &[Arm]) -> Vec<Trend> {
    const LEAST: usize = 3;
    let mut groups: BTreeMap<Settings, Vec<(f32, &Arm)>> = BTreeMap::new();
    for (planned, arm) in planned.iter().zip(arms) {
        groups.entry(but_lambda(planned)).or_default().push((planned.config.method.lambda, arm));
    }
    let trend = |mut group: Vec<(f32, &Arm)>| {
        group.sort_by(|a, b| a.0.total_cmp(&b.0));
        let correlation = |value: fn(&Arm) -> Option<f64>| {
            let pairs = group.iter().filter_map(|(x, arm)| Some((f64::from(*x), value(arm)?)));
            let (lambdas, values): (Vec<f64>, Vec<f64>) = pairs.unzip();
            Score::Spearman.of(&lambdas, &values).filter(|_| lambdas.len() >= LEAST)
        };
        Trend {
            flip_rate: correlation(|arm| arm.flip_rate),
            val_loss: correlation(|arm| arm.val_loss.mean),
            arms: group.iter().map(|(_, arm)| arm.name.clone()).collect(),
            lambdas: group.iter().map(|(lambda, _)| *lambda).collect(),
        }
    };
    groups.into_values().filter(|group| group.len() >= LEAST).map(trend).collect()
}

/// `study.csv`: a line for each finished run.
pub(super) fn csv(plan: &Plan, results: &[Option<RunResult>]) -> String {
    fn field(value: Option<impl ToString>) -> String {
        value.map_or_else(String::new, |value| value.to_string())
    }
    let mut text =
        "arm,seed,steps,val_loss,loss,flip_rate,mu,tokens_per_s,seconds,failed_at\n".to_owned();
    let reference = runs(plan, results, plan.reference());
    for (at, PlannedArm { name, .. }) in plan.arms.iter().enumerate() {
        let runs = runs(plan, results, at);
        for ((seed, run), reference) in plan.seeds.iter().zip(runs).zip(&reference) {
            let Some(run) = run else { continue };
            let RunResult { steps, tokens_per_s, seconds, val_loss, .. } = run;
            let val_loss = field(*val_loss);
            let loss = field(run.loss.filter(|loss| loss.is_finite()));
            let rate = field(flip_rate(run));
            let mu = field(reference.and_then(|reference| mu(&[(run, reference)])));
            let failed = field(run.failure.as_ref().map(|failure| failure.step));
            let _ = writeln!(
                text,
                "{name},{seed},{steps},{val_loss},{loss},{rate},{mu},{tokens_per_s:.0},\
                 {seconds:.1},{failed}"
            );
        }
    }
    text
}

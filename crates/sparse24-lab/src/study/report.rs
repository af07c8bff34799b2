//! What a study found. `study.json` holds it, and `study.csv` a line a run, with what clocks said.
//!
//! Invariant: a function of what the runs told, with no clock in it. Every figure is computed from
//! what is there; what is not known is absent or null.

use std::{collections::BTreeMap, fmt::Write};

use serde::Serialize;

use super::plan::{Plan, PlannedArm};
use crate::{
    series::{self, Build, Failure, Sample, Told},
    statistics::{Interval, deviation, mean, spearman},
};
use sparse24_run::{checkpoint::DatasetIdentity, config::dotted};
use sparse24_train::method::PhaseKind;

/// `study.json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// 1.
    pub format: u32,
    /// The arm that others are compared with.
    pub reference: String,
    /// Of weights and data.
    pub seeds: Vec<u64>,
    /// Of the base.
    pub steps: u32,
    /// Runs that are done.
    pub done: usize,
    /// Runs in all.
    pub of: usize,
    /// In the study's order.
    pub arms: Vec<Arm>,
    /// None before all runs are done.
    pub best: Option<Best>,
    /// Of arms that differ in lambda alone.
    pub trends: Vec<Trend>,
    /// The data.
    pub data: Option<DatasetIdentity>,
    /// What ran.
    pub builds: Vec<Build>,
}

/// What was found of one arm.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Arm {
    /// Its name.
    pub name: String,
    /// What it sets.
    pub settings: BTreeMap<String, String>,
    /// At the end.
    pub val_loss: ValLoss,
    /// To the reference, over the seeds that both have; none for the reference itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub difference: Option<Interval>,
    /// Mean over samples and seeds: of sparse phases, where there are any.
    pub flip_rate: Option<f64>,
    /// That over the reference's at the same steps and seeds.
    pub mu: Option<f64>,
    /// The flip rate of each seed.
    pub by_seed: Vec<Option<f64>>,
    /// Runs that ended early.
    pub failures: Vec<Failed>,
}

/// The loss on the held-out split after the last step, nats a token.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ValLoss {
    /// Over the seeds that have one.
    pub mean: Option<f64>,
    /// The standard deviation of a seed (n-1).
    pub deviation: Option<f64>,
    /// In the order of the seeds.
    pub by_seed: Vec<Option<f64>>,
}

/// A run that ended at a loss that is not finite.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Failed {
    /// Whose run.
    pub seed: u64,
    /// Where and why.
    #[serde(flatten)]
    pub failure: Failure,
}

/// The reference against the best.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Best {
    /// The arm of the lowest mean loss, of those that have a loss for each seed.
    pub arm: String,
    /// What it is the best of: the arms that differ from the reference in lambda alone, and it;
    /// all, where there are none.
    pub among: Vec<String>,
    /// None where the reference lacks a loss.
    pub left_out: Option<LeftOut>,
}

/// The reference's loss minus that of the arm that is best on the other seeds, seed by seed: the
/// choice is not made on what it is judged by.
///
/// No interval: the choices rest on nearly the same seeds, so the differences are not independent.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LeftOut {
    /// Over the seeds.
    pub mean: f64,
    /// In the order of the seeds.
    pub by_seed: Vec<f64>,
}

/// How arms that differ in lambda alone go with it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Trend {
    /// By lambda.
    pub arms: Vec<String>,
    /// Theirs.
    pub lambdas: Vec<f32>,
    /// Spearman's rank correlation of lambda and the mean flip rate.
    pub flip_rate: Option<f64>,
    /// Of lambda and the mean loss.
    pub val_loss: Option<f64>,
}

impl Report {
    /// What the runs, seed by seed in the order of the arms, have told so far.
    pub(super) fn of(plan: &Plan, told: &[Option<Told>]) -> Self {
        let reference = runs(
            plan,
            told,
            plan.arms.iter().position(|arm| arm.name == plan.reference).expect("it was checked"),
        );
        let arm = |(at, planned): (usize, &PlannedArm)| {
            let runs = runs(plan, told, at);
            let by_seed: Vec<_> =
                runs.iter().map(|told| told.and_then(|told| told.val_loss)).collect();
            let losses: Vec<f64> = by_seed.iter().copied().flatten().collect();
            let differences = runs
                .iter()
                .zip(&reference)
                .filter_map(|(told, reference)| Some((*told)?.val_loss? - (*reference)?.val_loss?));
            let is_reference = planned.name == plan.reference;
            let rates: Vec<f64> = runs
                .iter()
                .flatten()
                .flat_map(|told| compared(told))
                .map(|sample| sample.rate)
                .collect();
            let pairs: Vec<_> = runs
                .iter()
                .zip(&reference)
                .filter_map(|(told, reference)| Some(((*told)?, (*reference)?)))
                .collect();
            let failed = plan.seeds.iter().zip(&runs).filter_map(|(&seed, told)| {
                Some(Failed { seed, failure: (*told)?.failure.clone()? })
            });
            Arm {
                name: planned.name.clone(),
                settings: dotted(planned.settings.clone()),
                difference: if is_reference {
                    None
                } else {
                    Interval::of(&differences.collect::<Vec<_>>())
                },
                val_loss: ValLoss { mean: mean(&losses), deviation: deviation(&losses), by_seed },
                flip_rate: mean(&rates),
                mu: mu(&pairs),
                by_seed: runs.iter().map(|told| flip_rate((*told)?)).collect(),
                failures: failed.collect(),
            }
        };
        let arms: Vec<_> = plan.arms.iter().enumerate().map(arm).collect();
        let done = told.iter().flatten().count();
        Self {
            format: 1,
            reference: plan.reference.clone(),
            seeds: plan.seeds.clone(),
            steps: plan.base.steps,
            done,
            of: told.len(),
            best: if done == told.len() { best(plan, &arms) } else { None },
            trends: trends(&plan.arms, &arms),
            arms,
            data: plan.data,
            builds: series::builds(told),
        }
    }
}

/// What the runs of an arm told, in the order of the seeds.
fn runs<'a>(plan: &Plan, told: &'a [Option<Told>], arm: usize) -> Vec<Option<&'a Told>> {
    told.chunks(plan.arms.len()).map(|of_seed| of_seed[arm].as_ref()).collect()
}

/// The samples by which arms are compared: those of sparse phases; all, where there is none.
fn compared(told: &Told) -> impl Iterator<Item = &Sample> {
    let is_sparse = |sample: &Sample| sample.phase == PhaseKind::Sparse;
    let has_sparse = told.samples.iter().any(is_sparse);
    told.samples.iter().filter(move |sample| !has_sparse || is_sparse(sample))
}

fn flip_rate(told: &Told) -> Option<f64> {
    mean(&compared(told).map(|sample| sample.rate).collect::<Vec<_>>())
}

/// Mean flip rate over that of the reference, at the steps that both have.
fn mu(pairs: &[(&Told, &Told)]) -> Option<f64> {
    let (mut sum, mut of_reference) = (0.0, 0.0);
    for (told, reference) in pairs {
        let rates: BTreeMap<u32, f64> =
            reference.samples.iter().map(|sample| (sample.step, sample.rate)).collect();
        for (sample, rate) in
            compared(told).filter_map(|sample| Some((sample, rates.get(&sample.step)?)))
        {
            sum += sample.rate;
            of_reference += rate;
        }
    }
    Some(sum / of_reference).filter(|mu| mu.is_finite())
}

/// The arm of the lowest mean loss over these seeds.
fn lowest<'a>(
    losses: &'a [(&Arm, Vec<f64>)],
    counts: impl Fn(usize) -> bool,
) -> Option<&'a (&'a Arm, Vec<f64>)> {
    let mean_of = |(_, by_seed): &(&Arm, Vec<f64>)| {
        mean(
            &by_seed
                .iter()
                .enumerate()
                .filter(|(at, _)| counts(*at))
                .map(|(_, loss)| *loss)
                .collect::<Vec<_>>(),
        )
    };
    losses
        .iter()
        .filter(|arm| mean_of(arm).is_some())
        .min_by(|a, b| mean_of(a).partial_cmp(&mean_of(b)).expect("losses are finite"))
}

fn best(plan: &Plan, arms: &[Arm]) -> Option<Best> {
    let reference = plan.arms.iter().position(|arm| arm.name == plan.reference)?;
    let group = but_lambda(&plan.arms[reference]);
    let mut among: Vec<&Arm> = plan
        .arms
        .iter()
        .zip(arms)
        .filter(|(planned, _)| but_lambda(planned) == group)
        .map(|(_, arm)| arm)
        .collect();
    if among.len() < 2 {
        among = arms.iter().collect();
    }
    let whole = |arm: &Arm| arm.val_loss.by_seed.iter().copied().collect::<Option<Vec<f64>>>();
    let losses: Vec<_> = among.iter().filter_map(|&arm| Some((arm, whole(arm)?))).collect();
    let (arm, _) = lowest(&losses, |_| true)?;
    let left_out = whole(&arms[reference]).and_then(|of_reference| {
        let difference =
            |(seed, loss): (usize, &f64)| Some(loss - lowest(&losses, |at| at != seed)?.1[seed]);
        let by_seed =
            of_reference.iter().enumerate().map(difference).collect::<Option<Vec<_>>>()?;
        Some(LeftOut { mean: mean(&by_seed)?, by_seed })
    });
    Some(Best {
        arm: arm.name.clone(),
        among: among.iter().map(|arm| arm.name.clone()).collect(),
        left_out,
    })
}

/// What decides an arm's bits, but lambda.
fn but_lambda(planned: &PlannedArm) -> BTreeMap<String, String> {
    let mut settings = planned.config.decisive();
    settings.remove("method.lambda");
    settings
}

/// Groups of at least three arms of different lambdas, all else equal.
fn trends(planned: &[PlannedArm], arms: &[Arm]) -> Vec<Trend> {
    let mut groups: BTreeMap<BTreeMap<String, String>, Vec<(f32, &Arm)>> = BTreeMap::new();
    for (planned, arm) in planned.iter().zip(arms) {
        groups.entry(but_lambda(planned)).or_default().push((planned.config.method.lambda, arm));
    }
    let trend = |mut group: Vec<(f32, &Arm)>| {
        group.sort_by(|a, b| a.0.total_cmp(&b.0));
        let correlation = |of: &dyn Fn(&Arm) -> Option<f64>| {
            let (lambdas, values): (Vec<f64>, Vec<f64>) = group
                .iter()
                .filter_map(|(lambda, arm)| Some((f64::from(*lambda), of(arm)?)))
                .unzip();
            if lambdas.len() < LEAST { None } else { spearman(&lambdas, &values) }
        };
        Trend {
            flip_rate: correlation(&|arm| arm.flip_rate),
            val_loss: correlation(&|arm| arm.val_loss.mean),
            arms: group.iter().map(|(_, arm)| arm.name.clone()).collect(),
            lambdas: group.iter().map(|(lambda, _)| *lambda).collect(),
        }
    };
    const LEAST: usize = 3;
    groups.into_values().filter(|group| group.len() >= LEAST).map(trend).collect()
}

/// `study.csv`: a line a finished run.
pub(super) fn lines(plan: &Plan, told: &[Option<Told>]) -> String {
    let mut text =
        "arm,seed,steps,val_loss,loss,flip_rate,mu,tokens_per_s,seconds,failed_at\n".to_owned();
    let field = |value: Option<f64>| value.map_or_else(String::new, |value| value.to_string());
    let reference = runs(
        plan,
        told,
        plan.arms.iter().position(|arm| arm.name == plan.reference).expect("it was checked"),
    );
    for (at, arm) in plan.arms.iter().enumerate() {
        for ((seed, told), reference) in plan.seeds.iter().zip(runs(plan, told, at)).zip(&reference)
        {
            let Some(told) = told else { continue };
            let loss = told
                .loss
                .filter(|loss| loss.is_finite())
                .map_or_else(String::new, |loss| loss.to_string());
            let mu = reference.and_then(|reference| mu(&[(told, reference)]));
            let failed =
                told.failure.as_ref().map_or_else(String::new, |failure| failure.step.to_string());
            let (val_loss, flip_rate, mu) =
                (field(told.val_loss), field(flip_rate(told)), field(mu));
            let Told { steps, tokens_per_s, seconds, .. } = told;
            let _ = writeln!(
                text,
                "{},{seed},{steps},{val_loss},{loss},{flip_rate},{mu},{tokens_per_s:.0},{seconds:.1},{failed}",
                arm.name
            );
        }
    }
    text
}

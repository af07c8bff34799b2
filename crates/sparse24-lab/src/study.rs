//! A study: arms, which are settings, times seeds, compared seed by seed.
//!
//! Invariant: with the same seed, all arms start with the same weights (where their shapes agree)
//! and see the same data in the same order, so differences are paired. Everything is checked before
//! anything runs.

mod plan;
mod results;

use std::path::Path;

use sparse24_run::{
    Error,
    run::{of_data, open_data},
};

pub use plan::{Overrides, Plan};
pub use results::{Arm, Best, LeftOut, StudyResults, Trend, ValLoss};

use crate::runs::{Folder, Keep, Progress, RunResult, RunSet, Watcher, write_if_new, write_json};

/// A study in its folder.
pub struct Study {
    plan: Plan,
    runs: RunSet,
}

impl Study {
    /// Starts or continues a study, without training yet.
    ///
    /// # Errors
    /// [`Error::File`] for a folder that holds something else, or a study with other settings;
    /// [`Error::Io`], also for one in use; errors from opening the dataset.
    pub fn open(mut plan: Plan, path: &Path, keep: Keep) -> Result<Self, Error> {
        plan.data = Some(of_data(&open_data(&plan.base)?));
        let read = |file: &Path| Ok(Plan::read_resolved(file)?.identity());
        let folder = Folder::open(path, "study.toml", plan.to_toml(), &plan.identity(), read)?;
        Ok(Self { runs: RunSet::open(folder, plan.members(), keep)?, plan })
    }

    /// The runs of the study.
    #[must_use]
    pub fn runs(&self) -> &RunSet {
        &self.runs
    }

    /// The results so far.
    #[must_use]
    pub fn results(&self) -> StudyResults {
        StudyResults::of(&self.plan, self.runs.results())
    }

    /// Trains the runs that are not done. Writes `study.json` and `study.csv` before the first run
    /// and after each; after each, also passes the run's index and the results so far to `done`.
    ///
    /// # Errors
    /// Errors from [`RunSet::train`].
    pub fn train(
        &mut self,
        watchers: Vec<Box<dyn Watcher>>,
        done: &(dyn Fn(usize, &StudyResults) + Sync),
    ) -> Result<Progress, Error> {
        let (plan, path) = (&self.plan, self.runs.path().to_owned());
        let after = |member: Option<usize>, results: &[Option<RunResult>]| {
            let results = write(plan, &path, results)?;
            member.into_iter().for_each(|member| done(member, &results));
            Ok(())
        };
        self.runs.train(watchers, &after)
    }
}

fn write(plan: &Plan, folder: &Path, runs: &[Option<RunResult>]) -> Result<StudyResults, Error> {
    let results = StudyResults::of(plan, runs);
    write_json(&folder.join("study.json"), &results)?;
    write_if_new(&folder.join("study.csv"), results::csv(plan, runs).as_bytes())?;
    Ok(results)
}

#[cfg(test)]
mod tests;

//! A study: arms, which are settings, times seeds, compared seed by seed.
//!
//! Invariant: within a seed all arms begin with the same weights, where their shapes agree, and see
//! the same data in the same order; so differences are paired. Everything is checked before
//! anything runs. Deliberately absent: terminals, figures.

mod plan;
mod report;

use std::path::Path;

pub use plan::{Overrides, Plan};
pub use report::{Arm, Best, Failed, LeftOut, Report, Trend, ValLoss};

use crate::series::{Description, Folder, Keep, Progress, Series, Told, Watcher};
use sparse24_run::{
    Error, disk,
    run::{of_dataset, open_dataset},
};

const DESCRIPTION: &str = "study.toml";
const RESULTS: &str = "study.json";
const LINES: &str = "study.csv";

/// A study in its folder.
pub struct Study {
    plan: Plan,
    series: Series,
}

impl Study {
    /// Begins or continues a study; nothing is trained yet.
    ///
    /// # Errors
    /// [`Error::File`] for a folder that is in use, holds something else, or another study, with
    /// the difference; those of the data.
    pub fn open(mut plan: Plan, path: &Path, keep: Keep) -> Result<Self, Error> {
        plan.data = Some(of_dataset(&open_dataset(&plan.base)?));
        let parse = |file: &Path| Ok(Plan::read_resolved(file)?.decides());
        let description = Description {
            file: DESCRIPTION,
            text: &plan.to_toml(),
            decides: plan.decides(),
            lists: &["arms", "seeds"],
            parse: &parse,
        };
        let folder = Folder::open(path, &description)?;
        let study = Self { series: Series::open(folder, plan.members(), keep)?, plan };
        write(&study.plan, study.series.path(), study.series.told())?;
        Ok(study)
    }

    /// The runs.
    #[must_use]
    pub fn series(&self) -> &Series {
        &self.series
    }

    /// What is known so far.
    #[must_use]
    pub fn report(&self) -> Report {
        Report::of(&self.plan, self.series.told())
    }

    /// Trains what is not done; after each run `study.json` and `study.csv` are written, and `done`
    /// gets its index and what is known then.
    ///
    /// # Errors
    /// As [`Series::train`].
    pub fn train(
        &mut self,
        watchers: Vec<Box<dyn Watcher>>,
        done: &(dyn Fn(usize, &Report) + Sync),
    ) -> Result<Progress, Error> {
        let (plan, path) = (&self.plan, self.series.path().to_owned());
        let after = |member: usize, told: &[Option<Told>]| {
            done(member, &write(plan, &path, told)?);
            Ok(())
        };
        self.series.train(watchers, &after)
    }
}

fn write(plan: &Plan, folder: &Path, told: &[Option<Told>]) -> Result<Report, Error> {
    let report = Report::of(plan, told);
    let mut text = serde_json::to_string_pretty(&report).expect("numbers and strings are JSON");
    text.push('\n');
    for (name, text) in [(RESULTS, text), (LINES, report::lines(plan, told))] {
        let path = folder.join(name);
        // Nothing is written where nothing is new.
        if !disk::read_small(&path, text.len() as u64).is_ok_and(|found| found == text.as_bytes()) {
            disk::write_atomically(&path, text.as_bytes())?;
        }
    }
    Ok(report)
}

#[cfg(test)]
mod tests;

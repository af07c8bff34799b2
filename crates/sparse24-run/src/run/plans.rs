//! `plans.json`: timed choices of a device, an object of strings.
//!
//! Invariant: the choices of a step are on disk before its metrics, so a resume replays them or
//! repeats the step.

use std::path::Path;

use super::directory::{CONFIG, PLANS};
use crate::{Error, Result, disk, json};
use sparse24_train::{
    backend::{PLANNED_ON, Plans},
    trainer::Trainer,
};

pub(super) fn write(path: &Path, plans: &Plans) -> Result {
    disk::write_atomically(path, &json::pretty(plans))
}

pub(super) fn read(path: &Path) -> Result<Plans> {
    let text = disk::read_small(path, 16 << 20)
        .map_err(|e| e.expecting("a run directory or a plans.json"))?;
    json::parse(&text, json::VALUES)
        .map_err(|e| Error::file(path, format!("not an object of plans: {e}")))
}

/// Replays the plans of a file, or of a run directory.
///
/// # Errors
/// [`Error::File`] names the file, and the plan that this device or this build does not have.
pub(super) fn use_file(trainer: &mut Trainer, path: &Path) -> Result {
    // A run may come from others.
    let is_folder = disk::is_folder(path)?;
    let _confined = is_folder.then(|| disk::confine(path)).transpose()?;
    let within = path.join(PLANS);
    let file = if is_folder { &within } else { path };
    if path.join(CONFIG).is_file() && !disk::exists(file)? {
        bail!(path, "is a run without plans.json: nothing was timed; leave out --plans");
    }
    let plans = read(file)?;
    trainer.use_plans(&plans).map_err(|error| of_file(error.into(), file))
}

/// Replays a run's own plans; returns a notice if they were timed on another device.
pub(super) fn use_own(trainer: &mut Trainer, plans: &Plans, file: &Path) -> Result<Option<String>> {
    let here = trainer.backend().plans();
    match (plans.get(PLANNED_ON), here.get(PLANNED_ON)) {
        (Some(then), Some(now)) if then != now => Ok(Some(format!(
            "the run's plans were timed on {then}, this is {now}: they are timed again, and the \
                bits may differ from those of an uninterrupted run"
        ))),
        _ => trainer.use_plans(plans).map(|()| None).map_err(|error| of_file(error.into(), file)),
    }
}

fn of_file(error: Error, file: &Path) -> Error {
    match error {
        Error::Train(sparse24_train::Error::Plan { ref key, .. }) => {
            let advice = if key == PLANNED_ON {
                "do without them"
            } else {
                "remove the entry to time it again, which may change bits"
            };
            Error::file(file, format!("{error}; {advice}"))
        }
        other => other,
    }
}

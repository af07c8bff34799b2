//! The directory of a run's checkpoints: saving, finding and removing them.
//!
//! Invariant: `step-NNNNNNNN` only appears by renaming a complete, synced directory, and is renamed
//! away before anything in it is removed. `.tmp-*` is unfinished or being removed; `.old-step-N` is
//! a checkpoint of the same step, set aside while its successor takes the name. The run directory's
//! lock keeps other processes out, so what [`recover`] finds was left by a dead one.

use std::{
    ffi::OsString,
    io::ErrorKind,
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

use super::{Checkpoint, State, content::read_state, manifest::Manifest};
use crate::{Error, Result, disk};

const FINAL: &str = "step-";
const UNFINISHED: &str = ".tmp-";
const PREDECESSOR: &str = ".old-";
const DAMAGED: &str = "damaged-";

/// Saves a checkpoint as `step-NNNNNNNN` in `directory`, which is created if it is missing; its
/// parent must exist. Returns the path.
///
/// A checkpoint of the same step is replaced. Whatever happens, including the death of the process,
/// every good checkpoint stays good until the new one is complete; an error leaves nothing
/// unfinished behind.
///
/// # Errors
/// [`Error::File`] for a checkpoint that [`load`](super::load) would refuse: a length that is not
/// that of its shape, a name used twice, too long or with control characters, a moment or a mask
/// without its weight, too many tensors or settings. [`Error::NonFiniteCheckpoint`] names the first
/// value that is NaN or infinite; [`Error::Room`] if the disk has no space for the tensors. All are
/// found before anything is written. [`Error::Io`] if the disk is full or fails.
pub fn save(directory: &Path, checkpoint: &Checkpoint) -> Result<PathBuf> {
    let step = checkpoint.state.step;
    let name = directory_name(step);
    let target = directory.join(&name);
    checkpoint.check(&target).map_err(|error| error.advising("; nothing was written"))?;
    if !disk::exists(directory)? {
        disk::create_directory(directory)?;
        disk::sync_directory(disk::parent(directory))?;
    }
    recover(directory)?;
    disk::check_room(directory, checkpoint.bytes(), || {
        format!("the tensors of the checkpoint of step {step}")
    })?;
    let unfinished = directory.join(format!("{UNFINISHED}{name}"));
    let placed =
        disk::create_directory(&unfinished).and_then(|()| checkpoint.write(&unfinished)).and_then(
            |()| place(&unfinished, &target, &directory.join(format!("{PREDECESSOR}{name}"))),
        );
    if let Err(error) = placed {
        // The first error counts; the next `recover` removes what this one cannot.
        let _ = recover(directory);
        return Err(error);
    }
    Ok(target)
}

/// Gives a complete directory its final name.
fn place(complete: &Path, target: &Path, predecessor: &Path) -> Result {
    let replaces = disk::exists(target)?;
    if replaces {
        disk::rename(target, predecessor)?;
    }
    disk::rename(complete, target)?;
    disk::sync_directory(disk::parent(target))?;
    if replaces { disk::remove_directory(predecessor) } else { Ok(()) }
}

/// Removes what a dead process left unfinished, and gives a predecessor its name back if its
/// successor never took it. A directory that does not exist needs no recovery.
///
/// [`save`] does this first; call it before [`latest`] when opening a run to resume it.
///
/// # Errors
/// [`Error::Io`].
pub fn recover(directory: &Path) -> Result {
    for name in names(directory)? {
        let path = directory.join(&name);
        if name.strip_prefix(UNFINISHED).is_some_and(|rest| rest.starts_with(FINAL)) {
            disk::remove_directory(&path)?;
        } else if let Some(step) =
            name.strip_prefix(PREDECESSOR).filter(|rest| step_of_name(rest).is_some())
        {
            let target = directory.join(step);
            if disk::exists(&target)? {
                disk::remove_directory(&path)?
            } else {
                disk::rename(&path, &target)?
            }
        }
    }
    Ok(())
}

/// Result of [`latest`].
#[derive(Debug)]
pub struct Latest {
    /// The newest checkpoint that verifies.
    pub checkpoint: Option<PathBuf>,
    /// Newer ones that do not verify, newest first, with the reason.
    pub refused: Vec<(PathBuf, Error)>,
}

/// Finds the newest checkpoint in `directory` that verifies; damaged ones are skipped and listed.
///
/// # Errors
/// [`Error::Io`] if the directory cannot be listed, or the operating system refuses to read a
/// checkpoint, which may be intact; a directory that does not exist holds none.
pub fn latest(directory: &Path) -> Result<Latest> {
    let mut refused = Vec::new();
    for (step, path) in checkpoints(directory)?.into_iter().rev() {
        match proved(&path, step) {
            Ok(()) => return Ok(Latest { checkpoint: Some(path), refused }),
            Err(error) if is_refusal(&error) => return Err(error),
            Err(error) => refused.push((path, error)),
        }
    }
    Ok(Latest { checkpoint: None, refused })
}

/// Whether the operating system may grant this later.
fn is_refusal(error: &Error) -> bool {
    let Error::Io { source, .. } = error else { return false };
    let is_there = !matches!(source.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory);
    source.raw_os_error().is_some() && is_there
}

/// Verifies a checkpoint and that its step is that of its name.
fn proved(path: &Path, step: u32) -> Result {
    let manifest = Manifest::open(path)?;
    manifest.prove(path)?;
    if manifest.step == step {
        return Ok(());
    }
    let problem = format!("is a checkpoint of step {}, not of the step in its name", manifest.step);
    Err(Error::file(path, problem))
}

/// Which checkpoints to keep.
#[derive(Debug, Clone)]
pub struct Retention {
    /// Number of the newest.
    pub last: NonZeroUsize,
    /// Checkpoints of multiples of this step, except 0; 0 keeps none.
    pub every: u32,
    /// Checkpoints of these steps, such as the switch from sparse to dense.
    pub always: Vec<u32>,
}

impl Retention {
    fn keeps(&self, step: u32) -> bool {
        self.always.contains(&step) || step > 0 && self.every > 0 && step.is_multiple_of(self.every)
    }
}

/// Removes the checkpoints that need not be kept, after reading the newest back and verifying it;
/// returns the removed steps.
///
/// # Errors
/// The newest one's error if it does not verify: then nothing is removed. [`Error::Io`].
pub fn retain(directory: &Path, retention: &Retention) -> Result<Vec<u32>> {
    let mut all = checkpoints(directory)?;
    let kept = all.split_off(all.len().saturating_sub(retention.last.get()));
    all.retain(|&(step, _)| !retention.keeps(step));
    if let Some((step, newest)) = kept.last().filter(|_| !all.is_empty()) {
        proved(newest, *step)?;
    }
    let doomed = all.into_iter();
    doomed
        .map(|(step, path)| {
            // Rename first: a half-removed checkpoint must not look like a damaged one.
            let aside = directory.join(format!("{UNFINISHED}{}", directory_name(step)));
            disk::rename(&path, &aside)?;
            disk::remove_directory(&aside)?;
            Ok(step)
        })
        .collect()
}

/// Number of checkpoints, verified or not.
///
/// # Errors
/// [`Error::Io`] if the directory cannot be listed; one that does not exist holds none.
pub fn count(directory: &Path) -> Result<usize> {
    Ok(checkpoints(directory)?.len())
}

/// The states of the checkpoints, by ascending step; those that cannot be read are left out.
///
/// # Errors
/// [`Error::Io`] if the directory cannot be listed; one that does not exist holds none.
pub fn states(directory: &Path) -> Result<Vec<State>> {
    let all = checkpoints(directory)?.into_iter();
    Ok(all
        .filter_map(|(step, path)| read_state(&path).ok().filter(|state| state.step == step))
        .collect())
}

/// The checkpoint of this step, not verified, if there is one.
///
/// # Errors
/// [`Error::Io`] if the path cannot be accessed.
pub fn named(directory: &Path, step: u32) -> Result<Option<PathBuf>> {
    let path = directory.join(directory_name(step));
    Ok(disk::exists(&path)?.then_some(path))
}

/// Renames the checkpoints of steps beyond `step` to `damaged-step-N.1`, or `.2` where that is
/// taken; returns the steps.
///
/// A run resumed from an older checkpoint must not take the later ones for its own. They may be
/// good where only the disk or the permissions are not, so none is removed.
///
/// # Errors
/// [`Error::Io`].
pub fn set_aside_after(directory: &Path, step: u32) -> Result<Vec<u32>> {
    let later = checkpoints(directory)?.into_iter().filter(|&(later, _)| later > step);
    later
        .map(|(step, path)| {
            let name =
                |number: u32| directory.join(format!("{DAMAGED}{}.{number}", directory_name(step)));
            let aside = disk::unused((1..).map(name))?;
            disk::rename(&path, &aside)?;
            Ok(step)
        })
        .collect()
}

/// The step that a checkpoint directory is named after.
#[must_use]
pub fn step_of(checkpoint: &Path) -> Option<u32> {
    step_of_name(checkpoint.file_name()?.to_str()?)
}

fn step_of_name(name: &str) -> Option<u32> {
    let step = name.strip_prefix(FINAL)?.parse().ok()?;
    (directory_name(step) == name).then_some(step)
}

fn directory_name(step: u32) -> String {
    format!("{FINAL}{step:08}")
}

/// Checkpoints by ascending step.
fn checkpoints(directory: &Path) -> Result<Vec<(u32, PathBuf)>> {
    let mut found: Vec<_> = names(directory)?
        .into_iter()
        .filter_map(|name| Some((step_of_name(&name)?, directory.join(name))))
        .collect();
    found.sort_unstable();
    Ok(found)
}

/// The names in a directory; those that are not UTF-8 are not ours.
fn names(directory: &Path) -> Result<Vec<String>> {
    Ok(disk::names(directory)?.into_iter().flat_map(OsString::into_string).collect())
}

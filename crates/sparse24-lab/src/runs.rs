//! Several runs side by side in one folder, each of which is started, resumed or only read.
//! Searches and studies are sets of runs.
//!
//! Invariant: the result of a run, and its last checkpoint if checkpoints are kept, depends on its
//! member alone, so a set of runs that was interrupted or killed anywhere ends like one that was
//! not. The folder holds `lock`, the description that a restart compares, and `ARM/seed-N/` with
//! ordinary run directories.

mod folder;
mod needs;
mod run_result;

use crate::Result;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

pub(crate) use folder::{Folder, Identity, check_name, write_if_new, write_json};
pub use folder::{Settings, difference};
pub use needs::check_needs;
pub use run_result::{Build, Failed, Failure, RunResult, Sample};
pub(crate) use run_result::{builds, tokens_of};

use sparse24_run::{
    Error, checkpoint,
    config::Config,
    disk, machine,
    run::{
        Asked, Given, Needs, Observer, Part, Resume, Run, RunData, RunDirectory, StepMetrics,
        check_tensors, open_data, run_config,
    },
};
use sparse24_train::group::Solo;

/// One run of a set.
#[derive(Debug, Clone, PartialEq)]
pub struct Member {
    /// Name of its arm, and of a folder.
    pub arm: String,
    /// The configuration; the seed is the name of the folder.
    pub config: Config,
    /// The step after which it ends, at most `config.steps`; the schedule is that of the whole run.
    pub until: u32,
}

/// Called with the results of all runs: with `None` before the first run, and with the index of
/// each run that finished.
pub type Done<'a> = dyn Fn(Option<usize>, &[Option<RunResult>]) -> Result + Sync + 'a;

impl Member {
    /// The run directory in a folder.
    #[must_use]
    pub fn path(&self, folder: &Path) -> PathBuf {
        folder.join(&self.arm).join(format!("seed-{}", self.config.seed))
    }
}

/// Watches one run after the other, in its own thread.
pub trait Watcher: Observer + Send {
    /// The flag for [`Run::interrupt_on`].
    fn flag(&self) -> Arc<AtomicBool>;
    /// A run starts, or resumes after a step.
    fn started(&mut self, member: &Member, after: u32);
}

/// The files of a finished run that are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// All files.
    Checkpoints,
    /// All files except checkpoints.
    Results,
}

/// Whether all runs are done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// All runs are done.
    Finished,
    /// A watcher asked to stop; runs in progress were saved.
    Stopped,
}

/// Runs in a folder, with the results of those that are done.
pub struct RunSet {
    folder: Folder,
    members: Vec<Member>,
    results: Vec<Option<RunResult>>,
    keep: Keep,
}

impl RunSet {
    /// Reads the results of the finished runs, without training.
    ///
    /// # Errors
    /// [`Error::File`] for a run directory with another configuration or damaged metrics;
    /// [`Error::Io`].
    pub(crate) fn open(folder: Folder, members: Vec<Member>, keep: Keep) -> Result<Self> {
        let read = |member: &Member| read(&member.path(folder.path()), member, keep);
        let results = members.iter().map(read).collect::<Result<_, _>>()?;
        Ok(Self { folder, members, results, keep })
    }

    /// Path of the folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The runs, in the order in which they are started.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// The results of the runs, in the same order; none of those that are not done.
    #[must_use]
    pub fn results(&self) -> &[Option<RunResult>] {
        &self.results
    }

    /// Trains the runs that are not done, as many at a time as there are watchers, which divide the
    /// threads.
    ///
    /// # Errors
    /// [`Error::Setting`] and [`Error::Room`] for a set that does not fit on this machine, before
    /// anything runs; the first error of `done` or of a run, after which the other runs stop. A
    /// loss that is not finite is a result, not an error.
    pub fn train(&mut self, watchers: Vec<Box<dyn Watcher>>, done: &Done<'_>) -> Result<Progress> {
        let waiting: Vec<usize> =
            (0..self.members.len()).filter(|&member| self.results[member].is_none()).collect();
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let jobs = watchers.len().min(waiting.len()).max(1);
        let (folder, members, keep) = (self.folder.path(), &self.members, self.keep);
        let (next, halted) = (AtomicUsize::new(0), AtomicBool::new(false));
        let opened = Mutex::new(None);
        waiting.iter().try_for_each(|&at| check_place(&members[at].path(folder), &members[at]))?;
        let needs = needs_of(folder, waiting.iter().map(|&at| &members[at]), &opened)?;
        check_needs(folder, &needs, jobs, keep, machine::memory().as_ref())?;
        self.folder.describe()?;
        done(None, &self.results)?;
        let shared = Mutex::new((&mut self.results, None::<Error>));
        let work = |mut watcher: Box<dyn Watcher>| {
            while let Some(&at) = waiting.get(next.fetch_add(1, Ordering::Relaxed)) {
                if halted.load(Ordering::SeqCst) {
                    return;
                }
                let member = &members[at];
                let all = match member.config.backend.threads {
                    0 => cores,
                    threads => threads,
                };
                let trained = sparse24_run::processor::on_threads((all / jobs).max(1), || {
                    train(folder, member, keep, &mut *watcher, (&halted, &opened))
                })
                .unwrap_or_else(|error| {
                    Err(Error::setting("backend.threads", format!("{error}; ask for fewer")))
                });
                let mut shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
                let ended = trained.and_then(|result| {
                    let Some(result) = result else { return Ok(()) };
                    shared.0[at] = Some(result);
                    done(Some(at), shared.0)
                });
                if let Err(error) = ended {
                    halted.store(true, Ordering::SeqCst);
                    shared.1.get_or_insert(error);
                }
            }
        };
        thread::scope(|scope| {
            watchers.into_iter().take(jobs).for_each(|watcher| drop(scope.spawn(|| work(watcher))))
        });
        match shared.into_inner().unwrap_or_else(PoisonError::into_inner).1 {
            Some(error) => Err(error),
            None if self.results.iter().all(Option::is_some) => Ok(Progress::Finished),
            None => Ok(Progress::Stopped),
        }
    }
}

const CHECKPOINTS: &str = "checkpoints";

fn read(path: &Path, member: &Member, keep: Keep) -> Result<Option<RunResult>> {
    if !disk::exists(&path.join("config.toml"))? {
        return Ok(None);
    }
    check_config(path, &run_config(path)?, &member.config)?;
    let result = run_result::read(path, member)?;
    let checkpoints = path.join(CHECKPOINTS);
    match (&result, keep) {
        (Some(_), Keep::Results) => discard(&checkpoints)?,
        // It was killed between its last line of metrics and its last checkpoint. Without the
        // folder, only its results were kept or copied here.
        (Some(RunResult { failure: None, .. }), Keep::Checkpoints)
            if disk::exists(&checkpoints)?
                && checkpoint::named(&checkpoints, member.until)?.is_none() =>
        {
            return Ok(None);
        }
        _ => {}
    }
    Ok(result)
}

/// Removes checkpoints; if killed at any point, the folder is complete or gone.
fn discard(checkpoints: &Path) -> Result {
    let aside = disk::aside(checkpoints);
    if disk::exists(&aside)? {
        disk::remove_directory(&aside)?;
    }
    if disk::exists(checkpoints)? {
        disk::rename(checkpoints, &aside)?;
        disk::remove_directory(&aside)?;
    }
    Ok(())
}

/// Refuses a run that names other paths, or has other settings.
///
/// # Errors
/// [`Error::File`].
pub fn check_same(path: &Path, found: &Config, wanted: &Config) -> Result {
    check_paths(path, found, wanted)?;
    check_config(path, found, wanted)
}

fn check_config(path: &Path, found: &Config, wanted: &Config) -> Result {
    let (found, wanted) = (found.decisive(), wanted.decisive());
    let Some((key, values)) = difference(&found, &wanted) else { return Ok(()) };
    let [found, wanted] = values.map(|value| value.unwrap_or("nothing"));
    let problem = format!(
        "is a run with {key} = {found}, expected {wanted}; remove it, or name another folder"
    );
    Err(Error::file(path, problem))
}

/// The needs of members, and the checkpoints that each has. Members of an arm need the same.
/// An arm too large for its device is refused.
fn needs_of<'a>(
    folder: &Path,
    members: impl Iterator<Item = &'a Member>,
    opened: &Mutex<Option<RunData>>,
) -> Result<Vec<(Needs, u64)>> {
    let mut by_arm = BTreeMap::new();
    let needs = |member: &'a Member| {
        let Member { arm, config, until } = member;
        let there = checkpoint::count(&member.path(folder).join(CHECKPOINTS))? as u64;
        if let Some(&needs) = by_arm.get(arm) {
            return Ok((needs, there));
        }
        let data = data_of(config, opened)?;
        let recipe = config.recipe(config.model.vocabulary(data.vocabulary(), data.tokenizer()))?;
        let needs = Needs::of(config, &recipe, *until)?;
        check_tensors(config, &recipe).map_err(|error| match error {
            Error::Setting { key, problem } => {
                Error::Setting { key, problem: format!("{problem}, in the arm {arm}") }
            }
            other => other,
        })?;
        by_arm.insert(arm, needs);
        Ok((needs, there))
    };
    members.map(needs).collect()
}

/// The data of a configuration, opened once for all runs that share it.
fn data_of(config: &Config, opened: &Mutex<Option<RunData>>) -> Result<RunData> {
    let mut opened = opened.lock().unwrap_or_else(PoisonError::into_inner);
    match opened.as_ref().filter(|data| data.is_of(config)) {
        Some(data) => {
            data.check_context(config)?;
            Ok(data.clone())
        }
        None => Ok(opened.insert(open_data(config)?).clone()),
    }
}

/// Refuses a run that names other paths: they would be read.
fn check_paths(run: &Path, found: &Config, wanted: &Config) -> Result {
    let rows = [
        ("data.path", &found.data.path, &wanted.data.path),
        ("run.flip_reference", &found.run.flip_reference, &wanted.run.flip_reference),
    ];
    for (key, found, wanted) in rows {
        if !disk::is_same_place(found, wanted) {
            let wanted = std::path::absolute(wanted).unwrap_or_else(|_| wanted.into());
            let problem = format!(
                "is a run with {key} = {found:?}, expected {wanted:?}; pass the same path, or, \
                 if the files were moved, change {key} in the run's config.toml"
            );
            return Err(Error::file(run, problem));
        }
    }
    Ok(())
}

/// Checks that a member can start or resume in its run directory.
fn check_place(path: &Path, member: &Member) -> Result {
    if disk::exists(&path.join("config.toml"))? {
        return check_paths(path, &run_config(path)?, &member.config);
    }
    let Err(error) = RunDirectory::check_free(path) else { return Ok(()) };
    Err(match error {
        // That of a run which lost its config.toml names the remedy.
        Error::File { path, .. } if !disk::exists(&path.join("provenance.json"))? => Error::file(
            path,
            "is not a run, as it holds no config.toml, and is not empty; remove it to train it \
             again",
        ),
        other => other,
    })
}

/// Starts or resumes a run, and returns its result unless it was stopped.
fn train(
    folder: &Path,
    member: &Member,
    keep: Keep,
    watcher: &mut dyn Watcher,
    (halted, opened): (&AtomicBool, &Mutex<Option<RunData>>),
) -> Result<Option<RunResult>> {
    let path = member.path(folder);
    let mut run = if disk::exists(&path.join("config.toml"))? {
        // Again, since others may have changed it while earlier runs trained.
        let check = |found: &Config| check_same(&path, found, &member.config);
        Run::resume_in(Box::new(Solo), &path, &Resume::of_member(), check)?
    } else {
        let dataset = data_of(&member.config, opened)?;
        Run::start(member.config.clone(), dataset, Given::default(), &path)?
    };
    let checkpoints = path.join(CHECKPOINTS);
    if keep == Keep::Checkpoints && !disk::exists(&checkpoints)? {
        disk::create_directory(&checkpoints)?;
        disk::sync_directory(&path)?;
    }
    run.interrupt_on(watcher.flag());
    let (step, steps) = (run.trainer().step(), member.config.steps);
    watcher.started(member, step);
    // A run to its last step ends by itself, after the evaluation.
    let until = (member.until < steps).then_some(member.until);
    let ended = run.train(&mut Bounded { watcher, step, until, halted });
    let is_moved = run.place().as_ref() != Some(&path);
    drop(run);
    if is_moved && ended.is_ok() {
        let problem = "was moved or removed while it trained; put it back, and repeat the command";
        return Err(Error::file(&path, problem));
    }
    if let Err(error) = ended {
        run_result::record_failure(&path, error)?;
    }
    match read(&path, member, keep)? {
        None if !halted.load(Ordering::SeqCst) => {
            let problem =
                format!("lacks the metrics of step {}; remove it to train it again", member.until);
            Err(Error::file(&path, problem))
        }
        result => Ok(result),
    }
}

/// Ends a run before its last step, and all runs when one is asked to stop.
struct Bounded<'a> {
    watcher: &'a mut dyn Watcher,
    step: u32,
    until: Option<u32>,
    halted: &'a AtomicBool,
}

impl Observer for Bounded<'_> {
    fn stepped(&mut self, metrics: &StepMetrics) {
        self.step = metrics.step;
        self.watcher.stepped(metrics);
    }

    fn working(&mut self, part: Part, done: usize, of: usize) {
        self.watcher.working(part, done, of);
    }

    fn said(&mut self, line: &str) {
        self.watcher.said(line);
    }

    fn asked(&mut self) -> Asked {
        let asked = self.watcher.asked();
        if asked == Asked::Stop {
            self.halted.store(true, Ordering::SeqCst);
        }
        let is_over = self.until.is_some_and(|until| self.step >= until);
        if is_over || self.halted.load(Ordering::SeqCst) { Asked::Stop } else { asked }
    }
}

#[cfg(test)]
mod tests;

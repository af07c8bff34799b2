//! A series: runs side by side in one folder, each of which is started, continued or merely read.
//! Searches and studies are made of it.
//!
//! Invariant: what a run told, and the last checkpoint of one whose checkpoints are kept, is a
//! function of its member alone, so that a series that was interrupted or killed anywhere ends like
//! one that was not. The folder holds `lock`, the description that a restart compares, and
//! `ARM/seed-N/` with ordinary run directories. Deliberately absent: what is compared, and
//! terminals ([`Watcher`] is what a command implements).

mod folder;
mod told;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

pub(crate) use folder::{Description, Folder, check_name};
pub use told::{Build, Failure, Sample, Told};

use sparse24_run::{
    Error, checkpoint,
    config::Config,
    disk,
    run::{Asked, Damaged, Given, Observer, Resume, Run, StepMetrics, open_dataset, run_config},
};

/// One run of a series.
#[derive(Debug, Clone, PartialEq)]
pub struct Member {
    /// What it is compared as; the name of a folder.
    pub arm: String,
    /// All of it; the seed names its folder.
    pub config: Config,
    /// The step after which it ends, at most `config.steps`: the schedule is that of the whole run.
    pub until: u32,
}

/// Told of a run that is done: its index, and what all have told.
pub type Done<'a> = dyn Fn(usize, &[Option<Told>]) -> Result<(), Error> + Sync + 'a;

impl Member {
    /// Its run directory in a folder.
    #[must_use]
    pub fn path(&self, folder: &Path) -> PathBuf {
        folder.join(&self.arm).join(format!("seed-{}", self.config.seed))
    }
}

/// Who watches one run after the other, in a thread of its own.
pub trait Watcher: Observer + Send {
    /// For [`Run::interrupt_on`].
    fn flag(&self) -> Arc<AtomicBool>;
    /// A run begins, or goes on after a step.
    fn began(&mut self, member: &Member, after: u32);
}

/// What stays of a finished run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// Everything.
    Checkpoints,
    /// All but its checkpoints.
    Results,
}

/// Whether all runs are done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// All.
    Finished,
    /// A watcher asked to stop; each run under way is saved.
    Stopped,
}

/// The runs of a series, and what those that are done have told.
pub struct Series {
    folder: Folder,
    members: Vec<Member>,
    told: Vec<Option<Told>>,
    keep: Keep,
}

impl Series {
    /// Reads what is done. Nothing is trained.
    ///
    /// # Errors
    /// [`Error::File`] for a run directory of another configuration than its member's, or whose
    /// metrics are damaged; [`Error::Io`].
    pub(crate) fn open(folder: Folder, members: Vec<Member>, keep: Keep) -> Result<Self, Error> {
        let mut told = Vec::with_capacity(members.len());
        for member in &members {
            told.push(read(&member.path(folder.path()), member, keep)?);
        }
        Ok(Self { folder, members, told, keep })
    }

    /// The folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The runs, in the order in which they are started.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// What the runs told, in the same order; none of those that are not done.
    #[must_use]
    pub fn told(&self) -> &[Option<Told>] {
        &self.told
    }

    /// Trains what is not done, as many runs at a time as there are watchers, which divide the
    /// threads; after each, `done` gets its index and what all have told.
    ///
    /// # Errors
    /// The first one of a run, but for losses that are not finite, which are results, or of `done`.
    /// Then the other runs stop as if asked to.
    pub fn train(
        &mut self,
        watchers: Vec<Box<dyn Watcher>>,
        done: &Done<'_>,
    ) -> Result<Progress, Error> {
        let waiting: Vec<usize> =
            (0..self.members.len()).filter(|&member| self.told[member].is_none()).collect();
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let jobs = watchers.len().min(waiting.len()).max(1);
        let (folder, members, keep) = (self.folder.path(), &self.members, self.keep);
        let (next, halted, told) = (
            AtomicUsize::new(0),
            AtomicBool::new(false),
            Mutex::new((&mut self.told, None::<Error>)),
        );
        let work = |mut watcher: Box<dyn Watcher>| {
            while let Some(&at) = waiting.get(next.fetch_add(1, Ordering::Relaxed)) {
                if halted.load(Ordering::SeqCst) {
                    return;
                }
                let member = &members[at];
                let all = if member.config.backend.threads == 0 {
                    cores
                } else {
                    member.config.backend.threads
                };
                let trained = sparse24_cpu::on_threads((all / jobs).max(1), || {
                    train(folder, member, keep, &mut *watcher, &halted)
                })
                .unwrap_or_else(|error| {
                    Err(Error::setting("backend.threads", format!("{error}; ask for fewer")))
                });
                let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
                let ended = trained.and_then(|ended| {
                    let Some(ended) = ended else { return Ok(()) };
                    told.0[at] = Some(ended);
                    done(at, told.0)
                });
                if let Err(error) = ended {
                    halted.store(true, Ordering::SeqCst);
                    told.1.get_or_insert(error);
                }
            }
        };
        thread::scope(|scope| {
            watchers.into_iter().take(jobs).for_each(|watcher| drop(scope.spawn(|| work(watcher))))
        });
        match told.into_inner().unwrap_or_else(PoisonError::into_inner).1 {
            Some(error) => Err(error),
            None if self.told.iter().all(Option::is_some) => Ok(Progress::Finished),
            None => Ok(Progress::Stopped),
        }
    }
}

/// The distinct builds that ran, in order.
pub(crate) fn builds(told: &[Option<Told>]) -> Vec<Build> {
    let mut builds: Vec<_> = told.iter().flatten().flat_map(|told| told.builds.clone()).collect();
    builds.sort();
    builds.dedup();
    builds
}

const CHECKPOINTS: &str = "checkpoints";

/// What a run told, if it is done.
fn read(path: &Path, member: &Member, keep: Keep) -> Result<Option<Told>, Error> {
    if !path.join("config.toml").is_file() {
        return Ok(None);
    }
    check_config(path, member)?;
    let told = told::read(path, member)?;
    let checkpoints = path.join(CHECKPOINTS);
    match (&told, keep) {
        (Some(_), Keep::Results) => discard(&checkpoints)?,
        // It died between its last line of metrics and its last save. Without the folder it was
        // carried here, or kept its results alone.
        (Some(Told { failure: None, .. }), Keep::Checkpoints)
            if checkpoints.is_dir() && !checkpoint::is_named(&checkpoints, member.until) =>
        {
            return Ok(None);
        }
        _ => {}
    }
    Ok(told)
}

/// Removes checkpoints; whenever it dies, the folder is whole or gone.
fn discard(checkpoints: &Path) -> Result<(), Error> {
    let aside = disk::aside(checkpoints);
    if aside.is_dir() {
        disk::remove_directory(&aside)?;
    }
    if checkpoints.is_dir() {
        disk::rename(checkpoints, &aside)?;
        disk::remove_directory(&aside)?;
    }
    Ok(())
}

/// Refuses a run directory of other settings than its member's.
fn check_config(path: &Path, member: &Member) -> Result<(), Error> {
    let (found, wanted) = (run_config(path)?.decisive(), member.config.decisive());
    let told = |settings: &BTreeMap<String, String>, key: &str| {
        settings.get(key).map_or("nothing".to_owned(), Clone::clone)
    };
    match found.keys().chain(wanted.keys()).find(|key| found.get(*key) != wanted.get(*key)) {
        None => Ok(()),
        Some(key) => {
            let problem = format!(
                "is a run with {key} = {}, expected {}; remove it, or name another folder",
                told(&found, key),
                told(&wanted, key)
            );
            Err(Error::file(path, problem))
        }
    }
}

/// Starts or continues a run; what it told, unless it was stopped.
fn train(
    folder: &Path,
    member: &Member,
    keep: Keep,
    watcher: &mut dyn Watcher,
    halted: &AtomicBool,
) -> Result<Option<Told>, Error> {
    let path = member.path(folder);
    let mut run = if path.join("config.toml").is_file() {
        Run::resume(&path, &Resume { damaged: Damaged::FallBack, allow: Vec::new() })?
    } else {
        Run::start(member.config.clone(), open_dataset(&member.config)?, Given::default(), &path)?
    };
    let checkpoints = path.join(CHECKPOINTS);
    if keep == Keep::Checkpoints && !checkpoints.is_dir() {
        disk::create_directory(&checkpoints)?;
        disk::sync_directory(&path)?;
    }
    run.interrupt_on(watcher.flag());
    let (step, steps) = (run.trainer().step(), member.config.steps);
    watcher.began(member, step);
    // A run that goes to its last step ends by itself, once that is evaluated.
    let until = (member.until < steps).then_some(member.until);
    let ended = run.train(&mut Bounded { watcher, step, until, halted });
    drop(run);
    if let Err(error) = ended {
        told::record_failure(&path, error)?;
    }
    match read(&path, member, keep)? {
        None if !halted.load(Ordering::SeqCst) => {
            let problem = format!(
                "has lost its metrics of step {}; remove it to have it trained again",
                member.until
            );
            Err(Error::file(&path, problem))
        }
        told => Ok(told),
    }
}

/// Ends a run before its last step, and all runs where one is asked to stop.
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

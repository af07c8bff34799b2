//! Creates, opens and locks a run directory, and names the files in it.
//!
//! Invariant: the lock is taken before anything else is written and is held until drop, and so is
//! the confinement: a run directory may come from others.

use std::{
    fs::{self, File, TryLockError},
    io::{self, ErrorKind, Read, Write},
    path::{Path, PathBuf},
};

use crate::{
    Error, Result, checkpoint,
    config::RESTORE,
    disk::{self, As, Confined, confine},
};

const LOCK: &str = "lock";
pub(super) const CONFIG: &str = "config.toml";
pub(super) const PLANS: &str = "plans.json";
pub(super) const PROVENANCE: &str = "provenance.json";
pub(super) const TOKENIZER: &str = "tokenizer.json";
/// The fingerprint of shards that are not this program's, which takes a scan.
pub(super) const SCAN: &str = "data.json";
pub(super) const METRICS: &str = "metrics.jsonl";
pub(super) const CHECKPOINTS: &str = "checkpoints";
pub(super) const LOG: &str = "log.txt";
/// The search that `train --lambda auto` makes before the run starts.
pub(super) const SEARCH: &str = "lambda-search";
/// The report, which may be written while the search runs.
pub const REPORT: &str = "report.html";
/// Files that a start writes before the configuration.
const STARTED: [&str; 7] = [PROVENANCE, PLANS, TOKENIZER, SCAN, METRICS, CHECKPOINTS, LOG];

/// A run directory that this process alone may write.
#[derive(Debug)]
pub struct RunDirectory {
    path: PathBuf,
    _lock: Lock,
    confined: Confined,
}

impl RunDirectory {
    /// Creates the directory and its parents, and locks it. It may exist if it is empty; remains of
    /// a start that died are removed.
    ///
    /// # Errors
    /// [`Error::File`] if it exists and is not an empty directory; [`Error::Io`] if it is in use or
    /// cannot be made.
    pub fn create(path: &Path) -> Result<Self> {
        // Checked before locking, so that a foreign directory gets no lock file, and again after,
        // in case another process was faster.
        Self::check_free(path)?;
        disk::create_directories(path)?;
        disk::sync_directory(disk::parent(path))?;
        let confined = confine(path)?;
        let lock = lock(path)?;
        let Contents { occupied, remains } = contents(path)?;
        if let Some(name) = occupied {
            return Err(occupied_by(path, &name));
        }
        remains.iter().try_for_each(|name| remove(&path.join(name)))?;
        Ok(Self { path: path.to_owned(), _lock: lock, confined })
    }

    /// Checks that [`RunDirectory::create`] would accept the path.
    ///
    /// # Errors
    /// [`Error::File`] if it would not; [`Error::Io`].
    pub fn check_free(path: &Path) -> Result {
        disk::check_directory(path)?;
        match disk::is_folder(path)? {
            true => contents(path)?.occupied.map_or(Ok(()), |name| Err(occupied_by(path, &name))),
            false => Ok(()),
        }
    }

    /// Creates the directory and fills it with `fill`; an error leaves nothing behind, nor parents
    /// that were made.
    pub(super) fn filled<T>(
        path: &Path,
        fill: impl FnOnce(&Self) -> Result<T>,
    ) -> Result<(Self, T)> {
        let is_missing = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
        let missing: Vec<_> = path.ancestors().take_while(is_missing).collect();
        let created = Self::create(path);
        let filled = created.and_then(|directory| match fill(&directory) {
            Ok(made) => Ok((directory, made)),
            Err(error) => {
                // The first error counts.
                let existed = missing.is_empty();
                let _ = if existed { empty(path) } else { disk::remove_directory(path) };
                Err(error)
            }
        });
        filled.inspect_err(|_| {
            // Only empty ones are removed: they may belong to another process by now.
            missing.iter().for_each(|path| drop(fs::remove_dir(path)));
        })
    }

    /// The error for a path that is no directory.
    #[must_use]
    pub fn missing(path: &Path) -> Error {
        let what = if path.exists() { "it is a file" } else { "there is no such directory" };
        Error::file(path, format!("is not a run directory: {what}"))
    }

    /// Locks an existing run directory and recovers its checkpoints after a save that died.
    ///
    /// # Errors
    /// [`Error::File`] if it is not a run directory; [`Error::Io`], also if it is in use.
    pub fn open(path: &Path) -> Result<Self> {
        let has_config = has_config(path)?;
        if !path.is_dir() {
            return Err(Self::missing(path));
        }
        let confined = confine(path)?;
        if !has_config {
            return Err(without_config(path));
        }
        let opened = Self { path: path.to_owned(), _lock: lock(path)?, confined };
        checkpoint::recover(&opened.checkpoints())?;
        Ok(opened)
    }

    /// Path of the directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// [`Confined::place`].
    pub(super) fn place(&self) -> Option<PathBuf> {
        self.confined.place()
    }

    /// `config.toml`.
    #[must_use]
    pub fn config(&self) -> PathBuf {
        self.path.join(CONFIG)
    }

    /// `provenance.json`.
    #[must_use]
    pub fn provenance(&self) -> PathBuf {
        self.path.join(PROVENANCE)
    }

    /// `plans.json`, where the device times choices.
    #[must_use]
    pub fn plans(&self) -> PathBuf {
        self.path.join(PLANS)
    }

    /// `tokenizer.json`.
    #[must_use]
    pub fn tokenizer(&self) -> PathBuf {
        self.path.join(TOKENIZER)
    }

    /// `metrics.jsonl`.
    #[must_use]
    pub fn metrics(&self) -> PathBuf {
        self.path.join(METRICS)
    }

    /// `checkpoints/`.
    #[must_use]
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join(CHECKPOINTS)
    }

    /// `log.txt`.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.path.join(LOG)
    }

    /// Replaces a file as a whole: a reader sees the old or the new contents, even after a crash.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&self, file: &Path, contents: &[u8]) -> Result {
        disk::write_atomically(file, contents)
    }
}

/// Whether a directory holds a run that can be resumed: one with a `config.toml` that is not empty.
///
/// # Errors
/// [`Error::Io`] if the path cannot be accessed.
pub fn has_config(path: &Path) -> Result<bool> {
    let config = disk::found(&path.join(CONFIG))?;
    Ok(config.is_some_and(|config| config.is_file() && config.len() > 0))
}

/// The error for a directory without a configuration; a run that has lost it can get it back.
pub(super) fn without_config(path: &Path) -> Error {
    if !path.join(PROVENANCE).is_file() {
        return Error::file(path, format!("is not a run directory: it holds no {CONFIG}"));
    }
    Error::file(path, format!("is a run that has lost its {CONFIG}; {RESTORE}"))
}

fn occupied_by(path: &Path, name: &str) -> Error {
    if path.join(PROVENANCE).is_file() && matches!(has_config(path), Ok(false)) {
        return without_config(path);
    }
    Error::file(
        path,
        format!(
            "already holds {name:?}, expected a new or empty run directory; choose another, or \
                resume this one"
        ),
    )
}

fn remove(path: &Path) -> Result {
    // A link to a directory is no directory.
    if path.is_dir() && !path.is_symlink() {
        disk::remove_directory(path)
    } else {
        disk::remove_file(path)
    }
}

/// Removes everything except a search and its report.
fn empty(path: &Path) -> Result {
    let names = names(path)?.into_iter().filter(|name| ![SEARCH, REPORT].contains(&name.as_str()));
    names.into_iter().try_for_each(|name| remove(&path.join(name)))
}

fn names(path: &Path) -> Result<Vec<String>> {
    let names = disk::names(path)?.into_iter();
    Ok(names.map(|name| name.to_string_lossy().into_owned()).collect())
}

/// Contents of a directory besides a lock, and a search with its report.
struct Contents {
    /// A file that must not be replaced.
    occupied: Option<String>,
    /// Remains of a start that died before it wrote the configuration, its last file. They hold no
    /// metrics, and no checkpoint but step 0.
    remains: Vec<String>,
}

fn contents(path: &Path) -> Result<Contents> {
    let mut names = names(path)?;
    let was_locked = names.iter().any(|name| name == LOCK);
    let has_search = names.iter().any(|name| name == SEARCH);
    names.retain(|name| ![LOCK, SEARCH].contains(&name.as_str()));
    names.retain(|name| name != REPORT || !has_search);
    let metrics = disk::kind(&path.join(METRICS))?;
    let has_metrics = metrics.is_some_and(|metrics| metrics.len() > 0);
    let is_of_start = |name: &String| name == "step-00000000" || name.starts_with(".tmp-");
    let has_steps = !self::names(&path.join(CHECKPOINTS))?.iter().all(is_of_start);
    let is_ours = |name: &String| STARTED.contains(&name.as_str()) || name.starts_with(".tmp-");
    if was_locked && !has_metrics && !has_steps && names.iter().all(is_ours) {
        return Ok(Contents { occupied: None, remains: names });
    }
    Ok(Contents { occupied: names.into_iter().next(), remains: Vec::new() })
}

/// A folder that no other process locks until this is dropped: its file `lock`, which holds the id
/// of this process and, where the file system allows it, the folder itself, since the file may be
/// deleted meanwhile.
#[derive(Debug)]
pub struct Lock(#[allow(dead_code, reason = "held for its drop")] [Option<File>; 2]);

/// Locks a folder.
///
/// # Errors
/// [`Error::Io`], also if another process holds it.
pub fn lock(directory: &Path) -> Result<Lock> {
    let path = directory.join(LOCK);
    let lock_error = |e| Error::io("lock", &path, e);
    let mut file = disk::open_as(&path, As::Lock)?;
    let folder = disk::open_directory(directory).ok();
    let locked = match folder.as_ref().map(File::try_lock) {
        Some(Err(TryLockError::WouldBlock)) => Err(TryLockError::WouldBlock),
        _ => file.try_lock(),
    };
    match locked {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut text = String::new();
            let holder = match file.take(20).read_to_string(&mut text) {
                // A process in another container may have the same number.
                Ok(1..) if text.trim() == std::process::id().to_string() => {
                    format!(
                        "process {}: this one, or one of that number in another container",
                        text.trim()
                    )
                }
                Ok(1..) => format!("process {}", text.trim()),
                _ => "another process".to_owned(),
            };
            let problem = format!("in use by {holder}; wait for it, or choose another directory");
            let source = io::Error::new(ErrorKind::WouldBlock, problem);
            return Err(Error::io("lock", directory, source));
        }
        Err(TryLockError::Error(e)) => return Err(lock_error(e)),
    }
    file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id())).map_err(lock_error)?;
    Ok(Lock([Some(file), folder]))
}

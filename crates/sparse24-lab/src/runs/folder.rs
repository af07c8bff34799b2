//! The folder of several runs: its lock, and the description of what it holds.
//!
//! Invariant: the description is written after all checks and before the first run starts. Later
//! starts may add arms and seeds, and change nothing else. A folder that holds something else is
//! not touched. The folder is confined, since it may come from others.

use crate::Result;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use serde::Serialize;
use sparse24_run::{
    Error,
    disk::{self, Confined},
    run::{self, Lock},
};

/// A folder that only this process may write.
#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
    /// The file of the description, and its contents.
    description: (PathBuf, String),
    _lock: Lock,
    _confined: Confined,
}

/// Dotted keys and TOML values.
pub type Settings = BTreeMap<String, String>;

/// The first key whose values differ, with both values.
pub fn difference<'a>(a: &'a Settings, b: &'a Settings) -> Option<(&'a str, [Option<&'a str>; 2])> {
    let key = a.keys().chain(b.keys()).find(|key| a.get(*key) != b.get(*key))?;
    Some((key, [a, b].map(|settings| settings.get(key).map(String::as_str))))
}

/// The settings that decide the results of a folder's runs.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Identity {
    /// Common to all runs.
    pub(crate) settings: Settings,
    pub(crate) arms: BTreeMap<String, Settings>,
    pub(crate) seeds: BTreeSet<u64>,
}

impl Identity {
    /// The first difference to `now` besides added arms and seeds, on both sides in words.
    fn difference(&self, now: &Self) -> Option<[String; 2]> {
        let settings = |before: &Settings, now: &Settings, arm: &str| {
            let (key, values) = difference(before, now)?;
            Some(values.map(|value| match value {
                Some(value) => format!("{arm}{key} = {value}"),
                None => format!("{arm}no {key}"),
            }))
        };
        let missing = |item: String| [item.clone(), format!("no {item}")];
        let arm = |(name, before): (&String, &Settings)| match now.arms.get(name) {
            Some(now) => settings(before, now, &format!("arm {name}: ")),
            None => Some(missing(format!("arm {name}"))),
        };
        settings(&self.settings, &now.settings, "")
            .or_else(|| self.arms.iter().find_map(arm))
            .or_else(|| {
                self.seeds.difference(&now.seeds).next().map(|s| missing(format!("seed {s}")))
            })
    }
}

impl Folder {
    /// Creates the folder or opens one with the same identity, which `read` reads from the file
    /// `name`, and locks it; [`Self::describe`] writes `text` to that file.
    ///
    /// # Errors
    /// [`Error::File`] if it holds something else, or was started with other settings;
    /// [`Error::Io`], also if it is in use.
    pub(crate) fn open(
        path: &Path,
        name: &str,
        text: String,
        identity: &Identity,
        read: impl Fn(&Path) -> Result<Identity>,
    ) -> Result<Self> {
        disk::check_directory(path)?;
        disk::create_directories(path)?;
        disk::sync_directory(disk::parent(path))?;
        let confined = disk::confine(path)?;
        let file = path.join(name);
        let is_there = disk::exists(&file)?;
        let is_empty = disk::read_small(&file, 0).is_ok();
        // The results are written after it.
        if (is_empty || !is_there) && disk::exists(&file.with_extension("json"))? {
            let problem = format!(
                "has lost its {name}; start the same command with another --out, stop it, and copy \
                 {name} from there"
            );
            return Err(Error::file(path, problem));
        }
        if !is_there {
            // A start that was killed or refused leaves these.
            let aside = disk::aside(&file);
            let ours = ["lock".as_ref(), aside.file_name().unwrap_or_default()];
            let names = disk::names(path)?;
            if let Some(found) = names.iter().find(|found| !ours.contains(&found.as_os_str())) {
                let problem = format!(
                    "already holds {found:?} but no {name}, expected a new or empty folder; \
                     choose another"
                );
                return Err(Error::file(path, problem));
            }
        }
        let lock = run::lock(path)?;
        if is_there && let Some([before, now]) = read(&file)?.difference(identity) {
            let problem = format!(
                "was started with {before}, found {now}; undo the change, or name another folder"
            );
            return Err(Error::file(file, problem));
        }
        let (path, description) = (path.to_owned(), (file, text));
        Ok(Self { path, description, _lock: lock, _confined: confined })
    }

    /// Writes the description. Called after all checks, so a refused start does not change it.
    pub(crate) fn describe(&self) -> Result {
        write_if_new(&self.description.0, self.description.1.as_bytes())
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// Writes a file atomically, unless it has these contents.
pub(crate) fn write_if_new(path: &Path, contents: &[u8]) -> Result {
    match disk::read_small(path, contents.len() as u64) {
        Ok(found) if found == contents => Ok(()),
        _ => disk::write_atomically(path, contents),
    }
}

/// Writes a value as indented JSON, like [`write_if_new`].
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result {
    let mut text = serde_json::to_vec_pretty(value).expect("numbers and strings are JSON");
    text.push(b'\n');
    write_if_new(path, &text)
}

/// Files beside the folders of the arms.
const TAKEN: [&str; 7] =
    ["lock", "search.toml", "search.json", "study.toml", "study.json", "study.csv", "report.html"];

/// Checks that an arm's name is the name of a folder on every system.
pub(crate) fn check_name(key: &str, name: &str) -> Result {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._+=-".contains(c);
    let starts = name.starts_with(|c: char| c.is_ascii_alphanumeric());
    if !starts || name.len() > 64 || !name.chars().all(is_plain) || name.ends_with('.') {
        let problem = format!(
            "{name:?} is not a folder name, expected at most 64 letters, digits and any of ._+=- \
             with a letter or digit first"
        );
        return Err(Error::setting(key, problem));
    }
    if TAKEN.contains(&name.to_ascii_lowercase().as_str()) {
        let problem = format!("{name:?} is the name of a file beside the arms; choose another");
        return Err(Error::setting(key, problem));
    }
    Ok(())
}

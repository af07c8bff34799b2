//! The folder of a series: its lock, and the description that says what it is.
//!
//! Invariant: the description is written before the first run is begun, and what it decided is
//! never decided otherwise; arms and seeds may be added. A folder that is somebody else's is not
//! touched.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    path::{Path, PathBuf},
};

use sparse24_run::{Error, disk, run};

/// A folder that this process alone may write.
#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
    /// Closing it releases the lock.
    _lock: File,
}

/// What a folder is to hold.
pub(crate) struct Description<'a> {
    /// `study.toml` or `search.toml`.
    pub(crate) file: &'static str,
    /// Its contents.
    pub(crate) text: &'a str,
    /// What it decides: keys and values. Of a key `list.item`, or `list.item.key`, a new item may
    /// be added if [`Description::lists`] names the list.
    pub(crate) decides: BTreeMap<String, String>,
    /// Lists that may grow.
    pub(crate) lists: &'static [&'static str],
    /// What an older text decided.
    pub(crate) parse: &'a Parse<'a>,
}

/// Keys and values of a file.
pub(crate) type Parse<'a> = dyn Fn(&Path) -> Result<BTreeMap<String, String>, Error> + 'a;

impl Folder {
    /// Makes the folder, or opens one that was described so before, and locks it.
    ///
    /// # Errors
    /// [`Error::File`] if it is in use, holds something else, or a description that decided
    /// otherwise, with the difference; [`Error::Io`].
    pub(crate) fn open(path: &Path, description: &Description<'_>) -> Result<Self, Error> {
        if path.exists() && !path.is_dir() {
            return Err(Error::file(
                path,
                "is a file, expected a new or empty folder; choose another",
            ));
        }
        fs::create_dir_all(path).map_err(|e| Error::io("create", path, e))?;
        disk::sync_directory(disk::parent(path))?;
        let file = path.join(description.file);
        if !file.exists() {
            let aside = disk::aside(&file);
            let ours = ["lock".as_ref(), aside.file_name().unwrap_or_default()];
            let list = || {
                fs::read_dir(path)?
                    .map(|entry| Ok(entry?.file_name()))
                    .collect::<std::io::Result<Vec<_>>>()
            };
            let names = list().map_err(|e| Error::io("list", path, e))?;
            if let Some(name) = names.iter().find(|name| !ours.contains(&name.as_os_str())) {
                let problem = format!(
                    "already holds {name:?} and no {}, expected a new or empty folder; choose another",
                    description.file
                );
                return Err(Error::file(path, problem));
            }
        }
        let folder = Self { path: path.to_owned(), _lock: run::lock(path)? };
        if file.exists() {
            description.check(&file)?;
        }
        if fs::read(&file).ok().as_deref() != Some(description.text.as_bytes()) {
            disk::write_atomically(&file, description.text.as_bytes())?;
        }
        Ok(folder)
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Description<'_> {
    /// Refuses to go on with what was begun otherwise.
    fn check(&self, file: &Path) -> Result<(), Error> {
        let before = (self.parse)(file)?;
        let item = |key: &str| {
            let list = self.lists.iter().find(|list| {
                key.strip_prefix(**list).is_some_and(|rest| rest.starts_with('\u{1}'))
            })?;
            let rest = &key[list.len() + 1..];
            Some((*list, rest.split('\u{1}').next().unwrap_or(rest).to_owned()))
        };
        let items: BTreeSet<_> = before.keys().filter_map(|key| item(key)).collect();
        let is_added = |key: &str| {
            !before.contains_key(key) && item(key).is_some_and(|item| !items.contains(&item))
        };
        let differs = |key: &&String| before.get(*key) != self.decides.get(*key) && !is_added(key);
        let Some(key) = before.keys().chain(self.decides.keys()).find(differs) else {
            return Ok(());
        };
        let name = key.replace('\u{1}', " ");
        let told = |settings: &BTreeMap<String, String>| match settings.get(key).map(String::as_str)
        {
            Some("") => format!("with {name}"),
            Some(value) => format!("with {name} = {value}"),
            None => format!("without {name}"),
        };
        let problem = format!(
            "was begun {}, now it is asked for {}; undo that, or name another folder",
            told(&before),
            told(&self.decides)
        );
        Err(Error::file(file, problem))
    }
}

/// Entries of a series' folder that are no arms.
const TAKEN: [&str; 7] =
    ["lock", "search.toml", "search.json", "study.toml", "study.json", "study.csv", "report.html"];

/// Refuses the name of an arm that cannot be the name of a folder everywhere.
pub(crate) fn check_name(key: &str, name: &str) -> Result<(), Error> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._+=-".contains(c);
    let starts = name.starts_with(|c: char| c.is_ascii_alphanumeric());
    if !starts || name.len() > 64 || !name.chars().all(is_plain) || name.ends_with('.') {
        let problem = format!(
            "{name:?} is no name of a folder, expected at most 64 letters, digits and any of ._+=- with a letter or digit first"
        );
        return Err(Error::setting(key, problem));
    }
    if TAKEN.contains(&name.to_ascii_lowercase().as_str()) {
        return Err(Error::setting(
            key,
            format!("{name:?} is the name of a file beside the arms; choose another"),
        ));
    }
    Ok(())
}

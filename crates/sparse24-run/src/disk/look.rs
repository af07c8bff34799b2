//! Looks at what paths lead to, without opening it.

use std::{
    fs,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
};

use crate::{Error, Result};

/// Whether a path leads to something; a link in a confined directory does.
///
/// # Errors
/// [`Error::Io`] if the path cannot be accessed.
pub fn exists(path: &Path) -> Result<bool> {
    is_there(path).map_err(|e| Error::io("read", path, e))
}

pub(super) fn is_there(path: &Path) -> io::Result<bool> {
    let look = || {
        #[cfg(unix)]
        if let Some(at) = super::confined::resolve(path)? {
            let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
            return Ok(rustix::fs::statat(&at.directory, &at.name, flags).map(drop)?);
        }
        fs::metadata(path).map(drop)
    };
    match look() {
        Err(e) if is_nothing(&e) => Ok(false),
        found => found.map(|()| true),
    }
}

fn is_nothing(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

/// Metadata of the file that a path leads to, if any.
///
/// # Errors
/// [`Error::Io`] if the path cannot be accessed.
pub(crate) fn found(path: &Path) -> Result<Option<fs::Metadata>> {
    match fs::metadata(path) {
        Err(e) if is_nothing(&e) => Ok(None),
        found => found.map(Some).map_err(|e| Error::io("read", path, e)),
    }
}

/// [`found`], and [`Error::File`] for a broken symbolic link.
pub(crate) fn kind(path: &Path) -> Result<Option<fs::Metadata>> {
    match found(path)? {
        None if path.is_symlink() => {
            Err(Error::file(path, "is a broken symbolic link; remove it or name another"))
        }
        found => Ok(found),
    }
}

/// Whether a path leads to a folder.
///
/// # Errors
/// [`Error::File`] for a broken symbolic link; [`Error::Io`] if the path cannot be accessed.
pub fn is_folder(path: &Path) -> Result<bool> {
    Ok(kind(path)?.is_some_and(|kind| kind.is_dir()))
}

/// Whether a path leads to a regular file.
///
/// # Errors
/// Same as [`is_folder`].
pub fn is_file(path: &Path) -> Result<bool> {
    Ok(kind(path)?.is_some_and(|kind| kind.is_file()))
}

/// The first item for which `is` holds.
pub(crate) fn first<T>(
    items: impl IntoIterator<Item = T>,
    is: impl Fn(&T) -> Result<bool>,
) -> Result<Option<T>> {
    for item in items {
        if is(&item)? {
            return Ok(Some(item));
        }
    }
    Ok(None)
}

/// The first name that is not taken.
pub(crate) fn unused(names: impl Iterator<Item = PathBuf>) -> Result<PathBuf> {
    Ok(first(names, |path| Ok(!exists(path)?))?.expect("some name is free"))
}

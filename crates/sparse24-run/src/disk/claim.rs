//! A file or folder under its temporary name, which one process at a time may hold.

#[cfg(unix)]
use std::{fs::TryLockError, io::ErrorKind};
use std::{
    fs::{self, File},
    io,
    path::Path,
};

use super::{As, Operation, fault, is_there, open_file, remove_all, unlink};

/// Locks an open file or folder of this name, so that one process at a time writes it. The lock
/// ends with the handle. Some file systems have no locks, and elsewhere than on Unix one would keep
/// readers out.
#[cfg(unix)]
fn lock(path: &Path, handle: &File) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    let identity = |file: &File| file.metadata().map(|found| (found.dev(), found.ino())).ok();
    let is_free = !matches!(handle.try_lock(), Err(TryLockError::WouldBlock));
    let is_there = || match open_file(path, As::Source) {
        Ok(there) => Ok(identity(&there) == identity(handle)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    };
    if is_free && is_there()? {
        return Ok(());
    }
    let problem = "another process is writing it; wait for it";
    Err(io::Error::new(ErrorKind::WouldBlock, problem))
}

#[cfg(not(unix))]
fn lock(_: &Path, _: &File) -> io::Result<()> {
    Ok(())
}

/// Creates and locks a file or folder; what a dead process left in its place is removed. A folder
/// has no handle elsewhere than on Unix.
pub(super) fn claim(
    path: &Path,
    create: impl FnOnce(&Path) -> io::Result<Option<File>>,
) -> io::Result<Option<File>> {
    // Held until the successor is locked.
    let mut left = None;
    if is_there(path)? {
        let is_link = fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink());
        left = open_file(path, As::Source).ok().filter(|_| !is_link);
        left.as_ref().map_or(Ok(()), |left| lock(path, left))?;
        let is_folder = match &left {
            Some(left) => left.metadata()?.is_dir(),
            None => path.is_dir() && !is_link,
        };
        if is_folder {
            fault::before(Operation::RemoveDirectory(path))?;
            remove_all(path)?;
        } else {
            unlink(path)?;
        }
    }
    let created = create(path)?;
    created.as_ref().map_or(Ok(()), |created| lock(path, created))?;
    drop(left);
    Ok(created)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_fails_says_why() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let below = file.path().join("below");
        let error = lock(&below, &File::open(file.path()).unwrap()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotADirectory);
    }
}

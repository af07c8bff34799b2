//! File operations of checkpoints, run directories and prepared data, with their errors.
//!
//! Invariant: all durable writes go through here, so that tests can make the Nth operation fail,
//! "kill" the process at it, or record the operations ([`fault`]).

use std::{
    fs::{self, File},
    io::{self, ErrorKind, Read, Seek, Write},
    path::{Path, PathBuf},
};

use crate::Error;
use fault::Operation;

pub mod fault;

/// A file being written for the first time.
pub struct NewFile {
    path: PathBuf,
    file: File,
}

impl NewFile {
    /// Creates or truncates the file.
    pub fn create(path: PathBuf) -> Result<Self, Error> {
        let created = fault::before(Operation::Create(&path)).and_then(|()| File::create(&path));
        match created {
            Ok(file) => Ok(Self { path, file }),
            Err(source) => Err(Error::io("create", path, source)),
        }
    }

    /// Writes all of `bytes`.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        fault::writer(&mut self.file, &self.path)
            .write_all(bytes)
            .map_err(|e| Error::io("write", &self.path, e))
    }

    /// Writes `bytes` over the start of the file.
    pub fn write_start(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.file.rewind().map_err(|e| Error::io("write", &self.path, e))?;
        self.write(bytes)
    }

    /// Returns when the contents are on the device.
    pub fn sync(self) -> Result<(), Error> {
        fault::before(Operation::Sync(&self.path))
            .and_then(|()| self.file.sync_all())
            .map_err(|e| Error::io("sync", &self.path, e))
    }
}

/// Makes one directory.
pub fn create_directory(path: &Path) -> Result<(), Error> {
    fault::before(Operation::CreateDirectory(path))
        .and_then(|()| fs::create_dir(path))
        .map_err(|e| Error::io("create", path, e))
}

/// Renames atomically; on Unix an existing file is replaced.
pub fn rename(from: &Path, to: &Path) -> Result<(), Error> {
    fault::before(Operation::Rename(from, to))
        .and_then(|()| fs::rename(from, to))
        .map_err(|e| Error::io("rename", from, e))
}

/// Removes a file.
pub fn remove_file(path: &Path) -> Result<(), Error> {
    fault::before(Operation::RemoveFile(path))
        .and_then(|()| fs::remove_file(path))
        .map_err(|e| Error::io("remove", path, e))
}

/// Removes a directory and all it holds.
pub fn remove_directory(path: &Path) -> Result<(), Error> {
    fault::before(Operation::RemoveDirectory(path))
        .and_then(|()| fs::remove_dir_all(path))
        .map_err(|e| Error::io("remove", path, e))
}

/// Returns when the names in the directory are on the device. Only Unix supports this.
pub fn sync_directory(path: &Path) -> Result<(), Error> {
    let sync = || if cfg!(unix) { File::open(path)?.sync_all() } else { Ok(()) };
    fault::before(Operation::SyncDirectory(path))
        .and_then(|()| sync())
        .map_err(|e| Error::io("sync", path, e))
}

/// Refuses to write `needed` bytes for `what` if the file system has fewer. Not every system
/// reports its free space, and a quota only shows when writing.
pub fn check_room(path: &Path, needed: u64, what: impl FnOnce() -> String) -> Result<(), Error> {
    match free(path) {
        Some(free) if free < needed => {
            Err(Error::Room { path: path.to_owned(), what: what(), needed, free })
        }
        _ => Ok(()),
    }
}

/// Bytes that this process could still write.
fn free(path: &Path) -> Option<u64> {
    #[cfg(unix)]
    return rustix::fs::statvfs(path)
        .ok()
        .filter(|system| system.f_blocks > 0)
        .map(|system| system.f_bavail.saturating_mul(system.f_frsize));
    #[cfg(not(unix))]
    None
}

/// Replaces a file as a whole: a reader sees the old or the new contents, even after a crash.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    replace(path, |file| file.write(bytes))
}

/// Like [`write_atomically`], for contents in pieces. Errors name `path`, not the temporary file.
pub fn replace(
    path: &Path,
    write: impl FnOnce(&mut NewFile) -> Result<(), Error>,
) -> Result<(), Error> {
    let aside = aside(path);
    let written = NewFile::create(aside.clone()).and_then(|mut file| {
        write(&mut file)?;
        file.sync()
    });
    written.and_then(|()| rename(&aside, path)).map_err(|e| {
        drop(fs::remove_file(&aside));
        match e {
            Error::Io { source, .. } => Error::io("write", path, source),
            other => other,
        }
    })?;
    sync_directory(parent(path))
}

/// The file that what is written to `path` replaces: itself, or what it links to, whether that
/// exists or not.
///
/// Refuses what exists and is no regular file: a rename would put a file in the place of a pipe or
/// a device.
pub fn destination(path: &Path) -> Result<PathBuf, Error> {
    let failed = |e| Error::io("write", path, e);
    match fs::metadata(path) {
        Ok(kind) if kind.is_dir() => {
            Err(Error::file(path, "is a folder, expected a file or a new name"))
        }
        Ok(kind) if !kind.is_file() => Err(Error::file(
            path,
            "is not a regular file, which alone can be replaced; name another",
        )),
        Ok(_) if path.is_symlink() => fs::canonicalize(path).map_err(failed),
        Ok(_) => Ok(path.to_owned()),
        // A link may lead to nothing yet; a loop of links is another error.
        Err(e) if e.kind() == ErrorKind::NotFound && path.is_symlink() => {
            destination(&parent(path).join(fs::read_link(path).map_err(failed)?))
        }
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(path.to_owned()),
        Err(e) => Err(failed(e)),
    }
}

/// Where the next contents of `path` are written: beside it, so that a rename moves no data.
pub fn aside(path: &Path) -> PathBuf {
    let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    path.with_file_name(format!(".tmp-{name}"))
}

/// The directory that holds `path`.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Opens a regular file and returns its size: reading a pipe could block, and a device might never
/// end.
pub fn open(path: &Path) -> Result<(File, u64), Error> {
    let failed = |e| Error::io("read", path, e);
    let kind = fs::metadata(path).map_err(failed)?;
    if !kind.is_file() {
        return Err(Error::file(
            path,
            if kind.is_dir() { "is a folder, expected a file" } else { "is not a regular file" },
        ));
    }
    Ok((File::open(path).map_err(failed)?, kind.len()))
}

/// Fills `bytes` from this offset of a file; several threads may do so at once.
pub fn read_at(file: &File, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::read_exact_at(file, bytes, offset);
    #[cfg(windows)]
    {
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done as u64;
            match std::os::windows::fs::FileExt::seek_read(file, &mut bytes[done..], at)? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                read => done += read,
            }
        }
        Ok(())
    }
}

/// The whole file.
pub fn read(path: &Path) -> Result<Vec<u8>, Error> {
    read_small(path, u64::MAX)
}

/// The whole file, refused beyond `limit` bytes.
pub fn read_small(path: &Path, limit: u64) -> Result<Vec<u8>, Error> {
    let (mut file, size) = open(path)?;
    if size > limit {
        return Err(Error::file(path, format!("holds {size} bytes, expected at most {limit}")));
    }
    let mut bytes = reserve(path, usize::try_from(size).unwrap_or(usize::MAX))?;
    file.read_to_end(&mut bytes).map_err(|e| Error::io("read", path, e))?;
    Ok(bytes)
}

/// Allocates space for the contents of a file, which may be larger than memory, and with holes
/// larger than any disk.
pub fn reserve<T>(path: &Path, count: usize) -> Result<Vec<T>, Error> {
    let mut room = Vec::new();
    room.try_reserve_exact(count).map_err(|e| Error::io("read", path, e.into()))?;
    Ok(room)
}

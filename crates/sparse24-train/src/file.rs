//! Opening regular files, and writing files that exist whole or not at all.
//!
//! Invariant: the target is untouched until [`AtomicFile::commit`], and afterwards holds every byte, also across a power cut: the content
//! is flushed before the rename, the folder after it. Deliberately absent: what is written.

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io::{self, BufWriter, Read, Write},
    path::{Path, PathBuf},
    process,
};

use crate::Error;

/// A temporary file beside its target; removed unless committed.
pub(crate) struct AtomicFile {
    target: PathBuf,
    temporary: PathBuf,
    writer: Option<BufWriter<File>>,
}

impl AtomicFile {
    /// Opens the temporary file.
    pub(crate) fn create(target: &Path) -> Result<Self, Error> {
        let temporary = beside(target)?;
        let file = OpenOptions::new().write(true).create_new(true).open(&temporary).map_err(|e| Error::io("create", target, e))?;
        Ok(Self { target: target.to_owned(), temporary, writer: Some(BufWriter::new(file)) })
    }

    /// Appends bytes.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let writer = self.writer.as_mut().expect("the writer lives until the commit");
        writer.write_all(bytes).map_err(|e| Error::io("write", &self.target, e))
    }

    /// Flushes to the device and takes the place of the target.
    pub(crate) fn commit(mut self) -> Result<(), Error> {
        let writer = self.writer.take().expect("the writer lives until the commit");
        let moved = writer.into_inner().map_err(io::IntoInnerError::into_error).and_then(|file| file.sync_all());
        moved.and_then(|()| fs::rename(&self.temporary, &self.target)).map_err(|e| {
            // The error at hand says more than one of the removal would.
            let _ = fs::remove_file(&self.temporary);
            Error::io("write", &self.target, e)
        })?;
        sync_folder(parent(&self.target))
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if self.writer.take().is_some() {
            // Nobody can be told from here, and a stray temporary file is harmless.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// Writes a whole file, atomically.
pub(crate) fn write(target: &Path, bytes: &[u8]) -> Result<(), Error> {
    let mut file = AtomicFile::create(target)?;
    file.write(bytes)?;
    file.commit()
}

/// Opens a regular file and says how many bytes it holds; a pipe would block, a device might never end.
pub(crate) fn open(path: &Path) -> Result<(File, u64), Error> {
    let failed = |e| Error::io("read", path, e);
    let kind = fs::metadata(path).map_err(failed)?;
    if !kind.is_file() {
        return Err(Error::file(path, if kind.is_dir() { "is a folder, expected a file" } else { "is not a regular file" }));
    }
    Ok((File::open(path).map_err(failed)?, kind.len()))
}

/// Reads a regular file.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, Error> {
    let (mut file, size) = open(path)?;
    let mut bytes = Vec::with_capacity(usize::try_from(size).unwrap_or(0));
    file.read_to_end(&mut bytes).map_err(|e| Error::io("read", path, e))?;
    Ok(bytes)
}

/// A hidden name of this process in the folder of `target`.
pub(crate) fn beside(target: &Path) -> Result<PathBuf, Error> {
    let Some(name) = target.file_name() else {
        return Err(Error::file(target, "is not the name of something that could be written"));
    };
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(format!(".partial-{}", process::id()));
    Ok(parent(target).join(hidden))
}

/// The folder that holds `path`.
pub(crate) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => Path::new("/"),
    }
}

/// Makes renames within the folder durable; on systems whose folders cannot be opened there is nothing to do.
pub(crate) fn sync_folder(folder: &Path) -> Result<(), Error> {
    if cfg!(unix) { File::open(folder).and_then(|f| f.sync_all()).map_err(|e| Error::io("write", folder, e)) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_only_by_a_commit() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("file");
        write(&target, b"old").unwrap();
        let mut file = AtomicFile::create(&target).unwrap();
        file.write(b"half").unwrap();
        drop(file);
        assert_eq!(fs::read(&target).unwrap(), b"old");
        write(&target, b"new").unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"new");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "temporary files are left behind");
    }

    #[test]
    fn a_failed_rename_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("taken");
        fs::create_dir_all(target.join("by a folder")).unwrap();
        let message = write(&target, b"new").unwrap_err().to_string();
        assert!(message.contains("cannot write") && message.contains("taken"), "{message}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "temporary files are left behind");
    }
}

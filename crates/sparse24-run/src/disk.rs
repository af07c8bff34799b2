//! File operations of checkpoints, run directories and prepared data, with their errors.
//!
//! Invariant: all durable writes go through here, so that tests can make the Nth operation fail,
//! "kill" the process at it, or record the operations ([`fault`]).

use std::{
    ffi::OsString,
    fs::{self, File},
    io::{self, ErrorKind, Read, Seek, Write},
    path::{Path, PathBuf},
};

use crate::{Error, Result};
use claim::claim;
use fault::Operation;
use look::is_there;

pub use confined::{Confined, confine};
pub use look::{exists, is_file, is_folder};
pub(crate) use look::{first, found, kind, unused};

mod claim;
mod confined;
pub mod fault;
mod look;

/// How a file is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum As {
    /// To be read.
    Source,
    /// To be written, and not to exist yet.
    New,
    /// To be written at its end, created if it is missing.
    Appended,
    /// To be locked, read and written, created if it is missing.
    Lock,
}

/// Opens a file. Whatever kind of file it is, this does not block; one to be changed is a regular
/// file without another name.
pub fn open_as(path: &Path, how: As) -> Result<File> {
    let (action, opened) = match how {
        As::Source => ("read", open_file(path, how)),
        As::New => ("create", open_file(path, how)),
        As::Appended => ("open", open_changed(path, how)),
        As::Lock => ("lock", open_changed(path, how)),
    };
    let file = opened.map_err(|e| Error::io(action, path, e))?;
    let kind = file.metadata().map_err(|e| Error::io(action, path, e))?;
    if how != As::Source && !kind.is_file() {
        bail!(path, "is not a regular file; remove it");
    }
    Ok(file)
}

/// Most bytes that are copied to change a file; a small one may claim any size.
const LARGEST_COPY: u64 = 1 << 30;

/// Opens a file to be changed. If it has other names (hard links, perhaps elsewhere), a copy takes
/// its place, and they keep their contents.
fn open_changed(path: &Path, how: As) -> io::Result<File> {
    let file = open_file(path, how)?;
    if !has_other_names(&file)? {
        return Ok(file);
    }
    if file.metadata()?.len() > LARGEST_COPY {
        return Err(io::Error::other("it has other hard links and over 1 GiB; remove or copy it"));
    }
    let aside = aside(path);
    let mut copy = open_fresh(&aside)?;
    io::copy(&mut open_file(path, As::Source)?, &mut copy)?;
    copy.sync_all()?;
    move_to(&aside, path)?;
    let file = open_file(path, how)?;
    if has_other_names(&file)? {
        return Err(io::Error::other("another process keeps adding hard links to it"));
    }
    Ok(file)
}

#[cfg(unix)]
fn has_other_names(file: &File) -> io::Result<bool> {
    let found = file.metadata()?;
    Ok(found.is_file() && std::os::unix::fs::MetadataExt::nlink(&found) > 1)
}

#[cfg(not(unix))]
fn has_other_names(_: &File) -> io::Result<bool> {
    Ok(false)
}

/// Opens a new file; what has its name is removed first, and not written.
fn open_fresh(path: &Path) -> io::Result<File> {
    match open_file(path, As::New) {
        Err(e) if e.kind() == ErrorKind::AlreadyExists => {
            unlink(path)?;
            open_file(path, As::New)
        }
        opened => opened,
    }
}

fn open_file(path: &Path, how: As) -> io::Result<File> {
    #[cfg(unix)]
    if let Some(at) = confined::resolve(path)? {
        use rustix::fs::OFlags;
        return Ok(File::from(at.open(match how {
            As::Source => OFlags::RDONLY | OFlags::NONBLOCK,
            As::New => OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL,
            As::Appended => OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND | OFlags::NONBLOCK,
            As::Lock => OFlags::RDWR | OFlags::CREATE | OFlags::NONBLOCK,
        })?));
    }
    let mut options = File::options();
    match how {
        As::Source => options.read(true),
        As::New => options.write(true).create_new(true),
        As::Appended => options.append(true).create(true),
        As::Lock => options.read(true).write(true).create(true).truncate(false),
    };
    #[cfg(unix)]
    {
        let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, flags);
    }
    options.open(path)
}

/// A file being written for the first time.
pub struct NewFile {
    path: PathBuf,
    file: File,
}

impl NewFile {
    /// Creates the file, in the place of one that is there.
    pub fn create(path: PathBuf) -> Result<Self> {
        let created = fault::before(Operation::Create(&path)).and_then(|()| open_fresh(&path));
        match created {
            Ok(file) => Ok(Self { path, file }),
            Err(source) => Err(Error::io("create", path, source)),
        }
    }

    /// Opens a file to be changed.
    pub fn reopen(path: PathBuf) -> Result<Self> {
        fault::before(Operation::Create(&path))
            .and_then(|()| open_changed(&path, As::Lock))
            .map(|file| Self { path: path.clone(), file })
            .map_err(|e| Error::io("write", path, e))
    }

    /// Cuts the file after this many bytes.
    pub fn truncate(&mut self, length: u64) -> Result {
        self.file.set_len(length).map_err(|e| Error::io("write", &self.path, e))
    }

    /// Writes all of `bytes`.
    pub fn write(&mut self, bytes: &[u8]) -> Result {
        fault::writer(&mut self.file, &self.path)
            .write_all(bytes)
            .map_err(|e| Error::io("write", &self.path, e))
    }

    /// Writes `bytes` over the start of the file.
    pub fn write_start(&mut self, bytes: &[u8]) -> Result {
        self.file.rewind().map_err(|e| Error::io("write", &self.path, e))?;
        self.write(bytes)
    }

    /// Returns when the contents are on the device.
    pub fn sync(self) -> Result {
        fault::before(Operation::Sync(&self.path))
            .and_then(|()| self.file.sync_all())
            .map_err(|e| Error::io("sync", &self.path, e))
    }
}

fn make_directory(path: &Path) -> io::Result<()> {
    #[cfg(unix)]
    if let Some(at) = confined::resolve(path)? {
        return at.make();
    }
    fs::create_dir(path)
}

fn move_to(from: &Path, to: &Path) -> io::Result<()> {
    #[cfg(unix)]
    if let (Some(from), Some(to)) = (confined::resolve(from)?, confined::resolve(to)?) {
        let (old, new) = (&from.directory, &to.directory);
        return Ok(rustix::fs::renameat(old, &from.name, new, &to.name)?);
    }
    fs::rename(from, to)
}

fn unlink(path: &Path) -> io::Result<()> {
    #[cfg(unix)]
    if let Some(at) = confined::resolve(path)? {
        let flags = rustix::fs::AtFlags::empty();
        return Ok(rustix::fs::unlinkat(&at.directory, &at.name, flags)?);
    }
    fs::remove_file(path)
}

fn remove_all(path: &Path) -> io::Result<()> {
    #[cfg(unix)]
    if let Some(at) = confined::resolve(path)?.filter(|at| at.name != ".") {
        return at.remove_all();
    }
    fs::remove_dir_all(path)
}

/// The names in a directory; none if it does not exist.
pub fn names(path: &Path) -> Result<Vec<OsString>> {
    let list = || {
        #[cfg(unix)]
        if let Some(at) = confined::resolve(path)? {
            return at.names();
        }
        fs::read_dir(path)?.map(|entry| Ok(entry?.file_name())).collect::<io::Result<_>>()
    };
    match list() {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        listed => listed.map_err(|e| Error::io("list", path, e)),
    }
}

/// Makes one directory.
pub fn create_directory(path: &Path) -> Result {
    fault::before(Operation::CreateDirectory(path))
        .and_then(|()| make_directory(path))
        .map_err(|e| Error::io("create", path, e))
}

/// Checks that a directory can be made at this path, or is there.
pub fn check_directory(path: &Path) -> Result {
    match kind(path)? {
        Some(kind) if !kind.is_dir() => {
            Err(Error::file(path, "is a file, expected a new or empty folder; choose another"))
        }
        _ => Ok(()),
    }
}

/// Makes a directory and those above it, unless they exist.
pub fn create_directories(path: &Path) -> Result {
    let make = || {
        #[cfg(unix)]
        {
            let is_below = |path: &&Path| !matches!(confined::resolve(path), Ok(None));
            let below: Vec<_> = path.ancestors().take_while(is_below).collect();
            if !below.is_empty() {
                return below.into_iter().rev().try_for_each(|path| match make_directory(path) {
                    Err(e) if e.kind() == ErrorKind::AlreadyExists => confined::check(path),
                    made => made,
                });
            }
        }
        fs::create_dir_all(path)
    };
    make().map_err(|e| Error::io("create", path, e))
}

/// Renames atomically; on Unix an existing file is replaced.
pub fn rename(from: &Path, to: &Path) -> Result {
    fault::before(Operation::Rename(from, to))
        .and_then(|()| move_to(from, to))
        .map_err(|e| Error::io("rename", from, e))
}

/// Removes a file.
pub fn remove_file(path: &Path) -> Result {
    fault::before(Operation::RemoveFile(path))
        .and_then(|()| unlink(path))
        .map_err(|e| Error::io("remove", path, e))
}

/// Removes a directory and all it holds.
pub fn remove_directory(path: &Path) -> Result {
    fault::before(Operation::RemoveDirectory(path))
        .and_then(|()| remove_all(path))
        .map_err(|e| Error::io("remove", path, e))
}

/// Opens a directory. Only Unix supports this.
pub(crate) fn open_directory(path: &Path) -> io::Result<File> {
    #[cfg(unix)]
    if let Some(at) = confined::resolve(path)? {
        return Ok(File::from(at.enter()?));
    }
    File::open(path)
}

/// Returns when the names in the directory are on the device. Only Unix supports this.
pub fn sync_directory(path: &Path) -> Result {
    let sync = || if cfg!(unix) { open_directory(path)?.sync_all() } else { Ok(()) };
    fault::before(Operation::SyncDirectory(path))
        .and_then(|()| sync())
        .map_err(|e| Error::io("sync", path, e))
}

/// Refuses to write `needed` bytes for `what` if the file system has fewer. Not every system
/// reports its free space, and a quota only shows when writing.
pub fn check_room(path: &Path, needed: u64, what: impl FnOnce() -> String) -> Result {
    match free(path) {
        Some(free) if free < needed => {
            Err(Error::Room { path: path.to_owned(), what: what(), needed, free })
        }
        _ => Ok(()),
    }
}

/// Bytes that this process could still write at a path. The last folders of the path need not exist
/// yet.
#[cfg(unix)]
fn free(path: &Path) -> Option<u64> {
    let path = std::path::absolute(path).ok()?;
    let system = path.ancestors().find_map(|path| rustix::fs::statvfs(path).ok());
    let system = system.filter(|system| system.f_blocks > 0)?;
    Some(system.f_bavail.saturating_mul(system.f_frsize))
}

#[cfg(not(unix))]
fn free(_: &Path) -> Option<u64> {
    None
}

/// A file or folder that is written beside its final place. It is removed on drop, also after a
/// panic, unless it was moved there.
struct Aside {
    path: PathBuf,
    is_placed: bool,
}

impl Aside {
    fn place(mut self, at: &Path) -> Result {
        rename(&self.path, at)?;
        self.is_placed = true;
        Ok(())
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        if !self.is_placed && unlink(&self.path).is_err() {
            drop(remove_all(&self.path));
        }
    }
}

/// Replaces a file as a whole: a reader sees the old or the new contents, even after a crash.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result {
    replace(path, |file| file.write(bytes))
}

/// Like [`write_atomically`], for contents in pieces. Errors name `path`, not the temporary file.
pub fn replace(path: &Path, write: impl FnOnce(&mut NewFile) -> Result) -> Result {
    let place = aside(path);
    let file = fault::before(Operation::Create(&place))
        .and_then(|()| claim(&place, |place| open_file(place, As::New).map(Some)))
        .map_err(|e| Error::io("write", path, e))?
        .expect("an open file");
    let aside = Aside { path: place.clone(), is_placed: false };
    let held = file.try_clone().map_err(|e| Error::io("write", path, e))?;
    let mut file = NewFile { path: place, file };
    let written = write(&mut file).and_then(|()| file.sync());
    let placed = written.and_then(|()| aside.place(path));
    drop(held);
    placed.map_err(|e| match e {
        Error::Io { action, source, .. } if action != "read" => Error::io("write", path, source),
        other => other,
    })?;
    sync_directory(parent(path))
}

/// Fills a new or empty folder, whose parents are created: completely, or nothing is left behind.
pub fn fill_folder(folder: &Path, fill: impl FnOnce(&Path) -> Result) -> Result {
    let exists = folder.exists();
    if exists && !fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none()) {
        bail!(folder, "is not an empty folder, expected a new or empty one; choose another");
    }
    let (parent, place) = (parent(folder), aside(folder));
    fs::create_dir_all(parent).map_err(|e| Error::io("create", parent, e))?;
    let open = |place: &Path| cfg!(unix).then(|| open_directory(place)).transpose();
    let _held = fault::before(Operation::CreateDirectory(&place))
        .and_then(|()| claim(&place, |place| make_directory(place).and_then(|()| open(place))))
        .map_err(|e| Error::io("write", folder, e))?;
    let aside = Aside { path: place, is_placed: false };
    fill(&aside.path)?;
    sync_directory(&aside.path)?;
    if exists {
        fs::remove_dir(folder).map_err(|e| Error::io("replace", folder, e))?;
    }
    aside.place(folder)?;
    sync_directory(parent)
}

/// The file that what is written to `path` replaces: itself, or what it links to, whether that
/// exists or not.
///
/// Refuses a folder that does not exist, and what exists and is no regular file: a rename would put
/// a file in the place of a pipe or a device.
pub fn destination(path: &Path) -> Result<PathBuf> {
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
        Err(e) if e.kind() == ErrorKind::NotFound && parent(path).is_dir() => Ok(path.to_owned()),
        Err(e) => Err(failed(e)),
    }
}

/// [`destination`] of a file that does not exist yet.
pub fn new_file(path: &Path) -> Result<PathBuf> {
    let file = destination(path)?;
    match exists(path)? {
        true => Err(Error::file(path, "already exists; remove it, or name another file")),
        false => Ok(file),
    }
}

/// Where the next contents of `path` are written: beside it, so that a rename moves no data.
pub fn aside(path: &Path) -> PathBuf {
    let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    path.with_file_name(format!(".tmp-{name}"))
}

/// Renames a file, before it is replaced, to a free name in its folder such as `metrics.1.jsonl`.
/// Returns the new path and file name.
///
/// # Errors
/// [`Error::Io`].
pub fn keep(path: &Path) -> Result<(PathBuf, String)> {
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    let free = unused((1..).map(|number| path.with_extension(format!("{number}.{extension}"))))?;
    let name = free.file_name().unwrap_or_default().to_string_lossy().into_owned();
    rename(path, &free)?;
    Ok((free, name))
}

/// Whether a path leads to this open file.
///
/// # Errors
/// [`Error::Io`] if the path exists but cannot be opened.
#[cfg(unix)]
pub fn leads_to(path: &Path, file: &File) -> Result<bool> {
    let identity = |file: &File| {
        use std::os::unix::fs::MetadataExt;
        file.metadata().map(|found| (found.dev(), found.ino())).ok()
    };
    match open(path) {
        Ok((there, _)) => Ok(identity(&there) == identity(file)),
        Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(false),
        Err(error @ Error::Io { .. }) => Err(error),
        Err(_) => Ok(false),
    }
}

/// Whether a path leads to anything: files have no identity here.
///
/// # Errors
/// [`Error::Io`] if the path cannot be accessed.
#[cfg(not(unix))]
pub fn leads_to(path: &Path, _: &File) -> Result<bool> {
    exists(path)
}

/// Whether two paths, which may be relative or contain links, refer to the same place.
#[must_use]
pub fn is_same_place(a: &str, b: &str) -> bool {
    let absolute = |name| std::path::absolute(name).unwrap_or_default();
    let real = |name| fs::canonicalize(name).ok();
    absolute(a) == absolute(b) || real(a).is_some_and(|a| Some(a) == real(b))
}

/// The directory that holds `path`.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Opens a regular file and returns its size: reading a pipe could block, and a device might never
/// end.
pub fn open(path: &Path) -> Result<(File, u64)> {
    let file = open_as(path, As::Source)?;
    let kind = file.metadata().map_err(|e| Error::io("read", path, e))?;
    if !kind.is_file() {
        return Err(Error::file(
            path,
            if kind.is_dir() { "is a folder, expected a file" } else { "is not a regular file" },
        ));
    }
    Ok((file, kind.len()))
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
pub fn read(path: &Path) -> Result<Vec<u8>> {
    read_small(path, u64::MAX)
}

/// The whole file, refused beyond `limit` bytes. Files of procfs may never end.
pub fn read_small(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let (file, size) = open(path)?;
    check_size(path, size, limit)?;
    let mut bytes = reserve(path, usize::try_from(size).unwrap_or(usize::MAX))?;
    file.take(size).read_to_end(&mut bytes).map_err(|e| Error::io("read", path, e))?;
    Ok(bytes)
}

/// Refuses a file that is larger than `limit` bytes.
pub fn check_size(path: &Path, size: u64, limit: u64) -> Result {
    if size <= limit {
        return Ok(());
    }
    Err(Error::file(path, format!("holds {size} bytes, expected at most {limit}")))
}

/// Allocates space for the contents of a file, which may be larger than memory, and with holes
/// larger than any disk.
pub fn reserve<T>(path: &Path, count: usize) -> Result<Vec<T>> {
    let mut room = Vec::new();
    room.try_reserve_exact(count).map_err(|e| Error::io("read", path, e.into()))?;
    Ok(room)
}

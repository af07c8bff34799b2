//! Directories whose contents somebody else may have made, such as the run directories of others.
//!
//! Below a confined directory every operation of [`super`] starts from the directory's descriptor
//! and takes one name at a time, without following links. So neither a link nor a directory that is
//! exchanged meanwhile leads out of it, and a directory that is moved or removed while it is in use
//! is not made a second time. Only Unix has this; elsewhere confining has no effect.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::{Error, Result};

/// Keeps a directory confined until it is dropped.
#[derive(Debug, Clone)]
pub struct Confined(Arc<imp::Root>);

/// Confines the directory that the user named. This path itself may lead through links, unless it
/// is below a directory that is confined already.
///
/// # Errors
/// [`Error::Io`].
pub fn confine(path: &Path) -> Result<Confined> {
    imp::confine(path).map(Confined).map_err(|e| Error::io("open", path, e))
}

impl Confined {
    /// Where the directory is now: its path, unless that leads elsewhere because the directory was
    /// moved. None if it was removed, or where it is cannot be found out.
    #[must_use]
    pub fn place(&self) -> Option<PathBuf> {
        self.0.place()
    }
}

#[cfg(unix)]
pub(super) use imp::{check, resolve};

#[cfg(unix)]
mod imp {
    use std::{
        ffi::{OsStr, OsString},
        fs::{self, File},
        os::{
            fd::{AsRawFd, OwnedFd},
            unix::fs::MetadataExt,
        },
        path::{self, Component},
        sync::{PoisonError, RwLock, Weak},
    };

    use rustix::{
        fs::{AtFlags, CWD, Mode, OFlags, openat, unlinkat},
        io::Errno,
    };

    use super::*;

    static ROOTS: RwLock<Vec<Weak<Root>>> = RwLock::new(Vec::new());

    #[derive(Debug)]
    pub(super) struct Root {
        path: PathBuf,
        /// The same, wherever the process may go.
        absolute: PathBuf,
        directory: OwnedFd,
        identity: [u64; 2],
    }

    impl Root {
        pub(super) fn place(&self) -> Option<PathBuf> {
            let is_it =
                |path: &PathBuf| fs::metadata(path).is_ok_and(|at| identity(&at) == self.identity);
            let link = format!("/proc/self/fd/{}", self.directory.as_raw_fd());
            let moved = || fs::read_link(link).ok().filter(is_it);
            Some(self.path.clone()).filter(is_it).or_else(moved)
        }
    }

    const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

    pub(super) fn confine(path: &Path) -> io::Result<Arc<Root>> {
        let directory = match resolve(path)? {
            Some(at) => at.enter()?,
            None => openat(CWD, path, DIRECTORY, Mode::empty())?,
        };
        let identity = identity(&File::from(directory.try_clone()?).metadata()?);
        let (path, absolute) = (path.to_owned(), absolute(path));
        let root = Arc::new(Root { path, absolute, directory, identity });
        let mut roots = ROOTS.write().unwrap_or_else(PoisonError::into_inner);
        roots.retain(|root| root.strong_count() > 0);
        roots.push(Arc::downgrade(&root));
        Ok(root)
    }

    fn identity(of: &fs::Metadata) -> [u64; 2] {
        [of.dev(), of.ino()]
    }

    fn absolute(path: &Path) -> PathBuf {
        path::absolute(path).unwrap_or_else(|_| path.to_owned())
    }

    /// A name in an open directory.
    pub(crate) struct At {
        pub(crate) directory: OwnedFd,
        pub(crate) name: OsString,
    }

    /// The place of a path below a confined directory; `None` for any other path.
    pub(crate) fn resolve(path: &Path) -> io::Result<Option<At>> {
        let roots = ROOTS.read().unwrap_or_else(PoisonError::into_inner);
        let live: Vec<_> = roots.iter().rev().filter_map(Weak::upgrade).collect();
        drop(roots);
        let path = absolute(path);
        let by_path =
            |root: &Arc<Root>| Some((root.clone(), path.strip_prefix(&root.absolute).ok()?));
        // The outermost of other names for a root: what follows could be a link.
        let by_identity = || {
            let above = path.ancestors().filter(|_| !live.is_empty());
            let roots = above.filter_map(|at| {
                let found = identity(&fs::metadata(at).ok()?);
                let root = live.iter().find(|root| root.identity == found)?;
                Some((root.clone(), path.strip_prefix(at).ok()?))
            });
            roots.last()
        };
        let found = live.iter().find_map(by_path).or_else(by_identity);
        let Some((root, below)) = found else { return Ok(None) };
        let mut directory = root.directory.try_clone()?;
        let mut name = OsString::from(".");
        for (number, component) in below.components().enumerate() {
            let Component::Normal(next) = component else {
                return Err(io::Error::other("the path leads out of its directory"));
            };
            if number > 0 {
                directory = enter(&directory, &name)?;
            }
            next.clone_into(&mut name);
        }
        Ok(Some(At { directory, name }))
    }

    /// Checks that a path below a confined directory is a directory.
    pub(crate) fn check(path: &Path) -> io::Result<()> {
        resolve(path)?.map_or(Ok(()), |at| at.enter().map(drop))
    }

    fn enter(directory: &OwnedFd, name: &OsStr) -> io::Result<OwnedFd> {
        openat(directory, name, DIRECTORY | OFlags::NOFOLLOW, Mode::empty()).map_err(explained)
    }

    /// An error that says so where a link is not followed.
    fn explained(error: Errno) -> io::Error {
        match error {
            Errno::LOOP => io::Error::other("it is a symbolic link, and is not followed"),
            Errno::NOTDIR => io::Error::new(
                io::ErrorKind::NotADirectory,
                "it is, or is below, a symbolic link or a file, and is not followed",
            ),
            other => other.into(),
        }
    }

    impl At {
        /// Opens the file.
        pub(crate) fn open(&self, flags: OFlags) -> io::Result<OwnedFd> {
            let mode = Mode::from_raw_mode(0o666);
            let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            openat(&self.directory, &self.name, flags, mode).map_err(explained)
        }

        /// Makes the directory.
        pub(crate) fn make(&self) -> io::Result<()> {
            let mode = Mode::from_raw_mode(0o777);
            Ok(rustix::fs::mkdirat(&self.directory, &self.name, mode)?)
        }

        /// Opens the directory.
        pub(crate) fn enter(&self) -> io::Result<OwnedFd> {
            enter(&self.directory, &self.name)
        }

        /// The names in the directory.
        pub(crate) fn names(&self) -> io::Result<Vec<OsString>> {
            names(&self.enter()?)
        }

        /// Removes the directory and all that is in it.
        pub(crate) fn remove_all(&self) -> io::Result<()> {
            remove_all(&self.directory, &self.name, DEEPEST)
        }
    }

    fn names(directory: &OwnedFd) -> io::Result<Vec<OsString>> {
        use std::os::unix::ffi::OsStrExt;
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(directory)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                names.push(OsStr::from_bytes(name).to_owned());
            }
        }
        Ok(names)
    }

    /// Most directories in one another that are removed: each is open meanwhile.
    const DEEPEST: usize = 64;

    fn remove_all(parent: &OwnedFd, name: &OsStr, deepest: usize) -> io::Result<()> {
        if deepest == 0 {
            return Err(io::Error::other(
                "it holds more than 64 folders in one another; remove it",
            ));
        }
        let directory = enter(parent, name)?;
        for inner in names(&directory)? {
            match unlinkat(&directory, &inner, AtFlags::empty()) {
                // What a directory gives, on Linux and elsewhere.
                Err(Errno::ISDIR | Errno::PERM) => {
                    remove_all(&directory, &inner, deepest - 1)?;
                }
                other => other?,
            }
        }
        Ok(unlinkat(parent, name, AtFlags::REMOVEDIR)?)
    }
}

#[cfg(not(unix))]
mod imp {
    use super::*;

    #[derive(Debug)]
    pub(super) struct Root(PathBuf);

    impl Root {
        pub(super) fn place(&self) -> Option<PathBuf> {
            Some(self.0.clone()).filter(|path| path.is_dir())
        }
    }

    pub(super) fn confine(path: &Path) -> io::Result<Arc<Root>> {
        Ok(Arc::new(Root(path.to_owned())))
    }
}

#[cfg(all(test, unix))]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;
    use crate::disk;

    #[test]
    fn a_directory_has_many_paths() {
        let _confined = confine(Path::new("./src")).unwrap();
        let here = std::env::current_dir().unwrap();
        for path in ["src/lib.rs".into(), "./src/lib.rs".into(), here.join("src/lib.rs")] {
            assert!(resolve(&path).unwrap().is_some(), "{}", path.display());
        }
        assert!(resolve(Path::new("tests")).unwrap().is_none());
    }

    /// Every operation on a name that is a link, or below one, leaves what it points to alone.
    #[test]
    fn no_operation_leaves_a_confined_directory() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        let reset = || {
            for name in ["run", "outside"] {
                let _ = fs::remove_dir_all(at(name));
                fs::create_dir(at(name)).unwrap();
            }
            fs::write(at("outside/file"), "precious").unwrap();
            fs::create_dir(at("outside/folder")).unwrap();
            fs::write(at("run/own"), "own").unwrap();
            symlink("../outside/file", at("run/file")).unwrap();
            symlink("../outside/new", at("run/new")).unwrap();
            symlink("../outside", at("run/folder")).unwrap();
        };
        type Operation = fn(&Path) -> Result;
        let operations: [(&str, Operation); 13] = [
            ("read", |p| disk::read(p).map(drop)),
            ("open", |p| disk::open(p).map(drop)),
            ("create", |p| disk::NewFile::create(p.to_owned()).map(drop)),
            ("append", |p| disk::open_as(p, disk::As::Appended).map(drop)),
            ("new", |p| disk::open_as(p, disk::As::New).map(drop)),
            ("lock", |p| disk::open_as(p, disk::As::Lock).map(drop)),
            ("replace", |p| disk::write_atomically(p, b"evil")),
            ("rename", |p| disk::rename(&p.with_file_name("own"), p)),
            ("remove", disk::remove_file),
            ("remove directory", disk::remove_directory),
            ("create directory", disk::create_directory),
            ("create directories", |p| disk::create_directories(&p.join("a/b"))),
            ("confine", |p| {
                let _inner = confine(p)?;
                disk::write_atomically(&p.join("file"), b"evil")
            }),
        ];
        for (what, operate) in operations {
            for path in ["run/file", "run/new", "run/folder", "run/folder/file", "run/folder/new"] {
                reset();
                let confined = confine(&at("run")).unwrap();
                let _ = operate(&at(path));
                drop(confined);
                let case = format!("{what} {path}");
                assert_eq!(fs::read(at("outside/file")).unwrap(), b"precious", "{case}");
                let mut names: Vec<_> =
                    fs::read_dir(at("outside")).unwrap().map(|e| e.unwrap().file_name()).collect();
                names.sort();
                assert_eq!(names, ["file", "folder"], "{case}");
            }
        }
        reset();
        let _confined = confine(&at("run")).unwrap();
        for path in ["run/file", "run/folder/file", "run/../outside/file"] {
            assert!(disk::read(&at(path)).is_err(), "{path}");
        }
        assert_eq!(disk::read(&at("run/own")).unwrap(), b"own");
        disk::create_directories(&at("run/a/b")).unwrap();
        disk::create_directories(&at("run/a/b")).unwrap();
        assert!(at("run/a/b").is_dir());
    }

    #[test]
    fn deep_folders_are_not_removed_and_large_files_are_not_copied() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        fs::create_dir_all(at("deep").join("a/".repeat(100))).unwrap();
        let file = fs::File::create(at("lock")).unwrap();
        file.set_len(1 << 40).unwrap();
        fs::hard_link(at("lock"), at("other")).unwrap();
        let _confined = confine(place.path()).unwrap();
        let error = disk::remove_directory(&at("deep")).unwrap_err().to_string();
        assert!(error.contains("more than 64 folders"), "{error}");
        let error = disk::open_as(&at("lock"), disk::As::Lock).unwrap_err().to_string();
        assert!(error.contains("over 1 GiB"), "{error}");
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 3);
    }

    #[test]
    fn a_moved_directory_is_the_same_and_a_removed_one_is_not_made_again() {
        let place = tempfile::tempdir().unwrap();
        let (run, moved) = (place.path().join("run"), place.path().join("moved"));
        fs::create_dir(&run).unwrap();
        let confined = confine(&run).unwrap();
        disk::create_directory(&run.join("checkpoints")).unwrap();
        assert_eq!(confined.place().as_ref(), Some(&run));
        fs::rename(&run, &moved).unwrap();
        let place = confined.place().map(|place| fs::canonicalize(place).unwrap());
        assert_eq!(place, cfg!(target_os = "linux").then(|| fs::canonicalize(&moved).unwrap()));
        disk::write_atomically(&run.join("checkpoints/file"), b"text").unwrap();
        assert_eq!(fs::read(moved.join("checkpoints/file")).unwrap(), b"text");
        disk::remove_directory(&run.join("checkpoints")).unwrap();
        fs::remove_dir(&moved).unwrap();
        assert_eq!(confined.place(), None);
        assert!(disk::create_directory(&run.join("checkpoints")).is_err());
        assert!(disk::write_atomically(&run.join("file"), b"text").is_err());
        assert!(!run.exists());
    }
}

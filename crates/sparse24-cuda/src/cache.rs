//! Compiled kernels on disk.
//!
//! A file holds the blake3 hash of its content and then the content, and is renamed into place: a
//! torn or altered file is never taken for a kernel, and concurrent writers leave one complete
//! file. The cache never fails: what it cannot read is compiled again, and what it cannot write is
//! not kept. Writers remove temporary files that are a day old, left by processes that were killed.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// How file names end.
pub(crate) const SUFFIX: &str = ".cubin";

/// Environment variable with the folder; the default is `sparse24/kernels` in the user's cache.
const FOLDER_VARIABLE: &str = "SPARSE24_KERNEL_CACHE";

/// Age at which a temporary file is abandoned. Whether its process runs cannot be known, since
/// other machines may share the folder.
const STALE: Duration = Duration::from_secs(24 * 60 * 60);

/// A folder of compiled kernels; `None` if the user has no cache folder.
pub(crate) struct Cache(Option<PathBuf>);

impl Cache {
    pub(crate) fn of_user() -> Self {
        let set = env::var_os(FOLDER_VARIABLE).map(PathBuf::from);
        let cache = || {
            env::var_os("XDG_CACHE_HOME")
                .map(PathBuf::from)
                .or_else(|| env::home_dir().map(|home| home.join(".cache")))
        };
        Self(set.or_else(|| cache().map(|cache| cache.join("sparse24/kernels"))))
    }

    pub(crate) fn at(folder: &Path) -> Self {
        Self(Some(folder.to_owned()))
    }

    pub(crate) fn get(&self, name: &str) -> Option<Vec<u8>> {
        let mut bytes = fs::read(self.0.as_ref()?.join(name)).ok()?;
        let sum = *bytes.first_chunk::<32>()?;
        let content = bytes.split_off(32);
        (blake3::hash(&content) == sum).then_some(content)
    }

    pub(crate) fn names(&self) -> Vec<String> {
        let files =
            self.0.iter().filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten();
        files.filter_map(|file| file.file_name().into_string().ok()).collect()
    }

    pub(crate) fn put(&self, name: &str, content: &[u8]) {
        if let Some(folder) = &self.0 {
            let _ = Self::write(folder, name, content);
        }
    }

    pub(crate) fn write(folder: &Path, name: &str, content: &[u8]) -> io::Result<()> {
        static WRITTEN: AtomicU64 = AtomicU64::new(0);
        let temporary = folder.join(format!(
            "{name}.{}.{}",
            process::id(),
            WRITTEN.fetch_add(1, Ordering::Relaxed)
        ));
        let bytes = [blake3::hash(content).as_bytes().as_slice(), content].concat();
        let done = fs::create_dir_all(folder)
            .and_then(|()| fs::write(&temporary, bytes))
            .and_then(|()| fs::rename(&temporary, folder.join(name)));
        if done.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        Self::remove_stale(folder);
        done
    }

    /// Removes abandoned temporary files.
    fn remove_stale(folder: &Path) {
        for file in fs::read_dir(folder).into_iter().flatten().flatten() {
            let age = file
                .metadata()
                .ok()
                .filter(fs::Metadata::is_file)
                .and_then(|file| file.modified().ok()?.elapsed().ok());
            if age.is_some_and(|age| age > STALE)
                && file.file_name().to_str().is_some_and(is_temporary)
            {
                let _ = fs::remove_file(file.path());
            }
        }
    }
}

/// Whether this is the name of a temporary file: a kernel's name and two numbers.
fn is_temporary(name: &str) -> bool {
    let mut parts = name.rsplitn(3, '.');
    let mut is_number = || {
        parts
            .next()
            .is_some_and(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
    };
    is_number() && is_number() && parts.next().is_some_and(|name| name.ends_with(SUFFIX))
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn abandoned_files_are_removed_after_a_day() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = Cache::at(folder.path());
        let old = SystemTime::now() - 2 * STALE;
        for (name, modified) in [
            ("k.cubin.41.0", old),
            ("k.cubin.42.7", SystemTime::now()),
            ("k-13.0.cubin", old),
            ("libk.so.13.0", old),
        ] {
            let file = fs::File::create(folder.path().join(name)).expect("made");
            file.set_modified(modified).expect("set");
        }
        cache.put("k.cubin", b"cubin");
        let mut names = cache.names();
        names.sort();
        assert_eq!(names, ["k-13.0.cubin", "k.cubin", "k.cubin.42.7", "libk.so.13.0"]);
    }

    #[test]
    fn content_round_trips() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = Cache::at(&folder.path().join("a/b"));
        assert_eq!(cache.get("k"), None);
        assert_eq!(cache.names(), [""; 0]);
        cache.put("k", b"cubin");
        assert_eq!(cache.names(), ["k"]);
        assert_eq!(cache.get("k").as_deref(), Some(b"cubin".as_slice()));
        assert_eq!(
            fs::read_dir(folder.path().join("a/b")).expect("made").count(),
            1,
            "no temporary file is left"
        );
    }

    #[test]
    fn a_damaged_file_is_ignored() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = Cache::at(folder.path());
        cache.put("k", b"cubin");
        let whole = fs::read(folder.path().join("k")).expect("written");
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(folder.path().join("k"), &damaged).expect("written");
            assert_eq!(cache.get("k"), None, "byte {at} changed");
            fs::write(folder.path().join("k"), &whole[..at]).expect("written");
            assert_eq!(cache.get("k"), None, "cut at {at}");
        }
    }

    #[test]
    fn concurrent_writers_leave_one_complete_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let contents: Vec<Vec<u8>> = (0..4).map(|i| vec![i; 50_000]).collect();
        std::thread::scope(|scope| {
            for content in &contents {
                scope.spawn(|| (0..50).for_each(|_| Cache::at(folder.path()).put("k", content)));
            }
            for _ in 0..200 {
                if let Some(found) = Cache::at(folder.path()).get("k") {
                    assert!(contents.contains(&found));
                }
            }
        });
        assert!(contents.contains(&Cache::at(folder.path()).get("k").expect("one was put")));
    }

    #[test]
    fn a_folder_that_cannot_be_created_is_no_failure() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("file"), b"").expect("written");
        let cache = Cache::at(&folder.path().join("file/below"));
        cache.put("k", b"cubin");
        assert_eq!(cache.get("k"), None);
    }
}

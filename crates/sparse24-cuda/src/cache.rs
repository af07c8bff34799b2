//! Compiled kernels on disk.
//!
//! A file holds its content's blake3 and then the content, and comes to its name by a rename: a
//! torn or altered file is not taken for a kernel, and processes that write the same one at once
//! leave one whole. The cache never fails: what it cannot read is compiled again, and what it
//! cannot write is not kept. What a process that was killed left beside a name is removed by who
//! writes a day later.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use crate::compile::SUFFIX;

/// The folder of compiled kernels; otherwise it is `sparse24/kernels` in the user's cache.
pub(crate) const FOLDER_VARIABLE: &str = "SPARSE24_KERNEL_CACHE";

/// After so long nobody is still writing a file. Of processes nothing is asked: those of other
/// machines may share the folder.
const STALE: Duration = Duration::from_secs(24 * 60 * 60);

/// A folder of compiled kernels; `None` where there is no place for one.
pub(crate) struct Cache(Option<PathBuf>);

impl Cache {
    /// The user's.
    pub(crate) fn of_user() -> Self {
        let set = env::var_os(FOLDER_VARIABLE).map(PathBuf::from);
        let cache = || {
            env::var_os("XDG_CACHE_HOME")
                .map(PathBuf::from)
                .or_else(|| env::home_dir().map(|home| home.join(".cache")))
        };
        Self(set.or_else(|| cache().map(|cache| cache.join("sparse24/kernels"))))
    }

    /// At a folder.
    pub(crate) fn at(folder: &Path) -> Self {
        Self(Some(folder.to_owned()))
    }

    /// The content kept under a name.
    pub(crate) fn get(&self, name: &str) -> Option<Vec<u8>> {
        let mut bytes = fs::read(self.0.as_ref()?.join(name)).ok()?;
        let sum = *bytes.first_chunk::<32>()?;
        let content = bytes.split_off(32);
        (blake3::hash(&content) == sum).then_some(content)
    }

    /// The names under which something is kept.
    pub(crate) fn names(&self) -> Vec<String> {
        let files =
            self.0.iter().filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten();
        files.filter_map(|file| file.file_name().into_string().ok()).collect()
    }

    /// Keeps a content under a name, if it can.
    pub(crate) fn put(&self, name: &str, content: &[u8]) {
        if let Some(folder) = &self.0 {
            let _ = Self::write(folder, name, content);
        }
    }

    /// Keeps a content under a name in a folder.
    pub(crate) fn write(folder: &Path, name: &str, content: &[u8]) -> io::Result<()> {
        static WRITTEN: AtomicU64 = AtomicU64::new(0);
        let beside = folder.join(format!(
            "{name}.{}.{}",
            process::id(),
            WRITTEN.fetch_add(1, Ordering::Relaxed)
        ));
        let bytes = [blake3::hash(content).as_bytes().as_slice(), content].concat();
        let done = fs::create_dir_all(folder)
            .and_then(|()| fs::write(&beside, bytes))
            .and_then(|()| fs::rename(&beside, folder.join(name)));
        if done.is_err() {
            let _ = fs::remove_file(&beside);
        }
        Self::remove_stale(folder);
        done
    }

    /// Removes what was to be renamed and never was.
    fn remove_stale(folder: &Path) {
        for file in fs::read_dir(folder).into_iter().flatten().flatten() {
            let age = file
                .metadata()
                .ok()
                .filter(fs::Metadata::is_file)
                .and_then(|file| file.modified().ok()?.elapsed().ok());
            if age.is_some_and(|age| age > STALE)
                && file.file_name().to_str().is_some_and(is_beside)
            {
                let _ = fs::remove_file(file.path());
            }
        }
    }
}

/// Whether a name is one under which a kernel is written before it is renamed: its own, and two
/// numbers. Nothing else of a folder is ours.
fn is_beside(name: &str) -> bool {
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
    fn what_a_killed_process_left_is_removed_a_day_later() {
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
    fn what_was_put_is_got() {
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
            "nothing is left beside it"
        );
    }

    #[test]
    fn a_damaged_file_is_not_taken_for_a_kernel() {
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
    fn writers_at_once_leave_one_whole() {
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
    fn a_folder_that_cannot_be_made_is_no_failure() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("file"), b"").expect("written");
        let cache = Cache::at(&folder.path().join("file/below"));
        cache.put("k", b"cubin");
        assert_eq!(cache.get("k"), None);
    }
}

//! Where the shared libraries of CUDA are found, before anything asks for a function of them.
//!
//! Invariant: once [`Library::load`] succeeded, the bindings find the library too: a loader that holds a library of that name hands it
//! out again. Deliberately absent: versions; a function that a library lacks is an error of the call.

use std::{
    env,
    ffi::OsStr,
    fmt,
    path::{Path, PathBuf},
    sync::Mutex,
};

use crate::Error;

/// Folders with CUDA's libraries, tried before all others; separated as in `PATH`.
pub const FOLDERS_VARIABLE: &str = "SPARSE24_CUDA_LIBRARIES";

/// A shared library that is loaded at run time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Library {
    /// The driver.
    Driver,
    /// The compiler of kernels.
    Nvrtc,
    /// Dense products.
    CublasLt,
}

impl Library {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Driver, Self::Nvrtc, Self::CublasLt];

    /// Its file names, most specific first.
    #[must_use]
    pub const fn file_names(self) -> &'static [&'static str] {
        match self {
            Self::Driver => &["libcuda.so.1", "libcuda.so"],
            Self::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so"],
            Self::CublasLt => &["libcublasLt.so.13", "libcublasLt.so"],
        }
    }

    /// What to install where it is missing.
    #[must_use]
    pub const fn advice(self) -> &'static str {
        match self {
            Self::Driver => "install NVIDIA's driver, release 580 or later",
            Self::Nvrtc => "install CUDA 13, or `pip install nvidia-cuda-nvrtc` and name its lib folder in SPARSE24_CUDA_LIBRARIES",
            Self::CublasLt => "install CUDA 13, or `pip install nvidia-cublas` and name its lib folder in SPARSE24_CUDA_LIBRARIES",
        }
    }

    /// Loads it for the rest of the process and says which file it is.
    ///
    /// # Errors
    /// [`Error::Library`] with the file names that were tried.
    pub fn load(self) -> Result<PathBuf, Error> {
        static LOADED: Mutex<Vec<(Library, PathBuf)>> = Mutex::new(Vec::new());
        let mut loaded = LOADED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some((_, path)) = loaded.iter().find(|(library, _)| *library == self) {
            return Ok(path.clone());
        }
        let tried = self.candidates(env::var_os(FOLDERS_VARIABLE).as_deref());
        // SAFETY: the initialisers of CUDA's libraries may run at any time; the library is never unloaded.
        let opens = |path: &Path| unsafe { libloading::Library::new(path) }.map(std::mem::forget).is_ok();
        let with_parts = |path: &&PathBuf| {
            self.parts(path).iter().for_each(|part| _ = opens(part));
            opens(path)
        };
        match tried.iter().find(with_parts) {
            None => Err(Error::Library { library: self, tried }),
            Some(path) => {
                loaded.push((self, path.clone()));
                Ok(path.clone())
            }
        }
    }

    /// Files of the same folder that the library opens by their bare names, and so finds in the loader's own folders only, unless they are
    /// open already.
    fn parts(self, file: &Path) -> Vec<PathBuf> {
        let Self::Nvrtc = self else { return Vec::new() };
        let is_part = |file: &PathBuf| file.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libnvrtc-builtins.so"));
        // A bare name has an empty parent, which is no folder.
        file.parent().into_iter().flat_map(files).filter(is_part).collect()
    }

    /// Files to try, in order: the folders of the setting, the loader's own search, CUDA's usual folder, Python's packages.
    fn candidates(self, setting: Option<&OsStr>) -> Vec<PathBuf> {
        let names = self.file_names();
        let set: Vec<PathBuf> = setting.map(|folders| env::split_paths(folders).collect()).unwrap_or_default();
        let usual = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os).map(|home| Path::new(&home).join("lib64"));
        let others = usual.chain(["/usr/local/cuda/lib64".into()]).chain(python_folders());
        let within = |folder: PathBuf| names.iter().map(move |name| folder.join(name));
        let mut files: Vec<PathBuf> = set.into_iter().flat_map(within).collect();
        files.extend(names.iter().map(PathBuf::from));
        // Where the loader does not find it, a file that is not there need not be tried.
        files.extend(others.flat_map(within).filter(|file| file.is_file()));
        files
    }
}

/// `lib` of every folder of `site-packages/nvidia`, in the active environment and those beside the `python3` of the `PATH`.
fn python_folders() -> Vec<PathBuf> {
    let on_path = env::var_os("PATH").and_then(|path| env::split_paths(&path).find(|folder| folder.join("python3").exists()));
    let roots = env::var_os("VIRTUAL_ENV").map(PathBuf::from).into_iter().chain(on_path.and_then(|bin| bin.parent().map(Path::to_owned)));
    let mut folders: Vec<PathBuf> = roots
        .flat_map(|root| files(&root.join("lib")))
        .flat_map(|python| files(&python.join("site-packages/nvidia")))
        .map(|package| package.join("lib"))
        .filter(|folder| folder.is_dir())
        .collect();
    folders.sort();
    folders.dedup();
    folders
}

/// What a folder holds; nothing where it cannot be read.
fn files(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Driver => "the CUDA driver",
            Self::Nvrtc => "the compiler of CUDA kernels (NVRTC)",
            Self::CublasLt => "the library of dense products (cuBLASLt)",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folders_of_the_setting_come_first() {
        let files = Library::Nvrtc.candidates(Some(OsStr::new("/a:/b")));
        assert_eq!(files[..3], ["/a/libnvrtc.so.13", "/a/libnvrtc.so", "/b/libnvrtc.so.13"].map(PathBuf::from));
        assert!(files.contains(&PathBuf::from("libnvrtc.so.13")), "the loader's own search is tried too");
    }

    #[test]
    fn the_parts_of_the_compiler_lie_beside_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let [part, other] = ["libnvrtc-builtins.so.13.0", "libnvrtc-builtins.alt.so.13.0"].map(|name| folder.path().join(name));
        [&part, &other].into_iter().for_each(|file| std::fs::write(file, b"").expect("written"));
        assert_eq!(Library::Nvrtc.parts(&folder.path().join("libnvrtc.so.13")), [part]);
        assert!(Library::Nvrtc.parts(Path::new("libnvrtc.so.13")).is_empty());
    }

    #[test]
    fn a_missing_library_is_named_with_all_files_tried() {
        let error = Error::Library { library: Library::CublasLt, tried: vec!["/a/libcublasLt.so.13".into(), "libcublasLt.so".into()] };
        let text = error.to_string();
        assert!(
            text.contains("cuBLASLt") && text.contains("/a/libcublasLt.so.13, libcublasLt.so") && text.contains("pip install"),
            "{text}"
        );
    }
}

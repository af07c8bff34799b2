//! Finds and loads the shared libraries of CUDA.
//!
//! Invariant: functions come from the file that [`Library::load`] chose, even where the system's
//! loader would find another one first. cudarc loads NVRTC and cuBLASLt by names of its own choice,
//! so their functions are bound here, and so are NCCL's. Only the driver is left to cudarc: a
//! machine has one.

use std::{
    env,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use crate::{Error, Result, library::Library};

/// Environment variable with folders to search first, separated as in `PATH`.
pub const FOLDERS_VARIABLE: &str = "SPARSE24_CUDA_LIBRARIES";

impl Library {
    /// Loads the library for the rest of the process and returns its path.
    ///
    /// # Errors
    /// [`Error::Library`] lists the files that were tried and the folders that were searched.
    pub fn load(self) -> Result<PathBuf> {
        self.loaded().map(|(path, _)| path)
    }

    /// Looks up a function of the library.
    ///
    /// # Errors
    /// [`Error::Library`]; [`Error::Function`] if the library does not export it.
    ///
    /// # Safety
    /// `F` is a function pointer with the signature that the library gives `name`.
    pub(crate) unsafe fn function<F: Copy>(self, name: &'static str) -> Result<F> {
        let (file, library) = self.loaded()?;
        // SAFETY: the caller vouches for the signature.
        let found = unsafe { library.get::<F>(name.as_bytes()) };
        found.map(|function| *function).map_err(|_| Error::Function { library: self, file, name })
    }

    fn loaded(self) -> Result<(PathBuf, &'static libloading::Library)> {
        static LOADED: Mutex<Vec<(Library, PathBuf, &libloading::Library)>> =
            Mutex::new(Vec::new());
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, path, opened)) = loaded.iter().find(|(library, ..)| *library == self) {
            return Ok((path.clone(), opened));
        }
        let folders: Vec<PathBuf> = env::var_os(FOLDERS_VARIABLE)
            .map(|list| env::split_paths(&list).collect())
            .unwrap_or_default();
        let Candidates { files: tried, folders } = self.candidates(folders);
        let mut unloadable = None;
        for path in &tried {
            self.parts(path).iter().for_each(|part| _ = open(part));
            match open(path) {
                Ok(opened) => {
                    loaded.push((self, path.clone(), opened));
                    return Ok((path.clone(), opened));
                }
                Err(problem) if is_missing(path, &problem) => {}
                Err(problem) => unloadable = Some((path.clone(), problem)),
            }
        }
        Err(Error::Library { library: self, tried, folders, unloadable })
    }

    /// Files in the same folder that the library itself opens by bare name. They are found there
    /// only if they are already open.
    fn parts(self, file: &Path) -> Vec<PathBuf> {
        let Self::Nvrtc = self else { return Vec::new() };
        let is_part = |file: &PathBuf| {
            file.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with("libnvrtc-builtins.so"))
        };
        file.parent().into_iter().flat_map(files).filter(is_part).collect()
    }

    /// Files to try, in order: the named folders, the system's loader, CUDA's usual folders, Python
    /// packages. The driver is left to the system's loader.
    fn candidates(self, named: Vec<PathBuf>) -> Candidates {
        let names = self.file_names();
        let own = names.iter().map(PathBuf::from);
        if self == Self::Driver {
            return Candidates { files: own.collect(), folders: Vec::new() };
        }
        let usual = ["CUDA_HOME", "CUDA_PATH"]
            .into_iter()
            .filter_map(env::var_os)
            .map(|home| Path::new(&home).join("lib64"));
        let usual: Vec<PathBuf> = usual.chain(["/usr/local/cuda/lib64".into()]).collect();
        let python = packages(python_roots());
        let libraries =
            python.iter().flat_map(|packages| files(packages)).map(|package| package.join("lib"));
        let mut libraries: Vec<PathBuf> = libraries.filter(|folder| folder.is_dir()).collect();
        libraries.sort();
        let within =
            |folder: &PathBuf| names.iter().map(|name| folder.join(name)).collect::<Vec<_>>();
        let mut files: Vec<PathBuf> = named.iter().flat_map(within).chain(own).collect();
        files.extend(usual.iter().chain(&libraries).flat_map(within).filter(|file| file.is_file()));
        Candidates { files, folders: usual.into_iter().chain(python).collect() }
    }
}

struct Candidates {
    files: Vec<PathBuf>,
    /// Folders that were searched besides the named ones.
    folders: Vec<PathBuf>,
}

/// Opens a library and never closes it; the error is the loader's message.
fn open(path: &Path) -> Result<&'static libloading::Library, String> {
    // SAFETY: CUDA's libraries have no load-time preconditions, and are never unloaded.
    let opened = unsafe { libloading::Library::new(path) }.map_err(|error| match error {
        libloading::Error::DlOpen { source } => source.to_string(),
        error => error.to_string(),
    })?;
    Ok(Box::leak(Box::new(opened)))
}

/// Whether the loader reports this file as missing, rather than one of its dependencies.
fn is_missing(path: &Path, problem: &str) -> bool {
    problem
        .strip_prefix(&*path.to_string_lossy())
        .is_some_and(|rest| rest.ends_with(": No such file or directory"))
}

/// Binds functions of a [`Library`] under their own names.
macro_rules! functions {
    ($library:expr; $($name:ident($($argument:ident: $of:ty),*) -> $out:ty;)*) => {
        #[allow(non_snake_case)]
        struct Functions {
            $($name: unsafe extern "C" fn($($of),*) -> $out,)*
        }

        static FUNCTIONS: std::sync::OnceLock<Functions> = std::sync::OnceLock::new();

        /// Looks up all functions; call it before any of them.
        pub(crate) fn load() -> Result<(), crate::Error> {
            if FUNCTIONS.get().is_none() {
                let functions = Functions {
                    // SAFETY: the signature is that of the library's header.
                    $($name: unsafe { $library.function(stringify!($name)) }?,)*
                };
                // If another thread won the race, it resolved the same symbols.
                let _ = FUNCTIONS.set(functions);
            }
            Ok(())
        }

        $(
            /// # Safety
            /// The library's own conditions; [`load`] succeeded.
            #[allow(non_snake_case, clippy::too_many_arguments)]
            pub(crate) unsafe fn $name($($argument: $of),*) -> $out {
                let functions = FUNCTIONS.get().expect("the library was loaded");
                // SAFETY: the caller vouches for the signature.
                unsafe { (functions.$name)($($argument),*) }
            }
        )*
    };
}
pub(crate) use functions;

/// Prefixes of Python installations: the active environment, that of each `python3` on the `PATH`,
/// and the user's.
fn python_roots() -> Vec<PathBuf> {
    let path = env::var_os("PATH")
        .map(|path| env::split_paths(&path).collect::<Vec<_>>())
        .unwrap_or_default();
    let programs = path.iter().filter(|folder| folder.join("python3").exists());
    let prefixes: Vec<PathBuf> =
        programs.filter_map(|bin| bin.parent().map(Path::to_owned)).collect();
    let environments =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(env::var_os).map(PathBuf::from);
    // On Debian, pip installs below /usr/local.
    let local: Vec<PathBuf> = prefixes.iter().map(|prefix| prefix.join("local")).collect();
    let user = env::home_dir().map(|home| home.join(".local"));
    environments.chain(prefixes).chain(local).chain(user).collect()
}

/// The `nvidia` folder of every `site-packages` and `dist-packages` below these prefixes.
fn packages(roots: Vec<PathBuf>) -> Vec<PathBuf> {
    let libraries = roots.iter().flat_map(|root| ["lib", "lib64"].map(|lib| root.join(lib)));
    let is_python = |folder: &PathBuf| {
        folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python"))
    };
    let pythons = libraries.flat_map(|folder| {
        let mut pythons: Vec<PathBuf> = files(&folder).filter(is_python).collect();
        pythons.sort();
        pythons
    });
    let kinds = |python: PathBuf| ["site-packages", "dist-packages"].map(|kind| python.join(kind));
    let mut found = Vec::new();
    for folder in
        pythons.flat_map(kinds).filter(|folder| folder.is_dir()).map(|folder| folder.join("nvidia"))
    {
        if !found.contains(&folder) {
            found.push(folder);
        }
    }
    found
}

/// The entries of a folder; none if it cannot be read.
fn files(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_folders_come_first() {
        let Candidates { files, folders } =
            Library::Nvrtc.candidates(["/a", "/b"].map(PathBuf::from).into());
        assert_eq!(
            files[..3],
            ["/a/libnvrtc.so.13", "/a/libnvrtc.so", "/b/libnvrtc.so.13"].map(PathBuf::from)
        );
        assert!(
            files.contains(&PathBuf::from("libnvrtc.so.13")),
            "the system's loader is tried too"
        );
        assert!(folders.contains(&PathBuf::from("/usr/local/cuda/lib64")), "{folders:?}");
    }

    #[test]
    fn the_driver_is_the_file_that_cudarc_opens() {
        let Candidates { files, folders } = Library::Driver.candidates(vec!["/a".into()]);
        assert_eq!(
            (files, folders),
            (["libcuda.so", "libcuda.so.1"].map(PathBuf::from).into(), Vec::new())
        );
        let theirs = cudarc::get_lib_name_candidates("cuda");
        let place = |name| {
            theirs.iter().position(|candidate| candidate == name).expect("a candidate of cudarc")
        };
        assert!(place("libcuda.so") == 0 && place("libcuda.so.1") > 0);
    }

    #[test]
    fn python_packages_are_found_where_pip_installs_them() {
        let root = tempfile::tempdir().expect("a folder");
        let at = |path: &str| root.path().join(path);
        for folder in [
            "lib/python3.12/site-packages/nvidia",
            "lib/python3/dist-packages",
            "lib64/python3.9/site-packages",
            "lib/perl/site-packages",
        ] {
            std::fs::create_dir_all(at(folder)).expect("made");
        }
        let expected = [
            "lib/python3/dist-packages/nvidia",
            "lib/python3.12/site-packages/nvidia",
            "lib64/python3.9/site-packages/nvidia",
        ]
        .map(at);
        assert_eq!(
            packages(vec![root.path().into(), "/nowhere".into(), root.path().into()]),
            expected
        );
    }

    #[test]
    fn the_compiler_s_builtins_lie_beside_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let [part, other] = ["libnvrtc-builtins.so.13.0", "libnvrtc-builtins.alt.so.13.0"]
            .map(|name| folder.path().join(name));
        [&part, &other].into_iter().for_each(|file| std::fs::write(file, b"").expect("written"));
        assert_eq!(Library::Nvrtc.parts(&folder.path().join("libnvrtc.so.13")), [part]);
        assert!(Library::Nvrtc.parts(Path::new("libnvrtc.so.13")).is_empty());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn functions_come_from_the_opened_file() {
        let maps = || std::fs::read_to_string("/proc/self/maps").expect("this process's memory");
        // A library that this process has loaded already, like another release of CUDA might be.
        let files = maps();
        let file = files
            .lines()
            .filter_map(|line| line.split_whitespace().nth(5))
            .find(|file| file.contains("/libgcc_s.so"));
        let Some(file) = file else {
            return println!("skipped: this build has no library to try it with");
        };
        let folder = tempfile::tempdir().expect("a folder");
        let copy = folder.path().join("libgcc_s.so");
        std::fs::copy(file, &copy).expect("copied");
        let opened = open(&copy).expect("it was open before");
        // SAFETY: its address alone is read.
        let function = unsafe { opened.get::<*const ()>(b"_Unwind_GetIP") }
            .map(|function| *function as usize)
            .expect("it has one");
        let holds = |line: &str| -> Option<bool> {
            let (first, end) = line.split_whitespace().next()?.split_once('-')?;
            let [first, end] = [first, end].map(|address| usize::from_str_radix(address, 16));
            Some((first.ok()?..end.ok()?).contains(&function))
        };
        let maps = maps();
        let line = maps.lines().find(|line| holds(line) == Some(true)).expect("it lies somewhere");
        assert!(line.ends_with(copy.to_str().expect("a name")), "{line}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn an_unloadable_file_is_not_reported_as_missing() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("libnvrtc.so");
        for path in [&file, Path::new("libno-such-library.so.13")] {
            let problem = open(path).map(drop).expect_err("no such file");
            assert!(is_missing(path, &problem), "{problem}");
        }
        std::fs::write(&file, "text").expect("written");
        let problem = open(&file).map(drop).expect_err("not a library");
        assert!(!is_missing(&file, &problem), "{problem}");
        let needs = "libother.so: cannot open shared object file: No such file or directory";
        assert!(!is_missing(&file, needs) && !is_missing(Path::new("libnvrtc.so"), needs));
        let unloadable = Some((file.clone(), problem.clone()));
        let error = Error::Library {
            library: Library::Nvrtc,
            tried: vec![file.clone()],
            folders: vec![],
            unloadable,
        };
        let text = error.to_string();
        assert!(text.contains(&file.display().to_string()) && text.contains(&problem), "{text}");
    }

    #[test]
    fn the_error_lists_all_files_tried() {
        let error = Error::Library {
            library: Library::CublasLt,
            tried: vec!["/a/libcublasLt.so.13".into(), "libcublasLt.so".into()],
            folders: vec!["/c".into(), "/d".into()],
            unloadable: None,
        };
        let text = error.to_string();
        for part in ["/a/libcublasLt.so.13, libcublasLt.so", "/c, /d", "pip install"] {
            assert!(text.contains(part), "{text}");
        }
    }
}

//! Where the shared libraries of CUDA are found, before anything asks for a function of them.
//!
//! Invariant: functions are those of the file that [`Library::load`] chose, whatever else of its
//! name the loader would find; the bindings' own search prefers other names. The driver alone is
//! left to that search: a machine has one, which no folder replaces. Deliberately absent: versions;
//! a function that a library lacks is an error.

use std::{
    env, fmt,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use crate::Error;

/// Folders with CUDA's libraries, tried before all others; separated as in `PATH`.
pub const FOLDERS_VARIABLE: &str = "SPARSE24_CUDA_LIBRARIES";

/// Folders that the program names, tried after those of the variable.
static FOLDERS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// From here on, libraries are tried in these folders after those of [`FOLDERS_VARIABLE`] and
/// before all others; one that is loaded stays.
pub fn search_in(folders: &[PathBuf]) {
    let mut named = FOLDERS.lock().unwrap_or_else(PoisonError::into_inner);
    folders.clone_into(&mut named);
}

/// A shared library that is loaded at run time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Library {
    /// The driver.
    Driver,
    /// The compiler of kernels.
    Nvrtc,
    /// Dense products.
    CublasLt,
    /// The peer of sparse products in a bench; nothing else wants it.
    CusparseLt,
    /// Clocks and power, for a bench.
    Nvml,
}

impl Library {
    /// Those that training wants.
    pub const ALL: [Self; 3] = [Self::Driver, Self::Nvrtc, Self::CublasLt];

    /// Its file names, in the order in which they are tried.
    #[must_use]
    pub const fn file_names(self) -> &'static [&'static str] {
        match self {
            // In the order in which the bindings try them: the file that is named here is the one
            // that is called.
            Self::Driver => &["libcuda.so", "libcuda.so.1"],
            Self::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so"],
            Self::CublasLt => &["libcublasLt.so.13", "libcublasLt.so"],
            Self::CusparseLt => &["libcusparseLt.so.0", "libcusparseLt.so"],
            Self::Nvml => &["libnvidia-ml.so.1", "libnvidia-ml.so"],
        }
    }

    /// What to install where it is missing.
    #[must_use]
    pub const fn advice(self) -> &'static str {
        match self {
            Self::Driver => "install NVIDIA's driver, release 580 or later",
            Self::Nvrtc => {
                "install CUDA 13, or `pip install nvidia-cuda-nvrtc` and name its lib folder in SPARSE24_CUDA_LIBRARIES"
            }
            Self::CusparseLt => {
                "`pip install nvidia-cusparselt-cu13` and name its lib folder in SPARSE24_CUDA_LIBRARIES"
            }
            Self::Nvml => "it comes with NVIDIA's driver",
            Self::CublasLt => {
                "install CUDA 13, or `pip install nvidia-cublas` and name its lib folder in SPARSE24_CUDA_LIBRARIES"
            }
        }
    }

    /// Loads it for the rest of the process and says which file it is.
    ///
    /// # Errors
    /// [`Error::Library`] with the file names that were tried and the folders that were searched.
    pub fn load(self) -> Result<PathBuf, Error> {
        self.loaded().map(|(path, _)| path)
    }

    /// A function of it.
    ///
    /// # Errors
    /// [`Error::Library`]; [`Error::Function`] if it has none of this name.
    ///
    /// # Safety
    /// `F` is a pointer to a function of that function's type.
    pub(crate) unsafe fn function<F: Copy>(self, name: &'static str) -> Result<F, Error> {
        let (file, library) = self.loaded()?;
        // SAFETY: the caller's.
        let found = unsafe { library.get::<F>(name.as_bytes()) };
        found.map(|function| *function).map_err(|_| Error::Function { library: self, file, name })
    }

    fn loaded(self) -> Result<(PathBuf, &'static libloading::Library), Error> {
        static LOADED: Mutex<Vec<(Library, PathBuf, &libloading::Library)>> =
            Mutex::new(Vec::new());
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, path, opened)) = loaded.iter().find(|(library, ..)| *library == self) {
            return Ok((path.clone(), opened));
        }
        let mut folders: Vec<PathBuf> = env::var_os(FOLDERS_VARIABLE)
            .map(|list| env::split_paths(&list).collect())
            .unwrap_or_default();
        folders.extend(FOLDERS.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned());
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

    /// Files of the same folder that the library opens by their bare names, and so finds in the
    /// loader's own folders only, unless they are open already.
    fn parts(self, file: &Path) -> Vec<PathBuf> {
        let Self::Nvrtc = self else { return Vec::new() };
        let is_part = |file: &PathBuf| {
            file.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with("libnvrtc-builtins.so"))
        };
        // A bare name has an empty parent, which is no folder.
        file.parent().into_iter().flat_map(files).filter(is_part).collect()
    }

    /// Files to try, in order: folders that were named, the loader's own search, CUDA's usual
    /// folder, Python's packages. Of the driver the loader's own alone.
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
        // Where the loader does not find it, a file that is not there need not be tried.
        files.extend(usual.iter().chain(&libraries).flat_map(within).filter(|file| file.is_file()));
        Candidates { files, folders: usual.into_iter().chain(python).collect() }
    }
}

/// Where a library may be.
struct Candidates {
    /// To try.
    files: Vec<PathBuf>,
    /// Where files were looked for, beside those that were named.
    folders: Vec<PathBuf>,
}

/// Opens a library for the rest of the process, or tells what the loader says.
fn open(path: &Path) -> Result<&'static libloading::Library, String> {
    // SAFETY: the initialisers of CUDA's libraries may run at any time; the library is never
    // unloaded.
    let opened = unsafe { libloading::Library::new(path) }.map_err(|error| match error {
        libloading::Error::DlOpen { source } => source.to_string(),
        error => error.to_string(),
    })?;
    Ok(Box::leak(Box::new(opened)))
}

/// Whether what the loader says of a file is that it is not there. Where something else is missing
/// that the file needs, it says that one's name.
fn is_missing(path: &Path, problem: &str) -> bool {
    problem
        .strip_prefix(&*path.to_string_lossy())
        .is_some_and(|rest| rest.ends_with(": No such file or directory"))
}

/// Bindings to functions of a [`Library`] under their own names, found in the file that was chosen
/// when they are loaded.
macro_rules! functions {
    ($library:expr; $($name:ident($($argument:ident: $of:ty),*) -> $out:ty;)*) => {
        #[allow(non_snake_case)]
        struct Functions {
            $($name: unsafe extern "C" fn($($of),*) -> $out,)*
        }

        static FUNCTIONS: std::sync::OnceLock<Functions> = std::sync::OnceLock::new();

        /// Finds all of them.
        ///
        /// # Errors
        /// Those of [`Library::function`](crate::library::Library::function).
        pub(crate) fn load() -> Result<(), crate::Error> {
            if FUNCTIONS.get().is_none() {
                let functions = Functions {
                    // SAFETY: the library's header gives its function of this name this type.
                    $($name: unsafe { $library.function(stringify!($name)) }?,)*
                };
                // Who was faster found the same.
                let _ = FUNCTIONS.set(functions);
            }
            Ok(())
        }

        $(
            /// As the library documents it.
            ///
            /// # Safety
            /// The library's own conditions; [`load`] succeeded.
            #[allow(non_snake_case, clippy::too_many_arguments)]
            pub(crate) unsafe fn $name($($argument: $of),*) -> $out {
                let functions = FUNCTIONS.get().expect("the library was loaded");
                // SAFETY: the caller's.
                unsafe { (functions.$name)($($argument),*) }
            }
        )*
    };
}
pub(crate) use functions;

/// Where Python is installed: the active environment, what each `python3` of the `PATH` belongs to,
/// and the user's own packages.
fn python_roots() -> Vec<PathBuf> {
    let path = env::var_os("PATH")
        .map(|path| env::split_paths(&path).collect::<Vec<_>>())
        .unwrap_or_default();
    let programs = path.iter().filter(|folder| folder.join("python3").exists());
    let prefixes: Vec<PathBuf> =
        programs.filter_map(|bin| bin.parent().map(Path::to_owned)).collect();
    let environments =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(env::var_os).map(PathBuf::from);
    // Distributions leave /usr to their own packages, and have pip install beside.
    let local: Vec<PathBuf> = prefixes.iter().map(|prefix| prefix.join("local")).collect();
    let user = env::home_dir().map(|home| home.join(".local"));
    environments.chain(prefixes).chain(local).chain(user).collect()
}

/// The folders of NVIDIA's packages below these roots: `nvidia` in every `site-packages` and
/// `dist-packages`.
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
            Self::CusparseLt => "the peer of sparse products (cuSPARSELt)",
            Self::Nvml => "the library of clocks and power (NVML)",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_that_were_named_come_first() {
        let Candidates { files, folders } =
            Library::Nvrtc.candidates(["/a", "/b"].map(PathBuf::from).into());
        assert_eq!(
            files[..3],
            ["/a/libnvrtc.so.13", "/a/libnvrtc.so", "/b/libnvrtc.so.13"].map(PathBuf::from)
        );
        assert!(
            files.contains(&PathBuf::from("libnvrtc.so.13")),
            "the loader's own search is tried too"
        );
        assert!(folders.contains(&PathBuf::from("/usr/local/cuda/lib64")), "{folders:?}");
    }

    #[test]
    fn the_driver_is_what_the_bindings_open() {
        let Candidates { files, folders } = Library::Driver.candidates(vec!["/a".into()]);
        assert_eq!(
            (files, folders),
            (["libcuda.so", "libcuda.so.1"].map(PathBuf::from).into(), Vec::new())
        );
        let theirs = cudarc::get_lib_name_candidates("cuda");
        let place =
            |name| theirs.iter().position(|candidate| candidate == name).expect("they know it");
        assert!(place("libcuda.so") == 0 && place("libcuda.so.1") > 0);
    }

    #[test]
    fn packages_of_python_are_found_wherever_pip_puts_them() {
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
    fn the_parts_of_the_compiler_lie_beside_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let [part, other] = ["libnvrtc-builtins.so.13.0", "libnvrtc-builtins.alt.so.13.0"]
            .map(|name| folder.path().join(name));
        [&part, &other].into_iter().for_each(|file| std::fs::write(file, b"").expect("written"));
        assert_eq!(Library::Nvrtc.parts(&folder.path().join("libnvrtc.so.13")), [part]);
        assert!(Library::Nvrtc.parts(Path::new("libnvrtc.so.13")).is_empty());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn functions_are_those_of_the_file_that_was_opened() {
        let maps = || std::fs::read_to_string("/proc/self/maps").expect("this process's memory");
        // Of this process already, as another release of CUDA's may be.
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
    fn a_file_that_does_not_load_is_told_from_one_that_is_missing() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("libnvrtc.so");
        for path in [&file, Path::new("libno-such-library.so.13")] {
            let problem = open(path).map(drop).expect_err("nothing is there");
            assert!(is_missing(path, &problem), "{problem}");
        }
        std::fs::write(&file, "no library").expect("written");
        let problem = open(&file).map(drop).expect_err("it is no library");
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
        let start = format!(
            "the compiler of CUDA kernels (NVRTC) does not load: of {} the loader says {problem:?}; mend ",
            file.display()
        );
        assert!(error.to_string().starts_with(&start), "{error}");
    }

    #[test]
    fn a_missing_library_is_named_with_all_files_tried() {
        let error = Error::Library {
            library: Library::CublasLt,
            tried: vec!["/a/libcublasLt.so.13".into(), "libcublasLt.so".into()],
            folders: vec!["/c".into(), "/d".into()],
            unloadable: None,
        };
        let text = error.to_string();
        let start = "the library of dense products (cuBLASLt) was not found: tried /a/libcublasLt.so.13, libcublasLt.so, searched /c, /d; install ";
        assert!(text.starts_with(start) && text.contains("pip install"), "{text}");
    }
}

//! What `doctor` says about CUDA. A missing part is no problem of the machine: without a GPU, runs
//! take the CPU.

use std::path::PathBuf;

use serde::Serialize;
use sparse24_cuda::{
    Architecture, Error,
    survey::{self, Driver, Kernels, Survey},
};

#[derive(Serialize)]
pub(super) struct Cuda {
    libraries: Vec<Library>,
    /// The newest release of CUDA that the driver serves.
    release: Option<String>,
    gpus: Vec<Gpu>,
    /// Why there are no GPUs.
    problem: Option<String>,
}

#[derive(Serialize)]
struct Library {
    name: String,
    file: Option<PathBuf>,
    problem: Option<String>,
}

#[derive(Serialize)]
struct Gpu {
    name: String,
    capability: String,
    memory_mib: usize,
    /// What kernels are compiled for.
    architecture: Option<&'static str>,
    /// That serve it; nothing where they do not compile.
    kernels: Option<usize>,
    kernels_compiled: Option<usize>,
    problem: Option<String>,
}

impl Cuda {
    pub(super) fn of_machine(libraries: &[PathBuf]) -> Self {
        sparse24_cuda::loader::search_in(libraries);
        Self::new(survey::survey(), survey::kernels)
    }

    fn new(
        Survey { libraries, driver }: Survey,
        kernels: impl Fn(Architecture) -> Result<Kernels, Error>,
    ) -> Self {
        let library =
            |(library, found): (sparse24_cuda::library::Library, Result<PathBuf, Error>)| {
                let (file, problem) = split(found);
                Library { name: library.to_string(), file, problem }
            };
        let gpu = |survey::Gpu { name, capability: [major, minor], bytes, architecture }| {
            let unserved = || {
                Err(Error::Architecture { name: String::clone(&name), capability: [major, minor] })
            };
            let (kernels, problem) = split(architecture.map_or_else(unserved, &kernels));
            Gpu {
                name,
                capability: format!("{major}.{minor}"),
                memory_mib: bytes >> 20,
                architecture: architecture.map(Architecture::name),
                kernels: kernels.map(|kernels| kernels.all),
                kernels_compiled: kernels.map(|kernels| kernels.kept),
                problem,
            }
        };
        let (driver, problem) = split(driver);
        let (release, gpus) = driver
            .map(|Driver { release: [major, minor], gpus }| (format!("{major}.{minor}"), gpus))
            .unzip();
        Self {
            libraries: libraries.into_iter().map(library).collect(),
            release,
            gpus: gpus.unwrap_or_default().into_iter().map(gpu).collect(),
            problem,
        }
    }

    pub(super) fn lines(&self) -> Vec<String> {
        let library = |Library { name, file, problem }: &Library| match (file, problem) {
            (Some(file), _) => format!("CUDA          {name}: {}", file.display()),
            (None, problem) => format!("CUDA          {}", problem.as_deref().unwrap_or_default()),
        };
        let mut lines: Vec<String> = self.libraries.iter().map(library).collect();
        // That the driver's file is missing was said.
        let new = |problem: &&String| {
            !self.libraries.iter().any(|library| library.problem.as_ref() == Some(problem))
        };
        lines.extend(
            self.problem.as_ref().filter(new).map(|problem| format!("GPU           {problem}")),
        );
        lines.extend(self.release.as_ref().map(|release| {
            format!("GPU           {} in all; the driver serves CUDA {release}", self.gpus.len())
        }));
        for (i, Gpu { name, capability, memory_mib, kernels, kernels_compiled, problem, .. }) in
            self.gpus.iter().enumerate()
        {
            let kernels = match (kernels, kernels_compiled) {
                (Some(all), Some(compiled)) => format!(
                    "{compiled} of {all} kernels are compiled, others compile at their first use"
                ),
                _ => problem.clone().unwrap_or_default(),
            };
            lines.push(format!(
                "GPU {i:<9} {name}, compute capability {capability}, {memory_mib} MiB; {kernels}"
            ));
        }
        lines
    }
}

fn split<T>(result: Result<T, Error>) -> (Option<T>, Option<String>) {
    match result {
        Ok(found) => (Some(found), None),
        Err(error) => (None, Some(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIBRARY: sparse24_cuda::library::Library = sparse24_cuda::library::Library::Driver;

    fn lines(
        libraries: Result<PathBuf, Error>,
        driver: Result<Driver, Error>,
        kernels: Result<Kernels, Error>,
    ) -> Vec<String> {
        Cuda::new(Survey { libraries: vec![(LIBRARY, libraries)], driver }, |_| kernels.clone())
            .lines()
    }

    fn gpu(capability: [i32; 2]) -> Result<Driver, Error> {
        let architecture = Architecture::of_capability(capability[0], capability[1]);
        let gpu = survey::Gpu { name: "G".into(), capability, bytes: 3 << 30, architecture };
        Ok(Driver { release: [13, 0], gpus: vec![gpu] })
    }

    #[test]
    fn a_missing_driver_is_said_once() {
        let missing = Error::Library {
            library: LIBRARY,
            tried: vec!["libcuda.so".into()],
            folders: vec![],
            unloadable: None,
        };
        let lines = lines(Err(missing.clone()), Err(missing), Ok(Kernels { all: 1, kept: 0 }));
        assert_eq!(lines.len(), 1);
        assert!(
            lines[0].starts_with(
                "CUDA          the CUDA driver was not found: tried libcuda.so; install "
            ),
            "{lines:?}"
        );
    }

    #[test]
    fn a_driver_without_gpus_and_an_old_one_are_sentences() {
        for error in [
            Error::NoDevice { ordinal: 0, count: 0 },
            Error::OldDriver { found: [12, 4], required: [13, 0] },
        ] {
            let lines = lines(
                Ok("libcuda.so.1".into()),
                Err(error.clone()),
                Ok(Kernels { all: 1, kept: 0 }),
            );
            assert_eq!(
                lines,
                [
                    "CUDA          the CUDA driver: libcuda.so.1".to_owned(),
                    format!("GPU           {error}")
                ]
            );
        }
    }

    #[test]
    fn each_gpu_says_whether_it_would_have_kernels() {
        let file = || Ok("libcuda.so.1".into());
        let said = |driver, kernels| lines(file(), driver, kernels)[1..].join("\n");
        assert_eq!(
            said(gpu([9, 0]), Ok(Kernels { all: 7, kept: 2 })),
            "GPU           1 in all; the driver serves CUDA 13.0\n\
             GPU 0         G, compute capability 9.0, 3072 MiB; 2 of 7 kernels are compiled, others compile at their first use"
        );
        let compiler = Error::Library {
            library: sparse24_cuda::library::Library::Nvrtc,
            tried: vec!["libnvrtc.so".into()],
            folders: vec![],
            unloadable: None,
        };
        assert!(
            said(gpu([9, 0]), Err(compiler))
                .contains("3072 MiB; the CUDA kernel compiler (NVRTC) was not found: ")
        );
        let old = said(gpu([7, 5]), Ok(Kernels { all: 1, kept: 1 }));
        assert!(old.contains("G has compute capability 7.5, expected one of sm_80"), "{old}");
    }
}

//! The CUDA section of `doctor`. A missing part is not a problem of the machine: without a GPU,
//! runs use the CPU.

use std::path::PathBuf;

use serde::Serialize;
use serde_json::Value;
use sparse24_cuda::{
    Architecture, Error, library,
    survey::{self, Driver, Kernels, Survey},
};

#[derive(Serialize)]
struct Cuda {
    libraries: Vec<Library>,
    /// The newest CUDA release that the driver supports.
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
    /// The target of kernel compilation.
    architecture: Option<&'static str>,
    /// Number of kernels for this GPU; absent if they cannot be compiled.
    kernels: Option<usize>,
    kernels_compiled: Option<usize>,
    problem: Option<String>,
}

pub(super) fn survey() -> (Value, Vec<String>) {
    let cuda = Cuda::new(survey::survey(), survey::kernels);
    (serde_json::to_value(&cuda).expect("plain values"), cuda.lines())
}

impl Cuda {
    fn new(
        Survey { libraries, driver }: Survey,
        kernels: impl Fn(Architecture) -> Result<Kernels, Error>,
    ) -> Self {
        let library = |(library, found): (library::Library, Result<PathBuf, Error>)| {
            let (file, problem) = split(found);
            Library { name: library.to_string(), file, problem }
        };
        let gpu = |survey::Gpu { name, capability: [major, minor], bytes, architecture }| {
            let unsupported = || {
                Err(Error::Architecture { name: String::clone(&name), capability: [major, minor] })
            };
            let (kernels, problem) = split(architecture.map_or_else(unsupported, &kernels));
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

    fn lines(&self) -> Vec<String> {
        let library = |Library { name, file, problem }: &Library| match file {
            Some(file) => format!("CUDA          {name}: {}", file.display()),
            None => format!("CUDA          {}", problem.as_deref().unwrap_or_default()),
        };
        let mut lines: Vec<String> = self.libraries.iter().map(library).collect();
        // A missing driver is already in the lines of the libraries.
        let is_new = |problem: &&String| {
            !self.libraries.iter().any(|library| library.problem.as_ref() == Some(problem))
        };
        let problem = self.problem.as_ref().filter(is_new);
        lines.extend(problem.map(|problem| format!("GPU           {problem}")));
        lines.extend(self.release.as_ref().map(|release| {
            format!("GPU           {} found; the driver supports CUDA {release}", self.gpus.len())
        }));
        for (i, gpu) in self.gpus.iter().enumerate() {
            let Gpu { name, capability, memory_mib, kernels, kernels_compiled, problem, .. } = gpu;
            let kernels = match (kernels, kernels_compiled) {
                (Some(all), Some(compiled)) => format!(
                    "{compiled} of {all} kernels are compiled, the others compile on first use"
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
    use sparse24_cuda::library::Library;

    use super::*;

    fn missing(library: Library) -> Error {
        Error::Library { library, tried: vec![], folders: vec![], unloadable: None }
    }

    fn gpu(capability: [i32; 2]) -> Result<Driver, Error> {
        let architecture = Architecture::of_capability(capability[0], capability[1]);
        let gpu = survey::Gpu { name: "G".into(), capability, bytes: 3 << 30, architecture };
        Ok(Driver { release: [13, 0], gpus: vec![gpu] })
    }

    #[test]
    fn each_problem_is_reported_once() {
        let found = || Ok("libcuda.so.1".into());
        let no_gpu = Error::NoDevice { ordinal: 0, count: 0 };
        let old_driver = Error::OldDriver { found: [12, 4], required: [13, 0] };
        let kernels = |all, kept| Ok(Kernels { all, kept });
        let no_driver = missing(Library::Driver);
        let no_compiler = missing(Library::Nvrtc);
        for (library, driver, kernels, expected) in [
            (
                Err(no_driver.clone()),
                Err(no_driver.clone()),
                kernels(1, 0),
                vec![no_driver.to_string()],
            ),
            (
                found(),
                Err(no_gpu.clone()),
                kernels(1, 0),
                vec!["libcuda.so.1".into(), no_gpu.to_string()],
            ),
            (
                found(),
                Err(old_driver.clone()),
                kernels(1, 0),
                vec!["libcuda.so.1".into(), old_driver.to_string()],
            ),
            (
                found(),
                gpu([9, 0]),
                kernels(7, 2),
                vec![
                    "libcuda.so.1".into(),
                    "1 found; the driver supports CUDA 13.0".into(),
                    "G, compute capability 9.0, 3072 MiB; 2 of 7 kernels".into(),
                ],
            ),
            (
                found(),
                gpu([9, 0]),
                Err(no_compiler.clone()),
                vec!["libcuda.so.1".into(), "1 found".into(), format!("3072 MiB; {no_compiler}")],
            ),
            (
                found(),
                gpu([7, 5]),
                kernels(1, 1),
                vec![
                    "libcuda.so.1".into(),
                    "1 found".into(),
                    "compute capability 7.5, 3072 MiB; G has ".into(),
                ],
            ),
        ] {
            let survey = Survey { libraries: vec![(Library::Driver, library)], driver };
            let lines = Cuda::new(survey, |_| kernels.clone()).lines();
            assert_eq!(lines.len(), expected.len(), "{lines:?}");
            for (line, expected) in lines.iter().zip(expected) {
                assert!(line.contains(&expected), "{expected:?} is missing in {line:?}");
            }
        }
    }
}

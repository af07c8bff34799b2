//! The CUDA section of `doctor`. A missing part is not a problem of the machine: without a GPU,
//! runs use the CPU.

use std::path::PathBuf;

use serde_json::{Value, json};
use sparse24_cuda::{
    Architecture, Error,
    library::Library,
    survey::{self, Driver, Gpu, Kernels, Survey},
};

pub(super) fn survey() -> (Value, Vec<String>) {
    report(survey::survey(), survey::kernels)
}

/// The report as JSON and as lines.
fn report(
    Survey { libraries, nccl, driver }: Survey,
    kernels: impl Fn(Architecture) -> Result<Kernels, Error>,
) -> (Value, Vec<String>) {
    let mut lines = Vec::new();
    let library = |(library, found): (Library, Result<PathBuf, Error>)| {
        let (file, problem) = split(found);
        let found = file.as_ref().map(|file| format!("{library}: {}", file.display()));
        lines.push(format!("CUDA          {}", found.or(problem.clone()).unwrap_or_default()));
        json!({ "name": library.to_string(), "file": file, "problem": problem })
    };
    let libraries: Vec<Value> = libraries.into_iter().map(library).collect();
    let (nccl, without_nccl) = split(nccl);
    lines.extend(nccl.as_ref().map(|(file, release)| {
        format!("CUDA          {} {release}: {}", Library::Nccl, file.display())
    }));
    lines.extend(without_nccl.as_ref().map(|problem| {
        format!("CUDA          {problem}; without it, several GPUs exchange gradients over TCP")
    }));
    let (file, nccl_release) = nccl.unzip();
    let nccl = json!({ "file": file, "release": nccl_release, "problem": without_nccl });
    let (driver, problem) = split(driver);
    // A missing driver is already in the lines of the libraries.
    let is_new = |problem: &&String| libraries.iter().all(|row| row["problem"] != **problem);
    lines.extend(problem.iter().filter(is_new).map(|problem| format!("GPU           {problem}")));
    let (release, gpus) = driver
        .map(|Driver { release: [major, minor], gpus }| (format!("{major}.{minor}"), gpus))
        .unzip();
    let gpus = gpus.unwrap_or_default();
    lines.extend(release.as_ref().map(|release| {
        format!("GPU           {} found; the driver supports CUDA {release}", gpus.len())
    }));
    let gpu = |(at, Gpu { name, capability, bytes, architecture }): (usize, Gpu)| {
        let unsupported = || Err(Error::Architecture { name: name.clone(), capability });
        let (kernels, problem) = split(architecture.map_or_else(unsupported, &kernels));
        let ([major, minor], memory_mib) = (capability, bytes >> 20);
        let state = kernels.map(|Kernels { all, kept }| {
            format!("{kept} of {all} kernels are compiled, the others compile on first use")
        });
        lines.push(format!(
            "GPU {at:<9} {name}, compute capability {major}.{minor}, {memory_mib} MiB; {}",
            state.or(problem.clone()).unwrap_or_default()
        ));
        json!({
            "name": name,
            "capability": format!("{major}.{minor}"),
            "memory_mib": memory_mib,
            // The target of kernel compilation.
            "architecture": architecture.map(Architecture::name),
            // Null if they cannot be compiled.
            "kernels": kernels.map(|kernels| kernels.all),
            "kernels_compiled": kernels.map(|kernels| kernels.kept),
            "problem": problem,
        })
    };
    let gpus: Vec<Value> = gpus.into_iter().enumerate().map(gpu).collect();
    let report = json!({ "libraries": libraries, "nccl": nccl, "release": release, "gpus": gpus,
            "problem": problem });
    (report, lines)
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

    fn missing(library: Library) -> Error {
        Error::Library { library, tried: vec![], folders: vec![], unloadable: None }
    }

    fn gpu(capability: [i32; 2]) -> Result<Driver, Error> {
        let architecture = Architecture::of_capability(capability[0], capability[1]);
        let gpu = Gpu { name: "G".into(), capability, bytes: 3 << 30, architecture };
        Ok(Driver { release: [13, 0], gpus: vec![gpu] })
    }

    #[test]
    fn each_problem_is_reported_once() {
        const FILE: &str = "libcuda.so.1";
        let no_gpu = Error::NoDevice { ordinal: 0, count: 0 };
        let old_driver = Error::OldDriver { found: [12, 4], required: [13, 0] };
        let (no_driver, no_compiler) = (missing(Library::Driver), missing(Library::Nvrtc));
        let problems = [&no_driver, &no_gpu, &old_driver, &no_compiler].map(ToString::to_string);
        let [is_missing, no_device, is_old, no_kernels] = problems.each_ref().map(String::as_str);
        let some = Ok(Kernels { all: 7, kept: 2 });
        let release = "1 found; the driver supports CUDA 13.0";
        for (library, driver, kernels, expected) in [
            (Err(no_driver.clone()), Err(no_driver), &some, &[is_missing][..]),
            (Ok(FILE.into()), Err(no_gpu), &some, &[FILE, no_device]),
            (Ok(FILE.into()), Err(old_driver), &some, &[FILE, is_old]),
            (
                Ok(FILE.into()),
                gpu([9, 0]),
                &some,
                &[FILE, release, "G, compute capability 9.0, 3072 MiB; 2 of 7 kernels"],
            ),
            (Ok(FILE.into()), gpu([9, 0]), &Err(no_compiler), &[FILE, release, no_kernels]),
            (
                Ok(FILE.into()),
                gpu([7, 5]),
                &some,
                &[FILE, release, "compute capability 7.5, 3072 MiB; G has "],
            ),
        ] {
            let nccl = Ok(("libnccl.so.2".into(), "2.27.5".to_owned()));
            let survey = Survey { libraries: vec![(Library::Driver, library)], nccl, driver };
            let (_, mut lines) = report(survey, |_| kernels.clone());
            let nccl = lines.remove(1);
            assert!(nccl.ends_with("(NCCL) 2.27.5: libnccl.so.2"), "{nccl}");
            assert_eq!(lines.len(), expected.len(), "{lines:?}");
            for (line, expected) in lines.iter().zip(expected) {
                assert!(line.contains(expected), "{expected:?} is missing in {line:?}");
            }
        }
    }
}

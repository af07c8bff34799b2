//! The CUDA libraries, GPUs and compiled kernels of this machine. No context is created, so a
//! survey does not disturb other processes.

use std::path::PathBuf;

use cudarc::driver::{DriverError, result, sys};

use crate::{
    Architecture, Error,
    cache::Cache,
    compile, driver,
    error::driver_error,
    kernels::{SOURCES, Source},
    library::Library,
    nccl,
};

/// The libraries and GPUs of this machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Survey {
    /// Each library with its file, or [`Error::Library`].
    pub libraries: Vec<(Library, Result<PathBuf, Error>)>,
    /// NCCL's file and its release; one GPU does not need it.
    pub nccl: Result<(PathBuf, String), Error>,
    /// The driver, or why none is usable.
    pub driver: Result<Driver, Error>,
}

/// The driver and its GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Driver {
    /// Newest CUDA release that it supports: major, minor.
    pub release: [i32; 2],
    /// GPUs, by number.
    pub gpus: Vec<Gpu>,
}

/// A GPU that the driver reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// The driver's name for it.
    pub name: String,
    /// Compute capability: major, minor.
    pub capability: [i32; 2],
    /// Bytes of memory.
    pub bytes: usize,
    /// The architecture that kernels are compiled for; `None` if there are none.
    pub architecture: Option<Architecture>,
}

/// Kernel files for an architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kernels {
    /// Number of files.
    pub all: usize,
    /// How many of them are in the cache.
    pub kept: usize,
}

/// Looks for every library and GPU.
#[must_use]
pub fn survey() -> Survey {
    Survey {
        libraries: Library::ALL.map(|library| (library, library.load())).into(),
        nccl: nccl::release(),
        driver: driver(),
    }
}

fn driver() -> Result<Driver, Error> {
    let release = driver::start()?;
    let count =
        result::device::get_count().map_err(|error| driver_error("counting GPUs", error))?;
    let gpus = (0..count)
        .map(|ordinal| {
            gpu(ordinal).map_err(|error| driver_error(format!("querying GPU {ordinal}"), error))
        })
        .collect::<Result<_, _>>()?;
    Ok(Driver { release, gpus })
}

fn gpu(ordinal: i32) -> Result<Gpu, DriverError> {
    use sys::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
    };
    let device = result::device::get(ordinal)?;
    // SAFETY: the driver just returned this device.
    let (bytes, major, minor) = unsafe {
        (
            result::device::total_mem(device)?,
            result::device::get_attribute(device, MAJOR)?,
            result::device::get_attribute(device, MINOR)?,
        )
    };
    let architecture = Architecture::of_capability(major, minor);
    Ok(Gpu {
        name: result::device::get_name(device)?,
        capability: [major, minor],
        bytes,
        architecture,
    })
}

/// Checks that kernels are available for an architecture: all are in the user's cache, or the first
/// that is not can be compiled (and is cached).
///
/// # Errors
/// See [`compile`](crate::compile()).
pub fn kernels(architecture: Architecture) -> Result<Kernels, Error> {
    kernels_in(&Cache::of_user(), architecture)
}

fn kernels_in(cache: &Cache, architecture: Architecture) -> Result<Kernels, Error> {
    let sources: Vec<&Source> =
        SOURCES.iter().filter(|source| source.serves.contains(&architecture)).collect();
    let release = compile::release_for(cache, architecture)?;
    let missing: Vec<_> = sources
        .iter()
        .filter(|source| !compile::is_cached(cache, source, architecture, release))
        .collect();
    if let Some(first) = missing.first() {
        compile::cached(cache, first, architecture, release)?;
    }
    Ok(Kernels { all: sources.len(), kept: sources.len() - missing.len() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_survey_works_on_any_machine() {
        let Survey { libraries, driver, .. } = survey();
        assert_eq!(libraries.iter().map(|(library, _)| *library).collect::<Vec<_>>(), Library::ALL);
        let there =
            libraries.iter().any(|(library, file)| *library == Library::Driver && file.is_ok());
        match driver {
            Ok(Driver { release, .. }) => assert!(there && release >= [13, 0]),
            Err(error) => assert_eq!(
                matches!(error, Error::Library { library: Library::Driver, .. }),
                !there,
                "{error}"
            ),
        }
    }

    #[test]
    fn cached_kernels_need_no_compiler() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = Cache::at(folder.path());
        let serving = |source: &&Source| source.serves.contains(&Architecture::Sm80);
        for source in SOURCES.iter().filter(serving) {
            match kernels_in(&cache, Architecture::Sm80) {
                Ok(Kernels { all, kept }) => assert!(Library::Nvrtc.load().is_ok() && kept < all),
                Err(error) => assert!(
                    matches!(error, Error::Library { library: Library::Nvrtc, .. }),
                    "{error}"
                ),
            }
            let release = compile::release().unwrap_or(compile::Release { major: 13, minor: 0 });
            cache.put(&compile::file_name(source, Architecture::Sm80, release), b"cubin");
        }
        let all = SOURCES.iter().filter(serving).count();
        assert_eq!(kernels_in(&cache, Architecture::Sm80), Ok(Kernels { all, kept: all }));
    }
}

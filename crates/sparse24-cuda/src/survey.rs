//! What of CUDA this machine has: each library, each GPU, and whether kernels would run there.
//!
//! Deliberately absent: contexts and memory on a GPU. Nothing is opened, so that a survey disturbs
//! nobody.

use std::path::PathBuf;

use cudarc::driver::{DriverError, result, sys};

use crate::{
    Architecture, Error,
    cache::Cache,
    compile,
    device::driver_error,
    driver,
    kernels::{SOURCES, Source},
    library::Library,
};

/// A machine, as far as CUDA is concerned.
#[derive(Debug, Clone, PartialEq)]
pub struct Survey {
    /// Each library with the file that it is, or [`Error::Library`].
    pub libraries: Vec<(Library, Result<PathBuf, Error>)>,
    /// What the driver says, or why there is none that serves.
    pub driver: Result<Driver, Error>,
}

/// What the driver says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Driver {
    /// The newest release of CUDA that it serves: major, minor.
    pub release: [i32; 2],
    /// In the order of their numbers.
    pub gpus: Vec<Gpu>,
}

/// A GPU that the driver sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Its name.
    pub name: String,
    /// Major, minor.
    pub capability: [i32; 2],
    /// Of memory.
    pub bytes: usize,
    /// What kernels are compiled for; `None` where none exist.
    pub architecture: Option<Architecture>,
}

/// Compiled kernels of an architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kernels {
    /// Sources that serve it.
    pub all: usize,
    /// Those of them that were compiled before, and are kept.
    pub kept: usize,
}

/// Looks for every library and every GPU; what is missing is part of the answer.
#[must_use]
pub fn survey() -> Survey {
    Survey {
        libraries: Library::ALL.map(|library| (library, library.load())).into(),
        driver: driver(),
    }
}

fn driver() -> Result<Driver, Error> {
    let release = driver::start()?;
    let said = |what: &str| {
        let what = what.to_owned();
        move |error: DriverError| driver_error(what, error)
    };
    let count = result::device::get_count().map_err(said("counting GPUs"))?;
    let gpus = (0..count)
        .map(|ordinal| gpu(ordinal).map_err(said(&format!("asking about GPU {ordinal}"))))
        .collect::<Result<_, _>>()?;
    Ok(Driver { release, gpus })
}

fn gpu(ordinal: i32) -> Result<Gpu, DriverError> {
    use sys::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
    };
    let device = result::device::get(ordinal)?;
    // SAFETY: the device is one that the driver just named.
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

/// Whether a GPU of an architecture would have its kernels: all are kept in the user's folder, or
/// the first that is not compiles (and is kept).
///
/// # Errors
/// Those of [`compile`](crate::compile()).
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
    fn a_survey_answers_on_any_machine() {
        let Survey { libraries, driver } = survey();
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
    fn kernels_that_are_kept_need_no_compiler() {
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

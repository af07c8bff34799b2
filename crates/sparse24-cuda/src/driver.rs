//! Loads and initializes the CUDA driver, after checking that it is recent enough.
//!
//! Invariant: [`start`] comes before every other call of the driver. An older driver lacks
//! functions that cudarc would look up.

use cudarc::driver::{DriverError, result, sys};

use crate::{Error, Result, error::driver_error, library::Library};

/// The CUDA release that compiled kernels need.
const REQUIRED: [i32; 2] = [13, 0];

/// Functions of the first calls. cudarc panics where one is missing, as in a stub of the driver.
const FIRST: [&str; 12] = [
    "cuDriverGetVersion",
    "cuInit",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceTotalMem_v2",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuCtxSetCurrent",
    "cuStreamCreate",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
];

/// Initializes the driver and returns the newest CUDA release that it supports: major, minor.
pub(crate) fn start() -> Result<[i32; 2]> {
    for name in FIRST {
        // SAFETY: it is looked up and not called.
        unsafe { Library::Driver.function::<unsafe extern "C" fn()>(name) }?;
    }
    let mut version = 0;
    // SAFETY: the driver is loaded, and this call is allowed before initialization.
    unsafe { sys::cuDriverGetVersion(&mut version) }
        .result()
        .map_err(|error| driver_error("querying the driver's version", error))?;
    let release = check_version(version)?;
    match result::init() {
        Ok(()) => Ok(release),
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => {
            Err(Error::NoDevice { ordinal: 0, count: 0 })
        }
        Err(error) => Err(driver_error("initializing the driver", error)),
    }
}

/// The driver's own release, such as 580.82.07, if the system reports it.
pub(crate) fn own_release() -> Option<String> {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    release_in(&text).map(str::to_owned)
}

/// The first word that consists of numbers and dots.
fn release_in(text: &str) -> Option<&str> {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    text.split_whitespace().find(|word| word.contains('.') && word.split('.').all(is_number))
}

/// Decodes CUDA's version number (13000 is 13.0).
fn check_version(version: i32) -> Result<[i32; 2]> {
    let found = [version / 1000, version % 1000 / 10];
    if found >= REQUIRED { Ok(found) } else { Err(Error::OldDriver { found, required: REQUIRED }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_is_found_in_the_system_s_text() {
        let text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release \
                    Build  (dvs-builder@U22)  Wed Aug 27\nGCC version:  gcc version 12.3.0\n";
        assert_eq!(release_in(text), Some("580.82.07"));
        assert_eq!(release_in("NVRM version: none.\n"), None);
    }

    #[test]
    fn an_old_driver_is_refused() {
        assert_eq!([check_version(13000), check_version(13020)], [Ok([13, 0]), Ok([13, 2])]);
        for (version, found) in [(12090, [12, 9]), (11080, [11, 8]), (0, [0, 0])] {
            assert_eq!(check_version(version), Err(Error::OldDriver { found, required: REQUIRED }));
        }
    }
}

//! The driver's start: loaded, recent enough, initialised.
//!
//! Invariant: nothing else of the driver is called before; an older one lacks functions that the
//! bindings then look for in vain.

use cudarc::driver::{DriverError, result, sys};

use crate::{Error, device::driver_error, library::Library};

/// The release of CUDA that compiled kernels ask of the driver.
const REQUIRED: [i32; 2] = [13, 0];

/// Starts the driver and says up to which release of CUDA it serves: major, minor.
pub(crate) fn start() -> Result<[i32; 2], Error> {
    Library::Driver.load()?;
    let mut version = 0;
    // SAFETY: the driver is loaded; this call writes one number and may come before the
    // initialisation.
    unsafe { sys::cuDriverGetVersion(&mut version) }
        .result()
        .map_err(|error| driver_error("asking for the driver's release".into(), error))?;
    let release = recent(version)?;
    match result::init() {
        Ok(()) => Ok(release),
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => {
            Err(Error::NoDevice { ordinal: 0, count: 0 })
        }
        Err(error) => Err(driver_error("starting the driver".into(), error)),
    }
}

/// The driver's own release, where the system tells it: 580.82.07.
pub(crate) fn own_release() -> Option<String> {
    std::fs::read_to_string("/proc/driver/nvidia/version")
        .ok()
        .as_deref()
        .and_then(release_in)
        .map(str::to_owned)
}

/// The first word that is a number with dots.
fn release_in(text: &str) -> Option<&str> {
    let is_release = |word: &&str| {
        word.contains('.')
            && word
                .split('.')
                .all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
    };
    text.split_whitespace().find(is_release)
}

/// From the driver's number, 13000 for 13.0.
fn recent(version: i32) -> Result<[i32; 2], Error> {
    let release = [version / 1000, version % 1000 / 10];
    if release >= REQUIRED {
        Ok(release)
    } else {
        Err(Error::OldDriver { found: release, required: REQUIRED })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_is_read_from_what_the_system_tells() {
        let text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build  (dvs-builder@U22)  Wed Aug 27\n\
                    GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n";
        assert_eq!(release_in(text), Some("580.82.07"));
        assert_eq!(release_in("NVRM version: none.\n"), None);
    }

    #[test]
    fn an_old_driver_is_refused_with_both_releases() {
        assert_eq!([recent(13000), recent(13020)], [Ok([13, 0]), Ok([13, 2])]);
        for (version, release) in [(12090, "12.9"), (11080, "11.8"), (0, "0.0")] {
            let text = recent(version).expect_err("too old").to_string();
            assert!(
                text.contains(&format!("CUDA {release}"))
                    && text.contains("13.0")
                    && text.contains("install"),
                "{text}"
            );
        }
    }
}

//! Clocks, power and temperature of a GPU, from NVML. Read-only.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    ptr::null_mut,
};

use cudarc::driver::sys;
use serde::Serialize;

use crate::{Device, library::Library, loader::functions};

type Gpu = *mut c_void;

functions! { Library::Nvml;
    nvmlInit_v2() -> c_int;
    nvmlShutdown() -> c_int;
    nvmlSystemGetDriverVersion(text: *mut c_char, length: c_uint) -> c_int;
    nvmlDeviceGetHandleByPciBusId_v2(bus: *const c_char, gpu: *mut Gpu) -> c_int;
    nvmlDeviceGetClockInfo(gpu: Gpu, clock: c_uint, mhz: *mut c_uint) -> c_int;
    nvmlDeviceGetMaxClockInfo(gpu: Gpu, clock: c_uint, mhz: *mut c_uint) -> c_int;
    nvmlDeviceGetPowerUsage(gpu: Gpu, milliwatts: *mut c_uint) -> c_int;
    nvmlDeviceGetEnforcedPowerLimit(gpu: Gpu, milliwatts: *mut c_uint) -> c_int;
    nvmlDeviceGetTemperature(gpu: Gpu, sensor: c_uint, celsius: *mut c_uint) -> c_int;
}

// NVML's constants for clocks and the temperature sensor.
const SM: c_uint = 1;
const MEMORY: c_uint = 2;
const CHIP: c_uint = 0;

/// Sensor readings; `None` where the GPU has no sensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Reading {
    /// Clock of the multiprocessors, MHz.
    pub sm_mhz: Option<u32>,
    /// Clock of the memory, MHz.
    pub memory_mhz: Option<u32>,
    /// Power of the board, averaged over about a second.
    pub watts: Option<u32>,
    /// Temperature of the chip.
    pub celsius: Option<u32>,
}

/// The sensors of one GPU.
pub(super) struct Sensor(Gpu);

impl Sensor {
    /// Opens the sensors of a device.
    pub(super) fn of(device: &Device) -> Result<Self, String> {
        load().map_err(|error| error.to_string())?;
        let mut bus = [0 as c_char; 32];
        // SAFETY: the device is open, and the buffer has the given length.
        unsafe {
            sys::cuDeviceGetPCIBusId(
                bus.as_mut_ptr(),
                bus.len() as c_int,
                device.context().cu_device(),
            )
        }
        .result()
        .map_err(|error| format!("the GPU has no PCI address: {error:?}"))?;
        let mut gpu = null_mut();
        // SAFETY: the library is loaded, the text ends with a NUL, and a pointer is written.
        let found = unsafe {
            nvmlInit_v2() == 0 && nvmlDeviceGetHandleByPciBusId_v2(bus.as_ptr(), &mut gpu) == 0
        };
        if found { Ok(Self(gpu)) } else { Err(format!("{} does not know this GPU", Library::Nvml)) }
    }

    pub(super) fn read(&self) -> Reading {
        // SAFETY: NVML returned this handle; here and below, each call writes a number.
        let ask = |clock| asked(|to| unsafe { nvmlDeviceGetClockInfo(self.0, clock, to) });
        Reading {
            sm_mhz: ask(SM),
            memory_mhz: ask(MEMORY),
            // SAFETY: as above.
            watts: asked(|to| unsafe { nvmlDeviceGetPowerUsage(self.0, to) })
                .map(|milliwatts| milliwatts / 1000),
            // SAFETY: as above.
            celsius: asked(|to| unsafe { nvmlDeviceGetTemperature(self.0, CHIP, to) }),
        }
    }

    pub(super) fn most_sm_mhz(&self) -> Option<u32> {
        // SAFETY: as above.
        asked(|to| unsafe { nvmlDeviceGetMaxClockInfo(self.0, SM, to) })
    }

    pub(super) fn most_watts(&self) -> Option<u32> {
        // SAFETY: as above.
        asked(|to| unsafe { nvmlDeviceGetEnforcedPowerLimit(self.0, to) })
            .map(|milliwatts| milliwatts / 1000)
    }

    pub(super) fn driver(&self) -> Option<String> {
        let mut text = [0 as c_char; 80];
        // SAFETY: NVML writes a NUL-terminated text of at most this length.
        let status = unsafe { nvmlSystemGetDriverVersion(text.as_mut_ptr(), text.len() as c_uint) };
        // SAFETY: it ends with a NUL.
        (status == 0)
            .then(|| unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
    }
}

/// The number that a call writes, if it succeeds.
fn asked(ask: impl FnOnce(*mut c_uint) -> c_int) -> Option<u32> {
    let mut answer = 0;
    (ask(&mut answer) == 0).then_some(answer)
}

impl Drop for Sensor {
    fn drop(&mut self) {
        // SAFETY: NVML was initialized, and is not used afterwards.
        let _ = unsafe { nvmlShutdown() };
    }
}

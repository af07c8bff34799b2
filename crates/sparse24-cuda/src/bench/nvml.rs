//! Clocks, power and temperature of a GPU, from the library that comes with its driver; loaded at run time, with the few functions used here.
//!
//! Deliberately absent: anything that changes a setting.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use cudarc::driver::sys;
use serde::Serialize;

use crate::Device;

/// The file that the loader looks for.
const FILE: &str = "libnvidia-ml.so.1";

/// What the sensors said at a moment; nothing for what they do not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Reading {
    /// Clock of the multiprocessors.
    pub sm_mhz: Option<u32>,
    /// Clock of the memory.
    pub memory_mhz: Option<u32>,
    /// Of the whole board, over the last second or so.
    pub watts: Option<u32>,
    /// Of the chip.
    pub celsius: Option<u32>,
}

type Status = c_int;
type Ask = unsafe extern "C" fn(*mut c_void, *mut c_uint) -> Status;
type AskOf = unsafe extern "C" fn(*mut c_void, c_uint, *mut c_uint) -> Status;

/// The sensors of one GPU.
pub(super) struct Sensor {
    library: libloading::Library,
    gpu: *mut c_void,
}

// The library's numbers of clocks and of the one sensor of temperature.
const SM: c_uint = 1;
const MEMORY: c_uint = 2;
const CHIP: c_uint = 0;

impl Sensor {
    /// Those of an open device, or why there are none.
    pub(super) fn of(device: &Device) -> Result<Self, String> {
        // SAFETY: the driver's own library, whose initialisers may run at any time.
        let library =
            unsafe { libloading::Library::new(FILE) }.map_err(|_| format!("{FILE} was not found: clocks and power are unknown"))?;
        let mut bus = [0 as c_char; 32];
        // SAFETY: the device is open, and the buffer has the length told.
        unsafe { sys::cuDeviceGetPCIBusId(bus.as_mut_ptr(), bus.len() as c_int, device.context().cu_device()) }
            .result()
            .map_err(|error| format!("{FILE}: the GPU has no place on a bus: {error:?}"))?;
        let mut sensor = Self { library, gpu: std::ptr::null_mut() };
        let refused = || format!("{FILE} does not know this GPU: clocks and power are unknown");
        // SAFETY: the functions have these types in every release of the library; the text ends with a NUL, and a pointer is written.
        let found = unsafe {
            let begin = sensor.function::<unsafe extern "C" fn() -> Status>(c"nvmlInit_v2").ok_or_else(refused)?;
            let find =
                sensor.function::<unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> Status>(c"nvmlDeviceGetHandleByPciBusId_v2");
            begin() == 0 && find.ok_or_else(refused)?(bus.as_ptr(), &mut sensor.gpu) == 0
        };
        if found { Ok(sensor) } else { Err(refused()) }
    }

    /// What the sensors say.
    pub(super) fn read(&self) -> Reading {
        Reading {
            sm_mhz: self.ask_of(c"nvmlDeviceGetClockInfo", SM),
            memory_mhz: self.ask_of(c"nvmlDeviceGetClockInfo", MEMORY),
            watts: self.ask(c"nvmlDeviceGetPowerUsage").map(|milliwatts| milliwatts / 1000),
            celsius: self.ask_of(c"nvmlDeviceGetTemperature", CHIP),
        }
    }

    /// The highest clock of the multiprocessors.
    pub(super) fn most_sm_mhz(&self) -> Option<u32> {
        self.ask_of(c"nvmlDeviceGetMaxClockInfo", SM)
    }

    /// What the board may draw.
    pub(super) fn most_watts(&self) -> Option<u32> {
        self.ask(c"nvmlDeviceGetEnforcedPowerLimit").map(|milliwatts| milliwatts / 1000)
    }

    /// The driver's release.
    pub(super) fn driver(&self) -> Option<String> {
        let mut text = [0 as c_char; 80];
        // SAFETY: the function has this type, and writes a text with its NUL into as much room as it is told of.
        let status = unsafe {
            self.function::<unsafe extern "C" fn(*mut c_char, c_uint) -> Status>(c"nvmlSystemGetDriverVersion")?(
                text.as_mut_ptr(),
                text.len() as c_uint,
            )
        };
        // SAFETY: the text ends with a NUL.
        (status == 0).then(|| unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
    }

    fn ask(&self, name: &CStr) -> Option<u32> {
        let mut answer = 0;
        // SAFETY: the functions asked for have this type, and write a number.
        let status = unsafe { self.function::<Ask>(name)?(self.gpu, &mut answer) };
        (status == 0).then_some(answer)
    }

    fn ask_of(&self, name: &CStr, part: c_uint) -> Option<u32> {
        let mut answer = 0;
        // SAFETY: as above, of one part.
        let status = unsafe { self.function::<AskOf>(name)?(self.gpu, part, &mut answer) };
        (status == 0).then_some(answer)
    }

    /// # Safety
    /// The function has this type.
    unsafe fn function<F: Copy>(&self, name: &CStr) -> Option<F> {
        // SAFETY: as the caller says.
        unsafe { self.library.get::<F>(name) }.ok().map(|function| *function)
    }
}

impl Drop for Sensor {
    fn drop(&mut self) {
        // SAFETY: the library was begun; nothing is asked of it afterwards.
        unsafe {
            if let Some(end) = self.function::<unsafe extern "C" fn() -> Status>(c"nvmlShutdown") {
                end();
            }
        }
    }
}

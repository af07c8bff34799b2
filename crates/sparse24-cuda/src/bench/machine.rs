//! The GPU that a bench ran on, and the releases of its software.

use cudarc::driver::sys::CUdevice_attribute;
use serde::Serialize;

use super::{
    nvml::{Reading, Sensor},
    peer::CusparseLt,
};
use crate::{Device, Result, compile, driver, error::driver_error, gemm};

/// A release, or why it is not known.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Known {
    /// The release.
    Release(String),
    /// Why it is unknown.
    Problem(String),
}

/// The GPU and its software.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Machine {
    /// Name of the GPU.
    pub gpu: String,
    /// Compute capability: major, minor.
    pub capability: [i32; 2],
    /// Number of multiprocessors.
    pub multiprocessors: usize,
    /// Memory in MiB.
    pub memory_mib: usize,
    /// L2 cache in MiB.
    pub l2_mib: usize,
    /// The driver's release.
    pub driver: Known,
    /// Newest CUDA release that the driver supports: major, minor.
    pub cuda: [i32; 2],
    /// The kernel compiler.
    pub nvrtc: Known,
    /// cuBLASLt.
    pub cublaslt: Known,
    /// cuSPARSELt.
    pub cusparselt: Known,
    /// Highest clock of the multiprocessors, MHz.
    pub most_sm_mhz: Option<u32>,
    /// Power limit of the board, watts.
    pub most_watts: Option<u32>,
    /// Sensors before the first case.
    pub before: Option<Reading>,
    /// Sensors after the last case.
    pub after: Option<Reading>,
}

/// Bytes of the L2 cache.
pub(super) fn l2_bytes(device: &Device) -> Result<usize> {
    let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE;
    let said = |error| driver_error("querying the size of the L2", error);
    Ok(usize::try_from(device.context().attribute(attribute).map_err(said)?).unwrap_or(0))
}

impl Machine {
    pub(super) fn of(
        device: &Device,
        sensor: &Result<Sensor, String>,
        cusparselt: &Result<CusparseLt, String>,
    ) -> Result<Self> {
        let context = device.context();
        let (major, minor) = context
            .compute_capability()
            .map_err(|error| driver_error("querying the compute capability", error))?;
        let (_, memory) =
            context.mem_get_info().map_err(|error| driver_error("querying the memory", error))?;
        let driver = match sensor {
            Ok(sensor) => sensor.driver().ok_or_else(|| "the driver does not report it".to_owned()),
            Err(problem) => Err(problem.clone()),
        };
        let sensor = sensor.as_ref().ok();
        Ok(Self {
            gpu: device.name().to_owned(),
            capability: [major, minor],
            multiprocessors: device.multiprocessors(),
            memory_mib: memory >> 20,
            l2_mib: l2_bytes(device)? >> 20,
            driver: driver.into(),
            cuda: driver::start()?,
            nvrtc: compile::release().map(|release| release.to_string()).into(),
            cublaslt: gemm::release().into(),
            cusparselt: cusparselt.as_ref().map(CusparseLt::release).into(),
            most_sm_mhz: sensor.and_then(Sensor::most_sm_mhz),
            most_watts: sensor.and_then(Sensor::most_watts),
            before: sensor.map(Sensor::read),
            after: None,
        })
    }
}

impl<E: ToString> From<Result<String, E>> for Known {
    fn from(known: Result<String, E>) -> Self {
        known.map_or_else(|problem| Self::Problem(problem.to_string()), Self::Release)
    }
}

//! Clocks, power and temperature of a GPU, from NVML. Read-only.

use cudarc::driver::sys::CUdevice_attribute::*;
use nvml_wrapper::{
    Nvml,
    enum_wrappers::device::{Clock, TemperatureSensor},
};
use serde::Serialize;

use crate::Device;

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
pub(super) struct Sensor {
    nvml: Nvml,
    address: String,
}

impl Sensor {
    /// Opens the sensors of a device.
    pub(super) fn of(device: &Device) -> Result<Self, String> {
        let nvml = Nvml::init().map_err(|error| error.to_string())?;
        let attribute = |name| device.context().attribute(name).map_err(|error| error.to_string());
        let address = format!(
            "{:08x}:{:02x}:{:02x}.0",
            attribute(CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
            attribute(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
            attribute(CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?,
        );
        nvml.device_by_pci_bus_id(&*address).map_err(|error| error.to_string())?;
        Ok(Self { nvml, address })
    }

    fn gpu(&self) -> Option<nvml_wrapper::Device<'_>> {
        self.nvml.device_by_pci_bus_id(&*self.address).ok()
    }

    pub(super) fn read(&self) -> Reading {
        let Some(gpu) = self.gpu() else { return Reading::default() };
        Reading {
            sm_mhz: gpu.clock_info(Clock::SM).ok(),
            memory_mhz: gpu.clock_info(Clock::Memory).ok(),
            watts: gpu.power_usage().ok().map(|milliwatts| milliwatts / 1000),
            celsius: gpu.temperature(TemperatureSensor::Gpu).ok(),
        }
    }

    pub(super) fn most_sm_mhz(&self) -> Option<u32> {
        self.gpu()?.max_clock_info(Clock::SM).ok()
    }

    pub(super) fn most_watts(&self) -> Option<u32> {
        Some(self.gpu()?.enforced_power_limit().ok()? / 1000)
    }

    pub(super) fn driver(&self) -> Option<String> {
        self.nvml.sys_driver_version().ok()
    }
}

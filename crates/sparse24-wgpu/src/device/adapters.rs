//! The adapters of this machine.

use crate::{Error, Result};

// A web page cannot block.
#[cfg(not(target_family = "wasm"))]
impl super::Device {
    /// Names of this machine's adapters: GPUs first, then software adapters, which run on the CPU.
    #[must_use]
    pub fn adapters() -> Vec<String> {
        pollster::block_on(adapters())
            .iter()
            .map(|adapter| described(&adapter.get_info()))
            .collect()
    }

    /// Whether the buffers of an adapter are in main memory, as those of integrated GPUs and of
    /// software adapters are.
    #[must_use]
    pub fn is_in_main_memory(number: usize) -> bool {
        pollster::block_on(adapter(number)).is_ok_and(|adapter| {
            let kind = adapter.get_info().device_type;
            matches!(kind, wgpu::DeviceType::IntegratedGpu | wgpu::DeviceType::Cpu)
        })
    }

    /// Maximum bytes of a matrix on an adapter. Does not open it.
    ///
    /// # Errors
    /// [`Error::NoAdapter`].
    pub fn largest_on(number: usize) -> Result<u64> {
        pollster::block_on(adapter(number)).map(|adapter| largest(&adapter.limits()))
    }
}

/// Maximum bytes of a matrix: kernels count the bytes of a binding in 32 bits.
pub(super) fn largest(limits: &wgpu::Limits) -> u64 {
    limits.max_storage_buffer_binding_size.min(limits.max_buffer_size).min(u32::MAX.into())
}

/// The adapter with this number.
pub(super) async fn adapter(number: usize) -> Result<wgpu::Adapter> {
    let mut found = adapters().await;
    if number >= found.len() {
        let found = found.iter().map(|adapter| described(&adapter.get_info())).collect();
        return Err(Error::NoAdapter { number, found });
    }
    Ok(found.swap_remove(number))
}

/// All adapters, the fastest kind first. A process looks for them once, because drivers limit the
/// number of instances. A web page gets one device per adapter, so it looks again.
async fn adapters() -> Vec<wgpu::Adapter> {
    #[cfg(target_family = "wasm")]
    return found().await;
    #[cfg(not(target_family = "wasm"))]
    {
        static FOUND: std::sync::OnceLock<Vec<wgpu::Adapter>> = std::sync::OnceLock::new();
        FOUND.get_or_init(|| pollster::block_on(found())).clone()
    }
}

/// A browser shows one adapter: of two GPUs the slower one, unless it is asked for the other.
#[cfg(target_family = "wasm")]
async fn found() -> Vec<wgpu::Adapter> {
    let power_preference = wgpu::PowerPreference::HighPerformance;
    let options = wgpu::RequestAdapterOptions { power_preference, ..Default::default() };
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
    instance.request_adapter(&options).await.into_iter().collect()
}

#[cfg(not(target_family = "wasm"))]
async fn found() -> Vec<wgpu::Adapter> {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = wgpu::Backends::PRIMARY;
    let instance = wgpu::Instance::new(descriptor);
    let mut found = instance.enumerate_adapters(wgpu::Backends::PRIMARY).await;
    let mut seen: Vec<wgpu::AdapterInfo> = Vec::new();
    found.retain(|adapter| {
        seen.push(adapter.get_info());
        let (info, earlier) = seen.split_last().expect("one was pushed");
        !earlier.iter().any(|other| is_of_another_api(info, other))
    });
    found.sort_by_key(|adapter| match adapter.get_info().device_type {
        wgpu::DeviceType::DiscreteGpu => 0,
        wgpu::DeviceType::IntegratedGpu => 1,
        wgpu::DeviceType::VirtualGpu | wgpu::DeviceType::Other => 2,
        wgpu::DeviceType::Cpu => 3,
    });
    found
}

/// Whether two APIs list one GPU, as Vulkan and Direct3D 12 do on Windows.
#[cfg(not(target_family = "wasm"))]
fn is_of_another_api(info: &wgpu::AdapterInfo, other: &wgpu::AdapterInfo) -> bool {
    let place = |of: &wgpu::AdapterInfo| (of.vendor, of.device, of.device_pci_bus_id.clone());
    info.backend != other.backend && place(info) == place(other)
}

pub(super) fn described(info: &wgpu::AdapterInfo) -> String {
    let driver = [&*info.driver, &*info.driver_info].join(" ");
    let kind = match info.device_type {
        wgpu::DeviceType::Cpu => ", software on the CPU",
        _ => "",
    };
    format!("{}, {:?}, {}{kind}", info.name, info.backend, driver.trim())
}

#[cfg(test)]
mod tests {
    use wgpu::{AdapterInfo, Backend, DeviceType};

    use super::{described, is_of_another_api};

    #[test]
    fn a_software_adapter_is_marked() {
        for (kind, expected) in [
            (DeviceType::Cpu, "llvmpipe, Vulkan, Mesa 22, software on the CPU"),
            (DeviceType::IntegratedGpu, "llvmpipe, Vulkan, Mesa 22"),
        ] {
            let [name, driver] = ["llvmpipe", "Mesa 22"].map(str::to_owned);
            let of = AdapterInfo { name, driver, ..AdapterInfo::new(kind, Backend::Vulkan) };
            assert_eq!(described(&of), expected);
        }
    }

    #[test]
    fn a_gpu_of_two_apis_is_recognized() {
        let [vulkan, direct3d] = [Backend::Vulkan, Backend::Dx12].map(|api| AdapterInfo {
            vendor: 0x10de,
            device: 0x2684,
            device_pci_bus_id: "0000:01:00.0".to_owned(),
            ..AdapterInfo::new(DeviceType::DiscreteGpu, api)
        });
        let twin = AdapterInfo { device_pci_bus_id: "0000:02:00.0".to_owned(), ..vulkan.clone() };
        assert!(is_of_another_api(&direct3d, &vulkan));
        assert!(!is_of_another_api(&direct3d, &twin) && !is_of_another_api(&twin, &vulkan));
    }
}

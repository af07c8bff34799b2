//! A GPU with its memory, and the queue of its work.
//!
//! Invariant: work runs in the order in which it is queued. Pending work is submitted before any
//! `Queue::write_buffer`, so earlier work never sees a later write.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use sparse24_core::op::StepState;

use crate::{
    Error, Matrix,
    kernels::{Kernel, MOST_GROUPS, NEEDS},
};

mod adapters;
mod arrivals;
mod constants;
mod memory;
mod queue;

pub use arrivals::Arrivals;
pub use memory::Copied;
pub use queue::Recorded;

use self::{
    adapters::{adapter, described, largest},
    constants::Constants,
    memory::Buffer,
    queue::Command,
};

/// A GPU. Operations are queued; only downloads and large uploads wait.
pub struct Device {
    device: wgpu::Device,
    queue: wgpu::Queue,
    info: wgpu::AdapterInfo,
    failure: Failed,
    /// Keyed by the kernel's address, because some entry points share a name.
    pipelines: HashMap<usize, wgpu::ComputePipeline>,
    /// Keyed by the numbers of inputs and outputs.
    layouts: HashMap<[usize; 2], wgpu::BindGroupLayout>,
    buffers: Vec<Buffer>,
    /// Words uploaded since the last wait for the driver.
    uploaded: usize,
    state: wgpu::Buffer,
    constants: Constants,
    /// Work that is not submitted yet.
    pending: Vec<Command>,
    /// Work since the recording started.
    recording: Option<Vec<Command>>,
}

/// A failure that the driver reported asynchronously.
enum Failure {
    Memory,
    Other(Error),
}

/// The first failure that the driver reported.
#[derive(Clone, Default)]
struct Failed(Arc<Mutex<Option<Failure>>>);

impl Failed {
    fn report(&self, found: Failure) {
        self.0.lock().expect("no holder panics").get_or_insert(found);
    }

    /// The failure as an error; `held` is the memory that is allocated, in bytes.
    fn check(&self, held: impl FnOnce() -> u64) -> Result<(), Error> {
        match &*self.0.lock().expect("no holder panics") {
            None => Ok(()),
            Some(Failure::Other(error)) => Err(error.clone()),
            Some(Failure::Memory) => {
                let what = "the driver has none left for queued work or copies".to_owned();
                Err(Error::OutOfMemory { what, held: held() })
            }
        }
    }
}

/// Bytes of [`StepState`] in `interface.wgsl`.
const STATE: u64 = 32;

impl Device {
    /// Opens an adapter without testing it.
    ///
    /// # Errors
    /// [`Error::NoAdapter`]; [`Error::Limit`]; [`Error::Driver`] if it cannot be opened.
    pub(crate) async fn request_untested(number: usize) -> Result<Self, Error> {
        let adapter = adapter(number).await?;
        let required_limits = adapter.limits();
        check_limits(&required_limits, || described(&adapter.get_info()))?;
        let descriptor = wgpu::DeviceDescriptor { required_limits, ..Default::default() };
        let (device, queue) = adapter
            .request_device(&descriptor)
            .await
            .map_err(|error| Error::Driver(error.to_string()))?;
        let failure = Failed::default();
        let of_errors = failure.clone();
        device.on_uncaptured_error(Arc::new(move |error| {
            of_errors.report(match error {
                wgpu::Error::OutOfMemory { .. } => Failure::Memory,
                invalid @ wgpu::Error::Validation { .. } => {
                    Failure::Other(Error::Invalid(invalid.to_string()))
                }
                error => Failure::Other(Error::Driver(error.to_string())),
            });
        }));
        let of_loss = failure.clone();
        device.set_device_lost_callback(move |_, message| {
            // Running out of memory for anything but a buffer loses the device.
            let lower = message.to_lowercase();
            let of_memory =
                ["out of memory", "not enough memory"].iter().any(|m| lower.contains(m));
            let other = || Failure::Other(Error::Lost(message));
            of_loss.report(if of_memory { Failure::Memory } else { other() });
        });
        let state = device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("step state"),
            size: STATE,
            usage: wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        Ok(Self {
            info: adapter.get_info(),
            constants: Constants::new(&device),
            device,
            queue,
            failure,
            pipelines: HashMap::new(),
            layouts: HashMap::new(),
            buffers: Vec::new(),
            uploaded: 0,
            state,
            pending: Vec::new(),
            recording: None,
        })
    }

    /// Name of the adapter and of its driver.
    #[must_use]
    pub fn name(&self) -> String {
        described(&self.info)
    }

    /// Whether the adapter runs on the CPU.
    pub(crate) fn is_software(&self) -> bool {
        self.info.device_type == wgpu::DeviceType::Cpu
    }

    /// A handle that waits for the copies of this device.
    #[must_use]
    pub fn arrivals(&self) -> Arrivals {
        Arrivals::new(&self.device, &self.queue)
    }

    /// Maximum bytes of a matrix.
    #[must_use]
    pub fn largest(&self) -> u64 {
        largest(&self.device.limits())
    }

    /// Sets the step state that the following operations read.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Driver`] or [`Error::Invalid`] of earlier work.
    pub fn set_step(&mut self, state: &StepState) -> Result<(), Error> {
        self.submit()?;
        let [first, second] = state.bias_corrections;
        let words = [
            state.seed as u32,
            (state.seed >> 32) as u32,
            state.step,
            state.micro_step,
            state.learning_rate.to_bits(),
            first.to_bits(),
            second.to_bits(),
            state.loss_scale.to_bits(),
        ];
        self.queue.write_buffer(&self.state, 0, &memory::bytes(&words));
        Ok(())
    }

    /// The failure that the driver reported, if any.
    fn check(&self) -> Result<(), Error> {
        self.failure.check(|| self.held_by_all())
    }

    /// The pipeline of a kernel, compiled when it is first used.
    fn pipeline(&mut self, kernel: &'static Kernel) -> wgpu::ComputePipeline {
        let layout = self.layout(kernel);
        let device = &self.device;
        let compile = || {
            let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
                label: Some(kernel.name),
                source: wgpu::ShaderSource::Wgsl(kernel.source.into()),
            });
            let layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                label: Some(kernel.name),
                bind_group_layouts: &[Some(&layout)],
                immediate_size: 0,
            });
            device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(kernel.name),
                layout: Some(&layout),
                module: &module,
                entry_point: Some(kernel.name),
                compilation_options: wgpu::PipelineCompilationOptions {
                    zero_initialize_workgroup_memory: false,
                    ..Default::default()
                },
                cache: None,
            })
        };
        let kernel = std::ptr::from_ref(kernel).addr();
        self.pipelines.entry(kernel).or_insert_with(compile).clone()
    }

    /// The binding layout, shared by kernels with equal numbers of inputs and outputs.
    fn layout(&mut self, kernel: &'static Kernel) -> wgpu::BindGroupLayout {
        let Kernel { inputs, outputs, .. } = *kernel;
        let device = &self.device;
        let create = || {
            let entry = |binding: usize, ty, dynamic| wgpu::BindGroupLayoutEntry {
                binding: binding as u32,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer {
                    ty,
                    has_dynamic_offset: dynamic,
                    min_binding_size: None,
                },
                count: None,
            };
            let storage = |i| wgpu::BufferBindingType::Storage { read_only: i < inputs };
            let entries: Vec<_> = [true, false]
                .into_iter()
                .enumerate()
                .map(|(i, dynamic)| entry(i, wgpu::BufferBindingType::Uniform, dynamic))
                .chain((0..inputs + outputs).map(|i| entry(2 + i, storage(i), false)))
                .collect();
            let label = Some(kernel.name);
            let descriptor = wgpu::BindGroupLayoutDescriptor { label, entries: &entries };
            device.create_bind_group_layout(&descriptor)
        };
        self.layouts.entry([inputs, outputs]).or_insert_with(create).clone()
    }

    /// Queues a kernel: `groups` workgroups, with these matrices and constants.
    pub(crate) fn run<const N: usize>(
        &mut self,
        kernel: &'static Kernel,
        matrices: [Matrix; N],
        constants: &[u32],
        groups: usize,
    ) -> Result<(), Error> {
        assert_eq!(N, kernel.inputs + kernel.outputs, "bindings of {}", kernel.name);
        // Buffers are bound as a whole.
        let (inputs, outputs) = matrices.split_at(kernel.inputs);
        let is_input = |output: &Matrix| inputs.iter().any(|m| m.buffer == output.buffer);
        assert!(!outputs.iter().any(is_input), "{} writes a buffer that it reads", kernel.name);
        if groups == 0 {
            return Ok(());
        }
        let (pipeline, layout) = (self.pipeline(kernel), self.layout(kernel));
        let slot = self.constants.take(&self.device, constants, self.recording.is_some());
        let entry =
            |binding: usize, resource| wgpu::BindGroupEntry { binding: binding as u32, resource };
        let of_constants = wgpu::BindingResource::Buffer(wgpu::BufferBinding {
            buffer: self.constants.page(slot),
            offset: 0,
            size: wgpu::BufferSize::new(constants::SLOT),
        });
        let fixed = [of_constants, self.state.as_entire_binding()];
        let matrices = matrices.iter().map(|m| self.buffers[m.buffer].binding());
        let entries: Vec<_> =
            fixed.into_iter().chain(matrices).enumerate().map(|(i, of)| entry(i, of)).collect();
        let bindings = self.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some(kernel.name),
            layout: &layout,
            entries: &entries,
        });
        self.push(Command::Run { pipeline, bindings, constants: slot.offset, grid: grid(groups) })
    }
}

/// Refuses limits that are below the needs of the kernels.
fn check_limits(limits: &wgpu::Limits, adapter: impl Fn() -> String) -> Result<(), Error> {
    let found = [
        limits.max_compute_workgroup_storage_size,
        limits.max_storage_buffers_per_shader_stage,
        limits.max_compute_invocations_per_workgroup,
        limits.max_compute_workgroup_size_x,
        limits.max_compute_workgroups_per_dimension,
    ];
    match found.into_iter().zip(NEEDS).find(|(found, (_, needed))| found < needed) {
        None => Ok(()),
        Some((found, (limit, needed))) => {
            Err(Error::Limit { adapter: adapter(), limit, found, needed })
        }
    }
}

/// A grid of at least `groups` workgroups, continued in y where x is too small.
fn grid(groups: usize) -> [u32; 2] {
    let rows = groups.div_ceil(MOST_GROUPS as usize);
    [groups.div_ceil(rows) as u32, rows as u32]
}

#[cfg(test)]
pub(crate) mod tests {
    use super::{Device, Failure, check_limits, grid, queue};
    use crate::{
        Error, gemm,
        kernels::{self, Kernel},
        self_test,
    };

    /// The first adapter. Without one, skips unless `SPARSE24_REQUIRE_WGPU` is set.
    pub(crate) fn open() -> Option<Device> {
        match pollster::block_on(Device::request_untested(0)) {
            Ok(device) => Some(device),
            Err(error @ Error::NoAdapter { .. })
                if std::env::var_os("SPARSE24_REQUIRE_WGPU").is_none() =>
            {
                println!("skipped: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn grids_fold() {
        for groups in [1, 65535, 65536, 1 << 24, 3_000_000_019] {
            let [x, y] = grid(groups).map(|n| n as usize);
            assert!(x <= 65535 && y <= 65535, "{groups}: {x} x {y}");
            assert!((groups..groups + y).contains(&(x * y)), "{groups}: {x} x {y}");
        }
    }

    #[test]
    fn an_adapter_below_the_needs_is_refused() {
        let limits = wgpu::Limits::default();
        assert_eq!(check_limits(&limits, String::new), Ok(()));
        let few = wgpu::Limits { max_storage_buffers_per_shader_stage: 7, ..limits };
        let error = check_limits(&few, || "x".to_owned()).unwrap_err().to_string();
        let expected = "x has a max_storage_buffers_per_shader_stage of 7, but 8 are needed";
        assert!(error.starts_with(expected), "{error}");
    }

    #[test]
    fn failures_end_all_that_follows() {
        type Case = (fn(&Device), fn(&Error) -> bool);
        const INVALID: wgpu::BufferDescriptor<'_> = wgpu::BufferDescriptor {
            label: None,
            size: 4,
            usage: wgpu::BufferUsages::empty(),
            mapped_at_creation: false,
        };
        let cases: [Case; 3] = [
            (|device| device.device.destroy(), |error| matches!(error, Error::Lost(_))),
            (
                |device| device.failure.report(Failure::Memory),
                |error| matches!(error, Error::OutOfMemory { .. }),
            ),
            (
                |device| drop(device.device.create_buffer(&INVALID)),
                |error| matches!(error, Error::Invalid(_)),
            ),
        ];
        for (fail, is_expected) in cases {
            let Some(mut device) = open() else { return };
            let x = device.alloc("x", [2, 3], "test").unwrap();
            device.upload(x, &[1; 6]).unwrap();
            let copied = device.copy_out(&[x]).unwrap();
            fail(&device);
            // It was submitted before the failure; whether it still arrives depends on the driver.
            drop(copied.read());
            let errors = [
                device.upload(x, &[2; 6]).unwrap_err(),
                device.alloc("y", [2, 3], "test").unwrap_err(),
                device.download(x).unwrap_err(),
                device.wait().unwrap_err(),
            ];
            assert!(errors.iter().all(is_expected), "{errors:?}");
        }
    }

    /// wgpu panics if the device is lost while it waits.
    #[test]
    fn a_loss_while_waiting_is_an_error() {
        let message = "Error in Device::poll: the device is lost".to_owned();
        let waited = queue::waited(|| std::panic::panic_any(message.clone()));
        assert_eq!(waited, Err(Error::Lost(message)));
    }

    #[test]
    fn wrong_results_are_named() {
        let Some(device) = open() else { return };
        let products = gemm::products(&device).map(|product| (product.kernel, "products"));
        let others: [(&'static Kernel, _); 4] = [
            (&kernels::MASK_SEARCH, "masks"),
            (&kernels::ROW_MASK_SEARCH, "masks"),
            (&kernels::COLUMN_MASK_SEARCH, "masks"),
            (&kernels::MVUE_COMPRESS, "sampled gradients"),
        ];
        for (kernel, expected) in others.into_iter().chain(products) {
            let Some(mut device) = open() else { return };
            // Replaces the kernel by one that writes nothing.
            let source = format!("@compute @workgroup_size(64) fn {}() {{}}", kernel.name);
            let nothing = Box::leak(Box::new(Kernel { source: source.leak(), ..*kernel }));
            let pipeline = device.pipeline(nothing);
            device.pipelines.insert(std::ptr::from_ref(kernel).addr(), pipeline);
            match pollster::block_on(self_test::check(&mut device)) {
                Err(Error::WrongResults { what, .. }) => assert_eq!(what, expected),
                other => panic!("{}: {other:?}", kernel.name),
            }
        }
    }
}

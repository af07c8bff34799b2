//! An open GPU: its stream of operations and its compiled kernels.
//!
//! Invariant: whatever a kernel is launched on was checked before: handles belong to this device,
//! and arguments have the sizes of the kernel's parameters. Operations run in the order in which
//! they were queued; only copies to the host ([`HostCopy`]) and work beside others
//! ([`Device::beside`]) have streams of their own.

mod check;
mod copy;
mod graph;
mod host_copy;
mod memory;
mod side;
mod staging;
mod timing;

use std::{
    cell::OnceCell,
    collections::HashMap,
    marker::PhantomData,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};
use sparse24_core::op::StepState;

use self::{host_copy::Copies, memory::Memory, staging::Staging};
use crate::{
    Architecture, Error, Matrix,
    cache::Cache,
    compile::{self, Release},
    driver,
    error::driver_error,
    kernels::{self, Start},
    launch::{Argument, Grid},
    profile::{Profile, Work},
};

pub(crate) use check::Checks;
pub(crate) use graph::without_captures;
pub use graph::{Graph, capturing};
pub use host_copy::HostCopy;

/// How a device is opened.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// Number of the GPU, as the driver counts.
    pub ordinal: usize,
    /// Folder of compiled kernels; otherwise `SPARSE24_KERNEL_CACHE`, or one in the user's cache.
    pub kernel_cache: Option<PathBuf>,
}

/// An open GPU.
pub struct Device {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    /// The second stream, once there was work for it.
    side: Option<Arc<CudaStream>>,
    name: String,
    architecture: Architecture,
    multiprocessors: usize,
    /// Newest CUDA release that the driver supports: major, minor.
    driver: [i32; 2],
    cache: Cache,
    /// The kernel compiler's release, once it was needed.
    release: OnceCell<Release>,
    kernels: HashMap<&'static str, Kernel>,
    modules: HashMap<&'static str, sys::CUmodule>,
    memory: Memory,
    copies: Copies,
    staging: Staging,
    /// Identifies the handles to this device's memory.
    mark: u64,
    state: Matrix<u32>,
    /// A CUDA graph is being captured.
    capturing: bool,
    profile: Profile,
    /// Sparse products have the plans of GPUs without `wgmma` alone.
    pub(crate) without_wgmma: bool,
}

/// A loaded kernel and the sizes of its parameters.
#[derive(Clone)]
struct Kernel {
    function: sys::CUfunction,
    parameters: Arc<[usize]>,
    shared: u32,
    start: Start,
}

/// 32-bit words of `StepState` in `kernels/philox.cuh`.
const STATE_WORDS: usize = 8;

// SAFETY: the raw handles of kernels and modules belong to the context, which any thread may use
// once it is bound there; every method binds it.
unsafe impl Send for Device {}

impl Device {
    /// Opens a GPU. Kernels are compiled when they are first launched.
    ///
    /// # Errors
    /// [`Error::Library`] without a driver, [`Error::NoDevice`], [`Error::Architecture`] for a GPU
    /// without sparse tensor cores, [`Error::Occupied`], [`Error::Driver`].
    pub fn open(settings: &Settings) -> Result<Self, Error> {
        let driver = driver::start()?;
        let ordinal = settings.ordinal;
        let count = result::device::get_count().map_err(|e| driver_error("counting GPUs", e))?;
        let count = usize::try_from(count).unwrap_or(0);
        if ordinal >= count {
            return Err(Error::NoDevice { ordinal, count });
        }
        let context = CudaContext::new(ordinal).map_err(|error| open_error(ordinal, error))?;
        let failed = |error| driver_error("querying the GPU", error);
        // SAFETY: cudarc tracks uses of its own slices, of which there are none. Memory is managed
        // by `memory`, and `host_copy` and `side` order their streams by events.
        unsafe { context.disable_event_tracking() };
        let name = context.name().map_err(failed)?;
        let (major, minor) = context.compute_capability().map_err(failed)?;
        let architecture = Architecture::of_capability(major, minor).ok_or_else(|| {
            Error::Architecture { name: name.clone(), capability: [major, minor] }
        })?;
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let multiprocessors = context.attribute(attribute).map_err(failed)? as usize;
        let stream = context.new_stream().map_err(failed)?;
        let mark = next_mark();
        let mut device = Self {
            context,
            stream,
            side: None,
            name,
            architecture,
            multiprocessors,
            driver,
            cache: settings.kernel_cache.as_deref().map_or_else(Cache::of_user, Cache::at),
            release: OnceCell::new(),
            kernels: HashMap::new(),
            modules: HashMap::new(),
            memory: Memory::default(),
            copies: Copies::default(),
            staging: Staging::default(),
            mark,
            state: Matrix { mark, address: 0, shape: [0, 0], stride: 0, element: PhantomData },
            capturing: false,
            profile: Profile::default(),
            without_wgmma: false,
        };
        device.state = device.alloc("step state", [1, STATE_WORDS])?;
        Ok(device)
    }

    /// The GPU's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The architecture that kernels are compiled for.
    #[must_use]
    pub const fn architecture(&self) -> Architecture {
        self.architecture
    }

    /// The driver's release, if the system reports it, and the newest CUDA release that it
    /// supports: `580.82.07 (CUDA 13.0)`.
    #[must_use]
    pub fn driver(&self) -> String {
        let [major, minor] = self.driver;
        match driver::own_release() {
            Some(own) => format!("{own} (CUDA {major}.{minor})"),
            None => format!("for CUDA {major}.{minor}"),
        }
    }

    /// The release of the kernel compiler: this machine's, or, if it has none, the newest release
    /// with kernels in the cache.
    ///
    /// # Errors
    /// [`Error::Library`] if there is neither.
    pub fn compiler(&self) -> Result<Release, Error> {
        if let Some(release) = self.release.get() {
            return Ok(*release);
        }
        let release = compile::release_for(&self.cache, self.architecture)?;
        Ok(*self.release.get_or_init(|| release))
    }

    /// Identifies the GPU among those of all machines.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn uuid(&self) -> Result<[u8; 16], Error> {
        let uuid = self.context.uuid().map_err(|error| driver_error("querying the GPU", error))?;
        Ok(uuid.bytes.map(|byte| byte as u8))
    }

    /// Number of multiprocessors.
    #[must_use]
    pub const fn multiprocessors(&self) -> usize {
        self.multiprocessors
    }

    /// The profile of this device, which can be started and finished.
    #[must_use]
    pub fn profile(&self) -> Profile {
        self.profile.clone()
    }

    /// Sets the step state for all operations that are queued from now on.
    ///
    /// # Errors
    /// [`Error::Capturing`], [`Error::Driver`].
    pub fn set_step(&mut self, state: &StepState) -> Result<(), Error> {
        self.upload(self.state, &state_words(state))
    }

    /// Waits for all queued work.
    ///
    /// # Errors
    /// [`Error::Capturing`]; [`Error::Driver`], also for an earlier operation that failed.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.refuse_in_capture("synchronization")?;
        self.bind()?;
        self.stream.synchronize().map_err(|error| self.failed("waiting for the GPU", error))
    }

    /// Whether all queued work is done.
    pub(crate) fn is_idle(&self) -> Result<bool, Error> {
        self.bind()?;
        // SAFETY: the stream is this device's.
        match unsafe { sys::cuStreamQuery(self.stream()) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            status => {
                let done = status.result().map(|()| true);
                done.map_err(|error| self.failed("waiting for the GPU", error))
            }
        }
    }

    /// The step state as an argument of kernels.
    pub(crate) fn state(&self) -> Argument {
        self.state.into()
    }

    /// The stream of operations.
    pub(crate) fn stream(&self) -> sys::CUstream {
        self.stream.cu_stream()
    }

    /// Offers sparse products only the plans of GPUs without `wgmma` from now on.
    #[cfg(feature = "bench")]
    pub fn leave_wgmma_out(&mut self) {
        self.without_wgmma = true;
    }

    #[cfg(feature = "bench")]
    pub(crate) fn context(&self) -> &CudaContext {
        &self.context
    }

    /// Binds the context to this thread.
    pub(crate) fn bind(&self) -> Result<(), Error> {
        self.context
            .bind_to_thread()
            .map_err(|error| driver_error("binding the GPU to a thread", error))
    }

    /// Queues a kernel. An empty grid does nothing.
    pub(crate) fn launch(
        &mut self,
        entry: &'static str,
        grid: Grid,
        arguments: &[Argument],
    ) -> Result<(), Error> {
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        self.bind()?;
        let Grid { blocks, threads, shared } = grid;
        let kernel = self.kernel(entry, shared)?;
        assert!(
            arguments.iter().map(Argument::size).eq(kernel.parameters.iter().copied()),
            "{entry}: arguments match the kernel's parameters"
        );
        let mut pointers: Vec<_> = arguments.iter().map(Argument::pointer).collect();
        let mut early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            numAttrs: u32::from(kernel.start == Start::Early),
            ..self.config(grid, &mut early)
        };
        self.profiled(Work::Kernel(entry), || {
            let (function, pointers) = (kernel.function, pointers.as_mut_ptr());
            // SAFETY: the arguments have the sizes of the kernel's parameters, and each operation
            // checked the memory they point to. A kernel that starts early waits by itself for all
            // earlier work.
            unsafe { sys::cuLaunchKernelEx(&config, function, pointers, std::ptr::null_mut()) }
                .result()
                .map_err(|error| {
                    let size = format!("{blocks:?} blocks, {threads} threads, {shared} shared");
                    self.failed(format!("{entry} with {size} bytes"), error)
                })
        })
    }

    /// A launch of `grid` on the stream, with one attribute.
    fn config(&self, grid: Grid, attribute: &mut sys::CUlaunchAttribute) -> sys::CUlaunchConfig {
        let [x, y, z] = grid.blocks;
        sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared,
            hStream: self.stream(),
            attrs: attribute,
            numAttrs: 1,
        }
    }

    /// Queues work, and adds its time to the profile if one is being taken.
    pub(crate) fn profiled(
        &self,
        work: Work,
        queue: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.bind()?;
        let start = self.profile.begin(&self.stream)?;
        queue()?;
        self.profile.end(work, start, &self.stream)
    }

    /// How many blocks of a kernel run at once, in clusters of `cluster`.
    pub(crate) fn resident_blocks(
        &mut self,
        entry: &'static str,
        grid: Grid,
        cluster: u32,
    ) -> Result<usize, Error> {
        self.bind()?;
        let kernel = self.kernel(entry, grid.shared)?;
        if cluster == 1 {
            let mut blocks = 0;
            let (threads, shared) = (grid.threads as i32, grid.shared as usize);
            // SAFETY: the function is loaded.
            unsafe {
                let function = kernel.function;
                sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    &mut blocks,
                    function,
                    threads,
                    shared,
                )
            }
            .result()
            .map_err(|error| driver_error(format!("occupancy of {entry}"), error))?;
            return Ok(blocks.max(1) as usize * self.multiprocessors);
        }
        let blocks = (self.multiprocessors as u32 / cluster * cluster).max(cluster);
        let dimension = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: cluster, y: 1, z: 1 };
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { clusterDim: dimension },
        };
        let config = self.config(Grid { blocks: [blocks, 1, 1], ..grid }, &mut attribute);
        let mut clusters = 0;
        // SAFETY: the function is loaded, and the configuration lives until the call returns.
        unsafe { sys::cuOccupancyMaxActiveClusters(&mut clusters, kernel.function, &config) }
            .result()
            .map_err(|error| driver_error(format!("occupancy of {entry}"), error))?;
        Ok((clusters.max(1) as usize) * cluster as usize)
    }

    /// A kernel that may use this much shared memory, compiled and loaded on first use.
    fn kernel(&mut self, entry: &'static str, shared: u32) -> Result<Kernel, Error> {
        /// Shared memory that needs no attribute.
        const DEFAULT: u32 = 48 << 10;
        if !self.kernels.contains_key(entry) {
            let source = kernels::source_of(entry)
                .unwrap_or_else(|| panic!("{entry} is not in the table of kernels"));
            let (operation, architecture) = (source.name, self.architecture);
            if !source.serves.contains(&architecture) {
                return Err(Error::Unserved { operation, architecture });
            }
            let module = match self.modules.get(operation) {
                Some(&module) => module,
                None => {
                    let release = self.compiler()?;
                    let cubin = compile::cached(&self.cache, source, architecture, release)?;
                    // SAFETY: the image is complete: it comes from the compiler, or from a file
                    // with a checksum.
                    let module = unsafe { result::module::load_data(cubin.as_ptr().cast()) }
                        .map_err(|error| self.failed(format!("loading {operation}"), error))?;
                    self.modules.insert(operation, module);
                    module
                }
            };
            let start = if architecture.starts_early() { source.start() } else { Start::Late };
            let kernel = Kernel::load(module, entry, start)
                .map_err(|error| self.failed(format!("loading {entry}"), error))?;
            self.kernels.insert(entry, kernel);
        }
        let kernel = self.kernels.get_mut(entry).expect("it was loaded");
        if shared > kernel.shared.max(DEFAULT) {
            let attribute =
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is loaded.
            unsafe {
                result::function::set_function_attribute(kernel.function, attribute, shared as i32)
            }
            .map_err(|e| driver_error(format!("{shared} bytes of shared memory, {entry}"), e))?;
            kernel.shared = shared;
        }
        Ok(kernel.clone())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _ = self.wait_for_copies();
        let _ = self.join();
        let _ = self.synchronize();
        self.free_all();
        for (_, module) in self.modules.drain() {
            // SAFETY: none of its kernels runs any more.
            let _ = unsafe { result::module::unload(module) };
        }
    }
}

impl Kernel {
    fn load(module: sys::CUmodule, entry: &'static str, start: Start) -> Result<Self, DriverError> {
        let name = std::ffi::CString::new(entry).expect("names hold no NUL");
        // SAFETY: the module is loaded.
        let function = unsafe { result::module::get_function(module, name) }?;
        let mut parameters = Vec::new();
        let (mut offset, mut size) = (0, 0);
        // SAFETY: the function is loaded; the driver refuses an index past the last parameter.
        while unsafe { sys::cuFuncGetParamInfo(function, parameters.len(), &mut offset, &mut size) }
            .result()
            .is_ok()
        {
            parameters.push(size);
        }
        Ok(Self { function, parameters: parameters.into(), shared: 0, start })
    }
}

/// The step state as it lies in device memory.
fn state_words(state: &StepState) -> [u32; STATE_WORDS] {
    let [first, second] = state.bias_corrections.map(f32::to_bits);
    [
        state.seed as u32,
        (state.seed >> 32) as u32,
        state.step,
        state.micro_step,
        state.learning_rate.to_bits(),
        first,
        second,
        state.loss_scale.to_bits(),
    ]
}

/// Why a GPU that exists cannot be opened.
fn open_error(ordinal: usize, error: DriverError) -> Error {
    match error.0 {
        sys::CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE => {
            Error::Occupied { ordinal, reason: "another process has exclusive use of it" }
        }
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            Error::Occupied { ordinal, reason: "other processes hold its memory" }
        }
        _ => driver_error("opening the GPU", error),
    }
}

fn next_mark() -> u64 {
    static MARKS: AtomicU64 = AtomicU64::new(1);
    MARKS.fetch_add(1, Ordering::Relaxed)
}

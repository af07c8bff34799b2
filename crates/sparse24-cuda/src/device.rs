//! An open GPU: the stream of its operations, and its compiled kernels.
//!
//! Invariant: whatever a kernel is launched on was checked before: handles are of this device, and
//! arguments have the sizes of the kernel's parameters. Operations run in the order in which they
//! were queued; copies to the host alone have a stream of their own, and order themselves
//! ([`crate::host_copy`]). Deliberately absent: what any operation computes, and the account of
//! memory ([`crate::memory`]).

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

use crate::{
    Architecture, Error, Matrix, Release,
    cache::Cache,
    compile, driver,
    host_copy::Copies,
    kernels::{self, Start},
    launch::{Argument, Grid},
    library,
    memory::Memory,
    profile::{Profile, Work},
    step::StepState,
};

/// How a device is opened.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// The number of the GPU, as the driver counts.
    pub ordinal: usize,
    /// The folder of compiled kernels; otherwise that of `SPARSE24_KERNEL_CACHE`, or one in the
    /// user's cache.
    pub kernel_cache: Option<PathBuf>,
    /// Folders with CUDA's libraries, see [`library::search_in`](crate::library::search_in).
    pub libraries: Vec<PathBuf>,
}

/// An open GPU.
pub struct Device {
    pub(crate) context: Arc<CudaContext>,
    pub(crate) stream: Arc<CudaStream>,
    name: String,
    architecture: Architecture,
    multiprocessors: usize,
    /// The newest release of CUDA that the driver serves: major, minor.
    driver: [i32; 2],
    cache: Cache,
    /// Of the compiler of the kernels, once it was asked for.
    release: OnceCell<Release>,
    kernels: HashMap<&'static str, Kernel>,
    modules: HashMap<&'static str, sys::CUmodule>,
    pub(crate) memory: Memory,
    pub(crate) copies: Copies,
    pub(crate) mark: u64,
    pub(crate) state: Matrix<u32>,
    /// Work is recorded and not done.
    pub(crate) recording: bool,
    profile: Profile,
}

/// A loaded kernel and the sizes of its parameters.
#[derive(Clone)]
struct Kernel {
    function: sys::CUfunction,
    parameters: Arc<[usize]>,
    shared: u32,
    start: Start,
}

// SAFETY: the raw handles of kernels and modules belong to the context, which any thread may use
// once it is bound there; every method binds it.
unsafe impl Send for Device {}

impl Device {
    /// Opens a GPU; nothing is compiled yet.
    ///
    /// # Errors
    /// [`Error::Library`] without a driver, [`Error::NoDevice`], [`Error::Architecture`] for a GPU
    /// without sparse tensor cores, [`Error::Occupied`], [`Error::Driver`].
    pub fn open(settings: &Settings) -> Result<Self, Error> {
        library::search_in(&settings.libraries);
        let driver = driver::start()?;
        let said = |what: &'static str| move |error: DriverError| driver_error(what.into(), error);
        let count = result::device::get_count().map_err(said("counting GPUs"))?;
        let count = usize::try_from(count).unwrap_or(0);
        if settings.ordinal >= count {
            return Err(Error::NoDevice { ordinal: settings.ordinal, count });
        }
        let context = CudaContext::new(settings.ordinal)
            .map_err(|error| not_opened(settings.ordinal, error))?;
        // SAFETY: what is tracked is the use of the bindings' own slices, of which there are none;
        // memory here is of `memory`, and what the stream of copies reads is ordered by events of
        // `host_copy`.
        unsafe { context.disable_event_tracking() };
        let name = context.name().map_err(said("asking for the GPU's name"))?;
        let (major, minor) =
            context.compute_capability().map_err(said("asking for the compute capability"))?;
        let architecture = Architecture::of_capability(major, minor).ok_or_else(|| {
            Error::Architecture { name: name.clone(), capability: [major, minor] }
        })?;
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let multiprocessors =
            context.attribute(attribute).map_err(said("asking for multiprocessors"))? as usize;
        let stream = context.new_stream().map_err(said("making a stream"))?;
        let cache = settings.kernel_cache.as_deref().map_or_else(Cache::of_user, Cache::at);
        let mark = next_mark();
        let state = Matrix { mark, address: 0, shape: [0, 0], stride: 0, element: PhantomData };
        let (kernels, modules) = (HashMap::new(), HashMap::new());
        let (memory, copies, recording, profile) =
            (Memory::default(), Copies::default(), false, Profile::default());
        let release = OnceCell::new();
        let mut device = Self {
            context,
            stream,
            name,
            architecture,
            multiprocessors,
            driver,
            cache,
            release,
            kernels,
            modules,
            memory,
            copies,
            mark,
            state,
            recording,
            profile,
        };
        device.state = device.alloc("step state", [1, StepState::WORDS])?;
        Ok(device)
    }

    /// The GPU's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What kernels are compiled for.
    #[must_use]
    pub const fn architecture(&self) -> Architecture {
        self.architecture
    }

    /// The driver's release, where the system tells it, and the newest of CUDA that it serves:
    /// `580.82.07 (CUDA 13.0)`.
    #[must_use]
    pub fn driver(&self) -> String {
        let [major, minor] = self.driver;
        driver::own_release().map_or_else(
            || format!("for CUDA {major}.{minor}"),
            |own| format!("{own} (CUDA {major}.{minor})"),
        )
    }

    /// The release of the compiler that kernels are of: this machine's, or where it has none the
    /// newest whose kernels are kept.
    ///
    /// # Errors
    /// [`Error::Library`] where there is neither.
    pub fn compiler(&self) -> Result<Release, Error> {
        if let Some(release) = self.release.get() {
            return Ok(*release);
        }
        let release = compile::release_for(&self.cache, self.architecture)?;
        Ok(*self.release.get_or_init(|| release))
    }

    /// How many blocks run at once, one on each.
    #[must_use]
    pub const fn multiprocessors(&self) -> usize {
        self.multiprocessors
    }

    /// What notes the time of everything queued here, once it is started.
    #[must_use]
    pub fn profile(&self) -> Profile {
        self.profile.clone()
    }

    /// What changes every step, for all operations queued from now on.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn set_step(&mut self, state: &StepState) -> Result<(), Error> {
        self.upload(self.state, &state.words())
    }

    /// Waits until all that was queued is done.
    ///
    /// # Errors
    /// [`Error::Driver`], also of an earlier operation.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.refuse_while_recording("a wait")?;
        self.bind()?;
        self.stream.synchronize().map_err(|error| self.refused("waiting for the GPU".into(), error))
    }

    /// The step state, for kernels that read it.
    pub(crate) fn state(&self) -> Argument {
        self.state.into()
    }

    /// The stream, for libraries.
    pub(crate) fn stream(&self) -> sys::CUstream {
        self.stream.cu_stream()
    }

    /// The context, for questions about the GPU.
    #[cfg(feature = "bench")]
    pub(crate) fn context(&self) -> &CudaContext {
        &self.context
    }

    /// The context becomes that of this thread.
    pub(crate) fn bind(&self) -> Result<(), Error> {
        self.context
            .bind_to_thread()
            .map_err(|error| driver_error("binding the GPU to a thread".into(), error))
    }

    /// Queues a kernel; an empty grid is nothing to do.
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
        let what = || {
            format!(
                "{entry} on {:?} blocks of {} threads, {} bytes shared",
                grid.blocks, grid.threads, grid.shared
            )
        };
        let kernel = self.kernel(entry, grid.shared)?;
        let sizes = arguments.iter().map(Argument::size);
        assert!(
            sizes.eq(kernel.parameters.iter().copied()),
            "{entry}: arguments are those that the kernel declares"
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
        self.noted(Work::Kernel(entry), || {
            // SAFETY: the arguments have the sizes of the kernel's parameters, and each operation
            // checked what they point to. A kernel that starts early waits by itself for all that
            // was queued before.
            unsafe {
                sys::cuLaunchKernelEx(
                    &config,
                    kernel.function,
                    pointers.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            }
            .result()
            .map_err(|error| self.refused(what(), error))
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
            hStream: self.stream.cu_stream(),
            attrs: attribute,
            numAttrs: 1,
        }
    }

    /// Queues something, whose time goes into a profile that is being taken.
    pub(crate) fn noted(
        &self,
        work: Work,
        queue: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let began = self.profile.begin(&self.stream)?;
        queue()?;
        self.profile.end(work, began, &self.stream)
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

    /// A kernel that may use so much shared memory, compiled and loaded at its first use.
    fn kernel(&mut self, entry: &'static str, shared: u32) -> Result<Kernel, Error> {
        const WITHOUT_ASKING: u32 = 48 << 10;
        if !self.kernels.contains_key(entry) {
            let source = kernels::source_of(entry)
                .unwrap_or_else(|| panic!("{entry} has no line in the table of kernels"));
            if !source.serves.contains(&self.architecture) {
                return Err(Error::Unserved {
                    operation: source.name,
                    architecture: self.architecture,
                });
            }
            let module = match self.modules.get(source.name) {
                Some(&module) => module,
                None => {
                    let cubin =
                        compile::cached(&self.cache, source, self.architecture, self.compiler()?)?;
                    // SAFETY: the image is whole: it came from the compiler, or from a file with
                    // its checksum.
                    let module = unsafe { result::module::load_data(cubin.as_ptr().cast()) }
                        .map_err(|error| self.refused(format!("loading {}", source.name), error))?;
                    self.modules.insert(source.name, module);
                    module
                }
            };
            let start = if self.architecture.starts_early() {
                source.start()
            } else {
                Start::AfterPrevious
            };
            let kernel = Kernel::load(module, entry, start)
                .map_err(|error| self.refused(format!("loading {entry}"), error))?;
            self.kernels.insert(entry, kernel);
        }
        let kernel = self.kernels.get_mut(entry).expect("it was loaded");
        if shared > kernel.shared.max(WITHOUT_ASKING) {
            let attribute =
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is loaded.
            unsafe {
                result::function::set_function_attribute(kernel.function, attribute, shared as i32)
            }
            .map_err(|error| {
                driver_error(format!("{shared} bytes of shared memory for {entry}"), error)
            })?;
            kernel.shared = shared;
        }
        Ok(kernel.clone())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _ = self.wait_for_copies();
        let _ = self.synchronize();
        self.free_all();
        for (_, module) in self.modules.drain() {
            // SAFETY: nothing of it runs any more.
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
        // SAFETY: the function is loaded; an index past the last parameter is refused, which ends
        // the loop.
        while unsafe { sys::cuFuncGetParamInfo(function, parameters.len(), &mut offset, &mut size) }
            .result()
            .is_ok()
        {
            parameters.push(size);
        }
        Ok(Self { function, parameters: parameters.into(), shared: 0, start })
    }
}

/// Why a GPU that is there is not opened.
fn not_opened(ordinal: usize, error: DriverError) -> Error {
    match error.0 {
        sys::CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE => {
            Error::Occupied { ordinal, reason: "it serves one process alone, and another has it" }
        }
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            Error::Occupied { ordinal, reason: "other processes hold its memory" }
        }
        _ => driver_error("opening the GPU".into(), error),
    }
}

pub(crate) fn driver_error(what: String, DriverError(code): DriverError) -> Error {
    Error::Driver { what, code: format!("{code:?}") }
}

pub(crate) fn next_mark() -> u64 {
    static MARKS: AtomicU64 = AtomicU64::new(1);
    MARKS.fetch_add(1, Ordering::Relaxed)
}

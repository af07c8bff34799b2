//! The error type of this crate.

use std::path::PathBuf;

use cudarc::driver::DriverError;
use sparse24_core::op::Activation;

use crate::{Architecture, library::Library, plan::Plan};

/// Why a device cannot be opened or an operation cannot be queued. Shapes are `[rows, columns]`.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The semantics of the operation reject the input.
    #[error(transparent)]
    Semantics(#[from] sparse24_core::Error),
    /// A library is missing, or does not load.
    #[error("{library} {}; {}", match unloadable {
        None => format!("was not found: tried {}{}", paths(tried), searched(folders)),
        Some((file, problem)) => {
            format!("does not load: {}: the loader reports {problem:?}", file.display())
        }
    }, library.advice())]
    Library {
        /// The library.
        library: Library,
        /// Files that were tried, in order.
        tried: Vec<PathBuf>,
        /// Folders that were searched and hold no such file.
        folders: Vec<PathBuf>,
        /// The last file that exists but does not load, and the loader's message.
        unloadable: Option<(PathBuf, String)>,
    },
    /// A library lacks a function that every supported release has.
    #[error("{} is not a supported release of {library}: it has no function {name}; {}",
        file.display(), library.advice())]
    Function {
        /// The library.
        library: Library,
        /// The file that was loaded.
        file: PathBuf,
        /// The missing function.
        name: &'static str,
    },
    /// The driver is too old for the compiled kernels.
    #[error("the driver supports CUDA {}.{}, expected at least {}.{}; install a newer driver",
        found[0], found[1], required[0], required[1])]
    OldDriver {
        /// Newest CUDA release that the driver supports: major, minor.
        found: [i32; 2],
        /// Oldest CUDA release that kernels need.
        required: [i32; 2],
    },
    /// There is no GPU with this number.
    #[error("GPU {ordinal} does not exist: the driver reports {count}; {}", gpus_advice(*count))]
    NoDevice {
        /// The requested number.
        ordinal: usize,
        /// Number of GPUs.
        count: usize,
    },
    /// The GPU has no sparse tensor cores, or is newer than this build.
    #[error("{name} has compute capability {}.{}, expected one of {}; {}", capability[0],
        capability[1], Architecture::ALL.map(Architecture::name).join(", "),
        if *capability < [8, 0] { "choose a newer GPU" }
        else { "choose another GPU, or a newer release of sparse24" })]
    Architecture {
        /// The GPU's name.
        name: String,
        /// Compute capability: major, minor.
        capability: [i32; 2],
    },
    /// The GPU's memory is exhausted.
    #[error("{name} needs {} for {purpose}, and {} of {} MiB are free: this process holds {} \
        MiB{}, other processes and the driver {} MiB",
        asked.map_or("more GPU memory".to_owned(), |asked| {
            format!("{} MiB of GPU memory", mib(asked))
        }),
        mib(*free), mib(*total), mib(sum(held)), listed(held), mib(others(*free, *total, held)))]
    OutOfMemory {
        /// The allocation, kernel or launch.
        name: String,
        /// Its purpose.
        purpose: &'static str,
        /// Requested bytes; `None` if the driver allocates, or the number overflows.
        asked: Option<usize>,
        /// Free bytes on the GPU.
        free: usize,
        /// Total bytes on the GPU.
        total: usize,
        /// Bytes that this device holds, by purpose.
        held: Vec<(&'static str, usize)>,
    },
    /// Another process occupies the GPU.
    #[error(
        "GPU {ordinal} cannot be opened: {reason}; wait for the other process, or choose \
        another GPU"
    )]
    Occupied {
        /// The requested number.
        ordinal: usize,
        /// How it is occupied.
        reason: &'static str,
    },
    /// A kernel does not compile.
    #[error("kernel {kernel} does not compile for {architecture}: {}; use NVRTC of CUDA 13, and \
        report this error", log.lines().find(|line| line.contains("error")).unwrap_or(log).trim())]
    Compile {
        /// The kernel's file.
        kernel: &'static str,
        /// The architecture it was compiled for.
        architecture: Architecture,
        /// The compiler's log.
        log: String,
    },
    /// There is no kernel for this GPU.
    #[error("{operation} has no kernel for {architecture}; do not reuse plans of another GPU")]
    Unserved {
        /// The operation.
        operation: &'static str,
        /// The GPU's architecture.
        architecture: Architecture,
    },
    /// There is no kernel for this activation.
    #[error("the activation {activation:?} has no CUDA kernel; choose another one")]
    Activation {
        /// The activation.
        activation: Activation,
    },
    /// A call of the driver failed, or reports that an earlier operation failed.
    #[error("{what}: the CUDA driver reports {code}; {}", driver_advice(code))]
    Driver {
        /// The call, or the kernel and its launch.
        what: String,
        /// The driver's name for the failure.
        code: String,
    },
    /// A call of cuBLASLt failed.
    #[error("{what}: cuBLASLt reports {code}; {}", blas_advice(code))]
    Blas {
        /// The call.
        what: String,
        /// cuBLASLt's name for the failure.
        code: String,
    },
    /// NCCL is too old.
    #[error("{} is NCCL {}.{}, expected at least {}.{}; {}", file.display(), found[0], found[1],
        required[0], required[1], Library::Nccl.advice())]
    OldNccl {
        /// The file that was loaded.
        file: PathBuf,
        /// Its release: major, minor.
        found: [i32; 2],
        /// The oldest supported release.
        required: [i32; 2],
    },
    /// A call of NCCL failed.
    #[error(
        "{what}: NCCL reports {problem:?}; run with NCCL_DEBUG=WARN for details, or set \
        backend.exchange to \"tcp\""
    )]
    Nccl {
        /// The call.
        what: String,
        /// NCCL's description.
        problem: String,
    },
    /// A transfer between GPUs failed, since another process or the network did.
    #[error(
        "a transfer between GPUs failed: NCCL reports {problem:?}; run with NCCL_DEBUG=WARN for \
        details"
    )]
    Transfer {
        /// NCCL's description.
        problem: String,
    },
    /// An operand's shape does not match the other operands.
    #[error("{operation}: {operand} has shape {found:?}, expected {expected:?}")]
    Shape {
        /// The operation.
        operation: &'static str,
        /// The operand.
        operand: &'static str,
        /// The shape that the other operands imply.
        expected: [usize; 2],
        /// The operand's shape.
        found: [usize; 2],
    },
    /// An operand must be contiguous, and has gaps between its rows.
    #[error("{operation}: {operand} has rows {stride} elements apart, expected {columns}")]
    Gaps {
        /// The operation.
        operation: &'static str,
        /// The operand.
        operand: &'static str,
        /// Elements per row.
        columns: usize,
        /// Elements from one row to the next.
        stride: usize,
    },
    /// A number is out of range.
    #[error("{operation}: {what} is {found}, expected {expected}")]
    OutOfRange {
        /// The operation.
        operation: &'static str,
        /// The number's name.
        what: &'static str,
        /// Its value.
        found: f64,
        /// The range, in words.
        expected: &'static str,
    },
    /// Rows of an operand are not aligned for the kernel's wide accesses.
    #[error("{operation}: rows of {operand} must be {bytes}-byte aligned")]
    Alignment {
        /// The operation.
        operation: &'static str,
        /// The operand.
        operand: &'static str,
        /// Required alignment.
        bytes: usize,
    },
    /// An output overlaps another operand.
    #[error("{operation}: {output} overlaps {other}")]
    Alias {
        /// The operation.
        operation: &'static str,
        /// The output.
        output: &'static str,
        /// The operand that it overlaps.
        other: &'static str,
    },
    /// The operation is not possible during the capture of a CUDA graph.
    #[error("{operation} cannot be captured in a CUDA graph")]
    Capturing {
        /// The operation.
        operation: &'static str,
    },
    /// A handle belongs to another device, or to memory that was freed.
    #[error("{operation}: {operand} is not in memory that this device holds")]
    Stale {
        /// The operation.
        operation: &'static str,
        /// The handle.
        operand: &'static str,
    },
    /// A recorded plan cannot be used here.
    #[error("plan {key:?}: {problem}")]
    Recorded {
        /// The product that it belongs to.
        key: String,
        /// The problem.
        problem: String,
    },
    /// A plan schedules more tiles or parts than the product has.
    #[error("{operation}: plan {plan} does not fit m, n, k = {shape:?}")]
    Plan {
        /// The operation.
        operation: &'static str,
        /// The plan.
        plan: Plan,
        /// m, n and k.
        shape: [usize; 3],
    },
    /// A size exceeds what the kernel supports.
    #[error("{operation}: {what} is {found}, expected at most {limit}")]
    TooLarge {
        /// The operation.
        operation: &'static str,
        /// The size's name.
        what: &'static str,
        /// Its value.
        found: usize,
        /// Largest supported value.
        limit: usize,
    },
}

/// An error of the driver in the call `what`.
pub(crate) fn driver_error(what: impl Into<String>, DriverError(code): DriverError) -> Error {
    Error::Driver { what: what.into(), code: format!("{code:?}") }
}

fn paths(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

fn searched(folders: &[PathBuf]) -> String {
    if folders.is_empty() { String::new() } else { format!(", searched {}", paths(folders)) }
}

fn mib(bytes: usize) -> usize {
    bytes.div_ceil(1 << 20)
}

fn sum(held: &[(&'static str, usize)]) -> usize {
    held.iter().map(|(_, bytes)| bytes).sum()
}

fn others(free: usize, total: usize, held: &[(&'static str, usize)]) -> usize {
    total.saturating_sub(free + sum(held))
}

impl Error {
    /// Whether the memory would suffice if other processes held none. The driver's own share counts
    /// as theirs.
    #[must_use]
    pub fn waits_for_others(&self) -> bool {
        let Self::OutOfMemory { asked, free, total, held, .. } = self else { return false };
        let others = others(*free, *total, held);
        others > sum(held) && asked.is_none_or(|asked| asked <= free + others)
    }
}

fn gpus_advice(count: usize) -> String {
    match count {
        0 => "check that `nvidia-smi` lists a GPU and CUDA_VISIBLE_DEVICES hides none".to_owned(),
        1 => "choose 0".to_owned(),
        count => format!("choose one of 0 to {}", count - 1),
    }
}

fn blas_advice(code: &str) -> &'static str {
    match code {
        "CUBLAS_STATUS_ALLOC_FAILED" | "CUBLAS_STATUS_NOT_INITIALIZED" => {
            "check `nvidia-smi`: the GPU may lack memory, or the driver may be too old"
        }
        _ => "use cuBLASLt of CUDA 13, and report this error",
    }
}

fn driver_advice(code: &str) -> &'static str {
    match code {
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
        | "CUDA_ERROR_NOT_INITIALIZED"
        | "CUDA_ERROR_SYSTEM_NOT_READY"
        | "CUDA_ERROR_UNKNOWN" => "reload or reinstall the NVIDIA driver, or restart the machine",
        "CUDA_ERROR_STUB_LIBRARY" => "remove CUDA's stubs folder from LD_LIBRARY_PATH",
        "CUDA_ERROR_ECC_UNCORRECTABLE"
        | "CUDA_ERROR_HARDWARE_STACK_ERROR"
        | "CUDA_ERROR_CONTAINED" => "the GPU is damaged: check `nvidia-smi -q`, choose another",
        _ => "check `nvidia-smi` and the system log, and report the error if it recurs",
    }
}

/// Purposes that hold at least a MiB.
fn listed(held: &[(&'static str, usize)]) -> String {
    let large = held.iter().filter(|(_, bytes)| *bytes >= 1 << 20);
    let large: Vec<_> =
        large.map(|&(purpose, bytes)| format!("{purpose} {}", mib(bytes))).collect();
    if large.is_empty() { String::new() } else { format!(" ({})", large.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn out_of_memory(asked: Option<usize>, free: usize, held: Vec<(&'static str, usize)>) -> Error {
        let (name, purpose) = ("h.3.z".into(), "activations");
        Error::OutOfMemory {
            name,
            purpose,
            asked: asked.map(|mib| mib << 20),
            free: free << 20,
            total: 100 << 20,
            held,
        }
    }

    #[test]
    fn out_of_memory_lists_the_holders() {
        let held = vec![("weights", 30 << 20), ("activations", (15 << 20) + 1), ("tables", 1)];
        let error = out_of_memory(Some(7), 4, held);
        let text = error.to_string();
        for part in ["7 MiB", "4 of 100", "46 MiB (weights 30, activations 16)", "driver 51 MiB"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(error.waits_for_others());
    }

    #[test]
    fn waiting_helps_if_others_hold_the_memory() {
        let waits = |asked, free, held: usize| {
            out_of_memory(asked, free, vec![("weights", held << 20)]).waits_for_others()
        };
        assert!(waits(Some(32), 10, 5) && waits(None, 1, 5));
        assert!(!waits(Some(96), 10, 5), "more than the GPU has");
        assert!(!waits(Some(32), 10, 60), "this process holds most of it");
    }

    #[test]
    fn advice_fits_the_failure() {
        let driver = |code: &str| Error::Driver { what: "replay".into(), code: code.into() };
        let blas = |code: &str| Error::Blas { what: "open".into(), code: code.into() };
        for (error, advice) in [
            (Error::NoDevice { ordinal: 0, count: 0 }, "CUDA_VISIBLE_DEVICES"),
            (Error::NoDevice { ordinal: 3, count: 2 }, "0 to 1"),
            (driver("CUDA_ERROR_ECC_UNCORRECTABLE"), "choose another"),
            (blas("CUBLAS_STATUS_ALLOC_FAILED"), "memory"),
        ] {
            assert!(error.to_string().contains(advice), "{error}");
        }
    }
}

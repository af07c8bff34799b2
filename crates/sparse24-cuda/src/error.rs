//! The one error type of this crate: what is missing on this machine, or which operand of which
//! operation does not fit.

use std::path::PathBuf;

use crate::{Architecture, library::Library, spmm24::Plan};

/// Why a device cannot be opened or an operation cannot be queued. Shapes are `[rows, columns]`.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The semantics themselves refuse the input.
    #[error(transparent)]
    Semantics(#[from] sparse24_core::Error),
    /// A library is not on this machine, or does not load.
    #[error("{library} {}", match unloadable {
        None => format!("was not found: tried {}{}; {}", paths(tried), searched(folders), library.advice()),
        Some((file, problem)) => format!("does not load: of {} the loader says {problem:?}; mend what it says, or {}", file.display(), library.advice()),
    })]
    Library {
        /// Which.
        library: Library,
        /// The file names that were tried, in order.
        tried: Vec<PathBuf>,
        /// The folders that were searched for such files, and held none.
        folders: Vec<PathBuf>,
        /// The last of those files that is there all the same, and what the system's loader says of
        /// it.
        unloadable: Option<(PathBuf, String)>,
    },
    /// A library lacks a function that every release of CUDA 13 has.
    #[error("{} has no function {name}, so it is not {library} of CUDA 13; {}", file.display(), library.advice())]
    Function {
        /// Which.
        library: Library,
        /// The file that was loaded.
        file: PathBuf,
        /// The function.
        name: &'static str,
    },
    /// The driver is older than the compiled kernels.
    #[error("the CUDA driver serves CUDA {}.{}, and kernels need {}.{}: install a newer driver", found[0], found[1], required[0], required[1])]
    OldDriver {
        /// The newest release of CUDA that it serves: major, minor.
        found: [i32; 2],
        /// The oldest that is needed.
        required: [i32; 2],
    },
    /// There is no such GPU.
    #[error("there is no GPU {ordinal}: the driver sees {count}; {}", gpus_advice(*count))]
    NoDevice {
        /// The number asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// The GPU is older than sparse tensor cores, or newer than this build.
    #[error("{name} has compute capability {}.{}: kernels exist for {}; {}", capability[0], capability[1],
        Architecture::ALL.map(Architecture::name).join(", "),
        if *capability < [8, 0] { "choose a newer GPU" } else { "choose another GPU, or a newer release of sparse24" })]
    Architecture {
        /// The GPU.
        name: String,
        /// What it has: major, minor.
        capability: [i32; 2],
    },
    /// The GPU's memory does not suffice.
    #[error(
        "{name} needs {} for {purpose}, and {} MiB are free of {}: this process holds {} MiB{}, other processes and the driver {} MiB",
        asked.map_or("more GPU memory".to_owned(), |asked| format!("{} MiB of GPU memory", mib(asked))),
        mib(*free), mib(*total), mib(sum(held)), listed(held), mib(others(*free, *total, held))
    )]
    OutOfMemory {
        /// What was to be allocated, loaded or launched.
        name: String,
        /// What for.
        purpose: &'static str,
        /// Bytes asked for; `None` where the driver keeps them to itself, or there are more than
        /// can be counted.
        asked: Option<usize>,
        /// Bytes free on the GPU.
        free: usize,
        /// Bytes of the GPU.
        total: usize,
        /// Bytes that the device holds, by purpose.
        held: Vec<(&'static str, usize)>,
    },
    /// Another process leaves no room on the GPU.
    #[error(
        "GPU {ordinal} cannot be opened: {reason}; wait for the other process, or choose another GPU"
    )]
    Occupied {
        /// The number asked for.
        ordinal: usize,
        /// What is in the way.
        reason: &'static str,
    },
    /// A kernel does not compile.
    #[error("kernel {kernel} does not compile for {architecture}: {}; use NVRTC of CUDA 13, and report what it refuses", log.lines().find(|line| line.contains("error")).unwrap_or(log).trim_end())]
    Compile {
        /// Its file.
        kernel: &'static str,
        /// What for.
        architecture: Architecture,
        /// What the compiler said.
        log: String,
    },
    /// A kernel has no form for this GPU.
    #[error("{operation} has no kernel for {architecture}; do without plans of another GPU")]
    Unserved {
        /// The operation that refused.
        operation: &'static str,
        /// The GPU's architecture.
        architecture: Architecture,
    },
    /// The driver refuses a call, or reports the failure of an earlier one.
    #[error("{what}: the CUDA driver says {code}; {}", driver_advice(code))]
    Driver {
        /// The call, or the kernel and its launch.
        what: String,
        /// The driver's name for the failure.
        code: String,
    },
    /// The library of dense products refuses a call.
    #[error("{what}: cuBLASLt says {code}; {}", blas_advice(code))]
    Blas {
        /// The call.
        what: String,
        /// The library's name for the failure.
        code: String,
    },
    /// An operand has another shape than the other operands imply.
    #[error("{operation}: {operand} should be {expected:?}, found {found:?}")]
    Shape {
        /// The operation that refused.
        operation: &'static str,
        /// The operand that does not fit.
        operand: &'static str,
        /// The shape that the other operands imply.
        expected: [usize; 2],
        /// The shape given.
        found: [usize; 2],
    },
    /// Rows of an operand do not follow each other without gaps.
    #[error(
        "{operation}: rows of {operand} are {columns} elements and should be no further apart, found {stride}"
    )]
    Gaps {
        /// The operation that refused.
        operation: &'static str,
        /// The operand that does not fit.
        operand: &'static str,
        /// Elements of a row.
        columns: usize,
        /// Elements from one row to the next.
        stride: usize,
    },
    /// A number lies outside of its range.
    #[error("{operation}: {what} is {found}, expected {expected}")]
    OutOfRange {
        /// The operation that refused.
        operation: &'static str,
        /// The number.
        what: &'static str,
        /// What was given.
        found: f64,
        /// In words.
        expected: &'static str,
    },
    /// Rows of an operand do not begin where the kernel's wide accesses may.
    #[error("{operation}: rows of {operand} must begin at multiples of {bytes} bytes")]
    Alignment {
        /// The operation that refused.
        operation: &'static str,
        /// The operand that does not fit.
        operand: &'static str,
        /// The alignment that the kernel needs.
        bytes: usize,
    },
    /// An output shares memory with another operand.
    #[error("{operation}: {output} shares memory with {other}")]
    Alias {
        /// The operation that refused.
        operation: &'static str,
        /// The output.
        output: &'static str,
        /// The operand that it shares memory with.
        other: &'static str,
    },
    /// An operation that is done at once cannot be recorded.
    #[error("{operation} cannot be part of what is recorded for replay")]
    Recording {
        /// The operation that refused.
        operation: &'static str,
    },
    /// A handle is of another device, or of memory that was given back.
    #[error("{operation}: {operand} is a handle to memory that this device does not hold")]
    Stale {
        /// The operation that refused.
        operation: &'static str,
        /// The handle.
        operand: &'static str,
    },
    /// A plan that was written down cannot be replayed.
    #[error("plan {key:?}: {problem}")]
    Recorded {
        /// What it is for.
        key: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A plan divides what the product does not have.
    #[error("{operation}: plan {plan} does not fit m, n, k = {shape:?}")]
    Plan {
        /// The operation that refused.
        operation: &'static str,
        /// The plan.
        plan: Plan,
        /// m, n and k.
        shape: [usize; 3],
    },
    /// A dimension is beyond what kernels count with.
    #[error("{operation}: {what} is {found}, at most {limit}")]
    TooLarge {
        /// The operation that refused.
        operation: &'static str,
        /// The dimension.
        what: &'static str,
        /// What was given.
        found: usize,
        /// The largest served.
        limit: usize,
    },
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
    /// Whether memory would suffice if other processes held none; the driver's own share is counted
    /// among theirs.
    #[must_use]
    pub fn waits_for_others(&self) -> bool {
        let Self::OutOfMemory { asked, free, total, held, .. } = self else { return false };
        let others = others(*free, *total, held);
        others > sum(held) && asked.is_none_or(|asked| asked <= free + others)
    }
}

fn gpus_advice(count: usize) -> String {
    match count {
        0 => "see whether `nvidia-smi` lists one and CUDA_VISIBLE_DEVICES hides none".to_owned(),
        1 => "choose 0".to_owned(),
        count => format!("choose one of 0 to {}", count - 1),
    }
}

/// By the library's name for the failure.
fn blas_advice(code: &str) -> &'static str {
    match code {
        "CUBLAS_STATUS_ALLOC_FAILED" | "CUBLAS_STATUS_NOT_INITIALIZED" => {
            "see `nvidia-smi`: memory or the driver may not suffice for it"
        }
        _ => "use cuBLASLt of CUDA 13, and report what it refuses",
    }
}

/// By the driver's name for the failure.
fn driver_advice(code: &str) -> &'static str {
    match code {
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
        | "CUDA_ERROR_NOT_INITIALIZED"
        | "CUDA_ERROR_SYSTEM_NOT_READY"
        | "CUDA_ERROR_UNKNOWN" => "reload or reinstall NVIDIA's driver, or restart the machine",
        "CUDA_ERROR_STUB_LIBRARY" => "take the folder of CUDA's stubs out of LD_LIBRARY_PATH",
        "CUDA_ERROR_ECC_UNCORRECTABLE"
        | "CUDA_ERROR_HARDWARE_STACK_ERROR"
        | "CUDA_ERROR_CONTAINED" => "the GPU is damaged: see `nvidia-smi -q`, and choose another",
        _ => "see `nvidia-smi` and the system's log, and report it if it comes again",
    }
}

/// What is worth a word.
fn listed(held: &[(&'static str, usize)]) -> String {
    let large = held.iter().filter(|(_, bytes)| *bytes >= 1 << 20);
    let large: Vec<_> =
        large.map(|&(purpose, bytes)| format!("{purpose} {}", mib(bytes))).collect();
    if large.is_empty() { String::new() } else { format!(" ({})", large.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_memory_tells_who_holds_it() {
        let mib = |count: usize| count << 20;
        let held = vec![("weights", mib(30)), ("activations", mib(15) + 1), ("tables", 1)];
        let error = Error::OutOfMemory {
            name: "h.3.z".into(),
            purpose: "activations",
            asked: Some(mib(7)),
            free: mib(4),
            total: mib(100),
            held,
        };
        assert_eq!(
            error.to_string(),
            "h.3.z needs 7 MiB of GPU memory for activations, and 4 MiB are free of 100: this process holds 46 MiB (weights 30, activations 16), \
             other processes and the driver 51 MiB"
        );
        assert!(error.waits_for_others());
    }

    #[test]
    fn waiting_helps_only_where_others_hold_what_is_missing() {
        let mib = |count: usize| count << 20;
        let lack = |asked, free, held| {
            let held = vec![("weights", mib(held))];
            Error::OutOfMemory {
                name: "norm".into(),
                purpose: "weights",
                asked,
                free: mib(free),
                total: mib(100),
                held,
            }
        };
        assert!(lack(Some(mib(32)), 10, 5).waits_for_others());
        assert!(!lack(Some(mib(96)), 10, 5).waits_for_others(), "more than the GPU has");
        assert!(!lack(Some(mib(32)), 10, 60).waits_for_others(), "this process holds most");
        let unknown = lack(None, 1, 5);
        assert!(unknown.waits_for_others());
        assert!(
            unknown
                .to_string()
                .starts_with("norm needs more GPU memory for weights, and 1 MiB are free of 100: "),
            "{unknown}"
        );
    }

    #[test]
    fn what_to_do_depends_on_what_is_wrong() {
        let none = Error::NoDevice { ordinal: 0, count: 0 }.to_string();
        assert!(none.contains("CUDA_VISIBLE_DEVICES"), "{none}");
        let beyond = Error::NoDevice { ordinal: 3, count: 2 }.to_string();
        assert_eq!(beyond, "there is no GPU 3: the driver sees 2; choose one of 0 to 1");
        let code = format!("{:?}", cudarc::driver::sys::CUresult::CUDA_ERROR_ECC_UNCORRECTABLE);
        let damaged = Error::Driver { what: "replay".into(), code }.to_string();
        assert!(damaged.contains("choose another"), "{damaged}");
        let full = Error::Blas {
            what: "opening the library".into(),
            code: "CUBLAS_STATUS_ALLOC_FAILED".into(),
        }
        .to_string();
        assert!(full.contains("memory"), "{full}");
    }
}

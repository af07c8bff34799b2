//! The one error type of this crate: what is missing on this machine, or which operand of which operation does not fit.

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
    #[error("{library} was not found: tried {}; {}", tried.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", "), library.advice())]
    Library {
        /// Which.
        library: Library,
        /// The file names that were tried, in order.
        tried: Vec<PathBuf>,
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
    #[error("there is no GPU {ordinal}: the driver sees {count}")]
    NoDevice {
        /// The number asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// The GPU is older than sparse tensor cores, or newer than this build.
    #[error("{name} has compute capability {}.{}: kernels exist for {}", capability[0], capability[1],
        Architecture::ALL.map(Architecture::name).join(", "))]
    Architecture {
        /// The GPU.
        name: String,
        /// What it has: major, minor.
        capability: [i32; 2],
    },
    /// The GPU's memory does not suffice.
    #[error(
        "{name} needs {} MiB of GPU memory for {purpose}, and {} MiB are free of {}: this process holds {} MiB{}, other processes and the driver {} MiB",
        mib(*asked), mib(*free), mib(*total), mib(sum(held)), listed(held), mib(total.saturating_sub(free + sum(held)))
    )]
    OutOfMemory {
        /// What was to be allocated.
        name: String,
        /// What for.
        purpose: &'static str,
        /// Bytes asked for; the most that can be counted if they cannot be.
        asked: usize,
        /// Bytes free on the GPU.
        free: usize,
        /// Bytes of the GPU.
        total: usize,
        /// Bytes that the device holds, by purpose.
        held: Vec<(&'static str, usize)>,
    },
    /// Another process leaves no room on the GPU.
    #[error("GPU {ordinal} cannot be opened: {reason}; wait for the other process, or choose another GPU")]
    Occupied {
        /// The number asked for.
        ordinal: usize,
        /// What is in the way.
        reason: &'static str,
    },
    /// A kernel does not compile.
    #[error("kernel {kernel} does not compile for {architecture}: {}", log.lines().find(|line| line.contains("error")).unwrap_or(log))]
    Compile {
        /// Its file.
        kernel: &'static str,
        /// What for.
        architecture: Architecture,
        /// What the compiler said.
        log: String,
    },
    /// A kernel has no form for this GPU.
    #[error("{operation} has no kernel for {architecture}")]
    Unserved {
        /// The operation that refused.
        operation: &'static str,
        /// The GPU's architecture.
        architecture: Architecture,
    },
    /// The driver refuses a call, or reports the failure of an earlier one.
    #[error("{what}: the CUDA driver says {code}")]
    Driver {
        /// The call, or the kernel and its launch.
        what: String,
        /// The driver's name for the failure.
        code: String,
    },
    /// The library of dense products refuses a call.
    #[error("{what}: cuBLASLt says {code}")]
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

fn mib(bytes: usize) -> usize {
    bytes.div_ceil(1 << 20)
}

fn sum(held: &[(&'static str, usize)]) -> usize {
    held.iter().map(|(_, bytes)| bytes).sum()
}

/// What is worth a word.
fn listed(held: &[(&'static str, usize)]) -> String {
    let large = held.iter().filter(|(_, bytes)| *bytes >= 1 << 20);
    let large: Vec<_> = large.map(|&(purpose, bytes)| format!("{purpose} {}", mib(bytes))).collect();
    if large.is_empty() { String::new() } else { format!(" ({})", large.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_memory_tells_who_holds_it() {
        let mib = |count: usize| count << 20;
        let held = vec![("weights", mib(30)), ("activations", mib(15) + 1), ("tables", 1)];
        let error = Error::OutOfMemory { name: "h.3.z".into(), purpose: "activations", asked: mib(7), free: mib(4), total: mib(100), held };
        assert_eq!(
            error.to_string(),
            "h.3.z needs 7 MiB of GPU memory for activations, and 4 MiB are free of 100: this process holds 46 MiB (weights 30, activations 16), \
             other processes and the driver 51 MiB"
        );
    }
}

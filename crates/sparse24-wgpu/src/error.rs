//! The errors of the crate.

use crate::Matrix;

/// The failure of an operation or a device.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The machine has no such adapter.
    #[error(
        "no GPU adapter {number} ({}install the GPU's driver for Vulkan, Metal or Direct3D 12, or \
         use the CPU with backend.name = \"cpu\"",
        listed(.found)
    )]
    NoAdapter {
        /// The number that was asked for.
        number: usize,
        /// All adapters in order.
        found: Vec<String>,
    },
    /// The adapter fails the self-test.
    #[error("{adapter} computes {what} incorrectly; update its driver, or choose another adapter")]
    WrongResults {
        /// The adapter.
        adapter: String,
        /// The operation.
        what: &'static str,
    },
    /// The adapter allows less than the kernels need.
    #[error(
        "{adapter} has a {limit} of {found}, but {needed} are needed; update its driver, or choose \
         another adapter"
    )]
    Limit {
        /// The adapter.
        adapter: String,
        /// WebGPU's name for the limit.
        limit: &'static str,
        /// Its value on the adapter.
        found: u32,
        /// The smallest value with which all kernels run.
        needed: u32,
    },
    /// A matrix is larger than a binding of this device can be.
    #[error("{name} needs {bytes} bytes, but a binding of this device holds at most {limit}")]
    TooLarge {
        /// Name of the matrix.
        name: String,
        /// Its size in bytes.
        bytes: u64,
        /// The limit of the device in bytes.
        limit: u64,
    },
    /// The driver could not allocate memory.
    #[error("out of GPU memory: {what}, and {held} bytes are already allocated")]
    OutOfMemory {
        /// Describes the allocation.
        what: String,
        /// Bytes that this device has allocated.
        held: u64,
    },
    /// The device was removed or reset, or its driver ended work that took too long.
    #[error("the GPU was lost: {0}")]
    Lost(String),
    /// The driver refused or failed.
    #[error("the GPU driver failed: {0}")]
    Driver(String),
    /// Invalid use of wgpu: a bug in this crate or its caller.
    #[error("invalid GPU work: {0}")]
    Invalid(String),
    /// An operand has the wrong shape.
    #[error("{operation}: expected {operand} to be {expected:?}, found {found:?}")]
    Shape {
        /// The operation.
        operation: &'static str,
        /// The operand.
        operand: &'static str,
        /// Expected `[rows, columns]`.
        expected: [usize; 2],
        /// Found `[rows, columns]`.
        found: [usize; 2],
    },
    /// Core rejects the operands.
    #[error(transparent)]
    Semantics(#[from] sparse24_core::Error),
}

/// The adapters by number, and how to choose one.
fn listed(found: &[String]) -> String {
    let numbered = found.iter().enumerate().map(|(number, name)| format!("{number}: {name}"));
    match found {
        [] => "found none); ".to_owned(),
        _ => format!(
            "found: {}); choose another number, or ",
            numbered.collect::<Vec<_>>().join(", ")
        ),
    }
}

/// Refuses an operand with gaps between its rows.
pub(crate) fn check_contiguous(
    operation: &'static str,
    operand: &'static str,
    m: Matrix,
) -> Result<(), Error> {
    let gaps = || Error::Invalid(format!("{operation}: the rows of {operand} have gaps"));
    m.is_contiguous().then_some(()).ok_or_else(gaps)
}

/// Refuses an operand that has gaps or does not start at the beginning of its buffer.
pub(crate) fn check_leading(
    operation: &'static str,
    operand: &'static str,
    m: Matrix,
) -> Result<(), Error> {
    check_contiguous(operation, operand, m)?;
    let inside = || Error::Invalid(format!("{operation}: {operand} does not begin its buffer"));
    (m.offset == 0).then_some(()).ok_or_else(inside)
}

/// Compares shapes of operands.
pub(crate) fn check_shape(
    operation: &'static str,
    operand: &'static str,
    expected: [usize; 2],
    found: Matrix,
) -> Result<(), Error> {
    let found = found.shape;
    if expected == found {
        Ok(())
    } else {
        Err(Error::Shape { operation, operand, expected, found })
    }
}

//! The errors of the crate.

use crate::Matrix;

/// An operation or a device that failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The machine has no such adapter.
    #[error(
        "no GPU adapter {number}: found {}; install the GPU's driver for Vulkan, Metal or \
         Direct3D 12, or choose one of those",
        listed(.found)
    )]
    NoAdapter {
        /// The number that was asked for.
        number: usize,
        /// All adapters in order.
        found: Vec<String>,
    },
    /// The adapter's results are not those that every adapter must have.
    #[error("{adapter} computes {what} wrongly; update its driver, or choose another adapter")]
    WrongResults {
        /// The adapter.
        adapter: String,
        /// The operation.
        what: &'static str,
    },
    /// More than a binding of this device can hold.
    #[error("{name} takes {bytes} bytes, and this device binds at most {limit} at once")]
    TooLarge {
        /// Name of the matrix.
        name: String,
        /// Its size.
        bytes: u64,
        /// The limit of the device.
        limit: u64,
    },
    /// The device has no memory left.
    #[error("out of GPU memory: {what}, and {held} bytes are already held")]
    OutOfMemory {
        /// The purpose, in words.
        what: String,
        /// The bytes that this device holds.
        held: u64,
    },
    /// The device is gone: it was removed or reset, or its driver ended work that took too long.
    #[error("the GPU was lost: {0}")]
    Lost(String),
    /// The driver refused or failed.
    #[error("the GPU driver failed: {0}")]
    Driver(String),
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
    /// Core refuses the operands.
    #[error(transparent)]
    Semantics(#[from] sparse24_core::Error),
}

fn listed(found: &[String]) -> String {
    let numbered = found.iter().enumerate().map(|(number, name)| format!("{number} ({name})"));
    match found {
        [] => "none".to_owned(),
        _ => numbered.collect::<Vec<_>>().join(", "),
    }
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

//! Converts errors of the kernels, with advice if memory runs out or the GPU is lost.

use sparse24_wgpu::Error as Refusal;

use crate::Error;

impl From<Refusal> for Error {
    fn from(error: Refusal) -> Self {
        match error {
            Refusal::Semantics(error) => Self::Semantics(error),
            Refusal::Shape { operation, operand, expected, found } => {
                Self::Operand { operation, operand, expected, found }
            }
            full @ Refusal::OutOfMemory { .. } => Self::Device(format!(
                "{full}; lower batch.size (and raise batch.gradient_accumulation_steps), set \
                 model.activation_checkpointing = \"blocks\", or train a smaller model"
            )),
            lost @ Refusal::Lost(_) => Self::Device(format!(
                "{lost}; resume the run from its last checkpoint, with a smaller batch.size if \
                 the driver ended work that took too long"
            )),
            other => Self::Device(other.to_string()),
        }
    }
}

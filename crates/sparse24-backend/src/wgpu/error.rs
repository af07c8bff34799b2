//! Converts errors of the kernels, with advice if memory runs out or the GPU is lost, and marks
//! invalid work as a defect.

use sparse24_wgpu::Error as Refusal;

use crate::{Error, Region, error::less_memory};

impl From<Refusal> for Error {
    fn from(error: Refusal) -> Self {
        match error {
            Refusal::Semantics(error) => Self::Semantics(error),
            Refusal::Shape { operation, operand, expected, found } => {
                Self::Operand { operation, operand, expected, found }
            }
            full @ (Refusal::OutOfMemory { .. } | Refusal::Driver(_)) if is_of_memory(&full) => {
                Self::Device(format!("{full}; {}", less_memory(Region::Activations.name())))
            }
            lost @ Refusal::Lost(_) => Self::Device(format!(
                "{lost}; a driver may end work that takes too long; a smaller batch.size makes it \
                 shorter"
            )),
            defect @ Refusal::Invalid(_) => Self::Refused(defect.to_string()),
            other => Self::Device(other.to_string()),
        }
    }
}

/// Whether the device is out of memory. A driver's error is recognized by its text.
fn is_of_memory(refusal: &Refusal) -> bool {
    refusal.to_string().to_lowercase().contains("memory")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    #[test]
    fn invalid_work_is_a_defect() {
        let kind = |error| Error::from(error).kind();
        assert_eq!(kind(Refusal::Invalid("x".to_owned())), ErrorKind::Contract);
        assert_eq!(kind(Refusal::Driver("x".to_owned())), ErrorKind::Device);
        let full = Error::from(Refusal::Driver("Not enough memory left.".to_owned()));
        assert!(full.to_string().contains("lower batch.size"), "{full}");
    }
}

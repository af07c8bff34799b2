//! Converts errors of the kernels: adds advice if memory runs out, and marks those that no setting
//! can fix as defects.

use sparse24_cuda::Error as Refusal;

use crate::{Error, error::less_memory};

impl From<Refusal> for Error {
    fn from(error: Refusal) -> Self {
        match error {
            Refusal::Semantics(error) => Self::Semantics(error),
            Refusal::Shape { operation, operand, expected, found } => {
                Self::Operand { operation, operand, expected, found }
            }
            ref full @ Refusal::OutOfMemory { purpose, .. } => {
                let advice = if full.waits_for_others() {
                    "wait for the other processes, or choose another GPU (backend.gpu)"
                } else {
                    less_memory(purpose)
                };
                Self::Device(format!("{full}; {advice}"))
            }
            lost @ Refusal::Transfer { .. } => Self::Peer(lost.to_string()),
            defect @ (Refusal::Gaps { .. }
            | Refusal::OutOfRange { .. }
            | Refusal::Alignment { .. }
            | Refusal::Alias { .. }
            | Refusal::Capturing { .. }
            | Refusal::Stale { .. }
            | Refusal::Plan { .. }
            | Refusal::TooLarge { .. }) => Self::Refused(defect.to_string()),
            other => Self::Device(other.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    #[test]
    fn errors_that_no_setting_mends_are_defects() {
        let defect = Refusal::Capturing { operation: "upload" };
        let missing = Refusal::NoDevice { ordinal: 1, count: 1 };
        assert_eq!(Error::from(defect).kind(), ErrorKind::Contract);
        assert_eq!(Error::from(missing).kind(), ErrorKind::Device);
    }
}

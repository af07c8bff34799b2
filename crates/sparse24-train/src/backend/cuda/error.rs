//! Errors of the kernels: with advice where memory is short; the ones that no setting mends are
//! defects.

use sparse24_cuda::Error as Refusal;

use crate::Error;

impl From<Refusal> for Error {
    fn from(error: Refusal) -> Self {
        match error {
            Refusal::Semantics(error) => Self::Semantics(error),
            Refusal::Shape { operation, operand, expected, found } => {
                Self::Operand { operation, operand, expected, found }
            }
            full @ Refusal::OutOfMemory { .. } => {
                let advice = if full.waits_for_others() {
                    "wait for the other processes, or choose another GPU (backend.gpu)"
                } else {
                    "lower batch.size (and raise batch.gradient_accumulation_steps), set \
                     model.activation_checkpointing = \"blocks\", or train a smaller model"
                };
                Self::Device(format!("{full}; {advice}"))
            }
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
        let operation = "norm forward";
        for defect in [
            Refusal::Shape { operation, operand: "x", expected: [2, 3], found: [3, 2] },
            Refusal::Gaps { operation, operand: "x", columns: 8, stride: 12 },
            Refusal::Alignment { operation, operand: "x", bytes: 16 },
            Refusal::Alias { operation, output: "y", other: "x" },
            Refusal::Capturing { operation },
            Refusal::Stale { operation, operand: "x" },
            Refusal::TooLarge { operation, what: "a row's width", found: 9000, limit: 8192 },
            Refusal::OutOfRange { operation, what: "p", found: 1.0, expected: "less" },
        ] {
            assert_eq!(Error::from(defect.clone()).kind(), ErrorKind::Contract, "{defect}");
        }
        for device in [
            Refusal::NoDevice { ordinal: 1, count: 1 },
            Refusal::Driver { what: "replay".into(), code: "CUDA_ERROR_UNKNOWN".into() },
        ] {
            assert_eq!(Error::from(device.clone()).kind(), ErrorKind::Device, "{device}");
        }
    }

    #[test]
    fn advice_depends_on_who_holds_the_memory() {
        let full = |held| Refusal::OutOfMemory {
            name: "z".into(),
            purpose: "activations",
            asked: Some(8 << 20),
            free: 0,
            total: 64 << 20,
            held,
        };
        let mine = Error::from(full(vec![("weights", 60 << 20)])).to_string();
        assert!(
            mine.ends_with("or train a smaller model") && mine.contains("lower batch.size"),
            "{mine}"
        );
        let theirs = Error::from(full(vec![("weights", 1 << 20)])).to_string();
        assert!(theirs.ends_with("or choose another GPU (backend.gpu)"), "{theirs}");
    }
}

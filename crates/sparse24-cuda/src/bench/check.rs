//! Why a case is not timed.

use super::Outcome;
use crate::Error;

/// Why a case has no time.
#[derive(Debug)]
pub(super) enum Stop {
    /// The result is wrong: what, where, and the expected value.
    Wrong(String),
    /// An operation refused.
    Error(Error),
}

impl Stop {
    /// The outcome of the case, unless no other case can follow: after an error of the driver, the
    /// GPU may be unusable.
    pub(super) fn outcome(self) -> Result<Outcome, Error> {
        match self {
            Self::Wrong(difference) => Ok(Outcome::Failed { difference }),
            Self::Error(error) if is_of_one_case(&error) => {
                Ok(Outcome::Unmeasured { reason: error.to_string() })
            }
            Self::Error(error) => Err(error),
        }
    }

    /// Why the case continues without this competitor. If the driver failed for good, the case's
    /// own kernel fails next.
    pub(super) fn of_peer(self, peer: &str) -> Result<String, Self> {
        match self {
            Self::Wrong(difference) => Ok(difference),
            Self::Error(error)
                if is_of_one_case(&error) || matches!(error, Error::Driver { .. }) =>
            {
                Ok(format!("{peer}: {error}"))
            }
            stop => Err(stop),
        }
    }
}

/// Whether another case may still succeed.
const fn is_of_one_case(error: &Error) -> bool {
    use Error::{Blas, Compile, Function, Library, OutOfMemory, Unserved};
    matches!(
        error,
        OutOfMemory { .. }
            | Library { .. }
            | Function { .. }
            | Compile { .. }
            | Blas { .. }
            | Unserved { .. }
    )
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

impl From<sparse24_core::Error> for Stop {
    fn from(error: sparse24_core::Error) -> Self {
        Self::Error(error.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Architecture, library::Library};

    #[test]
    fn errors_end_a_case_or_the_bench() {
        let compile = Error::Compile {
            kernel: "norm",
            architecture: Architecture::Sm80,
            log: "error: no".into(),
        };
        let function = Error::Function { library: Library::CublasLt, file: "l".into(), name: "f" };
        let blas = Error::Blas { what: "a product".into(), code: "X".into() };
        let unserved = Error::Unserved { operation: "a product", architecture: Architecture::Sm80 };
        let driver = Error::Driver { what: "a launch".into(), code: "Y".into() };
        let defect = Error::Capturing { operation: "upload" };
        for error in [&compile, &function, &blas, &unserved] {
            let reason = error.to_string();
            assert_eq!(Stop::Error(error.clone()).outcome(), Ok(Outcome::Unmeasured { reason }));
        }
        for error in [&driver, &defect] {
            assert_eq!(Stop::Error(error.clone()).outcome().as_ref(), Err(error));
        }
        let of_peer = |stop: Stop| stop.of_peer("P").ok();
        for error in [&function, &blas, &driver] {
            assert_eq!(of_peer(Stop::Error(error.clone())), Some(format!("P: {error}")));
        }
        assert_eq!(of_peer(Stop::Error(defect)), None);
        assert_eq!(
            Stop::Wrong("x".into()).outcome(),
            Ok(Outcome::Failed { difference: "x".into() })
        );
        assert_eq!(of_peer(Stop::Wrong("x".into())).as_deref(), Some("x"));
    }
}

//! Verification of results before anything is timed.
//!
//! Where core defines the bits, or operations round in the CPU's order, results are compared bit
//! for bit; elsewhere within bounds a few times wider than those that the tests derive. A NaN is
//! never within a bound.

use std::fmt::Display;

use half::{bf16, slice::HalfFloatSliceExt};
use ndarray::Array2;
use sparse24_core::compressed::Compressed24;

use super::Outcome;
use crate::{
    Device, Error, Matrix, Scalar,
    layout::{Fragments, to_fragments},
};

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
    use Error::{Blas, Compile, Function, Library, OutOfMemory};
    matches!(
        error,
        OutOfMemory { .. } | Library { .. } | Function { .. } | Compile { .. } | Blas { .. }
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

/// Relative error of rounding to bf16, with a margin for differences of f32 sums.
pub(super) const BF16: f64 = 1.25 / 256.0;

/// How [`near_rows`] is reported for results in bf16, with [`BF16`].
pub(super) const CLOSE: &str = "every element, within 5/1024 of the CPU's in f32";

/// Checks that all elements are equal.
pub(super) fn same<T: PartialEq + Display>(
    what: &str,
    found: &[T],
    expected: &[T],
) -> Result<(), Stop> {
    if found == expected {
        return Ok(());
    }
    let at = found.iter().zip(expected).position(|(found, expected)| found != expected);
    Err(Stop::Wrong(match at {
        Some(at) => format!("{what}, element {at}: found {}, expected {}", found[at], expected[at]),
        None => format!("{what}: found {} elements, expected {}", found.len(), expected.len()),
    }))
}

/// |found - expected| <= relative * |expected| + absolute, at every element.
pub(super) fn near(
    what: &str,
    found: impl IntoIterator<Item = f32>,
    expected: impl IntoIterator<Item = f32>,
    [relative, absolute]: [f64; 2],
) -> Result<(), Stop> {
    let mut expected = expected.into_iter();
    for (at, found) in found.into_iter().enumerate() {
        let Some(expected) = expected.next() else {
            return Err(Stop::Wrong(format!("{what}: more elements than expected")));
        };
        let bound = relative * f64::from(expected.abs()) + absolute;
        let difference = (f64::from(found) - f64::from(expected)).abs();
        // Written so that a NaN fails.
        let within = difference <= bound;
        if !within {
            return Err(Stop::Wrong(format!(
                "{what}, element {at}: found {found}, expected {expected} within {bound:.3e}"
            )));
        }
    }
    if expected.next().is_some() {
        Err(Stop::Wrong(format!("{what}: fewer elements than expected")))
    } else {
        Ok(())
    }
}

/// |found - expected| <= share * |expected|, in Euclidean norms.
pub(super) fn near_in_norm(
    what: &str,
    found: &Array2<f32>,
    expected: &Array2<f32>,
    share: f64,
) -> Result<(), Stop> {
    let norm = |x: &Array2<f32>| x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
    let error = norm(&(found - expected)) / norm(expected);
    let within = error <= share;
    if within {
        Ok(())
    } else {
        Err(Stop::Wrong(format!(
            "{what} is off by {error:.3e} of its norm, expected at most {share:.1e}"
        )))
    }
}

/// Downloads the first `period` rows, after checking that all other rows repeat them, as the
/// operands do.
pub(super) fn repeating<T: Scalar + PartialEq>(
    device: &mut Device,
    what: &str,
    from: Matrix<T>,
    period: usize,
) -> Result<Vec<T>, Stop> {
    const AT_ONCE: usize = 64 << 20;
    let [rows, columns] = from.shape();
    let together = (AT_ONCE / (columns * size_of::<T>()) / period).max(1) * period;
    let panel = device.download(from.rows(0..period.min(rows)))?;
    for first in (0..rows).step_by(together) {
        let part = device.download(from.rows(first..(first + together).min(rows)))?;
        if let Some(at) = part.chunks(panel.len()).position(|rows| *rows != panel[..rows.len()]) {
            let row = first + at * period;
            return Err(Stop::Wrong(format!(
                "{what}: rows from {row} on differ from those from 0 on, which had the same \
                 operands"
            )));
        }
    }
    Ok(panel)
}

/// |found - expected| <= relative * |expected| + absolute, in all rows, which repeat those
/// expected.
pub(super) fn near_rows<T: Scalar + PartialEq + Into<f32>>(
    device: &mut Device,
    what: &str,
    from: Matrix<T>,
    expected: &Array2<f32>,
    bound: [f64; 2],
) -> Result<(), Stop> {
    let found = repeating(device, what, from, expected.nrows())?;
    let expected = expected.iter().copied().take(found.len());
    near(what, found.into_iter().map(Into::into), expected, bound)
}

/// Checks that all rows repeat those expected.
pub(super) fn same_rows<T: Scalar + PartialEq + Display>(
    device: &mut Device,
    what: &str,
    from: Matrix<T>,
    expected: &[T],
) -> Result<(), Stop> {
    let found = repeating(device, what, from, expected.len() / from.shape()[1])?;
    same(what, &found, &expected[..found.len()])
}

/// Checks values and metadata bit for bit, in the order of [`Fragments`].
pub(super) fn same_compressed(
    what: &str,
    found: &Fragments,
    expected: &Compressed24<bf16>,
) -> Result<(), Stop> {
    let expected = to_fragments(expected);
    same(&format!("{what}, metadata"), &found.metadata, &expected.metadata)?;
    let [found, expected] = [found, &expected].map(|of| of.values.reinterpret_cast());
    same(&format!("{what}, values"), found, expected)
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
        let driver = Error::Driver { what: "a launch".into(), code: "Y".into() };
        let defect = Error::Capturing { operation: "upload" };
        for error in [&compile, &function, &blas] {
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

    #[test]
    fn differences_are_reported_with_their_place() {
        let wrong_text = |stop: Result<(), Stop>| match stop {
            Err(Stop::Wrong(text)) => text,
            other => panic!("{other:?}"),
        };
        assert!(
            near("x", [1.0, 2.0], [1.0, 2.001], [1e-3, 0.0]).is_ok()
                && same("x", &[1, 2], &[1, 2]).is_ok()
        );
        assert_eq!(
            wrong_text(near("x", [1.0, 2.0], [1.0, 2.1], [1e-3, 0.0])),
            "x, element 1: found 2, expected 2.1 within 2.100e-3"
        );
        assert!(
            wrong_text(near("x", [f32::NAN], [1.0], [1.0, f64::INFINITY]))
                .contains("element 0: found NaN")
        );
        assert!(
            wrong_text(near("x", [1.0], [1.0, 2.0], [1.0, 1.0])).contains("fewer")
                && wrong_text(near("x", [1.0], [], [1.0, 1.0])).contains("more")
        );
        assert_eq!(wrong_text(same("x", &[1, 2], &[1, 3])), "x, element 1: found 2, expected 3");
        let [ones, nans] = [1.0, f32::NAN].map(|x| Array2::from_elem((2, 2), x));
        assert!(near_in_norm("x", &ones, &ones, 0.0).is_ok());
        assert!(wrong_text(near_in_norm("x", &nans, &ones, 1.0)).contains("off by NaN"));
    }
}

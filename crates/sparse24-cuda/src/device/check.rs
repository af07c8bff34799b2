//! Checks of operands: handles, shapes, alignment, and overlap.

use std::ops::Range;

use super::Device;
use crate::{Error, Matrix, Result, Scalar};

/// Checks the operands of one operation in turn; inputs first, since an output must not overlap any
/// operand that was checked before it.
#[derive(Clone)]
pub(crate) struct Checks<'a> {
    device: &'a Device,
    operation: &'static str,
    spans: Vec<(&'static str, Range<u64>)>,
}

impl Device {
    pub(crate) const fn checks(&self, operation: &'static str) -> Checks<'_> {
        Checks { device: self, operation, spans: Vec::new() }
    }

    /// The handle belongs to memory that this device holds.
    pub(crate) fn check_live<T: Scalar>(
        &self,
        operation: &'static str,
        operand: &'static str,
        matrix: Matrix<T>,
    ) -> Result {
        if matrix.mark == self.mark { Ok(()) } else { Err(Error::Stale { operation, operand }) }
    }
}

impl Checks<'_> {
    /// A live input of this shape whose rows are `bytes`-aligned and may be strided.
    pub(crate) fn strided<T: Scalar>(
        &mut self,
        operand: &'static str,
        matrix: Matrix<T>,
        expected: [usize; 2],
        bytes: usize,
    ) -> Result<&mut Self> {
        let operation = self.operation;
        self.device.check_live(operation, operand, matrix)?;
        if matrix.shape != expected {
            return Err(Error::Shape { operation, operand, expected, found: matrix.shape });
        }
        if !matrix.is_aligned(bytes) {
            return Err(Error::Alignment { operation, operand, bytes });
        }
        self.spans.push((operand, matrix.span()));
        Ok(self)
    }

    /// A live, contiguous input of this shape, `bytes`-aligned.
    pub(crate) fn input<T: Scalar>(
        &mut self,
        operand: &'static str,
        matrix: Matrix<T>,
        expected: [usize; 2],
        bytes: usize,
    ) -> Result<&mut Self> {
        self.strided(operand, matrix, expected, 1)?;
        if !matrix.is_contiguous() {
            let (columns, stride) = (matrix.shape[1], matrix.stride);
            return Err(Error::Gaps { operation: self.operation, operand, columns, stride });
        }
        self.starts_aligned(operand, matrix.address, bytes)
    }

    /// Like [`Checks::input`], if there is an operand.
    pub(crate) fn optional<T: Scalar>(
        &mut self,
        operand: &'static str,
        matrix: Option<Matrix<T>>,
        expected: [usize; 2],
        bytes: usize,
    ) -> Result<&mut Self> {
        match matrix {
            Some(matrix) => self.input(operand, matrix, expected, bytes),
            None => Ok(self),
        }
    }

    /// Like [`Checks::input`], and overlaps nothing that was checked before.
    pub(crate) fn output<T: Scalar>(
        &mut self,
        operand: &'static str,
        matrix: Matrix<T>,
        expected: [usize; 2],
        bytes: usize,
    ) -> Result<&mut Self> {
        self.input(operand, matrix, expected, bytes)?.last_is_apart()
    }

    /// Like [`Checks::strided`], and overlaps nothing that was checked before.
    pub(crate) fn strided_output<T: Scalar>(
        &mut self,
        operand: &'static str,
        matrix: Matrix<T>,
        expected: [usize; 2],
        bytes: usize,
    ) -> Result<&mut Self> {
        self.strided(operand, matrix, expected, bytes)?.last_is_apart()
    }

    /// A live rectangle of this shape whose first element is 16-byte aligned.
    pub(crate) fn rectangle<T: Scalar>(
        &mut self,
        operand: &'static str,
        matrix: Matrix<T>,
        expected: [usize; 2],
    ) -> Result<&mut Self> {
        self.strided(operand, matrix, expected, 1)?.starts_aligned(operand, matrix.address, 16)
    }

    fn starts_aligned(
        &mut self,
        operand: &'static str,
        address: u64,
        bytes: usize,
    ) -> Result<&mut Self> {
        if address.is_multiple_of(bytes as u64) {
            return Ok(self);
        }
        Err(Error::Alignment { operation: self.operation, operand, bytes })
    }

    /// The last operand that was checked overlaps none before it.
    pub(crate) fn last_is_apart(&mut self) -> Result<&mut Self> {
        let Some(((output, span), others)) = self.spans.split_last() else { return Ok(self) };
        let overlaps = |other: &Range<u64>| span.start < other.end && other.start < span.end;
        match others.iter().find(|(_, other)| overlaps(other)) {
            None => Ok(self),
            Some(&(other, _)) => Err(Error::Alias { operation: self.operation, output, other }),
        }
    }

    /// Like [`Checks::output`], but it may be the input `of` itself, of which a thread reads its
    /// part before it writes it.
    pub(crate) fn output_or_input<T: Scalar>(
        &mut self,
        operand: &'static str,
        matrix: Matrix<T>,
        (of, input): (&str, Matrix<T>),
        expected: [usize; 2],
        bytes: usize,
    ) -> Result<&mut Self> {
        if matrix.span() == input.span() {
            self.spans.retain(|(name, _)| *name != of);
        }
        self.output(operand, matrix, expected, bytes)
    }

    /// No two of the operands that were checked overlap, unless both have the name `read`.
    pub(crate) fn all_apart(&mut self, read: &str) -> Result {
        match overlap(&mut self.spans, read) {
            None => Ok(()),
            Some([output, other]) => Err(Error::Alias { operation: self.operation, output, other }),
        }
    }

    /// A size that is at most `limit`.
    pub(crate) fn limit(
        &mut self,
        what: &'static str,
        found: usize,
        limit: usize,
    ) -> Result<&mut Self> {
        if found <= limit {
            return Ok(self);
        }
        Err(Error::TooLarge { operation: self.operation, what, found, limit })
    }

    /// A number in [0, 1).
    pub(crate) fn below_one(&mut self, what: &'static str, number: f32) -> Result<&mut Self> {
        if (0.0..1.0).contains(&number) {
            return Ok(self);
        }
        let (found, expected) = (number.into(), "at least 0 and below 1");
        Err(Error::OutOfRange { operation: self.operation, what, found, expected })
    }

    /// An operand whose columns are a multiple of `step`.
    pub(crate) fn columns_of(
        &mut self,
        operand: &'static str,
        found: [usize; 2],
        step: usize,
    ) -> Result<&mut Self> {
        if found[1].is_multiple_of(step) {
            return Ok(self);
        }
        let expected = [found[0], found[1].next_multiple_of(step)];
        Err(Error::Shape { operation: self.operation, operand, expected, found })
    }
}

/// Two operands that overlap, unless both have the name `read`: first one that has another name.
fn overlap(spans: &mut Vec<(&'static str, Range<u64>)>, read: &str) -> Option<[&'static str; 2]> {
    spans.retain(|(_, span)| !span.is_empty());
    spans.sort_by_key(|(_, span)| span.start);
    // The operand so far that ends last: of all, and of those with another name.
    let mut last = [("", 0); 2];
    for (name, span) in spans {
        let is_read = *name == read;
        let (other, end) = last[usize::from(is_read)];
        if span.start < end {
            return Some(if is_read { [other, name] } else { [name, other] });
        }
        let of = if is_read { &mut last[..1] } else { &mut last[..] };
        of.iter_mut().filter(|(_, end)| *end < span.end).for_each(|at| *at = (name, span.end));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::overlap;

    #[test]
    fn only_operands_that_are_read_may_overlap() {
        let cases: [(&[_], _); 8] = [
            (&[("w", 0..4), ("w", 4..8), ("r", 8..9)], None),
            (&[("r", 0..8), ("r", 2..6), ("r", 4..9)], None),
            (&[("w", 3..3), ("r", 0..8)], None),
            (&[("w", 0..4), ("w", 3..5)], Some(["w", "w"])),
            (&[("w", 0..4), ("r", 3..5)], Some(["w", "r"])),
            (&[("r", 0..4), ("w", 3..5)], Some(["w", "r"])),
            // Not the operand just before it.
            (&[("r", 0..9), ("r", 1..2), ("w", 3..5)], Some(["w", "r"])),
            (&[("w", 0..9), ("r", 9..10), ("w", 8..9)], Some(["w", "w"])),
        ];
        for (spans, expected) in cases {
            assert_eq!(overlap(&mut spans.to_vec(), "r"), expected, "{spans:?}");
        }
    }
}

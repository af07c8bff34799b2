//! How results reach memory: through the caches, or past them where they would not stay anyway.
//!
//! A plain store of a line that no cache holds reads it first. Stores past the caches do not,
//! provided that whole lines are written. Invariant: who made such stores has passed a fence before
//! anybody else can see the memory. Deliberately absent: what is stored.

use sparse24_core::Element;

use super::{Available, Kernel, Vector};
use crate::convert;

/// Bytes of a cache line.
pub(super) const LINE: usize = 64;

/// A cache line.
#[repr(C, align(64))]
pub(crate) struct Line(pub(super) [u8; LINE]);

/// Outputs of at least so many bytes go past the caches: they would drive each other out of those
/// of a core.
const MANY: usize = 1 << 22;

/// Stores of one kernel on one thread.
pub(crate) struct Stores<V: Vector> {
    v: V,
    past: bool,
}

impl<V: Vector> Stores<V> {
    /// For an output of so many bytes.
    #[inline(always)]
    pub(crate) fn new(v: V, bytes: usize) -> Self {
        Self { v, past: bytes >= MANY }
    }

    #[inline(always)]
    pub(crate) fn vector(&self) -> V {
        self.v
    }

    /// [`Self::write`] of elements from words of [`convert::narrow_word`], those of a 16-bit type
    /// from both halves, the lower first.
    #[inline(always)]
    pub(crate) fn write_words<T: Element>(&self, words: &[u32], to: &mut [T]) {
        match super::elements(words) {
            Some(from) => self.write(&from[..to.len()], to),
            None => super::deliver_words(words, to),
        }
    }

    /// Copies elements to a place that this thread does not read, nor hands to another one, while
    /// the stores are alive.
    #[inline(always)]
    pub(crate) fn write<T: Element>(&self, from: &[T], to: &mut [T]) {
        if !self.past || !(convert::is::<T, f32>() || convert::elements_a_word::<T>() == 2) {
            return to.copy_from_slice(from);
        }
        // SAFETY: an element is a number without padding, as is a line, and every pattern of bits
        // is one of either.
        let (head, lines, tail) = unsafe { to.align_to_mut::<Line>() };
        let (first, rest) = from.split_at(head.len());
        let (whole, last) = rest.split_at(rest.len() - tail.len());
        // SAFETY: as above; bytes need no alignment, so that nothing is left before or behind.
        let (_, whole, _) = unsafe { whole.align_to::<[u8; LINE]>() };
        for (from, to) in whole.iter().zip(lines) {
            self.v.stream(from, to);
        }
        head.copy_from_slice(first);
        tail.copy_from_slice(last);
    }
}

impl<V: Vector> Drop for Stores<V> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.past {
            self.v.fence();
        }
    }
}

/// Copies as many elements as both have by the stores that an output of so many bytes gets: what a
/// kernel is measured against.
///
/// # Panics
/// If the lengths differ.
#[doc(hidden)]
pub fn copy<T: Element>(level: Available, bytes: usize, from: &[T], to: &mut [T]) {
    assert_eq!(from.len(), to.len(), "a copy has one length");
    level.run(Copy { bytes, from, to });
}

struct Copy<'a, T> {
    bytes: usize,
    from: &'a [T],
    to: &'a mut [T],
}

impl<T: Element> Kernel for Copy<'_, T> {
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        Stores::new(v, self.bytes).write(self.from, self.to);
    }
}

/// Elements before the first cache line that begins at an element of every row; 0 if rows begin in
/// different places of a line.
pub(crate) fn before_a_line<T>(first: *const T, row: usize) -> usize {
    match (row * size_of::<T>()) % LINE {
        0 => Some(first.align_offset(LINE)).filter(|&elements| elements < LINE).unwrap_or(0),
        _ => 0,
    }
}

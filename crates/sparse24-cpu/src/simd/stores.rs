//! How results reach memory: through the caches, or past them where they would not stay anyway.
//!
//! A plain store of a line that no cache holds reads it first. Stores past the caches do not, provided that whole lines are written.
//! Invariant: who made such stores has passed a fence before anybody else can see the memory. Deliberately absent: what is stored.

use sparse24_core::Element;

use super::{Available, Kernel, Vector};
use crate::convert;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Outputs of at least so many bytes go past the caches: they would drive each other out of those of a core.
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

    /// [`Self::write`] of elements from words of [`convert::narrow_word`], those of a 16-bit type from both halves, the lower first.
    #[inline(always)]
    pub(crate) fn write_words<T: Element>(&self, words: &[u32], to: &mut [T]) {
        match super::elements(words) {
            Some(from) => self.write(&from[..to.len()], to),
            None => super::deliver_words(words, to),
        }
    }

    /// Copies elements to a place that this thread does not read, nor hands to another one, while the stores are alive.
    #[inline(always)]
    pub(crate) fn write<T: Element>(&self, from: &[T], to: &mut [T]) {
        if !self.past || !(convert::is::<T, f32>() || convert::elements_a_word::<T>() == 2) {
            return to.copy_from_slice(from);
        }
        let each = LINE / size_of::<T>();
        let before = to.as_ptr().align_offset(LINE).min(to.len());
        let [head, lines] = [before, before + (to.len() - before) / each * each];
        if head > 0 {
            to[..head].copy_from_slice(&from[..head]);
        }
        if lines < to.len() {
            to[lines..].copy_from_slice(&from[lines..]);
        }
        if head < lines {
            self.v.stream(&from[head..lines], &mut to[head..lines]);
        }
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

/// Copies as many elements as both have by the stores that an output of so many bytes gets: what a kernel is measured against.
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

/// Elements before the first cache line that begins at an element of every row; 0 if rows begin in different places of a line.
pub(crate) fn before_a_line<T>(first: *const T, row: usize) -> usize {
    match (row * size_of::<T>()) % LINE {
        0 => Some(first.align_offset(LINE)).filter(|&elements| elements < LINE).unwrap_or(0),
        _ => 0,
    }
}

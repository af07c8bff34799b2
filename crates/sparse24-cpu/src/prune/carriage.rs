//! How elements travel through a compression: as bits, as values, or mapped.
//!
//! Invariant: what arrives is core's, to the bit. Deliberately absent: where from and where to.

use sparse24_core::{
    Element,
    group::Pattern,
    prune::{self, ValueMap},
};

use crate::convert;

/// How an element travels in an f32 lane, which moves it and never computes with it.
pub(super) trait Carriage {
    /// Whether an f32 travels as it is.
    const STORED: bool = true;
    /// Sixteen elements of a row; nibble `4*g` of `tiles` is the pattern of group g.
    fn carry<T: Element>(row: &[T; 16], tiles: u64, map: ValueMap, to: &mut [f32; 16]);
    fn deliver<U: Element>(lane: f32) -> U;
    /// The bits of what is delivered.
    #[inline(always)]
    fn word<U: Element>(lane: f32) -> u32 {
        convert::carry(Self::deliver::<U>(lane)).to_bits()
    }
}

/// From a type to the same type: as bits, so that the payload of a NaN survives.
pub(super) struct Bits;
/// By value.
pub(super) struct Value;
/// By value, through [`prune::group`].
pub(super) struct Mapped;

impl Carriage for Bits {
    #[inline(always)]
    fn carry<T: Element>(row: &[T; 16], _: u64, _: ValueMap, to: &mut [f32; 16]) {
        to.iter_mut().zip(row).for_each(|(to, &x)| *to = convert::carry(x));
    }
    #[inline(always)]
    fn deliver<U: Element>(lane: f32) -> U {
        convert::deliver(lane)
    }
}

impl Carriage for Value {
    #[inline(always)]
    fn carry<T: Element>(row: &[T; 16], _: u64, _: ValueMap, to: &mut [f32; 16]) {
        to.iter_mut().zip(row).for_each(|(to, &x)| *to = convert::widen(x));
    }
    #[inline(always)]
    fn deliver<U: Element>(lane: f32) -> U {
        convert::narrow(lane)
    }
}

impl Carriage for Mapped {
    const STORED: bool = false;
    #[inline(always)]
    fn carry<T: Element>(row: &[T; 16], tiles: u64, map: ValueMap, to: &mut [f32; 16]) {
        for (g, (to, x)) in to.as_chunks_mut().0.iter_mut().zip(row.as_chunks::<4>().0).enumerate()
        {
            if let Some(pattern) = Pattern::from_bits((tiles >> (16 * g)) as u8 & 0xf) {
                *to = prune::group(
                    [x[0].to_f32(), x[1].to_f32(), x[2].to_f32(), x[3].to_f32()],
                    pattern,
                    map,
                );
            }
        }
    }
    #[inline(always)]
    fn deliver<U: Element>(lane: f32) -> U {
        convert::narrow(lane)
    }
}

//! Conversions that a compiler can vectorise: those of [`Element`], without branches for bf16.
//!
//! Invariant: the same bits as [`Element::to_f32`] and [`Element::from_f32`]. Deliberately absent:
//! other formats than core's.

use core::any::{Any, TypeId};

use half::{bf16, f16};
use sparse24_core::Element;

/// [`Element::to_f32`].
#[inline(always)]
pub(crate) fn widen<T: Element>(x: T) -> f32 {
    match (&x as &dyn Any).downcast_ref::<bf16>() {
        Some(x) => {
            let bits = u32::from(x.to_bits());
            // A NaN becomes a quiet one.
            f32::from_bits(if bits & 0x7fff > 0x7f80 { bits | 0x40 } else { bits } << 16)
        }
        None => x.to_f32(),
    }
}

/// [`Element::from_f32`].
#[inline(always)]
pub(crate) fn narrow<T: Element>(x: f32) -> T {
    let bits = x.to_bits();
    let nearest_even = (bits.wrapping_add(0x7fff + (bits >> 16 & 1))) >> 16;
    let quiet = bits >> 16 | 0x40;
    let brain =
        bf16::from_bits(if bits & 0x7fff_ffff > 0x7f80_0000 { quiet } else { nearest_even } as u16);
    match (&brain as &dyn Any).downcast_ref() {
        Some(&x) => x,
        None => T::from_f32(x),
    }
}

/// The bits of the 16-bit types, zero-extended; the value of any other: what [`deliver`] turns back
/// into the same element.
#[inline(always)]
pub(crate) fn carry<T: Element>(x: T) -> f32 {
    let any: &dyn Any = &x;
    match (any.downcast_ref::<bf16>(), any.downcast_ref::<f16>()) {
        (Some(x), _) => f32::from_bits(x.to_bits().into()),
        (_, Some(x)) => f32::from_bits(x.to_bits().into()),
        _ => x.to_f32(),
    }
}

/// The inverse of [`carry`].
#[inline(always)]
pub(crate) fn deliver<T: Element>(x: f32) -> T {
    let bits = x.to_bits() as u16;
    let (brain, half): (&dyn Any, &dyn Any) = (&bf16::from_bits(bits), &f16::from_bits(bits));
    match (brain.downcast_ref(), half.downcast_ref()) {
        (Some(&x), _) | (_, Some(&x)) => x,
        _ => T::from_f32(x),
    }
}

/// How many elements of [`narrow_word`] share a word in [`crate::simd::deliver_words`]: two of a
/// 16-bit type.
#[inline(always)]
pub(crate) fn elements_a_word<T: Element>() -> usize {
    if is::<T, bf16>() || is::<T, f16>() { 2 } else { 1 }
}

/// Whether both are one type.
#[inline(always)]
pub(crate) fn is<T: Element, Other: Element>() -> bool {
    TypeId::of::<T>() == TypeId::of::<Other>()
}

/// The bits of [`narrow`] as [`carry`] gives them.
#[inline(always)]
pub(crate) fn narrow_word<T: Element>(x: f32) -> u32 {
    carry(narrow::<T>(x)).to_bits()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn every_element<T: Element>(of_bits: impl Fn(u16) -> T, bits: impl Fn(T) -> u16) {
        for x in 0..=u16::MAX {
            assert_eq!(widen(of_bits(x)).to_bits(), of_bits(x).to_f32().to_bits(), "{x:#x}");
            assert_eq!(bits(deliver(carry(of_bits(x)))), x);
            for below in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(x) << 16 | below);
                assert_eq!(bits(narrow(x)), bits(T::from_f32(x)), "{:#x}", x.to_bits());
            }
        }
    }

    #[test]
    fn conversions_are_those_of_core() {
        every_element(bf16::from_bits, bf16::to_bits);
        every_element(f16::from_bits, f16::to_bits);
        for x in [1.5, -0.0, f32::NAN, 1e-45] {
            assert_eq!(
                [narrow::<f32>(x), widen(x), deliver(carry(x))].map(f32::to_bits),
                [x.to_bits(); 3]
            );
        }
    }
}

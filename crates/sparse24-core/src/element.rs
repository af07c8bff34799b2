//! The storage types of weights: f32, f16, bf16. All arithmetic of this crate is in f32; a
//! conversion to f32 is exact.

use half::{bf16, f16};

/// A storage type whose every value is an f32.
///
/// `from_f32` rounds to nearest, ties to even.
pub trait Element: Copy + Default + PartialEq + core::fmt::Debug + Send + Sync + 'static {
    /// The value, exactly.
    fn to_f32(self) -> f32;
    /// The nearest value of this type, ties to even.
    fn from_f32(value: f32) -> Self;
    /// The elements as they lie in memory, where the storage type is f32 itself: kernels then read
    /// them without a copy.
    fn as_f32s(elements: &[Self]) -> Option<&[f32]> {
        let _ = elements;
        None
    }
}

impl Element for f32 {
    fn to_f32(self) -> f32 {
        self
    }
    fn from_f32(value: f32) -> Self {
        value
    }
    fn as_f32s(elements: &[Self]) -> Option<&[f32]> {
        Some(elements)
    }
}

impl Element for f16 {
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
    fn from_f32(value: f32) -> Self {
        f16::from_f32(value)
    }
}

impl Element for bf16 {
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
    fn from_f32(value: f32) -> Self {
        bf16::from_f32(value)
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::Element;

    #[test]
    fn conversions_are_exact_one_way_and_nearest_even_the_other() {
        for bits in (0..=u16::MAX).step_by(if cfg!(miri) { 257 } else { 1 }) {
            let (single, brain) = (f16::from_bits(bits), bf16::from_bits(bits));
            assert!(
                single.is_nan()
                    || <f16 as Element>::from_f32(Element::to_f32(single)).to_bits() == bits
            );
            assert!(
                brain.is_nan()
                    || <bf16 as Element>::from_f32(Element::to_f32(brain)).to_bits() == bits
            );
        }
        // Halfway between 1 and its upper neighbour, then just above; the even one is 1.
        let ties = [1.0 + 1.0 / 256.0, 1.0 + 1.0 / 256.0 + f32::EPSILON];
        assert_eq!(
            ties.map(<bf16 as Element>::from_f32).map(Element::to_f32),
            [1.0, 1.0 + 1.0 / 128.0]
        );
    }
}

//! The storage types of weights: f32, f16 and bf16. All arithmetic of this crate is in f32.

use half::{bf16, f16};

/// A storage type whose values are all exact in f32.
pub trait Element: Copy + Default + PartialEq + core::fmt::Debug + Send + Sync + 'static {
    /// The exact value.
    fn to_f32(self) -> f32;
    /// The nearest value of this type, ties to even.
    fn from_f32(value: f32) -> Self;
    /// The elements themselves if the storage type is f32, so that kernels can read them without a
    /// copy.
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

macro_rules! half_elements {
    ($($type:ident),*) => {$(
        impl Element for $type {
            fn to_f32(self) -> f32 {
                $type::to_f32(self)
            }
            fn from_f32(value: f32) -> Self {
                $type::from_f32(value)
            }
        }
    )*};
}
half_elements!(f16, bf16);

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::Element;

    #[test]
    fn conversions_round_trip_and_round_to_even() {
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

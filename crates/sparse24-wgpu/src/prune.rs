//! Pruned weights, dense with zeros.

use sparse24_core::prune::ValueMap;

use crate::{
    Device, Error, Matrix, Tiles, WORKGROUP,
    error::{check_leading, check_shape},
    kernels,
};

/// out = S(w): w under the mask, kept values mapped.
///
/// w `[r, q]`; out `[r, q]`, contiguous from the start of its buffer. Values that are only masked
/// have core's bits; the soft threshold has the device's rounding.
///
/// # Errors
/// [`Error::Shape`] unless the operands fit; [`Error::Invalid`] unless out lies so; failures of
/// earlier work.
pub fn compress_weight(
    device: &mut Device,
    w: Matrix,
    mask: Tiles,
    map: ValueMap,
    out: Matrix,
) -> Result<(), Error> {
    check_shape("compress weight", "w", mask.shape, w)?;
    check_shape("compress weight", "out", mask.shape, out)?;
    check_leading("compress weight", "out", out)?;
    let (kernel, scale) = match map {
        ValueMap::Identity => (&kernels::COMPRESS_WEIGHT, 1.0),
        ValueMap::SoftThreshold { scale } => (&kernels::SOFT_THRESHOLD, scale),
    };
    let ([offset, stride], groups) = (w.place(), w.elements() / 4);
    let constants = [offset, stride, w.shape[1] as u32, groups as u32, f32::to_bits(scale)];
    device.run(kernel, [w, mask.words, out], &constants, groups.div_ceil(WORKGROUP))
}

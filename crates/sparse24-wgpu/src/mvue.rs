//! The exact estimator of output gradients: [`sparse24_core::mvue`], bit for bit.

use sparse24_core::philox::Site;

use crate::{Device, Error, GROUP, Matrix, error::check_shape, kernels};

/// out = MVUE(dz^T) by the exact estimator, as the dense transpose: dz `[p, r]` with zeros where
/// an element is not kept. Groups run along tokens, and draw from `site` in this step.
///
/// out `[p, r]`, contiguous.
///
/// # Errors
/// [`Error::Shape`] unless out has the shape of dz; failures of earlier work.
pub fn mvue_compress(
    device: &mut Device,
    dz: Matrix,
    site: Site,
    out: Matrix,
) -> Result<(), Error> {
    check_shape("mvue compress", "out", dz.shape, out)?;
    let ([offset, stride], [p, r]) = (dz.place(), dz.shape);
    let constants = [offset, stride, p as u32, r as u32, site.word()];
    let calls = p.div_ceil(16) * r;
    device.run(&kernels::MVUE_COMPRESS, [dz, out], &constants, calls.div_ceil(GROUP))
}

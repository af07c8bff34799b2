//! The estimators of output gradients: [`sparse24_core::mvue`].

use sparse24_core::{
    mvue::Estimator,
    philox::{Purpose, Site},
};

use crate::{
    Device, Error, Matrix, WORKGROUP,
    error::{check_leading, check_shape},
    kernels,
};

/// out = MVUE(dz^T) as the dense transpose: dz `[p, r]` with zeros where an element is not kept.
/// Groups run along tokens, and draw from `site` in this step.
///
/// out `[p, r]`, contiguous from the start of its buffer. The exact estimator has core's bits. The
/// approximate one keeps core's elements; values differ by a few roundings, and those below about
/// 2^-100 of the group's largest are 0.
///
/// # Errors
/// [`Error::Shape`] unless out has the shape of dz; [`Error::Invalid`] unless it lies so; failures
/// of earlier work.
pub fn mvue_compress(
    device: &mut Device,
    dz: Matrix,
    estimator: Estimator,
    site: Site,
    out: Matrix,
) -> Result<(), Error> {
    check_shape("mvue compress", "out", dz.shape, out)?;
    check_leading("mvue compress", "out", out)?;
    let ([offset, stride], [p, r]) = (dz.place(), dz.shape);
    let second = site.with_purpose(Purpose::MvueSecond).word();
    let constants = [offset, stride, p as u32, r as u32, site.word(), second];
    let (kernel, calls) = match estimator {
        Estimator::Exact => (&kernels::MVUE_COMPRESS, p.div_ceil(16) * r),
        Estimator::Approximate => (&kernels::MVUE_APPROXIMATE, p.div_ceil(4) * r),
    };
    device.run(kernel, [dz, out], &constants, calls.div_ceil(WORKGROUP))
}

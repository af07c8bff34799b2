//! The sum of two matrices.

use ndarray::{ArrayView2, ArrayViewMut2};

use crate::{Error, check, elementwise};

/// out = x + delta, all of one shape; an absent x is out itself.
///
/// # Errors
/// [`Error::Shape`] if x or delta has another shape than out.
pub fn add(
    x: Option<ArrayView2<'_, f32>>,
    delta: ArrayView2<'_, f32>,
    out: ArrayViewMut2<'_, f32>,
) -> Result<(), Error> {
    check::matrix("add", "delta", &delta, out.dim().into())?;
    let Some(x) = x else {
        elementwise::for_each(
            [delta],
            [out],
            #[inline(always)]
            |[delta], [out]| out.iter_mut().zip(delta).for_each(|(out, &delta)| *out += delta),
        );
        return Ok(());
    };
    check::matrix("add", "x", &x, out.dim().into())?;
    elementwise::for_each(
        [x, delta],
        [out],
        #[inline(always)]
        |[x, delta], [out]| {
            for ((out, &x), &delta) in out.iter_mut().zip(x).zip(delta) {
                *out = x + delta;
            }
        },
    );
    Ok(())
}

//! The moving average of a weight over optimizer steps.

use ndarray::{ArrayView2, ArrayViewMut2};

use crate::{Error, check, elementwise};

/// average = decay * average + (1 - decay) * w, both of one shape, every operation rounded.
///
/// # Errors
/// [`Error::Shape`] unless w has the shape of the average.
pub fn moving_average(
    w: ArrayView2<'_, f32>,
    average: ArrayViewMut2<'_, f32>,
    decay: f32,
) -> Result<(), Error> {
    check::matrix("moving_average", "w", &w, average.dim().into())?;
    elementwise::for_each(
        [w],
        [average],
        #[inline(always)]
        |[w], [average]| {
            for (average, &w) in average.iter_mut().zip(w) {
                *average = decay * *average + (1.0 - decay) * w;
            }
        },
    );
    Ok(())
}

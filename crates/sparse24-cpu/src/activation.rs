//! GELU, GEGLU and SwiGLU, forward and backward, in any layout of their operands.
//!
//! GELU is the tanh form: GELU(z) = z/2 (1 + tanh u) = z sigmoid(2u) with u = sqrt(2/pi) (z +
//! 0.044715 z^3). A gated activation takes Z `[p, 2f]` and multiplies the activated *first* half of
//! its columns by the second. Matrices may be row-major or column-major (the strides tell);
//! matching layouts are fastest. Elementwise, so the bits depend neither on layout nor on threads.
//! Deliberately absent: the activated first half is not stored but computed again in the backward.

use std::f32::consts::{LN_2, LOG2_E};

use ndarray::{ArrayView2, ArrayViewMut2, Axis};

use crate::{Error, elementwise, math, shape};

/// 2 sqrt(2/pi) log2(e): GELU(z) = z / (1 + 2^-(SLOPE z + CUBE z^3)).
const SLOPE: f32 = 2.302_208_2;
const CUBE: f32 = 0.102_943_24;

/// (GELU(z), GELU'(z)). Beyond 9.98 the sigmoid is 2^-125 or 1.
#[inline(always)]
fn gelu(z: f32) -> (f32, f32) {
    gate(z, 9.98, |z| z * (SLOPE + CUBE * (z * z)), |z| LN_2 * SLOPE + 3.0 * LN_2 * CUBE * (z * z))
}

/// (SiLU(z), SiLU'(z)), SiLU(z) = z sigmoid(z). Beyond 87 the sigmoid is 2^-125 or 1.
#[inline(always)]
fn silu(z: f32) -> (f32, f32) {
    gate(z, 87.0, |z| LOG2_E * z, |_| 1.0)
}

/// z sigmoid2(exponent(z)) and its derivative, where ln 2 * exponent' = slope; beyond the limits
/// the sigmoid is that of the limit, and below the lower one so is z.
#[inline(always)]
fn gate(
    z: f32,
    limit: f32,
    exponent: impl Fn(f32) -> f32,
    slope: impl Fn(f32) -> f32,
) -> (f32, f32) {
    let low = if z < -limit { -limit } else { z };
    let inner = if low > limit { limit } else { low };
    let s = math::sigmoid2(exponent(inner));
    (low * s, s + (inner * slope(inner)) * (s * (1.0 - s)))
}

/// h = GELU(z), all `[p, f]`.
///
/// # Errors
/// [`Error::Shape`] unless all shapes agree.
pub fn gelu_forward(z: ArrayView2<'_, f32>, h: ArrayViewMut2<'_, f32>) -> Result<(), Error> {
    shape::check("gelu_forward", "h", shape::of(&z), shape::of(&h))?;
    elementwise::for_each(
        [z],
        [h],
        #[inline(always)]
        |[z], [h]| {
            for (h, &z) in h.iter_mut().zip(z) {
                *h = gelu(z).0;
            }
        },
    );
    Ok(())
}

/// dz = dh * GELU'(z), all `[p, f]`.
///
/// # Errors
/// [`Error::Shape`] unless all shapes agree.
pub fn gelu_backward(
    dh: ArrayView2<'_, f32>,
    z: ArrayView2<'_, f32>,
    dz: ArrayViewMut2<'_, f32>,
) -> Result<(), Error> {
    shape::check("gelu_backward", "dh", shape::of(&z), shape::of(&dh))?;
    shape::check("gelu_backward", "dz", shape::of(&z), shape::of(&dz))?;
    elementwise::for_each(
        [dh, z],
        [dz],
        #[inline(always)]
        |[dh, z], [dz]| {
            for ((dz, &dh), &z) in dz.iter_mut().zip(dh).zip(z) {
                *dz = dh * gelu(z).1;
            }
        },
    );
    Ok(())
}

/// h = GELU(first half of z) * second half: z `[p, 2f]`, h `[p, f]`.
///
/// # Errors
/// [`Error::Shape`] unless z is twice as wide as h.
pub fn geglu_forward(z: ArrayView2<'_, f32>, h: ArrayViewMut2<'_, f32>) -> Result<(), Error> {
    gated_forward("geglu_forward", z, h, gelu)
}

/// With a, b the halves of z: dz = [dh * b * GELU'(a), dh * GELU(a)]; z, dz `[p, 2f]`, dh `[p, f]`.
///
/// # Errors
/// [`Error::Shape`] unless z and dz are twice as wide as dh.
pub fn geglu_backward(
    dh: ArrayView2<'_, f32>,
    z: ArrayView2<'_, f32>,
    dz: ArrayViewMut2<'_, f32>,
) -> Result<(), Error> {
    gated_backward("geglu_backward", dh, z, dz, gelu)
}

/// h = SiLU(first half of z) * second half: z `[p, 2f]`, h `[p, f]`.
///
/// # Errors
/// [`Error::Shape`] unless z is twice as wide as h.
pub fn swiglu_forward(z: ArrayView2<'_, f32>, h: ArrayViewMut2<'_, f32>) -> Result<(), Error> {
    gated_forward("swiglu_forward", z, h, silu)
}

/// With a, b the halves of z: dz = [dh * b * SiLU'(a), dh * SiLU(a)]; z, dz `[p, 2f]`, dh `[p, f]`.
///
/// # Errors
/// [`Error::Shape`] unless z and dz are twice as wide as dh.
pub fn swiglu_backward(
    dh: ArrayView2<'_, f32>,
    z: ArrayView2<'_, f32>,
    dz: ArrayViewMut2<'_, f32>,
) -> Result<(), Error> {
    gated_backward("swiglu_backward", dh, z, dz, silu)
}

#[inline(always)]
fn gated_forward(
    operation: &'static str,
    z: ArrayView2<'_, f32>,
    h: ArrayViewMut2<'_, f32>,
    activation: impl Fn(f32) -> (f32, f32) + Sync,
) -> Result<(), Error> {
    let [p, f] = shape::of(&h);
    shape::check(operation, "z", [p, 2 * f], shape::of(&z))?;
    let (a, b) = z.split_at(Axis(1), f);
    elementwise::for_each(
        [a, b],
        [h],
        #[inline(always)]
        |[a, b], [h]| {
            for ((h, &a), &b) in h.iter_mut().zip(a).zip(b) {
                *h = activation(a).0 * b;
            }
        },
    );
    Ok(())
}

#[inline(always)]
fn gated_backward(
    operation: &'static str,
    dh: ArrayView2<'_, f32>,
    z: ArrayView2<'_, f32>,
    dz: ArrayViewMut2<'_, f32>,
    activation: impl Fn(f32) -> (f32, f32) + Sync,
) -> Result<(), Error> {
    let [p, f] = shape::of(&dh);
    shape::check(operation, "z", [p, 2 * f], shape::of(&z))?;
    shape::check(operation, "dz", [p, 2 * f], shape::of(&dz))?;
    let ((a, b), (da, db)) = (z.split_at(Axis(1), f), dz.split_at(Axis(1), f));
    elementwise::for_each(
        [dh, a, b],
        [da, db],
        #[inline(always)]
        |[dh, a, b], [da, db]| {
            for ((((da, db), &dh), &a), &b) in da.iter_mut().zip(db).zip(dh).zip(a).zip(b) {
                let (value, slope) = activation(a);
                *da = dh * b * slope;
                *db = dh * value;
            }
        },
    );
    Ok(())
}

//! GELU, GEGLU, SwiGLU, tanh and ReLU, forward and backward.
//!
//! With u = sqrt(2/pi) (z + 0.044715 z^3), GELU(z) = z/2 (1 + tanh u) = z sigmoid(2u); in its erf
//! form, GELU(z) = z/2 (1 + erf(z / sqrt 2)); and SiLU(z) = z sigmoid(z). A gated activation of Z
//! `[p, 2f]` multiplies the activated *first* half of its columns by the second; the backward pass
//! computes the activated half again instead of storing it. Matrices may have any layout, and equal
//! layouts are fastest. The kernels are elementwise, so the bits depend neither on layout nor on
//! threads.

use std::f32::consts::{LN_2, LOG2_E};

use ndarray::{ArrayView2, ArrayViewMut2, Axis};
use sparse24_core::op::Activation;

use crate::{Error, check, elementwise, math};

/// H = act(Z): Z `[p, f]`, or `[p, 2f]` for the gated activations, H `[p, f]`.
///
/// # Errors
/// [`Error::Shape`] unless the shapes agree.
pub fn activation_forward(
    activation: Activation,
    z: ArrayView2<'_, f32>,
    h: ArrayViewMut2<'_, f32>,
) -> Result<(), Error> {
    const OPERATION: &str = "activation_forward";
    let (p, f) = h.dim();
    check::matrix(OPERATION, "z", &z, [p, f * activation.columns_in()])?;
    match activation {
        Activation::Gelu => plain_forward(z, h, gelu),
        Activation::GeluErf => plain_forward(z, h, gelu_erf),
        Activation::Geglu => gated_forward(z, h, gelu),
        Activation::Swiglu => gated_forward(z, h, silu),
        Activation::Tanh => plain_forward(z, h, tanh),
        Activation::Relu => plain_forward(z, h, relu),
        activation => return Err(Error::Activation { operation: OPERATION, activation }),
    }
    Ok(())
}

/// The gradient of [`activation_forward`]: dZ = dH * act'(Z), where a gated activation with a, b
/// the halves of Z has dZ = [dH * b * act'(a), dH * act(a)].
///
/// # Errors
/// Like [`activation_forward`].
pub fn activation_backward(
    activation: Activation,
    dh: ArrayView2<'_, f32>,
    z: ArrayView2<'_, f32>,
    dz: ArrayViewMut2<'_, f32>,
) -> Result<(), Error> {
    const OPERATION: &str = "activation_backward";
    let (p, f) = dh.dim();
    check::matrix(OPERATION, "z", &z, [p, f * activation.columns_in()])?;
    check::matrix(OPERATION, "dz", &dz, z.dim().into())?;
    match activation {
        Activation::Gelu => plain_backward(dh, z, dz, gelu),
        Activation::GeluErf => plain_backward(dh, z, dz, gelu_erf),
        Activation::Geglu => gated_backward(dh, z, dz, gelu),
        Activation::Swiglu => gated_backward(dh, z, dz, silu),
        Activation::Tanh => plain_backward(dh, z, dz, tanh),
        Activation::Relu => plain_backward(dh, z, dz, relu),
        activation => return Err(Error::Activation { operation: OPERATION, activation }),
    }
    Ok(())
}

/// 2 sqrt(2/pi) log2(e): GELU(z) = z / (1 + 2^-(SLOPE z + CUBE z^3)).
const SLOPE: f32 = 2.302_208_2;
const CUBE: f32 = 0.102_943_24;

/// (GELU(z), GELU'(z)). Beyond 9.98 the sigmoid is 2^-125 or 1.
#[inline(always)]
fn gelu(z: f32) -> (f32, f32) {
    gate(z, 9.98, |z| z * (SLOPE + CUBE * (z * z)), |z| LN_2 * SLOPE + 3.0 * LN_2 * CUBE * (z * z))
}

/// z F(z) and its derivative F(z) + z F'(z), with F the standard normal distribution.
///
/// For a = |z|, F(-a) = e^(-a^2/2) m(a), where m(a) is a polynomial in t = 1 / (1 + 0.21 a): a
/// minimax fit on a <= 12.9 with relative error 2^-26. Beyond 12.9, F is 2^-125 or 1.
#[inline(always)]
fn gelu_erf(z: f32) -> (f32, f32) {
    const HALF_LOG2_E: f32 = 0.721_347_5;
    const FIT: [f32; 9] = [
        -0.072_415_546,
        0.287_338_82,
        -0.338_175_86,
        0.358_737_44,
        -0.100_629_95,
        0.127_873_61,
        0.068_375_506,
        0.085_192_315,
        0.083_703_645,
    ];
    // 1 / sqrt(2 pi).
    const DENSITY: f32 = 0.398_942_3;
    let (low, inner) = limited(z, 12.9);
    let a = inner.abs();
    let e = math::exp2(-HALF_LOG2_E * (a * a));
    let t = 1.0 / (1.0 + 0.21 * a);
    let tail = e * (t * FIT[1..].iter().fold(FIT[0], |sum, coefficient| sum * t + coefficient));
    let normal = if inner < 0.0 { tail } else { 1.0 - tail };
    (low * normal, normal + inner * (DENSITY * e))
}

/// (SiLU(z), SiLU'(z)). Beyond 87 the sigmoid is 2^-125 or 1.
#[inline(always)]
fn silu(z: f32) -> (f32, f32) {
    gate(z, 87.0, |z| LOG2_E * z, |_| 1.0)
}

/// (tanh(z), tanh'(z)): z + z^3 m(z^2) within +-5/8, where m is a minimax fit with relative error
/// 2^-27.8, else 1 - 2 / (1 + e^2|z|) with the sign of z. Beyond 43, tanh is +-1.
#[inline(always)]
fn tanh(z: f32) -> (f32, f32) {
    const FIT: [f32; 5] =
        [-0.005_717_166, 0.020_650_728, -0.053_743_556, 0.133_314_92, -0.333_332_84];
    let (_, inner) = limited(z, 43.0);
    let square = inner * inner;
    let m = FIT[1..].iter().fold(FIT[0], |sum, coefficient| sum * square + coefficient);
    let far = 1.0 - 2.0 * math::sigmoid2(-2.0 * LOG2_E * inner.abs());
    let far = if inner < 0.0 { -far } else { far };
    let value = if inner.abs() <= 0.625 { inner + inner * (square * m) } else { far };
    (value, 1.0 - value * value)
}

/// (ReLU(z), ReLU'(z)): the slope at 0 is 0, as in PyTorch, and that of NaN is NaN.
#[inline(always)]
fn relu(z: f32) -> (f32, f32) {
    let value = if z <= 0.0 { 0.0 } else { z };
    (value, if value > 0.0 { 1.0 } else { value })
}

/// z sigmoid2(exponent(z)) and its derivative, where slope = ln 2 * exponent'. Beyond +-limit the
/// sigmoid is that of the limit, and below -limit so is z.
#[inline(always)]
fn gate(
    z: f32,
    limit: f32,
    exponent: impl Fn(f32) -> f32,
    slope: impl Fn(f32) -> f32,
) -> (f32, f32) {
    let (low, inner) = limited(z, limit);
    let s = math::sigmoid2(exponent(inner));
    (low * s, s + (inner * slope(inner)) * (s * (1.0 - s)))
}

/// z, at least -limit, and z within +-limit.
#[inline(always)]
fn limited(z: f32, limit: f32) -> (f32, f32) {
    let low = if z < -limit { -limit } else { z };
    (low, if low > limit { limit } else { low })
}

#[inline(always)]
fn plain_forward(
    z: ArrayView2<'_, f32>,
    h: ArrayViewMut2<'_, f32>,
    activation: impl Fn(f32) -> (f32, f32) + Sync,
) {
    elementwise::for_each(
        [z],
        [h],
        #[inline(always)]
        |[z], [h]| h.iter_mut().zip(z).for_each(|(h, &z)| *h = activation(z).0),
    );
}

#[inline(always)]
fn plain_backward(
    dh: ArrayView2<'_, f32>,
    z: ArrayView2<'_, f32>,
    dz: ArrayViewMut2<'_, f32>,
    activation: impl Fn(f32) -> (f32, f32) + Sync,
) {
    elementwise::for_each(
        [dh, z],
        [dz],
        #[inline(always)]
        |[dh, z], [dz]| {
            for ((dz, &dh), &z) in dz.iter_mut().zip(dh).zip(z) {
                *dz = dh * activation(z).1;
            }
        },
    );
}

#[inline(always)]
fn gated_forward(
    z: ArrayView2<'_, f32>,
    h: ArrayViewMut2<'_, f32>,
    activation: impl Fn(f32) -> (f32, f32) + Sync,
) {
    let (a, b) = z.split_at(Axis(1), h.ncols());
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
}

#[inline(always)]
fn gated_backward(
    dh: ArrayView2<'_, f32>,
    z: ArrayView2<'_, f32>,
    dz: ArrayViewMut2<'_, f32>,
    activation: impl Fn(f32) -> (f32, f32) + Sync,
) {
    let f = dh.ncols();
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
}

//! The unbiased 2:4 estimate of dZ^T, compressed.

use half::bf16;
use sparse24_core::{
    mvue::Estimator,
    op::Activation,
    philox::{Purpose, Site},
};

use crate::{
    Device, Error, Matrix,
    compressed::Compressed,
    launch::{Grid, arguments},
    layout::{BLOCK, blocks},
};

/// out = the estimate of dZ^T: `dz` is `[p, r]`, `out` is `[r, p rounded up to a multiple of 4]`.
///
/// Indices and values have the bits of [`sparse24_core::mvue::compress`] with the stream of `site`
/// at the step state of [`Device::set_step`]. The approximate estimator draws its second uniform at
/// the same tensor of [`Purpose::MvueSecond`].
///
/// # Errors
/// [`Error::Semantics`] unless r is a multiple of 4; [`Error::Shape`]; [`Error::Alignment`] unless
/// rows of `dz` are 8-byte aligned; [`Error::Alias`], [`Error::Stale`], [`Error::TooLarge`],
/// [`Error::Driver`].
pub fn mvue_compress(
    device: &mut Device,
    dz: Matrix<bf16>,
    estimator: Estimator,
    site: Site,
    out: Compressed,
) -> Result<(), Error> {
    const OPERATION: &str = "mvue compress";
    let [p, r] = dz.shape();
    if !r.is_multiple_of(4) {
        return Err(sparse24_core::Error::NotGrouped { operation: OPERATION, length: r }.into());
    }
    let shape = [r, p.next_multiple_of(4)];
    let mut checks = device.checks(OPERATION);
    checks
        .limit("the number of tokens", p, LIMIT)?
        .limit("the number of features", r, LIMIT)?
        .strided("dz", dz, [p, r], 8)?;
    out.check_output(&mut checks, OPERATION, "out", shape)?;
    /// `RESIDENT` of the kernel.
    const RESIDENT: usize = 7;
    let grid = grid(device, blocks(shape), RESIDENT);
    let (p, r, stride, state) = (p as u32, r as u32, dz.stride() as u64, device.state());
    let common = arguments![dz, stride, p, r, out.values, out.metadata, state, site.word()];
    match estimator {
        Estimator::Exact => device.launch("mvue_compress_exact", grid, &common),
        Estimator::Approximate => {
            let second = arguments![site.with_purpose(Purpose::MvueSecond).word()];
            device.launch("mvue_compress_approximate", grid, &[&common[..], &second].concat())
        }
    }
}

/// [`activation::backward`](crate::activation::backward), then [`mvue_compress`] of its result,
/// with the exact estimator, in one kernel with the bits of both. Returns whether there is such a
/// kernel for this activation and number of features; if not, nothing was done.
///
/// # Errors
/// As for both.
pub fn backward_compress(
    device: &mut Device,
    activation: Activation,
    [dh, z, dz]: [Matrix<bf16>; 3],
    site: Site,
    out: Compressed,
) -> Result<bool, Error> {
    const OPERATION: &str = "activation backward and mvue compress";
    // With the blocks per multiprocessor of its launch bounds.
    let (entry, residents) = match activation {
        Activation::Gelu => ("gelu_backward_compress", 6),
        Activation::GeluErf => ("gelu_erf_backward_compress", 6),
        Activation::Relu => ("relu_backward_compress", 6),
        Activation::Geglu => ("geglu_backward_compress", 4),
        Activation::Swiglu => ("swiglu_backward_compress", 4),
        _ => return Ok(false),
    };
    let ([p, f], halves) = (dh.shape(), activation.columns_in());
    if !f.is_multiple_of(if halves == 1 { 8 } else { BLOCK }) {
        return Ok(false);
    }
    let (wide, shape) = ([p, halves * f], [halves * f, p.next_multiple_of(4)]);
    let mut checks = device.checks(OPERATION);
    checks
        .limit("the number of tokens", p, LIMIT)?
        .limit("the number of features", halves * f, LIMIT)?
        .input("dh", dh, [p, f], 16)?
        .input("z", z, wide, 16)?
        .output("dz", dz, wide, 16)?;
    out.check_output(&mut checks, OPERATION, "out", shape)?;
    let grid = grid(device, blocks([f, shape[1]]), residents);
    let of_out = arguments![out.values, out.metadata, device.state(), site.word()];
    let operands = [&arguments![dh, z, dz, p as u32, f as u32][..], &of_out].concat();
    device.launch(entry, grid, &operands).map(|()| true)
}

/// The most tokens or features.
const LIMIT: usize = i32::MAX as usize;

/// As many thread blocks as are resident at once. Each has several blocks of a block row, so that
/// copying one overlaps with estimating another. Beyond six each, there are more thread blocks, so
/// that the last ones to finish are a smaller part of the whole.
fn grid(device: &Device, [block_rows, block_columns]: [usize; 2], residents: usize) -> Grid {
    const EACH: usize = 6;
    const THREADS: u32 = 2 * BLOCK as u32;
    /// Largest second dimension of a grid.
    const MAX: usize = 65_535;
    let together = (residents * device.multiprocessors() / block_rows.max(1)).max(1);
    let high = if block_columns <= EACH * together {
        together.min(block_columns)
    } else {
        block_columns.div_ceil(EACH).min(MAX)
    };
    Grid::plane([block_rows, high], THREADS)
}

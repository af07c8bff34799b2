//! The unbiased 2:4 estimate of dZ^T, compressed.

use half::bf16;
use sparse24_core::{
    mvue::Estimator,
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
    const LIMIT: usize = i32::MAX as usize;
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
    let grid = grid(device, blocks(shape));
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

/// As many thread blocks as are resident at once. Each has several blocks of a block row, so that
/// copying one overlaps with estimating another. Beyond six each, there are more thread blocks, so
/// that the last ones to finish are a smaller part of the whole.
fn grid(device: &Device, [block_rows, block_columns]: [usize; 2]) -> Grid {
    /// `RESIDENT` of the kernel.
    const RESIDENT: usize = 7;
    const EACH: usize = 6;
    const THREADS: u32 = 2 * BLOCK as u32;
    /// Largest second dimension of a grid.
    const MAX: usize = 65_535;
    let together = (RESIDENT * device.multiprocessors() / block_rows.max(1)).max(1);
    let high = if block_columns <= EACH * together {
        together.min(block_columns)
    } else {
        block_columns.div_ceil(EACH).min(MAX)
    };
    Grid::plane([block_rows, high], THREADS)
}

//! The unbiased 2:4 estimate of dZ^T, compressed.

use half::bf16;
use sparse24_core::{
    mvue::Estimator,
    philox::{Purpose, Site},
};

use crate::{
    Device, Error, Matrix,
    compressed::Compressed,
    launch::{Argument, Grid},
    layout::{BLOCK, blocks},
};

/// out = the estimate of dZ^T: `dz` is `[p, r]` as stored, `out` is
/// `[r, p rounded up to a multiple of 4]`.
///
/// Indices and values are the bits of [`sparse24_core::mvue::compress`] with the stream of `site`
/// at the seed, step and micro-step of [`Device::set_step`]. The approximate estimator draws its
/// second uniform at the same tensor of [`Purpose::MvueSecond`].
///
/// # Errors
/// [`Error::Semantics`] unless r is a multiple of 4; [`Error::Shape`], [`Error::Alignment`] unless
/// rows of `dz` begin at multiples of 8 bytes; [`Error::Alias`], [`Error::Stale`],
/// [`Error::TooLarge`], [`Error::Driver`].
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
    for (what, found) in [("tokens", p), ("features", r)] {
        if found > LIMIT {
            return Err(Error::TooLarge { operation: OPERATION, what, found, limit: LIMIT });
        }
    }
    let shape = [r, p.next_multiple_of(4)];
    out.check(device, OPERATION, "out", shape)?;
    device.check_live(OPERATION, "dz", dz)?;
    device.check_aligned(OPERATION, "dz", dz, 8)?;
    device.check_apart(
        OPERATION,
        ("values", out.values.span()),
        &[("dz", dz.span()), ("metadata", out.metadata.span())],
    )?;
    device.check_apart(OPERATION, ("metadata", out.metadata.span()), &[("dz", dz.span())])?;

    let grid = grid(device, blocks(shape));
    let (p, r, state) = (p as u32, r as u32, device.state());
    let common = [
        dz.into(),
        Argument::U64(dz.stride() as u64),
        p.into(),
        r.into(),
        out.values.into(),
        out.metadata.into(),
        state,
    ];
    let second = site.with_purpose(Purpose::MvueSecond);
    match estimator {
        Estimator::Exact => device.launch(
            "mvue_compress_exact",
            grid,
            &[&common[..], &[site.word().into()]].concat(),
        ),
        Estimator::Approximate => device.launch(
            "mvue_compress_approximate",
            grid,
            &[&common[..], &[site.word().into(), second.word().into()]].concat(),
        ),
    }
}

/// As many thread blocks as run at once, each with some blocks of a block row: the copy of one runs
/// under the estimate of another. Where that were more than six each, there are more thread blocks,
/// since those that end late are then a smaller part.
fn grid(device: &Device, [block_rows, block_columns]: [usize; 2]) -> Grid {
    /// Of the kernel.
    const RESIDENT: usize = 7;
    const EACH: usize = 6;
    const THREADS: u32 = 2 * BLOCK as u32;
    // The second dimension of a grid.
    const MOST: usize = 65_535;
    let together = (RESIDENT * device.multiprocessors() / block_rows.max(1)).max(1);
    let high = if block_columns <= EACH * together {
        together.min(block_columns)
    } else {
        block_columns.div_ceil(EACH).min(MOST)
    };
    Grid::plane([block_rows, high], THREADS)
}

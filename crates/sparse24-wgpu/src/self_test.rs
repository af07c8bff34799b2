//! A self-test that runs when an adapter is opened. It compares a few results with known ones, to
//! catch drivers that miscompile a kernel before a run depends on them.

use ndarray::Array2;
use sparse24_core::{
    MaskKind,
    mvue::{self, Estimator},
    op::StepState,
    philox::{Purpose, Site, Stream},
    search,
};

use crate::{Device, Error, Result, gemm, mvue::mvue_compress, search::mask_search};

const SITE: Site = Site::new(Purpose::Mvue, 1);
const SIDE: usize = 128;
const PURPOSE: &str = "self-test";

impl Device {
    /// Opens an adapter by its number in [`Self::adapters`], and tests it.
    ///
    /// # Errors
    /// [`Error::NoAdapter`]; [`Error::Limit`]; [`Error::Driver`] if it cannot be opened;
    /// [`Error::WrongResults`] if its results are not core's.
    #[cfg(not(target_family = "wasm"))]
    pub fn open(number: usize) -> Result<Self> {
        pollster::block_on(Self::request(number))
    }

    /// Opens and tests an adapter without blocking the thread, for browsers.
    ///
    /// # Errors
    /// Errors of [`Self::open`].
    pub async fn request(number: usize) -> Result<Self> {
        let mut device = Self::request_untested(number).await?;
        check(&mut device).await?;
        Ok(device)
    }
}

/// Compares masks of 1024 tiles and samples of 4096 groups with core's, and each kernel's product
/// of integers, which is exact in f32, with the host's.
pub(crate) async fn check(device: &mut Device) -> Result {
    let wrong = |device: &Device, what| Error::WrongResults { adapter: device.name(), what };
    let stream = Stream::new(24, SITE, 0, 0);
    let word = |i: usize, j: usize| stream.words((i * SIDE + j) as u32)[0];
    let values = Array2::from_shape_fn((SIDE, SIDE), |(i, j)| {
        let (word, sign) = (word(i, j), word(i, j) & 1 << 31);
        f32::from_bits(match 4 * i / SIDE {
            // Any bits: infinities and NaN among them.
            0 => word,
            // One binade, where sums cancel.
            1 => sign | 127 << 23 | word & 0x7f_ffff,
            // Ties.
            2 => sign | (126 + (word & 1)) << 23,
            // Subnormal numbers and the smallest normal ones.
            _ => sign | word & 0x1ff_ffff >> (word >> 28 & 7),
        })
    });
    let bits: Vec<u32> = values.iter().map(|x| x.to_bits()).collect();
    let w = device.alloc("self-test", [SIDE, SIDE], PURPOSE)?;
    device.upload(w, &bits)?;
    let mask = device.alloc_tiles([SIDE, SIDE], PURPOSE)?;
    for kind in MaskKind::ALL {
        mask_search(device, w, kind, mask)?;
        let copied = device.copy_out(&[mask.words])?;
        device.arrivals().all().await;
        if mask.mask(&copied.read()?[0])? != search::mask_search(values.view(), kind)? {
            return Err(wrong(device, "masks"));
        }
    }
    let state = StepState { seed: 24 << 32 | 7, step: 3, micro_step: 1, ..StepState::default() };
    device.set_step(&state)?;
    let out = device.alloc("self-test", [SIDE, SIDE], PURPOSE)?;
    mvue_compress(device, w, Estimator::Exact, SITE, out)?;
    let copied = device.copy_out(&[out])?;
    device.arrivals().all().await;
    let found = copied.read()?.swap_remove(0);
    let sampled = mvue::compress(values.view(), Estimator::Exact, state.stream(SITE))?.decode();
    let expected = sampled.t();
    if found.iter().zip(expected.iter()).any(|(&found, x)| found != x.to_bits()) {
        return Err(wrong(device, "sampled gradients"));
    }
    let integers =
        Array2::from_shape_fn((SIDE, SIDE), |(i, j)| f32::from(word(i, j) as u8) - 128.0);
    let bits: Vec<u32> = integers.iter().map(|x| x.to_bits()).collect();
    device.upload(w, &bits)?;
    let expected = integers.dot(&integers.t());
    for product in gemm::products(device) {
        let out = device.realloc(out, "self-test", [SIDE, SIDE])?;
        gemm::square(device, product, w, out)?;
        let copied = device.copy_out(&[out])?;
        device.arrivals().all().await;
        let found = copied.read()?.swap_remove(0);
        if found.iter().zip(&expected).any(|(&found, x)| found != x.to_bits()) {
            return Err(wrong(device, "products"));
        }
    }
    Ok(())
}

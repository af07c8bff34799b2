//! Compares kernels with core, bit for bit, on an adapter of this machine. Without one, the tests
//! are skipped, or fail if `SPARSE24_REQUIRE_WGPU` is set.

use std::env;

use sparse24_core::philox::{Purpose, Site, Stream};
use sparse24_wgpu::{Device, Error, Matrix};

mod discrete;
mod products;
mod queue;
mod sequences;

/// The first adapter.
fn open() -> Option<Device> {
    match Device::open(0) {
        Ok(device) => Some(device),
        Err(error @ Error::NoAdapter { .. }) if env::var_os("SPARSE24_REQUIRE_WGPU").is_none() => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn alloc(device: &mut Device, shape: [usize; 2]) -> Matrix {
    device.alloc("x", shape, "test").unwrap()
}

/// A matrix of these words.
fn loaded(device: &mut Device, shape: [usize; 2], words: &[u32]) -> Matrix {
    let matrix = alloc(device, shape);
    device.upload(matrix, words).unwrap();
    matrix
}

/// Distributions of f32 bits that are hostile to floating-point arithmetic.
#[derive(Debug, Clone, Copy)]
enum Bits {
    /// Any bits, including NaN, infinities and subnormal numbers.
    Any,
    /// Magnitudes of one binade.
    Close,
    /// Few distinct values: most comparisons are ties.
    Ties,
    /// Subnormal numbers and the smallest normal ones.
    Tiny,
    /// The largest finite numbers, whose sums overflow.
    Huge,
    /// Zeros, with other bits among them.
    Sparse,
}

impl Bits {
    const ALL: [Self; 6] =
        [Self::Any, Self::Close, Self::Ties, Self::Tiny, Self::Huge, Self::Sparse];

    fn draw(self, word: u32) -> u32 {
        let (sign, rest) = (word & 1 << 31, word & 0x7fff_ffff);
        match self {
            Self::Any => word,
            Self::Close => sign | 127 << 23 | rest & 0x7f_ffff,
            Self::Ties => sign | [0, 126, 127, 128][(rest >> 5 & 3) as usize] << 23,
            Self::Tiny => sign | rest & 0x1ff_ffff >> (rest >> 28),
            Self::Huge => sign | (254 - (rest >> 28)) << 23 | rest & 0x7f_ffff,
            Self::Sparse if rest % 5 == 0 => word,
            Self::Sparse => sign,
        }
    }

    fn words(self, count: usize, seed: u64) -> Vec<u32> {
        let stream = Stream::new(seed, Site::new(Purpose::Initialization, 9), 0, 0);
        let words = (0..count.div_ceil(4) as u32).flat_map(|call| stream.words(call));
        words.take(count).map(|word| self.draw(word)).collect()
    }
}

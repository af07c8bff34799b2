//! The device of a test, poisoned outputs between guard bands, and random input.

use ndarray::Array2;
use sparse24_core::{
    Element,
    philox::{Philox4x32, uniform},
};
use sparse24_cuda::{Device, Matrix, Scalar, Settings};

/// Runs a test on the GPU; without one it is skipped, which fails where `SPARSE24_REQUIRE_GPU` is set.
pub(crate) fn on_gpu(test: impl FnOnce(&mut Device)) {
    match Device::open(&Settings::default()) {
        Ok(mut device) => {
            test(&mut device);
            device.synchronize().expect("no kernel failed");
        }
        Err(error) if std::env::var_os("SPARSE24_REQUIRE_GPU").is_none() => println!("skipped: {error}"),
        Err(error) => panic!("this run requires a GPU: {error}"),
    }
}

/// An output between guard bands, every byte 0xff: a float is a NaN, an index is out of range.
pub(crate) struct Poisoned<T> {
    whole: Matrix<T>,
    pub(crate) matrix: Matrix<T>,
}

const GUARD: usize = 1024;

impl<T: Scalar + PartialEq + std::fmt::Debug> Poisoned<T> {
    pub(crate) fn new(device: &mut Device, shape: [usize; 2]) -> Self {
        let whole = device.alloc::<T>("poisoned", [1, shape[0] * shape[1] + 2 * GUARD]).expect("memory");
        device.fill_bytes(whole, 0xff).expect("filled");
        let matrix = whole.columns(GUARD..GUARD + shape[0] * shape[1]).reshaped(shape);
        Self { whole, matrix }
    }

    /// What was written, row after row, once the guard bands were found untouched.
    pub(crate) fn read(&self, device: &mut Device) -> Vec<T> {
        for guard in [self.whole.columns(0..GUARD), self.whole.columns(self.whole.elements() - GUARD..self.whole.elements())] {
            let bytes = device.download(guard).expect("read");
            // As text, because a NaN differs from itself.
            assert!(bytes.iter().all(|value| format!("{value:?}") == format!("{:?}", bytes[0])), "a guard band was written");
        }
        device.download(self.matrix).expect("read")
    }
}

/// A host's matrix on the device.
pub(crate) fn upload<T: Scalar>(device: &mut Device, from: &Array2<T>) -> Matrix<T> {
    let to = device.alloc("input", [from.nrows(), from.ncols()]).expect("memory");
    device.upload(to, from.as_slice().expect("row-major")).expect("uploaded");
    to
}

/// Near enough to Gaussian, the same on every run.
pub(crate) fn gaussian<T: Element>([rows, columns]: [usize; 2], seed: u64) -> Array2<T> {
    let philox = Philox4x32::new(seed);
    Array2::from_shape_fn((rows, columns), |(row, column)| {
        let words = philox.block([row as u32, column as u32, 0, 0]);
        T::from_f32(words.into_iter().map(|word| uniform(word) - 0.5).sum::<f32>() * 1.7)
    })
}

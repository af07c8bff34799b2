//! The test device, poisoned outputs between guard bands, and random inputs.

use std::{
    env,
    sync::{Mutex, PoisonError},
};

use ndarray::Array2;
use sparse24_core::{
    Element,
    philox::{Philox4x32, uniform},
};
use sparse24_cuda::{Device, Error, Matrix, Scalar, Settings};

/// Runs a test with exclusive use of the GPU. Without a GPU it is skipped, or fails if
/// `SPARSE24_REQUIRE_GPU` is set.
pub(crate) fn on_gpu(test: impl FnOnce(&mut Device)) {
    // Passed from test to test, so that kernels are loaded once. A test that fails drops it.
    static DEVICE: Mutex<Option<Device>> = Mutex::new(None);
    let mut device = DEVICE.lock().unwrap_or_else(PoisonError::into_inner);
    match device.take().map_or_else(|| Device::open(&Settings::default()), Ok) {
        Ok(mut opened) => {
            test(&mut opened);
            opened.reset().expect("no kernel failed");
            *device = Some(opened);
        }
        Err(error) if env::var_os("SPARSE24_REQUIRE_GPU").is_none() => println!("skipped: {error}"),
        Err(error) => panic!("this run requires a GPU: {error}"),
    }
}

/// Whether a case of this size is run. Under the sanitizer (`SPARSE24_SMALL`), which is a hundred
/// times slower, large ones are not.
pub(crate) fn affordable(elements: usize) -> bool {
    elements <= 1 << 17 || env::var_os("SPARSE24_SMALL").is_none()
}

/// An output between guard bands, with every byte 0xff: floats are NaN, indices out of range.
///
/// If `SPARSE24_UNDEFINED` is set, the output is left uninitialized, so that the sanitizer can
/// detect reads of it.
pub(crate) struct Poisoned<T> {
    whole: Matrix<T>,
    pub(crate) matrix: Matrix<T>,
}

const GUARD: usize = 1024;

impl<T: Scalar> Poisoned<T> {
    pub(crate) fn new(device: &mut Device, shape: [usize; 2]) -> Self {
        let elements = shape[0] * shape[1];
        let whole =
            device.alloc_undefined::<T>("poisoned", [1, elements + 2 * GUARD]).expect("memory");
        let poisoned =
            Self { whole, matrix: whole.columns(GUARD..GUARD + elements).reshaped(shape) };
        for guard in poisoned.guards() {
            device.fill_bytes(guard, 0xff).expect("filled");
        }
        if env::var_os("SPARSE24_UNDEFINED").is_none() {
            device.fill_bytes(poisoned.matrix, 0xff).expect("filled");
        }
        poisoned
    }

    /// Checks the guard bands and downloads the output.
    pub(crate) fn read(&self, device: &mut Device) -> Vec<T> {
        self.assert_guarded(device);
        device.download(self.matrix).expect("read")
    }

    /// Asserts that the guard bands are untouched.
    pub(crate) fn assert_guarded(&self, device: &mut Device) {
        for guard in self.guards() {
            let written = device
                .download(guard.as_bytes())
                .expect("read")
                .iter()
                .filter(|&&byte| byte != 0xff)
                .count();
            assert_eq!(written, 0, "bytes of a guard band were written");
        }
    }

    fn guards(&self) -> [Matrix<T>; 2] {
        let end = self.whole.elements();
        [self.whole.columns(0..GUARD), self.whole.columns(end - GUARD..end)]
    }
}

/// The kind of a refusal, and the operand or number that it names.
pub(crate) fn refused<T: std::fmt::Debug>(
    result: Result<T, Error>,
) -> (&'static str, &'static str) {
    match result.expect_err("a refusal") {
        Error::Semantics(_) => ("semantics", ""),
        Error::Shape { operand, .. } => ("shape", operand),
        Error::Gaps { operand, .. } => ("gaps", operand),
        Error::Alignment { operand, .. } => ("alignment", operand),
        Error::Alias { output, .. } => ("alias", output),
        Error::Stale { operand, .. } => ("stale", operand),
        Error::OutOfRange { what, .. } => ("range", what),
        Error::TooLarge { what, .. } => ("too large", what),
        Error::Plan { .. } => ("plan", ""),
        other => panic!("{other}"),
    }
}

/// Uploads a matrix.
pub(crate) fn upload<T: Scalar>(device: &mut Device, from: &Array2<T>) -> Matrix<T> {
    let to = device.alloc("input", [from.nrows(), from.ncols()]).expect("memory");
    device.upload(to, from.as_slice().expect("row-major")).expect("uploaded");
    to
}

/// Nearly Gaussian numbers, the same in every run.
pub(crate) fn gaussian<T: Element>([rows, columns]: [usize; 2], seed: u64) -> Array2<T> {
    let philox = Philox4x32::new(seed);
    Array2::from_shape_fn((rows, columns), |(row, column)| {
        let words = philox.block([row as u32, column as u32, 0, 0]);
        T::from_f32(words.into_iter().map(|word| uniform(word) - 0.5).sum::<f32>() * 1.7)
    })
}

/// Element `at` of the SplitMix64 sequence with seed 0.
pub(crate) fn split_mix(at: u64) -> u64 {
    let word = at.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

//! The kernels of gradients and activations against the bytes they must move.
//!
//! A result is verified before its kernel is timed. Each timing runs over buffers that together exceed the L2 cache. Medians with the
//! tenth and the ninetieth percentile, and the ratio to the floor: bytes at the rate of a device-to-device copy.

use half::bf16;
use ndarray::{Array2, s};
use sparse24_core::{
    compressed::Compressed24,
    mvue::Estimator,
    philox::{Philox4x32, Purpose, Site, Stream, uniform},
};
use sparse24_cuda::{Device, Matrix, Settings, StepState, compressed::Compressed, layout::from_fragments, mvue::mvue_compress};

/// Bytes a second of a copy, read and written.
const COPY: f64 = 4.1e12;
const TIMINGS: usize = 40;
/// What the buffers of one timing exceed.
const CACHE: usize = 200 << 20;
const SITE: Site = Site::new(Purpose::Mvue, 1);

fn main() {
    let mut device = match Device::open(&Settings::default()) {
        Ok(device) => device,
        Err(error) => return println!("skipped: {error}"),
    };
    device.set_step(&StepState { seed: 1, step: 1, ..StepState::default() }).expect("set");
    println!("{}\n{:32} {:>14} {:>9} {:>8} {:>8} {:>7} {:>6}", device.name(), "kernel", "shape", "us", "p10", "p90", "GB/s", "floor");
    for shape in
        [[16_384, 4096], [16_384, 5120], [16_384, 1280], [5120, 1280], [16_384, 3072], [16_384, 768], [16_384, 1600], [16_384, 6400]]
    {
        estimates(&mut device, shape);
    }
}

fn estimates(device: &mut Device, shape @ [p, r]: [usize; 2]) {
    let bytes = p * r * 2 + p * r + p * r / 8;
    for estimator in [Estimator::Exact, Estimator::Approximate] {
        let host = gaussian(shape);
        let sets: Vec<_> = (0..CACHE.div_ceil(bytes).max(2))
            .map(|_| (upload(device, &host), Compressed::alloc(device, "estimate", [r, p]).expect("memory")))
            .collect();
        let few = 256;
        let out = Compressed::alloc(device, "estimate", [r, few]).expect("memory");
        mvue_compress(device, sets[0].0.rows(0..few), estimator, SITE, out).expect("queued");
        let mut expected = Compressed24::zeros(r, few).expect("grouped");
        let stream = Stream::new(1, SITE, 0, 1);
        sparse24_cpu::mvue::mvue_compress(host.slice(s![..few, ..]), estimator, stream, &mut expected).expect("shapes agree");
        let found = from_fragments(&out.download(device).expect("read"), [r, few]).expect("patterns");
        assert!(found == expected, "{shape:?}, {estimator:?}: not core's bits");
        let name = if estimator == Estimator::Exact { "mvue_compress, exact" } else { "mvue_compress, approximate" };
        report(device, name, shape, bytes, sets.len(), |device, set| {
            mvue_compress(device, sets[set].0, estimator, SITE, sets[set].1).expect("queued");
        });
        device.reset().expect("freed");
        device.set_step(&StepState { seed: 1, step: 1, ..StepState::default() }).expect("set");
    }
}

/// Times a kernel that moves `bytes`, in turns over `sets` of buffers.
fn report(device: &mut Device, name: &str, shape: [usize; 2], bytes: usize, sets: usize, mut run: impl FnMut(&mut Device, usize)) {
    let mut all = |device: &mut Device| {
        (0..sets).for_each(|set| run(device, set));
        Ok(())
    };
    device.time(&mut all).expect("warm");
    let mut microseconds: Vec<f64> = (0..TIMINGS).map(|_| f64::from(device.time(&mut all).expect("timed")) * 1e3 / sets as f64).collect();
    microseconds.sort_by(f64::total_cmp);
    let [p10, median, p90] = [TIMINGS / 10, TIMINGS / 2, TIMINGS * 9 / 10].map(|at| microseconds[at]);
    let (rate, ratio) = (bytes as f64 / median / 1e3, median * 1e-6 * COPY / bytes as f64);
    println!("{name:32} {:>14} {median:9.2} {p10:8.2} {p90:8.2} {rate:7.0} {ratio:6.2}", format!("{}x{}", shape[0], shape[1]));
}

fn upload(device: &mut Device, from: &Array2<bf16>) -> Matrix<bf16> {
    let to = device.alloc("input", [from.nrows(), from.ncols()]).expect("memory");
    device.upload(to, from.as_slice().expect("row-major")).expect("uploaded");
    to
}

/// Near enough to Gaussian; rows repeat, so that this takes no time.
fn gaussian([rows, columns]: [usize; 2]) -> Array2<bf16> {
    const ROWS: usize = 256;
    let philox = Philox4x32::new(24);
    let some = Array2::from_shape_fn((ROWS.min(rows), columns), |(row, column)| {
        let words = philox.block([row as u32, column as u32, 0, 0]);
        bf16::from_f32(words.into_iter().map(|word| uniform(word) - 0.5).sum::<f32>() * 1.7)
    });
    Array2::from_shape_fn((rows, columns), |(row, column)| some[[row % ROWS, column]])
}

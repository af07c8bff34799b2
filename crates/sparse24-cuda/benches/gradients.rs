//! The kernels of gradients and activations against the bytes they must move.
//!
//! A result is verified before its kernel is timed. Each timing runs over buffers that together exceed the L2 cache. Medians with the
//! tenth and the ninetieth percentile, and the ratio to the floor: bytes at the rate of a device-to-device copy. Each kernel is timed queued launch
//! by launch, and recorded once and replayed, as a training step is: goals are held against the latter.

use half::bf16;
use ndarray::{Array2, Axis, Zip, s};
use sparse24_core::{
    compressed::Compressed24,
    mvue::Estimator,
    philox::{Philox4x32, Purpose, Site, Stream, uniform},
};
use sparse24_cpu as cpu;
use sparse24_cuda::{
    Beta, Device, Error, Matrix, Scalar, Settings, StepState, activation,
    bias::{bias_grad, bias_grad_scratch},
    compressed::Compressed,
    dropout::{Dropout, dropout},
    layout::from_fragments,
    mvue::mvue_compress,
};

/// Bytes a second of a copy, read and written.
const COPY: f64 = 4.1e12;
const TIMINGS: usize = 40;
/// Of a timing, at least: its two events take as long as a small kernel.
const LAUNCHES: usize = 16;
/// What the buffers of one timing exceed.
const CACHE: usize = 200 << 20;
const SITE: Site = Site::new(Purpose::Mvue, 1);

fn main() -> Result<(), Error> {
    let mut device = Device::open(&Settings::default())?;
    println!("{}; medians of {TIMINGS} timings; floor: bytes / {:.1} TB/s", device.name(), COPY / 1e12);
    println!("{:28} {:>12} {:>34} | {:>34}", "", "", "queued: median us, p10, p90, x floor", "replayed");
    for shape in
        [[16_384, 4096], [16_384, 5120], [16_384, 1280], [5120, 1280], [16_384, 3072], [16_384, 768], [16_384, 1600], [16_384, 6400]]
    {
        estimates(&mut device, shape, "", &gaussian(shape))?;
    }
    // As after dropout: groups with three zeros or four take the long way.
    let shape = [16_384, 4096];
    let philox = Philox4x32::new(5);
    let dropped = Array2::from_shape_fn(shape, |(token, feature)| philox.block([token as u32, feature as u32, 0, 0])[0].is_multiple_of(5));
    estimates(
        &mut device,
        shape,
        ", 1/5 zeros",
        &Zip::from(&gaussian(shape)).and(&dropped).map_collect(|&x, &zero| if zero { bf16::ZERO } else { x }),
    )?;
    for shape in [[16_384, 4096], [16_384, 5120], [5120, 1280]] {
        activations(&mut device, shape)?;
        others(&mut device, shape)?;
    }
    Ok(())
}

fn estimates(device: &mut Device, shape @ [p, r]: [usize; 2], kind: &str, host: &Array2<bf16>) -> Result<(), Error> {
    let state = StepState { seed: 1, step: 1, ..StepState::default() };
    let bytes = p * r * 2 + p * r + p * r / 8;
    for (name, estimator) in [("mvue exact", Estimator::Exact), ("mvue approximate", Estimator::Approximate)] {
        device.reset()?;
        device.set_step(&state)?;
        let few = 256;
        let (dz, out) = (upload(device, host)?, Compressed::alloc(device, "estimate", [r, few])?);
        mvue_compress(device, dz.rows(0..few), estimator, SITE, out)?;
        let mut expected = Compressed24::zeros(r, few).expect("grouped");
        cpu::mvue::mvue_compress(host.slice(s![..few, ..]), estimator, Stream::new(1, SITE, 0, 1), &mut expected).expect("fits");
        let found = from_fragments(&out.download(device)?, [r, few]).expect("patterns");
        assert!(found == expected, "{shape:?}, {estimator:?}: not core's bits");
        let sets = sets(device, bytes, |device| Ok((upload(device, host)?, Compressed::alloc(device, "estimate", [r, p])?)))?;
        report(device, &format!("{name}{kind}"), shape, bytes, &sets, |device, &(dz, out)| {
            mvue_compress(device, dz, estimator, SITE, out)
        })?;
    }
    Ok(())
}

/// One row of each result is compared with the CPU's: the tests verify the rest.
fn activations(device: &mut Device, shape @ [p, f]: [usize; 2]) -> Result<(), Error> {
    struct Buffers {
        z: Matrix<bf16>,
        h: Matrix<bf16>,
        dz: Matrix<bf16>,
    }
    device.reset()?;
    let host = gaussian([p, 2 * f]);
    let elements = p * f;
    let sets = sets(device, 10 * elements, |device| {
        let [h, dz] = [device.alloc("h", shape)?, device.alloc("dz", [p, 2 * f])?];
        Ok(Buffers { z: upload(device, &host)?, h, dz })
    })?;
    // As many rows of half the width.
    let narrow = |matrix: Matrix<bf16>| matrix.rows(0..p / 2).reshaped(shape);
    let first = &sets[0];
    let wide = |from: &Array2<bf16>| from.slice(s![..1, ..]).mapv(bf16::to_f32);
    let row = wide(&host);
    let (mut gelu, mut geglu, mut swiglu) = (Array2::zeros([1, 2 * f]), Array2::zeros([1, f]), Array2::zeros([1, f]));
    cpu::activation::gelu_forward(row.view(), gelu.view_mut()).expect("fits");
    cpu::activation::geglu_forward(row.view(), geglu.view_mut()).expect("fits");
    cpu::activation::swiglu_forward(row.view(), swiglu.view_mut()).expect("fits");
    activation::gelu_forward(device, first.z, first.dz)?;
    close(&device.download(first.dz.rows(0..1))?, &gelu);
    activation::geglu_forward(device, first.z, first.h)?;
    close(&device.download(first.h.rows(0..1))?, &geglu);
    activation::swiglu_forward(device, first.z, first.h)?;
    close(&device.download(first.h.rows(0..1))?, &swiglu);

    report(device, "gelu_forward", shape, 4 * elements, &sets, |device, of| activation::gelu_forward(device, narrow(of.z), of.h))?;
    report(device, "gelu_backward", shape, 6 * elements, &sets, |device, of| {
        activation::gelu_backward(device, of.h, narrow(of.z), narrow(of.dz))
    })?;
    report(device, "geglu_forward", shape, 6 * elements, &sets, |device, of| activation::geglu_forward(device, of.z, of.h))?;
    report(device, "geglu_backward", shape, 10 * elements, &sets, |device, of| activation::geglu_backward(device, of.h, of.z, of.dz))?;
    report(device, "swiglu_forward", shape, 6 * elements, &sets, |device, of| activation::swiglu_forward(device, of.z, of.h))?;
    report(device, "swiglu_backward", shape, 10 * elements, &sets, |device, of| activation::swiglu_backward(device, of.h, of.z, of.dz))
}

fn close(found: &[bf16], expected: &Array2<f32>) {
    assert!(found.iter().zip(expected).all(|(x, y)| (x.to_f32() - y).abs() <= y.abs() / 128.0 + 1e-30), "not the CPU's activation");
}

fn others(device: &mut Device, shape @ [p, r]: [usize; 2]) -> Result<(), Error> {
    device.reset()?;
    let host = gaussian(shape);
    let elements = p * r;
    let few = Array2::from_shape_fn((p, r), |(row, column)| bf16::from_f32(((row + column) % 7) as f32 - 3.0));
    let (db, scratch) = (device.alloc("db", [1, r])?, device.alloc("scratch", bias_grad_scratch(shape))?);
    let small = upload(device, &few)?;
    bias_grad(device, small, db, Beta::Overwrite, scratch)?;
    assert!(device.download(db)? == few.mapv(bf16::to_f32).sum_axis(Axis(0)).to_vec(), "small integers add up exactly");
    let sets = sets(device, 2 * elements, |device| upload(device, &host))?;
    report(device, "bias_grad", shape, 2 * elements, &sets, |device, &dz| bias_grad(device, dz, db, Beta::Accumulate, scratch))?;

    let site = Site::new(Purpose::Dropout, 1);
    let mut expected = host.slice(s![..1, ..]).mapv(bf16::to_f32);
    cpu::dropout::dropout(expected.view_mut(), &cpu::dropout::Dropout { p: 0.1, stream: Stream::new(1, site, 0, 1) }).expect("contiguous");
    device.set_step(&StepState { seed: 1, step: 1, ..StepState::default() })?;
    let rule = Dropout { p: 0.1, site };
    dropout(device, sets[0], &rule)?;
    assert!(device.download(sets[0].rows(0..1))?.iter().zip(&expected).all(|(x, &y)| *x == bf16::from_f32(y)), "not the CPU's dropout");
    report(device, "dropout", shape, 4 * elements, &sets, |device, &x| dropout(device, x, &rule))
}

/// As many buffers as exceed the cache.
fn sets<B>(device: &mut Device, bytes: usize, mut make: impl FnMut(&mut Device) -> Result<B, Error>) -> Result<Vec<B>, Error> {
    (0..CACHE.div_ceil(bytes).max(2)).map(|_| make(device)).collect()
}

/// Times an operation that moves `bytes`, in turns over the buffers.
fn report<B>(
    device: &mut Device,
    name: &str,
    shape: [usize; 2],
    bytes: usize,
    sets: &[B],
    run: impl Fn(&mut Device, &B) -> Result<(), Error>,
) -> Result<(), Error> {
    let launches = LAUNCHES.next_multiple_of(sets.len());
    let all = |device: &mut Device| (0..launches).try_for_each(|at| run(device, &sets[at % sets.len()]));
    all(device)?;
    device.start_recording()?;
    let recorded = all(device);
    let recording = device.stop_recording()?;
    recorded?;
    let mut row = |work: &dyn Fn(&mut Device) -> Result<(), Error>| -> Result<String, Error> {
        device.time(work)?;
        let mut microseconds =
            (0..TIMINGS).map(|_| Ok(f64::from(device.time(work)?) * 1e3 / launches as f64)).collect::<Result<Vec<_>, Error>>()?;
        microseconds.sort_by(f64::total_cmp);
        let [p10, median, p90] = [TIMINGS / 10, TIMINGS / 2, TIMINGS * 9 / 10].map(|at| microseconds[at]);
        Ok(format!("{median:9.2} {p10:8.2} {p90:8.2} {:6.2}", median * 1e-6 * COPY / bytes as f64))
    };
    let (queued, replayed) = (row(&all)?, row(&|device| device.replay(&recording))?);
    println!("{name:28} {:>12} {queued} | {replayed}", format!("{}x{}", shape[0], shape[1]));
    Ok(())
}

fn upload<T: Scalar>(device: &mut Device, from: &Array2<T>) -> Result<Matrix<T>, Error> {
    let to = device.alloc("input", [from.nrows(), from.ncols()])?;
    device.upload(to, from.as_slice().expect("row-major"))?;
    Ok(to)
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

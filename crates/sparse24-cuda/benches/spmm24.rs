//! The sparse products of a feed-forward block, at the widths of GPT-2 and above: both layers, forward, dgrad and wgrad, 16 x 1024 tokens.
//!
//! Every plan is verified against f64 on sampled elements before it is timed. A timing is that of some launches in a row, each on other buffers
//! than the one before. TFLOP/s count the dense product, 2 m n k; the ceiling is what the instruction reaches without loads, sustained.

use half::bf16;
use ndarray::{Array2, Zip};
use sparse24_core::{
    compressed::Compressed24,
    group::Pattern,
    philox::{Philox4x32, uniform},
};
use sparse24_cuda::{
    Beta, Device, Error, Matrix, Scalar, Settings,
    compressed::Compressed,
    layout::{BLOCK, to_fragments},
    spmm24::{Form, Plan, Straight, Transposed, plans, spmm24, spmm24_transposed},
};

const CEILING: f64 = 1572e12;
const TOKENS: usize = 16 * 1024;
const WIDTHS: [usize; 6] = [768, 1024, 1280, 1600, 2048, 4096];
const TIMINGS: usize = 30;
/// Sets of buffers; one alone is larger than half of an H200's L2.
const SETS: usize = 2;
/// Rows of random operands that differ; then they repeat.
const PANEL: usize = 256;
const SAMPLES: usize = 512;

fn main() -> Result<(), Error> {
    let mut device = Device::open(&Settings::default())?;
    println!("{}; medians of {TIMINGS} timings of {SETS} launches; ceiling {:.0} TFLOP/s", device.name(), CEILING / 1e12);
    println!("{:<38} {:<28} {:>9} {:>9} {:>9} {:>8} {:>7}", "", "plan", "median us", "p10", "p90", "TFLOP/s", "ceiling");
    for d in WIDTHS {
        let mut sum = 0.0;
        // The up layer's forward is the down layer's dgrad in shape, and the other way round.
        for (name, form, times, [m, n, k]) in [
            ("up forward, down dgrad", Form::Transposed, 2.0, [4 * d, TOKENS, d]),
            ("up dgrad, down forward", Form::Transposed, 2.0, [d, TOKENS, 4 * d]),
            ("up wgrad", Form::Straight, 1.0, [4 * d, d, TOKENS]),
            ("down wgrad", Form::Straight, 1.0, [d, 4 * d, TOKENS]),
        ] {
            device.reset()?;
            sum += times * product(&mut device, &format!("{d}: {name}"), form, [m, n, k])?;
        }
        println!("{d}: all six with the first plans {:.1} us\n", 1e6 * sum);
    }
    Ok(())
}

/// Queues a product on some buffers.
type Run = Box<dyn Fn(&mut Device, Plan) -> Result<(), Error>>;
/// An element of its result.
type Read = Box<dyn Fn(&mut Device, [usize; 2]) -> Result<f64, Error>>;

/// The time of the plan offered first, in seconds.
fn product(device: &mut Device, name: &str, form: Form, [m, n, k]: [usize; 3]) -> Result<f64, Error> {
    let a = sparse([m.min(PANEL), k], 1);
    let on_device = Compressed::alloc(device, "a", [m, k])?;
    let fragments = to_fragments(&a);
    repeat(device, on_device.values, &fragments.values)?;
    repeat(device, on_device.metadata, &fragments.metadata)?;
    let shape = if form == Form::Transposed { [n, k] } else { [k, n] };
    let b = gaussian([PANEL, shape[1]], 2).mapv(bf16::from_f32);
    let expected = samples(form, &a, &b, [m, n, k]);
    let offered = plans(device, form, [m, n, k], 16)?;
    let wgmma: Vec<Plan> = offered.iter().copied().filter(|&plan| plan != Plan::Mma).collect();
    let timed = if wgmma.is_empty() { offered } else { wgmma };
    let most = timed.iter().map(|plan| plan.scratch()).max().unwrap_or(0);
    let scratch = device.alloc("scratch", [1, most])?;
    let mut sets: Vec<Run> = Vec::new();
    let mut read: Option<Read> = None;
    for _ in 0..SETS {
        let on_device_b = device.alloc("b", shape)?;
        repeat(device, on_device_b, b.as_slice().expect("row-major"))?;
        match form {
            Form::Transposed => {
                let d = device.alloc("d", [n, m])?;
                let operands = Transposed { a: on_device, b: on_device_b, bias: None, d, scratch };
                sets.push(Box::new(move |device, plan| spmm24_transposed(device, &operands, plan)));
                read =
                    Some(Box::new(move |device, [i, j]| Ok(f64::from(device.download(d.rows(j..j + 1).columns(i..i + 1))?[0].to_f32()))));
            }
            Form::Straight => {
                let d = device.alloc("d", [m, n])?;
                let operands = Straight { a: on_device, b: on_device_b, d, beta: Beta::Overwrite, scratch };
                sets.push(Box::new(move |device, plan| spmm24(device, &operands, plan)));
                read = Some(Box::new(move |device, [i, j]| Ok(f64::from(device.download(d.rows(i..i + 1).columns(j..j + 1))?[0]))));
            }
        }
    }
    let read = read.expect("a set");
    let mut first = None;
    for plan in timed {
        sets.iter().try_for_each(|run| run(device, plan))?;
        for &(at, exact, absolute) in &expected {
            let found = read(device, at)?;
            let bound = (k + 2) as f64 * 2.0_f64.powi(-22) * absolute + if form == Form::Transposed { exact.abs() / 256.0 } else { 0.0 };
            assert!((found - exact).abs() <= bound, "{name}, {plan}, at {at:?}: {found}, not {exact} +- {bound}");
        }
        let mut seconds = (0..TIMINGS)
            .map(|_| Ok(f64::from(device.time(|device| sets.iter().try_for_each(|run| run(device, plan)))?) / 1e3 / SETS as f64))
            .collect::<Result<Vec<f64>, Error>>()?;
        seconds.sort_by(f64::total_cmp);
        let [p10, median, p90] = [TIMINGS / 10, TIMINGS / 2, TIMINGS * 9 / 10].map(|at| seconds[at]);
        let rate = 2.0 * (m * n * k) as f64 / median;
        let [p10_us, median_us, p90_us] = [p10, median, p90].map(|time| 1e6 * time);
        let (plan, tera, ratio) = (plan.to_string(), rate / 1e12, rate / CEILING);
        println!("{name:<38} {plan:<28} {median_us:>9.1} {p10_us:>9.1} {p90_us:>9.1} {tera:>8.0} {ratio:>7.2}");
        first.get_or_insert(median);
    }
    Ok(first.expect("a plan"))
}

/// Sampled elements: where, the exact sum, and that of the absolute values.
fn samples(form: Form, a: &Compressed24<bf16>, b: &Array2<bf16>, [m, n, k]: [usize; 3]) -> Vec<([usize; 2], f64, f64)> {
    let philox = Philox4x32::new(3);
    let sample = |index: u32| {
        let at = philox.block([index, 0, 0, 0]);
        let [row, column] = [(uniform(at[0]) * m as f32) as usize, (uniform(at[1]) * n as f32) as usize];
        let (mut exact, mut absolute) = (0.0, 0.0);
        for group in 0..k / 4 {
            for (i, kept) in a.pattern(row % PANEL, group).indices().into_iter().enumerate() {
                let k = 4 * group + usize::from(kept);
                let b = if form == Form::Transposed { b[[column % PANEL, k]] } else { b[[k % PANEL, column]] };
                let term = f64::from(a.values()[[row % PANEL, 2 * group + i]].to_f32()) * f64::from(b.to_f32());
                exact += term;
                absolute += term.abs();
            }
        }
        ([row, column], exact, absolute)
    };
    (0..SAMPLES as u32).map(sample).collect()
}

/// Fills a matrix with the elements again and again.
fn repeat<T: Scalar>(device: &mut Device, to: Matrix<T>, from: &[T]) -> Result<(), Error> {
    let rows = from.len() / to.shape()[1];
    (0..to.shape()[0]).step_by(rows.max(1)).try_for_each(|first| {
        let part = to.rows(first..(first + rows).min(to.shape()[0]));
        device.upload(part, &from[..part.elements()])
    })
}

fn sparse([m, k]: [usize; 2], seed: u64) -> Compressed24<bf16> {
    assert!(m % BLOCK == 0 && k % 8 == 0, "panels are made of blocks");
    let philox = Philox4x32::new(seed);
    let pattern = |row: usize, group: usize| {
        let word = philox.block([row as u32, group as u32, 1, 0])[0];
        Pattern::ALL[(uniform(word) * 6.0) as usize].nibble()
    };
    let metadata = (0..m * k / 8).map(|byte| {
        let (row, pair) = (byte / (k / 8), byte % (k / 8));
        pattern(row, 2 * pair) | pattern(row, 2 * pair + 1) << 4
    });
    Compressed24::from_parts(gaussian([m, k / 2], seed).mapv(bf16::from_f32), metadata.collect()).expect("patterns")
}

fn gaussian(shape: [usize; 2], seed: u64) -> Array2<f32> {
    let mut x = Array2::zeros(shape);
    Zip::indexed(&mut x).for_each(|(row, column), x| {
        let words = Philox4x32::new(seed).block([row as u32, column as u32, 0, 0]);
        *x = words.into_iter().map(|word| uniform(word) - 0.5).sum::<f32>() * 1.7;
    });
    x
}

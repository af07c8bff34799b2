//! Time of norm, loss and embedding beside their floors: the bytes that must move, at the rate of a device-to-device copy in this run; and of
//! dense products.
//!
//! What is timed is verified by the tests of `gpu`. A timing is that of several calls in a row, so that the GPU does not
//! wait for the host, on buffers that together exceed the L2. Calls are queued one by one, and recorded once and replayed, as a training step is:
//! goals are held against the latter.

use half::bf16;
use sparse24_cuda::{
    Beta, Device, Error, Matrix, Settings,
    embedding::{Embed, EmbedScratch, embed_backward, embed_forward},
    gemm::{Gemm, LinearDgrad, LinearForward, LinearWgrad, WORKSPACE},
    loss::{HeadLoss, head_loss, loss_forward, loss_sum},
    norm::{NormBackward, NormForward, norm_backward, norm_backward_scratch, norm_forward},
};

const TOKENS: usize = 16 * 1024;
const TIMINGS: usize = 40;
/// Bytes that no L2 holds.
const PAST_L2: usize = 200 << 20;

fn main() -> Result<(), Error> {
    let mut device = match Device::open(&Settings::default()) {
        Ok(device) => device,
        Err(error) => {
            println!("skipped: {error}");
            return Ok(());
        }
    };
    let wanted: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let rate = copy_rate(&mut device)?;
    println!("{}: a copy moves {rate:.0} GB/s", device.name());
    println!("{:<36} {:>36} | {:>36}", "operation", "queued: median us, p10, p90, x floor", "replayed");
    let mut bench = Bench { device, rate, wanted };
    for width in [768, 1024, 1280, 1600, 2048, 4096] {
        norm(&mut bench, width)?;
    }
    loss(&mut bench)?;
    for width in [768, 1600] {
        embedding(&mut bench, width)?;
    }
    println!("{:<36} {:>9} {:>9} {:>9} {:>8}", "product", "median us", "p10", "p90", "TFLOP/s");
    for width in [768, 1024, 1280, 1600] {
        for (name, q, r) in [("attention in", 1, 3), ("attention out", 1, 1), ("up", 1, 4), ("down", 4, 1)] {
            gemm(&mut bench, &format!("{name} {width}"), [TOKENS, q * width, r * width])?;
        }
        gemm(&mut bench, &format!("head {width}"), [4096, width, 50304])?;
    }
    Ok(())
}

struct Bench {
    device: Device,
    /// GB/s of a copy.
    rate: f64,
    wanted: Vec<String>,
}

impl Bench {
    /// Times `call` on each set of buffers in turn; `bytes` is what one call must move.
    fn report<S: Copy>(
        &mut self,
        name: &str,
        bytes: usize,
        sets: &[S],
        mut call: impl FnMut(&mut Device, S) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let Some(queued) = self.measure(name, sets, &mut call)? else { return Ok(()) };
        let calls = calls(sets);
        self.device.start_recording()?;
        let recorded = (0..calls).try_for_each(|i| call(&mut self.device, sets[i % sets.len()]));
        let recording = self.device.stop_recording()?;
        recorded?;
        let mut replay = || Ok(f64::from(self.device.time(|device| device.replay(&recording))?) * 1e3 / calls as f64);
        let replayed = quantiles((0..TIMINGS).map(|_| replay()).collect::<Result<_, Error>>()?);
        let floor = bytes as f64 / self.rate / 1e3;
        let [queued, replayed] =
            [queued, replayed].map(|[low, median, high]| format!("{median:>10.1} {low:>8.1} {high:>8.1} {:>7.2}", median / floor));
        println!("{name:<36} {queued} | {replayed}");
        Ok(())
    }

    /// Tenth percentile, median and ninetieth of the microseconds a call, if this is wanted.
    fn measure<S: Copy>(
        &mut self,
        name: &str,
        sets: &[S],
        call: &mut impl FnMut(&mut Device, S) -> Result<(), Error>,
    ) -> Result<Option<[f64; 3]>, Error> {
        if !self.wanted.is_empty() && !self.wanted.iter().any(|wanted| name.contains(wanted)) {
            return Ok(None);
        }
        Ok(Some(quantiles(timings(&mut self.device, sets, call)?)))
    }
}

fn quantiles(mut times: Vec<f64>) -> [f64; 3] {
    times.sort_by(f64::total_cmp);
    [0.1, 0.5, 0.9].map(|part: f64| times[(part * (times.len() - 1) as f64).round() as usize])
}

/// Of a timing: its two events take as long as a small kernel.
fn calls<S>(sets: &[S]) -> usize {
    12_usize.next_multiple_of(sets.len())
}

/// Microseconds a call.
fn timings<S: Copy>(
    device: &mut Device,
    sets: &[S],
    call: &mut impl FnMut(&mut Device, S) -> Result<(), Error>,
) -> Result<Vec<f64>, Error> {
    let calls = calls(sets);
    let mut turn = |device: &mut Device| {
        device.time(|device| (0..calls).try_for_each(|i| call(device, sets[i % sets.len()]))).map(|ms| f64::from(ms) * 1e3 / calls as f64)
    };
    turn(device)?;
    (0..TIMINGS).map(|_| turn(device)).collect()
}

fn copy_rate(device: &mut Device) -> Result<f64, Error> {
    let [from, to] = [device.alloc::<u8>("from", [1, PAST_L2])?, device.alloc("to", [1, PAST_L2])?];
    let mut times = timings(device, &[()], &mut |device: &mut Device, ()| device.copy(from, to))?;
    times.sort_by(f64::total_cmp);
    Ok(2.0 * PAST_L2 as f64 / times[times.len() / 2] / 1e3)
}

/// As many sets of buffers as the L2 does not hold.
fn sets<S>(bytes: usize, mut make: impl FnMut() -> Result<S, Error>) -> Result<Vec<S>, Error> {
    (0..PAST_L2.div_ceil(bytes).clamp(2, 16)).map(|_| make()).collect()
}

fn random(device: &mut Device, shape: [usize; 2]) -> Result<Matrix<bf16>, Error> {
    let matrix = device.alloc("random", shape)?;
    let mut word = 1_u32;
    let values: Vec<bf16> = (0..shape[0] * shape[1])
        .map(|_| {
            word = word.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            bf16::from_f32((word >> 8) as f32 / (1 << 23) as f32 - 1.0)
        })
        .collect();
    device.upload(matrix, &values)?;
    Ok(matrix)
}

fn norm(bench: &mut Bench, width: usize) -> Result<(), Error> {
    bench.device.reset()?;
    let (shape, activation) = ([TOKENS, width], 2 * TOKENS * width);
    let device = &mut bench.device;
    let gamma = device.alloc("gamma", [1, width])?;
    device.upload(gamma, &vec![1.0; width])?;
    let source = random(device, shape)?;
    let forward = sets(4 * activation, || {
        let [x, delta] = [device.alloc("x", shape)?, device.alloc("delta", shape)?];
        device.copy(source, x)?;
        device.copy(source, delta)?;
        let [residual, y] = [device.alloc("residual", shape)?, device.alloc("y", shape)?];
        Ok(NormForward { x, delta: Some(delta), gamma, beta: Some(gamma), residual, y, stats: device.alloc("stats", [TOKENS, 2])? })
    })?;
    bench.report(&format!("norm_forward {width}"), 4 * activation + 8 * TOKENS, &forward, |device, op| norm_forward(device, &op))?;
    let device = &mut bench.device;
    let scratch_shape = norm_backward_scratch(device, width);
    let scratch = device.alloc("scratch", scratch_shape)?;
    let [dgamma, dbeta] = [device.alloc("dgamma", [1, width])?, device.alloc("dbeta", [1, width])?];
    let backward: Vec<_> = forward
        .iter()
        .map(|&NormForward { residual, y, stats, x, .. }| NormBackward {
            dy: y,
            residual,
            stats,
            gamma,
            dresidual: x,
            dgamma,
            dbeta: Some(dbeta),
            accumulate: Beta::Accumulate,
            scratch,
        })
        .collect();
    bench.report(&format!("norm_backward {width}"), 4 * activation + 8 * TOKENS, &backward, |device, op| norm_backward(device, &op))
}

fn loss(bench: &mut Bench) -> Result<(), Error> {
    for [rows, columns, vocabulary] in [[2048, 50304, 50257], [16384, 128, 65], [1024, 128_256, 128_256]] {
        bench.device.reset()?;
        let (device, bytes) = (&mut bench.device, 2 * rows * columns);
        let host: Vec<u32> = (0..rows).map(|row| (row * 7919 % vocabulary) as u32).collect();
        let (targets, losses) = (device.alloc("targets", [rows, 1])?, device.alloc("losses", [rows, 1])?);
        device.upload(targets, &host)?;
        let source = random(device, [rows, columns])?;
        let sets = sets(bytes, || {
            let logits = device.alloc("logits", [rows, columns])?;
            device.copy(source, logits)?;
            Ok(HeadLoss { logits, targets, vocabulary, smoothing: 0.0, losses })
        })?;
        // Over gradients instead of logits the work is the same.
        bench.report(&format!("head_loss {rows} x {columns}"), 2 * bytes, &sets, |device, op| head_loss(device, &op, 1.0))?;
        bench.report(&format!("loss_forward {rows} x {columns}"), bytes, &sets, |device, op| loss_forward(device, &op))?;
    }
    let device = &mut bench.device;
    let (losses, loss) = (device.alloc("losses", [TOKENS, 1])?, device.alloc("loss", [1, 1])?);
    bench.report("loss_sum 16384", 4 * TOKENS, &[()], |device, ()| loss_sum(device, losses, loss, Beta::Accumulate, None))
}

fn embedding(bench: &mut Bench, width: usize) -> Result<(), Error> {
    const CONTEXT: usize = 1024;
    for vocabulary in [50257_usize, 65] {
        bench.device.reset()?;
        let device = &mut bench.device;
        let shape = [TOKENS, width];
        // Like text: the frequency of a token falls with its number.
        let host: Vec<u32> = (0..TOKENS).map(|i| (vocabulary as f64).powf((i * 7919 % TOKENS) as f64 / TOKENS as f64) as u32 - 1).collect();
        let distinct = host.iter().collect::<std::collections::HashSet<_>>().len();
        let tokens = device.alloc("tokens", [TOKENS, 1])?;
        device.upload(tokens, &host)?;
        let token_table = device.alloc("table", [vocabulary, width])?;
        let position_table = Some(device.alloc("positions", [CONTEXT, width])?);
        let scratch = EmbedScratch {
            order: device.alloc("order", EmbedScratch::order_shape(shape))?,
            pieces: device.alloc("pieces", EmbedScratch::pieces_shape(shape))?,
        };
        let sets = sets(2 * TOKENS * width, || {
            Ok(Embed { tokens, context: CONTEXT, token_table, position_table, rows: device.alloc("rows", shape)? })
        })?;
        let tables = 4 * width * (distinct + CONTEXT);
        let name = format!("{width}, {distinct} tokens");
        bench.report(&format!("embed_forward {name}"), 2 * TOKENS * width + tables, &sets, |device, op| embed_forward(device, &op))?;
        let bytes = 2 * TOKENS * width + 2 * tables;
        bench.report(&format!("embed_backward {name}"), bytes, &sets, |device, op| embed_backward(device, &op, &scratch))?;
    }
    Ok(())
}

fn gemm(bench: &mut Bench, name: &str, [p, q, r]: [usize; 3]) -> Result<(), Error> {
    if !bench.wanted.is_empty() && !bench.wanted.iter().any(|wanted| wanted.starts_with(name) || name.contains(wanted.as_str())) {
        return Ok(());
    }
    bench.device.reset()?;
    let device = &mut bench.device;
    let workspace = device.alloc("workspace", [1, WORKSPACE])?;
    let mut products = Gemm::new(device, workspace)?;
    let (x, dz, weight) = (random(device, [p, q])?, random(device, [p, r])?, random(device, [r, q])?);
    let (z, dx, dw) = (device.alloc("z", [p, r])?, device.alloc("dx", [p, q])?, device.alloc("dw", [r, q])?);
    let flops = 2.0 * p as f64 * q as f64 * r as f64;
    for product in ["forward", "dgrad", "wgrad"] {
        let name = format!("{name} {product}");
        let mut call = |device: &mut Device, ()| match product {
            "forward" => products.linear_forward(device, &LinearForward { x, weight, bias: None, z }),
            "dgrad" => products.linear_dgrad(device, &LinearDgrad { dz, weight, dx }),
            _ => products.linear_wgrad(device, &LinearWgrad { dz, x, dw, beta: Beta::Overwrite }),
        };
        if let Some([low, median, high]) = bench.measure(&name, &[()], &mut call)? {
            println!("{name:<36} {median:>9.1} {low:>9.1} {high:>9.1} {:>8.0}", flops / median / 1e6);
        }
    }
    Ok(())
}

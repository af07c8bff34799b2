//! Attention at the shapes of GPT-2, verified before it is timed: medians of single launches over buffers that do not fit the second cache.
//!
//! TFLOP/s count the products of the visible half: 4 b h T^2 w / 2 forward, 10 b h T^2 w / 2 backward. Deliberately absent: a verdict, and
//! any peer; those are Python's to run.

use half::bf16;
use ndarray::Array2;
use sparse24_core::philox::{Philox4x32, Purpose, Site, uniform};
use sparse24_cpu::attention as cpu;
use sparse24_cuda::{
    Device, Error, Matrix, Settings,
    attention::{
        AttentionBackward, AttentionForward, AttentionMask, AttentionShape, attention_backward, attention_forward, backward_scratch,
    },
    dropout::Dropout,
};

const TIMINGS: usize = 40;

fn main() {
    let mut device = match Device::open(&Settings::default()) {
        Ok(device) => device,
        Err(error) => return println!("skipped: {error}"),
    };
    println!("{}", device.name());
    verify(&mut device).expect("queued");
    for (batch, heads, tokens, width, dropped) in [
        (16, 12, 1024, 64, None),
        (8, 16, 1024, 64, None),
        (8, 20, 1024, 64, None),
        (8, 25, 1024, 64, None),
        (16, 6, 1024, 128, None),
        (64, 6, 256, 64, None),
        (64, 6, 256, 64, Some(0.2)),
        (16, 12, 1024, 64, Some(0.2)),
    ] {
        device.reset().expect("memory");
        let shape = AttentionShape { batch, heads, queries: tokens, keys: tokens, mask: AttentionMask::Causal };
        let sets: Vec<_> = (0..3).map(|seed| operands(&mut device, shape, width, dropped, seed).expect("memory")).collect();
        let forward_flop = 2.0 * (batch * heads * tokens * tokens * width) as f64;
        let forward = timings(&mut device, &sets, |device, op| attention_forward(device, &op.forward)).expect("queued");
        let backward = timings(&mut device, &sets, attention_backward).expect("queued");
        println!("b {batch} h {heads} T {tokens} w {width} dropout {dropped:?}");
        for (name, [p10, median, p90], flop) in [("forward", forward, forward_flop), ("backward", backward, 2.5 * forward_flop)] {
            println!("  {name:8} {median:8.1} us ({p10:.1} to {p90:.1}), {:5.0} TFLOP/s", flop / f64::from(median) / 1e6);
        }
    }
}

/// Microseconds: the tenth, fiftieth and ninetieth percentile.
fn timings(
    device: &mut Device,
    sets: &[AttentionBackward],
    run: impl Fn(&mut Device, &AttentionBackward) -> Result<(), Error>,
) -> Result<[f32; 3], Error> {
    sets.iter().try_for_each(|op| run(device, op))?;
    let mut times = Vec::new();
    for i in 0..TIMINGS {
        times.push(device.time(|device| run(device, &sets[i % sets.len()]))? * 1e3);
    }
    times.sort_by(f32::total_cmp);
    Ok([TIMINGS / 10, TIMINGS / 2, TIMINGS * 9 / 10].map(|i| times[i]))
}

fn operands(device: &mut Device, shape: AttentionShape, width: usize, dropped: Option<f32>, seed: u64) -> Result<AttentionBackward, Error> {
    let (rows, d) = (shape.batch * shape.queries, shape.heads * width);
    let qkv = random(device, [rows, 3 * d], seed)?;
    let [q, k, v] = [0, 1, 2].map(|i| qkv.columns(i * d..(i + 1) * d));
    let gradients = device.alloc("gradients", [rows, 3 * d])?;
    let forward = AttentionForward {
        shape,
        q,
        k,
        v,
        dropout: dropped.map(|p| Dropout { p, site: Site::new(Purpose::Dropout, 1) }),
        o: device.alloc("o", [rows, d])?,
        lse: device.alloc("lse", [shape.batch * shape.heads, shape.queries])?,
    };
    Ok(AttentionBackward {
        forward,
        d_o: random(device, [rows, d], seed + 100)?,
        dqkv: [0, 1, 2].map(|i| gradients.columns(i * d..(i + 1) * d)),
        scratch: device.alloc("scratch", backward_scratch(shape))?,
    })
}

/// Near enough to Gaussian; a period that no sequence has.
fn random(device: &mut Device, shape: [usize; 2], seed: u64) -> Result<Matrix<bf16>, Error> {
    const PERIOD: usize = 1 << 16;
    let philox = Philox4x32::new(seed);
    let values: Vec<_> = (0..PERIOD)
        .map(|i| bf16::from_f32(philox.block([i as u32, 0, 0, 0]).into_iter().map(|word| uniform(word) - 0.5).sum::<f32>() * 1.7))
        .collect();
    let values: Vec<_> = (0..shape[0] * shape[1]).map(|i| values[(i + i / PERIOD * 7919) % PERIOD]).collect();
    let to = device.alloc("random", shape)?;
    device.upload(to, &values)?;
    Ok(to)
}

/// A small case against the CPU; the suite of tests holds every element to its bound.
fn verify(device: &mut Device) -> Result<(), Error> {
    let shape = AttentionShape { batch: 2, heads: 2, queries: 300, keys: 300, mask: AttentionMask::Causal };
    let op = operands(device, shape, 64, None, 9)?;
    attention_forward(device, &op.forward)?;
    attention_backward(device, &op)?;
    let mut host = |of: Matrix<bf16>| -> Result<Array2<f32>, Error> {
        let values = device.download(of)?.into_iter().map(f32::from).collect();
        Ok(Array2::from_shape_vec((of.shape()[0], of.shape()[1]), values).expect("as many"))
    };
    let AttentionForward { q, k, v, o, .. } = op.forward;
    let [q, k, v, o, d_o] = [host(q)?, host(k)?, host(v)?, host(o)?, host(op.d_o)?];
    let found = [o, host(op.dqkv[0])?, host(op.dqkv[1])?, host(op.dqkv[2])?];
    let shape = cpu::AttentionShape { batch: 2, heads: 2, queries: 300, keys: 300, mask: cpu::AttentionMask::Causal };
    let mut expected = [0; 4].map(|_| Array2::zeros(q.dim()));
    let mut lse = Array2::zeros((4, 300));
    let [o, dq, dk, dv] = &mut expected;
    cpu::attention_forward(shape, q.view(), k.view(), v.view(), o.view_mut(), lse.view_mut(), None).expect("shapes fit");
    let (views, gradients) = ([q.view(), k.view(), v.view()], [dq.view_mut(), dk.view_mut(), dv.view_mut()]);
    let ([q, k, v], [dq, dk, dv]) = (views, gradients);
    cpu::attention_backward(shape, q, k, v, o.view(), lse.view(), d_o.view(), dq, dk, dv, None).expect("shapes fit");
    for (name, (found, expected)) in ["o", "dq", "dk", "dv"].into_iter().zip(found.iter().zip(&expected)) {
        let error = (found - expected).mapv(|x| x * x).sum().sqrt() / expected.mapv(|x| x * x).sum().sqrt();
        assert!(error <= 1.0 / 128.0, "{name} is off by {error} of its norm");
    }
    Ok(())
}

//! Measurements of products, which `docs/performance.md` reports:
//!
//! ```text
//! cargo test --release -p sparse24-wgpu --lib speed -- --ignored --nocapture --test-threads 1
//! ```

use std::time::{Duration, Instant};

use super::{Accumulate, Device, FOURS, Kernel, Matrix, Transposed, chosen, constants, products};
use crate::{device::tests::open, elementwise::copy};

mod software24;

/// The shortest time of a call, in batches of about 50 ms.
fn time(device: &mut Device, mut call: impl FnMut(&mut Device)) -> Duration {
    let mut batch = |times: u32| {
        let start = Instant::now();
        (0..times).for_each(|_| call(device));
        device.wait().unwrap();
        start.elapsed() / times
    };
    batch(1);
    let times = (0.05 / batch(1).as_secs_f64()).ceil().min(100.0) as u32;
    (0..8).map(|_| batch(times)).min().unwrap()
}

/// Times and compares both kernels with vec4 loads, for the products of a layer of these models:
/// tokens, d_model and d_ff.
fn compare(models: &[(&str, [usize; 3])]) {
    let Some(mut device) = open() else { return };
    let [_, _, large] = products(&device);
    let [rows, columns] = large.tile;
    println!("\n{}; TFLOP/s with output tiles of 64x64 and {rows}x{columns}", device.name());
    for &(model, [p, d, ff]) in models {
        let weights = [("qkv", d, 3 * d), ("out", d, d), ("up", d, ff), ("down", ff, d)];
        let (mut sums, mut used) = ([Duration::ZERO; 2], Duration::ZERO);
        for (name, q, r) in weights {
            let mut alloc = |shape| device.alloc("operand", shape, "test").unwrap();
            let [x, w, z] = [[p, q], [r, q], [p, r]].map(&mut alloc);
            let outs = [[p, r], [p, q], [r, q]].map(&mut alloc);
            for operand in [x, w, z] {
                // 0.5 to 1.64: a GPU takes less power, and less time, for zeros.
                let values =
                    (0..operand.elements() as u32).map(|i| 0x3f00_0000 + i % 31 * 0x7_0000);
                device.upload(operand, &values.collect::<Vec<_>>()).unwrap();
            }
            let passes: [(&str, [(Matrix, Transposed); 2]); 3] = [
                ("forward", [(x, Transposed::No), (w, Transposed::Yes)]),
                ("dgrad", [(z, Transposed::No), (w, Transposed::No)]),
                ("wgrad", [(z, Transposed::Yes), (x, Transposed::No)]),
            ];
            for ((pass, [a, b]), out) in passes.into_iter().zip(outs) {
                let constants = constants(a, b, None, out, Accumulate::Overwrite).unwrap();
                let timed = [&FOURS, large].map(|product| {
                    let taken = time(&mut device, |device| {
                        product.run(device, [a.0, b.0, b.0, out], &constants).unwrap();
                    });
                    (taken, device.download(out).unwrap())
                });
                let [small, other] = timed;
                assert!(small.1 == other.1, "{model} {name} {pass}: the bits differ");
                let times = [small.0, other.0];
                let chosen = chosen(&device, constants[2] as usize, [a.0, b.0, out]);
                sums = [0, 1].map(|i| sums[i] + times[i]);
                used += times[usize::from(chosen.tile == large.tile)];
                let [small, other] = times.map(|t| 2e-12 * (p * q * r) as f64 / t.as_secs_f64());
                println!(
                    "{model:13} {name:4} {pass:7} {:5} tiles: {small:8.4} {other:8.4}, used {:?}",
                    large.tiles(out.shape),
                    chosen.tile,
                );
            }
            for matrix in [x, w, z].into_iter().chain(outs) {
                device.realloc(matrix, "nothing", [1, 1]).unwrap();
            }
        }
        let [small, large] = sums;
        println!("{model}, a layer: {small:.2?} and {large:.2?}, {used:.2?} as chosen");
    }
}

#[test]
#[ignore = "a measurement"]
fn output_tiles_of_small_models() {
    compare(&[("quickstart", [768, 128, 512]), ("bert-tiny-cpu", [1024, 128, 512])]);
}

#[test]
#[ignore = "a measurement, for a GPU"]
fn output_tiles_of_gpt2() {
    compare(&[("gpt2-124m", [8192, 768, 3072]), ("gpt2-350m", [8192, 1024, 4096])]);
}

/// A kernel that adds products to `rows` x `columns` sums per invocation, with operands that stay
/// in registers, or that are read from workgroup memory by fours.
fn source([rows, columns]: [usize; 2], reads: bool) -> String {
    let each = |n: usize, of: &dyn Fn(usize) -> String| (0..n).map(of).collect::<String>();
    let sums = |of: &dyn Fn(usize, usize) -> String| each(rows, &|i| each(columns, &|j| of(i, j)));
    let step = |k: usize| {
        let operand = |name: &str, i: usize, from: usize| match (reads, i % 4) {
            (true, 0) => format!("read = w[(at + {}u) & 1023u];{name}{i} = read.x;", 16 * k + from),
            (true, place) => format!("{name}{i} = read[{place}];"),
            (false, _) => format!("{name}{i} *= 0.999;"),
        };
        each(rows, &|i| operand("x", i, i / 4))
            + &each(columns, &|j| operand("y", j, (rows + j) / 4))
            + &sums(&|i, j| format!("s{i}_{j} += x{i} * y{j};"))
    };
    [
        "struct Constants { count: u32 }
        @group(0) @binding(0) var<uniform> c: Constants;
        @group(0) @binding(2) var<storage, read_write> out: array<f32>;
        var<workgroup> w: array<vec4<f32>, 1024>;
        @compute @workgroup_size(64) fn products(@builtin(local_invocation_index) t: u32) {
            for (var i = t; i < 1024u; i += 64u) { w[i] = vec4<f32>(1.0 + f32(i) * 1e-4); }
            workgroupBarrier();
            var read = vec4<f32>();",
        &each(rows, &|i| format!("var x{i} = 1.0 + f32(t + {i}u);")),
        &each(columns, &|j| format!("var y{j} = 1.0 - f32(t + {j}u);")),
        &sums(&|i, j| format!("var s{i}_{j} = 0.0;")),
        "for (var k = 0u; k < c.count; k += 4u) { let at = 16u * k + 8u * (t / 8u);",
        &each(4, &step),
        "} out[t] = 0.0",
        &sums(&|i, j| format!(" + s{i}_{j}")),
        "; }",
    ]
    .concat()
}

/// The rates that the driver allows: products without loads from global memory, for several numbers
/// of sums per invocation; and the rate of a copy.
#[test]
#[ignore = "a measurement"]
fn floor_of_a_step() {
    /// Values of k.
    const COUNT: usize = 256;
    const GROUPS: usize = 64;
    let Some(mut device) = open() else { return };
    println!("\n{}", device.name());
    let out = device.alloc("out", [1, 64], "test").unwrap();
    for (reads, from) in [(false, "registers"), (true, "workgroup memory")] {
        for size in [[4, 4], [4, 8], [8, 8], [8, 16], [16, 16]] {
            let source = source(size, reads).leak();
            let kernel = Kernel { name: "products", source, inputs: 0, outputs: 1 };
            let kernel: &'static Kernel = Box::leak(Box::new(kernel));
            let taken = time(&mut device, |device| {
                device.run(kernel, [out], &[COUNT as u32], GROUPS).unwrap();
            });
            let flops = 2 * size[0] * size[1] * COUNT * 64 * GROUPS;
            let rate = flops as f64 / taken.as_secs_f64() / 1e9;
            println!("{size:?} sums, operands from {from}: {rate:.1} GFLOP/s");
        }
    }
    let [from, to] = [0; 2].map(|_| device.alloc("copied", [1 << 12; 2], "test").unwrap());
    let taken = time(&mut device, |device| copy(device, from, to).unwrap());
    println!("a copy of 64 MiB: {:.1} GB/s read and written", 0.134 / taken.as_secs_f64());
}

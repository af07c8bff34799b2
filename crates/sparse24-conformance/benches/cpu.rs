//! The operations of the CPU backend at the shapes of a training step of a small GPT-2: 4 layers,
//! 4 heads, d_model 128, d_ff 512, sequence length 64, batch size 12, vocabulary 65. Each is
//! checked before it is timed. The last line sums the operations of a step. Set the number of
//! threads with `RAYON_NUM_THREADS`; an argument selects rows by a part of their name.

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use sparse24_conformance::{Draw, Values, check, prepare};
use sparse24_train::backend::{Arithmetic, Backend, cpu::CpuBackend};

const LAYERS: usize = 4;
const D: usize = 128;
const FF: usize = 512;
const T: usize = 64;
const B: usize = 12;
const V: usize = 65;
const P: usize = B * T;

const NO: [bool; 4] = [false; 4];
const FIRST: [bool; 4] = [true, false, false, false];
const ALL: Range<usize> = 0..usize::MAX;

/// Name, operation of the suite, sizes, options, operations of its work, calls per step.
type Row = (String, &'static str, [usize; 4], [bool; 4], Range<usize>, usize);

fn rows() -> Vec<Row> {
    let row = |name: &str, operation, sizes, options, calls| -> Row {
        (name.to_owned(), operation, sizes, options, ALL, calls)
    };
    let mut rows = Vec::new();
    let weights = [("qkv", D, 3 * D), ("out", D, D), ("up", D, FF), ("down", FF, D)];
    for (name, q, r) in weights {
        for (pass, operation) in
            [("forward", "linear_forward"), ("dgrad", "linear_dgrad"), ("wgrad", "linear_wgrad")]
        {
            rows.push(row(&format!("{name} {pass}"), operation, [P, q, r, 1], NO, LAYERS));
        }
    }
    let attended = ([T, D / 4, T, 4], [true, false, false, true]);
    rows.extend([
        row("head and loss", "head_loss", [P, D, V, 1], FIRST, 1),
        row("norm forward", "norm_forward", [P, 1, D, 1], FIRST, 2 * LAYERS + 1),
        row("norm backward", "norm_backward", [P, 1, D, 1], NO, 2 * LAYERS + 1),
        row("gelu forward", "activation_forward", [P, 1, FF, 0], NO, LAYERS),
        row("gelu backward", "activation_backward", [P, 1, FF, 0], NO, LAYERS),
        row("attention forward", "attention_forward", attended.0, attended.1, LAYERS),
        row("attention backward", "attention_backward", attended.0, attended.1, LAYERS),
        row("embed forward", "embed_forward", [T, D, V, B], FIRST, 1),
        row("embed backward", "embed_backward", [T, D, V, B], FIRST, 1),
    ]);
    for (name, q, r) in weights {
        let mut step = |what: &str, options, ops, calls| {
            rows.push((format!("{what} {name}"), "optimizer", [1, q, r, 1], options, ops, calls));
        };
        step("gradient norm", FIRST, 0..1, LAYERS);
        step("adamw", FIRST, 1..2, LAYERS);
        // Instead of the step without masked decay.
        step("(adamw with masked decay)", [true, false, true, false], 1..2, 0);
    }
    rows
}

fn main() {
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with("--"));
    let filter = filter.unwrap_or_default();
    println!("\nshortest times, {} threads", rayon::current_num_threads());
    let mut sum = Duration::ZERO;
    for (name, operation, sizes, options, ops, calls) in rows() {
        if !name.contains(&filter) {
            continue;
        }
        let draw = Draw { sizes, batch: B, options, values: Values::Plain, seed: 1 };
        let mut cpu = CpuBackend::new(Arithmetic::F32);
        check(operation, &mut cpu, &draw);
        let work = prepare(operation, &mut cpu, &draw).expect("memory suffices");
        let all = &work[0].ops;
        let ops = &all[ops.start..ops.end.min(all.len())];
        let (start, mut shortest) = (Instant::now(), Duration::MAX);
        while start.elapsed() < Duration::from_millis(600) {
            let start = Instant::now();
            cpu.sequence(ops).expect("it was checked");
            shortest = shortest.min(start.elapsed());
        }
        println!("{name:32} {:8.1} us x {calls}", shortest.as_secs_f64() * 1e6);
        sum += shortest * calls as u32;
    }
    println!("a step {:.2} ms", sum.as_secs_f64() * 1e3);
}

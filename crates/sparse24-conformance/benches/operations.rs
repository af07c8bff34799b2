//! The operations of a training step of a GPT-2, dense, on the CPU or on a wgpu adapter.
//!
//! ```text
//! cargo bench -p sparse24-conformance --bench operations -- \
//!     [cpu|wgpu] [characters|124m|square] [ROW]
//! ```
//!
//! `characters` has 4 layers, 4 heads, d_model 128, sequence length 64, batch size 12 and
//! vocabulary 65; `124m` is GPT-2 124M with batch size 8; `square` has only products, of 4096 rows,
//! columns and terms. ROW selects rows by a part of their name. The loss of the head is what its
//! row takes beside its three products. Every operation is checked before it is timed, with at most
//! 264 tokens and 520 classes. The last lines sum the products and all operations of a step.
//! `RAYON_NUM_THREADS` is the number of the CPU's threads.

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use sparse24_backend::{
    Arithmetic, Backend, BackendSettings, DType, Launches, Op, Region, Tensor, cpu::CpuBackend,
    wgpu::WgpuBackend,
};
use sparse24_conformance::{Draw, Values, check, prepare};

#[derive(Clone, Copy)]
struct Model {
    layers: usize,
    heads: usize,
    d: usize,
    t: usize,
    batch: usize,
    v: usize,
}

const CHARACTERS: Model = Model { layers: 4, heads: 4, d: 128, t: 64, batch: 12, v: 65 };
const GPT2_124M: Model = Model { layers: 12, heads: 12, d: 768, t: 1024, batch: 8, v: 50304 };

/// Products alone, with as many rows as columns and terms.
const SQUARE: Model = Model { layers: 0, heads: 1, d: 4096, t: 4096, batch: 1, v: 0 };

const HEAD: &str = "head";
const HEAD_AND_LOSS: &str = "head and loss";
const NO: [bool; 4] = [false; 4];
const FIRST: [bool; 4] = [true, false, false, false];
const ALL: Range<usize> = 0..usize::MAX;

struct Row {
    name: String,
    operation: &'static str,
    sizes: [usize; 4],
    options: [bool; 4],
    /// Those operations of the case that are timed.
    ops: Range<usize>,
    /// Per step.
    calls: usize,
    /// Multiplications and additions of a product; else 0.
    flops: usize,
}

fn rows(model: Model) -> Vec<Row> {
    let Model { layers, heads, d, t, batch, v } = model;
    let (p, ff) = (t * batch, 4 * d);
    let row = |name: &str, operation, sizes, options, calls| Row {
        name: name.to_owned(),
        operation,
        sizes,
        options,
        ops: ALL,
        calls,
        flops: 0,
    };
    let products = |name: &str, [p, q, r]: [usize; 3], calls| {
        let passes =
            [("forward", "linear_forward"), ("dgrad", "linear_dgrad"), ("wgrad", "linear_wgrad")];
        passes.map(|(pass, operation)| Row {
            flops: 2 * p * q * r,
            ..row(&format!("{name} {pass}"), operation, [p, q, r, 1], NO, calls)
        })
    };
    if layers == 0 {
        return products("square", [p, d, d], 1).into();
    }
    let weights = [("qkv", d, 3 * d), ("out", d, d), ("up", d, ff), ("down", ff, d)];
    let mut rows: Vec<Row> =
        weights.iter().flat_map(|&(name, q, r)| products(name, [p, q, r], layers)).collect();
    // Two parts, for the sake of the host's memory.
    rows.extend(products(HEAD, [p.div_ceil(2), d, v], 2));
    let attended = ([t, d / heads, t, heads], [true, false, false, true]);
    rows.push(row(HEAD_AND_LOSS, "head_loss", [p, d, v, 1], FIRST, 1));
    rows.extend([
        row("norm forward", "norm_forward", [p, 1, d, 1], FIRST, 2 * layers + 1),
        row("norm backward", "norm_backward", [p, 1, d, 1], NO, 2 * layers + 1),
        row("gelu forward", "activation_forward", [p, 1, ff, 0], NO, layers),
        row("gelu backward", "activation_backward", [p, 1, ff, 0], NO, layers),
        row("attention forward", "attention_forward", attended.0, attended.1, layers),
        row("attention backward", "attention_backward", attended.0, attended.1, layers),
        row("embed forward", "embed_forward", [t, d, v, batch], FIRST, 1),
        row("embed backward", "embed_backward", [t, d, v, batch], FIRST, 1),
    ]);
    let mut weights = weights.map(|(name, q, r)| (name, q, r, layers)).to_vec();
    weights.push(("embedding", d, v, 1));
    for (name, q, r, calls) in weights {
        let mut step = |what: &str, options, ops, calls| {
            let name = format!("{what} {name}");
            rows.push(Row { ops, ..row(&name, "optimizer", [1, q, r, 1], options, calls) });
        };
        step("gradient norm", FIRST, 0..1, calls);
        step("adamw", FIRST, 1..2, calls);
        // Instead of the step without masked decay.
        step("(adamw with masked decay)", [true, false, true, false], 1..2, 0);
    }
    rows
}

fn open(name: &str) -> Box<dyn Backend> {
    if name == "cpu" {
        return Box::new(CpuBackend::new(Arithmetic::F32));
    }
    let settings = BackendSettings {
        arithmetic: Arithmetic::F32,
        launches: Launches::Eager,
        ..BackendSettings::default()
    };
    Box::new(WgpuBackend::open(settings).expect("an adapter"))
}

/// Does the work that is queued, too.
fn time(backend: &mut dyn Backend, ops: &[Op<'_>], times: u32, waited: Tensor) -> Duration {
    let start = Instant::now();
    for _ in 0..times {
        backend.sequence(ops).expect("it was checked");
    }
    backend.download(waited).expect("the work succeeds");
    start.elapsed() / times
}

fn main() {
    let mut arguments: Vec<String> =
        std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    let mut chosen = |names: &[&str]| {
        let at = arguments.iter().position(|argument| names.contains(&&**argument));
        at.map_or(names[0].to_owned(), |at| arguments.remove(at))
    };
    let (device, model) = (chosen(&["cpu", "wgpu"]), chosen(&["characters", "124m", "square"]));
    let filter = arguments.pop().unwrap_or_default();
    let model = match &*model {
        "124m" => GPT2_124M,
        "square" => SQUARE,
        _ => CHARACTERS,
    };
    println!("\n{}; shortest times", open(&device).device().description);
    let (mut sums, mut head) = ([Duration::ZERO; 2], Duration::ZERO);
    for Row { name, operation, sizes, options, ops, calls, flops } in rows(model) {
        if !name.contains(&filter) {
            continue;
        }
        let draw = |sizes, batch| Draw { sizes, batch, options, values: Values::Plain, seed: 1 };
        let mut backend = open(&device);
        let [p, q, r, s] = sizes;
        check(operation, &mut *backend, &draw([p.min(264), q, r.min(520), s], 2));
        let work = prepare(operation, &mut *backend, &draw(sizes, model.batch));
        let all = &work.expect("memory suffices")[0].ops;
        let ops = &all[ops.start..ops.end.min(all.len())];
        let waited = backend.alloc("waited", [1, 1], DType::F32, Region::Scratch).expect("a word");
        let (start, first) = (Instant::now(), time(&mut *backend, ops, 1, waited));
        let times = (0.02 / first.as_secs_f64()).ceil() as u32;
        let mut shortest = Duration::MAX;
        while start.elapsed() < Duration::from_millis(600) {
            shortest = shortest.min(time(&mut *backend, ops, times, waited));
        }
        let rate = match flops {
            0 => String::new(),
            flops => format!("  {:8.2} TFLOP/s", flops as f64 / shortest.as_secs_f64() / 1e12),
        };
        println!("{name:32} {:9.1} us x {calls:2}{rate}", shortest.as_secs_f64() * 1e6);
        if name.starts_with(HEAD) && flops > 0 {
            head += shortest * calls as u32;
        }
        let beside = if name == HEAD_AND_LOSS { head } else { Duration::ZERO };
        sums[usize::from(flops == 0)] += shortest.saturating_sub(beside) * calls as u32;
    }
    let [products, others] = sums.map(|sum| sum.as_secs_f64() * 1e3);
    let all = products + others;
    println!("products {products:.2} ms of a step of {all:.2} ms: {:.3}", products / all);
}

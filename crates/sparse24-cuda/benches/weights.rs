//! What is done to weights, against the bytes it must move: mask search, compression both ways, the gradient norm and the optimizer step.
//!
//! Every result is verified before it is timed. A timing is that of some launches in a row, each on other buffers than the one before, more
//! than the L2 holds in all. The floor is bytes at [`COPY`]; a copy of as many bytes stands beside it. Launches are queued one by one, and recorded
//! once and replayed, as a training step is: goals are held against the latter.

use half::bf16;
use ndarray::{Array2, Zip};
use sparse24_core::{
    Mask, MaskKind,
    compressed::Compressed24,
    philox::{Philox4x32, uniform},
    prune::ValueMap,
};
use sparse24_cpu as cpu;
use sparse24_cuda::{
    Device, Error, Matrix, Settings, StepState,
    adamw::{self, AdamW, Health, MaskedDecay, Parameter, Parameters},
    compressed::Compressed,
    layout::to_fragments,
    prune, search,
};

/// Bytes a second that a copy on an H200 reads and writes.
const COPY: f64 = 4.1e12;
/// Bytes that the buffers of an operation take in all, at least: several times the L2.
const ROTATED: usize = 400 << 20;
const TIMINGS: usize = 40;
/// Of a timing, at least: its two events take as long as a small kernel.
const LAUNCHES: usize = 16;
const SHAPES: [[usize; 2]; 5] = [[16384, 4096], [5120, 1280], [6400, 1600], [3072, 768], [768, 3072]];

fn main() -> Result<(), Error> {
    let mut device = Device::open(&Settings::default())?;
    println!("{}; medians of {TIMINGS} timings of {LAUNCHES} launches or more; floor: bytes / {:.1} TB/s", device.name(), COPY / 1e12);
    println!("{:<34} {:>44} | {:>44}", "", "queued: median us, p10, p90, x floor, x copy", "replayed");
    for shape in SHAPES {
        weights(&mut device, shape)?;
        device.reset()?;
        optimizer(&mut device, &format!("{}x{}", shape[0], shape[1]), &[(shape, true)])?;
        device.reset()?;
    }
    optimizer(&mut device, "of GPT-2 124M", &gpt2(12, 768))?;
    Ok(())
}

fn gaussian(shape: [usize; 2], seed: u64) -> Array2<f32> {
    let mut x = Array2::zeros(shape);
    Zip::indexed(&mut x).par_for_each(|(row, column), x| {
        let words = Philox4x32::new(seed).block([row as u32, column as u32, 0, 0]);
        *x = words.into_iter().map(|word| uniform(word) - 0.5).sum::<f32>() * 1.7;
    });
    x
}

/// Searches and compressions of matrices of one shape.
fn weights(device: &mut Device, shape: [usize; 2]) -> Result<(), Error> {
    struct Buffers {
        w: Matrix<f32>,
        narrow: Matrix<bf16>,
        tiles: Matrix<u16>,
        forward: Compressed,
        dgrad: Compressed,
    }
    let ([r, q], elements) = (shape, shape[0] * shape[1]);
    let w = gaussian(shape, 1);
    let narrow = w.mapv(bf16::from_f32);
    let mut buffers = Vec::new();
    for _ in 0..(ROTATED / (4 * elements)).max(2) {
        let of = Buffers {
            w: device.alloc("w", shape)?,
            narrow: device.alloc("w", shape)?,
            tiles: device.alloc("mask", [r / 4, q / 4])?,
            forward: Compressed::alloc(device, "forward", [r, q])?,
            dgrad: Compressed::alloc(device, "dgrad", [q, r])?,
        };
        device.upload(of.w, w.as_slice().expect("row-major"))?;
        device.upload(of.narrow, narrow.as_slice().expect("row-major"))?;
        buffers.push(of);
    }
    let pruned = |of: &Buffers| prune::Pruned { w: of.w, tiles: of.tiles, map: ValueMap::Identity };
    let first = &buffers[0];
    let mut mask = Mask::empty(r, q).expect("tiled");
    for kind in [MaskKind::RowWise, MaskKind::ColumnWise, MaskKind::Transposable] {
        cpu::search::mask_search(w.view(), kind, &mut mask).expect("tiled");
        search::mask_search(device, first.w, kind, first.tiles)?;
        assert!(device.download(first.tiles)? == mask.tiles(), "{kind}");
    }
    let (mut forward, mut dgrad) = (Compressed24::zeros(r, q).expect("grouped"), Compressed24::zeros(q, r).expect("grouped"));
    cpu::prune::compress_weight(w.view(), &mask, ValueMap::Identity, &mut forward, &mut dgrad).expect("fits");
    prune::compress_weight(device, &pruned(first), first.forward, first.dgrad)?;
    assert!(first.forward.download(device)? == to_fragments(&forward) && first.dgrad.download(device)? == to_fragments(&dgrad));

    let mut row = |name: &str, bytes: usize, run: &dyn Fn(&mut Device, &Buffers) -> Result<(), Error>| {
        report(device, &format!("{name} {r}x{q}"), bytes, &buffers, run)
    };
    let tiles = elements / 8;
    row("mask_search_f32", 4 * elements + tiles, &|device, of| search::mask_search(device, of.w, MaskKind::Transposable, of.tiles))?;
    row("mask_search_f32 row-wise", 4 * elements + tiles, &|device, of| search::mask_search(device, of.w, MaskKind::RowWise, of.tiles))?;
    row("mask_search_bf16", 2 * elements + tiles, &|device, of| search::mask_search(device, of.narrow, MaskKind::Transposable, of.tiles))?;
    row("compress_forward", 4 * elements + tiles + 9 * elements / 8, &|device, of| {
        prune::compress_forward(device, &pruned(of), of.forward)
    })?;
    row("compress_weight", 4 * elements + tiles + 9 * elements / 4, &|device, of| {
        prune::compress_weight(device, &pruned(of), of.forward, of.dgrad)
    })
}

/// The tensors of GPT-2 without biases: shapes, and whether they have a mask.
fn gpt2(layers: usize, width: usize) -> Vec<([usize; 2], bool)> {
    let layer = [([1, width], false), ([3 * width, width], false), ([width, width], false), ([1, width], false)];
    let feed_forward = [([4 * width, width], true), ([width, 4 * width], true)];
    let embeddings = [([50304, width], false), ([1024, width], false), ([1, width], false)];
    embeddings.into_iter().chain((0..layers).flat_map(|_| layer.into_iter().chain(feed_forward))).collect()
}

/// Norm and step over a table of tensors, each with a bf16 copy.
fn optimizer(device: &mut Device, name: &str, tensors: &[([usize; 2], bool)]) -> Result<(), Error> {
    let elements: usize = tensors.iter().map(|(shape, _)| shape[0] * shape[1]).sum();
    let masked: usize = tensors.iter().map(|&(shape, masked)| if masked { shape[0] * shape[1] } else { 0 }).sum();
    let rule = AdamW { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, clip: 1.0, decay: MaskedDecay::OnGradients(6e-5) };
    let state = StepState { learning_rate: 1e-4, bias_correction1: 0.1, bias_correction2: 0.05, ..StepState::default() };
    device.set_step(&state)?;
    let mut buffers = Vec::new();
    for _ in 0..(ROTATED / (4 * elements)).max(2) {
        let mut table = Vec::new();
        for &(shape, masked) in tensors {
            let [w, g, m, v] = [(); 4].map(|()| device.alloc::<f32>("tensor", shape));
            let tiles = if masked { Some(device.alloc::<u16>("mask", [shape[0] / 4, shape[1] / 4])?) } else { None };
            let shadow = Some(device.alloc::<bf16>("bf16 copy", shape)?);
            table.push(Parameter { w: w?, g: g?, m: m?, v: v?, tiles, shadow, weight_decay: 0.1 });
        }
        buffers.push((Parameters::new(device, &table)?, device.alloc::<u32>("health", [1, Health::WORDS])?, table));
    }
    // The first tensor of the first table stands for all: the tests verify the rest.
    let (table, health, first) = (&buffers[0].0, buffers[0].1, buffers[0].2[0]);
    let (mut w, g) = (gaussian(first.w.shape(), 3), gaussian(first.w.shape(), 4));
    for (_, _, tensors) in &buffers {
        device.upload(tensors[0].w, w.as_slice().expect("row-major"))?;
        device.upload(tensors[0].g, g.as_slice().expect("row-major"))?;
    }
    adamw::grad_norm(device, table, health)?;
    adamw::adamw_step(device, table, &rule, health)?;
    let norm = Health::of_words(device.download(health)?.try_into().expect("two words")).grad_norm;
    let step = cpu::adamw::AdamW {
        learning_rate: state.learning_rate,
        beta1: rule.beta1,
        beta2: rule.beta2,
        epsilon: rule.epsilon,
        weight_decay: 0.1,
        bias_correction1: state.bias_correction1,
        bias_correction2: state.bias_correction2,
        gradient_scale: (rule.clip / (norm + 1e-6)).min(1.0),
    };
    let nothing = Mask::empty(w.nrows(), w.ncols()).ok().filter(|_| first.tiles.is_some());
    let decay = nothing.as_ref().map_or(cpu::adamw::Decay::None, |mask| cpu::adamw::Decay::OnGradients { lambda: 6e-5, mask });
    let (mut m, mut v) = (vec![0.0; w.len()], vec![0.0; w.len()]);
    let columns = w.ncols();
    let (w, g) = (w.as_slice_mut().expect("row-major"), g.as_slice().expect("row-major"));
    cpu::adamw::adamw_step(w, g, &mut m, &mut v, columns, &step, decay).expect("fits");
    assert!(device.download(first.w)? == w && device.download(first.v)? == v, "the step is not the CPU's");

    report(device, &format!("grad_norm {name}"), 4 * elements, &buffers, &|device, (table, health, _)| {
        adamw::grad_norm(device, table, *health)
    })?;
    report(device, &format!("adamw_step {name}"), 30 * elements + masked / 8, &buffers, &|device, (table, health, _)| {
        adamw::adamw_step(device, table, &rule, *health)
    })
}

/// Times `run` on each of the buffers in turn and prints a line.
fn report<B>(
    device: &mut Device,
    name: &str,
    bytes: usize,
    buffers: &[B],
    run: &dyn Fn(&mut Device, &B) -> Result<(), Error>,
) -> Result<(), Error> {
    let copied = {
        let halves = device.alloc::<u8>("copy", [2 * (ROTATED / bytes).max(2), bytes / 2])?;
        let sides = |at: usize| [0, 1].map(|side| halves.rows(2 * at + side..2 * at + side + 1));
        let pairs: Vec<[Matrix<u8>; 2]> = (0..halves.shape()[0] / 2).map(sides).collect();
        timings(device, &pairs, &|device, &[from, to]: &[Matrix<u8>; 2]| device.copy(from, to))?
    };
    let times = timings(device, buffers, run)?;
    let floor = bytes as f64 / COPY * 1e6;
    let [queued, replayed] = [0, 1].map(|way| {
        let times = &times[way];
        let [low, median, high] = [times.len() / 10, times.len() / 2, times.len() * 9 / 10].map(|at| f64::from(times[at]));
        let copy = f64::from(copied[way][copied[way].len() / 2]);
        format!("{median:>10.2} {low:>8.2} {high:>8.2} {:>7.2} {:>7.2}", median / floor, median / copy)
    });
    println!("{name:<34} {queued} | {replayed}");
    Ok(())
}

/// Microseconds of one launch, ascending: queued, and replayed.
fn timings<B>(device: &mut Device, buffers: &[B], run: &dyn Fn(&mut Device, &B) -> Result<(), Error>) -> Result<[Vec<f32>; 2], Error> {
    let launches = LAUNCHES.next_multiple_of(buffers.len());
    let all = |device: &mut Device| (0..launches).try_for_each(|at| run(device, &buffers[at % buffers.len()]));
    all(device)?;
    device.start_recording()?;
    let recorded = all(device);
    let recording = device.stop_recording()?;
    recorded?;
    let mut timed = |work: &dyn Fn(&mut Device) -> Result<(), Error>| -> Result<Vec<f32>, Error> {
        device.time(work)?;
        let mut times = (0..TIMINGS).map(|_| Ok(device.time(work)? * 1e3 / launches as f32)).collect::<Result<Vec<_>, Error>>()?;
        times.sort_by(f32::total_cmp);
        Ok(times)
    };
    Ok([timed(&all)?, timed(&|device| device.replay(&recording))?])
}

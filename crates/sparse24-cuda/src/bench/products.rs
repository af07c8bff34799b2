//! The sparse products of a layer, compared with cuSPARSELt and cuBLASLt.
//!
//! A product is timed with the fastest of its plans, and with the fastest of those that every GPU
//! has; so is the dense product by the loop of the latter. TFLOP/s count the dense product, 2 m n
//! k; the floor assumes twice the dense rate. Sampled elements are compared with f64.

use half::bf16;
use ndarray::Array2;
use sparse24_core::{
    MaskKind,
    compressed::Compressed24,
    op::{Accumulate, Activation},
    philox::{Philox4x32, uniform},
    search::mask_search,
};

use super::{
    Bench, Case, Prepared, Size, TOKENS, Work,
    check::Stop,
    input::{PANEL, panel, random, repeat, repeated},
    peer,
    report::PlanTime,
    timing::{Contestant, Effort, contest},
};
use crate::{
    Device, Error, Matrix, Result, Scalar, activation,
    compressed::Compressed,
    gemm::{Gemm, LinearForward, LinearWgrad},
    launch::{Grid, arguments},
    layout::{Fragments, to_fragments},
    spmm24::{Form, Plan, Straight, Transposed, plans, spmm24, spmm24_transposed},
};

/// Elements of a result that are checked.
const SAMPLES: u32 = 256;
/// Relative error of rounding to bf16.
const ROUNDED: f64 = 1.0 / 256.0;

/// Which plans are timed.
#[derive(Clone, Copy, PartialEq)]
enum Plans {
    /// The fastest one, and cuSPARSELt.
    Fastest,
    /// The fastest one for every GPU, and the fastest of all.
    Mma,
    /// The fastest one, which stores an activation too, and that product before the activation.
    Activated(Activation),
}

/// The sparse products of the layers of a size.
#[must_use]
pub fn products(size: &Size) -> Vec<Case> {
    use Form::{Straight, Transposed};
    let Some(d) = size.width() else { return Vec::new() };
    let p = TOKENS;
    let activated = |kernel, activation| {
        let entries: &[&str] = &["spmm24_transposed_", "spmm24_gather_transposed_"];
        (kernel, entries, Transposed, Some(Plans::Activated(activation)))
    };
    let kernels: [(&str, &[&str], _, Option<Plans>); 8] = [
        (
            "spmm24_transposed",
            &["spmm24_transposed_", "spmm24_gather_transposed"],
            Transposed,
            Some(Plans::Fastest),
        ),
        ("spmm24", &["spmm24_straight_", "spmm24_gather"], Straight, Some(Plans::Fastest)),
        (
            "spmm24_mma_transposed",
            &["spmm24_mma_transposed_", "spmm24_gather_transposed"],
            Transposed,
            Some(Plans::Mma),
        ),
        (
            "spmm24_mma_straight",
            &["spmm24_mma_straight_", "spmm24_gather"],
            Straight,
            Some(Plans::Mma),
        ),
        activated("spmm24_gelu", Activation::Gelu),
        activated("spmm24_relu", Activation::Relu),
        ("mma_peer_transposed", &["mma_peer_transposed"], Transposed, None),
        ("mma_peer_straight", &["mma_peer_straight"], Straight, None),
    ];
    // The up layer's forward product has the shape of the down layer's dgrad, and vice versa.
    let cases = kernels.into_iter().flat_map(|(kernel, entries, form, plans)| {
        let shapes = match form {
            Transposed => [[4 * d, p, d], [d, p, 4 * d]],
            Straight => [[4 * d, d, p], [d, 4 * d, p]],
        };
        // Activations follow the up layer.
        let of_activated = matches!(plans, Some(Plans::Activated(_)));
        shapes.into_iter().take(if of_activated { 1 } else { 2 }).map(move |shape| {
            Case::new(kernel, entries, shape, move |bench, shape| match plans {
                Some(which) => sparse(bench, form, shape, which),
                None => mma_peer(bench, kernel, form, shape),
            })
        })
    });
    cases.collect()
}

/// Reads an element of a result.
type Read<'a> = dyn FnMut([usize; 2]) -> Result<f64> + 'a;

/// Checks sampled elements against f64 sums of k products `term`; `rounded` is the relative error
/// of the final rounding.
///
/// An instruction adds at least eight exact products to a partial sum at once and truncates each of
/// these addends below 2^-23 of the largest. With split-K, a partial sum may start anywhere, so it
/// is at most twice the largest sum from the beginning. Hence k + k/8 addends are truncated, and a
/// few more where parts are added, each by at most 2^-22 of that sum. The terms' signs are random,
/// so the bound grows like the square root of k, and 64 missing terms exceed it.
fn sampled(
    what: &str,
    [m, n, k]: [usize; 3],
    rounded: f64,
    term: impl Fn([usize; 2], usize) -> f64,
    read: &mut Read<'_>,
) -> Result<(), Stop> {
    let philox = Philox4x32::new(3);
    for index in 0..SAMPLES {
        let words = philox.block([index, 0, 0, 0]);
        // The first, the last, and random ones.
        let at = match index {
            0 => [0, 0],
            1 => [m - 1, n - 1],
            _ => [(uniform(words[0]) * m as f32) as usize, (uniform(words[1]) * n as f32) as usize],
        };
        let (exact, largest) = (0..k)
            .map(|i| term(at, i))
            .fold((0.0, 0.0_f64), |(sum, largest), x| (sum + x, largest.max((sum + x).abs())));
        let bound = (k + k / 8 + 16) as f64 * 2_f64.powi(-22) * largest + rounded * exact.abs();
        let found = read(at)?;
        let within = (found - exact).abs() <= bound;
        if !within {
            let [row, column] = at;
            return Err(Stop::Wrong(format!(
                "{what}, row {row}, column {column}: found {found}, expected {exact} within \
                 {bound:.3e}"
            )));
        }
    }
    Ok(())
}

fn element<T: Scalar + Into<f32>>(
    device: &mut Device,
    of: Matrix<T>,
    [row, column]: [usize; 2],
) -> Result<f64> {
    Ok(f64::from(device.download(of.rows(row..row + 1).columns(column..column + 1))?[0].into()))
}

/// A set of operands of a sparse product.
#[derive(Clone, Copy)]
enum Set {
    Transposed(Transposed),
    Straight(Straight),
}

impl Set {
    fn launch(&self, device: &mut Device, plan: Plan) -> Result {
        match self {
            Self::Transposed(operands) => spmm24_transposed(device, operands, plan),
            Self::Straight(operands) => spmm24(device, operands, plan),
        }
    }

    const fn b(&self) -> Matrix<bf16> {
        match self {
            Self::Transposed(operands) => operands.b,
            Self::Straight(operands) => operands.b,
        }
    }

    /// An element of D.
    fn read(&self, device: &mut Device, [row, column]: [usize; 2]) -> Result<f64> {
        match self {
            Self::Transposed(operands) => element(device, operands.d, [column, row]),
            Self::Straight(operands) => element(device, operands.d, [row, column]),
        }
    }
}

fn sparse(
    bench: &mut Bench,
    form: Form,
    shape @ [m, n, k]: [usize; 3],
    which: Plans,
) -> Result<Prepared, Stop> {
    // A panel of A, 2:4 along its rows; A repeats its rows.
    let dense = random([PANEL.min(m), k], 1).mapv(bf16::from_f32);
    let mask = mask_search(dense.view(), MaskKind::RowWise)?;
    let logical = Compressed24::encode(dense.view(), &mask)?;
    let pruned = logical.decode();
    let Fragments { values, metadata } = to_fragments(&logical);
    let device = &mut bench.device;
    let a = Compressed::alloc(device, "a", [m, k])?;
    repeat(device, a.values, &blocks_of(a.values, values))?;
    repeat(device, a.metadata, &blocks_of(a.metadata, metadata))?;

    let offered = plans(device, form, shape)?;
    let of_every_gpu = |plan: &Plan| matches!(plan, Plan::Mma(_));
    let (mma, hopper): (Vec<Plan>, Vec<Plan>) = offered.iter().partition(|plan| of_every_gpu(plan));
    let most = offered.iter().map(|plan| plan.scratch()).max().unwrap_or(0);
    let scratch = device.alloc("scratch", [1, most])?;
    let (shape_of_b, shape_of_d, bytes_of_d, rounded) = match form {
        Form::Transposed => ([n, k], [n, m], 2, ROUNDED),
        Form::Straight => ([k, n], [m, n], 4, 0.0),
    };
    let of_b = panel(shape_of_b[1], 2);
    let results = if let Plans::Activated(_) = which { 2 } else { 1 };
    let bytes = m * k * 9 / 8 + 2 * n * k + m * n * bytes_of_d * results;
    let sets = bench.sets(bytes, |device| {
        let b = repeated(device, shape_of_b, &of_b)?;
        Ok(match form {
            Form::Transposed => {
                let d = device.alloc("d", shape_of_d)?;
                let activated = match which {
                    Plans::Activated(activation) => {
                        Some((activation, device.alloc("h", shape_of_d)?))
                    }
                    Plans::Fastest | Plans::Mma => None,
                };
                Set::Transposed(Transposed { a, b, bias: None, d, activated, scratch })
            }
            Form::Straight => {
                let d = device.alloc("d", shape_of_d)?;
                Set::Straight(Straight { a, b, d, accumulate: Accumulate::Overwrite, scratch })
            }
        })
    })?;
    let term = |[row, column]: [usize; 2], i: usize| {
        wide(&pruned, row, i) * operand(form, &of_b, column, i)
    };
    let device = &mut bench.device;
    for &plan in &offered {
        sets[0].launch(device, plan)?;
        sampled(&plan.to_string(), shape, rounded, term, &mut |at| sets[0].read(device, at))?;
    }
    let contestant = |name, plan: Plan| {
        let launch = move |device: &mut Device, set: &Set| set.launch(device, plan);
        Contestant::new(name, sets.clone(), launch)
    };
    let own = if which == Plans::Mma || hopper.is_empty() { &mma } else { &hopper };
    let (best, plans) = fastest(bench, own, &sets)?;
    let mut without = Vec::new();
    let mut contestants = vec![contestant("itself", best)];
    match which {
        Plans::Mma => {
            if !hopper.is_empty() {
                contestants.push(contestant("wgmma", fastest(bench, &hopper, &sets)?.0));
            }
        }
        Plans::Activated(activation) => {
            let launch = move |device: &mut Device, set: &Set| {
                let Set::Transposed(operands) = set else { unreachable!("activations follow D^T") };
                spmm24_transposed(device, &Transposed { activated: None, ..*operands }, best)?;
                let (_, h) = operands.activated.expect("of every set");
                activation::forward(device, activation, operands.d, h)
            };
            contestants.push(Contestant::new("two kernels", sets.clone(), launch));
        }
        Plans::Fastest => {
            let verified =
                |found: &mut Read<'_>| sampled("cuSPARSELt", shape, ROUNDED, term, found);
            match cusparselt(bench, form, shape, &pruned, &sets, verified) {
                Ok(contestant) => contestants.extend(contestant),
                Err(stop) => without.push(stop.of_peer("cuSPARSELt")?),
            }
        }
    }
    let work = Work { bytes: bytes as f64, flops: 2.0 * (m * n * k) as f64, speed: 2.0 };
    let verified = "256 elements, against sums in f64";
    if let Plans::Activated(_) = which {
        return Ok(Prepared { plans, ..Prepared::new(work, verified, contestants) });
    }
    let bs: Vec<_> = sets.iter().map(Set::b).collect();
    match cublaslt(bench, form, shape, &bs, &of_b) {
        Ok(contestant) => contestants.push(contestant),
        // The head of the report says so once.
        Err(Stop::Error(Error::Library { .. })) => {}
        Err(stop) => without.push(stop.of_peer("cuBLASLt")?),
    }
    Ok(Prepared { plans, without, ..Prepared::new(work, verified, contestants) })
}

/// Blocks as rows, like those of a compressed matrix.
fn blocks_of<T: Scalar>(like: Matrix<T>, elements: Vec<T>) -> Array2<T> {
    let columns = like.shape()[1];
    Array2::from_shape_vec((elements.len() / columns, columns), elements).expect("whole blocks")
}

/// The plan with the shortest median, and the medians of all.
fn fastest(bench: &mut Bench, offered: &[Plan], sets: &[Set]) -> Result<(Plan, Vec<PlanTime>)> {
    let contestant = |&plan: &Plan| {
        let launch = move |device: &mut Device, set: &Set| set.launch(device, plan);
        Contestant::new(&plan.to_string(), sets.to_vec(), launch)
    };
    let mut contestants: Vec<Contestant> = offered.iter().map(contestant).collect();
    let times = contest(&mut bench.device, &mut contestants, Effort::Quick, || ())?;
    let (best, _) = offered
        .iter()
        .zip(&times)
        .min_by(|(_, a), (_, b)| a.median.total_cmp(&b.median))
        .expect("a plan");
    let times = contestants.into_iter().zip(&times);
    Ok((*best, times.map(|(plan, time)| PlanTime { plan: plan.name, us: time.median }).collect()))
}

/// cuSPARSELt with the same operands, if it is installed and its result is correct.
fn cusparselt(
    bench: &mut Bench,
    form: Form,
    shape @ [m, n, k]: [usize; 3],
    pruned: &Array2<bf16>,
    sets: &[Set],
    verified: impl Fn(&mut Read<'_>) -> Result<(), Stop>,
) -> Result<Option<Contestant>, Stop> {
    let Some(library) = bench.cusparselt.clone() else { return Ok(None) };
    let device = &mut bench.device;
    let a = repeated(device, [m, k], pruned)?;
    let shape_of_d = if form == Form::Transposed { [n, m] } else { [m, n] };
    let pairs: Vec<[Matrix<bf16>; 2]> = sets
        .iter()
        .map(|set| Ok([set.b(), device.alloc("d of cuSPARSELt", shape_of_d)?]))
        .collect::<Result<_>>()?;
    let operands = peer::Operands { form, shape, a, sets: &pairs };
    let mut contestant = library.product(device, &operands).map_err(Stop::Wrong)?;
    (contestant.launch)(device, 0)?;
    verified(&mut |[row, column]| {
        let at = if form == Form::Transposed { [column, row] } else { [row, column] };
        element(device, pairs[0][1], at)
    })?;
    Ok(Some(contestant))
}

/// The dense product with unpruned weights, if its result is correct.
fn cublaslt(
    bench: &mut Bench,
    form: Form,
    shape @ [m, n, k]: [usize; 3],
    bs: &[Matrix<bf16>],
    of_b: &Array2<bf16>,
) -> Result<Contestant, Stop> {
    const D: &str = "d of cuBLASLt";
    let mut gemm = bench.gemm()?;
    let device = &mut bench.device;
    let shape_of_a = if form == Form::Transposed { [m, k] } else { [k, m] };
    let of_a = panel(shape_of_a[1], 1);
    let a = repeated(device, shape_of_a, &of_a)?;
    let set = |&x: &Matrix<bf16>| {
        Ok(match form {
            Form::Transposed => {
                let z = device.alloc(D, [n, m])?;
                Dense::Forward(LinearForward { x, weight: a, bias: None, z })
            }
            Form::Straight => {
                let dw = device.alloc(D, [m, n])?;
                Dense::Wgrad(LinearWgrad { dz: a, x, dw, accumulate: Accumulate::Overwrite })
            }
        })
    };
    let sets: Vec<Dense> = bs.iter().map(set).collect::<Result<_>>()?;
    sets[0].launch(device, &mut gemm)?;
    let term = |[row, column]: [usize; 2], i: usize| {
        operand(form, &of_a, row, i) * operand(form, of_b, column, i)
    };
    let (first, rounded) = (sets[0], if form == Form::Transposed { ROUNDED } else { 0.0 });
    sampled("cuBLASLt", shape, rounded, term, &mut |at| first.read(device, at))?;
    bench.plans = gemm.plans();
    let launch = move |device: &mut Device, set: &Dense| set.launch(device, &mut gemm);
    Ok(Contestant::new("cuBLASLt", sets, launch))
}

/// The dense product by `kernel`, beside cuBLASLt.
fn mma_peer(
    bench: &mut Bench,
    kernel: &'static str,
    form: Form,
    shape @ [m, n, k]: [usize; 3],
) -> Result<Prepared, Stop> {
    const TILE: [usize; 2] = [256, 128];
    let (shape_of_a, shape_of_b, shape_of_d, bytes_of_d) = match form {
        Form::Transposed => ([m, k], [n, k], [n, m], 2),
        Form::Straight => ([k, m], [k, n], [m, n], 4),
    };
    let [of_a, of_b] = [(shape_of_a, 1), (shape_of_b, 2)].map(|(of, seed)| panel(of[1], seed));
    let device = &mut bench.device;
    let a = repeated(device, shape_of_a, &of_a)?;
    let bytes = 2 * (m + n) * k + m * n * bytes_of_d;
    let sets = bench.sets(bytes, |device| {
        // Two columns of bf16 are as large as one of f32.
        let columns = shape_of_d[1] * bytes_of_d / 2;
        let d: Matrix<bf16> = device.alloc("d", [shape_of_d[0], columns])?;
        Ok((repeated(device, shape_of_b, &of_b)?, d))
    })?;
    let [rows, across] = [m.div_ceil(TILE[0]), n.div_ceil(TILE[1])].map(|tiles| tiles as u32);
    let device = &mut bench.device;
    let grid = Grid {
        blocks: [device.multiprocessors() as u32, 1, 1],
        threads: 256,
        shared: 4 * 128 * TILE.iter().sum::<usize>() as u32,
    };
    let launch = move |device: &mut Device, &(b, d): &(Matrix<bf16>, Matrix<bf16>)| {
        let [m, n, k] = shape.map(|size| size as u32);
        let strides = [shape_of_a, shape_of_b, shape_of_d].map(|[_, stride]| stride as u64);
        let operands = arguments![a, strides[0], b, strides[1], d, strides[2], m, n, k];
        let schedule = arguments![rows, across, rows.min(16), rows * across, 1u32];
        let arguments = [&operands[..], &schedule].concat();
        device.launch(kernel, grid, &arguments)
    };
    launch(device, &sets[0])?;
    let (d, rounded) = (sets[0].1, if form == Form::Transposed { ROUNDED } else { 0.0 });
    let term = |[row, column]: [usize; 2], i: usize| {
        operand(form, &of_a, row, i) * operand(form, &of_b, column, i)
    };
    sampled(kernel, shape, rounded, term, &mut |[row, column]| match form {
        Form::Transposed => element(device, d, [column, row]),
        Form::Straight => {
            let halves =
                device.download(d.rows(row..row + 1).columns(2 * column..2 * column + 2))?;
            let [low, high] = [0, 1].map(|half: usize| u32::from(halves[half].to_bits()));
            Ok(f64::from(f32::from_bits(high << 16 | low)))
        }
    })?;
    let bs: Vec<_> = sets.iter().map(|&(b, _)| b).collect();
    let mut contestants = vec![Contestant::new("itself", sets, launch)];
    contestants.push(cublaslt(bench, form, shape, &bs, &of_b)?);
    let work = Work { bytes: bytes as f64, flops: 2.0 * (m * n * k) as f64, speed: 1.0 };
    Ok(Prepared::new(work, "256 elements, against sums in f64", contestants))
}

/// A set of operands of the dense product.
#[derive(Clone, Copy)]
enum Dense {
    Forward(LinearForward),
    Wgrad(LinearWgrad),
}

impl Dense {
    fn launch(&self, device: &mut Device, gemm: &mut Gemm) -> Result {
        match self {
            Self::Forward(op) => gemm.linear_forward(device, op),
            Self::Wgrad(op) => gemm.linear_wgrad(device, op),
        }
    }

    /// An element of D.
    fn read(&self, device: &mut Device, [row, column]: [usize; 2]) -> Result<f64> {
        match self {
            Self::Forward(op) => element(device, op.z, [column, row]),
            Self::Wgrad(op) => element(device, op.dw, [row, column]),
        }
    }
}

/// An element of an operand that is stored with k along its rows in the transposed form, and along
/// its columns in the other.
fn operand(form: Form, panel: &Array2<bf16>, at: usize, along: usize) -> f64 {
    match form {
        Form::Transposed => wide(panel, at, along),
        Form::Straight => wide(panel, along, at),
    }
}

/// An element of a matrix that repeats the rows of a panel.
fn wide(panel: &Array2<bf16>, row: usize, column: usize) -> f64 {
    f64::from(panel[[row % PANEL, column]].to_f32())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sum in f32, without the 64 terms from `left_out` on.
    fn found(
        term: &dyn Fn([usize; 2], usize) -> f64,
        at: [usize; 2],
        k: usize,
        left_out: Option<usize>,
    ) -> f64 {
        let kept = |i: &usize| left_out.is_none_or(|first| !(first..first + 64).contains(i));
        f64::from((0..k).filter(kept).fold(0.0_f32, |sum, i| sum + term(at, i) as f32))
    }

    #[test]
    fn missing_terms_are_noticed() {
        for k in [64, 768, 4096, 16_384] {
            let [a, b] = [1, 2].map(|seed| random([PANEL, k], seed));
            let random =
                |[i, j]: [usize; 2], k: usize| f64::from(a[[i % PANEL, k]] * b[[j % PANEL, k]]);
            // The rows of a panel repeat, and with them the terms of a sum along them.
            let repeating = |at: [usize; 2], k: usize| random(at, k % PANEL.min(a.ncols()));
            for (name, term) in [
                ("random", &random as &dyn Fn([usize; 2], usize) -> f64),
                ("repeating", &repeating),
            ] {
                let checked = |left_out, rounded| {
                    sampled(name, [300, 500, k], rounded, term, &mut |at| {
                        Ok(found(term, at, k, left_out))
                    })
                };
                for rounded in [0.0, ROUNDED] {
                    assert!(checked(None, rounded).is_ok(), "{name}, k = {k}");
                    for left_out in [0, k / 2 / 64 * 64, k - 64] {
                        assert!(
                            matches!(checked(Some(left_out), rounded), Err(Stop::Wrong(_))),
                            "{name}, k = {k}: 64 from {left_out} on"
                        );
                    }
                }
            }
        }
    }
}

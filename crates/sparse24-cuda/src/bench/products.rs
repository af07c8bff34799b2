//! Products of a layer: sparse ones compared with cuSPARSELt and cuBLASLt, and the dense ones of
//! the rest of the model.
//!
//! A sparse product is timed with the fastest of its plans. TFLOP/s count the dense product, 2 m n
//! k; the floor of a sparse product assumes twice the dense rate. Sampled elements are compared
//! with f64.

use half::bf16;
use ndarray::Array2;
use sparse24_core::{
    MaskKind,
    compressed::Compressed24,
    philox::{Philox4x32, uniform},
};
use sparse24_cpu as cpu;

use super::{
    Bench, Case, OVERWRITE, Prepared, Size, TOKENS, Work,
    check::Stop,
    input::{PANEL, panel, random, repeat, repeated},
    peer,
    report::PlanTime,
    timing::{Contestant, Effort, Launch, contest},
};
use crate::{
    Device, Error, Matrix,
    compressed::Compressed,
    gemm::{Gemm, LinearDgrad, LinearForward, LinearWgrad},
    layout::to_fragments,
    spmm24::{Form, Plan, Straight, Transposed, plans, spmm24, spmm24_transposed},
};

/// Elements of a result that are checked.
const SAMPLES: u32 = 256;
/// Relative error of rounding to bf16.
const ROUNDED: f64 = 1.0 / 256.0;
const VERIFIED: &str = "256 elements, against sums in f64";

/// Which plans are timed.
#[derive(Clone, Copy, PartialEq)]
enum Plans {
    /// The fastest one, and competitors.
    Fastest,
    /// The one for every GPU.
    Mma,
}

/// Which product of a linear layer.
#[derive(Clone, Copy, PartialEq)]
enum Linear {
    Forward,
    Dgrad,
    Wgrad,
}

pub(super) fn cases(size: &Size) -> Vec<Case> {
    let Some(d) = size.width() else { return Vec::new() };
    let (p, mut cases) = (TOKENS, Vec::new());
    let named = |[m, n, k]: [usize; 3]| format!("{m}x{n}x{k}");
    // The up layer's forward product has the shape of the down layer's dgrad, and vice versa.
    for (kernel, form, shape) in [
        ("spmm24_transposed", Form::Transposed, [4 * d, p, d]),
        ("spmm24_transposed", Form::Transposed, [d, p, 4 * d]),
        ("spmm24", Form::Straight, [4 * d, d, p]),
        ("spmm24", Form::Straight, [d, 4 * d, p]),
    ] {
        let entries: &[&str] = match form {
            Form::Transposed => &["spmm24_transposed_", "spmm24_gather_transposed"],
            Form::Straight => &["spmm24_straight_", "spmm24_gather"],
        };
        let prepare = Box::new(move |bench: &mut Bench| sparse(bench, form, shape, Plans::Fastest));
        cases.push(Case { kernel, shape: named(shape), entries, prepare });
    }
    for (kernel, entries, form, shape) in [
        ("spmm24_mma_transposed", &["spmm24_mma_transposed"], Form::Transposed, [4 * d, p, d]),
        ("spmm24_mma_straight", &["spmm24_mma_straight"], Form::Straight, [4 * d, d, p]),
    ] {
        let prepare = Box::new(move |bench: &mut Bench| sparse(bench, form, shape, Plans::Mma));
        cases.push(Case { kernel, shape: named(shape), entries, prepare });
    }
    for (kernel, product) in [
        ("linear_forward", Linear::Forward),
        ("linear_dgrad", Linear::Dgrad),
        ("linear_wgrad", Linear::Wgrad),
    ] {
        // Attention in and out, up, down, and a chunk of the head.
        for [p, q, r] in [[p, d, 3 * d], [p, d, d], [p, d, 4 * d], [p, 4 * d, d], [4096, d, 50304]]
        {
            let shape = match product {
                Linear::Forward => [p, r, q],
                Linear::Dgrad => [p, q, r],
                Linear::Wgrad => [r, q, p],
            };
            let prepare = Box::new(move |bench: &mut Bench| linear(bench, product, [p, q, r]));
            cases.push(Case { kernel, shape: named(shape), entries: &[], prepare });
        }
    }
    cases
}

/// Reads an element of a result.
type Read<'a> = dyn FnMut([usize; 2]) -> Result<f64, Error> + 'a;

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

fn element<T: crate::Scalar + Into<f32>>(
    device: &mut Device,
    of: Matrix<T>,
    [row, column]: [usize; 2],
) -> Result<f64, Error> {
    Ok(f64::from(device.download(of.rows(row..row + 1).columns(column..column + 1))?[0].into()))
}

/// A set of operands of a sparse product.
#[derive(Clone, Copy)]
enum Set {
    Transposed(Transposed),
    Straight(Straight),
}

impl Set {
    fn launch(&self, device: &mut Device, plan: Plan) -> Result<(), Error> {
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
    fn read(&self, device: &mut Device, [row, column]: [usize; 2]) -> Result<f64, Error> {
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
    let mut mask = sparse24_core::Mask::empty(dense.nrows(), k)?;
    cpu::search::mask_search(dense.view(), MaskKind::RowWise, &mut mask).expect("tiled");
    let logical = Compressed24::encode(dense.view(), &mask)?;
    let pruned = logical.decode();
    let fragments = to_fragments(&logical);
    let device = &mut bench.device;
    let a = Compressed::alloc(device, "a", [m, k])?;
    let blocks = |columns: usize, length: usize| (length / columns, columns);
    let values = Array2::from_shape_vec(
        blocks(a.values.shape()[1], fragments.values.len()),
        fragments.values,
    )
    .expect("blocks");
    let metadata = Array2::from_shape_vec(
        blocks(a.metadata.shape()[1], fragments.metadata.len()),
        fragments.metadata,
    )
    .expect("blocks");
    repeat(device, a.values, &values)?;
    repeat(device, a.metadata, &metadata)?;

    let offered = plans(device, form, shape, 16)?;
    let offered: Vec<Plan> = match which {
        Plans::Mma => vec![Plan::Mma],
        Plans::Fastest if offered.len() > 1 => {
            offered.into_iter().filter(|&plan| plan != Plan::Mma).collect()
        }
        Plans::Fastest => offered,
    };
    let most = offered.iter().map(|plan| plan.scratch()).max().unwrap_or(0);
    let scratch = device.alloc("scratch", [1, most])?;
    let shape_of_b = if form == Form::Transposed { [n, k] } else { [k, n] };
    let of_b = panel(shape_of_b[1], 2);
    let bytes = m * k * 9 / 8 + 2 * n * k + m * n * if form == Form::Transposed { 2 } else { 4 };
    let mut sets = Vec::new();
    for _ in 0..bench.sets(bytes) {
        let device = &mut bench.device;
        let b = repeated(device, shape_of_b, &of_b)?;
        sets.push(match form {
            Form::Transposed => Set::Transposed(Transposed {
                a,
                b,
                bias: None,
                d: device.alloc("d", [n, m])?,
                scratch,
            }),
            Form::Straight => Set::Straight(Straight {
                a,
                b,
                d: device.alloc("d", [m, n])?,
                accumulate: OVERWRITE,
                scratch,
            }),
        });
    }
    let term = |[row, column]: [usize; 2], i: usize| {
        let b = if form == Form::Transposed {
            of_b[[column % PANEL, i]]
        } else {
            of_b[[i % PANEL, column]]
        };
        f64::from(pruned[[row % PANEL, i]].to_f32()) * f64::from(b.to_f32())
    };
    let rounded = if form == Form::Transposed { ROUNDED } else { 0.0 };
    for &plan in &offered {
        sets[0].launch(&mut bench.device, plan)?;
        sampled(&plan.to_string(), shape, rounded, term, &mut |at| {
            sets[0].read(&mut bench.device, at)
        })?;
    }
    let (plan, plans) = fastest(bench, &offered, &sets)?;
    let (launched, count) = (sets.clone(), sets.len());
    let launch =
        Box::new(move |device: &mut Device, set: usize| launched[set].launch(device, plan));
    let mut contestants = vec![Contestant { name: "itself".into(), sets: count, launch }];
    let mut without = Vec::new();
    if which == Plans::Fastest {
        let verified = |found: &mut Read<'_>| sampled("cuSPARSELt", shape, ROUNDED, term, found);
        match cusparselt(bench, form, shape, &pruned, &sets, verified) {
            Ok(contestant) => contestants.extend(contestant),
            Err(stop) => without.push(stop.of_peer("cuSPARSELt")?),
        }
        match cublaslt(bench, form, shape, &sets, &of_b) {
            Ok(contestant) => contestants.push(contestant),
            // The head of the report says so once.
            Err(Stop::Error(Error::Library { .. })) => {}
            Err(stop) => without.push(stop.of_peer("cuBLASLt")?),
        }
    }
    let work = Work { bytes: bytes as f64, flops: 2.0 * (m * n * k) as f64, speed: 2.0 };
    Ok(Prepared { work, verified: VERIFIED, plans, without, contestants })
}

/// The plan with the shortest median, and the medians of all.
fn fastest(
    bench: &mut Bench,
    offered: &[Plan],
    sets: &[Set],
) -> Result<(Plan, Vec<PlanTime>), Error> {
    let contestant = |&plan: &Plan| {
        let sets = sets.to_vec();
        Contestant {
            name: plan.to_string(),
            sets: sets.len(),
            launch: Box::new(move |device, set| sets[set].launch(device, plan)),
        }
    };
    let mut contestants: Vec<Contestant> = offered.iter().map(contestant).collect();
    let times = contest(&mut bench.device, &mut contestants, Effort::Quick, || ())?;
    let plans = contestants
        .into_iter()
        .zip(&times)
        .map(|(plan, time)| PlanTime { plan: plan.name, us: time.median })
        .collect();
    let (best, _) = offered
        .iter()
        .zip(&times)
        .min_by(|(_, a), (_, b)| a.median.total_cmp(&b.median))
        .expect("a plan");
    Ok((*best, plans))
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
    let mut pairs = Vec::new();
    for set in sets {
        let d: Matrix<bf16> = device
            .alloc("d of cuSPARSELt", if form == Form::Transposed { [n, m] } else { [m, n] })?;
        pairs.push([set.b(), d]);
    }
    let operands = peer::Operands { form, shape, a, sets: &pairs };
    let mut contestant = library.product(device, &operands).map_err(Stop::Wrong)?;
    (contestant.launch)(device, 0)?;
    let d = pairs[0][1];
    let turned = |[row, column]: [usize; 2]| {
        if form == Form::Transposed { [column, row] } else { [row, column] }
    };
    verified(&mut |at| element(device, d, turned(at)))?;
    Ok(Some(contestant))
}

/// The dense product with unpruned weights, if its result is correct.
fn cublaslt(
    bench: &mut Bench,
    form: Form,
    shape @ [m, n, k]: [usize; 3],
    sets: &[Set],
    of_b: &Array2<bf16>,
) -> Result<Contestant, Stop> {
    let mut gemm = bench.gemm()?;
    let device = &mut bench.device;
    let (b, count): (Vec<Matrix<bf16>>, usize) = (sets.iter().map(Set::b).collect(), sets.len());
    let launch: Box<Launch> = match form {
        Form::Transposed => {
            let of_a = panel(k, 1);
            let weight = repeated(device, [m, k], &of_a)?;
            let z = b
                .iter()
                .map(|_| device.alloc("d of cuBLASLt", [n, m]))
                .collect::<Result<Vec<_>, Error>>()?;
            let op = move |set: usize| LinearForward { x: b[set], weight, bias: None, z: z[set] };
            gemm.linear_forward(device, &op(0))?;
            let term = |[i, j]: [usize; 2], l: usize| wide(&of_a, i, l) * wide(of_b, j, l);
            sampled("cuBLASLt", shape, ROUNDED, term, &mut |[i, j]| {
                element(device, op(0).z, [j, i])
            })?;
            Box::new(move |device, set| gemm.linear_forward(device, &op(set)))
        }
        Form::Straight => {
            let of_a = panel(m, 1);
            let dz = repeated(device, [k, m], &of_a)?;
            let dw = b
                .iter()
                .map(|_| device.alloc("d of cuBLASLt", [m, n]))
                .collect::<Result<Vec<_>, Error>>()?;
            let op =
                move |set: usize| LinearWgrad { dz, x: b[set], dw: dw[set], accumulate: OVERWRITE };
            gemm.linear_wgrad(device, &op(0))?;
            let term = |[i, j]: [usize; 2], l: usize| wide(&of_a, l, i) * wide(of_b, l, j);
            sampled("cuBLASLt", shape, 0.0, term, &mut |at| element(device, op(0).dw, at))?;
            Box::new(move |device, set| gemm.linear_wgrad(device, &op(set)))
        }
    };
    Ok(Contestant { name: "cuBLASLt".into(), sets: count, launch })
}

type Multiply = dyn Fn(&mut Gemm, &mut Device, usize) -> Result<(), Error>;

fn linear(bench: &mut Bench, product: Linear, [p, q, r]: [usize; 3]) -> Result<Prepared, Stop> {
    let mut gemm = bench.gemm()?;
    let (of_x, of_dz, of_w) = (panel(q, 1), panel(r, 2), panel(q, 3));
    let (x, dz, w) = (
        |i: usize, j: usize| wide(&of_x, i, j),
        |i: usize, j: usize| wide(&of_dz, i, j),
        |i: usize, j: usize| wide(&of_w, i, j),
    );
    let (shape, bytes) = match product {
        Linear::Forward => ([p, r, q], 2 * (p * q + r * q + p * r)),
        Linear::Dgrad => ([p, q, r], 2 * (p * q + r * q + p * r)),
        Linear::Wgrad => ([r, q, p], 2 * (p * q + p * r) + 4 * r * q),
    };
    let count = bench.sets(bytes);
    let device = &mut bench.device;
    let multiply: Box<Multiply> = match product {
        Linear::Forward => {
            let weight = repeated(device, [r, q], &of_w)?;
            let set = |_| {
                Ok(LinearForward {
                    x: repeated(device, [p, q], &of_x)?,
                    weight,
                    bias: None,
                    z: device.alloc("z", [p, r])?,
                })
            };
            let sets = (0..count).map(set).collect::<Result<Vec<_>, Error>>()?;
            gemm.linear_forward(device, &sets[0])?;
            sampled("z", shape, ROUNDED, |[i, j], k| x(i, k) * w(j, k), &mut |at| {
                element(device, sets[0].z, at)
            })?;
            Box::new(move |gemm, device, set| gemm.linear_forward(device, &sets[set]))
        }
        Linear::Dgrad => {
            let weight = repeated(device, [r, q], &of_w)?;
            let set = |_| {
                Ok(LinearDgrad {
                    dz: repeated(device, [p, r], &of_dz)?,
                    weight,
                    dx: device.alloc("dx", [p, q])?,
                })
            };
            let sets = (0..count).map(set).collect::<Result<Vec<_>, Error>>()?;
            gemm.linear_dgrad(device, &sets[0])?;
            sampled("dx", shape, ROUNDED, |[i, j], k| dz(i, k) * w(k, j), &mut |at| {
                element(device, sets[0].dx, at)
            })?;
            Box::new(move |gemm, device, set| gemm.linear_dgrad(device, &sets[set]))
        }
        Linear::Wgrad => {
            let set = |_| {
                let (dz, x) = (repeated(device, [p, r], &of_dz)?, repeated(device, [p, q], &of_x)?);
                Ok(LinearWgrad { dz, x, dw: device.alloc("dw", [r, q])?, accumulate: OVERWRITE })
            };
            let sets = (0..count).map(set).collect::<Result<Vec<_>, Error>>()?;
            gemm.linear_wgrad(device, &sets[0])?;
            sampled("dw", shape, 0.0, |[i, j], k| dz(k, i) * x(k, j), &mut |at| {
                element(device, sets[0].dw, at)
            })?;
            Box::new(move |gemm, device, set| gemm.linear_wgrad(device, &sets[set]))
        }
    };
    bench.plans = gemm.plans();
    let launch = Box::new(move |device: &mut Device, set: usize| multiply(&mut gemm, device, set));
    let work =
        Work { bytes: bytes as f64, flops: 2.0 * p as f64 * q as f64 * r as f64, speed: 1.0 };
    let contestants = vec![Contestant { name: "itself".into(), sets: count, launch }];
    Ok(Prepared { work, verified: VERIFIED, plans: Vec::new(), without: Vec::new(), contestants })
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

//! The operations of a backend at the sizes of a layer: cases of the conformance suite, verified
//! against the CPU backend, which the suite checks, and timed on the GPU.

use std::ops::Range;

use sparse24_conformance::{Draw, Values, Work, prepare};
use sparse24_core::op::Activation;
use sparse24_cuda::{
    Device,
    bench::{self, Outcome, Owner, Size, TOKENS},
    norm::MAX_WIDTH,
};
use sparse24_train::{
    Error,
    backend::{
        Arithmetic, Backend, BackendSettings, DType, Op, cpu::CpuBackend, cuda::CudaBackend,
    },
};

/// Sequence length.
const LENGTH: usize = 1024;
/// GPT-2's number of tokens.
const VOCABULARY: usize = 50257;
/// The dimension of a head: 64 up to GPT-2's largest width.
pub(super) fn head_dimension(width: usize) -> usize {
    if width <= 1600 { 64 } else { 128 }
}

/// An operation and its sizes.
pub(super) struct Operation {
    pub(super) kernel: &'static str,
    pub(super) shape: String,
    /// Prefixes of the names of the kernels that it launches.
    pub(super) entries: &'static [&'static str],
    /// Its name in the suite.
    name: &'static str,
    draw: Draw,
    /// Which work of the case is timed, and which of its operations.
    part: usize,
    ops: Range<usize>,
    /// Bytes that must be moved.
    bytes: usize,
}

impl Operation {
    fn new<const N: usize>(
        (kernel, name): (&'static str, &'static str),
        entries: &'static [&'static str],
        shape: [usize; N],
        sizes: [usize; 4],
        options: [bool; 4],
        bytes: usize,
    ) -> Self {
        let shape = shape.map(|length| length.to_string()).join("x");
        let draw = Draw { sizes, batch: TOKENS / LENGTH, options, values: Values::Plain, seed: 1 };
        Self { kernel, shape, entries, name, draw, part: 0, ops: 0..usize::MAX, bytes }
    }
}

/// All operations of a layer.
pub(super) fn operations(size: &Size) -> Vec<Operation> {
    let mut all = weights(size);
    all.extend(activations(size));
    all.extend(rows(size));
    all.extend(attention(size));
    all
}

const NO: bool = false;
const YES: bool = true;

fn weights(size: &Size) -> Vec<Operation> {
    let shape @ [r, q] = size.weights();
    let (elements, mask) = (r * q, r * q / 8);
    let search = |kernel, entries, options| {
        let sizes = [1, q, r, 1];
        Operation::new((kernel, "mask_search"), entries, shape, sizes, options, 4 * elements + mask)
    };
    let compress = |kernel, entries, [r, q]: [usize; 2], options, outputs: usize| {
        let bytes = 4 * elements + mask + outputs * 9 * elements / 8;
        let sizes = [1, q, r, 1];
        Operation::new((kernel, "compress_weight"), entries, [r, q], sizes, options, bytes)
    };
    let step = |(kernel, name), entries, ops, bytes| Operation {
        ops,
        ..Operation::new((kernel, name), entries, shape, [1, q, r, 1], [YES, NO, YES, NO], bytes)
    };
    let mut all = vec![
        search("mask_search_f32", &["mask_search_f32"], [YES, NO, NO, NO]),
        search("row_mask_search_f32", &["row_mask_search_f32"], [NO; 4]),
        search("column_mask_search_f32", &["column_mask_search_f32"], [NO, YES, NO, NO]),
        compress("compress_weight", &["compress_weight"], [r, q], [YES, NO, NO, NO], 2),
        compress("compress_forward", &["compress_forward", "prune_dense"], [r, q], [NO; 4], 1),
        step(("grad_norm", "optimizer"), &["square_sums", "norm_of_sums"], 0..1, 4 * elements),
        step(("adamw_step", "optimizer"), &["adamw_step"], 1..2, 30 * elements + mask),
        step(("adam_step", "adam"), &["adam_step"], 1..2, 30 * elements + mask),
        step(("sgd_step", "sgd"), &["sgd_step"], 1..2, 22 * elements + mask),
        step(("lion_step", "lion"), &["lion_step"], 1..2, 22 * elements + mask),
        Operation::new(
            ("moving_average", "moving_average"),
            &["moving_average"],
            shape,
            [r, q, 1, 1],
            [YES, NO, NO, NO],
            12 * elements,
        ),
    ];
    // The weight of the down layer.
    if size.width().is_some() {
        all.push(compress("compress_weight", &["compress_weight"], [q, r], [YES, NO, NO, NO], 2));
    }
    all
}

fn activations(size: &Size) -> Vec<Operation> {
    let (hidden @ [p, f], stream @ [_, c]) = (size.hidden(), size.stream());
    let estimate = |kernel, entries, [p, r]: [usize; 2], exact| {
        let (sizes, bytes) = ([p, 1, r, 1], 3 * p * r + p * r / 8);
        let names = (kernel, "mvue_compress");
        Operation::new(names, entries, [p, r], sizes, [exact, NO, NO, NO], bytes)
    };
    let exact = &["mvue_compress_exact"];
    let mut zeros = estimate("mvue_exact_fifth_zero", exact, hidden, YES);
    zeros.draw.values = Values::FifthZero;
    let sums = &["column_sums", "row_sums"];
    let mut all = vec![
        estimate("mvue_exact", exact, hidden, YES),
        zeros,
        estimate("mvue_approximate", &["mvue_compress_approximate"], hidden, NO),
        Operation::new(("bias_grad", "bias_grad"), sums, hidden, [p, 1, f, 1], [NO; 4], 2 * p * f),
        Operation::new(
            ("dropout", "dropout"),
            &["dropout"],
            stream,
            [p, 1, c, 1],
            [YES; 4],
            4 * p * c,
        ),
    ];
    // An eighth of the rows.
    let rows = [("gather_rows", 0, p / 2), ("scatter_rows", 1, 3 * p)];
    all.extend(rows.map(|(kernel, part, moved)| Operation {
        part,
        ..Operation::new(
            (kernel, "rows"),
            &["gather_rows", "scatter_rows"],
            stream,
            [p, 1, c, 8],
            [YES; 4],
            moved * c,
        )
    }));
    if stream != hidden {
        all.push(estimate("mvue_exact", exact, stream, YES));
    }
    const NAMES: [[&[&str]; 3]; 6] = [
        [&["gelu_forward"], &["gelu_backward"], &["gelu_backward_compress"]],
        [&["gelu_erf_forward"], &["gelu_erf_backward"], &["gelu_erf_backward_compress"]],
        [&["geglu_forward"], &["geglu_backward"], &["geglu_backward_compress"]],
        [&["swiglu_forward"], &["swiglu_backward"], &["swiglu_backward_compress"]],
        [&["tanh_forward"], &["tanh_backward"], &[]],
        [&["relu_forward"], &["relu_backward"], &["relu_backward_compress"]],
    ];
    for (at, (activation, [forward, backward, compress])) in
        Activation::ALL.into_iter().zip(NAMES).enumerate()
    {
        let (columns, sizes) = (activation.columns_in(), [p, 1, f, at]);
        let (moved, back) = (2 * p * f * (columns + 1), 2 * p * f * (2 * columns + 1));
        let names = [(forward[0], "activation_forward"), (backward[0], "activation_backward")];
        all.extend([
            Operation::new(names[0], forward, hidden, sizes, [NO; 4], moved),
            Operation::new(names[1], backward, hidden, sizes, [NO; 4], back),
        ]);
        // And its sample, in one kernel.
        all.extend(compress.first().map(|&kernel| {
            let (names, bytes) = ((kernel, names[1].1), back + columns * p * f * 9 / 8);
            Operation::new(names, compress, hidden, sizes, [YES, NO, NO, NO], bytes)
        }));
    }
    all
}

fn rows(size: &Size) -> Vec<Operation> {
    let stream @ [p, c] = size.stream();
    let bytes = 8 * p * c + 8 * p;
    let norm = |kernel, name, entries, bytes| {
        Operation::new((kernel, name), entries, stream, [p, 1, c, 1], [NO, YES, YES, NO], bytes)
    };
    let forward = |kernel, entries, bytes| {
        let mut of = norm(kernel, "norm_forward", entries, bytes);
        of.draw.options = [YES; 4];
        of
    };
    let mut all = vec![Operation { part: 1, ..forward("add", &["add"], 6 * p * c) }];
    if c <= MAX_WIDTH {
        let backward = &["norm_backward_", "norm_parameters"];
        all.push(forward("norm_forward", &["norm_forward_"], bytes));
        all.push(norm("norm_backward", "norm_backward", backward, bytes));
    }
    if size.width().is_none() {
        return all;
    }
    let (tokens, vocabulary) = (TOKENS as f64, VOCABULARY as f64);
    // Tokens are drawn uniformly.
    let distinct = vocabulary * (1.0 - (1.0 - 1.0 / vocabulary).powf(tokens));
    let (moved, tables) = (2 * p * c, 4 * c * (distinct as usize + LENGTH));
    let embed = |kernel, entries, bytes| {
        let sizes = [LENGTH, c, VOCABULARY, TOKENS / LENGTH];
        Operation::new((kernel, kernel), entries, stream, sizes, [YES; 4], bytes)
    };
    let backward = &["embed_sort", "embed_order", "embed_runs", "embed_join", "embed_positions"];
    all.extend([
        embed("embed_forward", &["embed_forward"], moved + tables),
        embed("embed_backward", backward, moved + 2 * tables),
    ]);
    for [rows, vocabulary] in [[2048, VOCABULARY], [TOKENS, 65], [TOKENS, 1]] {
        let sizes = [rows, c, vocabulary, 1];
        let head = |kernel, entries, options, passes: usize| {
            let bytes = passes * 2 * rows * (vocabulary + c) + passes * 2 * vocabulary * c;
            let (shape, names) = ([rows, vocabulary, c], (kernel, "head_loss"));
            let mut of = Operation::new(names, entries, shape, sizes, options, bytes);
            of.draw.values = Values::Small;
            of
        };
        all.extend([
            head("head_loss", &["head_loss", "squared_error", "loss_sum"], [YES, NO, NO, NO], 2),
            head("head_loss_forward", &["loss_forward"], [NO; 4], 1),
        ]);
    }
    let scaled = |kernel, entries, part, bytes| Operation {
        part,
        ..Operation::new((kernel, "scale"), entries, stream, [p, 1, c, 1], [NO; 4], bytes)
    };
    all.push(scaled("scale", &["scale"], 0, 8 * p * c));
    all.push(scaled("scale_grad", &["scale_grad"], 1, 8 * p * c));
    // Four sequences, as the case draws them for this seed.
    all.push(Operation::new(
        ("drop_sequences", "drop_sequences"),
        &["drop_sequences"],
        [4 * LENGTH, c],
        [LENGTH, 1, c, 1],
        [YES; 4],
        4 * 4 * LENGTH * c,
    ));
    // Sixteen sequences, of the length that the case has at most.
    let length = 300;
    let mut span = Operation::new(
        ("span_loss", "span_loss"),
        &["span_loss"],
        [16 * length, 2, c],
        [length, c, length, 16],
        [YES, NO, NO, NO],
        4 * (16 * length * (2 + c) + 2 * c),
    );
    span.draw.values = Values::Small;
    all.push(span);
    all
}

/// Causal attention within each sequence, with q, k and v side by side.
fn attention(size: &Size) -> Vec<Operation> {
    let Some(width) = size.width() else { return Vec::new() };
    let head = head_dimension(width);
    let (batch, heads) = (TOKENS / LENGTH, width / head);
    let case = |kernel, name, entries, drops, matrices: usize| {
        let bytes = matrices * 2 * TOKENS * heads * head;
        let (shape, sizes) = ([batch, heads, LENGTH, head], [LENGTH, head, LENGTH, heads]);
        Operation::new((kernel, name), entries, shape, sizes, [YES, NO, drops, YES], bytes)
    };
    const FORWARD: &str = "attention_forward";
    const BACKWARD: &str = "attention_backward";
    // q, k, v, o, and in the backward pass their gradients.
    vec![
        case(FORWARD, FORWARD, &["attention_forward_64", "attention_forward_128"], NO, 4),
        case(BACKWARD, BACKWARD, &["attention_backward_64_", "attention_backward_128_"], NO, 8),
        case("attention_forward_dropout", FORWARD, &["attention_forward_dropout_"], YES, 4),
        case("attention_backward_dropout", BACKWARD, &["attention_backward_dropout_"], YES, 8),
    ]
}

/// A GPU and the operands of an operation on it.
pub(super) struct Gpu(pub(super) CudaBackend);

impl Owner for Gpu {
    fn device(&mut self) -> &mut Device {
        self.0.gpu()
    }
}

/// The error of an operation whose results were correct before.
pub(super) fn of_driver(error: Error) -> sparse24_cuda::Error {
    sparse24_cuda::Error::Driver { what: "an operation".to_owned(), code: error.to_string() }
}

impl Operation {
    /// Allocates as many sets of operands as `sets` returns for their bytes, and verifies the
    /// results of the first.
    pub(super) fn prepare(
        &self,
        settings: BackendSettings,
        sets: impl FnOnce(usize) -> usize,
    ) -> Result<bench::Operation<Gpu>, Box<Outcome>> {
        let failed = |error: Error| Box::new(Outcome::Unmeasured { reason: error.to_string() });
        let mut gpu = CudaBackend::open(settings).map_err(failed)?;
        let first = prepare(self.name, &mut gpu, &self.draw).map_err(failed)?;
        let mut cpu = CpuBackend::new(Arithmetic::Bf16);
        if let Some(difference) = self.difference(&mut gpu, &first, &mut cpu).map_err(failed)? {
            return Err(Box::new(Outcome::Failed { difference }));
        }
        drop(cpu);
        let timed = |work: Vec<Work>| -> Vec<Op<'static>> {
            let ops = &work[self.part].ops;
            ops[self.ops.start..self.ops.end.min(ops.len())].to_vec()
        };
        let mut all = vec![timed(first)];
        for _ in 1..sets(self.bytes) {
            all.push(timed(prepare(self.name, &mut gpu, &self.draw).map_err(failed)?));
        }
        let flops = all[0].iter().map(Op::flops).sum();
        let count = all.len();
        let launch =
            move |Gpu(gpu): &mut Gpu, set: usize| gpu.sequence(&all[set]).map_err(of_driver);
        Ok(bench::Operation {
            owner: Gpu(gpu),
            verified: "every element, within 1/32 of the CPU backend's",
            bytes: self.bytes,
            flops,
            sets: count,
            launch: Box::new(launch),
        })
    }

    /// Executes the work on a backend and on a reference; the first difference of their results.
    fn difference(
        &self,
        backend: &mut dyn Backend,
        work: &[Work],
        reference: &mut dyn Backend,
    ) -> Result<Option<String>, Error> {
        let expected = prepare(self.name, reference, &self.draw)?;
        for (found, expected) in work.iter().zip(&expected) {
            backend.sequence(&found.ops)?;
            reference.sequence(&expected.ops)?;
            if let (Some(found), Some(expected)) = (found.mask, expected.mask)
                && backend.download_mask(found)? != reference.download_mask(expected)?
            {
                return Ok(Some("the mask differs from the CPU's".to_owned()));
            }
            let outputs = found.outputs.iter().zip(&expected.outputs).enumerate();
            for (at, (&found, &expected)) in outputs.filter(|(_, (t, _))| t.dtype != DType::U32) {
                let (found, expected) = (backend.download(found)?, reference.download(expected)?);
                if let Some(difference) = distant(&found, &expected, WITHIN) {
                    return Ok(Some(format!("output {at}, {difference}")));
                }
            }
        }
        Ok(None)
    }
}

/// Sixteen roundings to bf16, of which sums have many of either sign.
const WITHIN: f64 = 1.0 / 32.0;

/// The first element that is further from the expected one than this share of it and of the root
/// mean square of all.
pub(super) fn distant(found: &[f32], expected: &[f32], within: f64) -> Option<String> {
    let squares: f64 = expected.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    let typical = (squares / expected.len().max(1) as f64).sqrt();
    let is_near = |(found, expected): (&f32, &f32)| {
        let (found, expected) = (f64::from(*found), f64::from(*expected));
        (found - expected).abs() <= within * (expected.abs() + typical)
    };
    let at = found.iter().zip(expected).position(|pair| !is_near(pair))?;
    Some(format!("element {at}: found {}, expected {}", found[at], expected[at]))
}

#[cfg(test)]
mod tests {
    use sparse24_cuda::{
        bench::{peer_kernels, products},
        kernels::SOURCES,
    };

    use super::*;

    /// Kernels that no timed operation launches: those of embedders, counts that wait for their
    /// result, and the mask of an order that the host chooses.
    const APART: [&str; 6] = [
        "mask_search_bf16",
        "row_mask_search_bf16",
        "column_mask_search_bf16",
        "flip_count",
        "l1_distance",
        "permuted_mask",
    ];

    #[test]
    fn every_kernel_has_a_case() {
        let sizes = Size::all();
        let operations: Vec<_> = sizes.iter().flat_map(operations).collect();
        let of_kernels = |size| products(size).into_iter().chain(peer_kernels(size));
        let products: Vec<_> = sizes.iter().flat_map(of_kernels).collect();
        let entries = operations.iter().flat_map(|case| case.entries);
        let covered: Vec<&str> =
            entries.chain(products.iter().flat_map(|case| case.entries)).copied().collect();
        let all = || SOURCES.iter().flat_map(|source| source.entries).copied();
        for entry in all().filter(|entry| !APART.contains(entry)) {
            let launched = covered.iter().any(|beginning| entry.starts_with(beginning));
            assert!(launched, "no case launches {entry}");
        }
        for beginning in covered {
            let exists = all().any(|entry| entry.starts_with(beginning));
            assert!(exists, "no kernel starts with {beginning}");
        }
    }

    /// Every case works on the CPU; those of matrices give the same results again.
    #[test]
    fn cases_can_be_prepared_and_compared() {
        for size in [Size::Width(64), Size::Matrix([1000, 264])] {
            for case in operations(&size) {
                let [mut cpu, mut again] = [(); 2].map(|()| CpuBackend::new(Arithmetic::Bf16));
                let what = format!("{} {}", case.kernel, case.shape);
                let work = prepare(case.name, &mut cpu, &case.draw).expect(&what);
                assert!(case.ops.start < work[case.part].ops.len(), "{what}");
                if size.width().is_some() {
                    work.iter().try_for_each(|work| cpu.sequence(&work.ops)).expect(&what);
                } else {
                    let found = case.difference(&mut cpu, &work, &mut again).expect(&what);
                    assert_eq!(found, None, "{what}");
                }
            }
        }
    }

    #[test]
    fn differences_are_noticed() {
        assert_eq!(distant(&[1.0, 100.0], &[1.0, 101.0], WITHIN), None);
        for found in [[1.0, 106.0], [f32::NAN, 100.0], [5.0, 100.0]] {
            assert!(distant(&found, &[1.0, 100.0], WITHIN).is_some(), "{found:?}");
        }
    }
}

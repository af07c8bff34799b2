//! A case of every operation of a backend: its sizes, inputs and work, and its result by f64 loops
//! or core's semantics.
//!
//! [`check`] executes a case and compares it, with outputs that start as NaN between guard rows,
//! twice with the same bits, and in one sequence with the bits of the single operations; the
//! conformance suite in `tests` draws cases for it. [`prepare`] gives the work of a case of any
//! size to a benchmark. Sizes are rounded up to what [`Capabilities`] allows.
//!
//! Bounds are those of [`oracle::arithmetic`]; an activation stored in bf16 adds its rounding, and
//! so does every operand that a bf16 device computes within an operation.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    slice::from_ref,
};

use half::bf16;
use sparse24_backend::{Backend, Capabilities, DType, Error, Extent, MaskId, Op, Region, Tensor};
use sparse24_core::op::StepState;

use crate::oracle::{
    arithmetic::{Arithmetic, Matrix, Random, UNIT, bound},
    layers::Address,
};

mod layers;
pub mod oracle;
mod products;
mod refusals;
mod sparse;
mod update;

pub use refusals::refusals;

/// Builds a case of an operation and checks or prepares it.
pub type Check = fn(&mut Bench<'_>, &Draw);

/// The suite, by operation.
pub const OPERATIONS: &[(&str, Check)] = &[
    ("mask_search", sparse::mask_search),
    ("permuted_mask", sparse::permuted_mask),
    ("compress_weight", sparse::compress_weight),
    ("mvue_compress", sparse::mvue_compress),
    ("linear_forward", products::linear_forward),
    ("linear_dgrad", products::linear_dgrad),
    ("linear_wgrad", products::linear_wgrad),
    ("bias_grad", products::bias_grad),
    ("activation_forward", layers::activation_forward),
    ("activation_backward", layers::activation_backward),
    ("norm_forward", layers::norm_forward),
    ("norm_backward", layers::norm_backward),
    ("attention_forward", layers::attention_forward),
    ("attention_backward", layers::attention_backward),
    ("embed_forward", layers::embed_forward),
    ("embed_backward", layers::embed_backward),
    ("head_loss", layers::head_loss),
    ("span_loss", layers::span_loss),
    ("logits", products::logits),
    ("dropout", layers::dropout),
    ("drop_sequences", layers::drop_sequences),
    ("rows", layers::rows),
    ("scale", layers::scale),
    ("copy_and_fill", update::copy_and_fill),
    ("optimizer", update::adamw),
    ("adam", update::adam),
    ("sgd", update::sgd),
    ("lion", update::lion),
    ("moving_average", update::moving_average),
    ("distances", update::distances),
];

/// Displaced runs of the oracle.
const RUNS: u64 = 6;

/// Unit roundoff of bf16.
const BF16: f64 = 1.0 / (1 << 8) as f64;

/// The step that random numbers are drawn in.
const ADDRESS: Address = Address { seed: 77, step: 5, micro_step: 2 };

/// Scale of the loss.
const LOSS_SCALE: f32 = 1.0 / 32.0;

/// One case of any operation.
#[derive(Debug, Clone, Copy)]
pub struct Draw {
    /// Sizes, each with a meaning of the operation's own.
    pub sizes: [usize; 4],
    /// Sequences, or others of which a batch has several.
    pub batch: usize,
    /// Independent choices.
    pub options: [bool; 4],
    /// The distribution of inputs.
    pub values: Values,
    /// Seed of the inputs.
    pub seed: u64,
}

/// The distribution of inputs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Values {
    /// Uniform in (-2, 2).
    Plain,
    /// Few distinct values, both zeros among them.
    Ties,
    /// Magnitudes from 2^-10 to 2^10.
    Wide,
    /// Both zeros.
    Zeros,
    /// NaN, infinities, subnormal and huge numbers; only where a result is defined for them.
    Special,
    /// [`Self::Plain`] and zeros, as after dropout.
    FifthZero,
    /// Uniform in (-1/16, 1/16): long sums of products stay so small that their exponentials are
    /// well conditioned.
    Small,
}

impl Values {
    /// Every distribution.
    pub const ALL: [Self; 7] = [
        Self::Plain,
        Self::Ties,
        Self::Wide,
        Self::Zeros,
        Self::Special,
        Self::FifthZero,
        Self::Small,
    ];

    fn draw(self, random: &mut Random) -> f32 {
        let x = 2.0 * random.symmetric();
        let mut pick = |among: &[f32]| among[random.below(among.len() as u32) as usize];
        match self {
            Self::Plain => x,
            Self::Ties => pick(&[-1.0, -0.5, -0.0, 0.0, 0.5, 1.0]),
            Self::Wide => x * pick(&[0.0009765625, 0.03125, 1.0, 32.0, 512.0]),
            Self::Zeros => pick(&[0.0, -0.0]),
            Self::Special => {
                let (nan, inf) = (f32::NAN, f32::INFINITY);
                pick(&[nan, inf, -inf, 0.0, -0.0, 1e-40, -1e-40, f32::MIN_POSITIVE, 3e38, -1.0, x])
            }
            Self::FifthZero => pick(&[x, x, x, x, 0.0]),
            Self::Small => x / 32.0,
        }
    }
}

/// Vectors, single elements, no rows, ragged and full tiles, each with every distribution.
pub fn fixed() -> impl Iterator<Item = Draw> {
    let sizes = [[1, 1, 1, 1], [0, 8, 8, 1], [7, 3, 1, 2], [13, 10, 35, 3], [33, 16, 8, 2]];
    let every = sizes.into_iter().flat_map(|sizes| Values::ALL.map(|values| (sizes, values)));
    // Several tiles and tasks of every kernel, wide heads, and rows of one to eight warps.
    let large = [
        [150, 70, 131, 3],
        [131, 33, 270, 2],
        [600, 16, 600, 1],
        [65, 128, 270, 1],
        [9, 2, 1500, 1],
        [6, 1, 2600, 2],
        [5, 3, 4100, 1],
    ];
    let large = large.map(|sizes| (sizes, Values::Plain));
    let cases = (0..).zip(every.chain(large));
    let cases = cases.map(|(at, (sizes, values)): (u64, _)| Draw {
        sizes,
        batch: 1 + (at % 2) as usize,
        options: [0, 1, 2, 3].map(|bit| (at * 7) >> bit & 1 == 1),
        values,
        seed: at,
    });
    // Whole blocks of rows and columns.
    let whole = [[true, true, false, false], [true, false, false, true], [false; 4]];
    cases.chain(whole.into_iter().map(|options| {
        let (sizes, values) = ([64, 32, 96, 2], Values::Plain);
        Draw { sizes, batch: 2, options, values, seed: 42 }
    }))
}

/// Checks one case of an operation.
///
/// # Panics
/// If the backend does not conform or fails, or the suite has no such operation.
pub fn check(name: &str, backend: &mut dyn Backend, draw: &Draw) {
    let operation = operation(name);
    returned(|| operation(&mut Bench::new(backend, draw), draw))
        .unwrap_or_else(|error| panic!("{name}: {error}"));
}

/// Work of a case, in the order in which it is executed.
#[derive(Debug)]
pub struct Work {
    /// Operations that are executed in sequence.
    pub ops: Vec<Op<'static>>,
    /// The tensors that they write.
    pub outputs: Vec<Tensor>,
    /// The mask that they write.
    pub mask: Option<MaskId>,
}

/// Allocates and fills the operands of a case without checking it. Large operands repeat their
/// first rows.
///
/// # Errors
/// [`Error`] if the memory does not suffice or an operation refuses.
///
/// # Panics
/// If the suite has no such operation.
pub fn prepare(name: &str, backend: &mut dyn Backend, draw: &Draw) -> Result<Vec<Work>, Error> {
    let operation = operation(name);
    returned(|| {
        let mut bench = Bench { prepared: Some(Vec::new()), ..Bench::new(backend, draw) };
        operation(&mut bench, draw);
        bench.prepared.expect("it was set")
    })
}

/// The value, or an error that unwinds up to [`returned`]: operations of the suite have no other
/// way to fail.
fn must<T>(result: Result<T, Error>) -> T {
    result.unwrap_or_else(|error| resume_unwind(Box::new(error)))
}

fn returned<T>(run: impl FnOnce() -> T) -> Result<T, Error> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| match panic.downcast::<Error>() {
        Ok(error) => *error,
        Err(panic) => resume_unwind(panic),
    })
}

fn operation(name: &str) -> Check {
    let found = OPERATIONS.iter().find(|(known, _)| *known == name);
    found.unwrap_or_else(|| panic!("no operation {name}")).1
}

/// How the device stores activations and operands of products.
#[derive(Debug, Clone, Copy)]
struct Storage {
    /// In bf16; else in f32.
    bf16: bool,
}

/// A backend and the random numbers of a case.
pub struct Bench<'a> {
    backend: &'a mut dyn Backend,
    /// The work so far, of a case that is not checked.
    prepared: Option<Vec<Work>>,
    capabilities: Capabilities,
    storage: Storage,
    random: Random,
    values: Values,
}

/// An output tensor of a case.
struct Output {
    name: &'static str,
    tensor: Tensor,
    /// The tensor with guard rows before and after it.
    whole: Tensor,
    /// Its values before the operation; NaN if absent.
    before: Option<Matrix>,
}

impl<'a> Bench<'a> {
    fn new(backend: &'a mut dyn Backend, draw: &Draw) -> Self {
        let probe = backend.alloc("probe", [1, 8], DType::Activation, Region::Activations);
        let probe = must(probe);
        backend.upload(probe, &[1.0 + 1.0 / 1024.0; 8]).expect("eight values");
        let bf16 = backend.download(probe).expect("a tensor")[0] == 1.0;
        let Address { seed, step, micro_step } = ADDRESS;
        let bias_corrections = [0.4, 0.2];
        let (learning_rate, loss_scale) = (0.03125, LOSS_SCALE);
        backend
            .set_step(StepState {
                seed,
                step,
                micro_step,
                learning_rate,
                bias_corrections,
                loss_scale,
            })
            .expect("a step state");
        let capabilities = backend.capabilities();
        let (storage, random) = (Storage { bf16 }, Random(draw.seed));
        let (prepared, values) = (None, draw.values);
        Self { backend, prepared, capabilities, storage, random, values }
    }

    /// Distributions for which the arithmetic of a layer is well conditioned.
    fn tame(&mut self) {
        if matches!(self.values, Values::Wide | Values::Special) {
            self.values = Values::Plain;
        }
    }

    /// Distributions without NaN and infinity.
    fn finite(&mut self) {
        if self.values == Values::Special {
            self.values = Values::Wide;
        }
    }

    /// The next size that the backend allows.
    fn size(&self, extent: Extent, size: usize) -> usize {
        let limits = self.capabilities.limits.iter().filter(|(of, _)| *of == extent);
        limits.fold(size, |size, (_, limit)| size.next_multiple_of(limit.multiple_of))
    }

    /// A number of columns of an activation.
    fn columns(&self, size: usize) -> usize {
        self.size(Extent::RowWidth, size)
    }

    fn matrix(&mut self, [rows, columns]: [usize; 2]) -> Matrix {
        /// Distinct rows of a case that is not checked.
        const PANEL: usize = 64;
        let distinct = if self.prepared.is_some() { rows.min(PANEL) } else { rows };
        let drawn = (0..distinct * columns).map(|_| self.values.draw(&mut self.random).into());
        let drawn: Vec<f64> = drawn.collect();
        let mut all = drawn.repeat(rows.div_ceil(distinct.max(1)));
        all.truncate(rows * columns);
        Matrix::from_shape_vec((rows, columns), all).expect("as many")
    }

    fn alloc(&mut self, shape: [usize; 2], dtype: DType, region: Region) -> Tensor {
        must(self.backend.alloc("conformance", shape, dtype, region))
    }

    fn upload(&mut self, to: Tensor, values: &Matrix) {
        let values: Vec<f32> = values.iter().map(|&x| x as f32).collect();
        must(self.backend.upload(to, &values));
    }

    fn download(&mut self, from: Tensor) -> Matrix {
        let values = self.backend.download(from).expect("a tensor");
        Matrix::from_shape_vec(from.shape, values.into_iter().map(f64::from).collect())
            .expect("the shape of the tensor")
    }

    /// An input and its values.
    fn given(&mut self, values: Matrix, dtype: DType, region: Region) -> (Tensor, Matrix) {
        let t = self.alloc(values.dim().into(), dtype, region);
        self.upload(t, &values);
        (t, values)
    }

    /// A random activation, and its values as they are stored.
    fn activation(&mut self, rows: usize, columns: usize) -> (Tensor, Matrix) {
        let values = self.matrix([rows, columns]);
        self.given(self.storage.rounded(&values), DType::Activation, Region::Activations)
    }

    /// A random f32 parameter.
    fn parameter(&mut self, shape: [usize; 2]) -> (Tensor, Matrix) {
        let values = self.matrix(shape);
        self.given(values, DType::F32, Region::Parameters)
    }

    /// A random vector that bf16 holds exactly: devices may read biases in either type.
    fn bias(&mut self, columns: usize) -> (Tensor, Matrix) {
        let values = self.matrix([1, columns]);
        self.given(self.storage.rounded(&values), DType::F32, Region::Parameters)
    }

    fn ids(&mut self, ids: &[u32]) -> Tensor {
        let t = self.alloc([ids.len(), 1], DType::U32, Region::Activations);
        self.backend.upload_ids(t, ids).expect("one id per element");
        t
    }

    fn random_ids(&mut self, count: usize, below: usize) -> Vec<u32> {
        (0..count).map(|_| self.random.below(below as u32)).collect()
    }

    fn mask(&mut self, shape: [usize; 2]) -> MaskId {
        self.backend.alloc_mask(shape).expect("tiles")
    }

    fn run<'op>(&mut self, op: impl Into<Op<'op>>) {
        must(self.backend.run(op));
    }

    /// Executes an operation whose result is no tensor; it is part of the work.
    fn work(&mut self, op: impl Into<Op<'static>>, mask: Option<MaskId>) {
        let op = op.into();
        must(self.backend.execute(&op));
        if let Some(prepared) = &mut self.prepared {
            prepared.push(Work { ops: vec![op], outputs: Vec::new(), mask });
        }
    }

    /// Rows by which products read an operand with `rows` rows: all of them, or a few sums of all.
    fn probe(&mut self, rows: usize) -> Matrix {
        if self.prepared.is_some() { self.matrix([16, rows]) } else { Matrix::eye(rows) }
    }

    /// An output of activations between guard rows.
    fn output(&mut self, name: &'static str, rows: usize, columns: usize) -> Output {
        let whole = self.alloc([rows + 2, columns], DType::Activation, Region::Activations);
        Output { name, tensor: whole.rows(1..rows + 1), whole, before: None }
    }

    /// An f32 output between guard rows; with `add`, one that is added to.
    fn sum(&mut self, name: &'static str, shape: [usize; 2], add: bool) -> Output {
        let whole = self.alloc([shape[0] + 2, shape[1]], DType::F32, Region::Activations);
        let before = add.then(|| self.matrix(shape));
        Output { name, tensor: whole.rows(1..shape[0] + 1), whole, before }
    }

    /// An output that is a whole buffer.
    fn unguarded(&mut self, name: &'static str, values: Matrix, region: Region) -> Output {
        let (tensor, values) = self.given(values, DType::F32, region);
        Output { name, tensor, whole: tensor, before: Some(values) }
    }

    /// Resets the outputs, does the work, and returns their values; guard rows must be untouched.
    fn execute(
        &mut self,
        what: &str,
        outputs: &[Output],
        work: impl FnOnce(&mut dyn Backend) -> Result<(), Error>,
    ) -> Result<Vec<Matrix>, Error> {
        for output in outputs {
            let poison = vec![f32::NAN; output.whole.elements()];
            self.backend.upload(output.whole, &poison).expect("as many values as elements");
            if let Some(before) = &output.before {
                self.upload(output.tensor, before);
            }
        }
        work(&mut *self.backend)?;
        let read = |output: &Output| {
            let whole = self.download(output.whole);
            let guards = [0, output.whole.shape[0].saturating_sub(1)];
            if output.whole != output.tensor {
                let untouched = guards.iter().all(|&row| whole.row(row).iter().all(|x| x.is_nan()));
                assert!(untouched, "{what}: {} is written outside its rows", output.name);
            }
            self.download(output.tensor)
        };
        Ok(outputs.iter().map(read).collect())
    }

    /// Executes operations twice in sequence and once one by one, which must give the same bits,
    /// and compares the outputs with the oracle's, in order. Returns whether it did: a case that
    /// is prepared is not checked.
    fn check(
        &mut self,
        outputs: &[Output],
        ops: &[Op<'static>],
        oracle: impl Fn(&mut Arithmetic) -> Vec<Matrix>,
    ) -> bool {
        if self.prepared.is_some() {
            for output in outputs {
                if let Some(before) = &output.before {
                    self.upload(output.tensor, before);
                }
            }
            let outputs = outputs.iter().map(|output| output.tensor).collect();
            let work = Work { ops: ops.to_vec(), outputs, mask: None };
            self.prepared.get_or_insert_default().push(work);
            return false;
        }
        let what = format!("{ops:?}");
        let run = |bench: &mut Self| bench.execute(&what, outputs, |backend| backend.sequence(ops));
        let found = run(self).unwrap_or_else(|error| panic!("{what}: {error}"));
        let again = run(self).expect("it worked before");
        assert!(same_bits(&found, &again), "{what}: another run has other bits");
        let alone = self
            .execute(&what, outputs, |backend| ops.iter().try_for_each(|op| backend.execute(op)));
        match alone {
            Ok(alone) => assert!(same_bits(&found, &alone), "{what}: not the composition's bits"),
            // A backend may have an operation only within a sequence.
            Err(Error::Refused(why)) => println!("skipped one by one: {why}"),
            Err(error) => panic!("{what}: {error}"),
        }
        let expected = oracle(&mut Arithmetic::Exact);
        let displaced: Vec<_> =
            (0..RUNS).map(|seed| oracle(&mut Arithmetic::Displaced(Random(seed)))).collect();
        assert_eq!(expected.len(), outputs.len(), "the oracle computes other outputs");
        for (at, (output, found)) in outputs.iter().zip(&found).enumerate() {
            let finite = |x: &Matrix| x.map(|&x| if x.is_finite() { x } else { 0.0 });
            let others: Vec<_> = displaced.iter().map(|run| finite(&run[at])).collect();
            let bound = bound(&finite(&expected[at]), &others);
            let stored = self.storage.bf16 && output.tensor.dtype == DType::Activation;
            let as_stored = !stored || same_bits(from_ref(found), &[self.storage.rounded(found)]);
            assert!(as_stored, "{what}: {} is not rounded to bf16", output.name);
            assert_eq!(found.dim(), expected[at].dim(), "{what}: {}", output.name);
            for ((index, &expected), &found) in expected[at].indexed_iter().zip(found) {
                // Below the normal numbers, roundings are absolute.
                let rounding = if stored { BF16 * (expected.abs() + bound) } else { 0.0 };
                let bound = bound + rounding + f64::from(f32::MIN_POSITIVE);
                let equal = found == expected || found.is_nan() && expected.is_nan();
                assert!(
                    equal || (found - expected).abs() <= bound,
                    "{what}: {}{index:?} is {found}, expected {expected} within {bound}",
                    output.name
                );
            }
        }
        true
    }
}

impl Storage {
    /// The values as activations are stored and operands of products are read.
    fn rounded(self, x: &Matrix) -> Matrix {
        if self.bf16 { x.map(|&x| bf16::from_f32(x as f32).to_f64()) } else { x.clone() }
    }

    /// Roundings, in units of f32, of an operand that the device computes within an operation.
    fn operand_units(self) -> f64 {
        if self.bf16 { BF16 / UNIT } else { 0.0 }
    }

    /// `x` as it is stored between two operations.
    fn between(self, a: &mut Arithmetic, x: &Matrix) -> Matrix {
        a.map(x, self.operand_units(), |x| (x, x))
    }

    /// A B; a tensor core adds 16 terms at once, each cut off at 2^-23 of the largest, which
    /// 4 k + 56 units cover.
    fn product(self, a: &mut Arithmetic, x: &Matrix, y: &Matrix) -> Matrix {
        let exact = a.product(x, y);
        if !self.bf16 {
            return exact;
        }
        let magnitudes = x.map(|x| x.abs()).dot(&y.map(|y| y.abs()));
        let units = (4 * x.ncols() + 56) as f64;
        Matrix::from_shape_fn(exact.dim(), |at| a.rounded(exact[at], units, magnitudes[at]))
    }
}

fn same_bits(a: &[Matrix], b: &[Matrix]) -> bool {
    let bits = |all: &[Matrix]| -> Vec<u64> {
        let values = all.iter().flatten();
        values.map(|x| if x.is_nan() { u64::MAX } else { x.to_bits() }).collect()
    };
    bits(a) == bits(b)
}

fn transposed(x: &Matrix) -> Matrix {
    x.t().to_owned()
}

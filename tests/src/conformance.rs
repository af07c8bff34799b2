//! One suite for every backend: each operation against f64 loops or core's semantics, on fixed
//! hostile cases and on drawn ones, with outputs that start as NaN between guard rows, twice with
//! the same bits, and in one sequence with the bits of the single operations.
//!
//! [`conformance!`](crate::conformance!) stamps the suite for a backend. Sizes are rounded up to
//! what [`Capabilities`] allows; operations that it excludes are skipped. `defect` corrupts one
//! output of one operation at a time, to test that the suite notices.
//!
//! Bounds are those of [`crate::oracle::arithmetic`]; an activation stored in bf16 adds its
//! rounding, and so does every operand that a bf16 device computes within an operation.

use std::{cell::RefCell, env, slice::from_ref};

use half::bf16;
use proptest::{
    prelude::*,
    test_runner::{Config, RngAlgorithm, TestRng, TestRunner},
};
use sparse24_core::op::StepState;
use sparse24_train::{
    Error,
    backend::{Backend, Capabilities, DType, Extent, MaskId, Op, Region, Tensor},
};

use crate::oracle::{
    arithmetic::{Arithmetic, Matrix, Random, UNIT, bound},
    layers::Address,
};

mod defect;
mod layers;
mod methods;
mod products;
mod sparse;
mod update;

pub use defect::{DEFECTS, assert_noticed};

/// Opens a backend; none where the machine has none, which skips the test.
pub type Open<'a> = &'a dyn Fn() -> Option<Box<dyn Backend>>;

/// Stamps one test per operation for the backend that a closure opens.
#[macro_export]
macro_rules! conformance {
    ($backend:ident, $open:expr) => {
        $crate::conformance!(@ $backend, $open;
            mask_search permuted_mask compress_weight mvue_compress
            linear_forward linear_dgrad linear_wgrad bias_grad
            activation_forward activation_backward norm_forward norm_backward
            attention_forward attention_backward embed_forward embed_backward
            head_loss logits dropout copy_and_fill optimizer distances methods
        );
    };
    (@ $backend:ident, $open:expr; $($case:ident)*) => {
        mod $backend {
            $(#[test]
            fn $case() {
                $crate::conformance::check(stringify!($case), &$open);
            })*

            #[test]
            fn every_operation_is_stamped() {
                $crate::conformance::assert_stamped(&[$(stringify!($case)),*]);
            }
        }
    };
}

type Check = fn(&mut Bench<'_>, &Draw);

/// The suite, by operation.
const OPERATIONS: &[(&str, Check)] = &[
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
    ("logits", products::logits),
    ("dropout", layers::dropout),
    ("copy_and_fill", update::copy_and_fill),
    ("optimizer", update::optimizer),
    ("distances", update::distances),
];

/// Cases drawn per operation.
const DRAWN: u32 = 512;

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
pub(crate) struct Draw {
    /// Sizes, each with a meaning of the operation's own.
    sizes: [usize; 4],
    /// Independent choices.
    options: [bool; 4],
    values: Values,
    seed: u64,
}

/// The distribution of inputs.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Values {
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
}

impl Values {
    const ALL: [Self; 5] = [Self::Plain, Self::Ties, Self::Wide, Self::Zeros, Self::Special];

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
        }
    }
}

/// Vectors, single elements, no rows, ragged and full tiles, each with every distribution.
fn fixed() -> impl Iterator<Item = Draw> {
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
    cases.map(|(at, (sizes, values)): (u64, _)| Draw {
        sizes,
        options: [0, 1, 2, 3].map(|bit| (at * 7) >> bit & 1 == 1),
        values,
        seed: at,
    })
}

fn drawn() -> impl Strategy<Value = Draw> {
    let sizes = [0..40_usize, 1..24, 1..40, 1..4];
    (sizes, any::<[bool; 4]>(), 0..Values::ALL.len(), any::<u64>()).prop_map(
        |(sizes, options, values, seed)| Draw { sizes, options, values: Values::ALL[values], seed },
    )
}

/// Runs one operation of the suite.
///
/// # Panics
/// If the backend does not conform, or has no such operation.
pub fn check(name: &str, open: Open<'_>) {
    if name == "methods" {
        return methods::check(open);
    }
    let Some(backend) = open() else { return };
    let operation = operation(name);
    let backend = RefCell::new(backend);
    let run = |draw: &Draw| operation(&mut Bench::new(&mut **backend.borrow_mut(), draw), draw);
    fixed().for_each(|draw| run(&draw));
    // Under a sanitizer, which is a hundred times slower, the fixed cases suffice.
    if env::var_os("SPARSE24_SMALL").is_some() {
        return;
    }
    let config = Config {
        cases: DRAWN,
        failure_persistence: None,
        max_shrink_iters: 256,
        ..Config::default()
    };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let drawn = TestRunner::new_with_rng(config, rng).run(&drawn(), |draw| {
        run(&draw);
        Ok(())
    });
    drawn.unwrap_or_else(|error| panic!("{name}: {error}"));
}

/// Every operation of a backend that hides something behind each call, such as another number of
/// threads: each case is executed three times with the same bits.
pub fn check_all(backend: &mut dyn Backend) {
    OPERATIONS.iter().for_each(|(name, _)| check_fixed(name, backend));
}

/// The fixed cases of one operation.
fn check_fixed(name: &str, backend: &mut dyn Backend) {
    fixed().for_each(|draw| operation(name)(&mut Bench::new(backend, &draw), &draw));
}

fn operation(name: &str) -> Check {
    let found = OPERATIONS.iter().find(|(known, _)| *known == name);
    found.unwrap_or_else(|| panic!("no operation {name}")).1
}

/// Every operation of the suite is among these names.
///
/// # Panics
/// If one is not.
pub fn assert_stamped(names: &[&str]) {
    let missing = OPERATIONS.iter().find(|(name, _)| !names.contains(name));
    assert!(missing.is_none(), "{missing:?} is not stamped");
}

/// How the device stores activations and operands of products.
#[derive(Debug, Clone, Copy)]
struct Storage {
    /// In bf16; else in f32.
    bf16: bool,
}

/// A backend and the random numbers of a case.
pub(crate) struct Bench<'a> {
    backend: &'a mut dyn Backend,
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
        let probe = probe.expect("memory suffices");
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
        Self { backend, capabilities, storage, random, values: draw.values }
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
        Matrix::from_shape_fn((rows, columns), |_| self.values.draw(&mut self.random).into())
    }

    fn alloc(&mut self, shape: [usize; 2], dtype: DType, region: Region) -> Tensor {
        self.backend.alloc("conformance", shape, dtype, region).expect("memory suffices")
    }

    fn upload(&mut self, to: Tensor, values: &Matrix) {
        let values: Vec<f32> = values.iter().map(|&x| x as f32).collect();
        self.backend.upload(to, &values).expect("as many values as elements");
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
        self.backend.run(op).expect("the shapes fit");
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
    /// and compares the outputs with the oracle's, in order.
    fn check(
        &mut self,
        outputs: &[Output],
        ops: &[Op<'_>],
        oracle: impl Fn(&mut Arithmetic) -> Vec<Matrix>,
    ) {
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

/// `[rows, columns]` with ones on the diagonal.
fn identity(rows: usize, columns: usize) -> Matrix {
    Matrix::from_shape_fn((rows, columns), |(i, j)| if i == j { 1.0 } else { 0.0 })
}

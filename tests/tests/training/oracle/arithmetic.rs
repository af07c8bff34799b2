//! f64 arithmetic that is exact for our purpose, or displaced: every result moved by the bound of
//! its own f32 rounding, with a random sign.
//!
//! The displaced runs say how far f32 may lie from f64. To first order an f32 run errs by sum_i J_i
//! e_i, where operation i errs by at most b_i; a displaced run errs by sum_i J_i s_i b_i with
//! independent signs s_i, whose standard deviation is sigma = sqrt(sum_i J_i^2 b_i^2). For
//! independent errors of mean zero Hoeffding gives P(|sum_i J_i e_i| > 6 sigma) <= 2 exp(-18) =
//! 3e-8. So [`bound`] is six times the greatest displacement that a tensor shows in several runs,
//! which is no less than sigma of its most sensitive elements.

use std::collections::BTreeMap;

use ndarray::Array2;

/// `[rows, columns]`.
pub(crate) type Matrix = Array2<f64>;

/// Matrices by parameter name.
pub(crate) type Tensors = BTreeMap<String, Matrix>;

/// The unit roundoff of f32.
const UNIT: f64 = 1.0 / (1 << 24) as f64;

/// How results are rounded.
#[derive(Debug, Clone)]
pub(crate) enum Arithmetic {
    /// To f64.
    Exact,
    /// Displaced, with the signs of this generator.
    Displaced(Random),
}

impl Arithmetic {
    /// `value`, displaced by `units` f32 roundings of `magnitude`.
    pub(crate) fn rounded(&mut self, value: f64, units: f64, magnitude: f64) -> f64 {
        match self {
            Self::Exact => value,
            Self::Displaced(random) => {
                let bound = units * UNIT * magnitude.abs();
                if random.next() >> 63 == 0 { value + bound } else { value - bound }
            }
        }
    }

    /// The sum, whose f32 error in any order is at most (terms) units of the sum of magnitudes,
    /// products included.
    pub(crate) fn sum(&mut self, terms: impl Iterator<Item = f64>) -> f64 {
        let (mut sum, mut magnitude, mut count) = (0.0, 0.0, 0.0);
        for term in terms {
            sum += term;
            magnitude += term.abs();
            count += 1.0;
        }
        self.rounded(sum, count, magnitude)
    }

    /// A B: `[m, k]` by `[k, n]`.
    pub(crate) fn product(&mut self, a: &Matrix, b: &Matrix) -> Matrix {
        assert_eq!(a.ncols(), b.nrows(), "the operands of a product share their inner length");
        Matrix::from_shape_fn((a.nrows(), b.ncols()), |(i, j)| {
            self.sum((0..a.ncols()).map(|k| a[[i, k]] * b[[k, j]]))
        })
    }

    /// A + B, one rounding.
    pub(crate) fn plus(&mut self, a: &Matrix, b: &Matrix) -> Matrix {
        Matrix::from_shape_fn(a.dim(), |at| self.rounded(a[at] + b[at], 1.0, a[at] + b[at]))
    }

    /// Every element through `f`, which gives the value and the magnitude of one unit of error.
    pub(crate) fn map(&mut self, x: &Matrix, units: f64, f: impl Fn(f64) -> (f64, f64)) -> Matrix {
        x.map(|&x| {
            let (value, magnitude) = f(x);
            self.rounded(value, units, magnitude)
        })
    }

    /// The column sums of x, `[1, n]`.
    pub(crate) fn column_sums(&mut self, x: &Matrix) -> Matrix {
        Matrix::from_shape_fn((1, x.ncols()), |(_, j)| self.sum(x.column(j).iter().copied()))
    }

    /// Adds to a gradient what one micro-batch of `terms` tokens gives; both sums may be rounded
    /// together.
    pub(crate) fn accumulate(
        &mut self,
        into: &mut Tensors,
        name: &str,
        gradient: Matrix,
        terms: usize,
    ) {
        match into.get_mut(name) {
            None => drop(into.insert(name.to_owned(), gradient)),
            Some(sum) => {
                for (sum, &term) in sum.iter_mut().zip(&gradient) {
                    *sum = self.rounded(*sum + term, terms as f64, sum.abs() + term.abs());
                }
            }
        }
    }
}

/// splitmix64: test inputs and signs.
#[derive(Debug, Clone)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// 64 bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    /// Uniform in (-1, 1), exact in f32.
    pub(crate) fn symmetric(&mut self) -> f32 {
        (self.next() >> 41) as f32 / (1 << 22) as f32 - 1.0
    }

    /// Uniform in (-scale, scale), rounded to f32.
    pub(crate) fn matrix(&mut self, [rows, columns]: [usize; 2], scale: f32) -> Matrix {
        Matrix::from_shape_fn((rows, columns), |_| f64::from(self.symmetric() * scale))
    }

    /// A whole number below `end`.
    pub(crate) fn below(&mut self, end: u32) -> u32 {
        (self.next() % u64::from(end)) as u32
    }
}

/// Six times the greatest displacement of a tensor; see the module's argument.
pub(crate) fn bound<'a>(exact: &Matrix, displaced: impl IntoIterator<Item = &'a Matrix>) -> f64 {
    6.0 * displaced
        .into_iter()
        .map(|displaced| distance(exact, displaced.iter().copied()))
        .fold(0.0, f64::max)
}

/// The greatest |expected - found|; NaN if one is.
pub(crate) fn distance(expected: &Matrix, found: impl IntoIterator<Item = f64>) -> f64 {
    let mut found = found.into_iter();
    let greatest = expected.iter().fold(0.0, |greatest: f64, expected| {
        let difference = (expected - found.next().expect("as many elements as expected")).abs();
        if difference <= greatest { greatest } else { difference }
    });
    assert!(found.next().is_none(), "no more elements than expected");
    greatest
}

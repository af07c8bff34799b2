//! f64 arithmetic, exact or displaced: every result of a displaced run is moved by the bound of its
//! own f32 rounding, with a random sign.
//!
//! Displaced runs measure how far f32 may lie from f64. To first order an f32 run errs by
//! sum_i J_i e_i, where operation i errs by at most b_i; a displaced run errs by sum_i J_i s_i b_i
//! with independent signs s_i, whose standard deviation is sigma = sqrt(sum_i J_i^2 b_i^2). For
//! independent errors of mean zero, Hoeffding gives P(|sum_i J_i e_i| > 6 sigma) <= 2 exp(-18) =
//! 3e-8. [`bound`] is therefore six times the largest displacement that a tensor shows in several
//! runs, which is at least sigma of its most sensitive elements.

use std::collections::BTreeMap;

use ndarray::Array2;

/// `[rows, columns]`.
pub type Matrix = Array2<f64>;

/// Matrices by parameter name.
pub type Tensors = BTreeMap<String, Matrix>;

/// The unit roundoff of f32.
pub const UNIT: f64 = 1.0 / (1 << 24) as f64;

/// How results are rounded.
#[derive(Debug, Clone)]
pub enum Arithmetic {
    /// To f64.
    Exact,
    /// Displaced, with signs from this generator.
    Displaced(Random),
}

impl Arithmetic {
    /// `value`, displaced by `units` f32 roundings of `magnitude`.
    pub fn rounded(&mut self, value: f64, units: f64, magnitude: f64) -> f64 {
        match self {
            Self::Exact => value,
            Self::Displaced(random) => {
                let bound = units * UNIT * magnitude.abs();
                if random.next() >> 63 == 0 { value + bound } else { value - bound }
            }
        }
    }

    /// The sum; its f32 error, in any order, is at most (terms) units of the sum of magnitudes,
    /// products included.
    pub fn sum(&mut self, terms: impl Iterator<Item = f64>) -> f64 {
        let (mut sum, mut magnitude, mut count) = (0.0, 0.0, 0.0);
        for term in terms {
            sum += term;
            magnitude += term.abs();
            count += 1.0;
        }
        self.rounded(sum, count, magnitude)
    }

    /// A B: `[m, k]` by `[k, n]`.
    ///
    /// # Panics
    /// If the inner lengths differ.
    pub fn product(&mut self, a: &Matrix, b: &Matrix) -> Matrix {
        assert_eq!(a.ncols(), b.nrows(), "the operands of a product share their inner length");
        Matrix::from_shape_fn((a.nrows(), b.ncols()), |(i, j)| {
            self.sum((0..a.ncols()).map(|k| a[[i, k]] * b[[k, j]]))
        })
    }

    /// A + B, one rounding.
    pub fn plus(&mut self, a: &Matrix, b: &Matrix) -> Matrix {
        Matrix::from_shape_fn(a.dim(), |at| self.rounded(a[at] + b[at], 1.0, a[at] + b[at]))
    }

    /// Every element through `f`, which returns the value and the magnitude of one unit of error.
    pub fn map(&mut self, x: &Matrix, units: f64, f: impl Fn(f64) -> (f64, f64)) -> Matrix {
        x.map(|&x| {
            let (value, magnitude) = f(x);
            self.rounded(value, units, magnitude)
        })
    }

    /// The column sums of x, `[1, n]`.
    pub fn column_sums(&mut self, x: &Matrix) -> Matrix {
        Matrix::from_shape_fn((1, x.ncols()), |(_, j)| self.sum(x.column(j).iter().copied()))
    }

    /// Adds the contribution of one micro-batch of `terms` tokens to a gradient; both sums may be
    /// rounded together.
    pub fn accumulate(&mut self, into: &mut Tensors, name: &str, gradient: Matrix, terms: usize) {
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
pub struct Random(pub u64);

impl Random {
    /// 64 bits.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    /// Uniform in (-1, 1), exact in f32.
    pub fn symmetric(&mut self) -> f32 {
        (self.next() >> 41) as f32 / (1 << 22) as f32 - 1.0
    }

    /// Uniform in (-scale, scale), rounded to f32.
    pub fn matrix(&mut self, [rows, columns]: [usize; 2], scale: f32) -> Matrix {
        Matrix::from_shape_fn((rows, columns), |_| f64::from(self.symmetric() * scale))
    }

    /// A whole number below `end`.
    pub fn below(&mut self, end: u32) -> u32 {
        (self.next() % u64::from(end)) as u32
    }
}

/// Six times the largest displacement of a tensor; the module documentation has the argument.
pub fn bound<'a>(exact: &Matrix, displaced: impl IntoIterator<Item = &'a Matrix>) -> f64 {
    6.0 * displaced
        .into_iter()
        .map(|displaced| distance(exact, displaced.iter().copied()))
        .fold(0.0, f64::max)
}

/// The largest |expected - found|; NaN if one is.
///
/// # Panics
/// If the numbers of elements differ.
pub fn distance(expected: &Matrix, found: impl IntoIterator<Item = f64>) -> f64 {
    let mut found = found.into_iter();
    let largest = expected.iter().fold(0.0, |largest: f64, expected| {
        let difference = (expected - found.next().expect("as many elements as expected")).abs();
        if difference <= largest { largest } else { difference }
    });
    assert!(found.next().is_none(), "no more elements than expected");
    largest
}

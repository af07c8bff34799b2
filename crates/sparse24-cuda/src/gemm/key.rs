//! The dense products that plans are kept for, and their names in recorded plans.

use std::{fmt, str::FromStr};

use crate::profile::Work;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Product {
    /// Z = X W^T: A = W, transposed, B = X.
    Forward,
    /// The same, with a bias.
    ForwardBias,
    /// dX = dZ W: A = W, B = dZ.
    Dgrad,
    /// dW = dZ^T X: A = X, B = dZ, transposed; in f32.
    Wgrad,
}

const PRODUCTS: [(Product, &str); 4] = [
    (Product::Forward, "forward"),
    (Product::ForwardBias, "forward+bias"),
    (Product::Dgrad, "dgrad"),
    (Product::Wgrad, "wgrad"),
];

/// Everything that a plan depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) product: Product,
    /// cuBLASLt's m, n, k.
    pub(super) sizes: [usize; 3],
    /// Strides of A, B and D.
    pub(super) strides: [usize; 3],
}

impl Key {
    pub(super) fn work(&self) -> Work {
        let [m, n, k] = self.sizes;
        let (pass, tokens, weight) = match self.product {
            Product::Forward | Product::ForwardBias => ("forward", n, [m, k]),
            Product::Dgrad => ("dgrad", n, [k, m]),
            Product::Wgrad => ("wgrad", k, [n, m]),
        };
        Work::Product { pass, tokens, weight }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ([m, n, k], [a, b, d]) = (self.sizes, self.strides);
        let (_, name) = PRODUCTS[self.product as usize];
        write!(f, "{name} {m}x{n}x{k} strides {a}, {b}, {d}")
    }
}

impl FromStr for Key {
    type Err = ();

    /// Reads what [`Display`](fmt::Display) writes.
    fn from_str(text: &str) -> Result<Self, ()> {
        let three = |text: &str, separator: &str| -> Option<[usize; 3]> {
            let numbers: Option<Vec<_>> =
                text.split(separator).map(|number| number.parse().ok()).collect();
            numbers?.try_into().ok()
        };
        let read = || {
            let (name, rest) = text.split_once(' ')?;
            let (sizes, strides) = rest.split_once(" strides ")?;
            let &(product, _) = PRODUCTS.iter().find(|(_, known)| *known == name)?;
            Some(Self { product, sizes: three(sizes, "x")?, strides: three(strides, ", ")? })
        };
        read().filter(|key| key.to_string() == text).ok_or(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_round_trip_through_text() {
        for (product, _) in PRODUCTS {
            let key = Key { product, sizes: [3072, 16384, 768], strides: [768, 1, 50304] };
            assert_eq!(key.to_string().parse(), Ok(key));
        }
        for text in [
            "",
            "forward",
            "forward 1x2x3",
            "turn 1x2x3 strides 1, 2, 3",
            "dgrad 1x2 strides 1, 2, 3",
            "dgrad 1x2x+3 strides 1, 2, 3",
        ] {
            assert_eq!(text.parse::<Key>(), Err(()), "{text}");
        }
    }
}

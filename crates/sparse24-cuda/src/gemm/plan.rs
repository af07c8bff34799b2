//! Plans of dense products: the library's chosen algorithm, by shape, measured and as text.
//!
//! Deliberately absent: how the library is told of a product ([`super::descriptors`]).

use std::{collections::BTreeMap, fmt, str::FromStr};

use cudarc::cublaslt::sys::{cublasLtMatmulAlgo_t, cublasStatus_t};

use super::descriptors::{Addresses, Descriptors, Handle, refused};
use crate::{Beta, Device, Error, profile::Work};

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

/// What a plan depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) product: Product,
    /// The library's m, n, k.
    pub(super) sizes: [usize; 3],
    /// Of A, B and D.
    pub(super) strides: [usize; 3],
}

impl Key {
    fn work(&self) -> Work {
        let [m, n, k] = self.sizes;
        let (pass, tokens, weight) = match self.product {
            Product::Forward | Product::ForwardBias => ("forward", n, [m, k]),
            Product::Dgrad => ("dgrad", n, [k, m]),
            Product::Wgrad => ("wgrad", k, [n, m]),
        };
        Work::Product { pass, tokens, weight }
    }
}

#[derive(Debug)]
pub(super) struct Plans {
    // Before the handle, whose library they need.
    plans: BTreeMap<Key, Plan>,
    handle: Handle,
}

/// How an algorithm was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Choice {
    /// The fastest of the candidates, here or where the plan was written down.
    Measured,
    /// The library's first.
    Unmeasured,
}

#[derive(Debug)]
pub(super) struct Plan {
    descriptors: Descriptors,
    algorithm: cublasLtMatmulAlgo_t,
    choice: Choice,
}

impl Plans {
    pub(super) fn new(device: &Device) -> Result<Self, Error> {
        Ok(Self { plans: BTreeMap::new(), handle: Handle::new(device)? })
    }

    /// Checked: operands have the key's shape, lie in live memory, and only `d` and the workspace
    /// are written.
    pub(super) fn run(
        &mut self,
        device: &mut Device,
        key: Key,
        addresses: &Addresses,
        beta: Beta,
    ) -> Result<(), Error> {
        device.bind()?;
        let planned = self.plans.get(&key).map(|plan| plan.choice);
        if planned != Some(Choice::Measured) && (planned.is_none() || beta == Beta::Overwrite) {
            let plan = self.plan(device, key, addresses, beta)?;
            self.plans.insert(key, plan);
        }
        let plan = &self.plans[&key];
        let queue = || {
            plan.descriptors
                .multiply(device, &self.handle, &plan.algorithm, addresses, beta)
                .map_err(|code| refused(&key, code))
        };
        device.noted(key.work(), queue)
    }

    fn plan(
        &self,
        device: &mut Device,
        key: Key,
        addresses: &Addresses,
        beta: Beta,
    ) -> Result<Plan, Error> {
        let descriptors = Descriptors::new(&key)?;
        let mut candidates = descriptors.candidates(&self.handle, &key)?;
        let none = || refused(&key, cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED);
        let (algorithm, choice) = match beta {
            Beta::Accumulate => (*candidates.first().ok_or_else(none)?, Choice::Unmeasured),
            Beta::Overwrite => {
                let run = |device: &mut Device, algorithm: &_| {
                    descriptors
                        .multiply(device, &self.handle, algorithm, addresses, beta)
                        .map_err(|code| refused(&key, code))
                };
                // What the library proposes it may yet refuse; with all of them refused, the last
                // says why.
                let mut refusal = None;
                candidates.retain(|algorithm| {
                    run(device, algorithm).map_err(|error| refusal = Some(error)).is_ok()
                });
                let fastest = device.fastest(&candidates, run)?;
                (fastest.ok_or_else(|| refusal.unwrap_or_else(none))?, Choice::Measured)
            }
        };
        Ok(Plan { descriptors, algorithm, choice })
    }

    pub(super) fn measured(&self) -> impl Iterator<Item = (&Key, &Plan)> {
        self.plans.iter().filter(|(_, plan)| plan.choice == Choice::Measured)
    }

    /// What was measured: the algorithm's words, by key.
    pub(super) fn texts(&self) -> BTreeMap<String, String> {
        let words = |plan: &Plan| plan.algorithm.data.map(|word| format!("{word:016x}")).join("-");
        self.measured().map(|(key, plan)| (key.to_string(), words(plan))).collect()
    }

    pub(super) fn add(&mut self, key: &str, text: &str) -> Result<(), Error> {
        let no_plan =
            |problem: &str| Error::Recorded { key: key.to_owned(), problem: problem.to_owned() };
        let of: Key = key.parse().map_err(|()| no_plan("it names no dense product"))?;
        let algorithm = words(text).ok_or_else(|| {
            no_plan("it is no algorithm of cuBLASLt: expected eight words of 16 hexadecimal digits")
        })?;
        let descriptors = Descriptors::new(&of)?;
        descriptors
            .accept(&self.handle, &of, &algorithm)
            .map_err(|code| no_plan(&refused(&of, code).to_string()))?;
        self.plans.insert(of, Plan { descriptors, algorithm, choice: Choice::Measured });
        Ok(())
    }
}

fn words(text: &str) -> Option<cublasLtMatmulAlgo_t> {
    let word = |digits: &str| {
        u64::from_str_radix(digits, 16).ok().filter(|word| format!("{word:016x}") == digits)
    };
    let words: Vec<u64> = text.split('-').map(word).collect::<Option<_>>()?;
    Some(cublasLtMatmulAlgo_t { data: words.try_into().ok()? })
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

    /// What [`Display`](fmt::Display) writes.
    fn from_str(text: &str) -> Result<Self, ()> {
        let read = || {
            let (name, rest) = text.split_once(' ')?;
            let (sizes, strides) = rest.split_once(" strides ")?;
            let three = |text: &str, between: &str| -> Option<[usize; 3]> {
                text.split(between)
                    .map(|number| number.parse().ok())
                    .collect::<Option<Vec<_>>>()?
                    .try_into()
                    .ok()
            };
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
    fn keys_and_algorithms_are_read_back_as_they_were_written() {
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
        let text = (0..8).map(|word| format!("{word:016x}")).collect::<Vec<_>>().join("-");
        assert_eq!(words(&text).map(|algorithm| algorithm.data), Some([0, 1, 2, 3, 4, 5, 6, 7]));
        for text in [
            &text[1..],
            &text[..text.len() - 17],
            &text.replace('7', "G"),
            &format!("{text}-{}", &text[..16]),
        ] {
            assert!(words(text).is_none(), "{text}");
        }
    }
}

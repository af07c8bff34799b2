//! Plans of dense products: cuBLASLt's algorithm for each key, measured or recorded.

use std::collections::BTreeMap;

use cudarc::cublaslt::sys::{cublasLtMatmulAlgo_t, cublasStatus_t};
use sparse24_core::op::Accumulate;

use super::{
    descriptors::{Addresses, Descriptors, Handle, refused},
    key::Key,
};
use crate::{Device, Error, Result};

#[derive(Debug)]
pub(super) struct Plans {
    // Before the handle, whose library they need.
    plans: BTreeMap<Key, Plan>,
    handle: Handle,
}

/// How an algorithm was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Choice {
    /// The fastest candidate, here or where the plan was recorded.
    Measured,
    /// cuBLASLt's first proposal.
    Unmeasured,
}

#[derive(Debug)]
pub(super) struct Plan {
    descriptors: Descriptors,
    algorithm: cublasLtMatmulAlgo_t,
    choice: Choice,
}

impl Plans {
    pub(super) fn new(device: &Device) -> Result<Self> {
        Ok(Self { plans: BTreeMap::new(), handle: Handle::new(device)? })
    }

    /// The caller checked that operands have the key's shape and lie in live memory, and that only
    /// `d` and the workspace are written.
    pub(super) fn run(
        &mut self,
        device: &mut Device,
        key: Key,
        addresses: &Addresses,
        accumulate: Accumulate,
    ) -> Result {
        device.bind()?;
        // Measuring overwrites the output.
        let overwrites = accumulate == Accumulate::Overwrite;
        let needs_plan = match self.plans.get(&key).map(|plan| plan.choice) {
            None => true,
            Some(choice) => choice == Choice::Unmeasured && overwrites,
        };
        if needs_plan {
            let plan = self.plan(device, key, addresses, accumulate)?;
            self.plans.insert(key, plan);
        }
        let Plan { descriptors, algorithm, .. } = &self.plans[&key];
        device.profiled(key.work(), || {
            descriptors
                .multiply(device, &self.handle, algorithm, addresses, accumulate)
                .map_err(|status| refused(&key, status))
        })
    }

    fn plan(
        &self,
        device: &mut Device,
        key: Key,
        addresses: &Addresses,
        accumulate: Accumulate,
    ) -> Result<Plan> {
        let descriptors = Descriptors::new(&key)?;
        let mut candidates = descriptors.candidates(&self.handle, &key)?;
        let none = || refused(&key, cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED);
        let (algorithm, choice) = match accumulate {
            Accumulate::Add => (*candidates.first().ok_or_else(none)?, Choice::Unmeasured),
            Accumulate::Overwrite => {
                let run = |device: &mut Device, algorithm: &_| {
                    descriptors
                        .multiply(device, &self.handle, algorithm, addresses, accumulate)
                        .map_err(|status| refused(&key, status))
                };
                // cuBLASLt may refuse what it proposed. If it refuses all, report the last refusal.
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

    /// The measured plans as text: the words of the algorithm, by key.
    pub(super) fn texts(&self) -> BTreeMap<String, String> {
        let words = |plan: &Plan| plan.algorithm.data.map(|word| format!("{word:016x}")).join("-");
        self.measured().map(|(key, plan)| (key.to_string(), words(plan))).collect()
    }

    pub(super) fn add(&mut self, name: &str, text: &str) -> Result {
        let bad = |problem: &str| Error::Recorded { key: name.into(), problem: problem.into() };
        let key: Key = name.parse().map_err(|()| bad("the key is not a dense product"))?;
        let algorithm = words(text).ok_or_else(|| {
            bad("not an algorithm of cuBLASLt: expected eight words of 16 hexadecimal digits")
        })?;
        let descriptors = Descriptors::new(&key)?;
        descriptors
            .accept(&self.handle, &key, &algorithm)
            .map_err(|status| bad(&refused(&key, status).to_string()))?;
        self.plans.insert(key, Plan { descriptors, algorithm, choice: Choice::Measured });
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

#[cfg(test)]
mod tests {
    use super::words;

    #[test]
    fn algorithms_are_read_strictly() {
        let text = (0..8).map(|word| format!("{word:016x}")).collect::<Vec<_>>().join("-");
        assert_eq!(words(&text).map(|algorithm| algorithm.data), Some([0, 1, 2, 3, 4, 5, 6, 7]));
        let (short, long) = (&text[..text.len() - 17], format!("{text}-{}", &text[..16]));
        for text in [&text[1..], short, &text.replace('7', "G"), &long] {
            assert!(words(text).is_none(), "{text}");
        }
    }
}

//! A log of the masks searched, weights pruned and gradients sampled on the CPU backend.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, Mutex},
};

use ndarray::Array2;
use sparse24_core::op::Accumulate;
use sparse24_tests::hooked::Hooked;
use sparse24_train::{
    Error,
    backend::{
        Backend, DType, Gradient24, Op, Region, Tensor,
        op::{Fill, Gradient, LinearWgrad, SparseOp},
    },
};

/// The log, in order.
#[derive(Debug, Default)]
pub(crate) struct Log {
    /// For each mask searched, the step in progress or done last (0 before the first).
    pub(crate) searches: Vec<u32>,
    /// The same for weights pruned.
    pub(crate) prunings: Vec<u32>,
    /// Sampled output gradients.
    pub(crate) samples: Vec<Sampled>,
}

/// MVUE(dZ^T) of one weight in one micro-step.
#[derive(Debug, Clone)]
pub(crate) struct Sampled {
    pub(crate) micro_step: u32,
    pub(crate) site: u32,
    /// `[r, p]`.
    pub(crate) values: Array2<f32>,
}

/// A CPU backend and its log.
pub(crate) fn spy() -> (Box<Hooked>, Arc<Mutex<Log>>) {
    let log = Arc::new(Mutex::new(Log::default()));
    let (shared, mut probes) = (Arc::clone(&log), Probes::default());
    let hook = Hooked::new(
        super::fixture::cpu(),
        Box::new(move |backend, state, op| {
            backend.execute(op)?;
            let Op::Sparse(op) = op else { return Ok(()) };
            let sampled = match op {
                SparseOp::MvueCompress(op) => Some(Sampled {
                    micro_step: state.micro_step,
                    site: op.site.word(),
                    values: probes.read(backend, op.dz.shape, op.out)?,
                }),
                _ => None,
            };
            let mut log = shared.lock().expect("no test fails while it holds the log");
            log.samples.extend(sampled);
            match op {
                SparseOp::MaskSearch(_) => log.searches.push(state.step),
                SparseOp::CompressWeight(_) => log.prunings.push(state.step),
                _ => {}
            }
            Ok(())
        }),
    );
    (hook, log)
}

/// An identity `[p, p]` and space for `[r, p]`, by the shape of dZ.
#[derive(Default)]
struct Probes(HashMap<[usize; 2], [Tensor; 2]>);

impl Probes {
    /// The sampled gradient through the contract: dW = MVUE(dZ^T) X with X the identity, where
    /// every sum has one term.
    fn read(
        &mut self,
        backend: &mut dyn Backend,
        [p, r]: [usize; 2],
        sampled: Gradient24,
    ) -> Result<Array2<f32>, Error> {
        let [x, dw] = match self.0.entry([p, r]) {
            Entry::Occupied(probe) => *probe.get(),
            Entry::Vacant(probe) => {
                let mut alloc =
                    |shape, dtype| backend.alloc("probe", shape, dtype, Region::Activations);
                let (x, dw) = (alloc([p, p], DType::Activation)?, alloc([r, p], DType::F32)?);
                backend.upload(x, Array2::<f32>::eye(p).as_slice().expect("row-major"))?;
                *probe.insert([x, dw])
            }
        };
        backend.run(Fill { to: dw, value: f32::NAN })?;
        let (dz, accumulate) = (Gradient::Sampled(sampled), Accumulate::Overwrite);
        backend.run(LinearWgrad { dz, x, dw, accumulate })?;
        let values = backend.download(dw)?;
        Ok(Array2::from_shape_vec((r, p), values).expect("the shape of the probe"))
    }
}

//! Timed choices as text: the plan of each product on this GPU.
//!
//! Invariant: every timed choice is among [`recorded`], and a replayed one is never timed again.

use std::collections::HashMap;

use sparse24_core::op::Accumulate;
use sparse24_cuda::{
    Device, Error as Refusal, Matrix,
    gemm::Gemm,
    spmm24::{Form, Plan, contenders},
};

use super::{Scratch, grown};
use crate::{Error, PLANNED_ON, Plans, Result};

/// The plans of sparse products, by form and m, n, k.
#[derive(Default)]
pub(super) struct SparsePlans(HashMap<(Form, [usize; 3]), Plan>);

const FORMS: [(Form, &str); 2] = [(Form::Transposed, "transposed"), (Form::Straight, "straight")];
const GEMM: &str = "gemm";
const SPMM24: &str = "spmm24";

impl SparsePlans {
    /// Computes a product by its plan, the fastest where none was taken over. `run` queues it.
    ///
    /// Plans are timed where the result is overwritten; a product that is added to one before that
    /// takes the likeliest.
    pub(super) fn run(
        &mut self,
        gpu: &mut Device,
        scratch: &mut Scratch,
        (form, shape, accumulate): (Form, [usize; 3], Accumulate),
        run: impl Fn(&mut Device, Matrix<f32>, Plan) -> Result<(), Refusal>,
    ) -> Result {
        let plan = match self.0.get(&(form, shape)) {
            Some(plan) => *plan,
            None => {
                let candidates = contenders(gpu, form, shape)?;
                match accumulate {
                    Accumulate::Add => candidates[0],
                    Accumulate::Overwrite => {
                        let most = candidates.iter().map(|plan| plan.scratch()).max().unwrap_or(0);
                        let memory = grown(gpu, &mut scratch.floats, [1, most])?;
                        let fastest =
                            gpu.fastest(&candidates, |gpu, plan| run(gpu, memory, *plan))?;
                        let fastest =
                            fastest.expect("every GPU has a plan, and no time is infinite");
                        *self.0.entry((form, shape)).or_insert(fastest)
                    }
                }
            }
        };
        let memory = grown(gpu, &mut scratch.floats, [1, plan.scratch()])?;
        Ok(run(gpu, memory, plan)?)
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    fn texts(&self) -> impl Iterator<Item = (String, String)> {
        self.0.iter().map(|(&(form, [m, n, k]), plan)| {
            let (_, name) = FORMS[form as usize];
            (format!("{name} {m}x{n}x{k}"), plan.to_string())
        })
    }

    fn add(&mut self, gpu: &Device, product: &str, plan: &str) -> Result<(), String> {
        let of = product.split_once(' ').and_then(|(name, sizes)| {
            let &(form, _) = FORMS.iter().find(|(_, known)| *known == name)?;
            let sizes: Option<Vec<usize>> =
                sizes.split('x').map(|size| size.parse().ok()).collect();
            Some((form, sizes?.try_into().ok()?))
        });
        let (form, shape) = of.ok_or("it names no sparse product")?;
        let plan: Plan =
            plan.parse().map_err(|error: sparse24_cuda::spmm24::NoPlan| error.to_string())?;
        plan.check(gpu, form, shape).map_err(|error| error.to_string())?;
        self.0.insert((form, shape), plan);
        Ok(())
    }
}

/// The identity that plans and bits depend on: the GPU, the compiler of its kernels, and the
/// library whose algorithms some plans name.
pub(super) fn planned_on(gpu: &Device, gemm: &Gemm) -> String {
    let compiler =
        gpu.compiler().map_or_else(|_| "no NVRTC".to_owned(), |release| format!("NVRTC {release}"));
    format!("{} ({}), {compiler}, cuBLASLt {}", gpu.name(), gpu.architecture(), gemm.release())
}

/// All plans, and what they belong to.
pub(super) fn recorded(gpu: &Device, gemm: &Gemm, sparse: &SparsePlans) -> Plans {
    let kinds = gemm
        .plans()
        .into_iter()
        .map(|plan| (GEMM, plan))
        .chain(sparse.texts().map(|plan| (SPMM24, plan)));
    let plans = kinds.map(|(kind, (product, plan))| (format!("{kind} {product}"), plan));
    plans.chain([(PLANNED_ON.to_owned(), planned_on(gpu, gemm))]).collect()
}

/// Takes over what [`recorded`] gave.
pub(super) fn replay(
    gpu: &Device,
    gemm: &mut Gemm,
    sparse: &mut SparsePlans,
    recorded: &Plans,
) -> Result {
    let here = planned_on(gpu, gemm);
    for (key, text) in recorded {
        let refused = |problem: String| Error::Plan { key: key.clone(), problem };
        match key.split_once(' ') {
            None if key == PLANNED_ON && *text == here => {}
            None if key == PLANNED_ON => {
                return Err(refused(format!("timed on {text}, found {here}")));
            }
            Some((GEMM, product)) => gemm.use_plan(product, text).map_err(|error| match error {
                Refusal::Recorded { problem, .. } => refused(problem),
                other => other.into(),
            })?,
            Some((SPMM24, product)) => sparse.add(gpu, product, text).map_err(refused)?,
            _ => return Err(refused("it names nothing that is timed here".to_owned())),
        }
    }
    Ok(())
}

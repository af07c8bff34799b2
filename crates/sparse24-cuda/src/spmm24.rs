//! The sparse x dense product on sparse tensor cores: kernels with TMA and wgmma for Hopper, and
//! kernels with cp.async and mma for every GPU.
//!
//! The instruction takes its sparse operand on the left. A layer whose activations are rows of
//! features therefore computes the transpose of its result, and the kernel transposes it back while
//! storing: see [`spmm24_transposed`]. A [`Plan`] decides how a product is computed and in which
//! order it is summed.

mod guess;
mod instance;

use half::bf16;
use sparse24_core::op::{Accumulate, Activation};

pub use crate::plan::{Form, NoPlan, Plan, Tiling};
use crate::{
    Device, Error, Matrix, Result, activation, compressed::Compressed, device::Checks,
    kernels::entry, launch::arguments, layout::BLOCK, tensor_map,
};
use guess::guess;
use instance::{INSTANCES, Kernel, schedule};

/// The largest m, n and k.
pub const MAX_SIZE: usize = 65_535 * BLOCK;
/// Alignment of rows, for 16-byte copies and stores.
const WIDE: usize = tensor_map::ALIGNMENT;

/// Operands of [`spmm24_transposed`].
#[derive(Debug, Clone, Copy)]
pub struct Transposed {
    /// The sparse operand `[m, k]`; m is a multiple of 4.
    pub a: Compressed,
    /// The transpose of the dense operand: `[n, k]`.
    pub b: Matrix<bf16>,
    /// Added to every row of the result: `[1, m]`.
    pub bias: Option<Matrix<f32>>,
    /// The transpose of the result `[n, m]`, overwritten.
    pub d: Matrix<bf16>,
    /// An activation of the stored result, and where it is stored, `[n, m]`.
    pub activated: Option<(Activation, Matrix<bf16>)>,
    /// At least [`Plan::scratch`] elements.
    pub scratch: Matrix<f32>,
}

/// Operands of [`spmm24`].
#[derive(Debug, Clone, Copy)]
pub struct Straight {
    /// The sparse operand `[m, k]`.
    pub a: Compressed,
    /// The dense operand `[k, n]`; n is a multiple of 4. Up to three of its last rows may be
    /// missing; they count as zeros.
    pub b: Matrix<bf16>,
    /// The result `[m, n]`.
    pub d: Matrix<f32>,
    /// Whether the result is overwritten or added to.
    pub accumulate: Accumulate,
    /// At least [`Plan::scratch`] elements.
    pub scratch: Matrix<f32>,
}

/// D`[n,m]` = (decode(A)`[m,k]` B`[n,k]`^T)^T + bias: Z = X S(W)^T + bias in the forward pass, and
/// dX = dZ S(W) with S(W)^T as A.
///
/// Sums are f32, in an order that depends on the plan and the shape alone. The bias is added before
/// the result is rounded to bf16. An activation has the bits of [`activation::forward`] of that
/// result; [`Plan::Wgmma`] computes it while storing, [`Plan::Mma`] in a kernel of its own, for
/// which D and H have no gaps.
///
/// # Errors
/// [`Error::Activation`] for one without [`fuses`]; those of [`activation::forward`].
/// [`Error::Shape`]; [`Error::Semantics`] unless m is a multiple of 4; [`Error::Alignment`] unless
/// rows of B and D are 16-byte aligned; [`Error::Unserved`] for a plan of another GPU;
/// [`Error::Plan`] for one of another shape; [`Error::Alias`], [`Error::Stale`],
/// [`Error::TooLarge`], [`Error::Driver`].
pub fn spmm24_transposed(device: &mut Device, operands: &Transposed, plan: Plan) -> Result {
    const OPERATION: &str = "spmm24 transposed";
    let Transposed { a, b, bias, d, activated, scratch } = *operands;
    let ([m, k], n) = (a.shape(), b.shape()[0]);
    let plan = plan.unless_empty(k);
    let mut checks = device.checks(OPERATION);
    check_sizes(&mut checks, OPERATION, m, [m, n, k])?;
    a.check_input(&mut checks, OPERATION, "a", [m, k])?;
    checks.strided("b", b, [n, k], WIDE)?.optional("bias", bias, [1, m], 4)?.strided_output(
        "d",
        d,
        [n, m],
        WIDE,
    )?;
    if let Some((_, h)) = activated {
        checks.strided_output("h", h, [n, m], WIDE)?;
    }
    check_scratch(&mut checks, OPERATION, scratch, plan)?;
    let of_activation =
        |(activation, _)| suffix(activation).ok_or(Error::Activation { activation });
    let suffix = activated.map_or(Ok(""), of_activation)?;
    if m == 0 || n == 0 {
        return Ok(());
    }
    let (fused, after, suffix) = match plan {
        Plan::Wgmma(_) => (activated, None, suffix),
        Plan::Mma(_) => (None, activated, ""),
    };
    let schedule = schedule(plan, OPERATION, device.architecture(), Form::Transposed, [m, n, k])?;
    let of_d = arguments![d, d.stride() as u64];
    let of_h = fused.map(|(_, h)| arguments![h, h.stride() as u64].to_vec()).unwrap_or_default();
    let operands = match plan {
        Plan::Mma(_) => {
            let inputs = arguments![b, b.stride() as u64, a.values, a.metadata, bias, scratch];
            [&inputs[..], &of_d, &arguments![k as u32]].concat()
        }
        Plan::Wgmma(_) => {
            let map_b = tensor_map::swizzled(b, schedule.rows_of_b)?;
            let map_d = tensor_map::swizzled(d, schedule.rows_of_d)?;
            let inputs = arguments![map_b, map_d, a.values, a.metadata, bias, scratch];
            [&inputs[..], &of_h].concat()
        }
    };
    let of_gather = [&arguments![scratch, bias][..], &of_d, &of_h].concat();
    let gather = entry(&format!("spmm24_gather_transposed{suffix}"));
    schedule.launch(device, suffix, &operands, gather, &of_gather)?;
    after.map_or(Ok(()), |(activation, h)| activation::forward(device, activation, d, h))
}

/// Whether [`spmm24_transposed`] takes this activation. GELU's erf form costs more beside the
/// product, where tensor cores wait for it, than in a kernel that is bound by memory.
#[must_use]
pub fn fuses(activation: Activation) -> bool {
    suffix(activation).is_some()
}

/// The ends of the names of kernels that compute an activation.
const SUFFIXES: [(Activation, &str); 2] =
    [(Activation::Gelu, "_gelu"), (Activation::Relu, "_relu")];

fn suffix(activation: Activation) -> Option<&'static str> {
    SUFFIXES.iter().find(|&&(of, _)| of == activation).map(|&(_, suffix)| suffix)
}

/// D`[m,n]` (+)= decode(A)`[m,k]` B`[k,n]`: dW = MVUE(dZ^T) X.
///
/// Sums are f32, in an order that depends on the plan and the shape alone.
///
/// # Errors
/// As for [`spmm24_transposed`], with n a multiple of 4 too.
pub fn spmm24(device: &mut Device, operands: &Straight, plan: Plan) -> Result {
    const OPERATION: &str = "spmm24";
    let Straight { a, b, d, accumulate, scratch } = *operands;
    let ([m, k], [rows, n]) = (a.shape(), b.shape());
    let plan = plan.unless_empty(k);
    let mut checks = device.checks(OPERATION);
    check_sizes(&mut checks, OPERATION, m, [m, n, k])?;
    check_sizes(&mut checks, OPERATION, n, [m, n, k])?;
    a.check_input(&mut checks, OPERATION, "a", [m, k])?;
    let b_rows = if rows.next_multiple_of(4) == k { rows } else { k };
    checks.strided("b", b, [b_rows, n], WIDE)?.strided_output("d", d, [m, n], WIDE)?;
    check_scratch(&mut checks, OPERATION, scratch, plan)?;
    if m == 0 || n == 0 {
        return Ok(());
    }
    let add = u32::from(accumulate == Accumulate::Add);
    let result = arguments![d, d.stride() as u64, add];
    let schedule = schedule(plan, OPERATION, device.architecture(), Form::Straight, [m, n, k])?;
    let operands = match plan {
        Plan::Mma(_) => {
            let inputs = arguments![b, b.stride() as u64, a.values, a.metadata, scratch];
            [&inputs[..], &result, &arguments![rows as u32]].concat()
        }
        Plan::Wgmma(_) => {
            let map_b = tensor_map::swizzled(b, schedule.rows_of_b)?;
            [&arguments![map_b, a.values, a.metadata, scratch][..], &result].concat()
        }
    };
    let of_gather = [&arguments![scratch][..], &result].concat();
    schedule.launch(device, "", &operands, "spmm24_gather", &of_gather)
}

impl Plan {
    /// Checks that this GPU can compute a product `[m, n, k]` with this plan.
    ///
    /// # Errors
    /// [`Error::Unserved`] for a plan of another GPU; [`Error::Plan`] if it does not fit the shape.
    pub fn check(self, device: &Device, form: Form, shape: [usize; 3]) -> Result {
        schedule(self, "a sparse product", device.architecture(), form, shape).map(drop)
    }
}

/// The bytes of dynamic shared memory of a kernel of these products, and 0 for others.
#[must_use]
pub fn shared_memory(entry: &str) -> u32 {
    let plain = SUFFIXES.iter().find_map(|(_, suffix)| entry.strip_suffix(suffix)).unwrap_or(entry);
    let instance = INSTANCES.iter().find(|instance| instance.entry == plain);
    instance.map_or(0, |instance| instance.grid(1).shared)
}

/// The [`plans`] worth timing: those with `wgmma` where it exists; others lose, but need scratch.
///
/// # Errors
/// As for [`plans`].
pub fn contenders(device: &mut Device, form: Form, shape: [usize; 3]) -> Result<Vec<Plan>> {
    let mut plans = plans(device, form, shape)?;
    let is_wgmma = |plan: &Plan| matches!(plan, Plan::Wgmma(_));
    if plans.iter().any(is_wgmma) {
        plans.retain(is_wgmma);
    }
    Ok(plans)
}

/// A plan of each kernel for a product `[m, n, k]`, with the one that should be fastest first.
///
/// # Errors
/// [`Error::Compile`], [`Error::Library`], [`Error::Driver`]: the number of resident tiles is a
/// property of the compiled kernels.
pub fn plans(device: &mut Device, form: Form, shape: [usize; 3]) -> Result<Vec<Plan>> {
    if shape.contains(&0) {
        return Ok(vec![Plan::EMPTY]);
    }
    let architecture = device.architecture();
    let mut guesses: Vec<(f64, Plan)> = Vec::new();
    for instance in INSTANCES.iter().filter(|of| of.form == form && of.serves(architecture)) {
        if device.without_wgmma && instance.kernel != Kernel::Mma {
            continue;
        }
        let blocks = instance.blocks();
        let residents = device.resident_blocks(instance.entry, instance.grid(1), blocks)?;
        let (cost, tiling) = guess(instance, shape, residents as u32 / blocks);
        guesses.push((cost, instance.plan(tiling)));
    }
    guesses.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    Ok(guesses.into_iter().map(|(_, plan)| plan).collect())
}

/// The scratch is large enough and overlaps nothing.
fn check_scratch(
    checks: &mut Checks<'_>,
    operation: &'static str,
    scratch: Matrix<f32>,
    plan: Plan,
) -> Result {
    let (needed, found) = (plan.scratch(), scratch.shape());
    if scratch.elements() < needed {
        let (operand, expected) = ("scratch", [1, needed]);
        return Err(Error::Shape { operation, operand, expected, found });
    }
    checks.output("scratch", scratch, found, WIDE)?;
    Ok(())
}

/// `grouped` is a multiple of 4, and no size is too large.
fn check_sizes(
    checks: &mut Checks<'_>,
    operation: &'static str,
    grouped: usize,
    [m, n, k]: [usize; 3],
) -> Result {
    if !grouped.is_multiple_of(4) {
        return Err(sparse24_core::Error::NotGrouped { operation, length: grouped }.into());
    }
    checks.limit("m", m, MAX_SIZE)?.limit("n", n, MAX_SIZE)?.limit("k", k, MAX_SIZE)?;
    Ok(())
}

//! The cost of a run before it runs: its model on a backend that only counts.

use crate::{
    Result,
    backend::{
        Backend, BackendEntry, Op, Region, ShapeOnly,
        op::{DenseOp, GradNorm, Gradient, OptimizerStep, Weight},
    },
    nn::Parameter,
    trainer::{Allocated, Recipe},
};

/// The cost of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Estimate {
    /// All parameters.
    pub parameters: u64,
    /// Parameters that masks may prune.
    pub sparsifiable: u64,
    /// Bytes of weights.
    pub weight_bytes: u64,
    /// Bytes of gradients.
    pub gradient_bytes: u64,
    /// Bytes of optimizer moments.
    pub moment_bytes: u64,
    /// Bytes of masks and pruned operands.
    pub sparse_bytes: u64,
    /// Bytes of activations of one micro-batch.
    pub activation_bytes: u64,
    /// Bytes of working memory of operations.
    pub scratch_bytes: u64,
    /// Bytes of the device's context and of library workspaces, beside [`Self::device_bytes`].
    pub overhead_bytes: u64,
    /// Tokens of one optimizer step, the mean over the run rounded down.
    pub tokens_per_step: u64,
    /// Floating-point operations of the products of one optimizer step, the mean over the run; a
    /// multiply-add counted as two, as if all were dense.
    pub flops_per_step: f64,
    /// The share of them with a 2:4 operand in a sparse phase, on a device that has such products.
    pub sparse_share: f64,
    /// Bytes of one checkpoint's tensors, except for a few numbers.
    pub checkpoint_bytes: u64,
    /// Bytes of main memory that the device needs to copy them to the host.
    pub staging_bytes: u64,
}

impl Estimate {
    /// Bytes on the device, in total.
    #[must_use]
    pub fn device_bytes(&self) -> u64 {
        let state = [self.weight_bytes, self.gradient_bytes, self.moment_bytes, self.sparse_bytes];
        let rest = [self.activation_bytes, self.scratch_bytes];
        state.into_iter().chain(rest).fold(0, u64::saturating_add)
    }
}

/// The cost of a recipe on a backend, for one rank: one micro-batch of its sparse phase, if it has
/// one. One of several ranks takes less: what it receives from the others is smaller than the
/// partial sums that it need not hold.
///
/// # Errors
/// Errors of [`Recipe::check`], and of the allocations: sparsifiable shapes must consist of 4x4
/// tiles.
pub fn estimate(recipe: &Recipe, backend: &BackendEntry) -> Result<Estimate> {
    let capabilities = (backend.capabilities)();
    recipe.check(&capabilities)?;
    let mut counter = ShapeOnly::new((backend.footprint)(), capabilities);
    let allocated = Allocated::new(&mut counter, recipe, 1)?;
    let phase = recipe.method.sparse_phase();
    let mut sparse_flops = 0.0;
    let mut watch = |_: &mut dyn Backend, op: &Op<'_>| {
        let is_sparse = match op {
            Op::Dense(DenseOp::LinearForward(op)) => matches!(op.weight, Weight::Pruned(_)),
            Op::Dense(DenseOp::LinearDgrad(op)) => {
                matches!(op.weight, Weight::Pruned(_)) && phase.has_sparse_dgrad()
            }
            Op::Dense(DenseOp::LinearWgrad(op)) => matches!(op.dz, Gradient::Sampled(_)),
            _ => false,
        };
        sparse_flops += if is_sparse { op.flops() } else { 0.0 };
        Ok(())
    };
    let mut pass = recipe.pass(&mut counter, &phase, recipe.batch);
    pass.watch = Some(&mut watch);
    allocated.model.train(&mut pass)?;
    let (table, decay) = (allocated.sparse_table, recipe.method.decay);
    pass.run(GradNorm { table })?;
    pass.run(OptimizerStep { table, optimizer: &recipe.optimizer, decay })?;

    let elements = |parameter: &Parameter| parameter.weight.elements() as u64;
    let parameters: u64 = allocated.parameters.iter().map(elements).sum();
    let sparsifiable: u64 = allocated.parameters.sparsifiable().map(elements).sum();
    let rows: u64 = allocated.parameters.sparsifiable().map(|p| p.weight.shape[0] as u64).sum();
    // Two bytes per tile of a mask; of dgrad's own mask too, and its order of rows.
    let masks = match recipe.method.pruned_operands().len() {
        0 => 0,
        1 => sparsifiable / 8,
        _ => sparsifiable / 4 + 4 * rows,
    };
    let micro_steps = recipe.gradient_accumulation.before(recipe.steps.saturating_add(1)) as f64;
    let floats = 2
        + u64::from(recipe.optimizer.rule.adam().is_some())
        + u64::from(recipe.ema_decay.is_some());
    let checkpoint_bytes = parameters.saturating_mul(4 * floats).saturating_add(masks);
    Ok(Estimate {
        parameters,
        sparsifiable,
        weight_bytes: counter.bytes(Region::Parameters),
        gradient_bytes: counter.bytes(Region::Gradients),
        moment_bytes: counter.bytes(Region::Moments),
        sparse_bytes: counter.bytes(Region::Sparse),
        activation_bytes: counter.bytes(Region::Activations),
        scratch_bytes: counter.bytes(Region::Scratch),
        overhead_bytes: (backend.footprint)().overhead(),
        tokens_per_step: recipe.tokens_per_step(),
        flops_per_step: micro_steps * counter.flops / f64::from(recipe.steps),
        sparse_share: sparse_flops / counter.flops,
        checkpoint_bytes,
        staging_bytes: (backend.footprint)().staging(checkpoint_bytes),
    })
}

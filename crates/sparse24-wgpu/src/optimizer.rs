//! The norm of all gradients, and the step of an optimizer with masked decay.

use sparse24_core::op::{Adam, MaskedDecay, Optimizer, UpdateRule};

use crate::{
    Device, Error, Matrix, Tiles, WORKGROUP,
    elementwise::fill,
    error::{check_contiguous, check_shape},
    kernels,
};

/// A parameter; all matrices are contiguous and have the shape of w.
#[derive(Debug, Clone, Copy)]
pub struct Parameter {
    /// The weight.
    pub w: Matrix,
    /// Its gradient.
    pub g: Matrix,
    /// First moment.
    pub m: Matrix,
    /// Second moment, of rules that have one.
    pub v: Option<Matrix>,
    /// The mask, if masked decay applies.
    pub mask: Option<Tiles>,
    /// Weight decay of this parameter.
    pub weight_decay: f32,
}

/// Parameters that are updated together.
pub struct Parameters {
    all: Vec<Parameter>,
    /// The largest magnitude of the gradients, then sums of squares.
    scratch: Matrix,
    /// Bound in place of the second moment where a rule has none; never written.
    unused: Matrix,
}

/// Elements that a workgroup sums.
const BLOCK: usize = 4096;

fn blocks(parameter: &Parameter) -> usize {
    parameter.g.elements().div_ceil(BLOCK)
}

impl Parameters {
    /// Takes the parameters, and allocates scratch for them under `purpose`.
    ///
    /// # Errors
    /// [`Error::Shape`] unless all matrices of a parameter fit; [`Error::Invalid`] for gaps between
    /// rows; those of [`Device::alloc`].
    pub fn new(
        device: &mut Device,
        all: Vec<Parameter>,
        purpose: &'static str,
    ) -> Result<Self, Error> {
        for Parameter { w, g, m, v, mask, .. } in &all {
            for (operand, found) in [("g", *g), ("m", *m), ("v", v.unwrap_or(*m))] {
                check_shape("optimizer", operand, w.shape, found)?;
                check_contiguous("optimizer", operand, found)?;
            }
            check_contiguous("optimizer", "w", *w)?;
            if let Some(mask) = mask {
                check_shape("optimizer", "w", mask.shape, *w)?;
            }
        }
        let sums: usize = all.iter().map(blocks).sum();
        let scratch = device.alloc("sums of squares", [1, 1 + sums], purpose)?;
        let unused = device.alloc("no second moment", [1, 1], purpose)?;
        Ok(Self { all, scratch, unused })
    }

    /// Bytes of the scratch of parameters with these numbers of elements.
    #[must_use]
    pub fn scratch_bytes(elements: impl Iterator<Item = usize>) -> u64 {
        4 * (2 + elements.map(|n| n.div_ceil(BLOCK) as u64).sum::<u64>())
    }
}

/// Writes the L2 norm of all gradients to [`health`](crate::health), and raises its flag if a
/// gradient or the norm is not finite. The sums overflow only if the norm does.
///
/// # Errors
/// Failures of earlier work.
pub fn grad_norm(
    device: &mut Device,
    parameters: &Parameters,
    health: Matrix,
) -> Result<(), Error> {
    let scratch = parameters.scratch;
    fill(device, Matrix { shape: [1, 1], ..scratch }, 0)?;
    for kernel in [&kernels::NORM_LARGEST, &kernels::NORM_SQUARES] {
        let mut first = 1;
        for (row, parameter) in parameters.all.iter().enumerate() {
            let g = parameter.g;
            let constants = [g.offset, g.elements(), first, row].map(|n| n as u32);
            device.run(kernel, [g, scratch, health], &constants, blocks(parameter))?;
            first += blocks(parameter);
        }
    }
    let Some(parameter) = parameters.all.first() else { return Ok(()) };
    let sums = scratch.elements() - 1;
    let matrices = [parameter.g, scratch, health];
    device.run(&kernels::NORM_TOTAL, matrices, &[0, sums as u32, 1, 0], 1)
}

/// One step of every parameter, clipped by the norm of [`grad_norm`], with masked decay. Does
/// nothing while the flag is raised. The learning rate and bias corrections are those of the step
/// state.
///
/// # Errors
/// Failures of earlier work.
///
/// # Panics
/// If the rule has a second moment and a parameter has none.
pub fn optimizer_step(
    device: &mut Device,
    parameters: &Parameters,
    optimizer: &Optimizer,
    decay: MaskedDecay,
    health: Matrix,
) -> Result<(), Error> {
    let (rule, beta1, beta2, epsilon) = match optimizer.rule {
        UpdateRule::AdamW(adam) | UpdateRule::Adam(adam) => {
            let Adam { beta1, beta2, epsilon } = adam;
            (0, beta1, beta2, epsilon)
        }
        UpdateRule::Sgd { momentum } => (1, momentum, 0.0, 0.0),
        UpdateRule::Lion { beta1, beta2 } => (2, beta1, beta2, 0.0),
    };
    // WGSL implementations may assume that no number is infinite.
    let clip = Some(optimizer.clip).filter(|clip| clip.is_finite());
    for Parameter { w, g, m, v, mask, weight_decay } in &parameters.all {
        assert!(v.is_some() || optimizer.rule.adam().is_none(), "Adam has a second moment");
        let v = v.unwrap_or(parameters.unused);
        let offsets = [g, w, m, &v].map(|matrix| matrix.offset as u32);
        let sizes = [w.elements() as u32, w.shape[1] as u32];
        let mask = mask.filter(|_| decay != MaskedDecay::None);
        let flags = [u32::from(mask.is_some()), rule, u32::from(clip.is_some())];
        let [coupled, decoupled] = optimizer.rule.placed(*weight_decay);
        let [masked_coupled, masked_decoupled] = decay.placed();
        let numbers = [
            clip.unwrap_or(0.0),
            beta1,
            beta2,
            epsilon,
            coupled,
            decoupled,
            masked_coupled,
            masked_decoupled,
            1.0 - beta1,
            1.0 - beta2,
        ];
        let numbers = numbers.map(f32::to_bits);
        let constants = [&offsets[..], &sizes, &flags, &numbers].concat();
        let matrices = [*g, mask.map_or(*g, |mask| mask.words), health, *w, *m, v];
        let groups = w.elements().div_ceil(WORKGROUP);
        device.run(&kernels::OPTIMIZER_STEP, matrices, &constants, groups)?;
    }
    Ok(())
}

//! Keeps masks and pruned operands in line with the weights, the phase, and the next phase where
//! that starts to prune.

use ndarray::ArrayView2;
use sparse24_core::{
    MaskKind,
    permute::{INTERVAL, row_order},
    philox::{Purpose, Site, Stream},
    prune::{ValueMap, soft_threshold_scale},
};

use super::{Allocated, Part, Trainer};
use crate::{
    Result,
    backend::{
        Backend,
        op::{CompressWeight, MaskSearch, Orientation, PermutedMask},
    },
    method::{KeptValues, WeightOperand},
};

/// The state of a weight's pruning, besides its masks.
#[derive(Debug, Clone, Default)]
pub(super) struct Memory {
    /// The order of rows in which its permuted mask forms groups.
    pub(super) order: Option<Vec<u32>>,
    /// The scale of its soft threshold.
    pub(super) scale: Option<f32>,
}

/// Which masks are searched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refreshed {
    /// All.
    All,
    /// Those that are due after the last step taken.
    IfDue,
    /// None, unless a sparse phase starts.
    None,
}

impl Trainer {
    /// Brings masks and S(w) in line with w and the phase, and with the next phase where that is
    /// the first sparse one.
    pub(super) fn prepare_weights(&mut self, refreshed: Refreshed) -> Result {
        let step = self.step();
        let [current, next] = [step, step + 1].map(|step| *self.phase_of(step));
        let entered = current.mask().is_none();
        let forward = if entered { next.forward } else { current.forward };
        let WeightOperand::Pruned(kind, values) = forward else { return Ok(()) };
        let (masks_due, orders_due) = match refreshed {
            Refreshed::All => (true, true),
            _ if entered => (true, true),
            Refreshed::IfDue => {
                (self.recipe.method.refresh.is_due(step), step.is_multiple_of(INTERVAL))
            }
            Refreshed::None => (false, false),
        };
        let Self { backend, allocated: Allocated { parameters, .. }, memories, .. } = self;
        for ((number, parameter, pruned), memory) in parameters.pruned().zip(&mut *memories) {
            if masks_due {
                backend.run(MaskSearch { w: parameter.weight, kind, mask: pruned.mask })?;
            }
            if let Some((mask, _)) = pruned.dgrad.filter(|_| masks_due || orders_due) {
                let stream =
                    Stream::new(self.recipe.seed, Site::new(Purpose::Permutation, number), 0, step);
                if orders_due {
                    memory.order = Some(row_order(&backend.download_mask(pruned.mask)?, stream));
                }
                let order = memory.order.as_deref().expect("the first mask has an order");
                let (w, out) = (parameter.weight, mask);
                backend.run(PermutedMask { w, mask: pruned.mask, order, out })?;
            }
            if values == KeptValues::SoftThreshold && memory.scale.is_none() {
                let [rows, columns] = parameter.weight.shape;
                let w = backend.download(parameter.weight)?;
                let w = ArrayView2::from_shape((rows, columns), &w)
                    .expect("a download has the shape of its tensor");
                memory.scale = Some(soft_threshold_scale(w)?);
            }
        }
        let orientation =
            if kind == MaskKind::Transposable { Orientation::Both } else { Orientation::Forward };
        let mut compress = |backend: &mut dyn Backend| {
            parameters.pruned().zip(&*memories).try_for_each(|((_, parameter, pruned), memory)| {
                let map = match values {
                    KeptValues::Identity => ValueMap::Identity,
                    KeptValues::SoftThreshold => ValueMap::SoftThreshold {
                        scale: memory.scale.expect("the scale was just chosen"),
                    },
                };
                let (w, mask, out) = (parameter.weight, pruned.mask, pruned.weight);
                backend.run(CompressWeight { w, mask, orientation, map, out })?;
                let Some((mask, out)) = pruned.dgrad else { return Ok(()) };
                backend.run(CompressWeight {
                    w,
                    mask,
                    orientation: Orientation::Permuted,
                    map: ValueMap::Identity,
                    out,
                })
            })
        };
        match values {
            KeptValues::Identity => backend.graph(Part::Compress.of_phase(0, None), &mut compress),
            // A captured graph would keep the scales of earlier weights.
            KeptValues::SoftThreshold => compress(&mut **backend),
        }
    }
}

//! Masks and pruned operands in line with the weights, the phase at hand, and the next one where
//! that begins to prune.
//!
//! Deliberately absent: what the semantics of a mask, an order or a scale are (core's).

use ndarray::ArrayView2;
use sparse24_core::{
    MaskKind,
    permute::{INTERVAL, row_order},
    philox::{Purpose, Site, Stream},
    prune::{ValueMap, soft_threshold_scale},
};

use super::{Part, Trainer};
use crate::{
    Error,
    backend::{Backend, CompressWeight, Orientation},
    method::{KeptValues, WeightOperand},
    nn::parameter::{Parameter, Parameters, Pruned},
};

/// What pruning remembers of a weight, besides its masks.
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
    Anew,
    /// Those that are due after the step done last.
    AsDue,
    /// None, unless a sparse phase begins.
    Kept,
}

/// The weights that the method prunes, with their numbers.
pub(super) fn pruned(parameters: &Parameters) -> impl Iterator<Item = (u32, &Parameter, Pruned)> {
    parameters
        .iter()
        .enumerate()
        .filter_map(|(number, parameter)| Some((number as u32, parameter, parameter.pruned()?)))
}

impl Trainer {
    /// Brings masks and S(w) in line with w and the phase at hand, and with the next one where a
    /// sparse phase begins.
    pub(super) fn prepare_weights(&mut self, refreshed: Refreshed) -> Result<(), Error> {
        let step = self.step();
        let [current, next] =
            [step, step + 1].map(|step| self.recipe.method.phases[self.phase_index(step)]);
        let entered = current.mask().is_none();
        let forward = if entered { next.forward } else { current.forward };
        let WeightOperand::Pruned(kind, values) = forward else { return Ok(()) };
        let (masks_due, orders_due) = match refreshed {
            Refreshed::Anew => (true, true),
            _ if entered => (true, true),
            Refreshed::AsDue => {
                (self.recipe.method.refresh.is_due(step), step.is_multiple_of(INTERVAL))
            }
            Refreshed::Kept => (false, false),
        };
        let Self { backend, parameters, memories, .. } = self;
        for ((number, parameter, pruned), memory) in pruned(parameters).zip(&mut *memories) {
            if masks_due {
                backend.mask_search(parameter.weight, kind, pruned.mask)?;
            }
            if let Some((mask, _)) = pruned.dgrad.filter(|_| masks_due || orders_due) {
                let stream =
                    Stream::new(self.recipe.seed, Site::new(Purpose::Permutation, number), 0, step);
                if orders_due {
                    memory.order = Some(row_order(&backend.download_mask(pruned.mask)?, stream));
                }
                let order = memory.order.as_deref().expect("the first mask came with an order");
                backend.permuted_mask(parameter.weight, pruned.mask, order, mask)?;
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
            pruned(parameters).zip(&*memories).try_for_each(|((_, parameter, pruned), memory)| {
                let map = match values {
                    KeptValues::Identity => ValueMap::Identity,
                    KeptValues::SoftThreshold => {
                        ValueMap::SoftThreshold { scale: memory.scale.expect("it was just chosen") }
                    }
                };
                let (w, mask, out) = (parameter.weight, pruned.mask, pruned.weight);
                backend.compress_weight(&CompressWeight { w, mask, orientation, map, out })?;
                let Some((mask, out)) = pruned.dgrad else { return Ok(()) };
                backend.compress_weight(&CompressWeight {
                    w,
                    mask,
                    orientation: Orientation::Permuted,
                    map: ValueMap::Identity,
                    out,
                })
            })
        };
        match values {
            KeptValues::Identity => backend.segment(Part::Compress.of_phase(0), &mut compress),
            // A recording would keep the scales of the weights that were here before.
            KeptValues::SoftThreshold => compress(&mut **backend),
        }
    }
}

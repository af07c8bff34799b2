//! The optimizer, copies and fills on the CPU.

use rayon::prelude::*;
use sparse24_core::op::NonFinite;
use sparse24_cpu::{
    average::moving_average,
    optimizer::{optimizer_step, squared_norm},
};

use super::CpuBackend;
use crate::{
    MaskId, OptimizerEntry, Result, TableId, Tensor,
    op::{GradNorm, OptimizerStep, UpdateOp},
};

impl CpuBackend {
    pub(super) fn update(&mut self, op: &UpdateOp<'_>) -> Result {
        match op {
            UpdateOp::Copy(op) => self.write([op.to], |cpu, [mut to]| {
                to.assign(&cpu.buffers.view(op.from));
                Ok(())
            }),
            UpdateOp::Fill(op) => self.write([op.to], |_, [mut to]| {
                to.fill(op.value);
                Ok(())
            }),
            UpdateOp::GradNorm(op) => self.grad_norm(op),
            UpdateOp::OptimizerStep(op) => self.optimizer_step(op),
            UpdateOp::MovingAverage(_) if self.non_finite.is_some() => Ok(()),
            UpdateOp::MovingAverage(op) => self.write([op.average], |cpu, [average]| {
                moving_average(cpu.buffers.view(op.w), average, op.decay)
            }),
        }
    }

    fn grad_norm(&mut self, GradNorm { table: TableId(table) }: &GradNorm) -> Result {
        let squares: Vec<f64> = self.tables[*table]
            .par_iter()
            .map(|entry| {
                let gradient = self.buffers.floats(entry.gradient);
                squared_norm(&gradient[..entry.gradient.elements()])
            })
            .collect();
        self.grad_norm = squares.iter().sum::<f64>().sqrt() as f32;
        let gradient = squares.iter().position(|square| !square.is_finite());
        let norm = (!self.grad_norm.is_finite()).then_some(NonFinite::Norm);
        self.non_finite = self.non_finite.or(gradient.map(NonFinite::Gradient)).or(norm);
        Ok(())
    }

    fn optimizer_step(&mut self, op: &OptimizerStep<'_>) -> Result {
        if self.non_finite.is_some() {
            return Ok(());
        }
        let TableId(table) = op.table;
        let scale = op.optimizer.gradient_scale(self.grad_norm);
        let tensors = |entry: OptimizerEntry| {
            [Some(entry.weight), Some(entry.first_moment), entry.second_moment]
        };
        let mut taken: Vec<_> = self.tables[table]
            .iter()
            .map(|&entry| {
                let take = |t: Option<_>| t.map(|t| self.buffers.take(t)).unwrap_or_default();
                (entry, tensors(entry).map(take))
            })
            .collect();
        // All parameters at once: most are too small to keep two threads busy.
        let done = taken.par_iter_mut().try_for_each(|(entry, [w, m, v])| {
            let mask = entry.mask.map(|MaskId(at)| &self.masks[at]);
            let part = |t: Tensor| t.offset..t.offset + t.elements();
            let g = &self.buffers.floats(entry.gradient)[..entry.gradient.elements()];
            let [w, m] = [(w, entry.weight), (m, entry.first_moment)].map(|(x, t)| &mut x[part(t)]);
            let v = entry.second_moment.map_or(&mut [][..], |t| &mut v[part(t)]);
            let OptimizerStep { optimizer, decay, .. } = *op;
            let (state, weight_decay) = (&self.state, entry.weight_decay);
            optimizer_step(w, g, m, v, optimizer, state, weight_decay, scale, decay, mask)
        });
        for (entry, data) in taken {
            for (t, data) in tensors(entry).into_iter().zip(data) {
                if let Some(t) = t {
                    self.buffers.put(t, data);
                }
            }
        }
        Ok(done?)
    }
}

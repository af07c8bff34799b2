//! The optimizer, copies and fills on the CPU.

use sparse24_core::op::NonFinite;
use sparse24_cpu::optimizer;

use super::CpuBackend;
use crate::{
    Error,
    backend::{
        MaskId, TableId,
        op::{GradNorm, OptimizerStep, UpdateOp},
    },
};

impl CpuBackend {
    pub(super) fn update(&mut self, op: &UpdateOp<'_>) -> Result<(), Error> {
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
        }
    }

    fn grad_norm(&mut self, GradNorm { table: TableId(table) }: &GradNorm) -> Result<(), Error> {
        let squares: Vec<f64> = self.tables[*table]
            .iter()
            .map(|entry| {
                let gradient = self.buffers.floats(entry.gradient);
                optimizer::squared_norm(&gradient[..entry.gradient.elements()])
            })
            .collect();
        self.grad_norm = squares.iter().sum::<f64>().sqrt() as f32;
        let gradient = squares.iter().position(|square| !square.is_finite());
        let norm = (!self.grad_norm.is_finite()).then_some(NonFinite::Norm);
        self.non_finite = self.non_finite.or(gradient.map(NonFinite::Gradient)).or(norm);
        Ok(())
    }

    fn optimizer_step(&mut self, op: &OptimizerStep<'_>) -> Result<(), Error> {
        if self.non_finite.is_some() {
            return Ok(());
        }
        let TableId(table) = op.table;
        let gradient_scale = op.optimizer.gradient_scale(self.grad_norm);
        for &entry in &self.tables[table] {
            let [mut w, mut m] = [entry.weight, entry.first_moment].map(|t| self.buffers.take(t));
            let mut v = entry.second_moment.map(|t| self.buffers.take(t)).unwrap_or_default();
            let mask = entry.mask.map(|MaskId(at)| &self.masks[at]);
            let g = self.buffers.floats(entry.gradient);
            let done = optimizer::optimizer_step(
                &mut w,
                g,
                &mut m,
                &mut v,
                op.optimizer,
                &self.state,
                entry.weight_decay,
                gradient_scale,
                op.decay,
                mask,
            );
            let moments = [Some(entry.first_moment), entry.second_moment];
            for (t, data) in [Some(entry.weight)].into_iter().chain(moments).zip([w, m, v]) {
                if let Some(t) = t {
                    self.buffers.put(t, data);
                }
            }
            done?;
        }
        Ok(())
    }
}

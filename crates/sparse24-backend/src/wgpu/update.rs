//! The optimizer, copies and fills.

use sparse24_wgpu::{average::moving_average, elementwise, optimizer};

use super::WgpuBackend;
use crate::{Result, TableId, op::UpdateOp};

impl WgpuBackend {
    pub(super) fn update(&mut self, op: &UpdateOp<'_>) -> Result {
        let gpu = &mut self.gpu;
        match op {
            UpdateOp::Copy(op) => {
                let [from, to] = [op.from, op.to].map(|t| self.buffers.matrix(t));
                Ok(elementwise::copy(gpu, from, to)?)
            }
            UpdateOp::Fill(op) => {
                Ok(elementwise::fill(gpu, self.buffers.matrix(op.to), op.value.to_bits())?)
            }
            UpdateOp::GradNorm(op) => {
                let TableId(table) = op.table;
                Ok(optimizer::grad_norm(gpu, &self.tables[table], self.health)?)
            }
            UpdateOp::OptimizerStep(op) => {
                let table = &self.tables[op.table.0];
                Ok(optimizer::optimizer_step(gpu, table, op.optimizer, op.decay, self.health)?)
            }
            UpdateOp::MovingAverage(op) => {
                let [w, average] = [op.w, op.average].map(|t| self.buffers.matrix(t));
                Ok(moving_average(gpu, w, average, op.decay, self.health)?)
            }
        }
    }
}

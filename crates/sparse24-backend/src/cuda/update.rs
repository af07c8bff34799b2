//! The optimizer, copies and fills on a GPU.

use sparse24_cuda::{average::moving_average, optimizer};

use super::{CudaBackend, graph::Writes};
use crate::{
    Memory, Result, TableId,
    op::{Fill, UpdateOp},
};

impl CudaBackend {
    pub(super) fn update(&mut self, op: &UpdateOp<'_>) -> Result {
        match op {
            UpdateOp::Copy(op) => self.buffers.copy(&mut self.gpu, op.from, op.to),
            UpdateOp::Fill(Fill { to, value }) if value.to_bits() == 0 => {
                self.buffers.clear(&mut self.gpu, *to)
            }
            UpdateOp::Fill(Fill { to, value }) => self.upload(*to, &vec![*value; to.elements()]),
            UpdateOp::GradNorm(op) => {
                let TableId(table) = op.table;
                Ok(optimizer::grad_norm(&mut self.gpu, &self.tables[table], self.health)?)
            }
            UpdateOp::OptimizerStep(op) => {
                self.gpu.wait_for_copies()?;
                self.writes = Writes::Parameters;
                let (gpu, table) = (&mut self.gpu, &self.tables[op.table.0]);
                Ok(optimizer::optimizer_step(gpu, table, op.optimizer, op.decay, self.health)?)
            }
            UpdateOp::MovingAverage(op) => {
                self.gpu.wait_for_copies()?;
                self.writes = Writes::Parameters;
                let [w, average] = [op.w, op.average].map(|t| self.buffers.floats(t));
                Ok(moving_average(&mut self.gpu, w, average, op.decay, self.health)?)
            }
        }
    }
}

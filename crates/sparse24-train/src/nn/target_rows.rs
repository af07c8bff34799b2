//! The rows of a batch that have a target: a head that reads a few tokens of each sequence computes
//! nothing for the others.

use super::{Pass, builder::Builder};
use crate::{
    Error, Result,
    backend::{
        Backend, DType, Region, Tensor,
        op::{GatherRows, HeadLoss, ScatterRows},
    },
};

/// The numbers of the rows that have a target.
#[derive(Debug, Clone, Copy)]
pub struct TargetRows {
    /// `[n, 1]`; [`HeadLoss::IGNORE`] after the last.
    numbers: Tensor,
}

impl TargetRows {
    /// Allocates n numbers.
    pub fn new(builder: &mut Builder<'_>, name: &str, n: usize) -> Result<Self> {
        let numbers = builder.tensor(name, [n, 1], DType::U32, Region::Activations)?;
        Ok(Self { numbers })
    }

    /// Finds the rows of `targets` and copies their numbers and targets to the device, filled up to
    /// n with [`HeadLoss::IGNORE`]. `to` `[n, 1]` takes the targets.
    ///
    /// # Errors
    /// [`Error::Operand`] for more than n targets; errors from the backend.
    pub fn upload(
        &self,
        backend: &mut dyn Backend,
        targets: &[u32],
        n: usize,
        to: Tensor,
    ) -> Result {
        let wanted = targets.iter().enumerate().filter(|&(_, &target)| target != HeadLoss::IGNORE);
        let (mut rows, mut ids): (Vec<u32>, Vec<u32>) =
            wanted.map(|(row, &target)| (row as u32, target)).unzip();
        if ids.len() > n {
            let (operation, operand) = ("batch", "the number of targets");
            let (expected, found) = ([n, 1], [ids.len(), 1]);
            return Err(Error::Operand { operation, operand, expected, found });
        }
        rows.resize(n, HeadLoss::IGNORE);
        ids.resize(n, HeadLoss::IGNORE);
        backend.upload_ids(self.numbers.first_rows(n), &rows)?;
        backend.upload_ids(to.first_rows(n), &ids)
    }

    /// out `[n, d]` = the rows of x; zero after the last.
    pub fn gather(&self, pass: &mut Pass<'_>, x: Tensor, out: Tensor) -> Result {
        let rows = self.numbers.first_rows(out.shape[0]);
        pass.run(GatherRows { x, rows, out })
    }

    /// dx = 0, but for the rows, which get dout `[n, d]`.
    pub fn scatter(&self, pass: &mut Pass<'_>, dout: Tensor, dx: Tensor) -> Result {
        let rows = self.numbers.first_rows(dout.shape[0]);
        pass.run(ScatterRows { dout, rows, dx })
    }
}

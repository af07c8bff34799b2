//! Random operands: nearly Gaussian numbers with a prime period, in panels of rows that repeat down
//! a matrix, so that large operands are cheap.

use std::sync::OnceLock;

use half::bf16;
use ndarray::Array2;
use sparse24_core::philox::{Philox4x32, uniform};

use crate::{Device, Matrix, Result, Scalar};

/// Distinct rows; further rows repeat them.
pub(super) const PANEL: usize = 256;

/// Numbers before they repeat: a prime, so that power-of-two shapes do not repeat.
const PERIOD: usize = 1_048_573;

fn gaussian() -> &'static [f32] {
    static VALUES: OnceLock<Vec<f32>> = OnceLock::new();
    VALUES.get_or_init(|| {
        let philox = Philox4x32::new(24);
        (0..PERIOD as u32)
            .map(|at| {
                philox.block([at, 0, 0, 0]).into_iter().map(|word| uniform(word) - 0.5).sum::<f32>()
                    * 1.7
            })
            .collect()
    })
}

/// A matrix of nearly Gaussian numbers.
pub(super) fn random([rows, columns]: [usize; 2], seed: usize) -> Array2<f32> {
    let values = gaussian();
    let mut out = Vec::with_capacity(rows * columns);
    let mut at = seed * 104_729 % PERIOD;
    while out.len() < rows * columns {
        let taken = (rows * columns - out.len()).min(PERIOD - at);
        out.extend_from_slice(&values[at..at + taken]);
        at = 0;
    }
    Array2::from_shape_vec((rows, columns), out).expect("as many")
}

/// A panel in bf16.
pub(super) fn panel(columns: usize, seed: usize) -> Array2<bf16> {
    random([PANEL, columns], seed).mapv(bf16::from_f32)
}

/// Fills a matrix with the rows of a panel.
pub(super) fn repeat<T: Scalar>(device: &mut Device, to: Matrix<T>, panel: &Array2<T>) -> Result {
    let [rows, columns] = to.shape();
    let mut filled = panel.nrows().min(rows);
    device.upload(to.rows(0..filled), &panel.as_slice().expect("row-major")[..filled * columns])?;
    while filled < rows {
        let more = filled.min(rows - filled);
        device.copy(to.rows(0..more), to.rows(filled..filled + more))?;
        filled += more;
    }
    Ok(())
}

/// A new matrix with the rows of a panel.
pub(super) fn repeated<T: Scalar>(
    device: &mut Device,
    shape: [usize; 2],
    panel: &Array2<T>,
) -> Result<Matrix<T>> {
    let to = device.alloc("input", shape)?;
    repeat(device, to, panel)?;
    Ok(to)
}

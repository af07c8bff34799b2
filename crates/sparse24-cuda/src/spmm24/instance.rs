//! The Hopper kernels of `kernels/spmm24_sm90.cu`, and the launches that carry out a plan.

use crate::{
    Architecture, Device, Error,
    launch::{Argument, Grid},
    layout::{BLOCK, BLOCK_METADATA, BLOCK_VALUES},
    plan::{Form, Plan, TILE_ROWS, Wgmma},
};

/// A kernel and its template parameters.
pub(super) struct Instance {
    pub(super) form: Form,
    pub(super) columns: u32,
    pub(super) entry: &'static str,
    stages: u32,
    /// Rows of the transposed result that are stored at once, and buffers for them.
    chunk: u32,
    chunks: u32,
}

const THREADS: u32 = 384;
/// The most tiles that split-K computes.
const MAX_SPLIT: u32 = 8191;

macro_rules! instances {
    ($($form:ident $columns:literal $entry:literal: $stages:literal stages,
        $chunks:literal chunks of $chunk:literal;)+) => {
        &[$(Instance {
            form: Form::$form,
            columns: $columns,
            entry: $entry,
            stages: $stages,
            chunk: $chunk,
            chunks: $chunks,
        }),+]
    };
}

pub(super) const INSTANCES: &[Instance] = instances! {
    Transposed 384 "spmm24_transposed_384": 3 stages, 2 chunks of 96;
    Transposed 256 "spmm24_transposed_256": 4 stages, 3 chunks of 64;
    Straight 384 "spmm24_straight_384": 3 stages, 0 chunks of 0;
    Straight 320 "spmm24_straight_320": 4 stages, 0 chunks of 0;
    Straight 256 "spmm24_straight_256": 5 stages, 0 chunks of 0;
};

impl Instance {
    /// One block per multiprocessor.
    pub(super) const fn grid(&self, pairs: u32) -> Grid {
        const BARRIERS: u32 = 1024;
        let stage =
            128 * self.columns + 2 * (2 * BLOCK_VALUES + 4 * BLOCK_METADATA) as u32 + BARRIERS;
        let shared = self.stages * stage + 2 * self.chunks * self.chunk * 128;
        Grid { blocks: [2 * pairs, 1, 1], threads: THREADS, shared }
    }
}

/// Rows and columns of tiles of this width that cover `[m, n]`.
pub(super) fn tiles(columns: u32, [m, n]: [usize; 2]) -> [u32; 2] {
    [m.div_ceil(TILE_ROWS as usize) as u32, n.div_ceil(columns as usize) as u32]
}

/// The launches of a plan: a kernel for whole tiles and parts, and one that adds up the parts.
pub(super) struct Schedule {
    entry: &'static str,
    grid: Grid,
    sizes: [Argument; 8],
    gather_grid: Grid,
    gather_sizes: [Argument; 8],
    /// Rows of the TMA boxes of B and D.
    pub(super) rows_of_b: u32,
    pub(super) rows_of_d: u32,
}

impl Schedule {
    /// Queues the kernel, and `gather` to add up the parts.
    pub(super) fn launch(
        &self,
        device: &mut Device,
        operands: &[Argument],
        gather: &'static str,
        of_gather: &[Argument],
    ) -> Result<(), Error> {
        device.launch(self.entry, self.grid, &[operands, &self.sizes].concat())?;
        device.launch(gather, self.gather_grid, &[of_gather, &self.gather_sizes].concat())
    }
}

pub(super) fn schedule(
    plan: Wgmma,
    operation: &'static str,
    architecture: Architecture,
    form: Form,
    shape @ [m, n, k]: [usize; 3],
) -> Result<Schedule, Error> {
    const GATHERED_COLUMNS: u32 = 32;
    let Wgmma { columns: width, sweep, split, parts, residents } = plan;
    let instance =
        INSTANCES.iter().find(|instance| instance.form == form && instance.columns == width);
    let Some(instance) = instance.filter(|_| architecture == Architecture::Sm90a) else {
        return Err(Error::Unserved { operation, architecture });
    };
    let [rows, columns] = tiles(width, [m, n]);
    let steps = k.div_ceil(BLOCK) as u32;
    // Kernels number tiles and parts in 32 bits.
    let count = u64::from(rows) * u64::from(columns);
    let units = count + u64::from(split) * u64::from(parts);
    let fits = (1..=rows).contains(&sweep)
        && u64::from(split) <= count.min(MAX_SPLIT.into())
        && (1..=steps).contains(&parts);
    if !fits || residents == 0 || units > u32::MAX.into() {
        return Err(Error::Plan { operation, plan: Plan::Wgmma(plan), shape });
    }
    let (m, n, whole) = (m as u32, n as u32, rows * columns - split);
    let gather =
        [width / GATHERED_COLUMNS, split * TILE_ROWS / BLOCK as u32].map(|blocks| blocks as usize);
    Ok(Schedule {
        entry: instance.entry,
        grid: instance.grid(residents.min(whole + split * parts)),
        sizes: [m, n, steps, rows, columns, sweep, whole, parts].map(Argument::U32),
        gather_grid: Grid::plane(gather, 128),
        gather_sizes: [m, n, rows, columns, sweep, whole, parts, width].map(Argument::U32),
        rows_of_b: if form == Form::Transposed { width / 2 } else { BLOCK as u32 },
        rows_of_d: instance.chunk,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_match_the_kernels() {
        let source = crate::kernels::source_of("spmm24_gather").expect("it is in the table").text;
        for Instance { form, columns, entry, stages, chunk, chunks } in INSTANCES {
            let line = match form {
                Form::Transposed => {
                    format!("\nTRANSPOSED({entry}, {columns}, {stages}, {chunk}, {chunks})\n")
                }
                Form::Straight => format!("\nSTRAIGHT({entry}, {columns}, {stages})\n"),
            };
            assert!(source.contains(&line), "{line}");
        }
        let count = |name| source.matches(name).count();
        assert_eq!(count("\nTRANSPOSED(") + count("\nSTRAIGHT("), INSTANCES.len());
    }

    /// Each bad plan would divide by zero, read out of bounds or overflow in the kernels.
    #[test]
    fn plans_that_do_not_fit_are_refused() {
        let good = Wgmma { columns: 256, sweep: 4, split: 2, parts: 64, residents: 66 };
        let launch = |plan: Wgmma, architecture| {
            schedule(plan, "a product", architecture, Form::Transposed, [1024, 1000, 4096])
        };
        assert!(launch(good, Architecture::Sm90a).is_ok());
        for bad in [
            Wgmma { sweep: 1 << 26, split: 0, parts: 1, ..good },
            Wgmma { sweep: 0, ..good },
            Wgmma { sweep: 5, ..good },
            Wgmma { sweep: u32::MAX, ..good },
            Wgmma { split: 17, ..good },
            Wgmma { split: u32::MAX, ..good },
            Wgmma { parts: 0, ..good },
            Wgmma { parts: 65, ..good },
            Wgmma { parts: u32::MAX, ..good },
            Wgmma { residents: 0, ..good },
        ] {
            let refused = launch(bad, Architecture::Sm90a);
            assert!(matches!(refused, Err(Error::Plan { .. })), "{bad:?}");
        }
        for (plan, architecture) in
            [(good, Architecture::Sm80), (Wgmma { columns: 100, ..good }, Architecture::Sm90a)]
        {
            assert!(matches!(launch(plan, architecture), Err(Error::Unserved { .. })));
        }
    }
}

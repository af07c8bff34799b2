//! The kernels of `kernels/spmm24_sm90.cu` and `kernels/spmm24_mma.cu`, and the launches that carry
//! out a plan.

use crate::{
    Architecture, Device, Error, Result,
    kernels::entry,
    launch::{Argument, Grid},
    layout::{BLOCK, BLOCK_METADATA, BLOCK_VALUES},
    plan::{Form, PAIR_ROWS, Plan, Tiling},
};

/// A kernel and its template parameters.
pub(super) struct Instance {
    pub(super) form: Form,
    pub(super) rows: u32,
    pub(super) columns: u32,
    pub(super) entry: &'static str,
    pub(super) kernel: Kernel,
    stages: u32,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Kernel {
    Mma,
    /// Rows of the transposed result that are stored at once, and buffers for them.
    Wgmma {
        chunk: u32,
        chunks: u32,
    },
}
use Form::{Straight, Transposed};

/// The most tiles that split-K computes.
const MAX_SPLIT: u32 = 8191;

pub(super) const INSTANCES: &[Instance] = &[
    wgmma(Transposed, 384, "spmm24_transposed_384", 3, [96, 2]),
    wgmma(Transposed, 256, "spmm24_transposed_256", 4, [64, 3]),
    wgmma(Straight, 384, "spmm24_straight_384", 3, [0, 0]),
    wgmma(Straight, 320, "spmm24_straight_320", 4, [0, 0]),
    wgmma(Straight, 256, "spmm24_straight_256", 5, [0, 0]),
    mma(Transposed, 320, "spmm24_mma_transposed_320", 4),
    mma(Transposed, 256, "spmm24_mma_transposed_256", 4),
    mma(Transposed, 128, "spmm24_mma_transposed_128", 3),
    mma(Straight, 320, "spmm24_mma_straight_320", 4),
    mma(Straight, 256, "spmm24_mma_straight_256", 4),
    mma(Straight, 128, "spmm24_mma_straight_128", 3),
];

const fn wgmma(
    form: Form,
    columns: u32,
    entry: &'static str,
    stages: u32,
    [chunk, chunks]: [u32; 2],
) -> Instance {
    Instance {
        form,
        rows: PAIR_ROWS,
        columns,
        entry,
        kernel: Kernel::Wgmma { chunk, chunks },
        stages,
    }
}

const fn mma(form: Form, rows: u32, entry: &'static str, stages: u32) -> Instance {
    Instance { form, rows, columns: 128, entry, kernel: Kernel::Mma, stages }
}

impl Instance {
    /// Thread blocks that compute a tile together.
    pub(super) const fn blocks(&self) -> u32 {
        if let Kernel::Mma = self.kernel { 1 } else { 2 }
    }

    /// Blocks for this many tiles at once.
    pub(super) const fn grid(&self, residents: u32) -> Grid {
        const BARRIERS: u32 = 1024;
        let blocks = [self.blocks() * residents, 1, 1];
        let of_a = self.rows / self.blocks() / BLOCK as u32
            * (2 * BLOCK_VALUES + 4 * BLOCK_METADATA) as u32;
        let stage = 128 * self.columns + of_a;
        match self.kernel {
            Kernel::Mma => Grid { blocks, threads: 256, shared: self.stages * stage },
            Kernel::Wgmma { chunk, chunks } => {
                let shared = self.stages * (stage + BARRIERS) + 2 * chunks * chunk * 128;
                Grid { blocks, threads: 384, shared }
            }
        }
    }

    /// Whether this kernel runs on such GPUs.
    pub(super) fn serves(&self, architecture: Architecture) -> bool {
        (self.kernel == Kernel::Mma || architecture == Architecture::Sm90a)
            && self.grid(1).shared <= architecture.shared_memory()
    }

    pub(super) const fn plan(&self, tiling: Tiling) -> Plan {
        if let Kernel::Mma = self.kernel { Plan::Mma(tiling) } else { Plan::Wgmma(tiling) }
    }

    /// Rows and columns of tiles that cover `[m, n]`.
    pub(super) fn tiles(&self, [m, n]: [usize; 2]) -> [u32; 2] {
        [m.div_ceil(self.rows as usize) as u32, n.div_ceil(self.columns as usize) as u32]
    }
}

/// The launches of a plan: a kernel for whole tiles and parts, and one that adds up the parts.
pub(super) struct Schedule {
    entry: &'static str,
    grid: Grid,
    sizes: [Argument; 8],
    gather_grid: Grid,
    gather_sizes: [Argument; 9],
    /// Rows of the TMA boxes of B and D.
    pub(super) rows_of_b: u32,
    pub(super) rows_of_d: u32,
}

impl Schedule {
    /// Queues the kernel, or that with an activation whose name has a `suffix`, and `gather` to add
    /// up the parts.
    pub(super) fn launch(
        &self,
        device: &mut Device,
        suffix: &str,
        operands: &[Argument],
        gather: &'static str,
        of_gather: &[Argument],
    ) -> Result {
        let kernel = match suffix {
            "" => self.entry,
            _ => entry(&format!("{}{suffix}", self.entry)),
        };
        device.launch(kernel, self.grid, &[operands, &self.sizes].concat())?;
        device.launch(gather, self.gather_grid, &[of_gather, &self.gather_sizes].concat())
    }
}

pub(super) fn schedule(
    plan: Plan,
    operation: &'static str,
    architecture: Architecture,
    form: Form,
    shape @ [m, n, k]: [usize; 3],
) -> Result<Schedule> {
    const GATHERED_COLUMNS: u32 = 32;
    let tiling @ Tiling { rows: height, columns: width, sweep, split, parts, residents } =
        plan.tiling();
    let instance = INSTANCES.iter().find(|instance| {
        (instance.form, instance.rows, instance.columns) == (form, height, width)
            && instance.plan(tiling) == plan
            && instance.serves(architecture)
    });
    let instance = instance.ok_or(Error::Unserved { operation, architecture })?;
    let [rows, columns] = instance.tiles([m, n]);
    let steps = k.div_ceil(BLOCK) as u32;
    // Kernels number tiles and parts in 32 bits.
    let count = u64::from(rows) * u64::from(columns);
    let units = count + u64::from(split) * u64::from(parts);
    let fits = (1..=rows).contains(&sweep)
        && u64::from(split) <= count.min(MAX_SPLIT.into())
        && (1..=steps.max(1)).contains(&parts);
    if !fits || residents == 0 || units > u32::MAX.into() {
        return Err(Error::Plan { operation, plan, shape });
    }
    let (m, n, whole) = (m as u32, n as u32, rows * columns - split);
    let blocks = height / BLOCK as u32;
    let gather = [width / GATHERED_COLUMNS, split * blocks].map(|blocks| blocks as usize);
    Ok(Schedule {
        entry: instance.entry,
        grid: instance.grid(residents.min(whole + split * parts)),
        sizes: [m, n, steps, rows, columns, sweep, whole, parts].map(Argument::U32),
        gather_grid: Grid::plane(gather, 128),
        gather_sizes: [m, n, rows, columns, sweep, whole, parts, blocks, width].map(Argument::U32),
        rows_of_b: if form == Form::Transposed { width / 2 } else { BLOCK as u32 },
        rows_of_d: if let Kernel::Wgmma { chunk, .. } = instance.kernel { chunk } else { 0 },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_match_the_kernels() {
        let text_of = |entry| crate::kernels::source_of(entry).expect("it is in the table").text;
        for instance in INSTANCES {
            let Instance { form, entry, stages, .. } = instance;
            let name = if *form == Transposed { "TRANSPOSED" } else { "STRAIGHT" };
            let call = format!("\n{name}({entry}, ");
            let numbers =
                text_of(entry).split(&call).nth(1).and_then(|rest| rest.split(')').next());
            let numbers: Vec<u32> =
                numbers.expect(entry).split(", ").map(|text| text.parse().expect(text)).collect();
            let [rows, columns] = [instance.rows, instance.columns];
            let found = match (instance.kernel, &numbers[..]) {
                (Kernel::Mma, &[down, across, slabs, tiles, stages]) => {
                    let threads = 32 * down * across;
                    vec![threads, down * slabs * 16, across * tiles * 8, stages]
                }
                (_, all) => all.to_vec(),
            };
            let expected = match instance.kernel {
                Kernel::Mma => vec![256, rows, columns, *stages],
                Kernel::Wgmma { chunk, chunks } if *form == Transposed => {
                    vec![columns, *stages, chunk, chunks]
                }
                Kernel::Wgmma { .. } => vec![columns, *stages],
            };
            assert_eq!(found, expected, "{entry}");
        }
        let files = ["spmm24_straight_256", "spmm24_mma_straight_256"].map(text_of);
        let calls =
            files.map(|text| ["\nTRANSPOSED(", "\nSTRAIGHT("].map(|of| text.matches(of).count()));
        assert_eq!(calls.as_flattened().iter().sum::<usize>(), INSTANCES.len());
        // Activations, of kernels with the same numbers.
        for line in files[0].lines().filter_map(|line| line.strip_prefix("ACTIVATED(spmm24_")) {
            let (name, numbers) = line.split_once(", ").expect(line);
            let (_, numbers) = numbers.split_once(", ").expect(line);
            let mut plain = INSTANCES
                .iter()
                .filter(|instance| format!("spmm24_{name}").starts_with(instance.entry));
            let plain = plain.next().expect(line).entry;
            assert!(files[0].contains(&format!("\nTRANSPOSED({plain}, {numbers}")), "{line}");
        }
    }

    #[test]
    fn every_gpu_has_kernels_of_both_forms() {
        for architecture in Architecture::ALL {
            for form in [Transposed, Straight] {
                let serves = |instance: &&Instance| {
                    instance.form == form
                        && instance.kernel == Kernel::Mma
                        && instance.serves(architecture)
                };
                let count = INSTANCES.iter().filter(serves).count();
                let all = architecture.shared_memory() > 100 << 10;
                assert_eq!(count, if all { 3 } else { 1 }, "{architecture}");
            }
        }
        assert!(
            schedule(Plan::EMPTY, "a product", Architecture::Sm86, Straight, [4, 4, 0]).is_ok()
        );
    }

    /// Each bad plan would divide by zero, read out of bounds or overflow in the kernels.
    #[test]
    fn plans_that_do_not_fit_are_refused() {
        let good = Tiling { rows: 256, columns: 256, sweep: 4, split: 2, parts: 64, residents: 66 };
        let launch = |plan, architecture| {
            schedule(plan, "a product", architecture, Form::Transposed, [1024, 1000, 4096])
        };
        assert!(launch(Plan::Wgmma(good), Architecture::Sm90a).is_ok());
        for bad in [
            Tiling { sweep: 1 << 26, split: 0, parts: 1, ..good },
            Tiling { sweep: 0, ..good },
            Tiling { sweep: 5, ..good },
            Tiling { sweep: u32::MAX, ..good },
            Tiling { split: 17, ..good },
            Tiling { split: u32::MAX, ..good },
            Tiling { parts: 0, ..good },
            Tiling { parts: 65, ..good },
            Tiling { parts: u32::MAX, ..good },
            Tiling { residents: 0, ..good },
        ] {
            let refused = launch(Plan::Wgmma(bad), Architecture::Sm90a);
            assert!(matches!(refused, Err(Error::Plan { .. })), "{bad:?}");
        }
        let narrow = Tiling { columns: 128, split: 0, parts: 1, ..good };
        assert!(launch(Plan::Mma(narrow), Architecture::Sm80).is_ok());
        for (plan, architecture) in [
            (Plan::Wgmma(good), Architecture::Sm80),
            (Plan::Wgmma(Tiling { columns: 100, ..good }), Architecture::Sm90a),
            (Plan::Mma(good), Architecture::Sm90a),
            (Plan::Mma(narrow), Architecture::Sm89),
        ] {
            assert!(matches!(launch(plan, architecture), Err(Error::Unserved { .. })), "{plan}");
        }
    }
}

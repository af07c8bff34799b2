//! Plans: which kernel computes a product, in which tiles, and how the last of them are divided.
//!
//! A plan can be timed, written down and read back; which one is fastest depends on the shape and
//! the GPU, and [`plans`] begins with the likeliest. Invariant: what a plan says fixes the order of
//! every sum.

use std::{fmt, str::FromStr};

use super::guess::guess;
use crate::{
    Architecture, Device, Error,
    launch::{Argument, Grid},
    layout::{BLOCK, BLOCK_METADATA, BLOCK_VALUES},
};

/// Which of the two products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// [`spmm24_transposed`](super::spmm24_transposed).
    Transposed,
    /// [`spmm24`](super::spmm24).
    Straight,
}

/// How a product is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Plan {
    /// By the instruction that every GPU from compute capability 8.0 has.
    Mma,
    /// By Hopper's own.
    Wgmma(Wgmma),
}

/// Tiles of two blocks on neighbouring multiprocessors, a *pair* that shares the dense operand,
/// swept over the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Wgmma {
    /// Columns of the tile that a pair computes; it has 256 rows.
    pub columns: u32,
    /// Rows of pairs that are swept along n together, so that their part of A stays in the L2.
    pub sweep: u32,
    /// The last pairs, divided along k: as many as would leave multiprocessors idle.
    pub divided: u32,
    /// Into how many parts each of these is divided; 1 where none is.
    pub parts: u32,
    /// Pairs that are computed at once.
    pub residents: u32,
}

/// A kernel of `kernels/spmm24_sm90.cu`, with the numbers that it was instantiated for.
struct Instance {
    form: Form,
    columns: u32,
    entry: &'static str,
    stages: u32,
    /// Rows of the result's transpose that are stored together, and buffers for so many.
    chunk: u32,
    chunks: u32,
}

const THREADS: u32 = 384;
/// Rows of a pair's tile; each of its four warpgroups has a block of them.
pub(super) const ROWS: u32 = 4 * BLOCK as u32;
/// Pairs that are divided at most.
const MOST_DIVIDED: u32 = 8191;

macro_rules! instances {
    ($($form:ident $columns:literal $entry:literal: $stages:literal stages, $chunks:literal chunks of $chunk:literal;)+) => {
        &[$(Instance { form: Form::$form, columns: $columns, entry: $entry, stages: $stages, chunk: $chunk, chunks: $chunks }),+]
    };
}

const INSTANCES: &[Instance] = instances! {
    Transposed 384 "spmm24_transposed_384": 3 stages, 2 chunks of 96;
    Transposed 256 "spmm24_transposed_256": 4 stages, 3 chunks of 64;
    Straight 384 "spmm24_straight_384": 3 stages, 0 chunks of 0;
    Straight 320 "spmm24_straight_320": 4 stages, 0 chunks of 0;
    Straight 256 "spmm24_straight_256": 5 stages, 0 chunks of 0;
};

impl Plan {
    /// How many f32 the parts of divided pairs take.
    #[must_use]
    pub const fn scratch(self) -> usize {
        match self {
            Self::Wgmma(Wgmma { columns, divided, parts, .. }) => {
                let floats =
                    (divided as usize).saturating_mul(parts as usize).saturating_mul(ROWS as usize);
                floats.saturating_mul(columns as usize)
            }
            Self::Mma => 0,
        }
    }

    /// Whether this GPU can compute a product `[m, n, k]` by it.
    ///
    /// # Errors
    /// [`Error::Unserved`] for a plan of another GPU; [`Error::Plan`] for one that divides what the
    /// product does not have.
    pub fn check(self, device: &Device, form: Form, shape: [usize; 3]) -> Result<(), Error> {
        match self {
            Self::Mma => Ok(()),
            Self::Wgmma(wgmma) => {
                wgmma.launches("a sparse product", device.architecture(), form, shape).map(drop)
            }
        }
    }

    /// Sums without terms are left to the kernel that can do without a copy.
    pub(crate) const fn unless_empty(self, k: usize) -> Self {
        if k == 0 { Self::Mma } else { self }
    }
}

/// Rows and columns of pairs, whose tiles have so many columns, that cover `[m, n]`.
pub(super) fn pairs(columns: u32, [m, n]: [usize; 2]) -> [u32; 2] {
    [m.div_ceil(ROWS as usize) as u32, n.div_ceil(columns as usize) as u32]
}

/// What is launched: a kernel of whole and divided pairs, and one that sums the parts of the
/// latter.
pub(super) struct Launches {
    pub(super) entry: &'static str,
    pub(super) grid: Grid,
    pub(super) sizes: [Argument; 8],
    pub(super) gather_grid: Grid,
    pub(super) gather_sizes: [Argument; 8],
    /// Rows of the boxes in which B is brought and D is stored.
    pub(super) rows_of_b: u32,
    pub(super) rows_of_d: u32,
}

impl Wgmma {
    pub(super) fn launches(
        self,
        operation: &'static str,
        architecture: Architecture,
        form: Form,
        [m, n, k]: [usize; 3],
    ) -> Result<Launches, Error> {
        const GATHERED_COLUMNS: u32 = 32;
        let instance = INSTANCES
            .iter()
            .find(|instance| instance.form == form && instance.columns == self.columns);
        let Some(instance) = instance.filter(|_| architecture == Architecture::Sm90a) else {
            return Err(Error::Unserved { operation, architecture });
        };
        let Self { columns: width, sweep, divided, parts, residents } = self;
        let [rows, columns] = pairs(width, [m, n]);
        let steps = k.div_ceil(BLOCK) as u32;
        // Kernels number tiles and their parts in 32 bits, of which no more are swept than there
        // are.
        let pairs = u64::from(rows) * u64::from(columns);
        let units = pairs + u64::from(divided) * u64::from(parts);
        let fits = (1..=rows).contains(&sweep)
            && u64::from(divided) <= pairs.min(MOST_DIVIDED.into())
            && (1..=steps).contains(&parts);
        if !fits || residents == 0 || units > u32::MAX.into() {
            return Err(Error::Plan { operation, plan: Plan::Wgmma(self), shape: [m, n, k] });
        }
        let (m, n, whole) = (m as u32, n as u32, rows * columns - divided);
        let gather =
            [width / GATHERED_COLUMNS, divided * ROWS / BLOCK as u32].map(|blocks| blocks as usize);
        Ok(Launches {
            entry: instance.entry,
            grid: instance.grid(residents.min(whole + divided * parts)),
            sizes: [m, n, steps, rows, columns, sweep, whole, parts].map(Argument::U32),
            gather_grid: Grid::plane(gather, 128),
            gather_sizes: [m, n, rows, columns, sweep, whole, parts, width].map(Argument::U32),
            rows_of_b: if form == Form::Transposed { width / 2 } else { BLOCK as u32 },
            rows_of_d: instance.chunk,
        })
    }
}

impl Instance {
    /// A block on a multiprocessor.
    const fn grid(&self, pairs: u32) -> Grid {
        const BARRIERS: u32 = 1024;
        let stage =
            128 * self.columns + 2 * (2 * BLOCK_VALUES + 4 * BLOCK_METADATA) as u32 + BARRIERS;
        let shared = self.stages * stage + 2 * self.chunks * self.chunk * 128;
        Grid { blocks: [2 * pairs, 1, 1], threads: THREADS, shared }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mma => f.write_str("mma"),
            Self::Wgmma(Wgmma { columns, sweep, divided, parts, residents }) => {
                write!(f, "wgmma-{columns}-{sweep}-{divided}x{parts}-{residents}")
            }
        }
    }
}

impl FromStr for Plan {
    type Err = NoPlan;

    /// What [`Display`](fmt::Display) writes.
    fn from_str(text: &str) -> Result<Self, NoPlan> {
        let read = || {
            let fields: Vec<&str> = text.strip_prefix("wgmma-")?.split('-').collect();
            let [columns, sweep, division, residents] = fields[..] else { return None };
            let (divided, parts) = division.split_once('x')?;
            let [columns, sweep, divided, parts, residents] =
                [columns, sweep, divided, parts, residents].map(str::parse);
            let (columns, sweep, residents) = (columns.ok()?, sweep.ok()?, residents.ok()?);
            Some(Self::Wgmma(Wgmma {
                columns,
                sweep,
                divided: divided.ok()?,
                parts: parts.ok()?,
                residents,
            }))
        };
        let plan = if text == "mma" { Some(Self::Mma) } else { read() };
        plan.filter(|plan| plan.to_string() == text).ok_or_else(|| NoPlan(text.to_owned()))
    }
}

/// A text that names no plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} names no plan of a sparse product")]
pub struct NoPlan(String);

/// All plans worth timing for a product `[m, n, k]` whose rows begin at multiples of `alignment`
/// bytes, the one that should be fastest first.
///
/// # Errors
/// [`Error::Compile`], [`Error::Library`], [`Error::Driver`]: how many tiles fit on the GPU at once
/// is asked of the compiled kernels.
pub fn plans(
    device: &mut Device,
    form: Form,
    shape: [usize; 3],
    alignment: usize,
) -> Result<Vec<Plan>, Error> {
    let mut guesses: Vec<(f64, Plan)> = Vec::new();
    if device.architecture() == Architecture::Sm90a
        && !shape.contains(&0)
        && alignment.is_multiple_of(super::WIDE)
    {
        for instance in INSTANCES.iter().filter(|instance| instance.form == form) {
            let residents = device.resident_blocks(instance.entry, instance.grid(1), 2)? as u32 / 2;
            let (cost, wgmma) = guess(instance.columns, form, shape, residents);
            guesses.push((cost, Plan::Wgmma(wgmma)));
        }
    }
    guesses.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    Ok(guesses.into_iter().map(|(_, plan)| plan).chain([Plan::Mma]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_is_read_back_as_it_was_written() {
        for plan in [
            Plan::Mma,
            Plan::Wgmma(Wgmma { columns: 384, sweep: 8, divided: 0, parts: 1, residents: 66 }),
            Plan::Wgmma(Wgmma { columns: 256, sweep: 16, divided: 14, parts: 4, residents: 57 }),
        ] {
            assert_eq!(plan.to_string().parse(), Ok(plan));
        }
        for text in [
            "",
            "wgmma",
            "wgmma-256a-8-0x1-66",
            "wgmma-256-8-0x1",
            "wgmma-256-+8-0x1-66",
            "wgmma-256-8-0-66",
        ] {
            assert!(text.parse::<Plan>().is_err(), "{text}");
        }
    }

    #[test]
    fn the_table_of_instances_says_what_the_kernels_are() {
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
        assert_eq!(
            source.matches("\nTRANSPOSED(").count() + source.matches("\nSTRAIGHT(").count(),
            INSTANCES.len()
        );
    }

    /// Each would divide by zero, read past the operands or lose count in the kernels.
    #[test]
    fn a_plan_that_divides_what_is_not_there_is_refused() {
        let shape = [1024, 1000, 4096];
        let good = Wgmma { columns: 256, sweep: 4, divided: 2, parts: 64, residents: 66 };
        let launches =
            |plan: Wgmma| plan.launches("a product", Architecture::Sm90a, Form::Transposed, shape);
        assert!(launches(good).is_ok());
        let written: Plan = "wgmma-256-67108864-0x1-66".parse().expect("as a file may hold it");
        let Plan::Wgmma(written) = written else { panic!("{written}") };
        for bad in [
            written,
            Wgmma { sweep: 0, ..good },
            Wgmma { sweep: 5, ..good },
            Wgmma { sweep: u32::MAX, ..good },
            Wgmma { divided: 17, ..good },
            Wgmma { divided: u32::MAX, ..good },
            Wgmma { parts: 0, ..good },
            Wgmma { parts: 65, ..good },
            Wgmma { parts: u32::MAX, ..good },
            Wgmma { residents: 0, ..good },
        ] {
            assert!(matches!(launches(bad), Err(Error::Plan { .. })), "{bad:?}");
        }
        let elsewhere = good.launches("a product", Architecture::Sm80, Form::Transposed, shape);
        assert!(matches!(elsewhere, Err(Error::Unserved { .. })));
        assert!(matches!(launches(Wgmma { columns: 100, ..good }), Err(Error::Unserved { .. })));
    }

    #[test]
    fn scratch_is_counted_whatever_a_plan_says() {
        let plan = |divided, parts| {
            Plan::Wgmma(Wgmma { columns: 384, sweep: 1, divided, parts, residents: 1 })
        };
        assert_eq!(plan(3, 5).scratch(), 3 * 5 * 256 * 384);
        assert_eq!(plan(8191, 65_535).scratch(), 8191 * 65_535 * 256 * 384);
        assert_eq!(plan(u32::MAX, u32::MAX).scratch(), usize::MAX);
    }

    #[test]
    fn every_pair_is_swept_whatever_the_shape() {
        for instance in INSTANCES {
            for shape in [
                [4, 4, 4],
                [64, 1, 64],
                [1600, 16384, 6400],
                [6400, 1600, 16384],
                [320, 1000, 1024],
                [30768, 8192, 4],
            ] {
                let (cost, wgmma) = guess(instance.columns, instance.form, shape, 66);
                let [rows, columns] = pairs(instance.columns, [shape[0], shape[1]]);
                assert!(
                    cost > 0.0 && wgmma.sweep <= rows && wgmma.divided <= rows * columns,
                    "{shape:?}"
                );
                assert!(
                    wgmma.launches("a product", Architecture::Sm90a, instance.form, shape).is_ok(),
                    "{shape:?}: {wgmma:?}"
                );
                assert_eq!(wgmma.divided == 0, wgmma.parts == 1, "{shape:?}");
            }
        }
    }
}

//! Benchmarks: the sparse products with all their plans and competitors, and the clock for work of
//! any owner of a GPU.
//!
//! A [`Case`] needs no GPU. A [`Bench`] verifies a case and then times it, in turns with its
//! competitors and over more buffers than the L2 holds; an [`Operation`] was verified by the
//! caller. Invariant: a wrong result has no time.

mod check;
mod input;
mod machine;
mod nvml;
mod peer;
mod peer_kernels;
mod products;
mod report;
mod size;
mod timing;

use std::collections::BTreeMap;

use crate::{
    Device, Error, Result,
    gemm::{Gemm, LinearForward, WORKSPACE},
};
use check::Stop;
use nvml::Sensor;
use peer::CusparseLt;
use timing::{Contestant, contest};

pub use machine::{Known, Machine};
pub use nvml::Reading;
pub use peer_kernels::peer_kernels;
pub use products::products;
pub use report::{Block, Measured, Outcome, Peer, PlanTime, Record, Report};
pub use size::Size;
pub use timing::{Effort, Launch, Owner, Quantiles};

/// Tokens per case: 16 sequences of 1024.
pub const TOKENS: usize = 16 * 1024;

/// A kernel and a shape.
pub struct Case {
    /// Name of the operation.
    pub kernel: &'static str,
    /// The shape as text.
    pub shape: String,
    /// Prefixes of the names of the kernels that it launches, on any GPU.
    pub entries: &'static [&'static str],
    prepare: Box<Prepare>,
}

type Prepare = dyn Fn(&mut Bench) -> Result<Prepared, Stop>;

impl Case {
    fn new<const N: usize>(
        kernel: &'static str,
        entries: &'static [&'static str],
        shape: [usize; N],
        prepare: impl Fn(&mut Bench, [usize; N]) -> Result<Prepared, Stop> + 'static,
    ) -> Self {
        let text = shape.map(|length| length.to_string()).join("x");
        let prepare = Box::new(move |bench: &mut Bench| prepare(bench, shape));
        Self { kernel, shape: text, entries, prepare }
    }
}

/// A verified case, ready to be timed.
struct Prepared {
    work: Work,
    /// The verification, in words.
    verified: &'static str,
    /// Times of the candidate plans.
    plans: Vec<PlanTime>,
    /// Competitors that refused, and why.
    without: Vec<String>,
    /// The kernel itself, then its competitors.
    contestants: Vec<Contestant>,
}

impl Prepared {
    fn new(work: Work, verified: &'static str, contestants: Vec<Contestant>) -> Self {
        Self { work, verified, plans: Vec::new(), without: Vec::new(), contestants }
    }
}

/// The work that an operation cannot avoid.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Work {
    bytes: f64,
    /// FLOPs of the dense product, including skipped ones.
    flops: f64,
    /// Peak rate of the instruction, relative to a dense product.
    speed: f64,
}

impl Work {
    /// The longer of the times for bytes and for products at these rates, in microseconds, and
    /// which one it is; `None` without a rate.
    fn floor(&self, rates: &Rates) -> Option<(f64, &'static str)> {
        let moved = self.bytes / rates.copy? * 1e6;
        if self.flops == 0.0 {
            return Some((moved, "bytes"));
        }
        let multiplied = self.flops / (rates.dense? * self.speed) * 1e6;
        Some(if moved > multiplied { (moved, "bytes") } else { (multiplied, "products") })
    }
}

/// Rates that this GPU reaches in this run, from which floors are computed.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Rates {
    /// Bytes per second that a large copy reads and writes.
    copy: Option<f64>,
    /// FLOP/s of cuBLASLt at [`SQUARE`].
    dense: Option<f64>,
}

/// Size of the square product that measures the dense rate.
const SQUARE: usize = 8192;

/// Verified work of an owner of the GPU.
pub struct Operation<T> {
    /// The owner.
    pub owner: T,
    /// The verification, in words.
    pub verified: &'static str,
    /// Bytes that must be moved.
    pub bytes: usize,
    /// FLOPs of its products.
    pub flops: f64,
    /// Number of sets of operands.
    pub sets: usize,
    /// Queues the work on one of them.
    pub launch: Box<Launch<T>>,
}

/// Runs cases on a GPU.
pub struct Bench {
    effort: Effort,
    sensor: Option<Sensor>,
    cusparselt: Option<CusparseLt>,
    machine: Machine,
    rates: Rates,
    /// Plans of dense products, see [`Gemm::plans`].
    plans: BTreeMap<String, String>,
    l2_bytes: usize,
    records: Vec<Record>,
    /// Last, so that it is dropped last.
    device: Device,
}

impl Bench {
    /// Takes over the device and queries the machine.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn new(device: Device, effort: Effort) -> Result<Self> {
        let (sensor, cusparselt) = (Sensor::of(&device), CusparseLt::load(&device));
        let l2_bytes = machine::l2_bytes(&device)?;
        let machine = Machine::of(&device, &sensor, &cusparselt)?;
        let (rates, plans, records) = (Rates::default(), BTreeMap::new(), Vec::new());
        Ok(Self {
            device,
            effort,
            sensor: sensor.ok(),
            cusparselt: cusparselt.ok(),
            machine,
            rates,
            plans,
            l2_bytes,
            records,
        })
    }

    /// Verifies a case and, if it is correct, times it.
    ///
    /// # Errors
    /// [`Error::Driver`], after which no case can run, and errors of operands, which are defects.
    /// Missing memory or libraries and kernels that do not compile are outcomes.
    pub fn run(&mut self, case: &Case) -> Result<&Record> {
        self.device.reset()?;
        let outcome = match self.measure(case) {
            Ok(measured) => Outcome::Measured(measured),
            Err(stop) => stop.outcome()?,
        };
        self.records.push(Record { kernel: case.kernel, shape: case.shape.clone(), outcome });
        Ok(self.records.last().expect("it was just pushed"))
    }

    /// Times an operation, or records why it has no time.
    ///
    /// # Errors
    /// [`Error::Driver`], after which no case can run, and errors of operands, which are defects.
    pub fn time<T: Owner + 'static>(
        &mut self,
        kernel: &'static str,
        shape: &str,
        prepared: Result<Operation<T>, Box<Outcome>>,
    ) -> Result<&Record> {
        // Fails if the GPU does.
        self.device.reset()?;
        let outcome = match prepared {
            Ok(operation) => match self.measure_operation(operation) {
                Ok(measured) => Outcome::Measured(measured),
                Err(stop) => stop.outcome()?,
            },
            Err(outcome) => *outcome,
        };
        self.records.push(Record { kernel, shape: shape.to_owned(), outcome });
        Ok(self.records.last().expect("it was just pushed"))
    }

    /// The report of all cases, with the machine's state after them.
    ///
    /// # Errors
    /// [`Error::Driver`]; use [`Bench::found`] then.
    pub fn report(&mut self) -> Result<Report> {
        self.device.synchronize()?;
        self.machine.after = self.sensor.as_ref().map(Sensor::read);
        Ok(self.found())
    }

    /// The report of all cases so far, without using the GPU.
    #[must_use]
    pub fn found(&self) -> Report {
        Report::new(self.machine.clone(), self.rates, self.records.clone())
    }

    fn measure(&mut self, case: &Case) -> Result<Measured, Stop> {
        let Prepared { work, verified, plans, without, contestants } = (case.prepare)(self)?;
        let (times, reading) =
            timed(&mut self.device, contestants, self.effort, self.sensor.as_ref())?;
        let measured = self.measured(&work, &times)?;
        Ok(Measured { verified, plans, without, reading, ..measured })
    }

    /// Work without products is compared with a copy of as many bytes.
    fn measure_operation<T: Owner + 'static>(
        &mut self,
        operation: Operation<T>,
    ) -> Result<Measured, Stop> {
        let Operation { mut owner, verified, bytes, flops, sets, launch } = operation;
        let mut contestants = vec![Contestant { name: "itself".into(), sets, launch }];
        if flops == 0.0 {
            contestants.push(timing::copy(&mut owner, bytes, sets)?);
        }
        let (times, reading) = timed(&mut owner, contestants, self.effort, self.sensor.as_ref())?;
        let work = Work { bytes: bytes as f64, flops, speed: 1.0 };
        let measured = self.measured(&work, &times)?;
        Ok(Measured { verified, reading, ..measured })
    }

    fn measured(&mut self, work: &Work, times: &[(String, Quantiles)]) -> Result<Measured> {
        self.measure_rates(work)?;
        Ok(Measured::new(work, work.floor(&self.rates), times))
    }

    /// Measures the rates that the floor of this work needs, once.
    fn measure_rates(&mut self, work: &Work) -> Result {
        if self.rates.copy.is_none() {
            self.device.reset()?;
            self.rates.copy = Some(self.copy_rate()?);
        }
        if work.flops > 0.0 && self.rates.dense.is_none() {
            self.device.reset()?;
            self.rates.dense = match self.dense_rate() {
                Err(Error::Library { .. }) => None,
                rate => Some(rate?),
            };
        }
        Ok(())
    }

    fn copy_rate(&mut self) -> Result<f64> {
        let bytes = 8 * self.l2_bytes.max(32 << 20);
        let mut copy = [timing::copy(&mut self.device, bytes, 2)?];
        Ok(bytes as f64 / contest(&mut self.device, &mut copy, self.effort, || ())?[0].median * 1e6)
    }

    fn dense_rate(&mut self) -> Result<f64> {
        let shape = [SQUARE; 2];
        let [x, weight, z] = [
            self.device.alloc("x", shape)?,
            self.device.alloc("w", shape)?,
            self.device.alloc("z", shape)?,
        ];
        for (seed, operand) in [(1, x), (2, weight)] {
            input::repeat(&mut self.device, operand, &input::panel(SQUARE, seed))?;
        }
        let mut gemm = self.gemm()?;
        let launch = move |device: &mut Device, _: &()| {
            gemm.linear_forward(device, &LinearForward { x, weight, bias: None, z })
        };
        let mut product = [Contestant::new("cuBLASLt", vec![()], launch)];
        let flops = 2.0 * (SQUARE as f64).powi(3);
        Ok(flops / contest(&mut self.device, &mut product, self.effort, || ())?[0].median * 1e6)
    }

    /// cuBLASLt with the plans that were measured so far.
    fn gemm(&mut self) -> Result<Gemm> {
        let workspace = self.device.alloc("workspace", [1, WORKSPACE])?;
        let mut gemm = Gemm::new(&self.device, workspace)?;
        self.plans.iter().try_for_each(|(product, plan)| gemm.use_plan(product, plan))?;
        Ok(gemm)
    }

    /// The number of sets of operands, of `bytes` each, after which the L2 no longer holds the
    /// first.
    #[must_use]
    pub fn set_count(&self, bytes: usize) -> usize {
        (4 * self.l2_bytes).div_ceil(bytes.max(1)).clamp(2, timing::LAUNCHES)
    }

    /// As many sets of operands, of `bytes` each.
    fn sets<S>(
        &mut self,
        bytes: usize,
        mut operands: impl FnMut(&mut Device) -> Result<S>,
    ) -> Result<Vec<S>> {
        (0..self.set_count(bytes)).map(|_| operands(&mut self.device)).collect()
    }
}

/// The names and times of contestants, and the sensors while the first of them runs.
#[expect(clippy::type_complexity, reason = "two results")]
fn timed<T: Owner>(
    owner: &mut T,
    mut contestants: Vec<Contestant<T>>,
    effort: Effort,
    sensor: Option<&Sensor>,
) -> Result<(Vec<(String, Quantiles)>, Option<Reading>)> {
    let mut reading = None;
    let times = contest(owner, &mut contestants, effort, || reading = sensor.map(Sensor::read))?;
    let names = contestants.into_iter().map(|contestant| contestant.name);
    Ok((names.zip(times).collect(), reading))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_is_the_longer_time() {
        let rates = Rates { copy: Some(4e12), dense: Some(800e12) };
        assert_eq!(Work { bytes: 4e6, flops: 0.0, speed: 1.0 }.floor(&rates), Some((1.0, "bytes")));
        let product = Work { bytes: 4e6, flops: 1.6e12, speed: 2.0 };
        assert_eq!(product.floor(&rates), Some((1000.0, "products")));
        assert_eq!(Work { bytes: 8e9, ..product }.floor(&rates), Some((2000.0, "bytes")));
        assert_eq!(product.floor(&Rates { dense: None, ..rates }), None);
    }
}

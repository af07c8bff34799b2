//! Times contestants on the GPU in turns, each launch on other buffers than the one before.
//!
//! A timing replays a CUDA graph of several launches between two events. Before it, the GPU gets
//! other work, so that it never waits for the host within the timing. That work only reads, several
//! times the size of the L2, which evicts the operands and leaves nothing to be written back.

use std::{
    collections::{HashMap, hash_map::Entry},
    ops::Range,
};

use serde::Serialize;

use crate::{Device, Error, Graph, Matrix, Result, flip::flip_count};

/// The owner of an open GPU, on which its work is timed.
pub trait Owner {
    /// The GPU.
    fn device(&mut self) -> &mut Device;
}

impl Owner for Device {
    fn device(&mut self) -> &mut Device {
        self
    }
}

/// The most launches of a timing, and sets of buffers. Starting a replay takes microseconds, which
/// are spread over the launches.
pub(super) const LAUNCHES: usize = 100;

/// Target duration of a timing, in microseconds.
const SPAN: f64 = 500.0;

/// Microseconds of work that is queued before sensors are read.
const SEEN: f64 = 4000.0;

/// The number of timings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// Enough for a median and quantiles.
    Thorough,
    /// A few.
    Quick,
}

impl Effort {
    const fn timings(self) -> usize {
        match self {
            Self::Thorough => 40,
            Self::Quick => 7,
        }
    }
}

/// Microseconds per launch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Quantiles {
    /// Median of the timings.
    pub median: f64,
    /// 10th percentile.
    pub p10: f64,
    /// 90th percentile.
    pub p90: f64,
}

impl Quantiles {
    fn of(mut times: Vec<f64>) -> Self {
        times.sort_by(f64::total_cmp);
        let [p10, median, p90] = [0.1, 0.5, 0.9]
            .map(|share: f64| times[(share * (times.len() - 1) as f64).round() as usize]);
        Self { median, p10, p90 }
    }
}

/// An operation that is timed.
pub(super) struct Contestant<T = Device> {
    pub(super) name: String,
    /// Number of sets of buffers.
    pub(super) sets: usize,
    /// Queues the operation on one of them.
    pub(super) launch: Box<Launch<T>>,
}

/// Queues work on one set of buffers.
pub type Launch<T> = dyn FnMut(&mut T, usize) -> Result;

impl Contestant {
    pub(super) fn new<S: 'static>(
        name: &str,
        sets: Vec<S>,
        mut launch: impl FnMut(&mut Device, &S) -> Result + 'static,
    ) -> Self {
        let (name, count) = (name.to_owned(), sets.len());
        let launch = Box::new(move |device: &mut Device, set: usize| launch(device, &sets[set]));
        Self { name, sets: count, launch }
    }
}

/// A copy that reads and writes `bytes` bytes in total.
pub(super) fn copy<T: Owner>(owner: &mut T, bytes: usize, sets: usize) -> Result<Contestant<T>> {
    let shape = [2 * sets, (bytes / 2).next_multiple_of(256)];
    let halves: Matrix<u8> = owner.device().alloc("copy", shape)?;
    let launch = move |owner: &mut T, set: usize| {
        let [from, to] = [0, 1]
            .map(|side| halves.rows(2 * set + side..2 * set + side + 1).columns(0..bytes / 2));
        owner.device().copy(from, to)
    };
    Ok(Contestant { name: "copy".into(), sets, launch: Box::new(launch) })
}

/// Times contestants in turns; `during` is called once, while the first of them runs.
pub(super) fn contest<T: Owner>(
    owner: &mut T,
    contestants: &mut [Contestant<T>],
    effort: Effort,
    during: impl FnOnce(),
) -> Result<Vec<Quantiles>> {
    let head_start = HeadStart::new(owner.device())?;
    let time = |owner: &mut T, recording: &Graph, launches: usize| {
        head_start.give(owner.device())?;
        let ms = owner.device().time(|device| device.replay(recording))?;
        Ok::<_, Error>(f64::from(ms) * 1e3 / launches as f64)
    };
    let mut during = Some(during);
    let mut launches = Vec::new();
    for contestant in &mut *contestants {
        // The first launch compiles the kernel and measures plans.
        run(owner, contestant, 0..contestant.sets)?;
        let all = record(owner, contestant, 0..contestant.sets)?;
        let each = time(owner, &all, contestant.sets)?;
        launches.push(((SPAN / each).ceil() as usize).clamp(1, LAUNCHES));
        if let Some(during) = during.take() {
            run(owner, contestant, 0..((SEEN / each).ceil() as usize).clamp(1, 10 * LAUNCHES))?;
            during();
        }
    }
    let mut times = vec![Vec::new(); contestants.len()];
    let mut recordings = HashMap::new();
    for timing in 0..effort.timings() {
        for (at, contestant) in contestants.iter_mut().enumerate() {
            let first = timing * launches[at] % contestant.sets;
            let recording = match recordings.entry((at, first)) {
                Entry::Occupied(recorded) => recorded.into_mut(),
                Entry::Vacant(place) => {
                    place.insert(record(owner, contestant, first..first + launches[at])?)
                }
            };
            times[at].push(time(owner, recording, launches[at])?);
        }
    }
    Ok(times.into_iter().map(Quantiles::of).collect())
}

fn run<T>(owner: &mut T, contestant: &mut Contestant<T>, mut launches: Range<usize>) -> Result {
    let Contestant { sets, launch, .. } = contestant;
    launches.try_for_each(|at| launch(owner, at % *sets))
}

fn record<T: Owner>(
    owner: &mut T,
    contestant: &mut Contestant<T>,
    launches: Range<usize>,
) -> Result<Graph> {
    owner.device().start_capture()?;
    let queued = run(owner, contestant, launches);
    let recorded = owner.device().end_capture();
    queued.and(recorded)
}

/// Keeps the GPU busy while the host queues a timing.
struct HeadStart {
    sides: [Matrix<u16>; 2],
    count: Matrix<u64>,
}

impl HeadStart {
    fn new(device: &mut Device) -> Result<Self> {
        // At least 0.1 ms.
        const BYTES: usize = 200 << 20;
        let mut side = || device.alloc("head start", [1, BYTES / 2]);
        let sides = [side()?, side()?];
        Ok(Self { sides, count: device.alloc("head start", [1, 1])? })
    }

    fn give(&self, device: &mut Device) -> Result {
        flip_count(device, self.sides[0], self.sides[1], self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::Quantiles;

    #[test]
    fn quantiles_are_taken_from_sorted_times() {
        let times = (0..41).map(|i| f64::from(i * 17 % 41)).collect();
        assert_eq!(Quantiles::of(times), Quantiles { median: 20.0, p10: 4.0, p90: 36.0 });
        assert_eq!(Quantiles::of(vec![3.0]), Quantiles { median: 3.0, p10: 3.0, p90: 3.0 });
    }
}

//! Times queued work, and picks the fastest of several ways to do it.

use cudarc::driver::sys;

use super::Device;
use crate::{Error, error::driver_error};

impl Device {
    /// Queues `work` and returns how many milliseconds it took on the GPU.
    ///
    /// # Errors
    /// The error of `work`; [`Error::Capturing`], [`Error::Driver`].
    pub fn time(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<(), Error>,
    ) -> Result<f32, Error> {
        self.refuse_in_capture("timing")?;
        self.bind()?;
        let failed = |error| driver_error("timing", error);
        let event = |device: &Self| {
            device.stream.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).map_err(failed)
        };
        let start = event(self)?;
        work(self)?;
        let end = event(self)?;
        end.synchronize().map_err(failed)?;
        start.elapsed_ms(&end).map_err(failed)
    }

    /// Returns the candidate whose work takes the shortest time; `None` if there are no candidates.
    ///
    /// # Errors
    /// The error of any candidate's work: a candidate that fails is never skipped for a slower one.
    pub fn fastest<T: Copy>(
        &mut self,
        candidates: &[T],
        mut work: impl FnMut(&mut Self, &T) -> Result<(), Error>,
    ) -> Result<Option<T>, Error> {
        fastest(candidates, |candidate, limit| {
            self.shortest(limit, |device| work(device, candidate))
        })
    }

    /// The shortest of a few times; stops early if it is clearly not below `limit`.
    fn shortest(
        &mut self,
        limit: f32,
        mut work: impl FnMut(&mut Self) -> Result<(), Error>,
    ) -> Result<f32, Error> {
        const TIMES: usize = 5;
        const CALLS: usize = 4;
        // The first call also loads the kernel.
        work(self)?;
        let mut shortest = f32::INFINITY;
        for _ in 0..TIMES {
            shortest = shortest.min(self.time(|device| (0..CALLS).try_for_each(|_| work(device)))?);
            if shortest > 1.5 * limit {
                break;
            }
        }
        Ok(shortest)
    }
}

/// `time` may stop early if it is clearly not below the limit that it gets.
fn fastest<T: Copy, E>(
    candidates: &[T],
    mut time: impl FnMut(&T, f32) -> Result<f32, E>,
) -> Result<Option<T>, E> {
    let (mut best, mut limit) = (None, f32::INFINITY);
    for candidate in candidates {
        let time = time(candidate, limit)?;
        if time < limit {
            (best, limit) = (Some(*candidate), time);
        }
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::fastest;

    #[test]
    fn the_shortest_time_wins_and_errors_are_returned() {
        let of = |times: &[Result<f32, &'static str>]| {
            let candidates: Vec<usize> = (0..times.len()).collect();
            fastest(&candidates, |&at, _| times[at])
        };
        assert_eq!(of(&[Ok(2.0), Ok(1.0), Ok(1.0), Ok(3.0)]), Ok(Some(1)));
        assert_eq!(of(&[]), Ok(None));
        assert_eq!(of(&[Ok(1.0), Err("refused"), Ok(2.0)]), Err("refused"));
    }

    #[test]
    fn the_limit_is_the_shortest_time_so_far() {
        let mut limits = Vec::new();
        let mut time = |&time: &f32, limit| {
            limits.push(limit);
            Ok::<_, ()>(time)
        };
        assert_eq!(fastest(&[3.0, 4.0, 2.0, 5.0], &mut time), Ok(Some(2.0)));
        assert_eq!(limits, [f32::INFINITY, 3.0, 3.0, 2.0]);
    }
}

//! How long queued work takes, and which of several ways to do it is the fastest.
//!
//! Deliberately absent: what is done with a choice; whoever makes one writes it down.

use cudarc::driver::sys;

use crate::{Device, Error, device::driver_error};

impl Device {
    /// Milliseconds on the GPU's clock that `work`, once queued, takes.
    ///
    /// # Errors
    /// Those of `work`; [`Error::Driver`].
    pub fn time(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<(), Error>,
    ) -> Result<f32, Error> {
        self.refuse_while_recording("timing")?;
        self.bind()?;
        let said = |error| driver_error("timing".into(), error);
        let event = |device: &Self| {
            device.stream.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).map_err(said)
        };
        let start = event(self)?;
        work(self)?;
        let end = event(self)?;
        end.synchronize().map_err(said)?;
        start.elapsed_ms(&end).map_err(said)
    }

    /// The candidate whose work takes the shortest time, tried on the buffers at hand; none if
    /// there is no candidate.
    ///
    /// # Errors
    /// Those of the work of any candidate: one that should run and does not is never passed over
    /// for a slower one.
    pub fn fastest<T: Copy>(
        &mut self,
        candidates: &[T],
        mut work: impl FnMut(&mut Self, &T) -> Result<(), Error>,
    ) -> Result<Option<T>, Error> {
        fastest(candidates, |candidate, limit| {
            self.shortest(limit, |device| work(device, candidate))
        })
    }

    /// The shortest of a few times; of fewer, once it is clearly not below `limit`.
    fn shortest(
        &mut self,
        limit: f32,
        mut work: impl FnMut(&mut Self) -> Result<(), Error>,
    ) -> Result<f32, Error> {
        const TIMES: usize = 5;
        const CALLS: usize = 4;
        // The first time also loads the kernel.
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

/// `time` may stop where it is clearly not below the limit that it is given.
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
    fn the_shortest_time_wins_and_no_error_is_passed_over() {
        let of = |times: &[Result<f32, &'static str>]| {
            let candidates: Vec<usize> = (0..times.len()).collect();
            fastest(&candidates, |&at, _| times[at])
        };
        assert_eq!(of(&[Ok(2.0), Ok(1.0), Ok(1.0), Ok(3.0)]), Ok(Some(1)));
        assert_eq!(of(&[]), Ok(None));
        assert_eq!(of(&[Ok(1.0), Err("refused"), Ok(2.0)]), Err("refused"));
        assert_eq!(of(&[Err("refused"), Ok(2.0)]), Err("refused"));
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

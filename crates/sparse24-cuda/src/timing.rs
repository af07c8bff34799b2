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
    pub fn time(&mut self, work: impl FnOnce(&mut Self) -> Result<(), Error>) -> Result<f32, Error> {
        self.refuse_while_recording("timing")?;
        self.bind()?;
        let said = |error| driver_error("timing".into(), error);
        let event = |device: &Self| device.stream.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).map_err(said);
        let start = event(self)?;
        work(self)?;
        let end = event(self)?;
        end.synchronize().map_err(said)?;
        start.elapsed_ms(&end).map_err(said)
    }

    /// The candidate whose work takes the shortest time, tried on the buffers at hand; none if there is no candidate. Those that fail are passed
    /// over, unless all do.
    ///
    /// # Errors
    /// That of the last candidate, if every one fails.
    pub fn fastest<T: Copy>(
        &mut self,
        candidates: &[T],
        mut work: impl FnMut(&mut Self, &T) -> Result<(), Error>,
    ) -> Result<Option<T>, Error> {
        let (mut best, mut failed) = (None, None);
        for candidate in candidates {
            let limit = best.map_or(f32::INFINITY, |(time, _)| time);
            match self.shortest(limit, |device| work(device, candidate)) {
                Ok(time) if time < limit => best = Some((time, *candidate)),
                Ok(_) => {}
                Err(error) => failed = Some(error),
            }
        }
        match (best, failed) {
            (None, Some(error)) => Err(error),
            (best, _) => Ok(best.map(|(_, candidate)| candidate)),
        }
    }

    /// The shortest of a few times; of fewer, once it is clearly not below `limit`.
    fn shortest(&mut self, limit: f32, mut work: impl FnMut(&mut Self) -> Result<(), Error>) -> Result<f32, Error> {
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

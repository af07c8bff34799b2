//! Signals while a run trains, or a text is encoded: the first SIGINT or SIGTERM asks it to save
//! and stop, a second of its kind ends the process at once; SIGUSR1 asks it to save and go on.
//!
//! Invariant: a handler only sets flags, or exits. Deliberately absent: what happens between the
//! two ([`crate::train`]).

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};
use sparse24_run::run::Asked;

use crate::failure::{Exit, Failure};

/// Which signals came.
pub(crate) struct Signals {
    stops: [(Exit, Arc<AtomicBool>); 2],
    save: Arc<AtomicBool>,
    any: Arc<AtomicBool>,
}

impl Signals {
    /// Takes the signals over, for the rest of the process.
    pub(crate) fn take() -> Result<Self, Failure> {
        let signals = Self::to_stop()?;
        #[cfg(unix)]
        note(signal_hook::consts::SIGUSR1, &signals.save, &signals.any).map_err(deaf)?;
        Ok(signals)
    }

    /// Those alone that ask to stop, where there is nothing to save.
    pub(crate) fn to_stop() -> Result<Self, Failure> {
        let any = Arc::new(AtomicBool::new(false));
        let stop = |signal, exit| {
            let received = Arc::default();
            // In this order: handlers run in it, and the first signal must not find the flag set.
            flag::register_conditional_shutdown(signal, exit as i32, Arc::clone(&received))?;
            note(signal, &received, &any)?;
            Ok::<_, io::Error>((exit, received))
        };
        let stops = [
            stop(SIGINT, Exit::Interrupted).map_err(deaf)?,
            stop(SIGTERM, Exit::Terminated).map_err(deaf)?,
        ];
        Ok(Self { stops, save: Arc::default(), any })
    }

    /// Who else watches runs of this process: what was received before is received there too.
    pub(crate) fn another(&self) -> Result<Self, Failure> {
        let (any, save) = (Arc::default(), Arc::default());
        for signal in [SIGINT, SIGTERM] {
            flag::register(signal, Arc::clone(&any)).map_err(deaf)?;
        }
        #[cfg(unix)]
        for received in [&save, &any] {
            flag::register(signal_hook::consts::SIGUSR1, Arc::clone(received)).map_err(deaf)?;
        }
        Ok(Self { stops: self.stops.clone(), save, any })
    }

    /// A flag that each of them sets, and [`Signals::asked`] clears.
    pub(crate) fn any(&self) -> Arc<AtomicBool> {
        self.any.clone()
    }

    /// What they ask for.
    pub(crate) fn asked(&self) -> Asked {
        // Before the others are read: what comes in between sets it again.
        self.any.store(false, Ordering::SeqCst);
        match self.received() {
            Some(_) => Asked::Stop,
            None if self.save.swap(false, Ordering::SeqCst) => Asked::Save,
            None => Asked::Nothing,
        }
    }

    /// The exit code of the signal that asked to stop, if one did.
    pub(crate) fn received(&self) -> Option<Exit> {
        self.stops
            .iter()
            .find(|(_, received)| received.load(Ordering::SeqCst))
            .map(|&(exit, _)| exit)
    }
}

fn deaf(error: io::Error) -> Failure {
    Failure::new(Exit::Io, format!("cannot listen for signals: {error}"))
}

/// From now on the signal sets both flags.
fn note(signal: i32, received: &Arc<AtomicBool>, any: &Arc<AtomicBool>) -> io::Result<()> {
    flag::register(signal, received.clone())?;
    flag::register(signal, any.clone()).map(drop)
}

//! SIGINT and SIGTERM while a run trains: the first asks it to stop after the step under way, a second of its kind ends the process at once.
//!
//! Invariant: a handler only sets a flag, or exits. Deliberately absent: what happens between the two ([`crate::train`]).

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

use crate::failure::Exit;

/// Whether a signal asked to stop, and the code to exit with then.
pub(crate) struct Signals([(Exit, Arc<AtomicBool>); 2]);

impl Signals {
    /// Takes both signals over, for the rest of the process.
    pub(crate) fn take() -> io::Result<Self> {
        let take = |signal, exit| {
            let received = Arc::new(AtomicBool::new(false));
            // In this order: handlers run in it, and the first signal must not find the flag set.
            flag::register_conditional_shutdown(signal, exit as i32, received.clone())?;
            flag::register(signal, received.clone())?;
            Ok::<_, io::Error>((exit, received))
        };
        Ok(Self([take(SIGINT, Exit::Interrupted)?, take(SIGTERM, Exit::Terminated)?]))
    }

    /// The exit code of the signal that came, if one did.
    pub(crate) fn received(&self) -> Option<Exit> {
        self.0.iter().find(|(_, received)| received.load(Ordering::Relaxed)).map(|&(exit, _)| exit)
    }
}

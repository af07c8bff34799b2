//! Signals during training or encoding. The first SIGINT, SIGTERM or SIGHUP requests a save and a
//! stop; a second one of the same kind ends the process at once. SIGUSR1 requests a save.
//!
//! Invariant: a handler only sets flags or exits.

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

pub(crate) struct Signals {
    stops: Vec<(Exit, Arc<AtomicBool>)>,
    save: Arc<AtomicBool>,
    any: Arc<AtomicBool>,
}

impl Signals {
    /// Handles all of these signals for the rest of the process.
    pub(crate) fn take() -> Result<Self, Failure> {
        let signals = Self::listen_for_stop()?;
        signals.listen_for_save()?;
        Ok(signals)
    }

    /// Handles only the signals that stop, for work that cannot be saved.
    pub(crate) fn listen_for_stop() -> Result<Self, Failure> {
        let any = Arc::new(AtomicBool::new(false));
        let stop = |signal, exit| {
            let received = Arc::default();
            // Handlers run in the order of registration: the first signal must find the flag unset.
            flag::register_conditional_shutdown(signal, exit as i32, Arc::clone(&received))?;
            listen(signal, [&received, &any])?;
            Ok::<_, io::Error>((exit, received))
        };
        let stops = stopping().map(|(signal, exit)| stop(signal, exit)).collect::<io::Result<_>>();
        Ok(Self { stops: stops.map_err(failure)?, save: Arc::default(), any })
    }

    #[cfg(unix)]
    fn listen_for_save(&self) -> Result<(), Failure> {
        listen(signal_hook::consts::SIGUSR1, [&self.save, &self.any]).map_err(failure)
    }

    #[cfg(not(unix))]
    fn listen_for_save(&self) -> Result<(), Failure> {
        Ok(())
    }

    /// A second observer with flags of its own, for another run of this process. It also reports
    /// stop signals that were received before.
    pub(crate) fn another(&self) -> Result<Self, Failure> {
        let another = Self { stops: self.stops.clone(), save: Arc::default(), any: Arc::default() };
        for (signal, _) in stopping() {
            listen(signal, [&another.any]).map_err(failure)?;
        }
        another.listen_for_save()?;
        Ok(another)
    }

    /// A flag that each of the signals sets and [`Signals::asked`] clears.
    pub(crate) fn any(&self) -> Arc<AtomicBool> {
        self.any.clone()
    }

    pub(crate) fn asked(&self) -> Asked {
        // Cleared before the others are read: a signal that arrives in between sets it again.
        self.any.store(false, Ordering::SeqCst);
        match self.received() {
            Some(_) => Asked::Stop,
            None if self.save.swap(false, Ordering::SeqCst) => Asked::Save,
            None => Asked::Nothing,
        }
    }

    /// The exit code of the stop signal, if one was received.
    pub(crate) fn received(&self) -> Option<Exit> {
        let is_set = |(_, received): &&(_, Arc<AtomicBool>)| received.load(Ordering::SeqCst);
        self.stops.iter().find(is_set).map(|&(exit, _)| exit)
    }
}

/// The signals that stop, with their exit codes.
fn stopping() -> impl Iterator<Item = (i32, Exit)> {
    let mut signals = vec![(SIGINT, Exit::Interrupted), (SIGTERM, Exit::Terminated)];
    #[cfg(unix)]
    if !is_hangup_ignored() {
        signals.push((signal_hook::consts::SIGHUP, Exit::HungUp));
    }
    signals.into_iter()
}

/// Whether the process was started to outlive its terminal, as by `nohup`. Only Linux says so.
#[cfg(unix)]
fn is_hangup_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal_hook::consts::SIGHUP - 1) & 1 == 1)
}

fn failure(error: io::Error) -> Failure {
    Failure::new(Exit::Io, format!("cannot handle signals: {error}"))
}

/// Makes the signal set the flags, in this order.
fn listen<const N: usize>(signal: i32, flags: [&Arc<AtomicBool>; N]) -> io::Result<()> {
    flags.into_iter().try_for_each(|flag| flag::register(signal, Arc::clone(flag)).map(drop))
}

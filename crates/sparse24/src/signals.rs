//! Signals during training or encoding. The first SIGINT, SIGTERM or SIGHUP requests a save and a
//! stop; a second one of the same kind ends the process at once. SIGUSR1 requests a save.
//!
//! Invariant: a handler only sets flags or exits.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, RecvTimeoutError, Sender},
    },
    thread::{Builder, JoinHandle},
    time::Duration,
};

use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};
use sparse24_run::run::Asked;

use crate::{
    failure::{Exit, Failure},
    output::note,
};

type Stops = Vec<(Exit, Arc<AtomicBool>)>;

pub(crate) struct Signals {
    stops: Stops,
    save: Arc<AtomicBool>,
    any: Arc<AtomicBool>,
    _acknowledgement: Option<Acknowledgement>,
}

/// A thread that acknowledges a stop signal while the work under way takes long to end. It ends
/// when this is dropped, before the last words of the command.
struct Acknowledgement {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// How often it looks.
const INTERVAL: Duration = Duration::from_millis(200);

impl Acknowledgement {
    /// Without a thread nothing is acknowledged.
    fn new(stops: Stops) -> Self {
        let (end, ended) = mpsc::channel();
        let watch = move || {
            while ended.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                if let Some(exit) = received(&stops) {
                    let again = match exit {
                        Exit::Interrupted => "press Ctrl-C again",
                        _ => "send the signal again",
                    };
                    let sentence = "stopping; this takes a moment";
                    return note(format_args!("{sentence}; {again} to quit at once"));
                }
            }
        };
        let thread = Builder::new().name("signals".to_owned()).spawn(watch).ok();
        Self { end: Some(end), thread }
    }
}

impl Drop for Acknowledgement {
    fn drop(&mut self) {
        drop(self.end.take());
        drop(self.thread.take().map(JoinHandle::join));
    }
}

/// The exit code of the stop signal, if one was received.
fn received(stops: &[(Exit, Arc<AtomicBool>)]) -> Option<Exit> {
    stops.iter().find(|(_, received)| received.load(Ordering::SeqCst)).map(|&(exit, _)| exit)
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
        let stops = stopping().map(|(signal, exit)| stop(signal, exit));
        let stops = stops.collect::<io::Result<Stops>>().map_err(failure)?;
        let _acknowledgement = Some(Acknowledgement::new(stops.clone()));
        Ok(Self { stops, save: Arc::default(), any, _acknowledgement })
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
        let (stops, save, any) = (self.stops.clone(), Arc::default(), Arc::default());
        let another = Self { stops, save, any, _acknowledgement: None };
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
        received(&self.stops)
    }
}

/// The signals that stop, with their exit codes.
fn stopping() -> impl Iterator<Item = (i32, Exit)> {
    [(SIGINT, Exit::Interrupted), (SIGTERM, Exit::Terminated)].into_iter().chain(hang_up())
}

/// SIGHUP, where it exists and is not ignored.
#[cfg(unix)]
fn hang_up() -> Option<(i32, Exit)> {
    (!is_hangup_ignored()).then_some((signal_hook::consts::SIGHUP, Exit::HungUp))
}

#[cfg(not(unix))]
fn hang_up() -> Option<(i32, Exit)> {
    None
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

//! Signals during training or encoding. The first SIGINT, SIGTERM or SIGHUP requests a save and a
//! stop; another of the same kind, a second or more later, ends the process at once. SIGUSR1
//! requests a save.
//!
//! Invariant: a handler only sets flags or exits.

use std::{
    io,
    sync::{
        Arc, LazyLock, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, Builder},
    time::{Duration, Instant},
};

use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};
use sparse24_run::run::Asked;

use crate::{
    failure::{Exit, Failure, Result},
    output::note,
};

#[derive(Clone)]
struct Stop {
    exit: Exit,
    received: Arc<AtomicBool>,
    /// Whether another signal of this kind ends the process.
    armed: Arc<AtomicBool>,
}

pub(crate) struct Signals {
    stops: Vec<Stop>,
    save: Arc<AtomicBool>,
    any: Arc<AtomicBool>,
    _acknowledged: Option<Acknowledged>,
}

/// How long signals of one kind count as one: `timeout` signals a process and its group, so the
/// ranks of `launch` receive SIGTERM from both `timeout` and `launch`.
const GRACE: Duration = Duration::from_secs(1);

/// Dropping this ends acknowledgements, so that none follows a command's last line.
struct Acknowledged(Arc<Mutex<bool>>);

impl Drop for Acknowledged {
    fn drop(&mut self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
    }
}

impl Acknowledged {
    /// Starts a thread that, [`GRACE`] after a signal, arms it and acknowledges it if the command
    /// is still working. Without a thread, no signal is armed.
    fn new(stops: Vec<Stop>) -> Self {
        let is_over = Arc::new(Mutex::new(false));
        let acknowledged = Self(Arc::clone(&is_over));
        let watch = move || {
            let mut heard = vec![None; stops.len()];
            loop {
                thread::sleep(GRACE / 10);
                for (stop, heard) in stops.iter().zip(&mut heard) {
                    if !stop.received.load(Ordering::SeqCst)
                        || heard.get_or_insert_with(Instant::now).elapsed() < GRACE
                        || stop.armed.swap(true, Ordering::SeqCst)
                    {
                        continue;
                    }
                    let again = match stop.exit {
                        Exit::Interrupted => "press Ctrl-C again",
                        _ => "send the signal again",
                    };
                    if !*is_over.lock().unwrap_or_else(PoisonError::into_inner) {
                        let sentence = "stopping; this takes a moment";
                        note(format_args!("{sentence}; {again} to quit at once"));
                    }
                }
            }
        };
        drop(Builder::new().name("signals".to_owned()).spawn(watch));
        acknowledged
    }
}

/// Whether nothing of a run can be saved yet.
static LOADING: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// Until [`Signals::take`], a stop signal ends the process at once, even PID 1 of a container,
/// which the system would not end. SIGUSR1 does nothing.
pub(crate) fn load() -> Result {
    LOADING.store(true, Ordering::SeqCst);
    let mut all = stopping();
    all.try_for_each(|(signal, exit)| {
        flag::register_conditional_shutdown(signal, exit as i32, Arc::clone(&LOADING)).map(drop)
    })
    .map_err(failure)?;
    #[cfg(unix)]
    listen(signal_hook::consts::SIGUSR1, [&Arc::default()]).map_err(failure)?;
    Ok(())
}

impl Signals {
    /// Handles all of these signals for the rest of the process.
    pub(crate) fn take() -> Result<Self> {
        let signals = Self::listen_for_stop()?;
        signals.listen_for_save()?;
        LOADING.store(false, Ordering::SeqCst);
        Ok(signals)
    }

    /// Handles only the signals that stop, for work that cannot be saved.
    pub(crate) fn listen_for_stop() -> Result<Self> {
        let any = Arc::default();
        let stop = |(signal, exit)| {
            let (received, armed) = (Arc::default(), Arc::default());
            listen(signal, [&received, &any])?;
            flag::register_conditional_shutdown(signal, exit as i32, Arc::clone(&armed))?;
            Ok::<_, io::Error>(Stop { exit, received, armed })
        };
        let stops: io::Result<Vec<_>> = stopping().map(stop).collect();
        let stops = stops.map_err(failure)?;
        let _acknowledged = Some(Acknowledged::new(stops.clone()));
        Ok(Self { stops, save: Arc::default(), any, _acknowledged })
    }

    #[cfg(unix)]
    fn listen_for_save(&self) -> Result {
        listen(signal_hook::consts::SIGUSR1, [&self.save, &self.any]).map_err(failure)
    }

    #[cfg(not(unix))]
    fn listen_for_save(&self) -> Result {
        Ok(())
    }

    /// A second observer with flags of its own, for another run of this process. It also reports
    /// stop signals that were received before.
    pub(crate) fn another(&self) -> Result<Self> {
        let (stops, save, any) = (self.stops.clone(), Arc::default(), Arc::default());
        let another = Self { stops, save, any, _acknowledged: None };
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
        self.stops.iter().find(|stop| stop.received.load(Ordering::SeqCst)).map(|stop| stop.exit)
    }
}

/// The signals that stop, with their exit codes.
pub(crate) fn stopping() -> impl Iterator<Item = (i32, Exit)> {
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

/// Whether the process was started to outlive its terminal, as by `nohup`. Known on Linux only.
#[cfg(unix)]
fn is_hangup_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal_hook::consts::SIGHUP - 1) & 1 == 1)
}

pub(crate) fn failure(error: io::Error) -> Failure {
    Failure::new(Exit::Io, format!("cannot handle signals: {error}"))
}

/// Makes the signal set the flags, in this order.
pub(crate) fn listen<const N: usize>(signal: i32, flags: [&Arc<AtomicBool>; N]) -> io::Result<()> {
    flags.into_iter().try_for_each(|flag| flag::register(signal, Arc::clone(flag)).map(drop))
}

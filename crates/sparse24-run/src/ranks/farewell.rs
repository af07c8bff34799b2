//! How a rank ends: its goodbye to the others, and the end of this process after another rank's.

use std::{
    collections::BTreeMap,
    mem,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::Sender,
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use super::frames::Outgoing;

/// The time that a process has to end by itself after a rank is gone.
pub const GRACE: Duration = Duration::from_secs(5);

/// The state that all threads of a process share.
#[derive(Default)]
pub(super) struct Ending {
    /// Whether this rank has said goodbye.
    pub(super) closed: AtomicBool,
    /// Whether [`super::Joining::lost`] is due.
    lost: AtomicBool,
    /// The exit code of the first rank that said that it fails.
    pub(super) code: OnceLock<u8>,
}

impl Ending {
    /// Ends the process after [`GRACE`], unless that is due already.
    pub(super) fn force(&self, lost: &dyn Fn(&str, Option<u8>), text: &str) {
        if !self.lost.swap(true, Ordering::SeqCst) {
            thread::sleep(GRACE);
            lost(text, self.code.get().copied());
        }
    }
}

/// The way to another rank, and the thread that writes to it.
pub(super) type Link = (Sender<Outgoing>, JoinHandle<()>);

/// The connections of a rank.
#[derive(Default)]
pub(super) struct Links {
    pub(super) peers: Mutex<BTreeMap<usize, Link>>,
    pub(super) ending: Arc<Ending>,
}

/// Says goodbye to the other ranks. Without it, and without [`super::Tcp`], they see a rank that is
/// gone.
#[derive(Clone)]
pub struct Farewell(pub(super) Arc<Links>);

impl Farewell {
    /// Closes the connections once all messages are sent. With a `failure`, the others end with
    /// this text and exit code, of which 0 means none; without one, they may go on as long as they
    /// need nothing from this rank. Only the first goodbye counts.
    pub fn say(&self, failure: Option<(&str, u8)>) {
        let Self(links) = self;
        links.ending.closed.store(true, Ordering::SeqCst);
        let peers = mem::take(&mut *locked(&links.peers)).into_values();
        let farewell = |(to, writer): Link| {
            // Without its thread, the other rank is gone.
            let failure = failure.map(|(text, code)| (text.to_owned(), code));
            let _ = to.send(Outgoing::Goodbye(failure));
            writer
        };
        for writer in peers.map(farewell).collect::<Vec<_>>() {
            let _ = writer.join();
        }
    }

    /// The exit code of the rank whose failure ends this one.
    #[must_use]
    pub fn code(&self) -> Option<u8> {
        self.0.ending.code.get().copied()
    }
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

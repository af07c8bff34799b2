//! Ends a rank: says goodbye to the others, or ends this process after another rank failed.

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

/// Ends the process, with a reason and perhaps the exit code of the rank that failed.
pub(super) type Lost = dyn Fn(&str, Option<u8>) + Send + Sync;

/// The state that all threads of a process share.
#[derive(Default)]
pub(super) struct Ending {
    /// Whether this rank has said goodbye.
    pub(super) closed: AtomicBool,
    /// Whether a thread has started the wait before [`super::Joining::lost`].
    lost: AtomicBool,
    /// Exit code of the first rank that reported its failure; 0 if it gave none.
    pub(super) code: OnceLock<u8>,
}

impl Ending {
    /// Waits [`GRACE`], then calls `lost`, unless another thread already does.
    pub(super) fn force(&self, lost: &Lost, text: &str) {
        if !self.lost.swap(true, Ordering::SeqCst) {
            thread::sleep(GRACE);
            lost(text, self.code.get().copied());
        }
    }
}

/// The queue of messages to another rank, and the thread that sends them.
pub(super) type Link = (Sender<Outgoing>, JoinHandle<()>);

/// The connections of a rank.
#[derive(Default)]
pub(super) struct Links {
    pub(super) peers: Mutex<BTreeMap<usize, Link>>,
    pub(super) ending: Arc<Ending>,
}

/// Says goodbye to the other ranks. If this and the [`super::Tcp`] are dropped without a goodbye,
/// the others treat the rank as lost.
#[derive(Clone)]
pub struct Farewell(pub(super) Arc<Links>);

impl Farewell {
    /// Closes the connections once all messages are sent. With a `failure`, the others report its
    /// text and exit with its code, or with their own if it is 0. Without one, they may go on as
    /// long as they need nothing from this rank. Only the first goodbye counts.
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

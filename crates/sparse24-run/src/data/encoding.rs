//! Encodes a corpus of any size on all cores.
//!
//! Invariant: the tokens come in order, and at most a few batches per thread are in memory.

use std::{
    sync::{
        Mutex, PoisonError,
        mpsc::{SyncSender, sync_channel},
    },
    thread,
};

use super::{
    Tokenizer,
    documents::{Batch, Documents},
};
use crate::{Error, Result};

/// Gives the ids of all documents to `write`, with the bytes that were read so far. One thread
/// reads, as many as the machine has encode, and this one writes.
pub(super) fn encode(
    documents: &Documents<'_>,
    tokenizer: &Tokenizer,
    mut write: impl FnMut(&[u32], u64) -> Result,
) -> Result {
    type Encoded = (Result<Vec<u32>>, u64);
    let threads = rayon::current_num_threads();
    let (work, batches) = sync_channel::<(Batch, SyncSender<Encoded>)>(threads);
    let (order, results) = sync_channel(2 * threads);
    let batches = Mutex::new(batches);
    thread::scope(|scope| {
        // Also ends this function early, by dropping its ends of the channels.
        let reader = scope.spawn(move || {
            documents.read(tokenizer, &mut |batch| {
                let (done, result) = sync_channel(1);
                let sent = order.send(result).is_ok() && work.send((batch, done)).is_ok();
                if sent { Ok(()) } else { Err(Error::Interrupted) }
            })
        });
        for _ in 0..threads {
            scope.spawn(|| {
                let next = || batches.lock().unwrap_or_else(PoisonError::into_inner).recv();
                while let Ok((batch, done)) = next() {
                    // Nobody waits for it after an error.
                    let _ = done.send((batch.encode(tokenizer), batch.read));
                }
            });
        }
        for result in results {
            // A thread that panicked sends nothing; the panic goes on at the end of the scope.
            let Ok((ids, read)) = result.recv() else { return Err(Error::Interrupted) };
            write(&ids?, read)?;
        }
        reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

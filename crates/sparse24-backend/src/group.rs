//! The ranks that train one model together: processes on one or several machines, or threads of a
//! test.
//!
//! All ranks of a group make the same calls in the same order. Messages are bytes; a group moves
//! them and never adds, so that the order of every sum is ours.

use std::sync::mpsc::{Receiver, Sender, channel};

use crate::{Error, Result};

/// One rank, and its way to the others.
pub trait Group: Send {
    /// The number of this rank, from 0.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn world(&self) -> usize;

    /// The number of ranks that share the memory of this machine.
    fn on_this_machine(&self) -> usize {
        self.world()
    }

    /// Sends part j to rank j, and returns what each rank sent here, in the order of ranks.
    ///
    /// # Errors
    /// [`Error::Peer`] if a rank is gone.
    ///
    /// # Panics
    /// Unless there is one part per rank.
    fn exchange(&mut self, parts: &[&[u8]]) -> Result<Vec<Vec<u8>>>;

    /// Leaves the group, whose ranks have nothing more to exchange.
    fn close(&mut self) {}
}

impl dyn Group + '_ {
    /// Returns what each rank gives, in the order of ranks.
    ///
    /// # Errors
    /// Errors of [`Group::exchange`].
    pub fn all_gather(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.exchange(&vec![own; self.world()])
    }

    /// [`all_gather`](#method.all_gather) of numbers.
    ///
    /// # Errors
    /// Errors of [`Group::exchange`].
    pub fn all_gather_floats(&mut self, own: &[f32]) -> Result<Vec<Vec<f32>>> {
        Ok(self.all_gather(&to_bytes(own))?.iter().map(|bytes| to_floats(bytes)).collect())
    }

    /// Returns what rank 0 gives; the bytes of the others are ignored.
    ///
    /// # Errors
    /// Errors of [`Group::exchange`].
    pub fn broadcast(&mut self, of_rank_0: &[u8]) -> Result<Vec<u8>> {
        let bytes = if self.rank() == 0 { of_rank_0 } else { &[] };
        Ok(self.all_gather(bytes)?.swap_remove(0))
    }
}

/// One rank alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Solo;

impl Group for Solo {
    fn rank(&self) -> usize {
        0
    }

    fn world(&self) -> usize {
        1
    }

    fn exchange(&mut self, parts: &[&[u8]]) -> Result<Vec<Vec<u8>>> {
        assert_eq!(parts.len(), 1, "one part per rank");
        Ok(vec![parts[0].to_vec()])
    }
}

/// A rank among threads of one process.
#[derive(Debug)]
pub struct Threads {
    rank: usize,
    to: Vec<Sender<Vec<u8>>>,
    from: Vec<Receiver<Vec<u8>>>,
}

impl Threads {
    /// All ranks of a group, each for a thread of its own.
    #[must_use]
    pub fn group(world: usize) -> Vec<Self> {
        let rank = |rank| Self { rank, to: Vec::new(), from: Vec::new() };
        let mut ranks: Vec<_> = (0..world).map(rank).collect();
        for from in 0..world {
            for to in 0..world {
                let (sender, receiver) = channel();
                ranks[from].to.push(sender);
                ranks[to].from.push(receiver);
            }
        }
        ranks
    }
}

impl Group for Threads {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.to.len()
    }

    fn exchange(&mut self, parts: &[&[u8]]) -> Result<Vec<Vec<u8>>> {
        assert_eq!(parts.len(), self.world(), "one part per rank");
        let gone = |rank| Error::Peer(format!("rank {rank} is gone"));
        for (rank, (to, part)) in self.to.iter().zip(parts).enumerate() {
            to.send(part.to_vec()).map_err(|_| gone(rank))?;
        }
        let receive = |(rank, from): (usize, &Receiver<_>)| from.recv().map_err(|_| gone(rank));
        self.from.iter().enumerate().map(receive).collect()
    }
}

/// The error for a message that is not what all ranks send at this point.
#[must_use]
pub fn misfit(what: &str) -> Error {
    Error::Peer(format!("another rank sent {what} that do not fit this rank's"))
}

/// The bytes of values, as groups carry them.
pub(crate) fn to_bytes(values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; size_of_val(values)];
    let words = bytes.as_chunks_mut().0.iter_mut();
    words.zip(values).for_each(|(word, value)| *word = value.to_le_bytes());
    bytes
}

/// The values of bytes.
pub(crate) fn to_floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|&word| f32::from_le_bytes(word)).collect()
}

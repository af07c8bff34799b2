//! The ranks that train one model together: processes on one or several machines, or threads of a
//! test.
//!
//! All ranks of a group make the same calls in the same order. Messages are bytes; a group moves
//! them and never adds, so that the order of every sum is ours.

use std::sync::mpsc::{Receiver, Sender, channel};

use crate::{
    Error,
    backend::{Memory, Tensor},
};

/// One rank, and its way to the others.
pub trait Group: Send {
    /// The number of this rank, from 0.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn world(&self) -> usize;

    /// Sends part j to rank j, and returns what each rank sent here, in the order of ranks.
    ///
    /// # Errors
    /// [`Error::Peer`] if a rank is gone.
    ///
    /// # Panics
    /// Unless there is one part per rank.
    fn exchange(&mut self, parts: &[&[u8]]) -> Result<Vec<Vec<u8>>, Error>;
}

impl dyn Group + '_ {
    /// What each rank gives, in the order of ranks.
    ///
    /// # Errors
    /// Errors of [`Group::exchange`].
    pub fn all_gather(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        self.exchange(&vec![own; self.world()])
    }

    /// What rank 0 gives; the bytes of the others are ignored.
    ///
    /// # Errors
    /// Errors of [`Group::exchange`].
    pub fn broadcast(&mut self, of_rank_0: &[u8]) -> Result<Vec<u8>, Error> {
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

    fn exchange(&mut self, parts: &[&[u8]]) -> Result<Vec<Vec<u8>>, Error> {
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

    fn exchange(&mut self, parts: &[&[u8]]) -> Result<Vec<Vec<u8>>, Error> {
        assert_eq!(parts.len(), self.world(), "one part per rank");
        let gone = |rank| Error::Peer(format!("rank {rank} is gone"));
        for (rank, (to, part)) in self.to.iter().zip(parts).enumerate() {
            to.send(part.to_vec()).map_err(|_| gone(rank))?;
        }
        let receive = |(rank, from): (usize, &Receiver<_>)| from.recv().map_err(|_| gone(rank));
        self.from.iter().enumerate().map(receive).collect()
    }
}

/// Elements that are exchanged at a time, at most: 64 MiB.
const BUCKET: usize = 1 << 24;

/// Replaces f32 tensors on every rank by their sums over all ranks, a power of two of them:
/// `((t0 + t1) + (t2 + t3)) + ...`, with the tensor of rank i as ti. Rank i adds the i-th part of
/// each bucket.
///
/// # Errors
/// [`Error::Peer`] if a rank is gone; errors of downloads and uploads.
pub fn sum(
    memory: &mut (impl Memory + ?Sized),
    tensors: &[Tensor],
    group: &mut dyn Group,
) -> Result<(), Error> {
    let world = group.world();
    for bucket in buckets(tensors) {
        let mut bytes = Vec::new();
        for &block in &bucket {
            bytes.extend(to_bytes(&memory.download(block)?));
        }
        let part = 4 * (bytes.len() / 4).div_ceil(world);
        let parts = (0..world).map(|rank| {
            let [start, end] = [rank, rank + 1].map(|rank| (rank * part).min(bytes.len()));
            &bytes[start..end]
        });
        let pieces = group.exchange(&parts.collect::<Vec<_>>())?;
        let mut pieces: Vec<_> = pieces.iter().map(|piece| to_floats(piece)).collect();
        let mut distance = 1;
        while distance < world {
            for first in (0..world).step_by(2 * distance) {
                let (left, right) = pieces.split_at_mut(first + distance);
                left[first].iter_mut().zip(&right[0]).for_each(|(sum, piece)| *sum += piece);
            }
            distance *= 2;
        }
        let sums = group.all_gather(&to_bytes(&pieces[0]).collect::<Vec<_>>())?;
        let sums = to_floats(&sums.concat());
        let mut at = 0;
        for block in bucket {
            let end = at + block.elements();
            let values = sums.get(at..end).ok_or_else(|| misfit("gradients"))?;
            memory.upload(block, values)?;
            at = end;
        }
    }
    Ok(())
}

/// The error for a message that is not what all ranks send at this point.
pub(crate) fn misfit(what: &str) -> Error {
    Error::Peer(format!("another rank sent {what} that do not fit this rank's"))
}

/// Tensors, cut by rows and put together to at most [`BUCKET`] elements, or one row.
fn buckets(tensors: &[Tensor]) -> Vec<Vec<Tensor>> {
    let (mut buckets, mut room) = (Vec::<Vec<_>>::new(), 0);
    for tensor in tensors {
        let [rows, columns] = tensor.shape;
        let mut row = 0;
        while row < rows {
            if room < columns || buckets.is_empty() {
                buckets.push(Vec::new());
                room = BUCKET.max(columns);
            }
            let end = rows.min(row + room / columns.max(1));
            buckets.last_mut().expect("one was pushed").push(tensor.rows(row..end));
            room -= (end - row) * columns;
            row = end;
        }
    }
    buckets
}

/// The bytes of values, as groups carry them.
pub(crate) fn to_bytes(values: &[f32]) -> impl Iterator<Item = u8> {
    values.iter().flat_map(|value| value.to_le_bytes())
}

/// The values of bytes.
pub(crate) fn to_floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|&word| f32::from_le_bytes(word)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::DType;

    #[test]
    fn buckets_hold_each_row_once_and_are_not_too_large() {
        let tensor = |buffer, shape: [usize; 2]| Tensor {
            buffer,
            offset: 0,
            shape,
            stride: shape[1],
            dtype: DType::F32,
        };
        let shapes = [[3, 5], [BUCKET / 4, 7], [1, BUCKET + 9], [1, 8], [0, 4], [2, 0]];
        let tensors: Vec<_> = (0..).zip(shapes).map(|(at, shape)| tensor(at, shape)).collect();
        let buckets = buckets(&tensors);
        let elements = |bucket: &Vec<Tensor>| bucket.iter().map(|t| t.elements()).sum::<usize>();
        assert!(buckets.iter().all(|bucket| elements(bucket) <= BUCKET + 9), "{buckets:?}");
        let mut rows = vec![0; tensors.len()];
        for block in buckets.iter().flatten() {
            let columns = block.shape[1];
            assert_eq!(block.offset, rows[block.buffer] * columns, "in order, without gaps");
            rows[block.buffer] += block.shape[0];
        }
        assert_eq!(rows, shapes.map(|[rows, _]| rows));
    }
}

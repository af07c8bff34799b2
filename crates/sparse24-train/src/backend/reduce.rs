//! Sums of gradients over ranks through the host, for any backend.

use super::{Memory, Tensor};
use crate::{
    Error,
    group::{Group, misfit, to_bytes, to_floats},
};

/// Elements that are exchanged at a time, at most: 64 MiB.
const BUCKET: usize = 1 << 24;

/// [`Backend::reduce`](super::Backend::reduce). Rank i adds the i-th part of each bucket.
pub(super) fn sum(
    memory: &mut (impl Memory + ?Sized),
    tensors: &[Tensor],
    group: &mut dyn Group,
) -> Result<(), Error> {
    let world = group.world();
    for bucket in buckets(tensors) {
        let mut bytes = Vec::new();
        for &block in &bucket {
            bytes.append(&mut to_bytes(&memory.download(block)?));
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
        let sums = group.all_gather(&to_bytes(&pieces[0]))?;
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

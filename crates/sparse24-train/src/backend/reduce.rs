//! Sums of gradients over ranks: which rank adds what and in which order, and the exchange through
//! the host, for any backend.
//!
//! The gradients, laid end to end, are cut into buckets, and each bucket into a part per rank. The
//! ranks send each other their values of all parts; rank i adds those of the i-th part, as a fixed
//! binary tree, and sends the sums to all others.

use super::{Memory, Tensor};
use crate::{
    Error,
    group::{Group, misfit, to_bytes, to_floats},
};

/// Elements that are exchanged at a time, at most: 128 MiB.
pub(super) const BUCKET: usize = 1 << 25;

/// Tensors and their parts start at multiples of this many elements, 256 bytes.
pub(super) const LINE: usize = 64;

/// [`Backend::reduce`](super::Backend::reduce) through the host.
pub(super) fn sum(
    memory: &mut (impl Memory + ?Sized),
    tensors: &[Tensor],
    group: &mut dyn Group,
) -> Result<(), Error> {
    let (world, own) = (group.world(), group.rank());
    for bucket in cut(tensors, BUCKET) {
        let parts = parts(&bucket, world);
        let values = |part: &Vec<Tensor>| -> Result<Vec<u8>, Error> {
            let values: Result<Vec<_>, _> = part.iter().map(|&t| memory.download(t)).collect();
            Ok(to_bytes(&values?.concat()))
        };
        let values = parts.iter().map(values).collect::<Result<Vec<_>, _>>()?;
        let pieces = group.exchange(&values.iter().map(Vec::as_slice).collect::<Vec<_>>())?;
        let mut pieces: Vec<_> = pieces.iter().map(|piece| to_floats(piece)).collect();
        for [into, from] in additions(world, own) {
            let [into, from] = pieces.get_disjoint_mut([into, from]).expect("two pieces");
            into.iter_mut().zip(from).for_each(|(sum, piece)| *sum += *piece);
        }
        let sums = group.all_gather(&to_bytes(&pieces[own]))?;
        for (part, sums) in parts.into_iter().zip(sums) {
            let sums = to_floats(&sums);
            let mut rest = &sums[..];
            for tensor in part {
                let values = rest.split_off(..tensor.elements());
                memory.upload(tensor, values.ok_or_else(|| misfit("gradients"))?)?;
            }
        }
    }
    Ok(())
}

/// Tensors without gaps, laid end to end and cut every `length` elements, a multiple of [`LINE`],
/// at multiples of which they start.
pub(super) fn cut(tensors: &[Tensor], length: usize) -> Vec<Vec<Tensor>> {
    let (mut pieces, mut room) = (Vec::<Vec<_>>::new(), 0);
    for &tensor in tensors {
        let row = tensor.packed([1, tensor.elements()]);
        let mut start = 0;
        while start < row.elements() {
            if room == 0 {
                pieces.push(Vec::new());
                room = length;
            }
            let end = row.elements().min(start + room);
            pieces.last_mut().expect("one was pushed").push(row.columns(start..end));
            room -= (end - start).next_multiple_of(LINE);
            start = end;
        }
    }
    pieces
}

/// The part of each rank in a bucket; those of the last ranks may be empty.
pub(super) fn parts(bucket: &[Tensor], world: usize) -> Vec<Vec<Tensor>> {
    let mut parts = cut(bucket, length(bucket).div_ceil(world).next_multiple_of(LINE));
    parts.resize(world, Vec::new());
    parts
}

/// Elements of tensors that are laid end to end.
pub(super) fn length(tensors: &[Tensor]) -> usize {
    tensors.iter().map(|tensor| tensor.elements().next_multiple_of(LINE)).sum()
}

/// The additions of a rank in their order, as `[into, from]`: the piece of rank `from` is added to
/// that of rank `into`. They are the tree `((p0 + p1) + (p2 + p3)) + ...`; its root ends in the
/// rank's own piece, since x + y and y + x have the same bits.
pub(super) fn additions(world: usize, own: usize) -> Vec<[usize; 2]> {
    // The pieces that hold the sums of the subtrees of a level.
    let mut sums: Vec<_> = (0..world).collect();
    let mut additions = Vec::new();
    while let [_, _, ..] = sums[..] {
        let pair = |pair: &[usize; 2]| if pair[1] == own { [pair[1], pair[0]] } else { *pair };
        let level: Vec<_> = sums.as_chunks().0.iter().map(pair).collect();
        sums = level.iter().map(|[into, _]| *into).collect();
        additions.extend(level);
    }
    additions
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::DType;

    fn tensor(buffer: usize, shape: [usize; 2]) -> Tensor {
        Tensor { buffer, offset: 0, shape, stride: shape[1], dtype: DType::F32 }
    }

    #[test]
    fn each_element_is_in_one_part_of_one_bucket() {
        let shapes = [[3, 5], [BUCKET / 4, 7], [1, BUCKET + 9], [1, 8], [0, 4], [2, 0], [1, 1]];
        let tensors: Vec<_> = (0..).zip(shapes).map(|(at, shape)| tensor(at, shape)).collect();
        for world in [1, 2, 4, 8] {
            let mut elements = vec![0; tensors.len()];
            for bucket in cut(&tensors, BUCKET) {
                assert!(length(&bucket) <= BUCKET, "{bucket:?}");
                let parts = parts(&bucket, world);
                assert_eq!(parts.len(), world);
                let most = length(&bucket).div_ceil(world) + LINE;
                assert!(parts.iter().all(|part| length(part) < most), "{parts:?}");
                for tensor in parts.iter().flatten() {
                    assert_eq!(tensor.offset, elements[tensor.buffer], "in order, without gaps");
                    assert_eq!(tensor.offset % LINE, 0);
                    elements[tensor.buffer] += tensor.elements();
                }
            }
            assert_eq!(elements, shapes.map(|[rows, columns]| rows * columns));
        }
    }

    #[test]
    fn every_rank_adds_the_same_tree() {
        for world in [1, 2, 4, 8] {
            let mut trees = Vec::new();
            for own in 0..world {
                let mut sums: Vec<String> = (0..world).map(|rank| rank.to_string()).collect();
                for [into, from] in additions(world, own) {
                    let mut pair = [sums[into].clone(), sums[from].clone()];
                    // Addition commutes, so the order of a pair is that of its first ranks.
                    pair.sort_by_key(|sum| sum.trim_start_matches('(').to_owned());
                    sums[into] = format!("({}+{})", pair[0], pair[1]);
                }
                trees.push(sums.swap_remove(own));
            }
            let expected = ["0", "(0+1)", "((0+1)+(2+3))", "(((0+1)+(2+3))+((4+5)+(6+7)))"];
            assert!(trees.iter().all(|tree| tree == expected[world.ilog2() as usize]), "{trees:?}");
        }
    }
}

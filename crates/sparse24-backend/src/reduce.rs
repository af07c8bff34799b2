//! Sums of gradients over ranks: which rank sends and adds what, and the exchange through the host,
//! for any backend.
//!
//! The gradients, laid end to end, are cut into buckets, and each bucket into a part per rank. The
//! ranks send each other their values of a bucket; rank i adds those of the i-th part, as a fixed
//! binary tree, and sends the sums to all others. The gradients come in the order in which a
//! backward pass ends them, so that a bucket can be exchanged while it computes the next.

use std::ops::RangeInclusive;

use super::{Backend, Tensor, op::Add};
use crate::{
    Result,
    group::{Group, misfit, to_bytes, to_floats},
};

/// Buckets, unless they become too small or too large.
const BUCKETS: usize = 32;

/// Elements of a bucket, 64 KiB to 64 MiB.
const ELEMENTS: RangeInclusive<usize> = 1 << 14..=1 << 24;

/// Tensors and their parts start at multiples of this many elements, 256 bytes.
const LINE: usize = 64;

/// A stage of the exchange of gradients, as one rank sees it: transfers that run at once, then
/// additions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stage {
    /// How many [gradients](super::Op::gradients) a backward pass has written before the stage may
    /// start, after all before it. No later write touches its tensors.
    pub after: usize,
    /// Tensors without gaps, and the ranks to which they are sent.
    pub sent: Vec<(usize, Tensor)>,
    /// Where tensors of other ranks arrive. Between two ranks, the i-th that one sends is the i-th
    /// that the other receives.
    pub received: Vec<(usize, Tensor)>,
    /// The second of each pair is added to the first.
    pub additions: Vec<[Tensor; 2]>,
}

/// Elements of each of the tensors that [`stages`] need to receive those of one other rank.
pub fn received_elements(gradients: &[Tensor], world: usize) -> usize {
    length(gradients).min(bucket_elements(gradients)).div_ceil(world).next_multiple_of(LINE)
}

/// The sums of gradients of all ranks, as rank `own` computes them with a tensor for what each
/// other rank sends. `written` are the gradients that a backward pass writes, in order.
pub fn stages(
    mut gradients: Vec<Tensor>,
    written: &[Tensor],
    received: &[Tensor],
    own: usize,
) -> Vec<Stage> {
    let writes = |gradient: &Tensor| {
        let last = written.iter().rposition(|written| written.buffer == gradient.buffer);
        last.map_or(0, |last| last + 1)
    };
    gradients.sort_by_key(writes);
    let world = received.len() + 1;
    let others = || (0..world).filter(|&rank| rank != own);
    let mut stages = vec![Stage::default()];
    for bucket in cut(&gradients, bucket_elements(&gradients)) {
        let parts = parts(&bucket, world);
        // The tensors of this rank's part, as each rank has them.
        let mut pieces: Vec<_> = received.iter().map(|&tensor| like(&parts[own], tensor)).collect();
        pieces.insert(own, parts[own].clone());
        let to = |rank: usize, tensors: &[Tensor]| -> Vec<_> {
            tensors.iter().map(|&tensor| (rank, tensor)).collect()
        };
        let stage = stages.last_mut().expect("there is one");
        stage.after = bucket.last().map_or(0, writes);
        stage.sent.extend(others().flat_map(|rank| to(rank, &parts[rank])));
        stage.received.extend(others().flat_map(|rank| to(rank, &pieces[rank])));
        stage.additions = additions(world, own)
            .into_iter()
            .flat_map(|[into, from]| pieces[into].iter().zip(&pieces[from]))
            .map(|(&into, &from)| [into, from])
            .collect();
        // The sums travel with the values of the next bucket.
        stages.push(Stage {
            sent: others().flat_map(|rank| to(rank, &parts[own])).collect(),
            received: others().flat_map(|rank| to(rank, &parts[rank])).collect(),
            ..Stage::default()
        });
    }
    stages
}

/// [`Backend::reduce`] through the host.
pub(super) fn through_host(
    backend: &mut (impl Backend + ?Sized),
    stages: &[Stage],
    group: &mut dyn Group,
) -> Result {
    for Stage { sent, received, additions, .. } in stages {
        let mut messages = vec![Vec::new(); group.world()];
        for &(rank, tensor) in sent {
            messages[rank].append(&mut to_bytes(&backend.download(tensor)?));
        }
        let messages = group.exchange(&messages.iter().map(Vec::as_slice).collect::<Vec<_>>())?;
        let messages: Vec<_> = messages.iter().map(|message| to_floats(message)).collect();
        let mut messages: Vec<_> = messages.iter().map(Vec::as_slice).collect();
        for &(rank, tensor) in received {
            let values = messages[rank].split_off(..tensor.elements());
            backend.upload(tensor, values.ok_or_else(|| misfit("gradients"))?)?;
        }
        for &[x, delta] in additions {
            backend.execute(&Add { x, delta, out: x }.into())?;
        }
    }
    Ok(())
}

/// Tensors without gaps, laid end to end and cut every `length` elements, a multiple of [`LINE`],
/// at multiples of which they start.
fn cut(tensors: &[Tensor], length: usize) -> Vec<Vec<Tensor>> {
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

/// Elements of a bucket of these gradients.
fn bucket_elements(gradients: &[Tensor]) -> usize {
    let elements = length(gradients) / BUCKETS;
    elements.clamp(*ELEMENTS.start(), *ELEMENTS.end()).next_multiple_of(LINE)
}

/// The part of each rank in a bucket; those of the last ranks may be empty.
fn parts(bucket: &[Tensor], world: usize) -> Vec<Vec<Tensor>> {
    let mut parts = cut(bucket, length(bucket).div_ceil(world).next_multiple_of(LINE));
    parts.resize(world, Vec::new());
    parts
}

/// Elements of tensors that are laid end to end.
fn length(tensors: &[Tensor]) -> usize {
    tensors.iter().map(|tensor| tensor.elements().next_multiple_of(LINE)).sum()
}

/// Tensors of these shapes, laid end to end in a row.
fn like(tensors: &[Tensor], row: Tensor) -> Vec<Tensor> {
    let mut start = 0;
    let place = |tensor: &Tensor| {
        let place = row.columns(start..start + tensor.elements());
        start += tensor.elements().next_multiple_of(LINE);
        place
    };
    tensors.iter().map(place).collect()
}

/// The additions of a rank in their order, as `[into, from]`: the piece of rank `from` is added to
/// that of rank `into`. They are the tree `((p0 + p1) + (p2 + p3)) + ...`; its root ends in the
/// rank's own piece, since x + y and y + x have the same bits.
fn additions(world: usize, own: usize) -> Vec<[usize; 2]> {
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
    use crate::DType;

    fn tensor(buffer: usize, shape: [usize; 2]) -> Tensor {
        Tensor { buffer, offset: 0, shape, stride: shape[1], dtype: DType::F32 }
    }

    #[test]
    fn each_element_is_in_one_part_of_one_bucket() {
        for large in [0, 1 << 20, ELEMENTS.end() * BUCKETS] {
            let shapes = [[3, 5], [large / 4, 7], [1, large + 9], [1, 8], [0, 4], [2, 0], [1, 1]];
            let tensors: Vec<_> = (0..).zip(shapes).map(|(at, shape)| tensor(at, shape)).collect();
            for world in [1, 2, 4, 8] {
                let mut elements = vec![0; tensors.len()];
                for bucket in cut(&tensors, bucket_elements(&tensors)) {
                    assert!(ELEMENTS.end() >= &length(&bucket), "{bucket:?}");
                    let parts = parts(&bucket, world);
                    assert_eq!(parts.len(), world);
                    let most = received_elements(&tensors, world);
                    assert!(parts.iter().all(|part| length(part) <= most), "{parts:?}");
                    for tensor in parts.iter().flatten() {
                        assert_eq!(tensor.offset, elements[tensor.buffer], "in order, no gaps");
                        assert_eq!(tensor.offset % LINE, 0);
                        elements[tensor.buffer] += tensor.elements();
                    }
                }
                assert_eq!(elements, shapes.map(|[rows, columns]| rows * columns));
            }
        }
    }

    #[test]
    fn every_rank_adds_the_same_tree() {
        for world in [1, 2, 4, 8] {
            for own in 0..world {
                let mut sums: Vec<String> = (0..world).map(|rank| rank.to_string()).collect();
                for [into, from] in additions(world, own) {
                    let mut pair = [sums[into].clone(), sums[from].clone()];
                    // Addition commutes, so the order of a pair is that of its first ranks.
                    pair.sort_by_key(|sum| sum.trim_start_matches('(').to_owned());
                    sums[into] = format!("({}+{})", pair[0], pair[1]);
                }
                let expected = ["0", "(0+1)", "((0+1)+(2+3))", "(((0+1)+(2+3))+((4+5)+(6+7)))"];
                assert_eq!(sums[own], expected[world.ilog2() as usize]);
            }
        }
    }
}

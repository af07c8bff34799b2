//! Operations on sequences stay inside them.

use sparse24_core::op::{AttentionMask, AttentionShape};
use sparse24_wgpu::{
    Error,
    attention::{AttentionBackward, AttentionForward, attention_backward, attention_forward},
    loss::{Pass, span_loss},
};

use crate::{Bits, alloc, loaded, open};

/// A length beyond the keys counts as their number.
#[test]
fn attention_reads_no_other_sequence() {
    let Some(mut device) = open() else { return };
    let (batch, keys, d) = (2, 5, 8);
    let mask = AttentionMask::Full;
    let shape = AttentionShape { batch, heads: 2, queries: keys, keys, mask };
    let rows = [batch * keys, d];
    let [q, k, v, d_o] = [1, 2, 3, 4]
        .map(|seed| loaded(&mut device, rows, &Bits::Close.words(rows[0] * rows[1], seed)));
    let long = loaded(&mut device, [batch, 1], &[keys as u32 + 3, u32::MAX]);
    let [expected, found] = [None, Some(long)].map(|lengths| {
        let [o, dq, dk, dv] = [0; 4].map(|_| alloc(&mut device, rows));
        let [lse, scratch] = [0; 2].map(|_| alloc(&mut device, [4, keys]));
        let forward = AttentionForward { shape, q, k, v, lengths, dropout: None, o, lse };
        attention_forward(&mut device, &forward).unwrap();
        let backward = AttentionBackward { forward, d_o, dqkv: [dq, dk, dv], scratch };
        attention_backward(&mut device, &backward).unwrap();
        [o, lse, dq, dk, dv].map(|of| device.download(of).unwrap())
    });
    assert_eq!(found, expected);
}

#[test]
fn a_span_loss_has_no_surplus_rows() {
    let Some(mut device) = open() else { return };
    let [logits, targets, lengths, losses] =
        [[7, 2], [7, 1], [2, 1], [2, 1]].map(|shape| alloc(&mut device, shape));
    let found = span_loss(&mut device, logits, targets, lengths, Pass::Training, losses);
    assert!(matches!(found, Err(Error::Shape { .. })), "{found:?}");
}

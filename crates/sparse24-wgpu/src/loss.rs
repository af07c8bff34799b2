//! Losses of logits, which are overwritten with their gradients.
//!
//! Gradients are multiplied by the `loss_scale` of the step state. A target of `u32::MAX`
//! contributes nothing.

use crate::{
    Device, Error, Matrix, WORKGROUP,
    error::{check_contiguous, check_shape},
    kernels,
};

/// Whether logits are overwritten with their gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// Losses only; logits hold unspecified values afterwards.
    Evaluation,
    /// Losses and gradients.
    Training,
}

fn trains(pass: Pass) -> u32 {
    u32::from(pass == Pass::Training)
}

/// Second targets: a row's loss is s times the cross-entropy against its target plus 1 - s times
/// the one against its second target, s being its share.
#[derive(Debug, Clone, Copy)]
pub struct Mixed {
    /// u32 `[p, 1]`. None of them is ignored, whatever its value.
    pub targets: Matrix,
    /// Shares in `[0, 1]` of the first targets `[p, 1]`.
    pub shares: Matrix,
}

/// The cross-entropy of the softmax of each row against its target: logits `[p, V]`, targets u32
/// `[p, 1]`, losses `[p, 1]`, overwritten. A target outside V, or a logit that is not finite, makes
/// the loss NaN.
///
/// # Errors
/// [`Error::Shape`] unless the operands fit; failures of earlier work.
pub fn cross_entropy(
    device: &mut Device,
    logits: Matrix,
    targets: Matrix,
    smoothing: f32,
    mixed: Option<Mixed>,
    pass: Pass,
    losses: Matrix,
) -> Result<(), Error> {
    let Mixed { targets: seconds, shares } = mixed.unwrap_or(Mixed { targets, shares: targets });
    check_shape("loss", "second targets", targets.shape, seconds)?;
    check_shape("loss", "shares", targets.shape, shares)?;
    let [of_seconds, of_shares] = [seconds, shares].map(|m| m.offset as u32);
    let rest = [smoothing.to_bits(), u32::from(mixed.is_some()), of_seconds, of_shares];
    let constants = [&row_constants(logits, targets, losses, pass)?[..], &rest].concat();
    let matrices = [targets, seconds, shares, logits, losses];
    device.run(&kernels::CROSS_ENTROPY, matrices, &constants, logits.shape[0])
}

/// (z - t)^2 of a single column, where a target holds the bits of the f32 t. Shapes as in
/// [`cross_entropy`], V = 1.
///
/// # Errors
/// Like [`cross_entropy`].
pub fn squared_error(
    device: &mut Device,
    z: Matrix,
    targets: Matrix,
    pass: Pass,
    losses: Matrix,
) -> Result<(), Error> {
    check_shape("squared error", "z", [z.shape[0], 1], z)?;
    let constants = row_constants(z, targets, losses, pass)?;
    let matrices = [targets, z, losses];
    device.run(&kernels::SQUARED_ERROR, matrices, &constants, z.shape[0].div_ceil(WORKGROUP))
}

fn row_constants(
    logits: Matrix,
    targets: Matrix,
    losses: Matrix,
    pass: Pass,
) -> Result<[u32; 7], Error> {
    let [p, v] = logits.shape;
    check_shape("loss", "targets", [p, 1], targets)?;
    check_shape("loss", "losses", [p, 1], losses)?;
    for (operand, found) in [("targets", targets), ("losses", losses)] {
        check_contiguous("loss", operand, found)?;
    }
    let ([offset, stride], places) = (logits.place(), [targets, losses].map(|m| m.offset as u32));
    let [of_targets, of_losses] = places;
    let (p, v) = (p as u32, v as u32);
    Ok([offset, stride, of_targets, of_losses, p, v, trains(pass)])
}

/// The mean of two cross-entropies for each of n sequences: columns 0 and 1 of logits `[p, 2]`
/// score a span's first and last token, by a softmax over the first `lengths[i]` of p / n tokens.
/// The first target that is not `u32::MAX` is at the span's first token; its value is the position
/// of the last. Lengths u32 `[n, 1]`, losses `[n, 1]`, overwritten.
///
/// # Errors
/// Like [`cross_entropy`].
pub fn span_loss(
    device: &mut Device,
    logits: Matrix,
    targets: Matrix,
    lengths: Matrix,
    pass: Pass,
    losses: Matrix,
) -> Result<(), Error> {
    let ([p, _], [n, _]) = (logits.shape, lengths.shape);
    let ([offset, stride], length) = (logits.place(), p / n.max(1));
    check_shape("span loss", "logits", [n * length, 2], logits)?;
    check_shape("span loss", "targets", [p, 1], targets)?;
    check_shape("span loss", "losses", [n, 1], losses)?;
    for (operand, found) in [("targets", targets), ("lengths", lengths), ("losses", losses)] {
        check_contiguous("span loss", operand, found)?;
    }
    let [of_targets, of_lengths, of_losses] = [targets, lengths, losses].map(|m| m.offset as u32);
    let (n, length) = (n as u32, length as u32);
    let constants = [offset, stride, of_targets, of_lengths, of_losses, n, length, trains(pass)];
    let matrices = [targets, lengths, logits, losses];
    device.run(&kernels::SPAN_LOSS, matrices, &constants, lengths.shape[0])
}

/// loss = the sum of losses `[p, 1]`. In training, a sum that is not finite raises the flag of
/// [`health`](crate::health).
///
/// # Errors
/// Like [`cross_entropy`].
pub fn loss_sum(
    device: &mut Device,
    losses: Matrix,
    loss: Matrix,
    pass: Pass,
    health: Matrix,
) -> Result<(), Error> {
    check_shape("loss sum", "loss", [1, 1], loss)?;
    let [of_losses, of_loss] = [losses, loss].map(|m| m.offset as u32);
    let constants = [of_losses, of_loss, losses.shape[0] as u32, trains(pass)];
    device.run(&kernels::LOSS_SUM, [losses, loss, health], &constants, 1)
}

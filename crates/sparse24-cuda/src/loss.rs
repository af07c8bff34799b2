//! Softmax cross-entropy over a vocabulary or a sequence and squared error, with their gradients in
//! place.

use half::bf16;
use sparse24_core::op::Accumulate;

use crate::{
    Device, Error, Matrix, Result,
    health::Health,
    launch::{Grid, arguments},
};

/// A target whose row has loss 0.
pub const IGNORE: u32 = u32::MAX;

/// The loss of each row against its target.
///
/// With q = softmax(logits) over the vocabulary and t = (1 - smoothing) one-hot(target) + smoothing
/// / vocabulary, loss = -sum(t ln q). In a row that is mixed, share one-hot(target) + (1 - share)
/// one-hot(second target) takes the place of one-hot(target). A row whose target is [`IGNORE`] has
/// loss 0. Another target outside the vocabulary, a second target outside it, or a logit that is
/// not finite, makes the row's loss NaN or infinite.
#[derive(Debug, Clone, Copy)]
pub struct HeadLoss {
    /// Logits `[rows, columns]`; columns are a multiple of 8, and those beyond `vocabulary` are
    /// padding.
    pub logits: Matrix<bf16>,
    /// Token ids `[rows, 1]`.
    pub targets: Matrix<u32>,
    /// Size of the vocabulary.
    pub vocabulary: usize,
    /// Label smoothing, in [0, 1).
    pub smoothing: f32,
    /// The second target of each row `[rows, 1]`, and the share of the first `[rows, 1]`.
    pub mixed: Option<(Matrix<u32>, Matrix<f32>)>,
    /// Losses in nats `[rows, 1]`, overwritten.
    pub losses: Matrix<f32>,
}

/// Computes the losses, and overwrites the logits with their gradient: `loss_scale` (q - t), where
/// `loss_scale` is that of the step state. Padding and ignored rows get zeros.
///
/// # Errors
/// [`Error::Shape`], also if columns are not a multiple of 8; [`Error::OutOfRange`] for an empty
/// vocabulary or a smoothing outside [0, 1); [`Error::TooLarge`] for a vocabulary beyond the
/// columns; [`Error::Gaps`], [`Error::Alignment`], [`Error::Alias`], [`Error::Stale`],
/// [`Error::Driver`].
pub fn head_loss(device: &mut Device, op: &HeadLoss) -> Result {
    // A block of any architecture may have 99 KiB of shared memory, of which the kernel's own
    // variables take a little; with twice that, two rows are resident. The rest of a row is read
    // again.
    const VECTOR: usize = 16;
    const KEPT: usize = (98 << 10) / VECTOR + 16;
    let [rows, columns] = op.check(device, "head loss")?;
    let HeadLoss { logits, targets, vocabulary, smoothing, mixed, losses } = *op;
    let (seconds, shares) = mixed.unzip();
    let held = (vocabulary / 8).min(KEPT);
    let grid = Grid { shared: (held * VECTOR) as u32, ..Grid::line(rows, threads(vocabulary)) };
    let [columns, vocabulary, held] = [columns, vocabulary, held].map(|size| size as u32);
    let state = device.state();
    device.launch(
        "head_loss",
        grid,
        &arguments![
            logits, targets, seconds, shares, losses, columns, vocabulary, held, smoothing, state
        ],
    )
}

/// Computes the losses only.
///
/// # Errors
/// See [`head_loss`].
pub fn loss_forward(device: &mut Device, op: &HeadLoss) -> Result {
    let [rows, columns] = op.check(device, "loss forward")?;
    let HeadLoss { logits, targets, vocabulary, smoothing, mixed, losses } = *op;
    let (seconds, shares) = mixed.unzip();
    let grid = Grid::line(rows, threads(vocabulary));
    let (columns, vocabulary) = (columns as u32, vocabulary as u32);
    device.launch(
        "loss_forward",
        grid,
        &arguments![logits, targets, seconds, shares, losses, columns, vocabulary, smoothing],
    )
}

/// losses `[p, 1]` = (z - t)^2, overwritten, of column 0 of the outputs z `[p, columns]`, where a
/// target `[p, 1]` has the bits of t; and z = 2 `loss_scale` (z - t), with that of the step state.
/// Other columns, and rows with the target [`IGNORE`], get zeros.
///
/// # Errors
/// See [`head_loss`].
pub fn squared_error(
    device: &mut Device,
    z: Matrix<bf16>,
    targets: Matrix<u32>,
    losses: Matrix<f32>,
) -> Result {
    let shape @ [rows, columns] = z.shape();
    device
        .checks("squared error")
        .input("targets", targets, [rows, 1], 4)?
        .output("outputs", z, shape, 2)?
        .output("losses", losses, [rows, 1], 4)?;
    let grid = Grid::line(rows.div_ceil(256), 256);
    let (rows, columns, state) = (rows as u64, columns as u32, device.state());
    let arguments = arguments![z, targets, losses, rows, columns, state];
    device.launch("squared_error", grid, &arguments)
}

/// The losses of the spans of n sequences: the mean of the cross-entropies of their first and last
/// token.
#[derive(Debug, Clone, Copy)]
pub struct SpanLoss {
    /// Logits `[p, columns]`, of the first token in column 0 and of the last in column 1; columns
    /// are a multiple of 8, and the others are padding.
    pub logits: Matrix<bf16>,
    /// Targets `[p, 1]`: the first of a sequence that is not [`IGNORE`] is in the row of the first
    /// token, and is the position of the last one. A sequence without one has loss 0; a span that
    /// ends beyond its length makes its loss NaN.
    pub targets: Matrix<u32>,
    /// Rows `[n, 1]` of each sequence, of its p / n, over which the softmax is.
    pub lengths: Matrix<u32>,
    /// Losses in nats `[n, 1]`, overwritten.
    pub losses: Matrix<f32>,
}

/// Computes the losses, and overwrites the logits with `loss_scale` times their gradient, with that
/// of the step state. Padding, and sequences without a target, get zeros.
///
/// # Errors
/// See [`head_loss`].
pub fn span_loss(device: &mut Device, op: &SpanLoss) -> Result {
    let SpanLoss { logits, targets, lengths, losses } = *op;
    let (shape @ [p, columns], n) = (logits.shape(), lengths.shape()[0]);
    let rows = p.checked_div(n).unwrap_or(0);
    device
        .checks("span loss")
        .columns_of("logits", shape, 8)?
        .input("targets", targets, [rows * n, 1], 4)?
        .input("lengths", lengths, [n, 1], 4)?
        .output("logits", logits, [rows * n, columns], 2)?
        .output("losses", losses, [n, 1], 4)?;
    let grid = Grid::line(n, threads(32 * rows / 4));
    let (rows, columns, state) = (rows as u32, columns as u32, device.state());
    let arguments = arguments![logits, targets, lengths, losses, rows, columns, state];
    device.launch("span_loss", grid, &arguments)
}

/// loss `[1, 1]` = the sum of losses `[p, 1]`, or loss += it, in a fixed order. Raises the flag of
/// `health` `[1, 2]` ([`Health`]) if the result is not finite.
///
/// # Errors
/// See [`head_loss`].
pub fn loss_sum(
    device: &mut Device,
    losses: Matrix<f32>,
    loss: Matrix<f32>,
    accumulate: Accumulate,
    health: Option<Matrix<u32>>,
) -> Result {
    let rows = losses.shape()[0];
    let mut checks = device.checks("loss sum");
    checks.input("losses", losses, [rows, 1], 4)?.output("loss", loss, [1, 1], 4)?;
    if let Some(health) = health {
        checks.output("health", health, [1, Health::WORDS], 4)?;
    }
    let add = u32::from(accumulate == Accumulate::Add);
    let arguments = arguments![losses, loss, health, rows as u64, add];
    device.launch("loss_sum", Grid::line(1, 1024), &arguments)
}

/// About four vectors of 8 logits per thread, in whole warps.
fn threads(vocabulary: usize) -> u32 {
    (vocabulary / 32).next_power_of_two().clamp(32, 512) as u32
}

impl HeadLoss {
    fn check(&self, device: &Device, operation: &'static str) -> Result<[usize; 2]> {
        let shape @ [rows, columns] = self.logits.shape();
        let mut checks = device.checks(operation);
        checks.columns_of("logits", shape, 8)?;
        if self.vocabulary == 0 {
            let (what, expected) = ("the vocabulary", "at least 1");
            return Err(Error::OutOfRange { operation, what, found: 0.0, expected });
        }
        checks
            .limit("the vocabulary", self.vocabulary, columns)?
            .below_one("the smoothing", self.smoothing)?
            .input("targets", self.targets, [rows, 1], 4)?
            .output("logits", self.logits, shape, 16)?
            .output("losses", self.losses, [rows, 1], 4)?;
        if let Some((seconds, shares)) = self.mixed {
            checks.input("second targets", seconds, [rows, 1], 4)?;
            checks.input("shares", shares, [rows, 1], 4)?;
        }
        Ok(shape)
    }
}

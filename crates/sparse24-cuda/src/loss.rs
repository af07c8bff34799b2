//! Softmax cross-entropy over a vocabulary, with its gradient in place.

use half::bf16;

use crate::{
    Beta, Device, Error, Matrix,
    adamw::Health,
    launch::{Argument, Grid},
    operand::check_packed,
};

/// A target that costs nothing.
pub const IGNORE: u32 = u32::MAX;

/// The loss of each row against its target.
///
/// With q = softmax(logits) over the vocabulary and t = (1 - smoothing) * one-hot(target) +
/// smoothing / vocabulary: loss = -sum(t * ln q). A row whose target is [`IGNORE`] costs 0; another
/// target outside of the vocabulary makes its row's loss NaN, and so do a NaN or infinite logit, or
/// infinite.
#[derive(Debug, Clone, Copy)]
pub struct HeadLoss {
    /// `[rows, columns]`; columns are a multiple of 8, and those from `vocabulary` on do not count.
    pub logits: Matrix<bf16>,
    /// `[rows, 1]`.
    pub targets: Matrix<u32>,
    /// V.
    pub vocabulary: usize,
    /// In [0, 1).
    pub smoothing: f32,
    /// In nats `[rows, 1]`, overwritten.
    pub losses: Matrix<f32>,
}

/// See [`HeadLoss`]; dlogits = scale * (q - t) goes over the logits, zeros where the target is
/// [`IGNORE`] and beyond the vocabulary.
///
/// # Errors
/// [`Error::Shape`], also for columns that are no multiple of 8; [`Error::OutOfRange`] for an empty
/// vocabulary or a smoothing outside of [0, 1); [`Error::TooLarge`] for a vocabulary beyond the
/// columns; [`Error::Gaps`], [`Error::Alignment`], [`Error::Alias`], [`Error::Stale`],
/// [`Error::Driver`].
pub fn head_loss(device: &mut Device, op: &HeadLoss, scale: f32) -> Result<(), Error> {
    // A block of every architecture may have 99 KiB, of which the kernel's own variables take a
    // little; where a multiprocessor has twice that, two rows are under way. What of a row is not
    // kept there is read again.
    const VECTOR: usize = 16;
    const KEPT: usize = (98 << 10) / VECTOR + 16;
    let [rows, columns] = check("head loss", device, op)?;
    let held = (op.vocabulary / 8).min(KEPT);
    let grid = Grid { shared: (held * VECTOR) as u32, ..Grid::line(rows, threads(op.vocabulary)) };
    let sizes = [columns, op.vocabulary, held].map(|size| Argument::U32(size as u32));
    let operands = [op.logits.into(), op.targets.into(), op.losses.into()];
    device.launch(
        "head_loss",
        grid,
        &[&operands[..], &sizes, &[op.smoothing.into(), scale.into()]].concat(),
    )
}

/// See [`HeadLoss`]; the logits stay.
///
/// # Errors
/// As [`head_loss`].
pub fn loss_forward(device: &mut Device, op: &HeadLoss) -> Result<(), Error> {
    let [rows, columns] = check("loss forward", device, op)?;
    let sizes = [columns, op.vocabulary].map(|size| Argument::U32(size as u32));
    let operands = [op.logits.into(), op.targets.into(), op.losses.into()];
    let grid = Grid::line(rows, threads(op.vocabulary));
    device.launch("loss_forward", grid, &[&operands[..], &sizes, &[op.smoothing.into()]].concat())
}

/// loss `[1, 1]` = the sum of losses `[p, 1]`, in a fixed order; raises the flag of `health`
/// `[1, 2]` ([`Health`]) if it is not finite.
///
/// # Errors
/// As [`head_loss`].
pub fn loss_sum(
    device: &mut Device,
    losses: Matrix<f32>,
    loss: Matrix<f32>,
    beta: Beta,
    health: Option<Matrix<u32>>,
) -> Result<(), Error> {
    const OPERATION: &str = "loss sum";
    let rows = losses.shape()[0];
    check_packed(device, OPERATION, "losses", losses, [rows, 1], 4)?;
    device.check(OPERATION, "loss", loss, [1, 1])?;
    device.check_apart(OPERATION, ("loss", loss.span()), &[("losses", losses.span())])?;
    if let Some(health) = health {
        device.check(OPERATION, "health", health, [1, Health::WORDS])?;
        device.check_apart(
            OPERATION,
            ("health", health.span()),
            &[("losses", losses.span()), ("loss", loss.span())],
        )?;
    }
    let accumulate = u32::from(beta == Beta::Accumulate);
    let arguments =
        [losses.into(), loss.into(), health.into(), Argument::U64(rows as u64), accumulate.into()];
    device.launch("loss_sum", Grid::line(1, 1024), &arguments)
}

/// About four vectors of 8 logits a thread, in whole warps.
fn threads(vocabulary: usize) -> u32 {
    (vocabulary / 32).next_power_of_two().clamp(32, 512) as u32
}

fn check(operation: &'static str, device: &Device, op: &HeadLoss) -> Result<[usize; 2], Error> {
    let [rows, columns] = op.logits.shape();
    if columns % 8 != 0 {
        return Err(Error::Shape {
            operation,
            operand: "logits",
            expected: [rows, columns.next_multiple_of(8)],
            found: [rows, columns],
        });
    }
    if op.vocabulary == 0 {
        return Err(Error::OutOfRange {
            operation,
            what: "the vocabulary",
            found: 0.0,
            expected: "at least 1",
        });
    }
    if op.vocabulary > columns {
        return Err(Error::TooLarge {
            operation,
            what: "the vocabulary",
            found: op.vocabulary,
            limit: columns,
        });
    }
    if !(0.0..1.0).contains(&op.smoothing) {
        let found = op.smoothing.into();
        return Err(Error::OutOfRange {
            operation,
            what: "the smoothing",
            found,
            expected: "at least 0 and below 1",
        });
    }
    check_packed(device, operation, "logits", op.logits, [rows, columns], 16)?;
    check_packed(device, operation, "targets", op.targets, [rows, 1], 4)?;
    check_packed(device, operation, "losses", op.losses, [rows, 1], 4)?;
    let (logits, targets) = (("logits", op.logits.span()), ("targets", op.targets.span()));
    device.check_apart(operation, logits.clone(), std::slice::from_ref(&targets))?;
    device.check_apart(operation, ("losses", op.losses.span()), &[logits, targets])?;
    Ok([rows, columns])
}

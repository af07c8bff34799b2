//! Checks of operands that need no device, the same for every backend.
#![cfg_attr(
    not(any(feature = "cpu", feature = "cuda", feature = "wgpu")),
    expect(dead_code, reason = "only backends call some of the checks")
)]

use core::fmt::Display;
use std::collections::HashSet;

use sparse24_core::op::AttentionShape;

use super::{
    AttentionBackward, AttentionForward, DenseOp, DropSequences, DropoutOp, Embed, EmbedBackward,
    EmbedForward, Gradient, HeadLoss, Op, OptimizerEntry, PermutedMask, SparseOp, TargetLoss,
    UpdateOp, Weight,
};
use crate::{DType, Error, Result, Tensor};

fn refused(operation: &str, problem: impl Display) -> Error {
    Error::Refused(format!("{operation}: {problem}"))
}

/// Checks a shape that the other operands of an operation imply.
pub(crate) fn shape(
    operation: &'static str,
    operand: &'static str,
    expected: [usize; 2],
    found: [usize; 2],
) -> Result {
    if expected == found {
        return Ok(());
    }
    Err(Error::Operand { operation, operand, expected, found })
}

/// The types of floats, which the host reads and writes alike.
const FLOATS: &[DType] = &[DType::F32, DType::Activation];

/// Checks that a tensor holds floats.
pub(crate) fn floats(operation: &'static str, t: Tensor) -> Result {
    Operands::of(operation).floats("the tensor", Some(t), t.shape, FLOATS).map(drop)
}

/// Checks that a tensor holds f32.
pub(crate) fn f32s(operation: &'static str, t: Tensor) -> Result {
    Operands::of(operation).input_f32("the tensor", t, t.shape).map(drop)
}

/// Checks that a tensor holds ids, without gaps.
pub(crate) fn ids(operation: &'static str, t: Tensor) -> Result {
    Operands::of(operation).ids("the tensor", t, t.shape).map(drop)
}

/// Checks the operands of a distance.
pub(crate) fn distance(a: Tensor, b: Tensor) -> Result {
    let operands = Operands::of("l1 distance").input_f32("a", a, a.shape)?;
    operands.input_f32("b", b, a.shape).map(drop)
}

/// Checks that there are masks of this shape.
pub(crate) fn tiled([rows, columns]: [usize; 2]) -> Result {
    if rows % 4 == 0 && columns % 4 == 0 {
        return Ok(());
    }
    Err(sparse24_core::Error::NotTiled { operation: "pruned weight", rows, columns }.into())
}

/// Checks that a sampled gradient of dZ `[p, r]` fits in the memory of one with these extents.
pub(crate) fn sampled([most, r]: [usize; 2], found: [usize; 2]) -> Result {
    shape("sampled gradient", "dz", [found[0].min(most), r], found)
}

/// Checks a table of the optimizer.
pub(crate) fn table(table: &[OptimizerEntry]) -> Result {
    const OPERATION: &str = "optimizer table";
    let mut written = HashSet::new();
    for entry in table {
        let OptimizerEntry { weight, gradient, first_moment, second_moment, .. } = *entry;
        let expected = weight.shape;
        let operands = Operands::of(OPERATION)
            .output_f32("weight", weight, expected)?
            .output_f32("first moment", first_moment, expected)?
            .output_f32("second moment", second_moment, expected)?
            .input_f32("gradient", gradient, expected)?;
        let gaps = |t: &Tensor| !t.is_dense();
        if operands.outputs.iter().flatten().any(gaps) || gaps(&gradient) {
            return Err(refused(OPERATION, "a tensor has gaps between its rows"));
        }
        if !operands.outputs.iter().flatten().all(|t| written.insert(t.buffer)) {
            return Err(refused(OPERATION, "two tensors that a step writes share a buffer"));
        }
    }
    if table.iter().any(|entry| written.contains(&entry.gradient.buffer)) {
        return Err(refused(OPERATION, "a gradient is in the buffer of a weight or moment"));
    }
    Ok(())
}

/// The operands of an operation that were checked so far, outputs first.
struct Operands {
    operation: &'static str,
    outputs: [Option<Tensor>; 5],
}

impl Operands {
    fn of(operation: &'static str) -> Self {
        Self { operation, outputs: [None; 5] }
    }

    /// A tensor that is overwritten or added to.
    fn written(mut self, t: Option<Tensor>) -> Self {
        let free = self.outputs.iter_mut().find(|t| t.is_none());
        *free.expect("an operation has at most five outputs") = t;
        self
    }

    /// Activations that are written.
    fn output(
        self,
        operand: &'static str,
        t: impl Into<Option<Tensor>>,
        expected: [usize; 2],
    ) -> Result<Self> {
        let t = t.into();
        Ok(self.input(operand, t, expected)?.written(t))
    }

    /// A tensor of f32 that is written.
    fn output_f32(
        self,
        operand: &'static str,
        t: impl Into<Option<Tensor>>,
        expected: [usize; 2],
    ) -> Result<Self> {
        let t = t.into();
        Ok(self.input_f32(operand, t, expected)?.written(t))
    }

    /// Activations that are read.
    fn input(
        self,
        operand: &'static str,
        t: impl Into<Option<Tensor>>,
        expected: [usize; 2],
    ) -> Result<Self> {
        self.floats(operand, t.into(), expected, &[DType::Activation])
    }

    /// A tensor of f32 that is read.
    fn input_f32(
        self,
        operand: &'static str,
        t: impl Into<Option<Tensor>>,
        expected: [usize; 2],
    ) -> Result<Self> {
        self.floats(operand, t.into(), expected, &[DType::F32])
    }

    /// A tensor of one of these types, in no buffer of an output.
    fn floats(
        self,
        operand: &'static str,
        t: Option<Tensor>,
        expected: [usize; 2],
        types: &[DType],
    ) -> Result<Self> {
        let Some(t) = t else { return Ok(self) };
        shape(self.operation, operand, expected, t.shape)?;
        if !types.contains(&t.dtype) {
            let needed = if types.len() > 1 { "floats" } else { types[0].words() };
            let held = t.dtype.words();
            let problem = format_args!("{operand} holds {held}, not {needed}");
            return Err(refused(self.operation, problem));
        }
        if self.outputs.iter().flatten().any(|output| output.buffer == t.buffer) {
            let problem = format_args!("{operand} is in the buffer of another output");
            return Err(refused(self.operation, problem));
        }
        Ok(self)
    }

    /// An input like this output, or the output itself.
    fn in_place(self, operand: &'static str, t: Tensor, out: Tensor) -> Result<Self> {
        if t == out { Ok(self) } else { self.floats(operand, Some(t), out.shape, &[out.dtype]) }
    }

    /// A tensor of u32, without gaps.
    fn ids(
        self,
        operand: &'static str,
        t: impl Into<Option<Tensor>>,
        expected: [usize; 2],
    ) -> Result<Self> {
        let Some(t) = t.into() else { return Ok(self) };
        shape(self.operation, operand, expected, t.shape)?;
        match t.dtype {
            DType::U32 if t.is_dense() => Ok(self),
            DType::U32 => {
                Err(refused(self.operation, format_args!("{operand} has gaps between its rows")))
            }
            other => {
                let problem = format_args!("{operand} holds {}, not ids", other.words());
                Err(refused(self.operation, problem))
            }
        }
    }
}

fn dense(weight: Weight) -> Option<Tensor> {
    match weight {
        Weight::Dense(t) => Some(t),
        Weight::Pruned(_) => None,
    }
}

impl Op<'_> {
    /// Checks all that can be known of operands without the device: shapes, element types, and that
    /// outputs are apart from the other operands. A backend does so before it executes an
    /// operation.
    ///
    /// # Errors
    /// [`Error::Operand`] for a shape that does not fit; [`Error::Refused`] for another reason.
    pub fn check(&self) -> Result {
        match self {
            Self::Sparse(op) => op.check(),
            Self::Dense(op) => op.check(),
            Self::Update(op) => op.check(),
        }
    }
}

impl SparseOp<'_> {
    fn check(&self) -> Result {
        match self {
            Self::MaskSearch(op) => f32s("mask search", op.w),
            Self::CompressWeight(op) => f32s("compress weight", op.w),
            Self::MvueCompress(op) => {
                Operands::of("mvue compress").input("dz", op.dz, op.dz.shape).map(drop)
            }
            Self::PermutedMask(PermutedMask { w, order, .. }) => {
                const OPERATION: &str = "permuted mask";
                f32s(OPERATION, *w)?;
                shape(OPERATION, "order", [1, w.shape[0]], [1, order.len()])?;
                let mut seen = vec![false; order.len()];
                for &row in *order {
                    if let Some(seen) = seen.get_mut(row as usize) {
                        *seen = true;
                    }
                }
                match seen.iter().position(|seen| !seen) {
                    None => Ok(()),
                    Some(row) => Err(refused(OPERATION, format_args!("the order lacks row {row}"))),
                }
            }
        }
    }
}

impl UpdateOp<'_> {
    fn check(&self) -> Result {
        let of = Operands::of;
        let checked = match self {
            Self::Copy(op) => {
                let operands = of("copy").floats("to", Some(op.to), op.to.shape, FLOATS)?;
                operands.written(Some(op.to)).floats("from", Some(op.from), op.to.shape, FLOATS)
            }
            Self::Fill(op) => of("fill").floats("to", Some(op.to), op.to.shape, FLOATS),
            Self::MovingAverage(op) => {
                let expected = op.average.shape;
                let operands = of("moving average").output_f32("average", op.average, expected)?;
                operands.input_f32("w", op.w, expected)
            }
            // Their table was checked when it was allocated.
            Self::GradNorm(_) | Self::OptimizerStep(_) => return Ok(()),
        };
        checked.map(drop)
    }
}

impl DenseOp {
    fn check(&self) -> Result {
        let of = Operands::of;
        let checked =
            match self {
                Self::LinearForward(op) => {
                    let ([p, q], r) = (op.x.shape, op.z.shape[1]);
                    of("linear forward")
                        .output("z", op.z, [p, r])?
                        .input("x", op.x, [p, q])?
                        .input_f32("weight", dense(op.weight), [r, q])?
                        .input_f32("bias", op.bias, [1, r])
                }
                Self::LinearDgrad(op) => {
                    let ([p, r], q) = (op.dz.shape, op.dx.shape[1]);
                    of("linear dgrad")
                        .output("dx", op.dx, [p, q])?
                        .input("dz", op.dz, [p, r])?
                        .input_f32("weight", dense(op.weight), [r, q])
                }
                Self::LinearWgrad(op) => {
                    let (p, [r, q]) = (op.x.shape[0], op.dw.shape);
                    let dz = match op.dz {
                        Gradient::Dense(t) => Some(t),
                        Gradient::Sampled(_) => None,
                    };
                    of("linear wgrad")
                        .output_f32("dw", op.dw, [r, q])?
                        .input("x", op.x, [p, q])?
                        .input("dz", dz, [p, r])
                }
                Self::BiasGrad(op) => {
                    let operands = of("bias grad").output_f32("db", op.db, [1, op.dz.shape[1]])?;
                    operands.input("dz", op.dz, op.dz.shape)
                }
                Self::ActivationForward(op) => {
                    let [p, f] = op.h.shape;
                    let z = [p, f.saturating_mul(op.activation.columns_in())];
                    of("activation forward").output("h", op.h, [p, f])?.input("z", op.z, z)
                }
                Self::ActivationBackward(op) => {
                    let [p, f] = op.dh.shape;
                    let z = [p, f.saturating_mul(op.activation.columns_in())];
                    of("activation backward")
                        .output("dz", op.dz, z)?
                        .input("dh", op.dh, [p, f])?
                        .input("z", op.z, z)
                }
                Self::Add(op) => {
                    let (out, expected) = (op.out, op.out.shape);
                    of("add")
                        .floats("out", Some(out), expected, FLOATS)?
                        .written(Some(out))
                        .in_place("x", op.x, out)?
                        .floats("delta", Some(op.delta), expected, &[out.dtype])
                }
                Self::NormForward(op) => {
                    let [p, d] = op.x.shape;
                    of("norm forward")
                        .output("y", op.y, [p, d])?
                        .output_f32("stats", op.stats, [p, 2])?
                        .input("x", op.x, [p, d])?
                        .input_f32("gamma", op.gamma, [1, d])?
                        .input_f32("beta", op.beta, [1, d])
                }
                Self::NormBackward(op) => {
                    let [p, d] = op.dy.shape;
                    of("norm backward")
                        .output("dx", op.dx, [p, d])?
                        .output_f32("dgamma", op.dgamma, [1, d])?
                        .output_f32("dbeta", op.dbeta, [1, d])?
                        .input("dy", op.dy, [p, d])?
                        .input("x", op.x, [p, d])?
                        .input_f32("stats", op.stats, [p, 2])?
                        .input_f32("gamma", op.gamma, [1, d])
                }
                Self::AttentionForward(op) => {
                    let [o, _, lse] = attended(op);
                    let operands = of("attention forward").output("o", op.o, o)?;
                    attention(operands.output_f32("lse", op.lse, lse)?, op)
                }
                Self::AttentionBackward(op) => return attention_backward(op),
                Self::EmbedForward(EmbedForward(op)) => {
                    let ([tokens, table, positions], rows) = (embedded(op), op.rows.shape);
                    of("embed forward")
                        .output("rows", op.rows, rows)?
                        .ids("tokens", op.tokens, tokens)?
                        .input_f32("token table", op.token_table, table)?
                        .input_f32("position table", op.position_table, positions)
                }
                Self::EmbedBackward(EmbedBackward(op)) => {
                    let ([tokens, table, positions], rows) = (embedded(op), op.rows.shape);
                    of("embed backward")
                        .output_f32("token table", op.token_table, table)?
                        .output_f32("position table", op.position_table, positions)?
                        .ids("tokens", op.tokens, tokens)?
                        .input("rows", op.rows, rows)
                }
                Self::HeadLoss(op) => return head_loss(op),
                Self::Logits(op) => {
                    let ([p, d], v) = (op.x.shape, op.out.shape[1]);
                    of("logits")
                        .output("out", op.out, [p, v])?
                        .input("x", op.x, [p, d])?
                        .input_f32("embedding", op.embedding, [v, d])?
                        .input_f32("bias", op.bias, [1, v])
                }
                Self::Dropout(DropoutOp { x, out, .. })
                | Self::DropSequences(DropSequences { x, out, .. }) => {
                    of("dropout").output("out", *out, out.shape)?.in_place("x", *x, *out)
                }
                Self::GatherRows(op) => {
                    let (x, n) = (op.x.shape, op.rows.elements());
                    of("gather rows").output("out", op.out, [n, x[1]])?.input("x", op.x, x)?.ids(
                        "rows",
                        op.rows,
                        [n, 1],
                    )
                }
                Self::ScatterRows(op) => {
                    let (dx, n) = (op.dx.shape, op.rows.elements());
                    of("scatter rows")
                        .output("dx", op.dx, dx)?
                        .input("dout", op.dout, [n, dx[1]])?
                        .ids("rows", op.rows, [n, 1])
                }
                Self::Scale(op) => of("scale")
                    .output_f32("out", op.out, op.x.shape)?
                    .input_f32("x", op.x, op.x.shape)?
                    .input_f32("scale", op.scale, [1, 1]),
                Self::ScaleGrad(op) => of("scale grad")
                    .output_f32("ds", op.ds, [1, 1])?
                    .input_f32("x", op.x, op.x.shape)?
                    .input_f32("dout", op.dout, op.x.shape),
            };
        checked.map(drop)
    }
}

/// The shapes of tokens, token table and position table.
fn embedded(op: &Embed) -> [[usize; 2]; 3] {
    let [p, d] = op.rows.shape;
    let positions = op.position_table.map_or(0, |t| t.shape[0]).max(op.sequence_length.min(p));
    [[p, 1], [op.token_table.shape[0], d], [positions, d]]
}

/// The shapes of queries, keys and the log of the sum of exponentials.
fn attended(op: &AttentionForward) -> [[usize; 2]; 3] {
    let AttentionShape { batch, heads, queries, keys, .. } = op.shape;
    // Whole heads, of which there is at least one.
    let d = (op.q.shape[1] / heads.max(1)).saturating_mul(heads);
    let of_batch = |n: usize| batch.saturating_mul(n);
    [[of_batch(queries), d], [of_batch(keys), d], [of_batch(heads), queries]]
}

/// Checks the inputs of the forward pass.
fn attention(outputs: Operands, op: &AttentionForward) -> Result<Operands> {
    let ([queries, keys, lse], kept) = (attended(op), op.dropout.map(|dropout| dropout.kept));
    if op.shape.heads == 0 {
        return Err(refused(outputs.operation, "there are no heads"));
    }
    let words = kept.filter(|t| t.shape[1] > 0).map_or(0, |_| op.shape.tile_words());
    outputs
        .input("q", op.q, queries)?
        .input("k", op.k, keys)?
        .input("v", op.v, keys)?
        .ids("lengths", op.lengths, [op.shape.batch, 1])?
        .ids("kept", kept, [lse[0], words])
}

fn attention_backward(op: &AttentionBackward) -> Result {
    const OPERATION: &str = "attention backward";
    let [queries, keys, lse] = attended(&op.forward);
    let [dq, dk, dv] = op.dqkv;
    for (operand, t, expected) in [("dq", dq, queries), ("dk", dk, keys), ("dv", dv, keys)] {
        let operands = Operands::of(OPERATION)
            .output(operand, t, expected)?
            .input("d_o", op.d_o, queries)?
            .input("o", op.forward.o, queries)?
            .input_f32("lse", op.forward.lse, lse)?;
        attention(operands, &op.forward)?;
    }
    let follows = |left: Tensor, t: Tensor| {
        left.offset + left.shape[1] <= t.offset && t.offset + t.shape[1] <= left.offset + t.stride
    };
    let is_placed = match [dq.buffer == dk.buffer, dk.buffer == dv.buffer] {
        [true, true] => follows(dq, dk) && follows(dk, dv) && follows(dq, dv),
        [false, true] => follows(dk, dv),
        [false, false] => dq.buffer != dv.buffer,
        [true, false] => false,
    };
    if is_placed {
        return Ok(());
    }
    Err(refused(OPERATION, "dq, dk and dv are not in separate buffers or left to right in one"))
}

fn head_loss(op: &HeadLoss) -> Result {
    const OPERATION: &str = "head loss";
    let ([p, d], [chunk, v]) = (op.x.shape, op.logits.shape);
    let (needed, outputs) = match op.kind {
        TargetLoss::CrossEntropy { .. } => (p.min(1), v),
        TargetLoss::SquaredError => (p.min(1), 1),
        TargetLoss::Span { .. } => (p, 2),
    };
    let of = op.gradients;
    Operands::of(OPERATION)
        .output("logits", op.logits, [chunk.max(needed), outputs])?
        .output_f32("loss", op.loss, [1, 1])?
        .output("dx", of.map(|of| of.dx), [p, d])?
        .output_f32("dembedding", of.map(|of| of.dembedding), [v, d])?
        .output_f32("dbias", of.and_then(|of| of.dbias), [1, v])?
        .input("x", op.x, [p, d])?
        .input_f32("embedding", op.embedding, [v, d])?
        .input_f32("bias", op.bias, [1, v])?
        .ids("targets", op.targets, [p, 1])?;
    match op.kind {
        TargetLoss::CrossEntropy { mixed: Some(mixed), .. } => {
            let operands = Operands::of(OPERATION).input_f32("shares", mixed.shares, [p, 1])?;
            operands.ids("second targets", mixed.targets, [p, 1])?;
            match mixed.shares.is_dense() {
                true => Ok(()),
                false => Err(refused(OPERATION, "shares have gaps between their rows")),
            }
        }
        TargetLoss::Span { lengths } => {
            let n = lengths.shape[0];
            Operands::of(OPERATION).ids("lengths", lengths, [n, 1])?;
            shape(OPERATION, "x", [p - p.checked_rem(n).unwrap_or(p), d], op.x.shape)
        }
        _ => Ok(()),
    }
}

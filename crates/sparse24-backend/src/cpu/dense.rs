//! The operations of layers on the CPU.

use std::mem;

use ndarray::{ArrayView2, ArrayViewMut1, ArrayViewMut2};
use sparse24_core::op::{Accumulate, NonFinite};
use sparse24_cpu::{
    activation,
    add::add,
    attention,
    bias::bias_grad,
    dropout::{drop_sequences, dropout},
    embedding,
    gemm::{matmul, matmul_bias},
    loss::{self, head_loss, span_loss, squared_error},
    norm::{norm_backward, norm_forward},
    rows::{gather_rows, scatter_rows},
    scale::{scale, scale_grad},
    strips,
};

use super::{CpuBackend, buffers::scratch_view};
use crate::{
    Arithmetic, Error, Gradient24, Op, Result, Tensor, Weight24,
    op::{
        Add, AttentionBackward, AttentionDropout, AttentionForward, BiasGrad, DenseOp, Embed,
        EmbedBackward, EmbedForward, Fill, Gradient, HeadLoss, LinearDgrad, LinearForward,
        LinearWgrad, NormBackward, NormForward, TargetLoss, UpdateOp, Weight,
    },
};

/// A `[1, n]` output as a vector.
fn row_mut(view: ArrayViewMut2<'_, f32>) -> ArrayViewMut1<'_, f32> {
    let elements = view.len();
    view.into_shape_with_order(elements).expect("a parameter vector is contiguous")
}

impl CpuBackend {
    pub(super) fn dense(&mut self, op: &DenseOp) -> Result {
        match op {
            DenseOp::LinearForward(op) => self.linear_forward(op),
            DenseOp::LinearDgrad(op) => self.linear_dgrad(op),
            DenseOp::LinearWgrad(op) => self.linear_wgrad(op),
            DenseOp::BiasGrad(op) => self.write([op.db], |cpu, [db]| {
                bias_grad(cpu.buffers.view(op.dz), row_mut(db), op.accumulate)
            }),
            DenseOp::ActivationForward(op) => self.write([op.h], |cpu, [h]| {
                activation::activation_forward(op.activation, cpu.buffers.view(op.z), h)
            }),
            DenseOp::ActivationBackward(op) => self.write([op.dz], |cpu, [dz]| {
                let [dh, z] = [op.dh, op.z].map(|t| cpu.buffers.view(t));
                activation::activation_backward(op.activation, dh, z, dz)
            }),
            DenseOp::Add(op) => self.add(op),
            DenseOp::NormForward(op) => self.norm_forward(op),
            DenseOp::NormBackward(op) => self.norm_backward(op),
            DenseOp::AttentionForward(op) => self.attention_forward(op),
            DenseOp::AttentionBackward(op) => self.attention_backward(op),
            DenseOp::EmbedForward(EmbedForward(op)) => self.embed_forward(op),
            DenseOp::EmbedBackward(EmbedBackward(op)) => self.embed_backward(op),
            DenseOp::HeadLoss(op) => self.head_loss(op),
            DenseOp::Logits(op) => self.linear_forward(&LinearForward {
                x: op.x,
                weight: Weight::Dense(op.embedding),
                bias: op.bias,
                z: op.out,
            }),
            DenseOp::Dropout(op) => self.write([op.out], |cpu, [mut out]| {
                cpu.assign(op.x, op.out, &mut out);
                dropout(out, &op.dropout, cpu.state.stream(op.dropout.site))
            }),
            DenseOp::DropSequences(op) => self.write([op.out], |cpu, [mut out]| {
                cpu.assign(op.x, op.out, &mut out);
                let stream = cpu.state.stream(op.dropout.site);
                drop_sequences(out, op.sequence_length, &op.dropout, stream)
            }),
            DenseOp::GatherRows(op) => self.write([op.out], |cpu, [out]| {
                gather_rows(cpu.buffers.view(op.x), cpu.buffers.ids(op.rows), out)
            }),
            DenseOp::ScatterRows(op) => self.write([op.dx], |cpu, [dx]| {
                scatter_rows(cpu.buffers.view(op.dout), cpu.buffers.ids(op.rows), dx)
            }),
            DenseOp::Scale(op) => self.write([op.out], |cpu, [out]| {
                scale(cpu.buffers.view(op.x), cpu.buffers.view(op.scale)[[0, 0]], out)
            }),
            DenseOp::ScaleGrad(op) => self.write([op.ds], |cpu, [mut ds]| {
                let [x, dout] = [op.x, op.dout].map(|t| cpu.buffers.view(t));
                scale_grad(x, dout, &mut ds[[0, 0]], op.accumulate)
            }),
        }
    }

    /// A dense weight as products read it: itself, or its rounding in `scratch`.
    fn weight<'a>(
        &'a self,
        weight: Tensor,
        scratch: &'a mut Vec<f32>,
    ) -> Result<ArrayView2<'a, f32>, sparse24_cpu::Error> {
        let weight = self.buffers.view(weight);
        Ok(match self.arithmetic {
            Arithmetic::Native | Arithmetic::F32 => weight,
            Arithmetic::Bf16 => {
                let mut rounded = scratch_view(scratch, weight.dim())?;
                rounded.assign(&weight);
                self.round(rounded);
                ArrayView2::from_shape(weight.dim(), &scratch[..weight.len()])
                    .expect("the scratch was grown")
            }
        })
    }

    /// Writes `outputs` with the help of the scratch.
    fn write_with_scratch<const N: usize>(
        &mut self,
        outputs: [Tensor; N],
        run: impl FnOnce(
            &Self,
            &mut Vec<f32>,
            [ArrayViewMut2<'_, f32>; N],
        ) -> Result<(), sparse24_cpu::Error>,
    ) -> Result {
        let mut scratch = mem::take(&mut self.scratch);
        let done = self.write(outputs, |cpu, outputs| run(cpu, &mut scratch, outputs));
        self.scratch = scratch;
        done
    }

    fn linear_forward(&mut self, op: &LinearForward) -> Result {
        if let Weight::Pruned(Weight24(at)) = op.weight
            && self.weights24[at].forward.is_none()
        {
            return Err(Error::Refused("a permuted mask has no forward product".to_owned()));
        }
        self.write_with_scratch([op.z], |cpu, scratch, [z]| {
            let (x, bias) = (cpu.buffers.view(op.x), op.bias.map(|bias| cpu.buffers.row(bias)));
            match (op.weight, bias) {
                (Weight::Pruned(Weight24(at)), _) => {
                    let w = cpu.weights24[at].forward.as_ref().expect("it is 2:4 along its rows");
                    strips::matmul(w, x.t(), bias, z.reversed_axes(), Accumulate::Overwrite)
                }
                (Weight::Dense(w), Some(bias)) => {
                    matmul_bias(x, cpu.weight(w, scratch)?.t(), bias, z)
                }
                (Weight::Dense(w), None) => {
                    matmul(x, cpu.weight(w, scratch)?.t(), z, Accumulate::Overwrite)
                }
            }
        })
    }

    fn linear_dgrad(&mut self, op: &LinearDgrad) -> Result {
        self.write_with_scratch([op.dx], |cpu, scratch, [dx]| {
            let dz = cpu.buffers.view(op.dz);
            match op.weight {
                Weight::Pruned(Weight24(at)) => {
                    let w = &cpu.weights24[at].dgrad;
                    strips::matmul(w, dz.t(), None, dx.reversed_axes(), Accumulate::Overwrite)
                }
                Weight::Dense(w) => matmul(dz, cpu.weight(w, scratch)?, dx, Accumulate::Overwrite),
            }
        })
    }

    fn linear_wgrad(&mut self, op: &LinearWgrad) -> Result {
        self.write([op.dw], |cpu, [dw]| {
            let x = cpu.buffers.view(op.x);
            match op.dz {
                Gradient::Dense(dz) => matmul(cpu.buffers.view(dz).t(), x, dw, op.accumulate),
                Gradient::Sampled(Gradient24(at)) => {
                    strips::matmul(&cpu.gradients24[at].1, x, None, dw, op.accumulate)
                }
            }
        })
    }

    fn add(&mut self, op: &Add) -> Result {
        self.write([op.out], |cpu, [out]| {
            let x = (op.x != op.out).then(|| cpu.buffers.view(op.x));
            add(x, cpu.buffers.view(op.delta), out)
        })
    }

    fn norm_forward(&mut self, op: &NormForward) -> Result {
        self.write_with_scratch([op.y, op.stats], |cpu, scratch, [y, stats]| {
            let (x, gamma) = (cpu.buffers.view(op.x), cpu.buffers.row(op.gamma));
            let beta = op.beta.map(|t| cpu.buffers.row(t));
            let copy = scratch_view(scratch, x.dim())?;
            norm_forward(x, None, gamma, beta, op.epsilon, copy, y, stats)
        })
    }

    /// Fuses a residual addition with the norm after it, in f32; returns how many operations that
    /// were.
    pub(super) fn add_norm(&mut self, ops: &[Op<'_>]) -> Result<usize> {
        let [Op::Dense(DenseOp::Add(add)), Op::Dense(DenseOp::NormForward(norm)), ..] = ops else {
            return Ok(0);
        };
        // The norm reads the sum as it is stored: with bf16, rounded.
        if self.arithmetic == Arithmetic::Bf16 || add.out != norm.x || add.x == add.out {
            return Ok(0);
        }
        self.write([add.out, norm.y, norm.stats], |cpu, [sum, y, stats]| {
            let [x, delta] = [add.x, add.delta].map(|t| cpu.buffers.view(t));
            let beta = norm.beta.map(|t| cpu.buffers.row(t));
            let gamma = cpu.buffers.row(norm.gamma);
            norm_forward(x, Some(delta), gamma, beta, norm.epsilon, sum, y, stats)
        })?;
        Ok(2)
    }

    fn norm_backward(&mut self, op: &NormBackward) -> Result {
        let run = |cpu: &Self,
                   dx: ArrayViewMut2<'_, f32>,
                   dgamma: ArrayViewMut2<'_, f32>,
                   dbeta: Option<ArrayViewMut2<'_, f32>>| {
            let [dy, x, stats] = [op.dy, op.x, op.stats].map(|t| cpu.buffers.view(t));
            let (gamma, dgamma) = (cpu.buffers.row(op.gamma), row_mut(dgamma));
            let (dbeta, accumulate_dx) = (dbeta.map(row_mut), op.accumulate_dx);
            norm_backward(dy, x, stats, gamma, dx, accumulate_dx, dgamma, dbeta, op.accumulate)
        };
        match op.dbeta {
            None => self.write([op.dx, op.dgamma], |cpu, [dx, dgamma]| run(cpu, dx, dgamma, None)),
            Some(dbeta) => self.write([op.dx, op.dgamma, dbeta], |cpu, [dx, dgamma, dbeta]| {
                run(cpu, dx, dgamma, Some(dbeta))
            }),
        }
    }

    /// values = x, where `out`, whose values they are, is another tensor.
    fn assign(&self, x: Tensor, out: Tensor, values: &mut ArrayViewMut2<'_, f32>) {
        if x != out {
            values.assign(&self.buffers.view(x));
        }
    }

    fn attention_forward(&mut self, op: &AttentionForward) -> Result {
        let mut words = op.dropout.map(|dropout| self.buffers.take_words(dropout.kept));
        let done = self.write([op.o, op.lse], |cpu, [o, lse]| {
            let [q, k, v] = [op.q, op.k, op.v].map(|t| cpu.buffers.view(t));
            let lengths = op.lengths.map(|t| cpu.buffers.ids(t));
            let dropout = op.dropout.as_ref().zip(words.as_deref_mut());
            let dropout = dropout.map(|(AttentionDropout { drawn, kept }, words)| {
                let words = &mut words[kept.offset..][..kept.elements()];
                (drawn, cpu.state.stream(drawn.site), words)
            });
            attention::attention_forward(op.shape, q, k, v, lengths, o, lse, dropout)
        });
        if let Some((dropout, words)) = op.dropout.zip(words) {
            self.buffers.put_words(dropout.kept, words);
        }
        done
    }

    fn attention_backward(&mut self, op: &AttentionBackward) -> Result {
        let forward = &op.forward;
        let run = |cpu: &Self, [dq, dk, dv]: [ArrayViewMut2<'_, f32>; 3]| {
            let [q, k, v] = [forward.q, forward.k, forward.v].map(|t| cpu.buffers.view(t));
            let [o, lse, d_o] = [forward.o, forward.lse, op.d_o].map(|t| cpu.buffers.view(t));
            let lengths = forward.lengths.map(|t| cpu.buffers.ids(t));
            let dropout = forward.dropout.as_ref();
            let dropout = dropout.map(|of| (&of.drawn, cpu.buffers.ids(of.kept)));
            attention::attention_backward(
                forward.shape,
                q,
                k,
                v,
                lengths,
                o,
                lse,
                d_o,
                dq,
                dk,
                dv,
                dropout,
            )
        };
        let [dq, dk, dv] = op.dqkv;
        let joined = |left: Tensor, right: Tensor| {
            let shape = [left.shape[0], right.offset + right.shape[1] - left.offset];
            Tensor { shape, ..left }
        };
        // Column ranges of one buffer are written through one view of it.
        match (dq.buffer == dk.buffer, dk.buffer == dv.buffer) {
            (true, true) => self.write([joined(dq, dv)], |cpu, [all]| {
                let (dq, rest) = columns(all, dq.offset, dk.offset);
                let (dk, dv) = columns(rest, dk.offset, dv.offset);
                run(cpu, [dq, dk, dv])
            }),
            (false, true) => self.write([dq, joined(dk, dv)], |cpu, [dq, kv]| {
                let (dk, dv) = columns(kv, dk.offset, dv.offset);
                run(cpu, [dq, dk, dv])
            }),
            (_, false) => self.write(op.dqkv, |cpu, views| run(cpu, views)),
        }
    }

    fn embed_forward(&mut self, op: &Embed) -> Result {
        self.write([op.rows], |cpu, [rows]| {
            let (tokens, table) = (cpu.buffers.ids(op.tokens), cpu.buffers.view(op.token_table));
            let positions = op.position_table.map(|t| cpu.buffers.view(t));
            let (length, scale) = (op.sequence_length, op.scale);
            embedding::embed_forward(tokens, length, (scale, table), positions, rows)
        })
    }

    fn embed_backward(&mut self, op: &Embed) -> Result {
        let run = |cpu: &Self,
                   table: ArrayViewMut2<'_, f32>,
                   positions: Option<ArrayViewMut2<'_, f32>>| {
            let (rows, tokens) = (cpu.buffers.view(op.rows), cpu.buffers.ids(op.tokens));
            let length = op.sequence_length;
            embedding::embed_backward(rows, tokens, length, (op.scale, table), positions)
        };
        match op.position_table {
            None => self.write([op.token_table], |cpu, [table]| run(cpu, table, None)),
            Some(positions) => self
                .write([op.token_table, positions], |cpu, [table, positions]| {
                    run(cpu, table, Some(positions))
                }),
        }
    }

    fn head_loss(&mut self, op: &HeadLoss) -> Result {
        let (p, chunk) = (op.x.shape[0], op.logits.shape[0]);
        let mut sum = 0.0;
        for start in (0..p).step_by(chunk) {
            let rows = start..p.min(start + chunk);
            let (x, targets) = (op.x.rows(rows.clone()), op.targets.rows(rows.clone()));
            let logits = op.logits.first_rows(rows.len());
            let weight = Weight::Dense(op.embedding);
            self.linear_forward(&LinearForward { x, weight, bias: op.bias, z: logits })?;
            let scale = op.gradients.map_or(0.0, |_| self.state.loss_scale);
            self.write([logits], |cpu, [logits]| {
                let (targets, ignore) = (cpu.buffers.ids(targets), Some(HeadLoss::IGNORE));
                sum += match op.kind {
                    TargetLoss::CrossEntropy { smoothing, mixed } => {
                        let mixed = mixed.map(|mixed| mixed.rows(rows.clone()));
                        let mixed = mixed.map(|mixed| {
                            let shares = cpu.buffers.row(mixed.shares).to_slice();
                            let shares = shares.expect("a column of one is contiguous");
                            loss::Mixed { targets: cpu.buffers.ids(mixed.targets), shares }
                        });
                        head_loss(logits, targets, ignore, smoothing, mixed, scale)?
                    }
                    TargetLoss::SquaredError => squared_error(logits, targets, ignore, scale)?,
                    TargetLoss::Span { lengths } => {
                        span_loss(logits, targets, cpu.buffers.ids(lengths), ignore, scale)?
                    }
                };
                Ok(())
            })?;
            if let Some(gradients) = op.gradients {
                let accumulate = if start == 0 { gradients.accumulate } else { Accumulate::Add };
                let (dz, dw) = (Gradient::Dense(logits), gradients.dembedding);
                self.linear_wgrad(&LinearWgrad { dz, x, dw, accumulate })?;
                if let Some(db) = gradients.dbias {
                    self.dense(&DenseOp::BiasGrad(BiasGrad { dz: logits, db, accumulate }))?;
                }
                let dx = gradients.dx.rows(rows);
                self.linear_dgrad(&LinearDgrad { dz: logits, weight, dx })?;
            }
        }
        let sum = sum as f32;
        if op.gradients.is_some() && !sum.is_finite() {
            self.non_finite = Some(NonFinite::Loss);
        }
        self.update(&UpdateOp::Fill(Fill { to: op.loss, value: sum }))
    }
}

/// The columns from offset `first` to offset `second`, and those from `second` on.
fn columns(
    view: ArrayViewMut2<'_, f32>,
    first: usize,
    second: usize,
) -> (ArrayViewMut2<'_, f32>, ArrayViewMut2<'_, f32>) {
    view.split_at(ndarray::Axis(1), second - first)
}

//! The operations of layers.

use sparse24_core::op::Accumulate;
use sparse24_wgpu::{
    Matrix, activation, attention, dropout, elementwise, embedding, gemm,
    loss::{self, Pass},
    norm, rows, scale, sums,
};

use super::{WgpuBackend, buffers::grown};
use crate::{
    Gradient24, Result, Tensor, Weight24,
    op::{
        AttentionBackward, AttentionForward, BiasGrad, DenseOp, Embed, EmbedBackward, EmbedForward,
        Gradient, HeadLoss, LinearForward, NormBackward, TargetLoss, Weight, check,
    },
};

impl WgpuBackend {
    fn matrices<const N: usize>(&self, tensors: [Tensor; N]) -> [Matrix; N] {
        tensors.map(|t| self.buffers.matrix(t))
    }

    pub(super) fn dense(&mut self, op: &DenseOp) -> Result {
        match op {
            DenseOp::LinearForward(op) => self.linear_forward(op),
            DenseOp::LinearDgrad(op) => {
                let ([dz, dx], weight) = (self.matrices([op.dz, op.dx]), self.weight(op.weight));
                Ok(gemm::linear_dgrad(&mut self.gpu, dz, weight, dx)?)
            }
            DenseOp::LinearWgrad(op) => {
                let [x, dw] = self.matrices([op.x, op.dw]);
                let dz = match op.dz {
                    Gradient::Dense(t) => self.buffers.matrix(t),
                    Gradient::Sampled(Gradient24(at)) => {
                        let found = [x.shape[0], dw.shape[0]];
                        check::sampled(self.gradients24[at].shape, found)?;
                        self.gradients24[at].reshaped(found)
                    }
                };
                Ok(gemm::linear_wgrad(&mut self.gpu, dz, x, dw, op.accumulate)?)
            }
            DenseOp::BiasGrad(op) => self.bias_grad(op),
            DenseOp::ActivationForward(op) => {
                let [z, h] = self.matrices([op.z, op.h]);
                Ok(activation::activation_forward(&mut self.gpu, op.activation, z, h)?)
            }
            DenseOp::ActivationBackward(op) => {
                let [dh, z, dz] = self.matrices([op.dh, op.z, op.dz]);
                Ok(activation::activation_backward(&mut self.gpu, op.activation, dh, z, dz)?)
            }
            DenseOp::Add(op) => {
                let [x, delta, out] = self.matrices([op.x, op.delta, op.out]);
                Ok(elementwise::add(&mut self.gpu, x, delta, out)?)
            }
            DenseOp::NormForward(op) => {
                let [x, gamma, y, stats] = self.matrices([op.x, op.gamma, op.y, op.stats]);
                let (beta, epsilon) = (op.beta.map(|t| self.buffers.matrix(t)), op.epsilon);
                let op = norm::NormForward { x, gamma, beta, epsilon, y, stats };
                Ok(norm::norm_forward(&mut self.gpu, &op)?)
            }
            DenseOp::NormBackward(op) => self.norm_backward(op),
            DenseOp::AttentionForward(op) => {
                let op = self.attention(op);
                Ok(attention::attention_forward(&mut self.gpu, &op)?)
            }
            DenseOp::AttentionBackward(op) => self.attention_backward(op),
            DenseOp::EmbedForward(EmbedForward(op)) => {
                let op = self.embed(op);
                Ok(embedding::embed_forward(&mut self.gpu, &op)?)
            }
            DenseOp::EmbedBackward(EmbedBackward(op)) => {
                let op = self.embed(op);
                Ok(embedding::embed_backward(&mut self.gpu, &op)?)
            }
            DenseOp::HeadLoss(op) => self.head_loss(op),
            DenseOp::Logits(op) => self.linear_forward(&LinearForward {
                x: op.x,
                weight: Weight::Dense(op.embedding),
                bias: op.bias,
                z: op.out,
            }),
            DenseOp::Dropout(op) => {
                let out = self.moved(op.x, op.out)?;
                Ok(dropout::dropout(&mut self.gpu, out, &op.dropout)?)
            }
            DenseOp::DropSequences(op) => {
                let (out, length) = (self.moved(op.x, op.out)?, op.sequence_length);
                Ok(dropout::drop_sequences(&mut self.gpu, out, length, &op.dropout)?)
            }
            DenseOp::GatherRows(op) => {
                let [x, numbers, out] = self.matrices([op.x, op.rows, op.out]);
                Ok(rows::gather_rows(&mut self.gpu, x, numbers, out)?)
            }
            DenseOp::ScatterRows(op) => {
                let [dout, numbers, dx] = self.matrices([op.dout, op.rows, op.dx]);
                Ok(rows::scatter_rows(&mut self.gpu, dout, numbers, dx)?)
            }
            DenseOp::Scale(op) => {
                let [x, s, out] = self.matrices([op.x, op.scale, op.out]);
                Ok(scale::scale(&mut self.gpu, x, s, out)?)
            }
            DenseOp::ScaleGrad(op) => {
                let [x, dout, ds] = self.matrices([op.x, op.dout, op.ds]);
                let scratch = self.sums(scale::scale_grad_scratch(x.shape))?;
                Ok(scale::scale_grad(&mut self.gpu, x, dout, ds, op.accumulate, scratch)?)
            }
        }
    }

    /// out = x, unless it is x.
    fn moved(&mut self, x: Tensor, out: Tensor) -> Result<Matrix> {
        let [from, to] = self.matrices([x, out]);
        if x != out {
            elementwise::copy(&mut self.gpu, from, to)?;
        }
        Ok(to)
    }

    fn sums(&mut self, elements: usize) -> Result<Matrix> {
        grown(&mut self.gpu, &mut self.scratch.sums, elements)
    }

    fn weight(&self, weight: Weight) -> Matrix {
        match weight {
            Weight::Dense(t) => self.buffers.matrix(t),
            Weight::Pruned(Weight24(at)) => self.weights24[at],
        }
    }

    fn linear_forward(&mut self, op: &LinearForward) -> Result {
        let ([x, z], weight) = (self.matrices([op.x, op.z]), self.weight(op.weight));
        let bias = op.bias.map(|t| self.buffers.matrix(t));
        Ok(gemm::linear_forward(&mut self.gpu, x, weight, bias, z)?)
    }

    fn bias_grad(&mut self, op: &BiasGrad) -> Result {
        let [dz, db] = self.matrices([op.dz, op.db]);
        let scratch = self.sums(sums::bias_grad_scratch(dz.shape))?;
        Ok(sums::bias_grad(&mut self.gpu, dz, db, op.accumulate, scratch)?)
    }

    fn norm_backward(&mut self, op: &NormBackward) -> Result {
        let [dy, x, stats] = self.matrices([op.dy, op.x, op.stats]);
        let [gamma, dx, dgamma] = self.matrices([op.gamma, op.dx, op.dgamma]);
        let op = norm::NormBackward {
            dy,
            x,
            stats,
            gamma,
            dx,
            accumulate_dx: op.accumulate_dx,
            dgamma,
            dbeta: op.dbeta.map(|t| self.buffers.matrix(t)),
            accumulate: op.accumulate,
            scratch: self.sums(norm::norm_backward_scratch(dy.shape))?,
        };
        Ok(norm::norm_backward(&mut self.gpu, &op)?)
    }

    fn attention(&self, op: &AttentionForward) -> attention::AttentionForward {
        let [q, k, v, o, lse] = self.matrices([op.q, op.k, op.v, op.o, op.lse]);
        let lengths = op.lengths.map(|t| self.buffers.matrix(t));
        // The backward pass draws again which probabilities are kept.
        let (shape, dropout) = (op.shape, op.dropout.map(|dropout| dropout.drawn));
        attention::AttentionForward { shape, q, k, v, lengths, dropout, o, lse }
    }

    fn attention_backward(&mut self, op: &AttentionBackward) -> Result {
        let scratch = self.sums(attention::backward_scratch(op.forward.shape))?;
        let op = attention::AttentionBackward {
            forward: self.attention(&op.forward),
            d_o: self.buffers.matrix(op.d_o),
            dqkv: self.matrices(op.dqkv),
            scratch,
        };
        Ok(attention::attention_backward(&mut self.gpu, &op)?)
    }

    fn embed(&self, op: &Embed) -> embedding::Embed {
        let [token_table, rows] = self.matrices([op.token_table, op.rows]);
        embedding::Embed {
            tokens: self.buffers.ordered(op.tokens),
            length: op.sequence_length,
            scale: op.scale,
            token_table,
            position_table: op.position_table.map(|t| self.buffers.matrix(t)),
            rows,
        }
    }

    fn head_loss(&mut self, op: &HeadLoss) -> Result {
        let (p, chunk) = (op.x.shape[0], op.logits.shape[0]);
        let losses = grown(&mut self.gpu, &mut self.scratch.losses, p)?;
        let pass = op.gradients.map_or(Pass::Evaluation, |_| Pass::Training);
        let [table, loss] = self.matrices([op.embedding, op.loss]);
        for start in (0..p).step_by(chunk.max(1)) {
            let rows = start..p.min(start + chunk);
            let (logits, count) = (op.logits.first_rows(rows.len()), rows.len());
            self.linear_forward(&LinearForward {
                x: op.x.rows(rows.clone()),
                weight: Weight::Dense(op.embedding),
                bias: op.bias,
                z: logits,
            })?;
            let [x, dz, targets] =
                self.matrices([op.x.rows(rows.clone()), logits, op.targets.rows(rows.clone())]);
            let of_rows = Matrix { offset: start, shape: [count, 1], stride: 1, ..losses };
            let gpu = &mut self.gpu;
            match op.kind {
                TargetLoss::CrossEntropy { smoothing, mixed } => {
                    let mixed = mixed.map(|mixed| mixed.rows(rows.clone())).map(|mixed| {
                        let [targets, shares] =
                            [mixed.targets, mixed.shares].map(|t| self.buffers.matrix(t));
                        loss::Mixed { targets, shares }
                    });
                    loss::cross_entropy(gpu, dz, targets, smoothing, mixed, pass, of_rows)?;
                }
                TargetLoss::SquaredError => loss::squared_error(gpu, dz, targets, pass, of_rows)?,
                TargetLoss::Span { lengths } => {
                    let lengths = self.buffers.matrix(lengths);
                    let of_sequences = losses.reshaped([lengths.shape[0], 1]);
                    loss::span_loss(gpu, dz, targets, lengths, pass, of_sequences)?;
                }
            }
            let Some(gradients) = op.gradients else { continue };
            let accumulate = if start == 0 { gradients.accumulate } else { Accumulate::Add };
            let [dw, dx] = self.matrices([gradients.dembedding, gradients.dx.rows(rows)]);
            gemm::linear_wgrad(&mut self.gpu, dz, x, dw, accumulate)?;
            if let Some(db) = gradients.dbias {
                self.bias_grad(&BiasGrad { dz: logits, db, accumulate })?;
            }
            gemm::linear_dgrad(&mut self.gpu, dz, table, dx)?;
        }
        let count = match op.kind {
            TargetLoss::Span { lengths } => lengths.shape[0],
            _ => p,
        };
        let losses = losses.reshaped([count, 1]);
        Ok(loss::loss_sum(&mut self.gpu, losses, loss, pass, self.health)?)
    }
}

//! The operations of layers on a GPU.

use half::bf16;
use sparse24_core::op::{Accumulate, Activation};
use sparse24_cuda::{
    Matrix, activation, add, attention, bias, compressed::Compressed, dropout, embedding, gemm,
    loss, norm, rows, scale, spmm24,
};

use super::{Activations, CudaBackend, Dgrad, buffers::padded, grown};
use crate::{
    DType, Error, Gradient24, Result, Tensor, Weight24,
    op::{
        Add, AttentionBackward, AttentionDropout, AttentionForward, BiasGrad, DenseOp, Embed,
        EmbedBackward, EmbedForward, Gradient, HeadLoss, LinearDgrad, LinearForward, LinearWgrad,
        Logits, NormBackward, NormForward, TargetLoss, Weight,
    },
};

impl CudaBackend {
    pub(super) fn dense(&mut self, op: &DenseOp) -> Result {
        match op {
            DenseOp::LinearForward(op) => self.linear_forward(op, None),
            DenseOp::LinearDgrad(op) => self.linear_dgrad(op),
            DenseOp::LinearWgrad(op) => self.linear_wgrad(op),
            DenseOp::BiasGrad(op) => self.bias_grad(op),
            DenseOp::ActivationForward(op) => {
                let [z, h] = [op.z, op.h].map(|t| self.buffers.activations(t));
                Ok(activation::forward(&mut self.gpu, op.activation, z, h)?)
            }
            DenseOp::ActivationBackward(op) => {
                let [dh, z, dz] = [op.dh, op.z, op.dz].map(|t| self.buffers.activations(t));
                Ok(activation::backward(&mut self.gpu, op.activation, dh, z, dz)?)
            }
            DenseOp::Add(Add { x, delta, out }) if out.dtype == DType::F32 => {
                let [x, delta, out] = [x, delta, out].map(|&t| self.buffers.floats(t));
                Ok(add::add(&mut self.gpu, x, delta, out)?)
            }
            DenseOp::Add(op) => {
                let [x, delta, out] = [op.x, op.delta, op.out].map(|t| self.buffers.activations(t));
                Ok(add::add(&mut self.gpu, x, delta, out)?)
            }
            DenseOp::NormForward(op) => self.norm_forward(op, None),
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
            DenseOp::EmbedBackward(EmbedBackward(op)) => self.embed_backward(op),
            DenseOp::HeadLoss(op) => self.head_loss(op),
            DenseOp::Logits(Logits { x, embedding, bias, out }) => {
                let (x, z) = (self.buffers.activations(*x), self.buffers.wide_activations(*out));
                let weight = self.table(*embedding)?;
                let bias = bias.map(|bias| self.buffers.tall_copy_of(bias));
                let op = gemm::LinearForward { x, weight, bias, z };
                Ok(self.gemm.linear_forward(&mut self.gpu, &op)?)
            }
            DenseOp::Dropout(op) => {
                let [x, out] = [op.x, op.out].map(|t| self.buffers.activations(t));
                Ok(dropout::dropout(&mut self.gpu, x, out, &op.dropout)?)
            }
            DenseOp::DropSequences(op) => {
                let [x, out] = [op.x, op.out].map(|t| self.buffers.activations(t));
                let length = op.sequence_length;
                Ok(dropout::drop_sequences(&mut self.gpu, x, out, length, &op.dropout)?)
            }
            DenseOp::GatherRows(op) => {
                let [x, out] = [op.x, op.out].map(|t| self.buffers.wide_activations(t));
                Ok(rows::gather_rows(&mut self.gpu, x, self.buffers.ids(op.rows), out)?)
            }
            DenseOp::ScatterRows(op) => {
                let [dout, dx] = [op.dout, op.dx].map(|t| self.buffers.wide_activations(t));
                Ok(rows::scatter_rows(&mut self.gpu, dout, self.buffers.ids(op.rows), dx)?)
            }
            DenseOp::Scale(op) => {
                let [x, s, out] = [op.x, op.scale, op.out].map(|t| self.buffers.floats(t));
                Ok(scale::scale(&mut self.gpu, x, s, out)?)
            }
            DenseOp::ScaleGrad(op) => {
                let [x, dout, ds] = [op.x, op.dout, op.ds].map(|t| self.buffers.floats(t));
                Ok(scale::scale_grad(&mut self.gpu, x, dout, ds, op.accumulate)?)
            }
        }
    }

    /// d = b decode(a)^T + bias, and an activation of it.
    fn pruned_product(
        &mut self,
        a: Compressed,
        b: Activations,
        bias: Option<Matrix<f32>>,
        d: Activations,
        activated: Option<(Activation, Activations)>,
    ) -> Result {
        let ([m, k], n) = (a.shape(), b.shape()[0]);
        let product = (spmm24::Form::Transposed, [m, n, k], Accumulate::Overwrite);
        let (gpu, scratch) = (&mut self.gpu, &mut self.scratch);
        self.sparse_plans.run(gpu, scratch, product, |gpu, scratch, plan| {
            let op = spmm24::Transposed { a, b, bias, d, activated, scratch };
            spmm24::spmm24_transposed(gpu, &op, plan)
        })
    }

    /// Z, and an activation of it if the weight is pruned.
    pub(super) fn linear_forward(
        &mut self,
        op: &LinearForward,
        activated: Option<(Activation, Activations)>,
    ) -> Result {
        let [x, z] = [op.x, op.z].map(|t| self.buffers.activations(t));
        match op.weight {
            Weight::Dense(t) => {
                let weight = self.buffers.copy_of(t);
                let bias = op.bias.map(|bias| self.buffers.copy_of(bias));
                let op = gemm::LinearForward { x, weight, bias, z };
                Ok(self.gemm.linear_forward(&mut self.gpu, &op)?)
            }
            Weight::Pruned(Weight24(at)) => {
                let Some(a) = self.weights24[at].forward else {
                    let problem = "a permuted mask has no forward product".to_owned();
                    return Err(Error::Refused(problem));
                };
                self.pruned_product(
                    a,
                    x,
                    op.bias.map(|bias| self.buffers.floats(bias)),
                    z,
                    activated,
                )
            }
        }
    }

    fn linear_dgrad(&mut self, op: &LinearDgrad) -> Result {
        let [dz, dx] = [op.dz, op.dx].map(|t| self.buffers.activations(t));
        match op.weight {
            Weight::Dense(t) => {
                let op = gemm::LinearDgrad { dz, weight: self.buffers.copy_of(t), dx };
                Ok(self.gemm.linear_dgrad(&mut self.gpu, &op)?)
            }
            Weight::Pruned(Weight24(at)) => match self.weights24[at].dgrad {
                Dgrad::Sparse(a) => self.pruned_product(a, dz, None, dx, None),
                Dgrad::Dense(weight) => {
                    let op = gemm::LinearDgrad { dz, weight, dx };
                    Ok(self.gemm.linear_dgrad(&mut self.gpu, &op)?)
                }
            },
        }
    }

    fn linear_wgrad(&mut self, op: &LinearWgrad) -> Result {
        let (x, d) = (self.buffers.activations(op.x), self.buffers.floats(op.dw));
        let accumulate = op.accumulate;
        match op.dz {
            Gradient::Dense(dz) => {
                let dz = self.buffers.activations(dz);
                let op = gemm::LinearWgrad { dz, x, dw: d, accumulate };
                Ok(self.gemm.linear_wgrad(&mut self.gpu, &op)?)
            }
            Gradient::Sampled(Gradient24(at)) => {
                let a = self.sampled(at, [op.x.shape[0], op.dw.shape[0]])?;
                let ([m, k], n) = (a.shape(), x.shape()[1]);
                let product = (spmm24::Form::Straight, [m, n, k], accumulate);
                let (gpu, scratch) = (&mut self.gpu, &mut self.scratch);
                self.sparse_plans.run(gpu, scratch, product, |gpu, scratch, plan| {
                    let op = spmm24::Straight { a, b: x, d, accumulate, scratch };
                    spmm24::spmm24(gpu, &op, plan)
                })
            }
        }
    }

    fn bias_grad(&mut self, op: &BiasGrad) -> Result {
        let (dz, db) = (self.buffers.activations(op.dz), self.buffers.floats(op.db));
        let shape = bias::bias_grad_scratch(dz.shape());
        let scratch = grown(&mut self.gpu, &mut self.scratch.floats, shape)?;
        Ok(bias::bias_grad(&mut self.gpu, dz, db, op.accumulate, scratch)?)
    }

    /// The norm of x, or of a sum that is written to x.
    pub(super) fn norm_forward(&mut self, op: &NormForward, sum: Option<[Tensor; 2]>) -> Result {
        let residual = self.buffers.activations(op.x);
        let x = sum.map_or(residual, |[x, _]| self.buffers.activations(x));
        let op = norm::NormForward {
            x,
            delta: sum.map(|[_, delta]| self.buffers.activations(delta)),
            gamma: self.buffers.floats(op.gamma),
            beta: op.beta.map(|t| self.buffers.floats(t)),
            epsilon: op.epsilon,
            residual,
            y: self.buffers.activations(op.y),
            stats: self.buffers.floats(op.stats),
        };
        Ok(norm::norm_forward(&mut self.gpu, &op)?)
    }

    fn norm_backward(&mut self, op: &NormBackward) -> Result {
        let shape = norm::norm_backward_scratch(&self.gpu, op.dy.shape[1]);
        let scratch = grown(&mut self.gpu, &mut self.scratch.floats, shape)?;
        let op = norm::NormBackward {
            dy: self.buffers.activations(op.dy),
            residual: self.buffers.activations(op.x),
            stats: self.buffers.floats(op.stats),
            gamma: self.buffers.floats(op.gamma),
            dx: self.buffers.activations(op.dx),
            accumulate_dx: op.accumulate_dx,
            dgamma: self.buffers.floats(op.dgamma),
            dbeta: op.dbeta.map(|t| self.buffers.floats(t)),
            accumulate: op.accumulate,
            scratch,
        };
        Ok(norm::norm_backward(&mut self.gpu, &op)?)
    }

    fn attention(&self, op: &AttentionForward) -> attention::AttentionForward {
        let [q, k, v, o] = [op.q, op.k, op.v, op.o].map(|t| self.buffers.activations(t));
        let lengths = op.lengths.map(|t| self.buffers.ids(t));
        let (shape, lse) = (op.shape, self.buffers.floats(op.lse));
        let dropout = op.dropout.map(|AttentionDropout { drawn, kept }| {
            attention::AttentionDropout { drawn, kept: self.buffers.ids(kept) }
        });
        attention::AttentionForward { shape, q, k, v, lengths, dropout, o, lse }
    }

    fn attention_backward(&mut self, op: &AttentionBackward) -> Result {
        let shape = attention::backward_scratch(op.forward.shape);
        let scratch = grown(&mut self.gpu, &mut self.scratch.floats, shape)?;
        let [dq, dk, dv] = op.dqkv.map(|t| self.buffers.activations(t));
        let (forward, d_o) = (self.attention(&op.forward), self.buffers.activations(op.d_o));
        let op = attention::AttentionBackward { forward, d_o, dq, dk, dv, scratch };
        Ok(attention::attention_backward(&mut self.gpu, &op)?)
    }

    fn embed(&self, op: &Embed) -> embedding::Embed {
        embedding::Embed {
            tokens: self.buffers.ids(op.tokens),
            context: op.sequence_length,
            scale: op.scale,
            token_table: self.buffers.floats(op.token_table),
            position_table: op.position_table.map(|t| self.buffers.floats(t)),
            rows: self.buffers.activations(op.rows),
        }
    }

    fn embed_backward(&mut self, op: &Embed) -> Result {
        use embedding::EmbedScratch;
        let shape = op.rows.shape;
        let op = self.embed(op);
        let order = EmbedScratch::order_shape(shape);
        let order = grown(&mut self.gpu, &mut self.scratch.order, order)?;
        let pieces = EmbedScratch::pieces_shape(shape);
        let pieces = grown(&mut self.gpu, &mut self.scratch.floats, pieces)?;
        Ok(embedding::embed_backward(&mut self.gpu, &op, &EmbedScratch { order, pieces })?)
    }

    /// The copy of a head's table with its padding rows. A table of one row is held as a vector,
    /// without them.
    fn table(&mut self, t: Tensor) -> Result<Matrix<bf16>> {
        if t.shape[0] > 1 {
            return Ok(self.buffers.tall_copy_of(t));
        }
        let shape = [padded(1), t.shape[1]];
        let table = grown(&mut self.gpu, &mut self.scratch.table, shape)?;
        self.gpu.fill_bytes(table, 0)?;
        self.gpu.copy(self.buffers.copy_of(t), table.rows(0..1))?;
        Ok(table)
    }

    fn head_loss(&mut self, op: &HeadLoss) -> Result {
        let (p, chunk) = (op.x.shape[0], op.logits.shape[0]);
        let dbias = op.gradients.and_then(|gradients| gradients.dbias);
        // Losses outlive the sums of the bias's gradient.
        let sums = dbias.map_or([0, 0], |_| bias::bias_grad_scratch(op.logits.shape));
        let scratch = [p + sums[0] * sums[1], 1];
        let scratch = grown(&mut self.gpu, &mut self.scratch.floats, scratch)?;
        let losses = match op.kind {
            TargetLoss::Span { lengths } => scratch.rows(0..lengths.shape[0]),
            _ => scratch.rows(0..p),
        };
        let [outputs, d] = op.embedding.shape;
        let weight = self.table(op.embedding)?;
        let bias = op.bias.map(|bias| self.buffers.tall_copy_of(bias));
        for start in (0..p).step_by(chunk) {
            let rows = start..p.min(start + chunk);
            let x = self.buffers.activations(op.x.rows(rows.clone()));
            let logits = self.buffers.wide_activations(op.logits.first_rows(rows.len()));
            let product = gemm::LinearForward { x, weight, bias, z: logits };
            self.gemm.linear_forward(&mut self.gpu, &product)?;
            let targets = self.buffers.ids(op.targets.rows(rows.clone()));
            let vocabulary = op.embedding.shape[0];
            match op.kind {
                TargetLoss::CrossEntropy { smoothing, mixed } => {
                    let losses = losses.rows(rows.clone());
                    let mixed = mixed.map(|mixed| mixed.rows(rows.clone()));
                    let mixed = mixed.map(|mixed| {
                        (self.buffers.ids(mixed.targets), self.buffers.floats(mixed.shares))
                    });
                    let of =
                        loss::HeadLoss { logits, targets, vocabulary, smoothing, mixed, losses };
                    match op.gradients {
                        Some(_) => loss::head_loss(&mut self.gpu, &of)?,
                        None => loss::loss_forward(&mut self.gpu, &of)?,
                    }
                }
                TargetLoss::SquaredError => {
                    let losses = losses.rows(rows.clone());
                    loss::squared_error(&mut self.gpu, logits, targets, losses)?;
                }
                TargetLoss::Span { lengths } => {
                    let lengths = self.buffers.ids(lengths);
                    let of = loss::SpanLoss { logits, targets, lengths, losses };
                    loss::span_loss(&mut self.gpu, &of)?;
                }
            }
            let Some(gradients) = op.gradients else { continue };
            let accumulate = if start == 0 { gradients.accumulate } else { Accumulate::Add };
            let to = self.buffers.floats(gradients.dembedding);
            let dw = match outputs {
                1 => grown(&mut self.gpu, &mut self.scratch.gradient, [padded(1), d])?,
                _ => self.buffers.tall_floats(gradients.dembedding),
            };
            if outputs == 1 {
                self.gpu.fill_bytes(dw, 0)?;
                self.gpu.copy(to, dw.rows(0..1))?;
            }
            let wgrad = gemm::LinearWgrad { dz: logits, x, dw, accumulate };
            self.gemm.linear_wgrad(&mut self.gpu, &wgrad)?;
            if outputs == 1 {
                self.gpu.copy(dw.rows(0..1), to)?;
            }
            if let Some(db) = dbias {
                let dz = self.buffers.activations(op.logits.first_rows(rows.len()));
                let sums = bias::bias_grad_scratch(dz.shape());
                let scratch = scratch.rows(p..p + sums[0] * sums[1]).reshaped(sums);
                let db = self.buffers.floats(db);
                bias::bias_grad(&mut self.gpu, dz, db, accumulate, scratch)?;
            }
            let dx = self.buffers.activations(gradients.dx.rows(rows));
            let dgrad = gemm::LinearDgrad { dz: logits, weight, dx };
            self.gemm.linear_dgrad(&mut self.gpu, &dgrad)?;
        }
        let health = op.gradients.is_some().then_some(self.health);
        let loss = self.buffers.floats(op.loss);
        Ok(loss::loss_sum(&mut self.gpu, losses, loss, Accumulate::Overwrite, health)?)
    }
}

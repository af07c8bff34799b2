//! The CPU adaptor: `sparse24-cpu` behind the [`Backend`] contract.
//!
//! Sparse products are computed densely with pruned values: a [`Weight24`] is S(W) `[r, q]` and a
//! [`Gradient24`] the sampled dZ `[p, r]`, zeros included. Deliberately absent: arithmetic, which
//! is the kernels'.

use std::mem;

use half::bf16;
use ndarray::{Array2, ArrayView2, ArrayViewMut1, ArrayViewMut2, s};
use sparse24_core::{
    Mask, MaskKind,
    mvue::Estimator,
    philox::{Site, Stream},
    prune::ValueMap,
};
use sparse24_cpu::{
    adamw, attention,
    bias::{bias_forward, bias_grad},
    dropout::dropout,
    embedding,
    flip::flip_count,
    gemm::matmul,
    loss::head_loss,
    mvue::mvue_prune,
    norm::{norm_backward, norm_forward},
    permute::permuted_mask,
    prune::masked,
    rounding::round_bf16,
    search::mask_search,
    simd::Simd,
    threshold::soft_threshold,
};

use self::{
    convert::{act_backward, act_forward},
    storage::{Storage, scratch_view, view_mut},
};
use super::{
    Arithmetic, AttentionBackward, AttentionForward, Backend, Beta, CompressWeight, DType, Device,
    Dropout, Embed, Gradient, Gradient24, HeadLoss, LinearDgrad, LinearForward, LinearWgrad,
    MaskId, NonFinite, NormBackward, NormForward, OptimizerEntry, Region, SegmentId, StepReport,
    StepState, TableId, Tensor, Weight, Weight24,
};
use crate::{
    Error,
    optim::{AdamW, MaskedDecay},
};

mod convert;
mod storage;

/// The CPU backend; it runs on the rayon pool from which it is called.
pub struct CpuBackend {
    arithmetic: Arithmetic,
    storage: Storage,
    masks: Vec<Mask>,
    weights24: Vec<Array2<f32>>,
    gradients24: Vec<Array2<f32>>,
    tables: Vec<Vec<OptimizerEntry>>,
    scratch: [Vec<f32>; 3],
    state: StepState,
    grad_norm: f32,
    non_finite: Option<NonFinite>,
}

impl From<sparse24_cpu::Error> for Error {
    fn from(error: sparse24_cpu::Error) -> Self {
        match error {
            sparse24_cpu::Error::Semantics(error) => Self::Semantics(error),
            sparse24_cpu::Error::Shape { operation, operand, expected, found } => {
                Self::Operand { operation, operand, expected, found }
            }
            sparse24_cpu::Error::Token { token, position, vocabulary, .. } => {
                Self::UnknownToken { token, position, vocabulary: vocabulary as u32 }
            }
            other => {
                unreachable!("an error of the CPU kernels that the adaptor does not know: {other}")
            }
        }
    }
}

impl CpuBackend {
    /// A backend that holds nothing yet.
    #[must_use]
    pub fn new(arithmetic: Arithmetic) -> Self {
        Self {
            arithmetic,
            storage: Storage::default(),
            masks: Vec::new(),
            weights24: Vec::new(),
            gradients24: Vec::new(),
            tables: Vec::new(),
            scratch: Default::default(),
            state: StepState {
                seed: 0,
                step: 0,
                micro_step: 0,
                learning_rate: 0.0,
                bias_corrections: [1.0; 2],
                loss_scale: 1.0,
            },
            grad_norm: 0.0,
            non_finite: None,
        }
    }

    /// Runs an operation that writes these tensors, each of its own buffer; activations among them
    /// are stored rounded.
    fn write<const N: usize>(
        &mut self,
        outputs: [Tensor; N],
        run: impl FnOnce(&Self, [ArrayViewMut2<'_, f32>; N]) -> Result<(), sparse24_cpu::Error>,
    ) -> Result<(), Error> {
        let mut taken = outputs.map(|t| self.storage.take(t));
        let mut at = 0;
        let views = taken.each_mut().map(|data| {
            at += 1;
            view_mut(outputs[at - 1], data)
        });
        let done = run(self, views);
        for (t, mut data) in outputs.into_iter().zip(taken) {
            if t.dtype == DType::Activation {
                self.store(&mut view_mut(t, &mut data));
            }
            self.storage.put(t, data);
        }
        Ok(done?)
    }

    fn stream(&self, site: Site) -> Stream {
        Stream::new(self.state.seed, site, self.state.micro_step, self.state.step)
    }

    fn kernel_dropout(&self, dropout: Dropout) -> sparse24_cpu::dropout::Dropout {
        sparse24_cpu::dropout::Dropout { p: dropout.p, stream: self.stream(dropout.site) }
    }

    fn weight(&self, weight: Weight) -> ArrayView2<'_, f32> {
        match weight {
            Weight::Dense(t) => self.storage.view(t),
            Weight::Pruned(Weight24(at)) => self.weights24[at].view(),
        }
    }

    fn gradient(&self, gradient: Gradient) -> ArrayView2<'_, f32> {
        match gradient {
            Gradient::Dense(t) => self.storage.view(t),
            Gradient::Sampled(Gradient24(at)) => self.gradients24[at].view(),
        }
    }

    /// Rounds activations as they are stored.
    fn store(&self, activations: &mut ArrayViewMut2<'_, f32>) {
        match self.arithmetic {
            Arithmetic::Native | Arithmetic::F32 => {}
            Arithmetic::Bf16 => activations.mapv_inplace(|x| bf16::from_f32(x).to_f32()),
        }
    }

    /// The operand as products read it: itself, or its rounding in `scratch`.
    fn rounded<'a>(
        &self,
        operand: ArrayView2<'a, f32>,
        scratch: &'a mut Vec<f32>,
    ) -> Result<ArrayView2<'a, f32>, sparse24_cpu::Error> {
        match self.arithmetic {
            Arithmetic::Native | Arithmetic::F32 => Ok(operand),
            Arithmetic::Bf16 => {
                round_bf16(operand, scratch_view(scratch, operand.dim()))?;
                Ok(ArrayView2::from_shape(operand.dim(), &scratch[..operand.len()])
                    .expect("the scratch was grown"))
            }
        }
    }
}

/// A `[1, n]` output as a vector.
fn row_mut(view: ArrayViewMut2<'_, f32>) -> ArrayViewMut1<'_, f32> {
    let elements = view.len();
    view.into_shape_with_order(elements).expect("a parameter vector is contiguous")
}

impl Backend for CpuBackend {
    fn device(&self) -> Device {
        let arithmetic = match self.arithmetic {
            Arithmetic::Native | Arithmetic::F32 => "f32",
            Arithmetic::Bf16 => "bf16 activations and operands, f32 sums",
        };
        Device {
            backend: "cpu",
            description: format!(
                "{} threads, {}, {arithmetic}",
                sparse24_cpu::threads(),
                Simd::detect()
            ),
            sparse_products: "computed densely with pruned values",
        }
    }

    fn memory(&self) -> Vec<(Region, usize)> {
        let sparse = self.masks.iter().map(|mask| 2 * mask.tiles().len()).sum::<usize>()
            + self
                .weights24
                .iter()
                .chain(&self.gradients24)
                .map(|array| 4 * array.len())
                .sum::<usize>();
        let mut memory: Vec<_> =
            [Region::Parameters, Region::Gradients, Region::Moments, Region::Activations]
                .map(|region| (region, self.storage.bytes(region)))
                .into();
        memory.push((Region::Sparse, sparse));
        memory
    }

    fn alloc(
        &mut self,
        name: &str,
        shape: [usize; 2],
        dtype: DType,
        region: Region,
    ) -> Result<Tensor, Error> {
        Ok(self.storage.alloc(name, shape, dtype, region))
    }

    fn alloc_mask(&mut self, [rows, columns]: [usize; 2]) -> Result<MaskId, Error> {
        self.masks.push(Mask::empty(rows, columns)?);
        Ok(MaskId(self.masks.len() - 1))
    }

    fn alloc_weight24(&mut self, shape: [usize; 2]) -> Result<Weight24, Error> {
        self.weights24.push(Array2::zeros(shape));
        Ok(Weight24(self.weights24.len() - 1))
    }

    fn alloc_gradient24(&mut self, shape: [usize; 2]) -> Result<Gradient24, Error> {
        self.gradients24.push(Array2::zeros(shape));
        Ok(Gradient24(self.gradients24.len() - 1))
    }

    fn alloc_table(&mut self, table: &[OptimizerEntry]) -> Result<TableId, Error> {
        self.tables.push(table.to_vec());
        Ok(TableId(self.tables.len() - 1))
    }

    fn upload(&mut self, to: Tensor, from: &[f32]) -> Result<(), Error> {
        let source = ArrayView2::from_shape(to.shape, from).map_err(|_| Error::Operand {
            operation: "upload",
            operand: "host data",
            expected: to.shape,
            found: [1, from.len()],
        })?;
        self.write([to], |_, [mut view]| {
            view.assign(&source);
            Ok(())
        })
    }

    fn upload_tokens(&mut self, to: Tensor, from: &[u32]) -> Result<(), Error> {
        if from.len() != to.elements() {
            return Err(Error::Operand {
                operation: "upload",
                operand: "tokens",
                expected: to.shape,
                found: [from.len(), 1],
            });
        }
        self.storage.write_tokens(to).copy_from_slice(from);
        Ok(())
    }

    fn download(&mut self, from: Tensor) -> Result<Vec<f32>, Error> {
        let mut to = Vec::with_capacity(from.elements());
        self.download_into(from, &mut to)?;
        Ok(to)
    }

    fn download_into(&mut self, from: Tensor, to: &mut Vec<f32>) -> Result<(), Error> {
        to.clear();
        self.storage
            .view(from)
            .rows()
            .into_iter()
            .for_each(|row| to.extend_from_slice(row.as_slice().expect("rows are contiguous")));
        Ok(())
    }

    fn upload_mask(&mut self, MaskId(to): MaskId, from: &Mask) -> Result<(), Error> {
        let expected = self.masks[to].shape();
        if from.shape() != expected {
            return Err(Error::Operand {
                operation: "upload",
                operand: "mask",
                expected,
                found: from.shape(),
            });
        }
        self.masks[to].clone_from(from);
        Ok(())
    }

    fn download_mask(&mut self, MaskId(from): MaskId) -> Result<Mask, Error> {
        Ok(self.masks[from].clone())
    }

    fn copy(&mut self, from: Tensor, to: Tensor) -> Result<(), Error> {
        self.write([to], |cpu, [mut view]| {
            view.assign(&cpu.storage.view(from));
            Ok(())
        })
    }

    fn fill(&mut self, to: Tensor, value: f32) -> Result<(), Error> {
        self.write([to], |_, [mut view]| {
            view.fill(value);
            Ok(())
        })
    }

    fn set_step(&mut self, state: StepState) -> Result<(), Error> {
        self.state = state;
        Ok(())
    }

    fn segment(
        &mut self,
        _: SegmentId,
        work: &mut dyn FnMut(&mut dyn Backend) -> Result<(), Error>,
    ) -> Result<(), Error> {
        work(self)
    }

    fn mask_search(
        &mut self,
        w: Tensor,
        kind: MaskKind,
        MaskId(mask): MaskId,
    ) -> Result<(), Error> {
        let mut out =
            mem::replace(&mut self.masks[mask], Mask::empty(0, 0).expect("nothing is tiled"));
        let done = mask_search(self.storage.view(w), kind, &mut out);
        self.masks[mask] = out;
        Ok(done?)
    }

    fn flip_count(&mut self, MaskId(a): MaskId, MaskId(b): MaskId) -> Result<u64, Error> {
        Ok(flip_count(&self.masks[a], &self.masks[b])?)
    }

    fn permuted_mask(
        &mut self,
        w: Tensor,
        MaskId(mask): MaskId,
        order: &[u32],
        MaskId(out): MaskId,
    ) -> Result<(), Error> {
        let mut both =
            mem::replace(&mut self.masks[out], Mask::empty(0, 0).expect("nothing is tiled"));
        let done = permuted_mask(self.storage.view(w), &self.masks[mask], order, &mut both);
        self.masks[out] = both;
        Ok(done?)
    }

    fn compress_weight(&mut self, op: &CompressWeight) -> Result<(), Error> {
        let (MaskId(mask), Weight24(out)) = (op.mask, op.out);
        let mut pruned = mem::take(&mut self.weights24[out]);
        let (w, mask) = (self.storage.view(op.w), &self.masks[mask]);
        let done = match op.map {
            ValueMap::Identity => masked(w, mask, pruned.view_mut()),
            ValueMap::SoftThreshold { scale } => soft_threshold(w, mask, scale, pruned.view_mut()),
        };
        self.weights24[out] = pruned;
        Ok(done?)
    }

    fn mvue_compress(
        &mut self,
        dz: Tensor,
        site: Site,
        estimator: Estimator,
        Gradient24(out): Gradient24,
    ) -> Result<(), Error> {
        let mut sampled = mem::take(&mut self.gradients24[out]);
        let mut scratch = mem::take(&mut self.scratch);
        // The estimator reads dZ as it is stored, and its values are stored likewise.
        let [read, stored, _] = &mut scratch;
        let done = self.rounded(self.storage.view(dz), read).and_then(|dz| {
            mvue_prune(dz, estimator, self.stream(site), sampled.view_mut())?;
            match self.arithmetic {
                Arithmetic::Native | Arithmetic::F32 => Ok(()),
                Arithmetic::Bf16 => {
                    let mut stored = scratch_view(stored, sampled.dim());
                    round_bf16(sampled.view(), stored.view_mut())?;
                    sampled.assign(&stored);
                    Ok(())
                }
            }
        });
        (self.gradients24[out], self.scratch) = (sampled, scratch);
        Ok(done?)
    }

    fn linear_forward(&mut self, op: &LinearForward) -> Result<(), Error> {
        let mut scratch = mem::take(&mut self.scratch);
        let [left, right, _] = &mut scratch;
        let done = self.write([op.z], |cpu, [mut z]| {
            let (x, w) = (
                cpu.rounded(cpu.storage.view(op.x), left)?,
                cpu.rounded(cpu.weight(op.weight), right)?,
            );
            matmul(x, w.t(), z.view_mut(), sparse24_cpu::gemm::Beta::Overwrite)?;
            match op.bias {
                Some(bias) => bias_forward(z, cpu.storage.row(bias)),
                None => Ok(()),
            }
        });
        self.scratch = scratch;
        done?;
        match op.then {
            None => Ok(()),
            Some((activation, h)) => {
                self.write([h], |cpu, [h]| act_forward(activation, cpu.storage.view(op.z), h))
            }
        }
    }

    fn linear_dgrad(&mut self, op: &LinearDgrad) -> Result<(), Error> {
        let mut scratch = mem::take(&mut self.scratch);
        let [left, right, through] = &mut scratch;
        let done = self.write([op.dx], |cpu, [dx]| {
            let (dz, w) = (
                cpu.rounded(cpu.storage.view(op.dz), left)?,
                cpu.rounded(cpu.weight(op.weight), right)?,
            );
            match op.then {
                None => matmul(dz, w, dx, sparse24_cpu::gemm::Beta::Overwrite),
                Some((activation, z)) => {
                    let mut dh = scratch_view(through, (dz.nrows(), w.ncols()));
                    matmul(dz, w, dh.view_mut(), sparse24_cpu::gemm::Beta::Overwrite)?;
                    cpu.store(&mut dh);
                    act_backward(activation, dh.view(), cpu.storage.view(z), dx)
                }
            }
        });
        self.scratch = scratch;
        done
    }

    fn linear_wgrad(&mut self, op: &LinearWgrad) -> Result<(), Error> {
        let mut scratch = mem::take(&mut self.scratch);
        let [left, right, _] = &mut scratch;
        let done = self.write([op.dw], |cpu, [dw]| {
            let (dz, x) = (
                cpu.rounded(cpu.gradient(op.dz), left)?,
                cpu.rounded(cpu.storage.view(op.x), right)?,
            );
            matmul(dz.t(), x, dw, op.beta.into())
        });
        self.scratch = scratch;
        done
    }

    fn bias_grad(&mut self, dz: Tensor, db: Tensor, beta: Beta) -> Result<(), Error> {
        self.write([db], |cpu, [db]| bias_grad(cpu.storage.view(dz), row_mut(db), beta.into()))
    }

    fn norm_forward(&mut self, op: &NormForward) -> Result<(), Error> {
        self.write([op.residual, op.y, op.stats], |cpu, [mut residual, mut y, mut stats]| {
            let (x, delta, gamma) = (
                cpu.storage.view(op.x),
                op.delta.map(|t| cpu.storage.view(t)),
                cpu.storage.row(op.gamma),
            );
            let beta = op.beta.map(|t| cpu.storage.row(t));
            norm_forward(
                x,
                delta,
                gamma,
                beta,
                residual.view_mut(),
                y.view_mut(),
                stats.view_mut(),
            )?;
            if cpu.arithmetic == Arithmetic::Bf16 {
                // The norm is that of the residual as it is stored.
                cpu.store(&mut residual);
                let stored = residual.to_owned();
                norm_forward(stored.view(), None, gamma, beta, residual, y, stats)?;
            }
            Ok(())
        })
    }

    fn norm_backward(&mut self, op: &NormBackward) -> Result<(), Error> {
        let run = |cpu: &Self,
                   dresidual: ArrayViewMut2<'_, f32>,
                   dgamma: ArrayViewMut2<'_, f32>,
                   dbeta: Option<ArrayViewMut2<'_, f32>>| {
            let (dgamma, dbeta) = (row_mut(dgamma), dbeta.map(row_mut));
            let (dy, residual, stats) = (
                cpu.storage.view(op.dy),
                cpu.storage.view(op.residual),
                cpu.storage.view(op.stats),
            );
            norm_backward(
                dy,
                residual,
                stats,
                cpu.storage.row(op.gamma),
                dresidual,
                dgamma,
                dbeta,
                op.accumulate.into(),
            )
        };
        match op.dbeta {
            None => self.write([op.dresidual, op.dgamma], |cpu, [dresidual, dgamma]| {
                run(cpu, dresidual, dgamma, None)
            }),
            Some(dbeta) => self
                .write([op.dresidual, op.dgamma, dbeta], |cpu, [dresidual, dgamma, dbeta]| {
                    run(cpu, dresidual, dgamma, Some(dbeta))
                }),
        }
    }

    fn attention_forward(&mut self, op: &AttentionForward) -> Result<(), Error> {
        self.write([op.o, op.lse], |cpu, [o, lse]| {
            let dropout = op.dropout.map(|dropout| cpu.kernel_dropout(dropout));
            attention::attention_forward(
                op.shape.into(),
                cpu.storage.view(op.q),
                cpu.storage.view(op.k),
                cpu.storage.view(op.v),
                o,
                lse,
                dropout.as_ref(),
            )
        })
    }

    fn attention_backward(&mut self, op: &AttentionBackward) -> Result<(), Error> {
        let [dq, dk, dv] = op.dqkv;
        let d = dq.shape[1];
        let whole = Tensor { shape: [dq.shape[0], 3 * d], ..dq };
        let thirds = [0, 1, 2].map(|third| whole.columns(third * d..(third + 1) * d));
        assert_eq!(thirds, [dq, dk, dv], "dq, dk, dv are the thirds of one buffer");
        self.write([whole], |cpu, [mut dqkv]| {
            let forward = &op.forward;
            let (dq, dk, dv) =
                dqkv.multi_slice_mut((s![.., ..d], s![.., d..2 * d], s![.., 2 * d..]));
            let dropout = forward.dropout.map(|dropout| cpu.kernel_dropout(dropout));
            attention::attention_backward(
                forward.shape.into(),
                cpu.storage.view(forward.q),
                cpu.storage.view(forward.k),
                cpu.storage.view(forward.v),
                cpu.storage.view(forward.o),
                cpu.storage.view(forward.lse),
                cpu.storage.view(op.d_o),
                dq,
                dk,
                dv,
                dropout.as_ref(),
            )
        })
    }

    fn embed_forward(&mut self, op: &Embed) -> Result<(), Error> {
        self.write([op.rows], |cpu, [out]| {
            embedding::embed_forward(
                cpu.storage.tokens(op.tokens),
                op.context,
                cpu.storage.view(op.token_table),
                Some(cpu.storage.view(op.position_table)),
                out,
            )
        })
    }

    fn embed_backward(&mut self, op: &Embed) -> Result<(), Error> {
        self.write([op.token_table, op.position_table], |cpu, [tokens, positions]| {
            let beta = sparse24_cpu::gemm::Beta::Accumulate;
            embedding::embed_backward(
                cpu.storage.view(op.rows),
                cpu.storage.tokens(op.tokens),
                op.context,
                tokens,
                Some(positions),
                beta,
            )
        })
    }

    fn head_loss(&mut self, op: &HeadLoss) -> Result<(), Error> {
        let (p, chunk) = (op.x.shape[0], op.logits.shape[0]);
        let mut sum = 0.0;
        for start in (0..p).step_by(chunk) {
            let rows = start..p.min(start + chunk);
            let (x, targets, logits) = (
                op.x.rows(rows.clone()),
                op.targets.rows(rows.clone()),
                op.logits.first_rows(rows.len()),
            );
            self.logits(x, op.embedding, logits)?;
            let scale = op.gradients.map_or(0.0, |gradients| gradients.scale);
            self.write([logits], |cpu, [logits]| {
                let loss = head_loss(
                    logits,
                    cpu.storage.tokens(targets),
                    Some(HeadLoss::IGNORE),
                    op.smoothing,
                    scale,
                )?;
                sum += loss.sum;
                Ok(())
            })?;
            if let Some(gradients) = op.gradients {
                let beta = if start == 0 { gradients.beta } else { Beta::Accumulate };
                self.linear_wgrad(&LinearWgrad {
                    dz: Gradient::Dense(logits),
                    x,
                    dw: gradients.dembedding,
                    beta,
                })?;
                let (weight, dx) = (Weight::Dense(op.embedding), gradients.dx.rows(rows));
                self.linear_dgrad(&LinearDgrad { dz: logits, weight, then: None, dx })?;
            }
        }
        let sum = sum as f32;
        if op.gradients.is_some() && !sum.is_finite() {
            self.non_finite = Some(NonFinite::Loss);
        }
        self.fill(op.loss, sum)
    }

    fn logits(&mut self, x: Tensor, embedding: Tensor, out: Tensor) -> Result<(), Error> {
        self.linear_forward(&LinearForward {
            x,
            weight: Weight::Dense(embedding),
            bias: None,
            z: out,
            then: None,
        })
    }

    fn dropout(&mut self, x: Tensor, dropped: Dropout) -> Result<(), Error> {
        self.write([x], |cpu, [x]| dropout(x, &cpu.kernel_dropout(dropped)))
    }

    fn grad_norm(&mut self, TableId(table): TableId) -> Result<(), Error> {
        let norms: Vec<f64> = self.tables[table]
            .iter()
            .map(|entry| {
                adamw::squared_norm(
                    &self.storage.floats(entry.gradient)[..entry.gradient.elements()],
                )
            })
            .collect();
        self.grad_norm = norms.iter().sum::<f64>().sqrt() as f32;
        let gradient = norms.iter().position(|norm| !norm.is_finite()).map(NonFinite::Gradient);
        let norm = (!self.grad_norm.is_finite()).then_some(NonFinite::Norm);
        self.non_finite = self.non_finite.or(gradient).or(norm);
        Ok(())
    }

    fn optimizer_step(
        &mut self,
        TableId(table): TableId,
        rule: &AdamW,
        decay: MaskedDecay,
    ) -> Result<(), Error> {
        if self.non_finite.is_some() {
            return Ok(());
        }
        let [bias_correction1, bias_correction2] = self.state.bias_corrections;
        for &entry in &self.tables[table] {
            let step = adamw::AdamW {
                learning_rate: self.state.learning_rate,
                beta1: rule.beta1,
                beta2: rule.beta2,
                epsilon: rule.epsilon,
                weight_decay: entry.weight_decay,
                bias_correction1,
                bias_correction2,
                gradient_scale: rule.gradient_scale(self.grad_norm),
            };
            let [mut w, mut m, mut v] = [entry.weight, entry.first_moment, entry.second_moment]
                .map(|t| self.storage.take(t));
            let mask = entry.mask.map(|MaskId(at)| &self.masks[at]);
            let decay = match (decay, mask) {
                (MaskedDecay::OnGradients(lambda), Some(mask)) => {
                    adamw::Decay::OnGradients { lambda, mask }
                }
                (MaskedDecay::OnWeights(lambda), Some(mask)) => {
                    adamw::Decay::OnWeights { lambda, mask }
                }
                _ => adamw::Decay::None,
            };
            let done = adamw::adamw_step(
                &mut w,
                self.storage.floats(entry.gradient),
                &mut m,
                &mut v,
                entry.weight.shape[1],
                &step,
                decay,
            );
            for (t, data) in [(entry.weight, w), (entry.first_moment, m), (entry.second_moment, v)]
            {
                self.storage.put(t, data);
            }
            done?;
        }
        Ok(())
    }

    fn l1_distance(&mut self, a: Tensor, b: Tensor) -> Result<f64, Error> {
        let [a, b] = [a, b].map(|t| &self.storage.floats(t)[..t.elements()]);
        Ok(adamw::l1_distance(a, b)?)
    }

    fn report(&mut self, losses: Tensor) -> Result<StepReport, Error> {
        let loss = self.storage.view(losses).iter().copied().map(f64::from).sum();
        Ok(StepReport { loss, grad_norm: self.grad_norm, non_finite: self.non_finite.take() })
    }
}

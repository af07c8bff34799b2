//! The CUDA adaptor: `sparse24-cuda` behind the [`Backend`] contract.
//!
//! Activations and their gradients are bf16, weights, their gradients and moments f32; products
//! read a bf16 copy of each weight that the optimizer keeps. A [`Weight24`] is S(W) compressed both
//! ways, a [`Gradient24`] the sampled dZ^T, multiplied on the sparse tensor cores. Operations are
//! queued; only downloads, counts and reports wait, and what overwrites parameters for copies of
//! them. Deliberately absent: arithmetic, which is the kernels'.

use std::collections::HashMap;

use half::bf16;
use sparse24_core::{Mask, MaskKind, mvue::Estimator, op, philox::Site};
use sparse24_cuda::{
    Device as Gpu, Matrix, Scalar, Settings, activation, adamw, attention, bias,
    compressed::Compressed, dropout, embedding, flip, gemm, health::Health, loss, mvue, norm,
    profile::Profile, prune, search, spmm24,
};

use self::{
    plans::SparsePlans,
    segment::{Segment, Writes},
    storage::Storage,
};
use super::{
    Arithmetic, AttentionBackward, AttentionForward, Backend, BackendSettings, Beta,
    CompressWeight, Copied, DType, Device, Dropout, Embed, Gradient, Gradient24, HeadLoss,
    Launches, LinearDgrad, LinearForward, LinearWgrad, MaskId, NonFinite, NormBackward,
    NormForward, OptimizerEntry, Orientation, Plans, Region, SegmentId, StepReport, StepState,
    TableId, Tensor, Weight, Weight24,
};
use crate::{
    Error,
    optim::{AdamW, MaskedDecay},
    trainer::Recipe,
};

mod convert;
mod error;
mod limits;
mod plans;
mod segment;
mod storage;

/// The backend of one GPU.
pub struct CudaBackend {
    gemm: gemm::Gemm,
    storage: Storage,
    masks: Vec<(Matrix<u16>, [usize; 2])>,
    weights24: Vec<[Compressed; 2]>,
    gradients24: Vec<Compressed>,
    /// The norm of all gradients and the flag.
    health: Matrix<u32>,
    flips: Matrix<u64>,
    launches: Launches,
    tables: Vec<adamw::Parameters>,
    segments: HashMap<SegmentId, Segment>,
    /// Of the segment under way.
    writes: Writes,
    sparse_plans: SparsePlans,
    scratch: Scratch,
    /// Last, so that it outlives what is of it.
    gpu: Gpu,
}

/// What operations work in; it grows in the first step only.
#[derive(Default)]
struct Scratch {
    floats: Option<Matrix<f32>>,
    activations: Option<Matrix<bf16>>,
    order: Option<Matrix<u32>>,
    report: Option<Matrix<u8>>,
}

/// A contiguous matrix of scratch, which only ever grows; what it holds is left over.
fn grown<T: Scalar>(
    gpu: &mut Gpu,
    scratch: &mut Option<Matrix<T>>,
    shape: [usize; 2],
) -> Result<Matrix<T>, Error> {
    let elements = shape[0] * shape[1];
    let whole = match *scratch {
        Some(whole) if whole.elements() >= elements => whole,
        _ => {
            gpu.set_purpose(Region::Activations.name());
            *scratch.insert(gpu.alloc("scratch of operations", [1, elements])?)
        }
    };
    Ok(whole.columns(0..elements).reshaped(shape))
}

impl CudaBackend {
    /// Refuses what the kernels do not serve, without a GPU.
    ///
    /// # Errors
    /// [`Error::Setting`] names the first key that is wrong.
    pub fn check(recipe: &Recipe) -> Result<(), Error> {
        limits::check(recipe)
    }

    /// Opens a GPU and allocates little.
    ///
    /// # Errors
    /// [`Error::Device`] without driver, GPU or libraries; [`Error::Setting`] for an arithmetic
    /// that it does not have.
    pub fn open(settings: BackendSettings) -> Result<Self, Error> {
        if settings.arithmetic == Arithmetic::F32 {
            let problem = "the GPU multiplies in bf16: use `native`".to_owned();
            return Err(Error::Setting { key: "backend.arithmetic".to_owned(), problem });
        }
        let mut gpu = Gpu::open(&Settings {
            ordinal: settings.gpu,
            libraries: settings.libraries,
            ..Settings::default()
        })?;
        gpu.set_purpose(Region::Activations.name());
        let workspace = gpu.alloc("workspace of dense products", [1, gemm::WORKSPACE])?;
        let gemm = gemm::Gemm::new(&gpu, workspace)?;
        let health = gpu.alloc("health", [1, Health::WORDS])?;
        let flips = gpu.alloc("flips", [1, 1])?;
        Ok(Self {
            gemm,
            storage: Storage::default(),
            masks: Vec::new(),
            weights24: Vec::new(),
            gradients24: Vec::new(),
            health,
            flips,
            launches: settings.launches,
            tables: Vec::new(),
            segments: HashMap::new(),
            writes: Writes::Other,
            sparse_plans: SparsePlans::default(),
            scratch: Scratch::default(),
            gpu,
        })
    }

    /// What notes the time of everything that this backend queues, once it is started.
    #[must_use]
    pub fn profile(&self) -> Profile {
        self.gpu.profile()
    }

    /// Columns of W.
    fn width_in(&self, weight: Weight) -> usize {
        match weight {
            Weight::Dense(t) => t.shape[1],
            Weight::Pruned(Weight24(at)) => self.weights24[at][0].shape()[1],
        }
    }

    /// d = b decode(a)^T + bias.
    fn pruned_product(
        &mut self,
        a: Compressed,
        b: Matrix<bf16>,
        bias: Option<Matrix<f32>>,
        d: Matrix<bf16>,
    ) -> Result<(), Error> {
        let ([m, k], n) = (a.shape(), b.shape()[0]);
        let product = (spmm24::Form::Transposed, [m, n, k], op::Accumulate::Overwrite);
        self.sparse_plans.run(&mut self.gpu, &mut self.scratch, product, |gpu, scratch, plan| {
            spmm24::spmm24_transposed(gpu, &spmm24::Transposed { a, b, bias, d, scratch }, plan)
        })
    }

    fn attention(&self, op: &AttentionForward) -> attention::AttentionForward {
        attention::AttentionForward {
            shape: op.shape.into(),
            q: self.storage.activations(op.q),
            k: self.storage.activations(op.k),
            v: self.storage.activations(op.v),
            lengths: None,
            dropout: op.dropout.map(Into::into),
            o: self.storage.activations(op.o),
            lse: self.storage.floats(op.lse),
        }
    }

    fn embed(&self, op: &Embed) -> embedding::Embed {
        embedding::Embed {
            tokens: self.storage.tokens(op.tokens),
            context: op.context,
            token_table: self.storage.floats(op.token_table),
            position_table: Some(self.storage.floats(op.position_table)),
            rows: self.storage.activations(op.rows),
        }
    }
}

impl Backend for CudaBackend {
    fn device(&self) -> Device {
        Device {
            backend: "cuda",
            description: format!(
                "{}, driver {}, bf16 activations, f32 weights",
                plans::planned_on(&self.gpu, &self.gemm),
                self.gpu.driver()
            ),
            sparse_products: "computed on the sparse tensor cores",
        }
    }

    fn memory(&self) -> Vec<(Region, usize)> {
        let held = self.gpu.held();
        let of = |region: Region| {
            held.iter()
                .filter(|(purpose, _)| *purpose == region.name())
                .map(|(_, bytes)| bytes)
                .sum()
        };
        Region::ALL.map(|region| (region, of(region))).into()
    }

    fn plans(&self) -> Plans {
        plans::recorded(&self.gpu, &self.gemm, &self.sparse_plans)
    }

    fn plans_made(&self) -> usize {
        1 + self.gemm.planned() + self.sparse_plans.len()
    }

    fn use_plans(&mut self, recorded: &Plans) -> Result<(), Error> {
        plans::replay(&self.gpu, &mut self.gemm, &mut self.sparse_plans, recorded)
    }

    fn check(&self, recipe: &Recipe) -> Result<(), Error> {
        limits::check(recipe)
    }

    fn alloc(
        &mut self,
        name: &str,
        shape: [usize; 2],
        dtype: DType,
        region: Region,
    ) -> Result<Tensor, Error> {
        self.storage.alloc(&mut self.gpu, name, shape, dtype, region)
    }

    fn alloc_mask(&mut self, [rows, columns]: [usize; 2]) -> Result<MaskId, Error> {
        let empty = Mask::empty(rows, columns)?;
        self.gpu.set_purpose(Region::Sparse.name());
        self.masks.push((self.gpu.alloc("mask", [rows / 4, columns / 4])?, empty.shape()));
        Ok(MaskId(self.masks.len() - 1))
    }

    fn alloc_weight24(&mut self, [r, q]: [usize; 2]) -> Result<Weight24, Error> {
        self.gpu.set_purpose(Region::Sparse.name());
        let both =
            [[r, q], [q, r]].map(|shape| Compressed::alloc(&mut self.gpu, "pruned weight", shape));
        let [forward, dgrad] = both;
        self.weights24.push([forward?, dgrad?]);
        Ok(Weight24(self.weights24.len() - 1))
    }

    fn alloc_gradient24(&mut self, [p, r]: [usize; 2]) -> Result<Gradient24, Error> {
        self.gpu.set_purpose(Region::Sparse.name());
        self.gradients24.push(Compressed::alloc(
            &mut self.gpu,
            "sampled gradient",
            [r, p.next_multiple_of(4)],
        )?);
        Ok(Gradient24(self.gradients24.len() - 1))
    }

    fn alloc_table(&mut self, table: &[OptimizerEntry]) -> Result<TableId, Error> {
        let parameters: Vec<_> = table
            .iter()
            .map(|entry| adamw::Parameter {
                w: self.storage.floats(entry.weight),
                g: self.storage.floats(entry.gradient),
                m: self.storage.floats(entry.first_moment),
                v: self.storage.floats(entry.second_moment),
                tiles: entry.mask.map(|MaskId(at)| self.masks[at].0),
                shadow: Some(self.storage.copy_of(entry.weight)),
                weight_decay: entry.weight_decay,
            })
            .collect();
        self.gpu.set_purpose(Region::Activations.name());
        self.tables.push(adamw::Parameters::new(&mut self.gpu, &parameters)?);
        Ok(TableId(self.tables.len() - 1))
    }

    fn upload(&mut self, to: Tensor, from: &[f32]) -> Result<(), Error> {
        self.gpu.wait_for_copies()?;
        self.storage.upload(&mut self.gpu, to, from)
    }

    fn upload_tokens(&mut self, to: Tensor, from: &[u32]) -> Result<(), Error> {
        Ok(self.gpu.upload(self.storage.tokens(to), from)?)
    }

    fn download(&mut self, from: Tensor) -> Result<Vec<f32>, Error> {
        self.storage.download(&mut self.gpu, from)
    }

    fn copy_out(&mut self, from: &[Tensor], mut to: Vec<Vec<f32>>) -> Result<Copied, Error> {
        let matrices: Vec<_> = from.iter().map(|&tensor| self.storage.floats(tensor)).collect();
        if let Some(copy) = self.gpu.copy_to_host(&matrices)? {
            return Ok(Box::new(|| Ok(copy.read(to)?)));
        }
        to = matrices
            .into_iter()
            .map(|matrix| self.gpu.download(matrix))
            .collect::<Result<_, _>>()?;
        Ok(Box::new(|| Ok(to)))
    }

    fn upload_mask(&mut self, MaskId(to): MaskId, from: &Mask) -> Result<(), Error> {
        let (tiles, expected) = self.masks[to];
        if from.shape() != expected {
            return Err(Error::Operand {
                operation: "upload",
                operand: "mask",
                expected,
                found: from.shape(),
            });
        }
        Ok(self.gpu.upload(tiles, from.tiles())?)
    }

    fn download_mask(&mut self, MaskId(from): MaskId) -> Result<Mask, Error> {
        let (tiles, [rows, columns]) = self.masks[from];
        Ok(Mask::from_tiles(rows, columns, self.gpu.download(tiles)?)?)
    }

    fn copy(&mut self, from: Tensor, to: Tensor) -> Result<(), Error> {
        self.storage.copy(&mut self.gpu, from, to)
    }

    fn fill(&mut self, to: Tensor, value: f32) -> Result<(), Error> {
        if value.to_bits() == 0 {
            return self.storage.clear(&mut self.gpu, to);
        }
        self.upload(to, &vec![value; to.elements()])
    }

    fn set_step(&mut self, state: StepState) -> Result<(), Error> {
        let StepState { seed, step, micro_step, learning_rate, bias_corrections, loss_scale } =
            state;
        Ok(self.gpu.set_step(&op::StepState {
            seed,
            step,
            micro_step,
            learning_rate,
            bias_corrections,
            loss_scale,
        })?)
    }

    fn segment(
        &mut self,
        segment: SegmentId,
        work: &mut dyn FnMut(&mut dyn Backend) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.run_segment(segment, work)
    }

    fn mask_search(
        &mut self,
        w: Tensor,
        kind: MaskKind,
        MaskId(mask): MaskId,
    ) -> Result<(), Error> {
        Ok(search::mask_search(&mut self.gpu, self.storage.floats(w), kind, self.masks[mask].0)?)
    }

    fn flip_count(&mut self, MaskId(a): MaskId, MaskId(b): MaskId) -> Result<u64, Error> {
        self.gpu.fill_bytes(self.flips, 0)?;
        flip::flip_count(&mut self.gpu, self.masks[a].0, self.masks[b].0, self.flips)?;
        Ok(self.gpu.download(self.flips)?[0])
    }

    fn permuted_mask(&mut self, _: Tensor, _: MaskId, _: &[u32], _: MaskId) -> Result<(), Error> {
        unreachable!("permuted masks are refused")
    }

    fn compress_weight(&mut self, op: &CompressWeight) -> Result<(), Error> {
        let (MaskId(mask), Weight24(out)) = (op.mask, op.out);
        let pruned =
            prune::Pruned { w: self.storage.floats(op.w), tiles: self.masks[mask].0, map: op.map };
        let [forward, dgrad] = self.weights24[out];
        match op.orientation {
            Orientation::Both => prune::compress_weight(&mut self.gpu, &pruned, forward, dgrad)?,
            Orientation::Forward => prune::compress_forward(&mut self.gpu, &pruned, forward)?,
            Orientation::Permuted => unreachable!("permuted masks are refused"),
        }
        Ok(())
    }

    fn mvue_compress(
        &mut self,
        dz: Tensor,
        site: Site,
        estimator: Estimator,
        Gradient24(out): Gradient24,
    ) -> Result<(), Error> {
        Ok(mvue::mvue_compress(
            &mut self.gpu,
            self.storage.activations(dz),
            estimator,
            site,
            self.gradients24[out],
        )?)
    }

    fn linear_forward(&mut self, op: &LinearForward) -> Result<(), Error> {
        let (x, z) = (self.storage.activations(op.x), self.storage.activations(op.z));
        match op.weight {
            Weight::Dense(t) => {
                let (weight, bias) =
                    (self.storage.copy_of(t), op.bias.map(|bias| self.storage.copy_of(bias)));
                self.gemm
                    .linear_forward(&mut self.gpu, &gemm::LinearForward { x, weight, bias, z })?;
            }
            Weight::Pruned(Weight24(at)) => {
                let [a, _] = self.weights24[at];
                self.pruned_product(a, x, op.bias.map(|bias| self.storage.floats(bias)), z)?;
            }
        }
        match op.then {
            None => Ok(()),
            Some((activation, h)) => {
                let h = self.storage.activations(h);
                Ok(activation::forward(&mut self.gpu, activation.into(), z, h)?)
            }
        }
    }

    fn linear_dgrad(&mut self, op: &LinearDgrad) -> Result<(), Error> {
        let dz = self.storage.activations(op.dz);
        let (p, q) = (dz.shape()[0], self.width_in(op.weight));
        let product = match op.then {
            None => self.storage.activations(op.dx),
            Some(_) => grown(&mut self.gpu, &mut self.scratch.activations, [p, q])?,
        };
        match op.weight {
            Weight::Dense(t) => {
                let op = gemm::LinearDgrad { dz, weight: self.storage.copy_of(t), dx: product };
                self.gemm.linear_dgrad(&mut self.gpu, &op)?;
            }
            Weight::Pruned(Weight24(at)) => {
                let [_, a] = self.weights24[at];
                self.pruned_product(a, dz, None, product)?;
            }
        }
        match op.then {
            None => Ok(()),
            Some((activation, z)) => Ok(activation::backward(
                &mut self.gpu,
                activation.into(),
                product,
                self.storage.activations(z),
                self.storage.activations(op.dx),
            )?),
        }
    }

    fn linear_wgrad(&mut self, op: &LinearWgrad) -> Result<(), Error> {
        let (x, dw, beta) = (
            self.storage.activations(op.x),
            self.storage.floats(op.dw),
            op::Accumulate::from(op.beta),
        );
        match op.dz {
            Gradient::Dense(dz) => {
                let op =
                    gemm::LinearWgrad { dz: self.storage.activations(dz), x, dw, accumulate: beta };
                Ok(self.gemm.linear_wgrad(&mut self.gpu, &op)?)
            }
            Gradient::Sampled(Gradient24(at)) => {
                let a = self.gradients24[at];
                let ([m, k], n) = (a.shape(), x.shape()[1]);
                self.sparse_plans.run(
                    &mut self.gpu,
                    &mut self.scratch,
                    (spmm24::Form::Straight, [m, n, k], beta),
                    |gpu, scratch, plan| {
                        spmm24::spmm24(
                            gpu,
                            &spmm24::Straight { a, b: x, d: dw, accumulate: beta, scratch },
                            plan,
                        )
                    },
                )
            }
        }
    }

    fn bias_grad(&mut self, dz: Tensor, db: Tensor, beta: Beta) -> Result<(), Error> {
        let (dz, db) = (self.storage.activations(dz), self.storage.floats(db));
        let scratch =
            grown(&mut self.gpu, &mut self.scratch.floats, bias::bias_grad_scratch(dz.shape()))?;
        Ok(bias::bias_grad(&mut self.gpu, dz, db, beta.into(), scratch)?)
    }

    fn norm_forward(&mut self, op: &NormForward) -> Result<(), Error> {
        let op = norm::NormForward {
            x: self.storage.activations(op.x),
            delta: op.delta.map(|t| self.storage.activations(t)),
            gamma: self.storage.floats(op.gamma),
            beta: op.beta.map(|t| self.storage.floats(t)),
            residual: self.storage.activations(op.residual),
            y: self.storage.activations(op.y),
            stats: self.storage.floats(op.stats),
        };
        Ok(norm::norm_forward(&mut self.gpu, &op)?)
    }

    fn norm_backward(&mut self, op: &NormBackward) -> Result<(), Error> {
        let shape = norm::norm_backward_scratch(&self.gpu, op.dy.shape[1]);
        let scratch = grown(&mut self.gpu, &mut self.scratch.floats, shape)?;
        let op = norm::NormBackward {
            dy: self.storage.activations(op.dy),
            residual: self.storage.activations(op.residual),
            stats: self.storage.floats(op.stats),
            gamma: self.storage.floats(op.gamma),
            dx: self.storage.activations(op.dresidual),
            accumulate_dx: op::Accumulate::Add,
            dgamma: self.storage.floats(op.dgamma),
            dbeta: op.dbeta.map(|t| self.storage.floats(t)),
            accumulate: op.accumulate.into(),
            scratch,
        };
        Ok(norm::norm_backward(&mut self.gpu, &op)?)
    }

    fn attention_forward(&mut self, op: &AttentionForward) -> Result<(), Error> {
        let op = self.attention(op);
        Ok(attention::attention_forward(&mut self.gpu, &op)?)
    }

    fn attention_backward(&mut self, op: &AttentionBackward) -> Result<(), Error> {
        let scratch = grown(
            &mut self.gpu,
            &mut self.scratch.floats,
            attention::backward_scratch(op.forward.shape.into()),
        )?;
        let [dq, dk, dv] = op.dqkv.map(|t| self.storage.activations(t));
        let op = attention::AttentionBackward {
            forward: self.attention(&op.forward),
            d_o: self.storage.activations(op.d_o),
            dq,
            dk,
            dv,
            scratch,
        };
        Ok(attention::attention_backward(&mut self.gpu, &op)?)
    }

    fn embed_forward(&mut self, op: &Embed) -> Result<(), Error> {
        let op = self.embed(op);
        Ok(embedding::embed_forward(&mut self.gpu, &op)?)
    }

    fn embed_backward(&mut self, op: &Embed) -> Result<(), Error> {
        let shape = op.rows.shape;
        let op = self.embed(op);
        let order = grown(
            &mut self.gpu,
            &mut self.scratch.order,
            embedding::EmbedScratch::order_shape(shape),
        )?;
        let pieces = grown(
            &mut self.gpu,
            &mut self.scratch.floats,
            embedding::EmbedScratch::pieces_shape(shape),
        )?;
        Ok(embedding::embed_backward(
            &mut self.gpu,
            &op,
            &embedding::EmbedScratch { order, pieces },
        )?)
    }

    fn head_loss(&mut self, op: &HeadLoss) -> Result<(), Error> {
        let (p, chunk) = (op.x.shape[0], op.logits.shape[0]);
        let losses = grown(&mut self.gpu, &mut self.scratch.floats, [p, 1])?;
        let weight = self.storage.tall_copy_of(op.embedding);
        for start in (0..p).step_by(chunk) {
            let rows = start..p.min(start + chunk);
            let x = self.storage.activations(op.x.rows(rows.clone()));
            let logits = self.storage.wide_activations(op.logits.first_rows(rows.len()));
            self.gemm.linear_forward(
                &mut self.gpu,
                &gemm::LinearForward { x, weight, bias: None, z: logits },
            )?;
            let loss = loss::HeadLoss {
                logits,
                targets: self.storage.tokens(op.targets.rows(rows.clone())),
                vocabulary: op.embedding.shape[0],
                smoothing: op.smoothing,
                losses: losses.rows(rows.clone()),
            };
            let Some(gradients) = op.gradients else {
                loss::loss_forward(&mut self.gpu, &loss)?;
                continue;
            };
            // The kernel reads the scale from the step state.
            loss::head_loss(&mut self.gpu, &loss)?;
            let beta = if start == 0 { gradients.beta } else { Beta::Accumulate };
            let dw = self.storage.tall_floats(gradients.dembedding);
            self.gemm.linear_wgrad(
                &mut self.gpu,
                &gemm::LinearWgrad { dz: logits, x, dw, accumulate: beta.into() },
            )?;
            let dx = self.storage.activations(gradients.dx.rows(rows));
            self.gemm.linear_dgrad(&mut self.gpu, &gemm::LinearDgrad { dz: logits, weight, dx })?;
        }
        let health = op.gradients.is_some().then_some(self.health);
        Ok(loss::loss_sum(
            &mut self.gpu,
            losses,
            self.storage.floats(op.loss),
            op::Accumulate::Overwrite,
            health,
        )?)
    }

    fn logits(&mut self, x: Tensor, embedding: Tensor, out: Tensor) -> Result<(), Error> {
        let (x, weight, z) = (
            self.storage.activations(x),
            self.storage.tall_copy_of(embedding),
            self.storage.wide_activations(out),
        );
        Ok(self
            .gemm
            .linear_forward(&mut self.gpu, &gemm::LinearForward { x, weight, bias: None, z })?)
    }

    fn dropout(&mut self, x: Tensor, rule: Dropout) -> Result<(), Error> {
        Ok(dropout::dropout(&mut self.gpu, self.storage.activations(x), &rule.into())?)
    }

    fn grad_norm(&mut self, TableId(table): TableId) -> Result<(), Error> {
        Ok(adamw::grad_norm(&mut self.gpu, &self.tables[table], self.health)?)
    }

    fn optimizer_step(
        &mut self,
        TableId(table): TableId,
        rule: &AdamW,
        decay: MaskedDecay,
    ) -> Result<(), Error> {
        self.gpu.wait_for_copies()?;
        self.writes = Writes::Parameters;
        let decay = match decay {
            MaskedDecay::None => op::MaskedDecay::None,
            MaskedDecay::OnGradients(lambda) => op::MaskedDecay::OnGradients(lambda),
            MaskedDecay::OnWeights(lambda) => op::MaskedDecay::OnWeights(lambda),
        };
        let AdamW { beta1, beta2, epsilon, clip } = *rule;
        Ok(adamw::adamw_step(
            &mut self.gpu,
            &self.tables[table],
            &op::AdamW { beta1, beta2, epsilon, clip },
            decay,
            self.health,
        )?)
    }

    fn l1_distance(&mut self, _: Tensor, _: Tensor) -> Result<f64, Error> {
        unreachable!("phases that watch a variance are refused")
    }

    fn report(&mut self, losses: Tensor) -> Result<StepReport, Error> {
        // Side by side, so that the host waits once.
        let (losses, health) = (self.storage.floats(losses).as_bytes(), self.health.as_bytes());
        let ([rows, columns], [_, words]) = (losses.shape(), health.shape());
        let report = grown(&mut self.gpu, &mut self.scratch.report, [1, rows * columns + words])?;
        let (of_losses, of_health) = (
            report.columns(0..rows * columns),
            report.columns(rows * columns..rows * columns + words),
        );
        self.gpu.copy(losses, of_losses.rectangle(0, [rows, columns], columns))?;
        self.gpu.copy(health, of_health)?;
        let bytes = self.gpu.download(report)?;
        let mut words = bytes
            .chunks_exact(4)
            .map(|word| u32::from_le_bytes(word.try_into().expect("four bytes")));
        let loss = words
            .by_ref()
            .take(rows * columns / 4)
            .map(|word| f64::from(f32::from_bits(word)))
            .sum();
        let health =
            Health::of_words(std::array::from_fn(|_| words.next().expect("two words follow")));
        self.gpu.fill_bytes(self.health, 0)?;
        let non_finite = health.non_finite.map(|culprit| match culprit {
            op::NonFinite::Loss => NonFinite::Loss,
            op::NonFinite::Gradient(place) => NonFinite::Gradient(place),
            op::NonFinite::Norm => NonFinite::Norm,
        });
        Ok(StepReport { loss, grad_norm: health.grad_norm, non_finite })
    }
}

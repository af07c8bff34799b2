//! A backend that does what another does and writes down what was searched and what was sampled.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use ndarray::Array2;
use sparse24_core::{Mask, MaskKind, mvue::Estimator, philox::Site};
use sparse24_train::Error;
use sparse24_train::{
    backend::{
        AttentionBackward, AttentionForward, Backend, Beta, CompressWeight, Copied, DType, Device,
        Dropout, Embed, Gradient, Gradient24, HeadLoss, LinearDgrad, LinearForward, LinearWgrad,
        MaskId, NormBackward, NormForward, OptimizerEntry, Region, SegmentId, StepReport,
        StepState, TableId, Tensor, Weight24,
    },
    optim::{AdamW, MaskedDecay},
};

/// What was done, in order.
#[derive(Debug, Default)]
pub(crate) struct Log {
    /// The step under way or done last, and the mask; 0 before the first step.
    pub(crate) searches: Vec<(u32, MaskId)>,
    /// The same of weights pruned.
    pub(crate) prunings: Vec<(u32, Weight24)>,
    /// Sampled output gradients.
    pub(crate) samples: Vec<Sampled>,
}

/// MVUE(dZ^T) of one weight in one micro-step.
#[derive(Debug, Clone)]
pub(crate) struct Sampled {
    pub(crate) micro_step: u32,
    pub(crate) site: u32,
    /// `[r, p]`.
    pub(crate) values: Array2<f32>,
}

/// See the module.
pub(crate) struct Spy<B> {
    inner: B,
    log: Arc<Mutex<Log>>,
    state: StepState,
    /// An identity `[p, p]` and room for `[r, p]`, by the shape of dZ.
    probes: HashMap<[usize; 2], [Tensor; 2]>,
}

impl<B: Backend> Spy<B> {
    /// The backend and its log.
    pub(crate) fn new(inner: B) -> (Box<Self>, Arc<Mutex<Log>>) {
        let log = Arc::new(Mutex::new(Log::default()));
        let state = StepState {
            seed: 0,
            step: 0,
            micro_step: 0,
            learning_rate: 0.0,
            bias_corrections: [1.0; 2],
            loss_scale: 1.0,
        };
        (Box::new(Self { inner, log: Arc::clone(&log), state, probes: HashMap::new() }), log)
    }

    fn write(&self, entry: impl FnOnce(&mut Log)) {
        entry(&mut self.log.lock().expect("no test fails while it holds the log"));
    }

    /// The sampled gradient through the contract: dW = MVUE(dZ^T) X with X the identity, every sum
    /// of one term.
    fn read(&mut self, shape: [usize; 2], sampled: Gradient24) -> Result<Array2<f32>, Error> {
        let [p, r] = shape;
        if !self.probes.contains_key(&shape) {
            let mut alloc =
                |shape| self.inner.alloc("probe", shape, DType::F32, Region::Activations);
            let probe = [alloc([p, p])?, alloc([r, p])?];
            self.inner.upload(probe[0], Array2::<f32>::eye(p).as_slice().expect("row-major"))?;
            self.probes.insert(shape, probe);
        }
        let [x, dw] = self.probes[&shape];
        self.inner.fill(dw, f32::NAN)?;
        self.inner.linear_wgrad(&LinearWgrad {
            dz: Gradient::Sampled(sampled),
            x,
            dw,
            beta: Beta::Overwrite,
        })?;
        Ok(Array2::from_shape_vec((r, p), self.inner.download(dw)?)
            .expect("the shape of the probe"))
    }
}

macro_rules! as_before {
    ($($name:ident($($argument:ident: $type:ty),*) -> $out:ty;)*) => {
        $(fn $name(&mut self, $($argument: $type),*) -> Result<$out, Error> {
            self.inner.$name($($argument),*)
        })*
    };
}

impl<B: Backend> Backend for Spy<B> {
    fn device(&self) -> Device {
        self.inner.device()
    }

    fn memory(&self) -> Vec<(Region, usize)> {
        self.inner.memory()
    }

    fn set_step(&mut self, state: StepState) -> Result<(), Error> {
        self.state = state;
        self.inner.set_step(state)
    }

    fn segment(
        &mut self,
        _: SegmentId,
        work: &mut dyn FnMut(&mut dyn Backend) -> Result<(), Error>,
    ) -> Result<(), Error> {
        work(self)
    }

    fn mask_search(&mut self, w: Tensor, kind: MaskKind, mask: MaskId) -> Result<(), Error> {
        self.write(|log| log.searches.push((self.state.step, mask)));
        self.inner.mask_search(w, kind, mask)
    }

    fn compress_weight(&mut self, op: &CompressWeight) -> Result<(), Error> {
        self.write(|log| log.prunings.push((self.state.step, op.out)));
        self.inner.compress_weight(op)
    }

    fn mvue_compress(
        &mut self,
        dz: Tensor,
        site: Site,
        estimator: Estimator,
        out: Gradient24,
    ) -> Result<(), Error> {
        self.inner.mvue_compress(dz, site, estimator, out)?;
        let values = self.read(dz.shape, out)?;
        self.write(|log| {
            log.samples.push(Sampled {
                micro_step: self.state.micro_step,
                site: site.word(),
                values,
            })
        });
        Ok(())
    }

    as_before! {
        alloc(name: &str, shape: [usize; 2], dtype: DType, region: Region) -> Tensor;
        alloc_mask(shape: [usize; 2]) -> MaskId;
        alloc_weight24(shape: [usize; 2]) -> Weight24;
        alloc_gradient24(shape: [usize; 2]) -> Gradient24;
        alloc_table(table: &[OptimizerEntry]) -> TableId;
        upload(to: Tensor, from: &[f32]) -> ();
        upload_tokens(to: Tensor, from: &[u32]) -> ();
        download(from: Tensor) -> Vec<f32>;
        copy_out(from: &[Tensor], to: Vec<Vec<f32>>) -> Copied;
        upload_mask(to: MaskId, from: &Mask) -> ();
        download_mask(from: MaskId) -> Mask;
        copy(from: Tensor, to: Tensor) -> ();
        fill(to: Tensor, value: f32) -> ();
        permuted_mask(w: Tensor, mask: MaskId, order: &[u32], out: MaskId) -> ();
        l1_distance(a: Tensor, b: Tensor) -> f64;
        flip_count(a: MaskId, b: MaskId) -> u64;
        linear_forward(op: &LinearForward) -> ();
        linear_dgrad(op: &LinearDgrad) -> ();
        linear_wgrad(op: &LinearWgrad) -> ();
        bias_grad(dz: Tensor, db: Tensor, beta: Beta) -> ();
        norm_forward(op: &NormForward) -> ();
        norm_backward(op: &NormBackward) -> ();
        attention_forward(op: &AttentionForward) -> ();
        attention_backward(op: &AttentionBackward) -> ();
        embed_forward(op: &Embed) -> ();
        embed_backward(op: &Embed) -> ();
        head_loss(op: &HeadLoss) -> ();
        logits(x: Tensor, embedding: Tensor, out: Tensor) -> ();
        dropout(x: Tensor, dropout: Dropout) -> ();
        grad_norm(table: TableId) -> ();
        optimizer_step(table: TableId, rule: &AdamW, decay: MaskedDecay) -> ();
        report(losses: Tensor) -> StepReport;
    }
}

//! A feed-forward layer and a transformer block of GPT-2: forward pass, backward pass and, for FST,
//! the pruning of both weights, which training does once in an optimizer step.
//!
//! Output and gradient of the input are verified for a short sequence, against the CPU backend.

use sparse24_conformance::oracle::arithmetic::Random;
use sparse24_core::{
    MaskKind,
    op::{Accumulate, Activation, Adam, AttentionMask, StepState, UpdateRule},
    prune::ValueMap,
};
use sparse24_cuda::bench::{self, Outcome, Size, TOKENS};
use sparse24_train::{
    Error,
    backend::{
        Arithmetic, Backend, BackendSettings, Memory, Op, Tensor,
        cpu::CpuBackend,
        cuda::CudaBackend,
        op::{Add, CompressWeight, Fill, MaskSearch, Orientation},
    },
    method::Method,
    nn::{
        BatchShape, Bias, BlockInputs, Builder, Ffn, FfnActivations, FfnSpec, Init, Parameters,
        Pass, PreNormBlock, PreNormGradients, PreNormSpec, Sparsity, Watch,
    },
};

use super::operations::{Gpu, distant, head_dimension, of_driver};

/// The sequence lengths of the blocks.
const LENGTHS: [usize; 3] = [2048, 1024, 512];
/// Tokens that are verified.
const VERIFIED: BatchShape = BatchShape { size: 1, sequence_length: 64 };
/// A chain of products rounds to bf16 more often than an operation.
const WITHIN: f64 = 1.0 / 16.0;

/// A layer or a block, and how it is trained.
pub(super) struct Layer {
    pub(super) kernel: &'static str,
    pub(super) shape: String,
    d: usize,
    batch: BatchShape,
    is_block: bool,
    method: &'static str,
}

/// The layer of a width and its blocks, dense and with FST.
pub(super) fn layers(size: &Size) -> Vec<Layer> {
    let Some(d) = size.width() else { return Vec::new() };
    let ffn = [("ffn_dense", "dense"), ("ffn_fst", "fst")].map(|(kernel, method)| {
        let batch = BatchShape { size: 1, sequence_length: TOKENS };
        Layer { kernel, shape: format!("{TOKENS}x{d}"), d, batch, is_block: false, method }
    });
    let blocks = LENGTHS.into_iter().flat_map(|sequence_length| {
        let batch = BatchShape { size: TOKENS / sequence_length, sequence_length };
        [("block_dense", "dense"), ("block_fst", "fst")].map(|(kernel, method)| {
            let shape = format!("{}x{sequence_length}x{d}", batch.size);
            Layer { kernel, shape, d, batch, is_block: true, method }
        })
    });
    ffn.into_iter().chain(blocks).collect()
}

enum Part {
    Ffn { ffn: Box<Ffn>, kept: FfnActivations, scratch: FfnActivations },
    Block { block: Box<PreNormBlock>, gradients: PreNormGradients },
}

/// A layer on a backend.
struct Made {
    method: Method,
    part: Part,
    parameters: Parameters,
    x: Tensor,
    y: Tensor,
    /// The gradient of y.
    dy: Tensor,
    /// Zeros like y.
    zeros: Tensor,
    /// The gradient of x, and for a block first that of y.
    dx: Tensor,
}

impl Made {
    fn new(backend: &mut dyn Backend, layer: &Layer, most: BatchShape) -> Result<Self, Error> {
        let &Layer { d, is_block, .. } = layer;
        let method = Method::preset(layer.method, 0.0).expect("a method");
        backend.set_step(StepState {
            seed: 1,
            step: 1,
            loss_scale: 1.0,
            ..StepState::default()
        })?;
        let rule = UpdateRule::AdamW(Adam { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 });
        let mut builder = Builder::new(backend, &method, &rule, most, 0.0);
        let (d_ff, activation, bias) = (4 * d, Activation::Gelu, Bias::Present);
        let init = [Init::Normal(0.02); 2];
        let x = builder.activation("x", d)?;
        let y = builder.activation("y", d)?;
        let dy = builder.activation("dy", d)?;
        let zeros = builder.activation("zeros", d)?;
        let (part, dx) = if is_block {
            let spec = PreNormSpec {
                prefix: "h",
                names: ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"],
                d_model: d,
                heads: d / head_dimension(d),
                d_ff,
                activation,
                mask: AttentionMask::Causal,
                biases: [bias; 2],
                epsilon: 1e-5,
                init,
                sparsity: Sparsity::Dense,
            };
            let block = Box::new(PreNormBlock::new(&mut builder, &spec, 0, x, None)?);
            let gradients = PreNormGradients::new(&mut builder, &spec)?;
            (Part::Block { block, gradients }, gradients.residual)
        } else {
            let names = ["mlp.c_fc", "mlp.c_proj"].map(str::to_owned);
            let spec = FfnSpec { names, d_model: d, d_ff, activation, bias, init };
            let ffn = Box::new(Ffn::new(&mut builder, spec)?);
            let kept = FfnActivations::new(&mut builder, "ffn", d_ff, activation)?;
            let scratch = FfnActivations::new(&mut builder, "gradients", d_ff, activation)?;
            (Part::Ffn { ffn, kept, scratch }, builder.activation("dx", d)?)
        };
        let parameters = builder.into_parameters();
        parameters.initialize(backend, 1)?;
        for (seed, to) in [(1, x), (2, dy)] {
            let mut random = Random(seed);
            let values: Vec<f32> = (0..to.elements()).map(|_| random.symmetric()).collect();
            backend.upload(to, &values)?;
        }
        backend.execute(&Fill { to: zeros, value: 0.0 }.into())?;
        for (_, parameter, pruned) in parameters.pruned() {
            let (w, kind, mask) = (parameter.weight, MaskKind::Transposable, pruned.mask);
            backend.execute(&MaskSearch { w, kind, mask }.into())?;
        }
        Ok(Self { method, part, parameters, x, y, dy, zeros, dx })
    }

    /// Prunes, and runs a forward and a backward pass.
    fn run<'a>(
        &'a self,
        backend: &'a mut dyn Backend,
        batch: BatchShape,
        watch: Option<&'a mut Watch<'a>>,
    ) -> Result<(), Error> {
        let phase = &self.method.phases[0];
        let (dropout, accumulate, written, stages) = (0.0, Accumulate::Overwrite, 0, &[]);
        let mut pass = Pass { backend, phase, batch, dropout, accumulate, watch, written, stages };
        for (_, parameter, pruned) in self.parameters.pruned() {
            pass.run(CompressWeight {
                w: parameter.weight,
                mask: pruned.mask,
                orientation: Orientation::Both,
                map: ValueMap::Identity,
                out: pruned.weight,
            })?;
        }
        let [x, y, dy, zeros, dx] =
            [self.x, self.y, self.dy, self.zeros, self.dx].map(|buffer| pass.rows(buffer));
        match &self.part {
            Part::Ffn { ffn, kept, scratch } => {
                let [kept, scratch] = [kept, scratch].map(|of| of.rows(&pass));
                ffn.forward_up(&mut pass, x, kept)?;
                ffn.forward_down(&mut pass, kept, y)?;
                ffn.backward(&mut pass, x, kept, dy, scratch, dx)
            }
            Part::Block { block, gradients } => {
                let stream = block.forward(&mut pass, None, y, BlockInputs::default())?;
                // The sum is one that the norm of the next block computes.
                pass.run(Add { x: y, delta: stream, out: y })?;
                // The backward pass turns the gradient of y into that of x in place.
                pass.run(Add { x: dy, delta: zeros, out: dx })?;
                block.backward(&mut pass, gradients, y, BlockInputs::default())
            }
        }
    }
}

impl Layer {
    /// Allocates the layer, and verifies its results.
    pub(super) fn prepare(
        &self,
        settings: BackendSettings,
    ) -> Result<bench::Operation<Gpu>, Box<Outcome>> {
        let failed = |error: Error| Box::new(Outcome::Unmeasured { reason: error.to_string() });
        let batch = self.batch;
        let mut gpu = CudaBackend::open(settings).map_err(failed)?;
        let made = Made::new(&mut gpu, self, batch).map_err(failed)?;
        if let Some(difference) = self.difference(&made, &mut gpu).map_err(failed)? {
            return Err(Box::new(Outcome::Failed { difference }));
        }
        // This also chooses plans and allocates scratch, which a captured graph cannot do.
        let mut flops = 0.0;
        let mut count = |_: &mut dyn Backend, op: &Op<'_>| {
            flops += op.flops();
            Ok(())
        };
        made.run(&mut gpu, batch, Some(&mut count)).map_err(failed)?;
        let launch =
            move |Gpu(gpu): &mut Gpu, _: usize| made.run(gpu, batch, None).map_err(of_driver);
        Ok(bench::Operation {
            owner: Gpu(gpu),
            verified: "output and gradient of 64 tokens, within 1/16 of the CPU backend's",
            // Input and output, in both directions.
            bytes: 4 * 2 * batch.tokens() * self.d,
            flops,
            sets: 1,
            launch: Box::new(launch),
        })
    }

    /// The first difference of a few tokens from the CPU backend's.
    fn difference(&self, made: &Made, backend: &mut dyn Backend) -> Result<Option<String>, Error> {
        let mut cpu = CpuBackend::new(Arithmetic::Bf16);
        let reference = Made::new(&mut cpu, self, VERIFIED)?;
        reference.run(&mut cpu, VERIFIED, None)?;
        made.run(backend, VERIFIED, None)?;
        for (what, found, expected) in
            [("output", made.y, reference.y), ("gradient", made.dx, reference.dx)]
        {
            let found = backend.download(found.first_rows(VERIFIED.tokens()))?;
            if let Some(difference) = distant(&found, &cpu.download(expected)?, WITHIN) {
                return Ok(Some(format!("{what}, {difference}")));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_run_and_are_compared() {
        for layer in layers(&Size::Width(64)).into_iter().filter(|layer| layer.batch.size < 16) {
            let mut cpu = CpuBackend::new(Arithmetic::Bf16);
            let most = BatchShape { size: 2, ..VERIFIED };
            let made = Made::new(&mut cpu, &layer, most).expect(layer.kernel);
            let difference = layer.difference(&made, &mut cpu).expect("it runs");
            assert_eq!(difference, None, "{}", layer.kernel);
            // Another weight is noticed.
            let (weight, value) = (made.parameters.iter().next_back().expect("one").weight, 0.5);
            cpu.execute(&Fill { to: weight, value }.into()).expect("a weight");
            assert!(layer.difference(&made, &mut cpu).expect("it runs").is_some());
        }
    }
}

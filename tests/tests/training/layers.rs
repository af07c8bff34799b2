//! Attention over a second stream, against attention over its own: the step oracle's models have no
//! second stream.

use sparse24_core::op::{Accumulate, AttentionMask};
use sparse24_tests::oracle::arithmetic::Random;
use sparse24_train::{
    backend::{Arithmetic, DType, Memory, Region, Tensor, cpu::CpuBackend},
    method::{DgradOperand, GradientOperand, Method},
    nn::{
        Attention, AttentionActivations, AttentionOperands, AttentionSpec, BatchShape, Bias,
        Builder, Init, Pass, ProbabilityDropout, Sparsity, Streams,
    },
    optim::UpdateRule,
};

use super::fixture;

fn download(backend: &mut CpuBackend, t: Tensor) -> Vec<f32> {
    backend.download(t).expect("a tensor")
}

/// A copy of the stream of queries as the stream of keys and values gives the same outputs, and its
/// gradient is what self-attention adds to that of the queries.
#[test]
fn a_copy_of_the_stream_as_memory_is_self_attention() {
    let batch = BatchShape { size: 2, sequence_length: 9 };
    let names = ["q", "kv", "out"].map(str::to_owned);
    let spec = AttentionSpec {
        names: &names,
        d_model: 6,
        heads: 2,
        mask: AttentionMask::Full,
        bias: Bias::Present,
        init: [Init::Normal(0.5); 2],
        sparsity: Sparsity::Dense,
        dropout: ProbabilityDropout::Present,
    };
    let run = |cross: bool| {
        let mut backend = CpuBackend::new(Arithmetic::F32);
        let (method, rule) = (Method::dense(), UpdateRule::Sgd { momentum: 0.0 });
        let mut builder = Builder::new(&mut backend, &method, &rule, batch, 0.0);
        let attention = Attention::new(&mut builder, &spec).expect("memory suffices");
        let kept = AttentionActivations::new(&mut builder, "kept", &spec).expect("memory suffices");
        let scratch = AttentionOperands::new(&mut builder, "scratch", &spec);
        let scratch = scratch.expect("memory suffices");
        let [x, memory, y, dy, dx, dmemory] = ["x", "memory", "y", "dy", "dx", "dmemory"]
            .map(|name| builder.activation(name, spec.d_model).expect("memory suffices"));
        let lengths = builder.tensor("lengths", [batch.size, 1], DType::U32, Region::Activations);
        let lengths = lengths.expect("memory suffices");
        let parameters = builder.into_parameters();
        let mut random = Random(3);
        let mut fill = |t: Tensor| random.matrix(t.shape, 1.0).map(|&x| x as f32);
        let weights = parameters.iter().map(|parameter| parameter.weight);
        let values: Vec<_> = weights.chain([x, dy]).map(|t| (t, fill(t))).collect();
        let copy = (memory, values[values.len() - 2].1.clone());
        for (t, values) in values.into_iter().chain([copy]) {
            backend.upload(t, values.as_slice().expect("row-major")).expect("the shape");
        }
        backend.upload_ids(lengths, &[9, 4]).expect("one per sequence");
        let phase = fixture::phase(None, DgradOperand::Dense, GradientOperand::Dense);
        let mut pass = Pass {
            backend: &mut backend,
            phase: &phase,
            batch,
            dropout: 0.0,
            accumulate: Accumulate::Overwrite,
            watch: None,
            written: 0,
            stages: &[],
        };
        let memory = cross.then_some((memory, batch));
        let streams = Streams { x, memory, lengths: Some(lengths) };
        attention.forward(&mut pass, streams, kept, y).expect("shapes fit");
        attention
            .backward(&mut pass, streams, (kept, scratch), dy, dx, Some(dmemory))
            .expect("shapes fit");
        let mut read = |tensor| download(&mut backend, tensor);
        let gradients: Vec<_> = parameters.iter().map(|p| read(p.gradient)).collect();
        (read(y), gradients, read(dx), read(dmemory))
    };
    let (y, gradients, dx, _) = run(false);
    let (cross_y, cross_gradients, of_queries, of_memory) = run(true);
    assert!(y == cross_y && gradients == cross_gradients);
    let sum: Vec<f32> = of_queries.iter().zip(&of_memory).map(|(a, b)| a + b).collect();
    assert!(sum == dx && of_memory.iter().any(|&x| x != 0.0));
}

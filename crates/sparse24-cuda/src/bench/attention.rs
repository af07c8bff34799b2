//! Attention, forward and backward, with and without dropout, with heads of 64 up to the widths of
//! GPT-2 and of 128 beyond.

use half::bf16;
use ndarray::Array2;
use sparse24_core::{
    op::{AttentionMask, AttentionShape, Dropout, StepState},
    philox::{Purpose, Site, Stream},
};
use sparse24_cpu::attention as on_cpu;

use super::{
    Bench, Case, Prepared, Size, TOKENS, Work,
    check::{Stop, near_in_norm},
    input::{random, upload},
    timing::Contestant,
};
use crate::{
    Device, Error, Matrix,
    attention::{
        AttentionBackward, AttentionForward, attention_backward, attention_forward,
        backward_scratch,
    },
};

/// Sequence length.
const CONTEXT: usize = 1024;

/// The widest model with heads of 64.
const GPT2: usize = 1600;

// For dropout.
const SEED: u64 = 1;
const STEP: u32 = 1;

/// Which half of a training step.
#[derive(Clone, Copy, PartialEq)]
enum Pass {
    Forward,
    Backward,
}

pub(super) fn cases(size: &Size) -> Vec<Case> {
    let Some(width) = size.width() else { return Vec::new() };
    let head = if width <= GPT2 { 64 } else { 128 };
    let (batch, heads) = (TOKENS / CONTEXT, width / head);
    let shape = [batch, heads, CONTEXT, head];
    let case = |kernel, entries, pass, dropped| {
        Case::new(kernel, entries, shape, move |bench, _| {
            prepare(bench, [heads, head], pass, dropped)
        })
    };
    use Pass::{Backward, Forward};
    vec![
        case(
            "attention_forward",
            &["attention_forward_64", "attention_forward_128"],
            Forward,
            None,
        ),
        case(
            "attention_backward",
            &["attention_backward_64_", "attention_backward_128_"],
            Backward,
            None,
        ),
        case("attention_forward_dropout", &["attention_forward_dropout_"], Forward, Some(0.2)),
        case("attention_backward_dropout", &["attention_backward_dropout_"], Backward, Some(0.2)),
    ]
}

fn prepare(
    bench: &mut Bench,
    [heads, head]: [usize; 2],
    pass: Pass,
    dropped: Option<f32>,
) -> Result<Prepared, Stop> {
    let (batch, d) = (TOKENS / CONTEXT, heads * head);
    let shape = AttentionShape {
        batch,
        heads,
        queries: CONTEXT,
        keys: CONTEXT,
        mask: AttentionMask::Causal,
    };
    // q, k, v, o, and in the backward pass their gradients, once each.
    let bytes = 2 * TOKENS * d * if pass == Pass::Forward { 4 } else { 8 };
    bench.device.set_step(&StepState { seed: SEED, step: STEP, ..StepState::default() })?;
    let hosts =
        [random([TOKENS, 3 * d], 1), random([TOKENS, d], 2)].map(|x| x.mapv(bf16::from_f32));
    let sets = bench.sets(bytes, |device| operands(device, shape, &hosts, dropped))?;
    // The backward pass reads the results of the forward pass.
    sets.iter().try_for_each(|op| attention_forward(&mut bench.device, &op.forward))?;
    attention_backward(&mut bench.device, &sets[0])?;
    // The CPU numbers elements of dropout from its only sequence on, so check the first here;
    // without dropout, check the last.
    verify(&mut bench.device, &sets[0], if dropped.is_some() { 0 } else { batch - 1 })?;
    // FLOPs of the visible half.
    let flops = (batch * heads * CONTEXT * CONTEXT * head) as f64
        * if pass == Pass::Forward { 2.0 } else { 5.0 };
    let itself =
        Contestant::new("itself", sets, move |device, op: &AttentionBackward| match pass {
            Pass::Forward => attention_forward(device, &op.forward),
            Pass::Backward => attention_backward(device, op),
        });
    let work = Work { bytes: bytes as f64, flops, speed: 1.0 };
    let verified = "a sequence, all heads, both passes, within 1/128 of the CPU's norm";
    Ok(Prepared::new(work, verified, vec![itself]))
}

fn operands(
    device: &mut Device,
    shape: AttentionShape,
    [qkv, d_o]: &[Array2<bf16>; 2],
    dropped: Option<f32>,
) -> Result<AttentionBackward, Error> {
    let (rows, d) = (shape.batch * shape.queries, d_o.ncols());
    let qkv = upload(device, qkv.view())?;
    let [q, k, v] = [0, 1, 2].map(|i| qkv.columns(i * d..(i + 1) * d));
    let gradients = device.alloc("gradients", [rows, 3 * d])?;
    let forward = AttentionForward {
        shape,
        q,
        k,
        v,
        lengths: None,
        dropout: dropped.map(|p| Dropout { p, site: Site::new(Purpose::Dropout, 1) }),
        o: device.alloc("o", [rows, d])?,
        lse: device.alloc("lse", [shape.batch * shape.heads, shape.queries])?,
    };
    Ok(AttentionBackward {
        forward,
        d_o: upload(device, d_o.view())?,
        dq: gradients.columns(0..d),
        dk: gradients.columns(d..2 * d),
        dv: gradients.columns(2 * d..3 * d),
        scratch: device.alloc("scratch", backward_scratch(shape))?,
    })
}

/// Verifies one sequence, which is independent of the others.
fn verify(device: &mut Device, op: &AttentionBackward, sequence: usize) -> Result<(), Stop> {
    let AttentionForward { shape, q, k, v, o, dropout, .. } = op.forward;
    let mut of = |matrix: Matrix<bf16>| -> Result<Array2<f32>, Error> {
        let part = matrix.rows(sequence * CONTEXT..(sequence + 1) * CONTEXT);
        let values = device.download(part)?.into_iter().map(f32::from).collect();
        Ok(Array2::from_shape_vec((CONTEXT, part.shape()[1]), values).expect("as many"))
    };
    let [q, k, v, o, d_o] = [of(q)?, of(k)?, of(v)?, of(o)?, of(op.d_o)?];
    let found = [o, of(op.dq)?, of(op.dk)?, of(op.dv)?];
    let one = AttentionShape { batch: 1, ..shape };
    let dropout = dropout.as_ref().map(|rule| (rule, Stream::new(SEED, rule.site, 0, STEP)));
    let [mut o, mut dq, mut dk, mut dv] = [0; 4].map(|_| Array2::zeros(q.dim()));
    let mut lse = Array2::zeros((shape.heads, CONTEXT));
    let (q, k, v) = (q.view(), k.view(), v.view());
    on_cpu::attention_forward(one, q, k, v, None, o.view_mut(), lse.view_mut(), dropout)
        .expect("shapes fit");
    on_cpu::attention_backward(
        one,
        q,
        k,
        v,
        None,
        o.view(),
        lse.view(),
        d_o.view(),
        dq.view_mut(),
        dk.view_mut(),
        dv.view_mut(),
        dropout,
    )
    .expect("shapes fit");
    for (name, (found, expected)) in
        ["o", "dq", "dk", "dv"].into_iter().zip(found.iter().zip([&o, &dq, &dk, &dv]))
    {
        near_in_norm(&format!("{name} of sequence {sequence}"), found, expected, 1.0 / 128.0)?;
    }
    Ok(())
}

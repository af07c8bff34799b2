//! Attention, forward and backward, with and without dropout, at the heads of GPT-2; wider heads
//! beyond it.

use half::bf16;
use ndarray::Array2;
use sparse24_core::philox::{Purpose, Site, Stream};
use sparse24_cpu::attention as on_cpu;

use super::{
    Bench, Case, Prepared, Size, TOKENS, Work,
    check::{Stop, near_in_norm},
    input::{random, upload},
    timing::Contestant,
};
use crate::{
    Device, Error, Matrix, StepState,
    attention::{
        AttentionBackward, AttentionForward, AttentionMask, AttentionShape, attention_backward,
        attention_forward, backward_scratch,
    },
    dropout::Dropout,
};

/// Tokens of a sequence.
const CONTEXT: usize = 1024;

/// The widest model with heads of 64; those beyond have 128.
const GPT2: usize = 1600;

// Of dropout.
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
    let case = |kernel, entries, pass, dropped| -> Case {
        let prepare =
            Box::new(move |bench: &mut Bench| prepare(bench, [heads, head], pass, dropped));
        Case { kernel, shape: format!("{batch}x{heads}x{CONTEXT}x{head}"), entries, prepare }
    };
    vec![
        case(
            "attention_forward",
            &["attention_forward_64", "attention_forward_128"],
            Pass::Forward,
            None,
        ),
        case(
            "attention_backward",
            &["attention_backward_64_", "attention_backward_128_"],
            Pass::Backward,
            None,
        ),
        case(
            "attention_forward_dropout",
            &["attention_forward_dropout_"],
            Pass::Forward,
            Some(0.2),
        ),
        case(
            "attention_backward_dropout",
            &["attention_backward_dropout_"],
            Pass::Backward,
            Some(0.2),
        ),
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
    // What a case reads and writes once: q, k, v, o; and their gradients.
    let bytes = 2 * TOKENS * d * if pass == Pass::Forward { 4 } else { 8 };
    bench.device.set_step(&StepState { seed: SEED, step: STEP, ..StepState::default() })?;
    let hosts =
        [random([TOKENS, 3 * d], 1), random([TOKENS, d], 2)].map(|x| x.mapv(bf16::from_f32));
    let mut sets = Vec::new();
    for _ in 0..bench.sets(bytes) {
        sets.push(operands(&mut bench.device, shape, &hosts, dropped)?);
    }
    // The backward reads what the forward left.
    sets.iter().try_for_each(|op| attention_forward(&mut bench.device, &op.forward))?;
    attention_backward(&mut bench.device, &sets[0])?;
    // Dropout numbers its elements from the first sequence on, as the CPU does; without it
    // sequences are alike, and the last is the farthest.
    verify(&mut bench.device, &sets[0], if dropped.is_some() { 0 } else { batch - 1 })?;
    // The products of the visible half.
    let flops = (batch * heads * CONTEXT * CONTEXT * head) as f64
        * if pass == Pass::Forward { 2.0 } else { 5.0 };
    let count = sets.len();
    let launch = Box::new(move |device: &mut Device, set: usize| match pass {
        Pass::Forward => attention_forward(device, &sets[set].forward),
        Pass::Backward => attention_backward(device, &sets[set]),
    });
    let contestants = vec![Contestant { name: "itself".into(), sets: count, launch }];
    let verified = "a sequence, all heads, both passes, within 1/128 of the CPU's norm";
    Ok(Prepared {
        work: Work { bytes: bytes as f64, flops, speed: 1.0 },
        verified,
        plans: Vec::new(),
        without: Vec::new(),
        contestants,
    })
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
        dropout: dropped.map(|p| Dropout { p, site: Site::new(Purpose::Dropout, 1) }),
        o: device.alloc("o", [rows, d])?,
        lse: device.alloc("lse", [shape.batch * shape.heads, shape.queries])?,
    };
    Ok(AttentionBackward {
        forward,
        d_o: upload(device, d_o.view())?,
        dqkv: [0, 1, 2].map(|i| gradients.columns(i * d..(i + 1) * d)),
        scratch: device.alloc("scratch", backward_scratch(shape))?,
    })
}

/// One sequence, which has nothing to do with the others.
fn verify(device: &mut Device, op: &AttentionBackward, sequence: usize) -> Result<(), Stop> {
    let AttentionForward { shape, q, k, v, o, dropout, .. } = op.forward;
    let mut of = |matrix: Matrix<bf16>| -> Result<Array2<f32>, Error> {
        let part = matrix.rows(sequence * CONTEXT..(sequence + 1) * CONTEXT);
        let values = device.download(part)?.into_iter().map(f32::from).collect();
        Ok(Array2::from_shape_vec((CONTEXT, part.shape()[1]), values).expect("as many"))
    };
    let [q, k, v, o, d_o] = [of(q)?, of(k)?, of(v)?, of(o)?, of(op.d_o)?];
    let found = [o, of(op.dqkv[0])?, of(op.dqkv[1])?, of(op.dqkv[2])?];
    let mask = sparse24_core::op::AttentionMask::Causal;
    let one = sparse24_core::op::AttentionShape {
        batch: 1,
        heads: shape.heads,
        queries: CONTEXT,
        keys: CONTEXT,
        mask,
    };
    let rule = dropout.map(|Dropout { p, site }| sparse24_core::op::Dropout { p, site });
    let dropout = rule.as_ref().map(|rule| (rule, Stream::new(SEED, rule.site, 0, STEP)));
    let [mut o, mut dq, mut dk, mut dv] = [0; 4].map(|_| Array2::zeros(q.dim()));
    let mut lse = Array2::zeros((shape.heads, CONTEXT));
    let (q, k, v) = (q.view(), k.view(), v.view());
    on_cpu::attention_forward(one, q, k, v, None, o.view_mut(), lse.view_mut(), dropout)
        .expect("shapes fit");
    let gradients = (dq.view_mut(), dk.view_mut(), dv.view_mut());
    on_cpu::attention_backward(
        one,
        q,
        k,
        v,
        None,
        o.view(),
        lse.view(),
        d_o.view(),
        gradients.0,
        gradients.1,
        gradients.2,
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

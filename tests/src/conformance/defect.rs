//! Planted defects: one wrong output of one operation, which the suite must notice.

use std::panic::{AssertUnwindSafe, catch_unwind};

use sparse24_core::op::{Optimizer, UpdateRule};
use sparse24_train::{
    Error,
    backend::{
        Backend, DType, MaskId, Op, Region, Tensor,
        op::{
            AttentionBackward, CompressWeight, DenseOp, EmbedBackward, EmbedForward, MvueCompress,
            OptimizerStep, SparseOp, UpdateOp,
        },
    },
};

use super::check_fixed;
use crate::hooked::Hooked;

/// Every operation, the part of the suite that tests it, and its number of outputs.
pub const DEFECTS: &[(&str, &str, usize)] = &[
    ("MaskSearch", "mask_search", 1),
    ("PermutedMask", "permuted_mask", 1),
    ("CompressWeight", "compress_weight", 1),
    ("MvueCompress", "mvue_compress", 1),
    ("LinearForward", "linear_forward", 1),
    ("LinearDgrad", "linear_dgrad", 1),
    ("LinearWgrad", "linear_wgrad", 1),
    ("BiasGrad", "bias_grad", 1),
    ("ActivationForward", "activation_forward", 1),
    ("ActivationForward", "linear_forward", 1),
    ("ActivationBackward", "activation_backward", 1),
    ("ActivationBackward", "linear_dgrad", 1),
    ("Add", "norm_forward", 1),
    ("NormForward", "norm_forward", 2),
    ("NormBackward", "norm_backward", 3),
    ("AttentionForward", "attention_forward", 2),
    ("AttentionBackward", "attention_backward", 3),
    ("EmbedForward", "embed_forward", 1),
    ("EmbedBackward", "embed_backward", 2),
    ("HeadLoss", "head_loss", 4),
    ("HeadLoss", "span_loss", 4),
    ("Logits", "logits", 1),
    ("Dropout", "dropout", 1),
    ("DropSequences", "drop_sequences", 1),
    ("GatherRows", "rows", 1),
    ("ScatterRows", "rows", 1),
    ("Scale", "scale", 1),
    ("ScaleGrad", "scale", 1),
    ("Copy", "copy_and_fill", 1),
    ("Fill", "copy_and_fill", 1),
    ("GradNorm", "optimizer", 1),
    ("OptimizerStep", "optimizer", 2),
    ("OptimizerStep", "adam", 2),
    ("OptimizerStep", "sgd", 2),
    ("OptimizerStep", "lion", 2),
    ("MovingAverage", "moving_average", 1),
];

/// Plants every defect in a backend and runs the part of the suite that must notice it.
///
/// # Panics
/// If one is not noticed.
pub fn assert_noticed(open: impl Fn() -> Box<dyn Backend>) {
    for &(kind, operation, outputs) in DEFECTS {
        for output in 0..outputs {
            let planted = format!("({kind}(");
            let hook = move |backend: &mut dyn Backend, op: &Op<'_>| {
                if format!("{op:?}").contains(&planted) {
                    execute_wrongly(backend, op, output)
                } else {
                    backend.execute(op)
                }
            };
            let mut backend =
                Hooked::new(open(), Box::new(move |backend, _, op| hook(backend, op)));
            let checked = catch_unwind(AssertUnwindSafe(|| check_fixed(operation, &mut *backend)));
            assert!(checked.is_err(), "{operation} misses a wrong output {output} of {kind}");
        }
    }
    let wrong = [
        Hooked::distances(open(), |count| count + 1, |sum| sum),
        Hooked::distances(open(), |count| count, |sum| sum * (1.0 + 1e-6)),
    ];
    for (at, mut backend) in wrong.into_iter().enumerate() {
        let checked = catch_unwind(AssertUnwindSafe(|| check_fixed("distances", &mut *backend)));
        assert!(checked.is_err(), "distances misses a wrong result {at}");
    }
}

/// Executes an operation and corrupts one of its outputs; outputs without a tensor are computed
/// from other inputs, the gradient norm is left out, and the optimizer's step is left out or
/// another one.
fn execute_wrongly(backend: &mut dyn Backend, op: &Op<'_>, output: usize) -> Result<(), Error> {
    match *op {
        Op::Update(UpdateOp::GradNorm(_)) => return Ok(()),
        Op::Update(UpdateOp::OptimizerStep(_)) if output == 0 => return Ok(()),
        Op::Update(UpdateOp::OptimizerStep(op)) => {
            let rule = match op.optimizer.rule {
                UpdateRule::AdamW(adam) => UpdateRule::Adam(adam),
                UpdateRule::Adam(adam) => UpdateRule::AdamW(adam),
                UpdateRule::Sgd { momentum } => UpdateRule::Sgd { momentum: momentum / 2.0 },
                UpdateRule::Lion { beta1, beta2 } => {
                    UpdateRule::Lion { beta1: beta2, beta2: beta1 }
                }
            };
            let optimizer = &Optimizer { rule, ..*op.optimizer };
            return backend.run(OptimizerStep { optimizer, ..op });
        }
        Op::Sparse(SparseOp::CompressWeight(op)) => {
            let w = negated(backend, op.w, Region::Parameters)?;
            return backend.run(CompressWeight { w, ..op });
        }
        Op::Sparse(SparseOp::MvueCompress(op)) => {
            let dz = negated(backend, op.dz, Region::Activations)?;
            return backend.run(MvueCompress { dz, ..op });
        }
        _ => backend.execute(op)?,
    }
    match *op {
        Op::Sparse(SparseOp::MaskSearch(op)) => corrupt_mask(backend, op.mask),
        Op::Sparse(SparseOp::PermutedMask(op)) => corrupt_mask(backend, op.out),
        _ => match outputs(op).get(output) {
            Some(&t) if t.elements() > 0 => corrupt(backend, t),
            _ => Ok(()),
        },
    }
}

/// The tensors that an operation writes.
fn outputs(op: &Op<'_>) -> Vec<Tensor> {
    match op {
        Op::Sparse(_) | Op::Update(UpdateOp::GradNorm(_) | UpdateOp::OptimizerStep(_)) => vec![],
        Op::Update(UpdateOp::Copy(op)) => vec![op.to],
        Op::Update(UpdateOp::Fill(op)) => vec![op.to],
        Op::Update(UpdateOp::MovingAverage(op)) => vec![op.average],
        Op::Dense(op) => match op {
            DenseOp::LinearForward(op) => vec![op.z],
            DenseOp::LinearDgrad(op) => vec![op.dx],
            DenseOp::LinearWgrad(op) => vec![op.dw],
            DenseOp::BiasGrad(op) => vec![op.db],
            DenseOp::ActivationForward(op) => vec![op.h],
            DenseOp::ActivationBackward(op) => vec![op.dz],
            DenseOp::Add(op) => vec![op.out],
            DenseOp::NormForward(op) => vec![op.y, op.stats],
            DenseOp::NormBackward(op) => [op.dx, op.dgamma].into_iter().chain(op.dbeta).collect(),
            DenseOp::AttentionForward(op) => vec![op.o, op.lse],
            DenseOp::AttentionBackward(AttentionBackward { dqkv, .. }) => dqkv.to_vec(),
            DenseOp::EmbedForward(EmbedForward(op)) => vec![op.rows],
            DenseOp::EmbedBackward(EmbedBackward(op)) => {
                [op.token_table].into_iter().chain(op.position_table).collect()
            }
            DenseOp::HeadLoss(op) => {
                let mut outputs = vec![op.loss];
                outputs.extend(op.gradients.iter().flat_map(|g| [g.dx, g.dembedding]));
                outputs.extend(op.gradients.and_then(|g| g.dbias));
                outputs
            }
            DenseOp::Logits(op) => vec![op.out],
            DenseOp::Dropout(op) => vec![op.out],
            DenseOp::DropSequences(op) => vec![op.out],
            DenseOp::GatherRows(op) => vec![op.out],
            DenseOp::ScatterRows(op) => vec![op.dx],
            DenseOp::Scale(op) => vec![op.out],
            DenseOp::ScaleGrad(op) => vec![op.ds],
        },
    }
}

/// One wrong element: the last.
fn corrupt(backend: &mut dyn Backend, t: Tensor) -> Result<(), Error> {
    let mut values = backend.download(t)?;
    if let Some(last) = values.last_mut() {
        *last = if last.is_finite() { *last + 1.0 + last.abs() } else { 0.0 };
    }
    backend.upload(t, &values)
}

/// Two exchanged columns in the first row.
fn corrupt_mask(backend: &mut dyn Backend, id: MaskId) -> Result<(), Error> {
    let mut mask = backend.download_mask(id)?;
    mask.tiles_mut()[0] ^= 0b11;
    backend.upload_mask(id, &mask)
}

fn negated(backend: &mut dyn Backend, t: Tensor, region: Region) -> Result<Tensor, Error> {
    let values: Vec<f32> = backend.download(t)?.iter().map(|x| -x).collect();
    let dtype = if region == Region::Parameters { DType::F32 } else { t.dtype };
    let to = backend.alloc("negated", t.shape, dtype, region)?;
    backend.upload(to, &values)?;
    Ok(to)
}

//! What a configuration can ask for and the kernels do not serve, known before a GPU is opened.
//!
//! Deliberately absent: memory, which the GPU itself says when it does not suffice.

use sparse24_core::MaskKind;
use sparse24_cuda::{activation, attention, dropout, norm, spmm24};

use crate::{
    Error,
    method::{DgradOperand, Method},
    trainer::Recipe,
};

/// Where rows of activations begin in memory, in elements: kernels read and write 16 bytes at a
/// time.
const STEP: usize = 8;

/// Refuses a method of which kernels are missing.
///
/// # Errors
/// [`Error::Setting`] names the choice.
fn check_method(method: &Method) -> Result<(), Error> {
    let refuse = |key: &str, choice: &str| {
        let problem = format!(
            "the backend cuda has no kernel for {choice} yet; take --backend cpu, or another method"
        );
        Err(Error::Setting { key: key.to_owned(), problem })
    };
    for phase in &method.phases {
        match (phase.dgrad, phase.mask()) {
            (DgradOperand::AsForward, None | Some(MaskKind::Transposable))
            | (DgradOperand::Dense, _) => {}
            (DgradOperand::AsForward, Some(kind)) => {
                return refuse(
                    "method.dgrad",
                    &format!("the dgrad of {kind} pruned weights, which is a dense product"),
                );
            }
            (DgradOperand::Permuted, _) => return refuse("method.dgrad", "permuted masks"),
        }
    }
    if method.watches_variance() {
        refuse("method.phases", "a phase that ends when Adam's variance has settled")
    } else {
        Ok(())
    }
}

/// Refuses a shape that an operation of the first step would refuse.
///
/// # Errors
/// [`Error::Setting`] names the first key that is wrong.
pub(super) fn check(recipe: &Recipe) -> Result<(), Error> {
    check_method(&recipe.method)?;
    let Recipe { model, batch, dropout: p, .. } = recipe;
    let refuse = |key: &str, problem: String| Err(Error::Setting { key: key.to_owned(), problem });
    if model.width > norm::MAX_WIDTH {
        return refuse(
            "model.d_model",
            format!("expected at most {} on a GPU, found {}", norm::MAX_WIDTH, model.width),
        );
    }
    let (head, most) = (model.width / model.heads.max(1), attention::MAX_HEAD_WIDTH);
    if !head.is_multiple_of(STEP) || head > most {
        let problem = format!(
            "expected heads whose width, model.d_model / model.heads, is a multiple of {STEP} up to {most} on a GPU, found {} / {} = {head}",
            model.width, model.heads
        );
        return refuse("model.heads", problem);
    }
    if !model.ffn_width.is_multiple_of(STEP) {
        return refuse(
            "model.d_ff",
            format!("expected a multiple of {STEP} on a GPU, found {}", model.ffn_width),
        );
    }
    let wide = model.ffn_width.saturating_mul(model.activation.width());
    if wide > spmm24::MAX_SIZE {
        return refuse(
            "model.d_ff",
            format!(
                "expected at most {} columns into the activation on a GPU, found {wide}",
                spmm24::MAX_SIZE
            ),
        );
    }
    let product = |lengths: &[usize]| {
        lengths.iter().fold(1_usize, |product, &length| product.saturating_mul(length))
    };
    let tokens = product(&[batch.sequences, batch.context]);
    let dropped = |lengths: &[usize]| if *p > 0.0 { product(lengths) } else { 0 };
    let (residual, scores) =
        (dropped(&[tokens, model.width]), dropped(&[tokens, batch.context, model.heads]));
    let gated = if model.activation.width() > 1 { product(&[tokens, model.ffn_width]) } else { 0 };
    for (what, found, most) in [
        ("tokens in a micro-batch", tokens, spmm24::MAX_SIZE),
        ("gated activations in a micro-batch", gated, activation::MAX_GATED),
        (
            "elements of the residual stream in a micro-batch with dropout",
            residual,
            dropout::MAX_ELEMENTS,
        ),
        ("attention scores in a micro-batch with dropout", scores, dropout::MAX_ELEMENTS),
    ] {
        if found > most {
            return refuse(
                "batch.size",
                format!("expected at most {most} {what} on a GPU, found {found}; lower it"),
            );
        }
    }
    Ok(())
}

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
            "model.width",
            format!("expected at most {} on a GPU, found {}", norm::MAX_WIDTH, model.width),
        );
    }
    let (head, most) = (model.width / model.heads.max(1), attention::MAX_HEAD_WIDTH);
    if !head.is_multiple_of(STEP) || head > most {
        let problem = format!(
            "expected heads whose width, model.width / model.heads, is a multiple of {STEP} up to {most} on a GPU, found {} / {} = {head}",
            model.width, model.heads
        );
        return refuse("model.heads", problem);
    }
    if !model.ffn_width.is_multiple_of(STEP) {
        return refuse(
            "model.ffn_width",
            format!("expected a multiple of {STEP} on a GPU, found {}", model.ffn_width),
        );
    }
    let wide = model.ffn_width.saturating_mul(model.activation.width());
    if wide > spmm24::MAX_SIZE {
        return refuse(
            "model.ffn_width",
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
                "batch.sequences",
                format!("expected at most {most} {what} on a GPU, found {found}; lower it"),
            );
        }
    }
    Ok(())
}

#[cfg(all(test, feature = "run"))]
mod tests {
    use super::*;
    use crate::backend::Activation;

    type Change = dyn Fn(&mut Recipe);

    fn recipe() -> Recipe {
        crate::config::preset::find("gpt2-124m")
            .expect("it exists")
            .recipe(50257)
            .expect("possible")
    }

    #[test]
    fn every_preset_fits() {
        for preset in crate::config::preset::PRESETS {
            let recipe = preset.config().recipe(65).expect("possible");
            assert!(check(&recipe).is_ok(), "{}", preset.name);
        }
    }

    #[test]
    fn a_method_without_its_kernels_is_refused_by_the_choice() {
        let refusal = |choice: &str| format!("{choice} yet; take --backend cpu, or another method");
        let dgrad = refusal(
            "method.dgrad: the backend cuda has no kernel for the dgrad of row-wise 2:4 pruned weights, which is a dense product",
        );
        for preset in crate::method::PRESETS {
            let mut recipe = recipe();
            recipe.method = (preset.build)(1e-4);
            let expected = match preset.name {
                "dense" | "half" | "fst" => Ok(()),
                "bi-mask" => {
                    Err(refusal("method.dgrad: the backend cuda has no kernel for permuted masks"))
                }
                _ => Err(dgrad.clone()),
            };
            assert_eq!(
                check(&recipe).map_err(|error| error.to_string()),
                expected,
                "{}",
                preset.name
            );
            for phase in &mut recipe.method.phases {
                phase.dgrad = DgradOperand::Dense;
            }
            let watched = refusal(
                "method.phases: the backend cuda has no kernel for a phase that ends when Adam's variance has settled",
            );
            let expected = if preset.name == "step" { Err(watched) } else { Ok(()) };
            assert_eq!(
                check(&recipe).map_err(|error| error.to_string()),
                expected,
                "{} with a dense dgrad",
                preset.name
            );
        }
    }

    #[test]
    fn what_a_kernel_would_refuse_is_refused_by_its_key() {
        let with = |change: &Change| {
            let mut recipe = recipe();
            change(&mut recipe);
            check(&recipe).map_err(|error| error.to_string())
        };
        for (change, message) in [
            (
                (&|r: &mut Recipe| r.model.ffn_width = 516) as &Change,
                "model.ffn_width: expected a multiple of 8 on a GPU, found 516",
            ),
            (
                &|r: &mut Recipe| r.model.width = 8256,
                "model.width: expected at most 8192 on a GPU, found 8256",
            ),
            (
                &|r: &mut Recipe| r.model.heads = 64,
                "model.heads: expected heads whose width, model.width / model.heads, is a multiple of 8 up to 128 on a GPU, found 768 / 64 = 12",
            ),
            (
                &|r: &mut Recipe| r.model.heads = 3,
                "model.heads: expected heads whose width, model.width / model.heads, is a multiple of 8 up to 128 on a GPU, found 768 / 3 = 256",
            ),
            (
                &|r: &mut Recipe| r.batch.sequences = 4096,
                "batch.sequences: expected at most 4194240 tokens in a micro-batch on a GPU, found 4194304; lower it",
            ),
            (
                &|r: &mut Recipe| r.batch.sequences = usize::MAX,
                "batch.sequences: expected at most 4194240 tokens in a micro-batch on a GPU, found 18446744073709551615; lower it",
            ),
            (
                &|r: &mut Recipe| {
                    (r.model.activation, r.model.ffn_width, r.batch.sequences) =
                        (Activation::Geglu, 4096, 1024)
                },
                "batch.sequences: expected at most 4294967039 gated activations in a micro-batch on a GPU, found 4294967296; lower it",
            ),
            (
                &|r: &mut Recipe| (r.dropout, r.batch.sequences) = (0.1, 2048),
                "batch.sequences: expected at most 17179869184 attention scores in a micro-batch with dropout on a GPU, found 25769803776; lower it",
            ),
            (
                &|r: &mut Recipe| {
                    (r.model.width, r.model.heads, r.model.ffn_width) = (8192, 64, 8192);
                    (r.dropout, r.batch.sequences, r.batch.context) = (0.1, 131_070, 32);
                },
                "batch.sequences: expected at most 17179869184 elements of the residual stream in a micro-batch with dropout on a GPU, found \
                 34359214080; lower it",
            ),
        ] {
            assert_eq!(with(change), Err(message.to_owned()));
        }
        // The same without gates and without dropout.
        assert_eq!(
            with(&|r: &mut Recipe| (r.model.ffn_width, r.batch.sequences) = (4096, 1024)),
            Ok(())
        );
        assert_eq!(with(&|r: &mut Recipe| r.batch.sequences = 2048), Ok(()));
    }
}

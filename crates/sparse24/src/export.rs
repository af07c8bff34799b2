//! `sparse24 export`: a model as a Hugging Face GPT-2.

use std::{borrow::Cow, path::PathBuf};

use clap::ValueEnum;
use sparse24_core::MaskKind;
use sparse24_run::{
    interchange::{self, Dtype, Gpt2Config, Values},
    run::Model,
};

use crate::{
    failure::{Exit, Failure},
    output::{say, word},
};

/// Write a run or a checkpoint as a folder that transformers' GPT2LMHeadModel loads
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// A run directory or a checkpoint
    run: PathBuf,
    /// The new folder
    out: PathBuf,
    /// How values are stored
    #[arg(long, value_enum, default_value_t = Stored::F32)]
    dtype: Stored,
    /// The 2:4 model: pruned weights as zeros, proved; refused unless the checkpoint is of a sparse
    /// phase
    #[arg(long)]
    sparse24: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Stored {
    F32,
    F16,
    Bf16,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let model = Model::read(&args.run)?;
    let shape = Gpt2Config::of(&model.recipe().model)
        .map_err(|error| Failure::new(Exit::Input, format!("{}: {error}", args.run.display())))?;
    let dtype = match args.dtype {
        Stored::F32 => Dtype::F32,
        Stored::F16 => Dtype::F16,
        Stored::Bf16 => Dtype::Bf16,
    };
    let checkpoint = &model.checkpoint;
    let values = match (args.sparse24, model.phase().mask()) {
        (false, _) => Values::Dense,
        (true, Some(structure)) => Values::Sparse24 {
            phase: checkpoint.state.phase_kind,
            masks: &checkpoint.masks,
            structure,
        },
        (true, None) => {
            let problem = format!(
                "{}: step {} is of a dense phase, its weights have left their masks: export the checkpoint at the end of the sparse phase, or prune the exported file with `sparse24 prune`",
                args.run.display(),
                checkpoint.state.step
            );
            return Err(Failure::new(Exit::Input, problem));
        }
    };
    let weights = match values {
        Values::Dense => Cow::Borrowed(checkpoint.weights.as_slice()),
        Values::Sparse24 { .. } => model.mapped_weights()?,
    };
    let exported = interchange::export(&args.out, &weights, &shape, dtype, values)?;
    say!("exported step {} to {}", checkpoint.state.step, args.out.display());
    if !exported.zero_biases.is_empty() {
        say!(
            "{} biases that the model has not were written as zeros, which compute the same",
            exported.zero_biases.len()
        );
    }
    if !exported.sparse24.is_empty() {
        say!(
            "{} weights were read back and proved 2:4; to verify them again:",
            exported.sparse24.len()
        );
        // Where attention is dense, it is not to be proved.
        let filter = if exported.sparse24.iter().all(|name| name.contains(".mlp.")) {
            " --include mlp"
        } else {
            ""
        };
        // The file has the matrices transposed.
        let mask = match model.phase().mask() {
            Some(MaskKind::RowWise) => " --mask column",
            Some(MaskKind::ColumnWise) => " --mask row",
            Some(MaskKind::Transposable) | None => "",
        };
        say!("sparse24 verify {}{mask}{filter}", word(&args.out.join("model.safetensors")));
    }
    Ok(())
}

//! `sparse24 export`: writes a model for Hugging Face's transformers or timm.

use std::{borrow::Cow, path::PathBuf};

use sparse24_core::MaskKind;
use sparse24_run::{
    interchange::{self, Description, Dtype, Format, Values},
    task::Labels,
};

use sparse24_train::model::ModelSpec;

use crate::{
    choice,
    eval::Which,
    failure::{Exit, Failure, Result},
    output::{say, word},
};

/// Write a run or a checkpoint as a folder that Hugging Face's transformers or timm can load
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    which: Which,
    /// Folder to create
    out: PathBuf,
    /// Data type of the stored weights
    #[arg(long, value_parser = choice::dtype(), default_value = "f32")]
    dtype: Dtype,
    /// Refuse to export anything but a 2:4 model, which only a checkpoint of a sparse phase has
    #[arg(long)]
    sparse24: bool,
    /// In a sparse phase, export the dense weights that training updates, not the pruned ones
    #[arg(long, conflicts_with = "sparse24")]
    dense: bool,
}

pub(crate) fn run(args: &Args) -> Result {
    let model = args.which.read()?;
    let refuse = |problem: &str| {
        Err(Failure::new(Exit::Input, format!("{}: {problem}", args.which.run.display())))
    };
    let spec = &model.recipe().model;
    if let Err(error) = Format::of(spec) {
        return refuse(&error.to_string());
    }
    let (checkpoint, mask) = (&model.checkpoint, model.phase().mask());
    let step = checkpoint.state.step;
    let (weights, values) = match mask {
        Some(structure) if !args.dense => {
            let phase = checkpoint.state.phase_kind;
            let values = Values::Sparse24 { phase, masks: &checkpoint.masks, structure };
            (model.mapped_weights()?, values)
        }
        None if args.sparse24 => {
            let has_sparse = model.recipe().method.phases.iter().any(|p| p.mask().is_some());
            let how = if has_sparse {
                "export the checkpoint at the end of the sparse phase, or "
            } else {
                ""
            };
            return refuse(&format!(
                "step {step} is in a dense phase, where weights are not masked: {how}prune the \
                 exported file with `sparse24 prune`"
            ));
        }
        _ => (Cow::Borrowed(checkpoint.weights.as_slice()), Values::Dense),
    };
    let labels = match model.config.task()?.map(|task| task.labels) {
        Some(Labels::Named(names)) => names.to_vec(),
        _ => model.config.task.classes.iter().map(String::as_str).collect(),
    };
    let labels = &labels;
    let data = &model.config.data;
    let languages = [data.source.as_str(), &data.target];
    let description = Description { spec, tokenizer: model.tokenizer.as_ref(), labels, languages };
    let exported = interchange::export(&args.out, &weights, description, args.dtype, values)?;
    let which = match (mask, args.dense) {
        (None, _) => "",
        (Some(_), false) => ", pruned as it is evaluated,",
        (Some(_), true) => ", the dense weights of a sparse phase,",
    };
    say!("exported step {step}{which} to {}", args.out.display());
    if !exported.zero_biases.is_empty() {
        say!(
            "wrote {} zero biases, since the model has none; its outputs are the same",
            exported.zero_biases.len()
        );
    }
    if !exported.has_tokenizer && !matches!(spec, ModelSpec::Deit(_)) {
        let why = match &model.tokenizer {
            Some(tokenizer) => {
                format!("those of the kind {} are not exported", tokenizer.kind().name())
            }
            None => "the run has none".to_owned(),
        };
        say!("wrote no tokenizer: {why}");
    }
    if !exported.sparse24.is_empty() {
        say!(
            "read back {} weights and verified that they are 2:4; to verify them again:",
            exported.sparse24.len()
        );
        let filter = exported.format.filter(&exported.sparse24);
        let stored = |mask| exported.format.stored_mask(&exported.sparse24[0], mask);
        let mask = match mask.map(stored) {
            Some(MaskKind::RowWise) => " --mask row",
            Some(MaskKind::ColumnWise) => " --mask column",
            Some(MaskKind::Transposable) | None => "",
        };
        say!("sparse24 verify {}{mask} {filter}", word(args.out.join("model.safetensors")));
    }
    Ok(())
}

//! `sparse24 import`: turns Hugging Face's GPT-2, BERT or FSMT, or timm's DeiT, into a run at step
//! 0.

use std::path::PathBuf;

use sparse24_run::{
    config::{preset, unknown},
    data::TokenizerKind,
    interchange::numbered,
    run::save_imported,
    task::{self, Labels},
};
use sparse24_train::{model::ModelSpec, nn::Prediction};

use crate::{
    choice,
    configure::quote,
    failure::{Exit, Failure, Result},
    finetune::class_list,
    output::{counted, say},
    weights::{Head, Initial, room_for_text},
};

/// Convert Hugging Face's GPT-2, BERT or FSMT (fairseq's Transformer), or timm's DeiT, to a run
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Folder with config.json and model.safetensors (or several files and an index), or a weights
    /// file with config.json beside it
    path: PathBuf,
    /// Run directory to create
    out: PathBuf,
    /// Tokenizer of the model [default: the folder's, or the one that the vocabulary size implies]
    #[arg(long, value_parser = choice::tokenizer())]
    tokenizer: Option<TokenizerKind>,
    /// Keep the head of a model that was fine-tuned for this task [default: leave it out]
    #[arg(long, value_name = "NAME")]
    task: Option<String>,
}

pub(crate) fn run(args: &Args) -> Result {
    let task = args.task.as_deref().map(|name| {
        let names = task::TASKS.iter().map(|task| task.name);
        task::find(name).ok_or_else(|| unknown("--task", name, names))
    });
    let task = task.transpose()?;
    let head = task.map_or(Head::Pretrained, Head::Task);
    let initial = Initial::import(&args.path, args.tokenizer, head)?;
    let mut remarks = initial.remarks(None);
    let mut settings = initial.settings();
    let Initial { weights, spec, tokenizer, labels, .. } = initial;
    if let Some(tokenizer) = &tokenizer {
        let (kind, tokens) = (tokenizer.kind(), tokenizer.vocabulary());
        let room = room_for_text(&spec, Some(tokenizer));
        if tokens as usize > room {
            let problem = format!(
                "--tokenizer: {} has {tokens} tokens, but the model has only {room}; leave it out",
                kind.name()
            );
            return Err(Failure::new(Exit::Usage, problem));
        }
    }
    if matches!(spec, ModelSpec::Transformer(_)) {
        // As many hypotheses are translated at once.
        settings.push("batch.size=32".to_owned());
    }
    if let (Some(task), Some(prediction)) = (task, spec.prediction()) {
        let task::Task { name: task, labels: kind, .. } = *task;
        settings.push(format!("task.name={}", quote(task)));
        settings.push(format!("task.outputs={}", prediction.outputs()));
        // Without names, the classes are those of the data, in ascending order.
        if kind == Labels::Found
            && labels.iter().zip(0..).any(|(name, class)| *name != numbered(class))
        {
            settings.push(format!("task.classes={}", class_list(&labels)));
        }
        // Only the user knows whether they mean the same.
        if let Labels::Named(names) = kind {
            let unknown = labels.iter().zip(names).zip(0..).filter(|((label, name), class)| {
                !label.eq_ignore_ascii_case(name) && **label != numbered(*class)
            });
            remarks.extend(unknown.map(|((label, name), class)| {
                format!(
                    "class {class} of the model, {label:?}, counts as {name:?} of the task {task}"
                )
            }));
        }
        if prediction == Prediction::Span {
            let window = task::WINDOW.min(spec.extents().longest);
            settings.push(format!("task.max_length={window}"));
            settings.push(format!("task.stride={}", task::STRIDE));
        }
    }
    let config = preset::imported()
        .with_settings(&settings)
        .map_err(|error| Failure::new(Exit::Input, format!("{}: {error}", args.path.display())))?;
    let count = counted(weights.len(), "tensor");
    let checkpoint = save_imported(&config, weights, tokenizer.as_ref(), &args.out)?;
    say!("imported {count} into {}", checkpoint.display());
    for remark in remarks {
        say!("{remark}");
    }
    Ok(())
}

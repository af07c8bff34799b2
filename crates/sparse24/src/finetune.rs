//! `sparse24 finetune`: trains a pre-trained model further on labelled sentences or on questions.

use std::path::{Path, PathBuf};

use sparse24_run::{
    Error,
    checkpoint::NamedTensor,
    config::{Config, ModelKind, dotted, preset, table_of},
    data::Tokenizer,
    run::{Given, Model, Run},
    task::{self, Examples, LONGEST_QUESTION, Labels, TASKS},
};
use sparse24_train::model::ModelSpec;

use crate::{
    configure::{Configure, quote},
    failure::{Exit, Failure, Result},
    output::{counted, note, say},
    ranks::check_alone,
    signals::Signals,
    threads::on_threads,
    train::{Claimed, Reporting, drive},
    weights::{Head, Initial, TASK_HEADS, contradiction, is_run},
};

/// Fine-tune a pre-trained model to classify or score sentences, or to answer questions on a text
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Task of the data
    #[arg(long, value_name = "NAME", required_unless_present = "list")]
    task: Option<String>,
    /// Pre-trained model: a run, a checkpoint or a Hugging Face folder
    #[arg(long, value_name = "PATH", required_unless_present = "list")]
    init_from: Option<PathBuf>,
    /// Passes over the training examples [default: 5 for a BERT, 3 for a GPT-2 and for squad]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..))]
    #[arg(conflicts_with = "steps")]
    epochs: Option<u32>,
    #[command(flatten)]
    configure: Configure,
    /// Run directory [default: runs/TASK-TIME]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// List the tasks with their files and scores
    #[arg(long, exclusive = true)]
    list: bool,
    #[command(flatten)]
    reporting: Reporting,
}

pub(crate) fn run(args: &Args) -> Result {
    let (Some(name), Some(from)) = (&args.task, &args.init_from) else { return list() };
    check_alone("finetune")?;
    let pretrained = Pretrained::read(from)?;
    let (config, examples) = configured(&args.configure, name, args.epochs, &pretrained)?;
    let claimed = args.out.is_none().then(|| Claimed::new(&config.task.name)).transpose()?;
    let out = args.out.clone().or(claimed.as_ref().map(|claimed| claimed.0.clone()));
    let out = out.expect("named or claimed");
    note_examples(&config, &examples);
    let signals = Signals::take()?;
    on_threads(config.backend.threads, || {
        let weights = Some(pretrained.weights());
        let run = Run::start(config, examples, Given { weights, ..Given::default() }, &out)?;
        drive(run, &args.reporting, signals)
    })
}

fn list() -> Result {
    for task in TASKS {
        let scores: Vec<_> = task.scores.iter().map(|score| score.name()).collect();
        say!("{:14}  {}", task.name, task.about);
        say!("{:14}  files {}; scores {}; {}", "", task.files(), scores.join(", "), task.source);
    }
    Ok(())
}

/// A pre-trained model.
pub(crate) struct Pretrained {
    path: PathBuf,
    weights: Vec<NamedTensor>,
    spec: ModelSpec,
    kind: ModelKind,
    /// Its preset, if it is known.
    preset: Option<String>,
    /// The settings of its shape, each `key=value`.
    shape: Vec<String>,
    pub(crate) tokenizer: Tokenizer,
}

impl Pretrained {
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let no_tokenizer = |other: Option<String>| {
            let other = other.unwrap_or_else(|| "has no tokenizer".to_owned());
            let problem = format!("{}: {other}, so it cannot read text", path.display());
            Failure::new(Exit::Input, problem)
        };
        if !is_run(path) {
            let initial = Initial::import(path, None, Head::New)?;
            let remarks = initial.remarks(None);
            let (kind, shape) = (ModelKind::of(&initial.spec), initial.settings());
            let other = initial.other_tokenizer();
            let (path, Initial { weights, spec, tokenizer, .. }) = (path.to_owned(), initial);
            let tokenizer = tokenizer.ok_or_else(|| no_tokenizer(other))?;
            remarks.iter().for_each(note);
            return Ok(Self { path, weights, spec, kind, preset: None, shape, tokenizer });
        }
        let mut model = Model::read(path)?;
        let tokenizer = model.tokenizer.take().ok_or_else(|| no_tokenizer(None))?;
        let settings = dotted(table_of(&model.config)).into_iter();
        let mut shape: Vec<String> = settings
            .filter(|(key, _)| key.starts_with("model.") || key == "data.tokenizer")
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        // A narrow model stays so with any method.
        let spec = model.recipe().model.clone();
        shape.push(format!("model.d_ff={}", spec.extents().d_ff));
        let kind = model.config.model.kind;
        let preset = Some(model.config.preset).filter(|name| preset::find(name).is_ok());
        let mut weights = model.checkpoint.weights;
        // The head of another task.
        weights.retain(|weight| !TASK_HEADS.iter().any(|head| weight.name.starts_with(head)));
        Ok(Self { path: path.to_owned(), weights, spec, kind, preset, shape, tokenizer })
    }

    pub(crate) fn weights(&self) -> &[NamedTensor] {
        &self.weights
    }

    /// The usual settings of fine-tuning such a model, each `key=value`, and the epochs.
    ///
    /// Sources: the paper's repository, for GPT-2 with sequences of 128; for spans and BERT, Devlin
    /// et al. 2018, section 4.2.
    fn usual(&self, is_span: bool) -> (&'static [&'static str], u32) {
        match self.kind {
            ModelKind::Bert | ModelKind::CrammedBert if is_span => (
                &[
                    "optimizer.learning_rate=5e-5",
                    "optimizer.beta1=0.9",
                    "optimizer.beta2=0.999",
                    "optimizer.epsilon=1e-6",
                    "batch.size=32",
                    "model.dropout=0.1",
                ],
                3,
            ),
            // A DeiT has no tokenizer, without which it was refused, and a Transformer no task.
            ModelKind::Bert | ModelKind::CrammedBert | ModelKind::Deit | ModelKind::Transformer => {
                (
                    &[
                        "optimizer.learning_rate=4e-5",
                        "optimizer.beta1=0.9",
                        "optimizer.beta2=0.98",
                        "optimizer.epsilon=1e-6",
                        "batch.size=16",
                        "model.dropout=0.1",
                    ],
                    5,
                )
            }
            ModelKind::Gpt2 => (
                &[
                    "optimizer.learning_rate=5e-6",
                    "optimizer.beta1=0.9",
                    "optimizer.beta2=0.999",
                    "optimizer.epsilon=1e-8",
                    "batch.size=32",
                    "model.dropout=0.0",
                ],
                3,
            ),
        }
    }
}

/// The warm-up takes one of this many steps.
const WARMUP: u32 = 10;

/// The configuration of a fine-tuning, and its examples.
pub(crate) fn configured(
    configure: &Configure,
    name: &str,
    epochs: Option<u32>,
    pretrained: &Pretrained,
) -> Result<(Config, Examples)> {
    let task = task::find(name);
    let is_span = task.is_some_and(|task| task.labels == Labels::Span);
    let (usual, usual_epochs) = pretrained.usual(is_span);
    let mut given = pretrained.shape.clone();
    given.extend(usual.iter().map(|&setting| setting.to_owned()));
    let always = [
        "method.name=\"dense\"",
        "optimizer.name=\"adamw\"",
        "optimizer.schedule=\"cosine\"",
        "optimizer.min_learning_rate=0.0",
        "optimizer.warmup_learning_rate=0.0",
        "optimizer.cooldown_steps=0",
        "optimizer.decay_steps=0",
        "optimizer.weight_decay=0.0",
        "optimizer.max_grad_norm=0.0",
        "batch.gradient_accumulation_steps=1",
        "batch.final_gradient_accumulation_steps=0",
        "run.flip_every=0",
    ];
    given.extend(always.map(str::to_owned));
    given.push(format!("task.name={}", quote(name)));
    // An unknown task is refused with the configuration.
    let is_value = task.is_some_and(|task| task.labels == Labels::Value);
    let least = if is_value { 1 } else { 2 };
    given.push(format!("task.outputs={least}"));
    if is_span {
        given.push(format!("task.stride={}", task::STRIDE));
        // The paper's batches are a quarter of those of sentences.
        given.extend((pretrained.kind == ModelKind::Gpt2).then(|| "batch.size=8".to_owned()));
    }
    let preset = pretrained.preset.as_deref();
    let resolve = |given: &[String]| configure.resolve_on(preset, given);
    let mut first = resolve(&given)?;
    if is_span && first.task.max_length == 0 {
        let length = task::WINDOW.min(first.model.sequence_length);
        given.push(format!("task.max_length={length}"));
        first = resolve(&given)?;
    }
    if first.task.name != name {
        let problem = format!("expected {name:?}, as --task, found {:?}", first.task.name);
        return Err(Error::setting("task.name", problem).into());
    }
    let Pretrained { path, spec, tokenizer, .. } = pretrained;
    if let Some(problem) = contradiction(&first, spec, Some(tokenizer))? {
        return Err(Failure::new(Exit::Input, format!("{}: {problem}", path.display())));
    }
    if first.data.path.is_empty() {
        let problem = format!("--data: name the folder with the files of {name}");
        return Err(Failure::new(Exit::Usage, problem));
    }
    let examples = open(&first, tokenizer)?;
    let per_step = first.batch.size * first.batch.gradient_accumulation_steps as usize;
    let epochs = epochs.unwrap_or(usual_epochs) as usize;
    let count = |examples: usize| u32::try_from(examples.div_ceil(per_step)).unwrap_or(u32::MAX);
    let steps = count(examples.train.len().saturating_mul(epochs));
    let epoch = count(examples.train.len());
    // Shorter sequences cost less, and padding changes nothing.
    let length = examples.longest().next_multiple_of(8).min(first.batch_length());
    given.push(format!("steps={steps}"));
    given.extend([
        format!("task.outputs={}", examples.outputs()),
        format!("task.classes={}", classes(&examples)),
        format!("task.max_length={length}"),
        format!("optimizer.warmup_steps={}", resolve(&given)?.steps / WARMUP),
        format!("run.eval_every={epoch}"),
        format!("run.checkpoint_every={epoch}"),
    ]);
    let config = resolve(&given)?;
    // They may take much memory.
    drop(examples);
    let examples = open(&config, tokenizer)?;
    if config.task.outputs != examples.outputs() {
        let problem = format!(
            "task.outputs: expected {}, the classes of the training split, found {}",
            examples.outputs(),
            config.task.outputs
        );
        return Err(Error::setting("task.outputs", problem).into());
    }
    Ok((config, examples))
}

/// The classes that a task finds in its training split.
fn classes(examples: &Examples) -> String {
    let is_found = examples.source.task.labels == Labels::Found;
    class_list(if is_found { &examples.classes } else { &[] })
}

/// Most bytes of a list of classes: a configuration of more than 64 KiB could not be read again.
const LONGEST_LIST: usize = 1 << 15;

/// Classes as a TOML list; without names, those of the data count, if a list would be too long.
pub(crate) fn class_list(names: &[String]) -> String {
    let list = names.iter().map(|name| quote(name)).collect::<Vec<_>>().join(", ");
    format!("[{}]", if list.len() <= LONGEST_LIST { &list } else { "" })
}

/// Prints how many examples there are, and how long.
pub(crate) fn note_examples(config: &Config, examples: &Examples) {
    note(format_args!(
        "{}: {} to train on, {} to validate, at most {} tokens each",
        config.task.name,
        counted(examples.train.len(), "example"),
        examples.validation.len(),
        config.batch_length()
    ));
    if examples.source.task.labels == Labels::Span {
        if examples.cut > 0 {
            let longer = if examples.cut == 1 { "question is" } else { "questions are" };
            note(format_args!(
                "{} {longer} longer than {LONGEST_QUESTION} tokens, or than half of the model's \
                 window, and will be truncated",
                examples.cut,
            ));
        }
    } else if examples.cut > 0 {
        let longer = if examples.cut == 1 { "example is" } else { "examples are" };
        note(format_args!(
            "{} {longer} longer than {} tokens and will be truncated",
            examples.cut,
            config.batch_length()
        ));
    }
}

/// The examples of a configuration.
pub(crate) fn open(config: &Config, tokenizer: &Tokenizer) -> Result<Examples, Error> {
    let source = config.task_source()?.expect("the configuration of a task");
    Examples::open(source, tokenizer)
}

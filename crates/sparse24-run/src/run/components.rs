//! Builds the parts of a run from its configuration: dataset, backend, trainer and batches. Nothing
//! is written.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use super::{
    directory::{CONFIG, SCAN, TOKENIZER, has_config, without_config},
    needs::Needs,
};
use crate::{
    Error, Result,
    checkpoint::State,
    config::{Config, DataConfig},
    data::{
        Dataset, Draw, EvaluationWindows, Opening, Progress, ReadAhead, Scan, Source, Tokenizer,
        TokenizerKind,
    },
    disk,
    images::{ImageBatches, Images},
    json, machine,
    task::{Examples, Judgement, TaskBatches},
    translation::{BeamSearch, Bleu, Pairs, TranslationBatches, TranslationEvaluation},
};
use sparse24_train::{
    backend::{Backend, op::HeadLoss},
    group::{Group, Solo},
    model::ModelSpec,
    nn::BatchShape,
    objective::{Batch, DataError, Evaluation, MaskedLm, Metrics, Objective},
    trainer::{Recipe, Trainer},
};

/// Reads the configuration of a run directory.
///
/// # Errors
/// [`Error::File`] for a directory without a run or a damaged configuration; [`Error::Io`].
pub fn run_config(run: &Path) -> Result<Config> {
    if has_config(run)? {
        let _confined = disk::confine(run)?;
        return Config::read(&run.join(CONFIG));
    }
    // A checkpoint, or the folder of them.
    let around = run
        .ancestors()
        .skip(1)
        .take(2)
        .find(|path| !path.as_os_str().is_empty() && matches!(has_config(path), Ok(true)));
    Err(around.map_or_else(
        || without_config(run),
        |around| {
            let advice = format!("it lies in a run, name {}", around.display());
            Error::file(run, format!("is not a run directory: it holds no {CONFIG}; {advice}"))
        },
    ))
}

/// Opens the data of a new run that is no fine-tuning.
///
/// # Errors
/// Errors from the data; [`Error::File`] for a corpus shorter than a sequence.
pub fn open_data(config: &Config) -> Result<RunData> {
    open_scanned(config, Opening::default())
}

/// Like [`open_data`]; `progress` is called with tokens read and tokens in all while foreign shards
/// are read whole. Text is read with the tokenizer, if one is given, and not with one for the text.
///
/// # Errors
/// Like [`open_data`].
pub fn open_data_with(
    config: &Config,
    tokenizer: Option<&Tokenizer>,
    progress: Progress<'_>,
) -> Result<RunData> {
    let tokenizer = tokenizer.cloned();
    open_scanned(config, Opening { tokenizer, progress: Some(progress), scan: None })
}

/// The data of a run.
#[derive(Debug, Clone)]
pub enum RunData {
    /// Text, to pre-train on.
    Text(Dataset),
    /// Labelled examples, to fine-tune on.
    Task(Examples),
    /// Classified images.
    Images(Images),
    /// Sentence pairs, to translate.
    Pairs(Arc<Pairs>),
}

impl From<Images> for RunData {
    fn from(images: Images) -> Self {
        Self::Images(images)
    }
}

impl From<Dataset> for RunData {
    fn from(dataset: Dataset) -> Self {
        Self::Text(dataset)
    }
}

impl From<Pairs> for RunData {
    fn from(pairs: Pairs) -> Self {
        Self::Pairs(pairs.into())
    }
}

impl From<Examples> for RunData {
    fn from(examples: Examples) -> Self {
        Self::Task(examples)
    }
}

impl RunData {
    /// Opens the data of a configuration. `tokenizer` is used for tasks, and for text whose
    /// tokenizer would otherwise be built from the text itself.
    pub(super) fn open(
        config: &Config,
        tokenizer: impl FnOnce() -> Result<Tokenizer>,
        scan: Option<Scan>,
    ) -> Result<Self> {
        if let Some(source) = config.task_source()? {
            return Ok(Examples::open(source, &tokenizer()?)?.into());
        }
        // Initial weights, or the run's earlier text, may already have set the vocabulary.
        let kind = config.data.tokenizer;
        let is_made = kind.has_pieces() || kind == TokenizerKind::Character;
        let tokenizer = is_made.then(|| tokenizer().ok()).flatten();
        open_scanned(config, Opening { tokenizer, scan, progress: None })
    }

    /// Whether it is what a configuration names.
    #[must_use]
    pub fn is_of(&self, config: &Config) -> bool {
        match self {
            Self::Text(dataset) => {
                let is_text = config.image_source().is_none() && config.pair_source().is_none();
                is_text && matches!(config.task(), Ok(None)) && dataset.is_of(&data_source(config))
            }
            Self::Task(examples) => {
                config.task_source().is_ok_and(|source| source.as_ref() == Some(&examples.source))
            }
            Self::Images(images) => config.image_source().as_ref() == Some(images.source()),
            Self::Pairs(pairs) => config.pair_source().as_ref() == Some(&pairs.source),
        }
    }

    /// Refuses text that is too short for the sequences of a configuration.
    ///
    /// # Errors
    /// [`Error::File`] with both numbers.
    pub fn check_context(&self, config: &Config) -> Result {
        match self {
            Self::Text(dataset) => dataset.check_context(config.model.sequence_length),
            _ => Ok(()),
        }
    }

    /// Its path, for messages.
    #[must_use]
    pub fn source(&self) -> &Path {
        match self {
            Self::Text(dataset) => dataset.source(),
            Self::Task(examples) => &examples.source.folder,
            Self::Images(images) => &images.source().folder,
            Self::Pairs(pairs) => &pairs.source.folder,
        }
    }

    /// The tokenizer; `None` for foreign shards and images, which have none.
    #[must_use]
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        match self {
            Self::Text(dataset) => dataset.tokenizer(),
            Self::Task(examples) => Some(examples.tokenizer()),
            Self::Images(_) => None,
            Self::Pairs(pairs) => Some(pairs.tokenizer()),
        }
    }

    /// The scan of foreign shards, to be kept beside the run.
    #[must_use]
    pub fn scan(&self) -> Option<&Scan> {
        match self {
            Self::Text(dataset) => dataset.scan(),
            Self::Task(_) | Self::Images(_) | Self::Pairs(_) => None,
        }
    }

    /// Every id is below it; of images, every class.
    #[must_use]
    pub fn vocabulary(&self) -> u32 {
        match self {
            Self::Text(dataset) => dataset.vocabulary(),
            Self::Task(examples) => examples.tokenizer().vocabulary(),
            Self::Images(images) => images.classes().len() as u32,
            Self::Pairs(pairs) => pairs.tokenizer().vocabulary(),
        }
    }

    /// Reads the batches of a rank ahead, if they are on disk.
    pub(super) fn read_ahead(&self, trainer: &mut Trainer) -> Option<ReadAhead> {
        let Self::Text(dataset) = self else { return None };
        let (rank, world) = (trainer.group().rank(), trainer.group().world());
        let ahead = || ReadAhead::new(trainer.recipe().gradient_accumulation, rank, world);
        (!dataset.train().shards().is_empty()).then(ahead)
    }

    /// The batches of a recipe.
    pub(super) fn batches<'a>(
        &'a self,
        recipe: &Recipe,
        ahead: Option<&'a ReadAhead>,
    ) -> Box<dyn Objective + 'a> {
        let (seed, shape, accumulation) = (recipe.seed, recipe.batch, recipe.gradient_accumulation);
        match self {
            Self::Text(dataset) => {
                let windows = CausalLm { dataset, seed, shape, ahead };
                let masked = masked_lm(recipe, self.tokenizer());
                Box::new(Batches { windows, masked, sequence_length: shape.sequence_length })
            }
            Self::Task(examples) => Box::new(TaskBatches::new(examples, seed, shape, accumulation)),
            Self::Images(images) => Box::new(ImageBatches { images, seed, shape, accumulation }),
            Self::Pairs(pairs) => {
                Box::new(TranslationBatches { pairs, seed, most: shape, accumulation })
            }
        }
    }

    /// The validation split: of text as many tokens as asked for, 0 being all.
    #[must_use]
    pub fn evaluation<'a>(&'a self, recipe: &Recipe, tokens: usize) -> Box<dyn Evaluation + 'a> {
        let sequence_length = recipe.batch.sequence_length;
        match self {
            Self::Text(dataset) => {
                let windows = dataset.evaluation_windows(sequence_length, tokens);
                let masked = masked_lm(recipe, self.tokenizer());
                Box::new(Batches { windows, masked, sequence_length })
            }
            Self::Task(examples) => {
                Box::new(TaskBatches::new(examples, 0, recipe.batch, recipe.gradient_accumulation))
            }
            Self::Images(images) => {
                let (shape, accumulation) = (recipe.batch, recipe.gradient_accumulation);
                Box::new(ImageBatches { images, seed: 0, shape, accumulation })
            }
            Self::Pairs(pairs) => Box::new(TranslationEvaluation::new(pairs, tokens)),
        }
    }

    /// The BLEU of a model's translations of the validation split, by the
    /// [usual](BeamSearch::usual) search; none of other models. `progress` is called with sentences
    /// done and all.
    ///
    /// # Errors
    /// Errors of [`BeamSearch::translate`].
    pub fn bleu(
        &self,
        trainer: &mut Trainer,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<Option<f64>> {
        let Self::Pairs(pairs) = self else { return Ok(None) };
        let (split, tokenizer) = (&pairs.validation, pairs.tokenizer());
        let sources: Vec<&[u32]> = (0..split.len()).map(|number| split.pair(number)[0]).collect();
        let search = BeamSearch::usual(trainer, tokenizer);
        let found = search.translate(trainer, &sources, |done| progress(done, sources.len()))?;
        let mut bleu = Bleu::default();
        for (translation, reference) in found.iter().zip(&pairs.references) {
            let found = tokenizer.decode(&translation.tokens)?;
            bleu.add([&String::from_utf8_lossy(&found), reference]);
        }
        Ok(Some(bleu.score()))
    }

    /// Refuses text of which an evaluation would mask no token.
    pub(super) fn check_evaluation(&self, recipe: &Recipe, tokens: usize) -> Result {
        let Self::Text(_) = self else { return Ok(()) };
        let (data, mut batch) = (self.evaluation(recipe, tokens), Batch::default());
        for first in 0..data.sequences() {
            data.fill(first, BatchShape { size: 1, ..recipe.batch }, &mut batch)
                .map_err(sparse24_train::Error::from)?;
            if batch.counted > 0 {
                return Ok(());
            }
        }
        Err(self.no_target())
    }

    fn no_target(&self) -> Error {
        let problem = "none of its validation tokens is a target, and a BERT predicts 15 % of \
            them; evaluate on more text";
        Error::file(self.source(), problem)
    }

    /// Evaluates a model on the validation split: its loss, and the judgement of a fine-tuned one.
    ///
    /// # Errors
    /// [`Error::File`] for text without a masked token; errors of [`Trainer::evaluate`].
    ///
    /// # Panics
    /// Like [`Trainer::evaluate`].
    pub fn judge(
        &self,
        trainer: &mut Trainer,
        data: &dyn Evaluation,
        size: usize,
    ) -> Result<(Metrics, Judgement)> {
        match self {
            Self::Text(_) | Self::Pairs(_) => match trainer.evaluate(data, size)? {
                Metrics { targets: 0, .. } => Err(self.no_target()),
                metrics => Ok((metrics, Judgement::default())),
            },
            Self::Task(examples) => {
                let keep = |number, outputs: &[f32]| examples.keep(number, outputs);
                let (metrics, kept) = trainer.predict(data, size, keep)?;
                Ok((metrics, examples.judge(&kept)))
            }
            Self::Images(images) => {
                let keep = |number, outputs: &[f32]| vec![images.rank(number, outputs)];
                let (metrics, ranks) = trainer.predict(data, size, keep)?;
                Ok((metrics, images.judge(&ranks)))
            }
        }
    }
}

/// Scores of a fine-tuned model by name.
pub type Scores = BTreeMap<String, f64>;

/// Opens the data of a run, with the tokenizer that the checkpoint state `saved` records.
pub(super) fn data_of(run: &Path, config: &Config, saved: Option<&State>) -> Result<RunData> {
    // It only saves time, so a damaged one is as good as none.
    let scan = disk::read_small(&run.join(SCAN), 64 << 20).ok();
    let scan = scan.and_then(|text| json::parse(&text, json::VALUES).ok());
    let task = config.task()?;
    let tokenizer = || {
        let path = run.join(TOKENIZER);
        let own = Tokenizer::load(&path).map_err(|error| {
            error.expecting(
                "the tokenizer of the model that it started from; copy it from there, or from an \
                    import of that model",
            )
        })?;
        let kind = config.data.tokenizer;
        match saved {
            _ if task.is_none() && own.kind() != kind => {
                Err(Error::file(path, format!("is not a tokenizer of the kind {}", kind.name())))
            }
            Some(saved) if saved.tokenizer == own.fingerprint().into() => Ok(own),
            // Before the first checkpoint, a character tokenizer is rebuilt from the data.
            None if task.is_some() || kind != TokenizerKind::Character => Ok(own),
            _ => Err(Error::file(
                path,
                "is not the tokenizer of the run's checkpoint; restore the original file",
            )),
        }
    };
    RunData::open(config, tokenizer, scan)
}

/// Keeps the scan of the data of a run.
pub(super) fn record_scan(run: &Path, scan: &Scan) -> Result {
    let text = serde_json::to_vec_pretty(scan).expect("plain values");
    disk::write_atomically(&run.join(SCAN), &text)
}

/// The data that a configuration names.
#[must_use]
pub fn data_source(config: &Config) -> Source {
    let DataConfig { path, tokenizer, validation_share, .. } = &config.data;
    let path = (!path.is_empty()).then(|| path.into());
    Source { path, kind: Some(*tokenizer), validation: *validation_share }
}

fn open_scanned(config: &Config, opening: Opening<'_>) -> Result<RunData> {
    if let Some(task) = config.task()? {
        bail!(
            setting = "task.name",
            "expected \"\", found {:?}, for `sparse24 finetune`",
            task.name
        );
    }
    if let Some(source) = config.image_source() {
        return Ok(Images::open(source)?.into());
    }
    if let Some(source) = config.pair_source() {
        config.check_corpus()?;
        return Ok(Pairs::open(source, opening.tokenizer)?.into());
    }
    let data = RunData::from(Dataset::open_scanned(data_source(config), opening)?);
    data.check_context(config).map(|()| data)
}

/// The token ids of a model: as many as its data need, or as the rows of the table of tokens that a
/// run starts from or has saved, which may be padded.
pub(super) fn vocabulary(config: &Config, data: &RunData, rows: usize) -> usize {
    config.model.vocabulary(data.vocabulary(), data.tokenizer()).max(rows)
}

/// A trainer at step 0, if this machine has enough memory.
pub(super) fn new_trainer(config: &Config, vocabulary: usize) -> Result<Trainer> {
    trainer_in(Box::new(Solo), config, vocabulary)
}

/// The same, in a group.
pub(super) fn trainer_in(
    group: Box<dyn Group>,
    config: &Config,
    vocabulary: usize,
) -> Result<Trainer> {
    let recipe = config.recipe(vocabulary)?;
    check_memory(config, &recipe, group.on_this_machine())?;
    Ok(Trainer::in_group(open_backend(config)?, recipe, group)?)
}

/// Checks that the main memory suffices for `ranks` ranks.
pub(super) fn check_memory(config: &Config, recipe: &Recipe, ranks: usize) -> Result {
    let needed = Needs::of(config, recipe, config.steps)?.memory;
    let problem = machine::memory().and_then(|memory| memory.refuses(needed, ranks));
    let problem = problem.or_else(|| machine::lacks_address_space(needed));
    problem.map_or(Ok(()), |problem| Err(Error::setting("model", problem)))
}

/// [`Recipe::check_tensors`] for the device of a configuration; `false` if no adapter was found.
///
/// # Errors
/// [`Error::Setting`]; errors from the backend.
pub fn check_tensors(config: &Config, recipe: &Recipe) -> Result<bool> {
    let device = (config.backend_entry()?.device_capabilities)(config.backend.gpu)?;
    device.map_or(Ok(()), |device| recipe.check_tensors(device, 1))?;
    Ok(device.is_some())
}

/// Opens the backend of the configuration.
pub(super) fn open_backend(config: &Config) -> Result<Box<dyn Backend>> {
    Ok((config.backend_entry()?.open)(config.backend.settings())?)
}

/// Next-token prediction on windows of a dataset.
#[derive(Debug, Clone, Copy)]
pub struct CausalLm<'a> {
    /// The data.
    pub dataset: &'a Dataset,
    /// Seed of the run.
    pub seed: u64,
    /// Shape of a micro-batch.
    pub shape: BatchShape,
    /// Reads the next batch on a thread.
    pub ahead: Option<&'a ReadAhead>,
}

impl Objective for CausalLm<'_> {
    fn fill(&self, step: u32, micro_step: u32, batch: &mut Batch) -> Result<(), DataError> {
        let BatchShape { size: sequences, sequence_length: context } = self.shape;
        let draw = Draw { seed: self.seed, step, micro_step, sequences, context };
        batch.clear();
        let Batch { tokens, targets, .. } = batch;
        match self.ahead {
            Some(ahead) => ahead.batch(self.dataset, draw, tokens, targets)?,
            None => self.dataset.batch(draw, tokens, targets)?,
        }
        batch.counted = batch.targets.len();
        Ok(())
    }
}

/// The masked-token objective of a model that has one. Its mask token is the tokenizer's, or the
/// last id if the tokenizer has none.
#[must_use]
pub fn masked_lm(recipe: &Recipe, tokenizer: Option<&Tokenizer>) -> Option<MaskedLm> {
    let (ModelSpec::Bert(spec) | ModelSpec::CrammedBert(spec)) = &recipe.model else {
        return None;
    };
    if spec.prediction.is_some() {
        return None;
    }
    let special_tokens = tokenizer.map(Tokenizer::special_tokens).unwrap_or_default();
    let (mask_token, vocabulary) = match (tokenizer, special_tokens.last()) {
        (Some(tokenizer), Some(&mask_token)) => (mask_token, tokenizer.vocabulary()),
        _ => [spec.vocabulary as u32 - 1; 2].into(),
    };
    let (seed, probability) = (recipe.seed, spec.mask_probability);
    Some(MaskedLm { seed, probability, mask_token, vocabulary, special_tokens })
}

/// Batches of next-token prediction, turned into those of a model: masked, if there is a rule.
#[derive(Debug, Clone)]
pub struct Batches<T> {
    /// Next-token prediction.
    pub windows: T,
    /// See [`masked_lm`].
    pub masked: Option<MaskedLm>,
    /// Tokens per sequence.
    pub sequence_length: usize,
}

impl<T: Objective> Objective for Batches<T> {
    fn fill(&self, step: u32, micro_step: u32, batch: &mut Batch) -> Result<(), DataError> {
        self.windows.fill(step, micro_step, batch)?;
        if let Some(rule) = &self.masked {
            rule.mask(step, micro_step, self.sequence_length, batch);
        }
        Ok(())
    }
}

/// A sequence is masked as micro-step (its number) of step 0, so that the size of a batch decides
/// nothing.
impl<T: Evaluation> Evaluation for Batches<T> {
    fn sequences(&self) -> usize {
        self.windows.sequences()
    }

    fn fill(&self, first: usize, shape: BatchShape, batch: &mut Batch) -> Result<(), DataError> {
        self.windows.fill(first, shape, batch)?;
        let Some(rule) = &self.masked else { return Ok(()) };
        let mut masked = Batch::default();
        let sequences = batch.tokens.chunks(self.sequence_length);
        let sequences = sequences.zip(batch.targets.chunks(self.sequence_length));
        for (number, (tokens, targets)) in (first as u32..).zip(sequences) {
            let mut part = Batch::default();
            part.tokens.extend(tokens);
            let length = targets.iter().filter(|&&target| target != HeadLoss::IGNORE).count();
            part.lengths.push(length as u32);
            rule.mask(0, number, self.sequence_length, &mut part);
            masked.tokens.append(&mut part.tokens);
            masked.targets.append(&mut part.targets);
            masked.lengths.append(&mut part.lengths);
            masked.counted += part.counted;
        }
        *batch = masked;
        Ok(())
    }
}

impl Evaluation for EvaluationWindows<'_> {
    fn sequences(&self) -> usize {
        EvaluationWindows::count(*self)
    }

    fn fill(&self, first: usize, shape: BatchShape, batch: &mut Batch) -> Result<(), DataError> {
        batch.clear();
        let Batch { tokens, targets, .. } = batch;
        batch.counted = EvaluationWindows::fill(*self, first, shape.size, tokens, targets)?;
        Ok(())
    }
}

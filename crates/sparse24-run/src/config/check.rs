//! Checks a configuration and turns it into a recipe for the trainer.

use std::{collections::BTreeSet, num::NonZeroU32, path::Path};

use super::{
    Config, ModelConfig, ModelKind,
    document::{LONGEST, check_whole_numbers},
    preset, unknown,
    unknown::refuse,
};
use crate::{
    Error, Result,
    data::{FEWEST, TokenizerKind, is_shards},
    images::Augmentation,
    task::Labels,
    translation::LENGTHS,
};
use sparse24_cpu::MOST_THREADS;
use sparse24_train::{
    backend::{BACKEND_NAMES, BACKENDS, BackendEntry, Exchange},
    limits::{self, MOST, MOST_GROWN, MOST_LAYERS},
    method::Method,
    model::{BertSpec, DeitSpec, Gpt2Spec, ModelSpec, TransformerSpec},
    nn::{BatchShape, Bias, Prediction},
    objective::MASKED,
    schedule::{Decay, GradientAccumulation},
    trainer::Recipe,
};

/// Width of a crammed BERT's pooler in the code of the paper's authors.
const CRAMMED_POOLER: usize = 1024;

impl Config {
    /// Checks that the configuration can be trained.
    ///
    /// # Errors
    /// [`Error::Setting`] names the first key that is wrong.
    pub fn check(&self) -> Result {
        let length = self.to_toml().len() as u64;
        if length > LONGEST {
            bail!(
                setting = "task.classes",
                "the configuration takes {length} bytes, expected at most {LONGEST}, which can be \
                 read again; leave the names out"
            );
        }
        let Self { model, optimizer, batch, run, .. } = self;
        let sizes = [
            ("model.layers", model.layers),
            ("model.heads", model.heads),
            ("model.d_model", model.d_model),
            ("model.d_ff", model.d_ff),
            ("model.sequence_length", model.sequence_length),
            ("batch.size", batch.size),
            ("batch.gradient_accumulation_steps", batch.gradient_accumulation_steps as usize),
            ("run.keep_last", run.keep_last),
            ("run.spike_window", run.spike_window),
        ];
        for (key, size) in [("steps", self.steps as usize)].into_iter().chain(sizes) {
            if size == 0 {
                return refuse(key, "at least 1", 0);
            }
        }
        let (first, last) =
            (batch.gradient_accumulation_steps, batch.final_gradient_accumulation_steps);
        if (1..first).contains(&last) {
            let expected = format!(
                "at least batch.gradient_accumulation_steps {first}, or 0 for as many in every step"
            );
            return refuse("batch.final_gradient_accumulation_steps", &expected, last);
        }
        let may_be_zero = [
            ("batch.final_gradient_accumulation_steps", last as usize),
            ("model.image_size", model.image_size),
            ("model.patch_size", model.patch_size),
        ];
        for (key, size) in sizes.into_iter().chain(may_be_zero) {
            let most = match key {
                "model.layers" => MOST_LAYERS,
                "batch.final_gradient_accumulation_steps" => MOST_GROWN,
                _ => MOST,
            };
            if size > most {
                return refuse(key, &format!("at most {most}"), size);
            }
        }
        if self.backend.threads > MOST_THREADS {
            let expected = format!("at most {MOST_THREADS}, 0 for one per core");
            return refuse("backend.threads", &expected, self.backend.threads);
        }
        if self.backend.exchange == Exchange::Nccl && self.backend.name != "cuda" {
            let found = format!("nccl with {}", self.backend.name);
            return refuse("backend.exchange", "auto or tcp, or the backend cuda", found);
        }
        let (has_biases, expected) = match model.kind {
            ModelKind::Gpt2 => (model.bias, ""),
            ModelKind::Bert => (true, "true for a BERT, whose layers have biases"),
            ModelKind::Deit => (true, "true for a DeiT, whose layers have biases"),
            ModelKind::Transformer => (true, "true for a Transformer, whose layers have biases"),
            ModelKind::CrammedBert => {
                (false, "false for a crammed BERT, whose linear layers have no biases")
            }
        };
        if model.bias != has_biases {
            return refuse("model.bias", expected, model.bias);
        }
        self.check_images()?;
        self.check_translation()?;
        // A narrower model is rounded to whole tiles.
        if !model.d_ff.is_multiple_of(4) {
            return refuse("model.d_ff", "a multiple of 4, for 4x4 tiles", model.d_ff);
        }
        // A recipe has no lambda where the method decays nothing, and no clipping where this is 0.
        for (key, magnitude) in [
            ("method.lambda", self.method.lambda),
            ("optimizer.max_grad_norm", optimizer.max_grad_norm),
            ("run.spike_z", run.spike_z),
        ] {
            limits::magnitude(key, magnitude)?;
        }
        optimizer.check()?;
        let longest = model.sequence_length;
        if self.task.max_length > longest {
            let expected = format!("at most model.sequence_length {longest}");
            return refuse("task.max_length", &expected, self.task.max_length);
        }
        if let Some(task) = self.task()? {
            let outputs = self.task.outputs;
            let (least, most) = match task.labels {
                Labels::Value => (1, 1),
                Labels::Span => (2, 2),
                Labels::Named(_) | Labels::Found => (2, MOST),
            };
            if !(least..=most).contains(&outputs) {
                return refuse("task.outputs", &format!("{least} to {most}"), outputs);
            }
            let classes = self.task.classes.len();
            let most = if task.labels == Labels::Found { outputs } else { 0 };
            if classes > 0 && classes != most {
                let expected = format!("as many as task.outputs of a task that finds them, {most}");
                return refuse("task.classes", &expected, classes);
            }
            let mut seen = BTreeSet::new();
            if let Some(name) = self.task.classes.iter().find(|name| !seen.insert(*name)) {
                bail!(setting = "task.classes", "holds {name:?} twice");
            }
            if task.labels == Labels::Span && self.task.stride == 0 {
                return refuse("task.stride", "at least 1 token", 0);
            }
        }
        let share = self.data.validation_share;
        if !(share > 0.0 && share < 1.0) {
            return refuse("data.validation_share", "a share above 0 and below 1", share);
        }
        let backend = self.backend_entry()?;
        let capabilities = (backend.capabilities)();
        capabilities.check_arithmetic(self.backend.arithmetic)?;
        self.method_value()?.check(self.steps)?;
        // Last: a limit of a key's own says more.
        check_whole_numbers(self)?;
        // No backend limits the vocabulary, which only the corpus knows.
        Ok(self.recipe(1)?.check(&capabilities)?)
    }

    /// Refuses settings of images for a model of text, and those that are none.
    fn check_images(&self) -> Result {
        let Self { model, augmentation, .. } = self;
        let zero_to_one = |rate: f32| (0.0..=1.0).contains(&rate);
        let alpha = |alpha: f32| alpha == 0.0 || (0.05..=2.0).contains(&alpha);
        let &Augmentation { rand_augment, rand_augment_deviation, mixup, cutmix, .. } =
            augmentation;
        let rows = [
            ("flip", augmentation.flip, zero_to_one(augmentation.flip), "0 to 1"),
            ("rand_augment", rand_augment, (0.0..=10.0).contains(&rand_augment), "0 to 10"),
            (
                "rand_augment_deviation",
                rand_augment_deviation,
                (0.0..=10.0).contains(&rand_augment_deviation),
                "0 to 10",
            ),
            (
                "random_erasing",
                augmentation.random_erasing,
                zero_to_one(augmentation.random_erasing),
                "0 to 1",
            ),
            ("mixup", mixup, alpha(mixup), "0, or 0.05 to 2"),
            ("cutmix", cutmix, alpha(cutmix), "0, or 0.05 to 2"),
        ];
        for (key, found, is_fine, expected) in rows {
            if !is_fine {
                return refuse(&format!("augmentation.{key}"), expected, found);
            }
        }
        if model.kind == ModelKind::Deit {
            if !self.task.name.is_empty() {
                return refuse(
                    "task.name",
                    "none for a DeiT, which reads no text",
                    &self.task.name,
                );
            }
            return Ok(());
        }
        let sizes = [
            ("model.image_size", model.image_size as f32),
            ("model.patch_size", model.patch_size as f32),
            ("model.drop_path", model.drop_path),
            ("augmentation.repeats", augmentation.repeats as f32),
        ];
        let rates = rows.map(|(key, rate, ..)| (format!("augmentation.{key}"), rate));
        let sizes = sizes.map(|(key, size)| (key.to_owned(), size));
        match sizes.into_iter().chain(rates).find(|&(_, value)| value != 0.0) {
            Some((key, value)) => refuse(&key, "0, as only a DeiT has images", value),
            None => Ok(()),
        }
    }

    /// Refuses settings of translation for another model, and those that are none.
    fn check_translation(&self) -> Result {
        let Self { model, data, .. } = self;
        if model.kind != ModelKind::Transformer {
            if model.kind != ModelKind::Deit && model.label_smoothing != 0.0 {
                let expected = "0 but for a Transformer or a DeiT";
                return refuse("model.label_smoothing", expected, model.label_smoothing);
            }
            let rows = [
                ("data.source", format!("{:?}", data.source), "\"\""),
                ("data.target", format!("{:?}", data.target), "\"\""),
                ("data.vocabulary", data.vocabulary.to_string(), "0"),
            ];
            return match rows.into_iter().find(|(_, found, unset)| found != unset) {
                Some((key, found, unset)) => {
                    let expected = format!("{unset}, as only a Transformer has sentence pairs");
                    refuse(key, &expected, found)
                }
                None => Ok(()),
            };
        }
        if (1..FEWEST).contains(&data.vocabulary) {
            let expected = format!("0 or at least {FEWEST}: all bytes and four special tokens");
            return refuse("data.vocabulary", &expected, data.vocabulary);
        }
        if !model.sequence_length.is_multiple_of(LENGTHS) {
            let expected = format!("a multiple of {LENGTHS}, as the lengths of batches are");
            return refuse("model.sequence_length", &expected, model.sequence_length);
        }
        if !matches!(data.tokenizer, TokenizerKind::Bpe | TokenizerKind::Dictionary) {
            let expected = "bpe or dictionary for a Transformer";
            return refuse("data.tokenizer", expected, data.tokenizer.name());
        }
        for (key, language) in [("data.source", &data.source), ("data.target", &data.target)] {
            if language.is_empty() || language.contains(['/', '\\']) {
                let expected = "the language of its files, such as \"en\" for train.en";
                return refuse(key, expected, format!("{language:?}"));
            }
        }
        if data.source == data.target {
            return refuse("data.target", "a language other than data.source", &data.target);
        }
        match self.task.name.is_empty() {
            true => Ok(()),
            false => refuse("task.name", "none for a Transformer", &self.task.name),
        }
    }

    /// Refuses to train a preset for a large corpus on the embedded text, which would only memorize
    /// it.
    ///
    /// # Errors
    /// [`Error::Setting`] for an empty `data.path` where the preset has [`preset::Corpus::Named`].
    pub fn check_corpus(&self) -> Result {
        if self.data.path.is_empty() && self.model.kind == ModelKind::Deit {
            bail!(
                setting = "data.path",
                "a DeiT needs images: name a folder with --data that holds train and \
                val, each with a folder of JPEG or PNG images for each class"
            );
        }
        if self.data.path.is_empty() && self.model.kind == ModelKind::Transformer {
            bail!(
                setting = "data.path",
                "a Transformer learns from a folder of sentence pairs, such as train.en \
                and train.de; name one with --data"
            );
        }
        if self.data.path.is_empty() && preset::corpus(&self.preset) == preset::Corpus::Named {
            let what = match self.preset.as_str() {
                preset::IMPORTED => "an imported model was not trained on".to_owned(),
                preset => format!("the preset {preset:?} is for a large corpus and not for"),
            };
            bail!(setting = "data.path", "{what} the embedded text; name its data with --data");
        }
        Ok(())
    }

    /// Warnings about settings that are valid but probably unintended.
    #[must_use]
    pub fn remarks(&self) -> Vec<String> {
        let (warmup, steps) = (self.optimizer.warmup_steps, self.steps);
        let mut remarks = Vec::new();
        if warmup >= steps {
            remarks.push(format!(
                "warm-up (optimizer.warmup_steps = {warmup}) does not end within the run (steps \
                    = {steps})"
            ));
        }
        let schedule = self.optimizer.schedule(steps);
        let decaying = schedule.decay_steps.saturating_sub(warmup);
        if schedule.decay == Decay::Wsd && warmup < steps && schedule.cooldown_steps > decaying {
            remarks.push(format!(
                "the cooldown (optimizer.cooldown_steps = {}) is longer than the {decaying} steps \
                    after the warm-up, so the learning rate does not reach its peak",
                schedule.cooldown_steps
            ));
        }
        let (learning_rate, min_learning_rate) =
            (self.optimizer.learning_rate, self.optimizer.min_learning_rate);
        if min_learning_rate > learning_rate {
            remarks.push(format!(
                "the learning rate rises after the warm-up, because optimizer.min_learning_rate \
                    ({min_learning_rate}) is above optimizer.learning_rate ({learning_rate})"
            ));
        }
        if self.lambda().is_none() && preset::own_lambda(self) != Some(self.method.lambda) {
            let name = &self.method.name;
            remarks.push(format!("method.lambda has no effect: {name} has no masked decay"));
        }
        let share = self.data.validation_share;
        let path = &self.data.path;
        if is_shards(Path::new(path)) && share != Self::default().data.validation_share {
            remarks.push(format!(
                "data.validation_share has no effect: the folder {path} has a validation split"
            ));
        }
        remarks
    }

    /// The factor of masked decay, if the method has masked decay.
    #[must_use]
    pub fn lambda(&self) -> Option<f32> {
        self.method_value().ok()?.decay.lambda()
    }

    /// The step at which the warm-up ends, within the run; without warm-up a twentieth of the run.
    #[must_use]
    pub fn warmup_end(&self) -> u32 {
        let warmup = self.optimizer.warmup_steps;
        (if warmup > 0 { warmup } else { self.steps / 20 }).clamp(1, self.steps.max(1))
    }

    /// The backend of `backend.name`.
    ///
    /// # Errors
    /// [`Error::Setting`] for an unknown name, and for a backend that this build lacks.
    pub fn backend_entry(&self) -> Result<&'static BackendEntry> {
        named(&self.backend.name, BACKENDS)
    }

    /// The method as a value. Shares of a run are of its micro-batches: where their number per step
    /// grows, a phase ends after the last step that is wholly within its share.
    ///
    /// # Errors
    /// [`Error::Setting`] for an unknown name or choice.
    pub fn method_value(&self) -> Result<Method> {
        let (mut method, accumulation) = (self.method.value()?, self.gradient_accumulation());
        for phase in &mut method.phases {
            phase.until = phase.until.map(|share| accumulation.share_of_steps(share));
        }
        Ok(method)
    }

    /// Micro-batches per optimizer step.
    #[must_use]
    pub fn gradient_accumulation(&self) -> GradientAccumulation {
        let [first, last] =
            [self.batch.gradient_accumulation_steps, self.batch.final_gradient_accumulation_steps]
                .map(NonZeroU32::new);
        let first = first.unwrap_or(NonZeroU32::MIN);
        GradientAccumulation { first, last: last.unwrap_or(first), steps: self.steps }
    }

    /// The recipe for the trainer, for a vocabulary of this size.
    ///
    /// # Errors
    /// [`Error::Setting`] for an unknown method or choices that contradict each other.
    pub fn recipe(&self, vocabulary: usize) -> Result<Recipe> {
        let Self { model, optimizer, batch, .. } = self;
        let &ModelConfig { layers, heads, d_model, sequence_length, activation, sparsify, .. } =
            model;
        let label_smoothing = model.label_smoothing;
        let method = self.method_value()?;
        // Rounded down to whole tiles, but at least one.
        let narrowed = model.d_ff as u64 * u64::from(method.width.numerator())
            / u64::from(method.width.denominator());
        let d_ff = (narrowed as usize / 4 * 4).max(4);
        let prediction = self.task()?.map(|task| match task.labels {
            Labels::Value => Prediction::Value,
            Labels::Span => Prediction::Span,
            Labels::Named(_) | Labels::Found => Prediction::Class(self.task.outputs),
        });
        let bert = BertSpec {
            layers,
            heads,
            d_model,
            d_ff,
            sequence_length,
            vocabulary,
            activation,
            sparsify,
            mask_probability: MASKED,
            pooler: d_model,
            prediction,
        };
        Ok(Recipe {
            model: match model.kind {
                ModelKind::Gpt2 => ModelSpec::Gpt2(Gpt2Spec {
                    layers,
                    heads,
                    d_model,
                    d_ff,
                    sequence_length,
                    vocabulary,
                    activation,
                    bias: if model.bias { Bias::Present } else { Bias::Absent },
                    sparsify,
                    prediction,
                }),
                ModelKind::Bert => ModelSpec::Bert(bert),
                ModelKind::CrammedBert => {
                    ModelSpec::CrammedBert(BertSpec { pooler: CRAMMED_POOLER, ..bert })
                }
                ModelKind::Deit => ModelSpec::Deit(DeitSpec {
                    layers,
                    heads,
                    d_model,
                    d_ff,
                    image_size: model.image_size,
                    patch_size: model.patch_size,
                    classes: vocabulary,
                    activation,
                    sparsify,
                    drop_path: model.drop_path,
                    label_smoothing,
                }),
                ModelKind::Transformer => ModelSpec::Transformer(TransformerSpec {
                    layers,
                    heads,
                    d_model,
                    d_ff,
                    sequence_length,
                    vocabulary,
                    activation,
                    sparsify,
                    label_smoothing,
                }),
            },
            method,
            steps: self.steps,
            batch: BatchShape { size: batch.size, sequence_length: self.batch_length() },
            checkpointing: model.activation_checkpointing,
            gradient_accumulation: self.gradient_accumulation(),
            replicas: batch.replicas,
            dropout: model.dropout,
            optimizer: optimizer.optimizer(),
            weight_decay: optimizer.weight_decay,
            no_weight_decay: optimizer.no_weight_decay,
            ema_decay: Some(optimizer.ema_decay).filter(|&decay| decay > 0.0),
            schedule: optimizer.schedule(self.steps),
            seed: self.seed,
        })
    }
}

/// The backend of this name, of those of a build.
fn named<'a>(name: &str, built: &'a [BackendEntry]) -> Result<&'a BackendEntry> {
    built.iter().find(|entry| entry.name == name).ok_or_else(|| {
        if !BACKEND_NAMES.contains(&name) {
            return unknown("backend.name", name, BACKEND_NAMES.into_iter());
        }
        let problem = format!("this build lacks {name:?}; build it with the feature {name:?}");
        Error::setting("backend.name", problem)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_that_could_not_be_read_again_is_refused() {
        let mut config = Config::resolve(None, None, &[]).unwrap();
        config.check().unwrap();
        config.task.classes = vec!["a".repeat(26); 4000];
        let problem = config.check().unwrap_err().to_string();
        assert!(problem.starts_with("task.classes: ") && problem.contains("65536"), "{problem}");
    }

    #[test]
    fn a_backend_that_a_build_lacks_is_not_unknown() {
        for (name, problem) in [
            ("cuda", "this build lacks \"cuda\"; build it with the feature \"cuda\""),
            ("cudo", "\"cudo\" is not known; did you mean \"cuda\"? (known: cpu, cuda, wgpu)"),
        ] {
            let error = named(name, &BACKENDS[..1]).err().map(|error| error.to_string());
            assert_eq!(error, Some(format!("backend.name: {problem}")));
        }
    }
}

//! Models of transformers itself. `transformers.json` has, for each class, the names and shapes of
//! the file that its `save_pretrained` writes, and the logits and losses that it computes in f32.
//!
//! Its weights are a formula: the tensors in order of their names are numbered t = 0, 1, ..., and
//! element i of one has the value 0.3 sin(i + 100 t), a gain of a norm 1 more.

use serde::Deserialize;

use super::*;
use crate::config::preset;
use sparse24_train::{
    backend::op::HeadLoss,
    nn::BatchShape,
    objective::{Batch, DataError, Evaluation},
    trainer::{Recipe, Trainer},
};

/// Tokens `[2, 8]`, of which the last two of the second sequence are padding.
const TOKENS: [u32; 16] = [3, 1, 4, 1, 5, 9, 2, 6, 2, 7, 1, 8, 2, 8, 0, 0];
const LENGTHS: [u32; 2] = [8, 6];
const SHAPE: BatchShape = BatchShape { size: 2, sequence_length: 8 };

/// Sums of at most 16 products of numbers below 10, in f32, through two blocks: some hundreds of
/// roundings of relative size 2^-24 of numbers below 10.
const BOUND: f32 = 1e-4;

#[derive(Clone, Deserialize)]
pub(super) struct Class {
    pub(super) config: serde_json::Value,
    /// Names and shapes, in order of names.
    pub(super) stored: BTreeMap<String, Vec<usize>>,
    /// For each sequence, or for each of its tokens; of a span for the tokens that are no padding.
    pub(super) logits: Vec<Vec<f32>>,
    /// The losses of the tokens of the first sequence, each alone; or those of the sequences: of
    /// class 1, or of the span from 1 to 3.
    pub(super) losses: Vec<f32>,
}

fn classes() -> BTreeMap<String, Class> {
    serde_json::from_str(include_str!("transformers.json")).unwrap()
}

/// A folder as `save_pretrained` writes it.
pub(super) fn saved(class: &Class) -> (TempDir, PathBuf) {
    let stored: Vec<_> = class
        .stored
        .iter()
        .zip(0..)
        .map(|((name, shape), t)| {
            let gain = if name.ends_with("weight") && shape.len() == 1 { 1.0 } else { 0.0 };
            let value = |i: usize| (0.3 * (i as f64 + 100.0 * f64::from(t)).sin() + gain) as f32;
            let values: Vec<_> = (0..shape.iter().product()).map(value).collect();
            (name.as_str(), shape.as_slice(), values)
        })
        .collect();
    let tensors: Vec<_> =
        stored.iter().map(|(name, shape, values)| (*name, *shape, &**values)).collect();
    let (directory, path) = foreign(&tensors);
    fs::write(path.with_file_name(CONFIG), class.config.to_string()).unwrap();
    (directory, path)
}

pub(super) fn trainer(spec: &ModelSpec, weights: &[NamedTensor], batch: BatchShape) -> Trainer {
    let config = preset::imported();
    let recipe = config.recipe(spec.vocabulary()).unwrap();
    let recipe = Recipe { model: spec.clone(), batch, ..recipe };
    let backend = config.backend_entry().unwrap();
    let mut trainer =
        Trainer::new((backend.open)(config.backend.settings()).unwrap(), recipe).unwrap();
    let named: Vec<_> = weights.iter().map(|w| (w.name.as_str(), w.values.as_slice())).collect();
    trainer.start_from(&named).unwrap();
    trainer
}

/// One batch, with a target at these places, of a model that reads segments or not.
struct Targets(Vec<(usize, u32)>, bool);

impl Evaluation for Targets {
    fn sequences(&self) -> usize {
        SHAPE.size
    }

    fn fill(&self, _: usize, _: BatchShape, batch: &mut Batch) -> Result<(), DataError> {
        batch.clear();
        batch.tokens.extend(TOKENS);
        batch.targets.resize(TOKENS.len(), HeadLoss::IGNORE);
        let segments = (0..TOKENS.len()).map(|i| u32::from((4..8).contains(&i)));
        batch.segments.extend(segments.filter(|_| self.1));
        batch.lengths.extend(LENGTHS);
        for &(at, target) in &self.0 {
            batch.targets[at] = target;
        }
        batch.counted = self.0.len();
        Ok(())
    }
}

/// The model of a class and its weights, which are exported under the same names, and come back.
pub(super) fn returned(name: &str, class: &Class) -> (ModelSpec, Vec<NamedTensor>) {
    let (directory, _) = saved(class);
    let FolderModel { spec, languages, .. } = FolderModel::read(directory.path()).unwrap();
    let wanted = shapes(&spec).unwrap();
    let imported = import(directory.path(), format(&spec), &wanted).unwrap();
    let Imported { weights, dropped } = imported;
    assert!(dropped.is_empty(), "{name}");
    let folder = directory.path().join("out");
    let described = languages.each_ref().map(String::as_str);
    let description = Description { languages: described, ..describe(&spec) };
    export(&folder, &weights, description, Dtype::F32, Values::Dense).unwrap();
    let again = FolderModel::read(&folder).unwrap();
    assert!(again.spec == spec && again.languages == languages, "{name}");
    let found = import(&folder, format(&spec), &wanted).unwrap().weights;
    assert!(found == weights, "{name}: the weights came back different");
    let file = tensors::TensorFile::open(&folder.join(WEIGHTS)).unwrap();
    let stored = file.entries.iter().map(|entry| (entry.name.clone(), entry.shape.clone()));
    assert_eq!(stored.collect::<BTreeMap<_, _>>(), class.stored, "{name}");
    (spec, weights)
}

/// A model of this class with one key changed, which computes something else, is refused by it.
pub(super) fn refused(class: &Class, changes: &[(&str, &str, &str)]) {
    for (key, value, expected) in changes {
        let mut config = class.config.clone();
        config[key] = serde_json::from_str(value).unwrap();
        let (directory, _) = saved(&Class { config, ..class.clone() });
        let error = FolderModel::read(directory.path()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// `difference <= BOUND` for every number.
pub(super) fn close(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= BOUND, "{what}: {found}, expected {expected}");
    }
}

#[test]
fn models_have_the_names_and_outputs_of_transformers() {
    let classes = classes();
    assert_eq!(classes.len(), 6);
    for (name, class) in &classes {
        let (spec, weights) = returned(name, class);
        assert!(format(&spec).classes.contains(&name.as_str()), "{name}");
        let mut trainer = trainer(&spec, &weights, SHAPE);
        let is_bert = matches!(spec, ModelSpec::Bert(_));
        let flat: Vec<f32> = class.logits.iter().flatten().copied().collect();
        match spec.prediction() {
            Some(prediction) => {
                let is_span = prediction == Prediction::Span;
                let (places, target) = match is_span {
                    true => ([1, 9], 3),
                    false if is_bert => ([0, 8], 1),
                    false => ([7, 13], 1),
                };
                let targets = Targets(places.map(|at| (at, target)).to_vec(), is_bert);
                let keep = |_, outputs: &[f32]| outputs.to_vec();
                let predicted = trainer.predict(&targets, SHAPE.size, keep);
                let (metrics, mut outputs) = predicted.unwrap();
                outputs.truncate(flat.len());
                close(name, &outputs, &flat);
                close(name, &[metrics.loss() as f32], &[class.losses.iter().sum::<f32>() / 2.0]);
            }
            None if is_bert => {
                let losses = (0..8).map(|at| {
                    let targets = Targets(vec![(at, TOKENS[at])], is_bert);
                    trainer.evaluate(&targets, SHAPE.size).unwrap().loss() as f32
                });
                close(name, &losses.collect::<Vec<_>>(), &class.losses);
            }
            None => {
                let logits = (1..=8).map(|n| trainer.next_logits(&TOKENS[..n]).unwrap());
                close(name, &logits.flatten().collect::<Vec<_>>(), &flat);
            }
        }
    }
}

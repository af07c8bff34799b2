//! The Transformer against PyTorch, its decoding against whole forward passes, and batches of
//! several shapes.

use std::collections::{BTreeMap, BTreeSet};

use sparse24_core::op::Activation;
use sparse24_run::translation::{BeamSearch, Translation};
use sparse24_tests::oracle::{
    arithmetic::{Arithmetic, Matrix, Random, Tensors},
    layers::Address,
};
use sparse24_train::{
    Error,
    backend::op::HeadLoss,
    method::Method,
    model::{DecodingStep, ModelSpec, TransformerSpec, transformer},
    nn::BatchShape,
    objective::{Batch, DataError, Evaluation, Objective},
    optim::{Optimizer, UpdateRule},
    trainer::{FlipSampling, Recipe, Trainer},
};

use super::{
    fixture::{self, fst},
    oracle::{
        pass::{Dense, Pass, parameters},
        transformer::logits,
    },
};

const IGNORE: u32 = HeadLoss::IGNORE;
/// The token that starts and ends a sentence, and padding.
const END: u32 = 2;
const PADDING: u32 = 1;

/// One batch, whatever the step.
struct Fixed(Batch);

impl Objective for Fixed {
    fn fill(&self, _: u32, _: u32, batch: &mut Batch) -> Result<(), DataError> {
        batch.clone_from(&self.0);
        Ok(())
    }
}

impl Evaluation for Fixed {
    fn sequences(&self) -> usize {
        self.0.lengths.len()
    }

    fn fill(&self, _: usize, _: BatchShape, batch: &mut Batch) -> Result<(), DataError> {
        batch.clone_from(&self.0);
        Ok(())
    }
}

/// ReLU and label smoothing 0.1, for batches of at most this shape.
fn recipe(method: Method, batch: BatchShape) -> Recipe {
    let mut recipe = fixture::recipe(method);
    fixture::change(&mut recipe, |spec| {
        (spec.activation, spec.vocabulary) = (Activation::Relu, 13);
        spec.sequence_length = batch.sequence_length;
    });
    let recipe = fixture::transformer(Recipe { batch, ..recipe });
    let ModelSpec::Transformer(spec) = recipe.model else { unreachable!("it is one") };
    let model = ModelSpec::Transformer(TransformerSpec { label_smoothing: 0.1, ..spec });
    Recipe { model, ..recipe }
}

/// Sources and targets of two sentences; `tokens` are the targets, shifted.
fn sentences() -> Batch {
    let mut batch = Batch::default();
    batch.source = vec![4, 7, 12, 2, 1, 9, 2, 1, 1, 1];
    batch.tokens = vec![2, 5, 6, 1, 1, 2, 8, 4, 11, 3];
    batch.targets = vec![5, 6, 2, IGNORE, IGNORE, 8, 4, 11, 3, 2];
    (batch.lengths, batch.counted) = (vec![4, 2], 8);
    batch
}

/// The i-th element of the n-th parameter is sin(0.37 (i + 1) + 1.7 n) / 2, or of the gain of a
/// norm 1 plus half of that.
fn by_formula(spec: &ModelSpec) -> Vec<(String, Vec<f32>)> {
    let value = |n: usize, i: usize| (0.37 * (i + 1) as f64 + 1.7 * n as f64).sin();
    let fill = |(n, (name, [rows, columns])): (usize, (String, [usize; 2]))| {
        let is_gain = name.ends_with("layer_norm.weight");
        let of = |i| if is_gain { 1.0 + 0.25 * value(n, i) } else { 0.5 * value(n, i) };
        let values = (0..rows * columns).map(|i| of(i) as f32).collect();
        (name, values)
    };
    parameters(spec).into_iter().enumerate().map(fill).collect()
}

/// Numbers of a Transformer of `torch.nn.functional.multi_head_attention_forward`, `layer_norm` and
/// `linear`, with fairseq's sinusoids and its label-smoothed loss in the form eps / V; PyTorch 2.15
/// in f32.
#[test]
fn logits_and_losses_are_those_of_pytorch() {
    const LOGITS: [[f64; 13]; 2] = [
        [
            -1.531515, 1.331496, -1.087690, 0.808116, -0.501966, 0.179309, 0.149245, -0.472891,
            0.780986, -1.063397, 1.310839, -1.515173, 1.669680,
        ],
        [
            -0.635345, 0.572316, -0.490466, 0.392487, -0.281601, 0.161454, -0.035998, -0.090642,
            0.214301, -0.330913, 0.436643, -0.528013, 0.602020,
        ],
    ];
    let mut recipe = recipe(Method::dense(), BatchShape { size: 2, sequence_length: 5 });
    recipe.gradient_accumulation =
        sparse24_train::schedule::GradientAccumulation::constant(std::num::NonZeroU32::MIN);
    let mut trainer = Trainer::new(fixture::cpu(), recipe.clone()).expect("a valid recipe");
    fixture::start_from(&mut trainer, &by_formula(&recipe.model));
    let batch = Fixed(sentences());
    let loss = trainer.evaluate(&batch, 2).expect("no device fails").loss_sum;
    assert!((loss - 25.395_454).abs() <= 1e-4, "{loss}");
    // The decoder's path with cached keys and values.
    trainer.encode(&batch.0).expect("sources");
    let sources = recipe.batch;
    let mut found = Vec::new();
    for position in 0..5 {
        let tokens = [batch.0.tokens[position], batch.0.tokens[5 + position]];
        let parents = &[0, 1];
        let step = DecodingStep { sources, position, longest: 5, tokens: &tokens, parents };
        found.push(trainer.decode(&step).expect("a token each"));
    }
    for (found, expected) in [(&found[2][..13], &LOGITS[0]), (&found[4][13..], &LOGITS[1])] {
        for (found, expected) in found.iter().zip(expected) {
            assert!((f64::from(*found) - expected).abs() <= 1e-5, "{found} for {expected}");
        }
    }
    let outcome = fixture::step(&mut trainer, &batch);
    assert!((8.0 * outcome.loss - 25.157_534).abs() <= 1e-4, "{}", outcome.loss);
}

/// Nothing is decoded but the next tokens of hypotheses of the sources that were encoded last.
#[test]
fn a_decoding_step_out_of_place_is_refused() {
    const FAR: usize = usize::MAX;
    let recipe = recipe(Method::dense(), BatchShape { size: 2, sequence_length: 5 });
    let mut trainer = fixture::start(&recipe);
    let batch = Fixed(sentences());
    let shape = |size, sequence_length| BatchShape { size, sequence_length };
    let tokens: [&[u32]; 3] = [&[], &[2, 2, 2], &[2, 2]];
    let first = DecodingStep {
        sources: shape(2, 5),
        position: 0,
        longest: 5,
        tokens: tokens[2],
        parents: &[0, 1],
    };
    let second = DecodingStep { position: 1, ..first };
    let refused = |trainer: &mut Trainer, step: DecodingStep<'_>, what: &str| {
        let error = trainer.decode(&step).expect_err(what);
        let Error::Operand { operation: "decode", operand, expected, found } = error else {
            panic!("{step:?}: {error}");
        };
        assert!(operand == what && expected != found, "{step:?}: {error}");
    };
    refused(&mut trainer, first, "the sources");
    trainer.encode(&batch.0).expect("sources");
    for (step, what) in [
        (DecodingStep { sources: shape(0, 5), ..first }, "the sources"),
        (DecodingStep { sources: shape(9, 5), ..first }, "the sources"),
        (DecodingStep { sources: shape(2, 9), ..first }, "the sources"),
        (DecodingStep { tokens: tokens[0], parents: &[], ..first }, "tokens"),
        (DecodingStep { tokens: tokens[1], parents: &[0, 1, 2], ..first }, "tokens"),
        (DecodingStep { longest: 6, ..first }, "tokens"),
        (DecodingStep { longest: FAR, ..first }, "tokens"),
        (DecodingStep { longest: 0, ..first }, "tokens"),
        (DecodingStep { position: 5, ..first }, "the position"),
        (DecodingStep { position: FAR, ..first }, "the position"),
        (second, "the position"),
        (DecodingStep { parents: &[0], ..first }, "parents"),
        (DecodingStep { parents: &[0, 2], ..first }, "the largest parent"),
    ] {
        refused(&mut trainer, step, what);
    }
    trainer.decode(&first).expect("the first token");
    refused(&mut trainer, DecodingStep { longest: 4, ..second }, "the position");
    trainer.decode(&second).expect("the second token");
    trainer.evaluate(&batch, 2).expect("no device fails");
    refused(&mut trainer, first, "the sources");
    let mut without = batch.0.clone();
    without.source.clear();
    trainer.encode(&without).expect_err("no source");
    refused(&mut trainer, first, "the sources");

    let recipe = fixture::recipe(Method::dense());
    let mut trainer = fixture::start(&recipe);
    let errors = [trainer.encode(&batch.0).err(), trainer.decode(&first).err()];
    assert!(errors.iter().all(|error| matches!(error, Some(Error::Setting { .. }))), "{errors:?}");
}

/// The logits after a prefix, by a whole forward pass in f64.
fn after(spec: &ModelSpec, weights: &Tensors, source: &[u32], prefix: &[u32]) -> Vec<f64> {
    let ModelSpec::Transformer(sizes) = spec else { unreachable!("it is one") };
    let length = source.len().max(prefix.len());
    let mut batch = Batch::default();
    (batch.source, batch.tokens) = (source.to_vec(), prefix.to_vec());
    batch.source.resize(length, PADDING);
    batch.tokens.resize(length, PADDING);
    batch.lengths.push(source.len() as u32);
    let mut pass = Pass {
        arithmetic: &mut Arithmetic::Exact,
        spec,
        weights,
        operands: &mut Dense(weights),
        batch: BatchShape { size: 1, sequence_length: length },
        dropout: 0.0,
        address: Address { seed: 0, step: 0, micro_step: 0 },
    };
    let all = logits(&mut pass, sizes, &batch);
    all.row(prefix.len() - 1).to_vec()
}

/// Beam search as its documentation says, with every extension sorted and every prefix evaluated
/// anew by a whole forward pass.
fn plainly(
    search: &BeamSearch,
    longest: usize,
    logits: impl Fn(&[u32]) -> Vec<f64>,
) -> Translation {
    let mut open = vec![(Vec::new(), 0.0)];
    let mut finished: Vec<Translation> = Vec::new();
    for length in 1..=longest {
        let mut extensions: Vec<(Vec<u32>, f64)> = Vec::new();
        for (tokens, before) in &open {
            let logits = logits(&[&[END], &tokens[..]].concat());
            let sum: f64 = logits.iter().map(|x| x.exp()).sum();
            for (token, logit) in (0..).zip(&logits) {
                let is_allowed = match token {
                    END => length > 1 || length == longest,
                    0 | PADDING => false,
                    _ => length < longest,
                };
                if is_allowed {
                    extensions.push(([&tokens[..], &[token]].concat(), before + logit - sum.ln()));
                }
            }
        }
        extensions.sort_by(|one, other| other.1.total_cmp(&one.1));
        extensions.truncate(2 * search.beam);
        open.clear();
        for (rank, (mut tokens, probability)) in extensions.into_iter().enumerate() {
            if tokens.last() != Some(&END) {
                open.push((tokens, probability));
            } else if rank < search.beam && finished.len() < search.beam {
                tokens.pop();
                let score = probability / (length as f64).powf(search.length_penalty);
                finished.push(Translation { tokens, score });
            }
        }
        open.truncate(search.beam);
        if finished.len() == search.beam {
            break;
        }
    }
    finished.into_iter().rev().max_by(|a, b| a.score.total_cmp(&b.score)).expect("one ends")
}

#[test]
fn beam_search_is_the_plain_one() {
    const LONGEST: usize = 8;
    let recipe = recipe(Method::dense(), BatchShape { size: 12, sequence_length: LONGEST });
    let mut trainer = Trainer::new(fixture::cpu(), recipe.clone()).expect("a valid recipe");
    let mut weights = fixture::weights(&recipe.model);
    // Plain norms, strong attention to the source, and a last bias that leads to the end: the
    // translations differ, and not all are as long as they may be.
    let end = weights[0].1[8 * END as usize..][..8].to_vec();
    for (name, values) in &mut weights {
        match name.rsplit_once("layer_norm.") {
            Some((_, "weight")) => values.fill(1.0),
            Some(("decoder.layers.1.final_", _)) => values.copy_from_slice(&end),
            Some(_) => values.fill(0.0),
            None => {
                let is_cross = name.contains(".encoder_attn.");
                let scale = match name.as_str() {
                    transformer::TOKEN_TABLE => 4.0,
                    _ if is_cross => 2.0,
                    _ => 1.0,
                };
                values.iter_mut().for_each(|value| *value *= scale);
            }
        }
    }
    fixture::start_from(&mut trainer, &weights);
    let shapes: BTreeMap<_, _> = parameters(&recipe.model).into_iter().collect();
    let tensors: Tensors = weights
        .into_iter()
        .map(|(name, values)| {
            let values = values.into_iter().map(f64::from).collect();
            let [rows, columns] = shapes[&name];
            (name, Matrix::from_shape_vec((rows, columns), values).expect("its shape"))
        })
        .collect();
    let mut random = Random(9);
    let sources: Vec<Vec<u32>> = (0..200)
        .map(|_| {
            let length = random.below(LONGEST as u32 - 1);
            let words = (0..=length).map(|_| 3 + random.below(10)).collect::<Vec<_>>();
            [&words[..], &[END]].concat()
        })
        .collect();
    let all: Vec<&[u32]> = sources.iter().map(Vec::as_slice).collect();
    let mut endings = BTreeSet::new();
    for (beam, length_penalty) in [(1, 0.6), (2, 0.0), (3, 0.6), (4, 1.0), (5, 2.0), (12, 0.6)] {
        let search = BeamSearch { beam, length_penalty, vocabulary: 13 };
        let found = search.translate(&mut trainer, &all, |_| {}).expect("no device fails");
        let (mut ended, mut different) = (0, BTreeSet::new());
        for (source, found) in all.iter().zip(&found) {
            let expected =
                plainly(&search, LONGEST, |prefix| after(&recipe.model, &tensors, source, prefix));
            assert_eq!(found.tokens, expected.tokens, "{search:?}, {source:?}");
            let difference = (found.score - expected.score).abs();
            assert!(difference <= 1e-4, "{search:?}: {found:?} {expected:?}");
            ended += usize::from(found.tokens.len() + 1 < LONGEST);
            different.insert(&found.tokens);
        }
        assert!(different.len() > 10, "{search:?}: only {different:?}");
        endings.insert(ended);
    }
    // Beams and penalties matter: different numbers of translations end early.
    assert!(endings.len() >= 4, "{endings:?}");
}

/// Batches of three shapes, the last one with a sentence that is missing.
struct Shapes;

fn random_batch(seed: u64, shape: BatchShape) -> Batch {
    let mut random = Random(seed);
    let BatchShape { size, sequence_length } = shape;
    let mut ids = |_| 2 + random.below(11);
    let mut batch = Batch::default();
    batch.shape = Some(shape);
    batch.source.extend((0..shape.tokens()).map(&mut ids));
    batch.tokens.extend((0..shape.tokens()).map(&mut ids));
    batch.targets.extend((0..shape.tokens()).map(&mut ids));
    for (row, targets) in batch.targets.chunks_mut(sequence_length).enumerate() {
        let is_missing = size > 2 && row + 1 == size;
        let length = if is_missing { 0 } else { 2 + row % (sequence_length - 1) };
        targets[length..].fill(IGNORE);
        batch.lengths.push(length as u32);
        batch.counted += length;
    }
    batch
}

const MOST: BatchShape = BatchShape { size: 4, sequence_length: 16 };

impl Objective for Shapes {
    fn fill(&self, step: u32, micro_step: u32, batch: &mut Batch) -> Result<(), DataError> {
        let length = [8, 16, 4][(step + micro_step) as usize % 3];
        let shape = BatchShape { size: MOST.tokens() / length - 1, sequence_length: length };
        *batch = random_batch(u64::from(step) << 8 | u64::from(micro_step), shape);
        Ok(())
    }
}

#[test]
fn batches_of_several_shapes_resume_and_repeat_to_the_bit() {
    let recipe = Recipe { dropout: 0.25, ..recipe(fst(2e-2), MOST) };
    let steps = |trainer: &mut Trainer, until: u32| -> Vec<u64> {
        let mut losses = Vec::new();
        while trainer.step() < until {
            let outcome = fixture::step(trainer, &Shapes);
            losses.push(outcome.loss.to_bits());
        }
        losses
    };
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
        pool.install(|| {
            let mut trainer = fixture::start(&recipe);
            let losses = steps(&mut trainer, recipe.steps);
            (losses, fixture::bits(&mut trainer))
        })
    };
    let (losses, expected) = run(1);
    assert!(run(3) == (losses.clone(), expected.clone()), "threads");
    for until in [1, 5] {
        let mut before = fixture::start(&recipe);
        steps(&mut before, until);
        let states = fixture::states(&mut before);
        let mut after = Trainer::new(fixture::cpu(), recipe.clone()).expect("a valid recipe");
        after.restore(before.progress().clone(), &states).expect("every state is there");
        assert!(steps(&mut after, recipe.steps) == losses[until as usize..], "from step {until}");
        let found = fixture::bits(&mut after);
        assert!(found == expected, "from step {until}");
    }
}

/// A batch within larger buffers is the same batch; padding after it is not read.
#[test]
fn a_batch_does_not_depend_on_the_largest_one() {
    let shape = BatchShape { size: 2, sequence_length: 8 };
    let batch = Fixed(random_batch(3, shape));
    let run = |most: BatchShape| {
        let mut recipe = recipe(fst(2e-2), most);
        fixture_longest(&mut recipe);
        recipe.optimizer =
            Optimizer { rule: UpdateRule::Sgd { momentum: 0.5 }, ..recipe.optimizer };
        let mut trainer = fixture::start(&recipe);
        let outcome = fixture::step(&mut trainer, &batch);
        let bits = fixture::bits(&mut trainer);
        let loss = trainer.evaluate(&batch, 2).expect("no device fails");
        (outcome.loss.to_bits(), bits, loss.loss_sum.to_bits())
    };
    assert!(run(shape) == run(BatchShape { size: 5, sequence_length: 8 }));
    assert!(run(shape) == run(MOST));
}

/// The same parameters, whatever the length of the batches.
fn fixture_longest(recipe: &mut Recipe) {
    if let ModelSpec::Transformer(spec) = &mut recipe.model {
        spec.sequence_length = MOST.sequence_length;
    }
}

#[test]
fn more_and_shorter_sequences_than_dropout_has_room_for_are_refused() {
    let mut recipe = Recipe { dropout: 0.25, batch: MOST, ..fixture::recipe(Method::dense()) };
    fixture::change(&mut recipe, |spec| (spec.sequence_length, spec.vocabulary) = (16, 13));
    let mut batch = random_batch(3, BatchShape { size: 8, sequence_length: 8 });
    (batch.source, batch.lengths) = (Vec::new(), Vec::new());
    let mut trainer = fixture::start(&recipe);
    let refused = trainer.train_step(&Fixed(batch), FlipSampling::Skip);
    let error = refused.expect_err("eight tiles per head, not four").to_string();
    assert!(error.contains("dropout of attention"), "{error}");
}

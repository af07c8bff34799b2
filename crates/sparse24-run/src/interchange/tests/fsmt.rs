//! A model of transformers' FSMT. `fsmt.json` has its configuration, the names and shapes of its
//! tensors except for repeated and computed ones, and the losses that it computes in f32; the
//! weights are those of `transformers.rs`.

use super::{
    super::fsmt,
    transformers::{Class, close, refused, returned, saved, trainer},
    *,
};
use sparse24_train::{
    backend::op::HeadLoss,
    nn::BatchShape,
    objective::{Batch, DataError, Evaluation},
};

const SHAPE: BatchShape = BatchShape { size: 2, sequence_length: 4 };

/// Two sentences, the second with padding, and the target at one place of all translations.
struct Sentences(usize);

impl Evaluation for Sentences {
    fn sequences(&self) -> usize {
        SHAPE.size
    }

    fn fill(&self, _: usize, _: BatchShape, batch: &mut Batch) -> Result<(), DataError> {
        batch.clear();
        batch.source.extend([5, 6, 7, 2, 8, 9, 2, 1]);
        batch.lengths.extend([4, 3]);
        batch.tokens.extend([2, 4, 5, 6, 2, 10, 3, 1]);
        batch.targets.resize(8, HeadLoss::IGNORE);
        batch.targets[self.0] = [4, 5, 6, 2, 10, 3, 2][self.0];
        batch.counted = 1;
        Ok(())
    }
}

fn class() -> Class {
    let mut classes: BTreeMap<String, Class> =
        serde_json::from_str(include_str!("fsmt.json")).unwrap();
    classes.remove(fsmt::FORMAT.classes[0]).unwrap()
}

#[test]
fn a_model_has_the_names_and_losses_of_transformers() {
    let class = class();
    let (directory, _) = saved(&class);
    assert_eq!(FolderModel::read(directory.path()).unwrap().languages, ["en", "de"]);
    let (spec, weights) = returned("FSMT", &class);
    let mut trainer = trainer(&spec, &weights, SHAPE);
    let losses = (0..class.losses.len())
        .map(|at| trainer.evaluate(&Sentences(at), SHAPE.size).unwrap().loss() as f32);
    close("losses", &losses.collect::<Vec<_>>(), &class.losses);
}

/// Names without the prefix, as fairseq has them; every copy of the table is compared with it, and
/// stands for it where the encoder's is missing.
#[test]
fn copies_of_the_table_are_equal_to_it() {
    let table = [0., 1., 2., 3.];
    let wanted = expected(&[("encoder.embed_tokens.weight", &[2, 2])]);
    let names = ["encoder.embed_tokens", "decoder.embed_tokens", "decoder.output_projection"];
    let names = names.map(|name| format!("{name}.weight"));
    for (copies, differing) in [(&names[..], None), (&names[1..], None)].into_iter().chain([
        (&names[..], Some(1)),
        (&names[..], Some(2)),
        (&names[1..], Some(1)),
    ]) {
        let other = [0., 1., 2., 4.];
        let values = |at| if differing == Some(at) { &other } else { &table };
        let given = copies
            .iter()
            .enumerate()
            .map(|(at, name)| (name.as_str(), [2, 2].as_slice(), values(at).as_slice()));
        let positions = ("encoder.embed_positions._float_tensor", [1].as_slice(), &[0.][..]);
        let (_directory, path) = foreign(&given.chain([positions]).collect::<Vec<_>>());
        match (import(&path, &fsmt::FORMAT, &wanted), differing) {
            (Ok(imported), None) => assert_eq!(imported.weights[0].values, table),
            (found, Some(_)) => {
                let message = problem(found);
                assert!(message.contains("the head is not tied"), "{message}");
            }
            (found, None) => panic!("{found:?}"),
        }
    }
    let positions = ("decoder.embed_positions.weight", [3, 4].as_slice(), &[0.0; 12][..]);
    let (_directory, path) = foreign(&[(&names[0], &[2, 2], &table), positions]);
    assert!(problem(import(&path, &fsmt::FORMAT, &wanted)).contains("was trained"));
}

#[test]
fn other_models_of_transformers_are_refused() {
    let changes = [
        ("decoder_layers", "1", "decoder_layers is 1, expected 2"),
        ("decoder_ffn_dim", "8", "decoder_ffn_dim is 8, expected 16"),
        ("decoder_attention_heads", "4", "decoder_attention_heads is 4, expected 2"),
        ("tgt_vocab_size", "12", "tgt_vocab_size is 12, expected 11"),
        ("encoder_attention_heads", "3", "decoder_attention_heads is 2, expected 3"),
        ("scale_embedding", "false", "scale_embedding is false, expected true"),
        ("pad_token_id", "0", "pad_token_id is 0, expected 1"),
        ("activation_function", "\"silu\"", "activation_function is \"silu\""),
        ("d_model", "7", "d_model is 7, expected a multiple of encoder_attention_heads = 2"),
        ("langs", "[\"en\"]", "not a FSMT configuration"),
    ];
    refused(&class(), &changes);
}

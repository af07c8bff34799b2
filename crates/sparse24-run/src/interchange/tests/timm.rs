//! A model of timm itself. `timm.json` has the configuration that its `save_for_hf` writes, the
//! names and shapes of its tensors, and the logits and losses that it computes in f32; the weights
//! are those of `transformers.rs`.

use super::{
    transformers::{Class, close, refused, returned, trainer},
    *,
};
use std::path::Path;

use serde_json::Value;
use sparse24_train::{
    backend::op::HeadLoss,
    model::DeitSpec,
    nn::BatchShape,
    objective::{Batch, DataError, Evaluation},
};

/// Two images of class 1 whose value i, by image, channel, row and column, is sin(0.7 i).
struct Pictures;

const SIDE: usize = 16;
const PATCH: usize = 4;
const SHAPE: BatchShape = BatchShape { size: 2, sequence_length: (SIDE / PATCH).pow(2) + 1 };

impl Evaluation for Pictures {
    fn sequences(&self) -> usize {
        SHAPE.size
    }

    fn fill(&self, _: usize, _: BatchShape, batch: &mut Batch) -> Result<(), DataError> {
        batch.clear();
        for image in 0..SHAPE.size {
            for patch in 0..SHAPE.sequence_length - 1 {
                let (top, left) = (patch / (SIDE / PATCH) * PATCH, patch % (SIDE / PATCH) * PATCH);
                for at in 0..3 * PATCH * PATCH {
                    let (channel, row, column) = (at / 16, at / PATCH % PATCH, at % PATCH);
                    let i = ((image * 3 + channel) * SIDE + top + row) * SIDE + left + column;
                    batch.pixels.push((0.7 * i as f64).sin() as f32);
                }
            }
            batch.targets.push(1);
            batch.targets.resize((image + 1) * SHAPE.sequence_length, HeadLoss::IGNORE);
        }
        batch.counted = SHAPE.size;
        Ok(())
    }
}

#[test]
fn a_model_has_the_names_and_outputs_of_timm() {
    let classes: BTreeMap<String, Class> = serde_json::from_str(include_str!("timm.json")).unwrap();
    for (name, class) in &classes {
        let (spec, weights) = returned(name, class);
        let mut trainer = trainer(&spec, &weights, SHAPE);
        let keep = |_, outputs: &[f32]| outputs.to_vec();
        let (metrics, outputs) = trainer.predict(&Pictures, SHAPE.size, keep).unwrap();
        close(name, &outputs, &class.logits.concat());
        close(name, &[metrics.loss() as f32], &[class.losses.iter().sum::<f32>() / 2.0]);
    }
}

/// timm has a ratio instead of the width, and rounds their product down.
#[test]
fn every_width_of_a_feed_forward_comes_back() {
    let spec = DeitSpec {
        layers: 1,
        heads: 4,
        d_model: 44,
        d_ff: 0,
        image_size: 16,
        patch_size: 4,
        classes: 5,
        activation: Activation::GeluErf,
        sparsify: Sparsify::Ffn,
        drop_path: 0.0,
        label_smoothing: 0.0,
    };
    for (d_model, d_ff) in [(44, 60), (76, 212), (96, 384), (192, 4)] {
        let spec = ModelSpec::Deit(DeitSpec { d_model, d_ff, ..spec });
        let format = format(&spec);
        let config = Value::from((format.fields)(&spec, None)).to_string();
        let read = (format.read)(Path::new("config.json"), config.as_bytes());
        assert_eq!(read.unwrap(), spec, "{config}");
    }
}

#[test]
fn other_models_of_timm_are_refused() {
    let classes = include_str!("timm.json");
    let classes: BTreeMap<String, Class> = serde_json::from_str(classes).unwrap();
    let changes = [
        ("architecture", "\"deit3_base_patch16_224\"", "architecture is \"deit3_base"),
        ("global_pool", "\"avg\"", "global_pool is \"avg\", expected \"token\""),
        ("num_classes", "0", "model_args.num_classes is 5, expected 0"),
        ("model_args", "{\"pre_norm\": true}", "unknown field `pre_norm`"),
        ("model_args", "{\"patch_size\": 5}", "patch_size is 5, expected a divisor"),
        ("model_args", "{\"img_size\": [16, 8]}", "img_size is 0, expected 1..="),
        ("pretrained_cfg", "{\"mean\": [0.5, 0.5, 0.5]}", "pretrained_cfg.mean is [0.5"),
    ];
    refused(classes.values().next().unwrap(), &changes);
}

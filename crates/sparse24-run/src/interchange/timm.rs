//! timm's DeiT and ViT with a class token, `deit_base_patch16_224` and those of its kind: a folder
//! as `timm.create_model("local-dir:FOLDER", pretrained=True)` reads it and timm's hub holds it.
//!
//! The class token and the bias of the patches are two tensors there and one table here. Options
//! that would change the computation are refused.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    config::{Sizes, admit, object, parse},
    format::Format,
};
use crate::{Error, Result};
use sparse24_core::op::Activation;
use sparse24_train::model::{DeitSpec, ModelSpec, Sparsify, deit::CLASS_TABLE};

pub(super) const FORMAT: Format = Format {
    name: "timm",
    title: "timm",
    prefix: "",
    heads: &["head."],
    optional: &[],
    tied: &[],
    buffers: &[],
    tables: [CLASS_TABLE, "pos_embed"],
    classes: ["VisionTransformer"; 3],
    stored,
    shaped,
    is_transposed: |_| false,
    read,
    fields,
    attention: ".attn.",
    filters: ["--include blocks --exclude attn", "--include blocks"],
};

/// timm's normalization, which is ImageNet's.
const MEAN: [f64; 3] = [0.485, 0.456, 0.406];
const DEVIATION: [f64; 3] = [0.229, 0.224, 0.225];

/// timm's names of activations.
const ACTIVATIONS: [(&str, Activation); 3] =
    [("gelu", Activation::GeluErf), ("gelu_tanh", Activation::Gelu), ("relu", Activation::Relu)];

/// Width and heads by the size in the name of an architecture.
const SIZES: [(&str, [usize; 3]); 4] = [
    ("tiny", [12, 3, 192]),
    ("small", [12, 6, 384]),
    ("base", [12, 12, 768]),
    ("large", [24, 16, 1024]),
];

fn stored(name: &str) -> Vec<String> {
    match name {
        "kind_embed" => vec!["cls_token".to_owned(), "patch_embed.proj.bias".to_owned()],
        _ => vec![name.to_owned()],
    }
}

fn shaped(name: &str, shape: &[usize]) -> Vec<usize> {
    match (name, shape) {
        ("cls_token" | "pos_embed", &[rows, d]) => vec![1, rows, d],
        ("patch_embed.proj.bias", &[_, d]) => vec![d],
        ("patch_embed.proj.weight", &[d, values]) => {
            let side = (values / 3).isqrt();
            vec![d, 3, side, side]
        }
        _ => shape.to_vec(),
    }
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct Raw {
    architecture: String,
    num_classes: usize,
    global_pool: Option<Value>,
    #[serde(default)]
    model_args: Arguments,
    #[serde(default)]
    pretrained_cfg: Pretrained,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields, expecting = "an object")]
struct Arguments {
    img_size: Option<Side>,
    patch_size: Option<Side>,
    embed_dim: Option<usize>,
    depth: Option<usize>,
    num_heads: Option<usize>,
    mlp_ratio: Option<f64>,
    act_layer: Option<Value>,
    /// Like `num_classes` outside.
    num_classes: Option<Value>,
    in_chans: Option<Value>,
    global_pool: Option<Value>,
}

/// The side of a square.
#[derive(Deserialize)]
#[serde(untagged, expecting = "a number, or two that are equal")]
enum Side {
    One(usize),
    Two([usize; 2]),
}

impl Side {
    /// The number; 0, which is refused, for two that differ.
    fn length(self) -> usize {
        match self {
            Self::One(side) => side,
            Self::Two([height, width]) if height == width => width,
            Self::Two(_) => 0,
        }
    }
}

#[derive(Default, Deserialize)]
#[serde(default, expecting = "an object")]
struct Pretrained {
    mean: Option<[f64; 3]>,
    std: Option<[f64; 3]>,
}

/// The sizes of an architecture: layers, heads, width, side of a patch and of an image.
fn sizes(architecture: &str) -> Option<[usize; 5]> {
    let name = architecture.split('.').next()?;
    let mut parts = name.split('_');
    let (Some("deit" | "vit"), Some(size), Some(patch), Some(image), None) =
        (parts.next(), parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return None;
    };
    let (_, [layers, heads, d_model]) = SIZES.into_iter().find(|(name, _)| *name == size)?;
    let patch = patch.strip_prefix("patch")?.parse().ok()?;
    Some([layers, heads, d_model, patch, image.parse().ok()?])
}

fn read(path: &Path, text: &[u8]) -> Result<ModelSpec> {
    let raw: Raw = parse(path, FORMAT.title, text)?;
    let refuse = |problem: String| Err(Error::file(path, problem));
    let Some([layers, heads, d_model, patch, image]) = sizes(&raw.architecture) else {
        return refuse(format!(
            "architecture is {:?}, expected one such as \"deit_base_patch16_224\"",
            raw.architecture
        ));
    };
    admit(path, "global_pool", raw.global_pool.as_ref(), &[json!("token")])?;
    for (key, found, expected) in
        [("mean", raw.pretrained_cfg.mean, MEAN), ("std", raw.pretrained_cfg.std, DEVIATION)]
    {
        if let Some(found) = found.filter(|found| *found != expected) {
            return refuse(format!(
                "pretrained_cfg.{key} is {found:?}, expected ImageNet's {expected:?}"
            ));
        }
    }
    let arguments = raw.model_args;
    for (key, found, admitted) in [
        ("model_args.num_classes", &arguments.num_classes, json!(raw.num_classes)),
        ("model_args.in_chans", &arguments.in_chans, json!(3)),
        ("model_args.global_pool", &arguments.global_pool, json!("token")),
    ] {
        admit(path, key, found.as_ref(), &[admitted])?;
    }
    let Arguments {
        img_size, patch_size, embed_dim, depth, num_heads, mlp_ratio, act_layer, ..
    } = arguments;
    admit(path, "act_layer", act_layer.as_ref(), &ACTIVATIONS.map(|(name, _)| json!(name)))?;
    let name = act_layer.as_ref().and_then(Value::as_str).unwrap_or("gelu");
    let named = ACTIVATIONS.iter().find(|(named, _)| *named == name);
    let activation = named.expect("what is admitted has a name").1;
    let d_model = embed_dim.unwrap_or(d_model);
    let d_ff = (d_model as f64 * mlp_ratio.unwrap_or(4.0)) as usize;
    let spec = DeitSpec {
        layers: depth.unwrap_or(layers),
        heads: num_heads.unwrap_or(heads),
        d_model,
        d_ff,
        image_size: img_size.map_or(image, Side::length),
        patch_size: patch_size.map_or(patch, Side::length),
        classes: raw.num_classes,
        activation,
        sparsify: Sparsify::Ffn,
        drop_path: 0.0,
        label_smoothing: 0.0,
    };
    Sizes {
        layers: ("depth", spec.layers),
        heads: ("num_heads", spec.heads),
        d_model: ("embed_dim", spec.d_model),
        others: [
            ("img_size", spec.image_size),
            ("num_classes", spec.classes),
            ("the feed-forward width", d_ff),
        ],
    }
    .check(path)?;
    if spec.patch_size == 0 || !spec.image_size.is_multiple_of(spec.patch_size) {
        let (image, patch) = (spec.image_size, spec.patch_size);
        return refuse(format!("patch_size is {patch}, expected a divisor of img_size {image}"));
    }
    Ok(ModelSpec::Deit(spec))
}

fn fields(model: &ModelSpec, _: Option<u32>) -> Map<String, Value> {
    let ModelSpec::Deit(spec) = model else { unreachable!("the format of another model") };
    // timm rounds the product with the width down.
    let ratio = spec.d_ff as f64 / spec.d_model as f64;
    let is_low = (spec.d_model as f64 * ratio) < spec.d_ff as f64;
    let mlp_ratio = if is_low { ratio.next_up() } else { ratio };
    let named = ACTIVATIONS.iter().find(|(_, named)| *named == spec.activation);
    let act_layer = named.expect("an activation of `of`").0;
    object(json!({
        "architecture": "deit_base_patch16_224",
        "num_classes": spec.classes,
        "num_features": spec.d_model,
        "global_pool": "token",
        "model_args": {
            "img_size": spec.image_size,
            "patch_size": spec.patch_size,
            "embed_dim": spec.d_model,
            "depth": spec.layers,
            "num_heads": spec.heads,
            "mlp_ratio": mlp_ratio,
            "act_layer": act_layer,
        },
        "pretrained_cfg": {
            "num_classes": spec.classes,
            "input_size": [3, spec.image_size, spec.image_size],
            "fixed_input_size": true,
            "interpolation": "bicubic",
            "crop_pct": if spec.image_size > 32 { 0.875 } else { 1.0 },
            "mean": MEAN,
            "std": DEVIATION,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }))
}

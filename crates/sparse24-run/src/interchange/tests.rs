//! The way out and back, and the message of every refusal.

use std::{
    fs,
    path::{Path, PathBuf},
};

use sparse24_core::{Mask, MaskKind, op::Activation, tile::TilePattern};
use tempfile::TempDir;

use super::*;
use crate::{
    Error,
    checkpoint::{NamedTensor, PhaseKind},
    disk::fault::{self, Fault, Plan},
    tensors::{self, Layout},
};
use sparse24_train::nn::Bias;

const TINY: Gpt2Config = Gpt2Config {
    n_layer: 2,
    n_head: 2,
    n_embd: 8,
    n_positions: 6,
    vocab_size: 11,
    n_inner: 32,
    activation: Activation::Gelu,
};

fn weights(config: &Gpt2Config, bias: Bias) -> Vec<NamedTensor> {
    let tensor = |(i, (name, shape)): (usize, (String, Vec<usize>))| {
        let length: usize = shape.iter().product();
        // Multiples of 1/8 below 16: exact in f16 and bf16.
        let values = (0..length).map(|j| ((j * 7 + i * 13) % 251) as f32 / 8.0 - 15.5).collect();
        NamedTensor { name, shape, values }
    };
    config.parameters(bias).into_iter().enumerate().map(tensor).collect()
}

fn masks() -> Vec<(String, Mask)> {
    let tiles =
        |offset: usize| (0..16).map(|i| TilePattern::ALL[(i * 5 + offset) % 90].bits()).collect();
    vec![
        ("h.0.mlp.c_fc.weight".into(), Mask::from_tiles(32, 8, tiles(0)).unwrap()),
        ("h.0.mlp.c_proj.weight".into(), Mask::from_tiles(8, 32, tiles(3)).unwrap()),
    ]
}

fn problem<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    result.unwrap_err().to_string()
}

/// A file of F32 tensors as Hugging Face writes them.
fn foreign(tensors: &[(&str, &[usize], &[f32])]) -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(WEIGHTS);
    let layout: Vec<_> = tensors
        .iter()
        .map(|&(name, shape, _)| Layout {
            name: name.into(),
            dtype: safetensors::Dtype::F32,
            shape: shape.to_vec(),
        })
        .collect();
    let mut bytes = tensors::header(&[], &layout);
    bytes.extend(
        tensors.iter().flat_map(|(_, _, values)| values.iter().flat_map(|v| v.to_le_bytes())),
    );
    fs::write(&path, bytes).unwrap();
    (directory, path)
}

fn expected(list: &[(&str, &[usize])]) -> Vec<(String, Vec<usize>)> {
    list.iter().map(|&(name, shape)| (name.into(), shape.to_vec())).collect()
}

#[test]
fn out_and_back_is_the_same() {
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        let directory = tempfile::tempdir().unwrap();
        let folder = directory.path().join("deep/model");
        let out = weights(&TINY, Bias::Present);
        let exported = export(&folder, &out, &TINY, dtype, Values::Dense).unwrap();
        assert_eq!(exported, Exported { zero_biases: vec![], sparse24: vec![] });
        assert_eq!(Gpt2Config::read(&folder).unwrap(), TINY);
        assert_eq!(import(&folder, &TINY.parameters(Bias::Present)).unwrap(), out, "{dtype:?}");
        assert_eq!(import(&folder.join(WEIGHTS), &TINY.parameters(Bias::Present)).unwrap(), out);
    }
}

#[test]
fn a_model_without_biases_goes_out_with_zeros_and_comes_back() {
    let directory = tempfile::tempdir().unwrap();
    let out = weights(&TINY, Bias::Absent);
    let exported = export(directory.path(), &out, &TINY, Dtype::F32, Values::Dense).unwrap();
    assert_eq!(exported.zero_biases.len(), 2 * 6 + 1);
    assert_eq!(import(directory.path(), &TINY.parameters(Bias::Absent)).unwrap(), out);
    let with = import(directory.path(), &TINY.parameters(Bias::Present)).unwrap();
    assert!(
        with.iter()
            .filter(|t| t.name.ends_with(".bias"))
            .all(|t| t.values.iter().all(|&v| v == 0.0))
    );
}

#[test]
fn conv1d_weights_are_transposed_and_nothing_else_is() {
    let (_directory, path) = foreign(&[
        (
            "transformer.h.0.attn.c_attn.weight",
            &[2, 6],
            &[0., 1., 2., 3., 4., 5., 10., 11., 12., 13., 14., 15.],
        ),
        ("transformer.wte.weight", &[3, 2], &[0., 1., 2., 3., 4., 5.]),
        ("lm_head.weight", &[3, 2], &[0., 1., 2., 3., 4., 5.]),
        ("transformer.h.0.attn.bias", &[1], &[f32::NAN]),
        ("h.0.attn.masked_bias", &[1], &[-1e4]),
    ]);
    let read =
        import(&path, &expected(&[("wte.weight", &[3, 2]), ("h.0.attn.c_attn.weight", &[6, 2])]))
            .unwrap();
    assert_eq!(read[0].values, [0., 1., 2., 3., 4., 5.]);
    assert_eq!(read[1].values, [0., 10., 1., 11., 2., 12., 3., 13., 4., 14., 5., 15.]);
    assert!(
        is_conv1d("h.10.mlp.c_proj.weight")
            && !is_conv1d("h.1.mlp.c_proj.bias")
            && !is_conv1d("wpe.weight")
    );
}

#[test]
fn what_does_not_fit_is_named() {
    let values = [1.0; 24];
    let file = |tensors: &[(&str, &[usize])]| {
        foreign(
            &tensors
                .iter()
                .map(|&(name, shape)| (name, shape, &values[..shape.iter().product()]))
                .collect::<Vec<_>>(),
        )
    };
    type Shapes<'a> = &'a [(&'a str, &'a [usize])];
    let cases: [(Shapes<'_>, Shapes<'_>, &str); 8] = [
        (
            &[("wpe.weight", &[2, 2])],
            &[("wte.weight", &[3, 2])],
            "\"wpe.weight\" (F32 [2, 2]) has no place in the model",
        ),
        (
            &[],
            &[("wte.weight", &[3, 2])],
            "holds no tensor \"wte.weight\" (nor \"transformer.wte.weight\")",
        ),
        (
            &[],
            &[("ln_f.bias", &[2])],
            "(nor \"transformer.ln_f.bias\"); set model.bias = false if the model has no biases",
        ),
        (
            &[("transformer.wte.weight", &[4, 2])],
            &[("wte.weight", &[3, 2])],
            "has a vocabulary of 4 tokens, the model one of 3; use the tokenizer that goes with \
                the weights",
        ),
        (
            &[("wpe.weight", &[4, 2])],
            &[("wpe.weight", &[3, 2])],
            "has 4 positions, the model a context of 3",
        ),
        (
            &[("h.0.mlp.c_fc.weight", &[8, 2])],
            &[("h.0.mlp.c_fc.weight", &[8, 2])],
            "tensor \"h.0.mlp.c_fc.weight\" (F32 [8, 2]) is expected to be [2, 8]",
        ),
        (
            &[("ln_f.weight", &[2]), ("ln_f.bias", &[2])],
            &[("ln_f.weight", &[2])],
            "tensor \"ln_f.bias\" (F32 [2]) is not zero, and the model has no biases; set \
                model.bias = true",
        ),
        (
            &[("ln_f.weight", &[2]), ("transformer.ln_f.weight", &[2])],
            &[("ln_f.weight", &[2])],
            "occurs twice, with and without the prefix \"transformer.\"",
        ),
    ];
    for (given, wanted, message) in cases {
        let (_directory, path) = file(given);
        let found = problem(import(&path, &expected(wanted)));
        assert!(found.ends_with(message), "{found}");
        assert!(found.starts_with(&path.display().to_string()), "{found}");
    }
}

#[test]
fn an_untied_head_is_refused() {
    for head in [[0., 1., 2., 4.], [0., 1., 2., -3.]] {
        let (_directory, path) = foreign(&[
            ("wte.weight", &[2, 2], &[0., 1., 2., 3.]),
            ("lm_head.weight", &[2, 2], &head),
        ]);
        let message = problem(import(&path, &expected(&[("wte.weight", &[2, 2])])));
        let end = "tensor \"lm_head.weight\" (F32 [2, 2]) differs from \"wte.weight\": the head \
            is not tied to the embedding, \
                   which this model needs";
        assert!(message.ends_with(end), "{message}");
    }
}

#[test]
fn what_is_not_finite_is_refused_with_its_offset() {
    let (_directory, path) = foreign(&[("wte.weight", &[2, 2], &[0., 1., f32::INFINITY, 3.])]);
    let offset = fs::metadata(&path).unwrap().len() - 8;
    let message = problem(import(&path, &expected(&[("wte.weight", &[2, 2])])));
    assert!(
        message.ends_with(&format!(
            "holds inf at element 2 (byte {offset}); only finite values are read"
        )),
        "{message}"
    );
}

#[test]
fn other_types_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.safetensors");
    let layout =
        [Layout { name: "wte.weight".into(), dtype: safetensors::Dtype::U16, shape: vec![1, 2] }];
    let mut bytes = tensors::header(&[], &layout);
    bytes.extend([0; 4]);
    fs::write(&path, &bytes).unwrap();
    let wanted = expected(&[("wte.weight", &[1, 2])]);
    assert!(
        problem(import(&path, &wanted))
            .ends_with("tensor \"wte.weight\" (U16 [1, 2]) is expected to be F32, F16 or BF16")
    );
    let text = |to: &str| String::from_utf8(bytes.clone()).unwrap().replace("\"U16\"", to);
    // Four bits each: a shape of eight fills the four bytes.
    fs::write(&path, text("\"F4\" ").replacen("[1,2]", "[1,8]", 1)).unwrap();
    let four = problem(import(&path, &expected(&[("wte.weight", &[1, 8])])));
    assert!(four.ends_with("(F4 [1, 8]) is expected to be F32, F16 or BF16"), "{four}");
    fs::write(&path, text("\"U17\"")).unwrap();
    assert!(
        problem(import(&path, &wanted))
            .contains("malformed header: tensor `wte.weight`: unknown variant `U17`")
    );
}

#[test]
fn folders_without_weights_say_what_they_hold() {
    let directory = tempfile::tempdir().unwrap();
    assert!(problem(import(directory.path(), &[])).ends_with("holds no \"model.safetensors\""));
    fs::write(directory.path().join("pytorch_model.bin"), "").unwrap();
    assert!(
        problem(import(directory.path(), &[]))
            .ends_with("is not read: save the weights again as safetensors")
    );
    fs::write(directory.path().join("model.safetensors.index.json"), "").unwrap();
    assert!(
        problem(import(directory.path(), &[]))
            .ends_with("in several files: save them again as one")
    );
    assert!(
        problem(import(Path::new("nowhere.safetensors"), &[]))
            .starts_with("nowhere.safetensors: does not exist, expected ")
    );
}

#[test]
fn configurations_that_compute_something_else_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(CONFIG);
    let good = String::from_utf8(TINY.to_json("float32")).unwrap();
    for (from, to, message) in [
        ("\"gpt2\"", "\"llama\"", "model_type is \"llama\", expected \"gpt2\""),
        (
            "gelu_new",
            "relu",
            "activation_function is \"relu\", expected \"gelu_new\"; no other value is supported",
        ),
        (
            "0.00001",
            "0.000001",
            "layer_norm_epsilon is 1e-6, expected 0.00001; no other value is supported",
        ),
        (
            "\"tie_word_embeddings\": true",
            "\"tie_word_embeddings\": false",
            "tie_word_embeddings is false, expected true; no other value is supported",
        ),
        ("\"n_head\": 2", "\"n_head\": 3", "n_embd is 8, expected a multiple of n_head = 3"),
        ("\"n_head\": 2", "\"n_head\": 0", "n_head is 0, expected 1..=16777216"),
        (
            "\"n_layer\": 2",
            "\"n_layer\": 1000000000000",
            "n_layer is 1000000000000, expected 1..=4096",
        ),
        ("\"n_layer\": 2", "\"layers\": 2", "not a GPT-2 configuration: missing field `n_layer`"),
    ] {
        let text = good.replace(from, to);
        assert_ne!(text, good, "{from}");
        fs::write(&path, text).unwrap();
        let found = problem(Gpt2Config::read(directory.path()));
        assert!(found.contains(message), "{found}");
    }
    fs::write(
        &path,
        good.replace("\"n_inner\": null", "\"n_inner\": 20").replace("0.00001", "1e-05"),
    )
    .unwrap();
    fs::write(directory.path().join(WEIGHTS), "").unwrap();
    let read = || Gpt2Config::read(&directory.path().join(WEIGHTS)).unwrap();
    assert_eq!(read(), Gpt2Config { n_inner: 20, ..TINY });
    let exact = Gpt2Config { activation: Activation::GeluErf, ..TINY };
    fs::write(&path, exact.to_json("float32")).unwrap();
    assert_eq!(read(), exact);
}

#[test]
fn a_sparse_export_is_24_in_both_directions() {
    let directory = tempfile::tempdir().unwrap();
    let (out, masks) = (weights(&TINY, Bias::Absent), masks());
    let values = Values::Sparse24 {
        phase: PhaseKind::Sparse,
        masks: &masks,
        structure: MaskKind::Transposable,
    };
    let exported = export(directory.path(), &out, &TINY, Dtype::Bf16, values).unwrap();
    assert_eq!(exported.sparse24, ["h.0.mlp.c_fc.weight", "h.0.mlp.c_proj.weight"]);
    for (read, written) in
        import(directory.path(), &TINY.parameters(Bias::Absent)).unwrap().iter().zip(&out)
    {
        let Some((_, mask)) = masks.iter().find(|(name, _)| *name == read.name) else {
            assert_eq!(read, written);
            continue;
        };
        for (at, (&found, &weight)) in read.values.iter().zip(&written.values).enumerate() {
            let is_kept = mask.keeps(at / mask.columns(), at % mask.columns());
            assert_eq!(
                found.to_bits(),
                if is_kept { weight.to_bits() } else { 0 },
                "{}, element {at}",
                read.name
            );
        }
    }
}

#[test]
fn what_is_not_24_is_not_exported_as_24() {
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path().join("model");
    let (out, good) = (weights(&TINY, Bias::Absent), masks());
    let attempt = |phase, masks: &[(String, Mask)]| {
        let values = Values::Sparse24 { phase, masks, structure: MaskKind::Transposable };
        problem(export(&folder, &out, &TINY, Dtype::F32, values))
    };
    let message = attempt(PhaseKind::Dense, &good);
    assert!(
        message
            .contains("the checkpoint is of a dense phase with 2 masks, so it is not a 2:4 model"),
        "{message}"
    );
    assert!(
        attempt(PhaseKind::Sparse, &[])
            .contains("of a sparse phase with 0 masks, so it is not a 2:4 model")
    );
    let mut bad = good.clone();
    bad[1].1.tiles_mut()[9] ^= 1;
    let message = attempt(PhaseKind::Sparse, &bad);
    assert!(
        message.starts_with("mask check: the mask is not transposable: tile (1, 1) holds 0x"),
        "{message}"
    );
    let mut bad = good.clone();
    bad[0].0 = "h.0.mlp.c_proj.weight".into();
    bad[1].0 = "h.1.mlp.c_proj.weight".into();
    let message = attempt(PhaseKind::Sparse, &bad);
    assert!(
        message.ends_with("the mask of \"h.0.mlp.c_proj.weight\" is [32, 8], its weight [8, 32]"),
        "{message}"
    );
    bad[0].0 = "h.7.mlp.c_fc.weight".into();
    assert!(
        attempt(PhaseKind::Sparse, &bad)
            .ends_with("\"h.7.mlp.c_fc.weight\" has no place in Hugging Face's GPT-2")
    );
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn exports_that_cannot_be_leave_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path().join("model");
    let attempt = |weights: &[NamedTensor], dtype| {
        problem(export(&folder, weights, &TINY, dtype, Values::Dense))
    };
    let good = weights(&TINY, Bias::Absent);
    assert!(
        attempt(&good[1..], Dtype::F32)
            .ends_with("cannot be exported to: the weight \"wte.weight\" is missing")
    );
    let mut bad = good.clone();
    bad[4].shape = vec![16, 4];
    let message = attempt(&bad, Dtype::F32);
    assert!(
        message.ends_with("the weight \"h.0.attn.c_proj.weight\" is [16, 4], GPT-2 expects [8, 8]"),
        "{message}"
    );
    bad = good.clone();
    bad.push(NamedTensor { name: "h.0.mlp.gate.weight".into(), shape: vec![0], values: vec![] });
    assert!(
        attempt(&bad, Dtype::F32)
            .ends_with("\"h.0.mlp.gate.weight\" has no place in Hugging Face's GPT-2")
    );
    bad = good.clone();
    bad[0].values[3] = 1e5;
    assert!(
        attempt(&bad, Dtype::F16)
            .ends_with("\"wte.weight\" holds 100000 at element 3, which is not finite in F16")
    );
    let mut operations = 0;
    loop {
        fault::plan(Plan::Fail(operations, Fault::NoSpace));
        match export(&folder, &good, &TINY, Dtype::F32, Values::Dense) {
            Ok(_) => break,
            Err(error) => assert!(error.to_string().contains("No space left on device"), "{error}"),
        }
        let left = fs::read_dir(directory.path()).unwrap().count();
        assert_eq!(left, usize::from(folder.exists()), "operation {operations}");
        let _ = fs::remove_dir_all(&folder);
        operations += 1;
    }
    assert!(operations > 20, "{operations}");
    fault::plan(Plan::Healthy);
    assert!(
        attempt(&good, Dtype::F32)
            .ends_with("is not an empty folder, expected a new or empty one; choose another")
    );
    fs::remove_dir_all(&folder).unwrap();
    fs::write(&folder, "").unwrap();
    assert!(
        attempt(&good, Dtype::F32)
            .ends_with("is not an empty folder, expected a new or empty one; choose another")
    );
}

//! The way out and back, and the message of every refusal.

use std::{fs, path::PathBuf};

use sparse24_core::{Mask, MaskKind, op::Activation, tile::TilePattern};
use tempfile::TempDir;

use super::*;
use crate::{
    checkpoint::{NamedTensor, PhaseKind},
    disk::fault::{self, Fault, Plan},
    error::problem,
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

/// A file of F32 tensors as Hugging Face writes them.
fn foreign(tensors: &[(&str, &[usize], &[f32])]) -> (TempDir, PathBuf) {
    let dtype = safetensors::Dtype::F32;
    let layout = |&(name, shape, _): &(&str, &[usize], _)| Layout {
        name: name.into(),
        dtype,
        shape: shape.to_vec(),
    };
    let mut bytes = tensors::header(&[], &tensors.iter().map(layout).collect::<Vec<_>>());
    let values = tensors.iter().flat_map(|(_, _, values)| *values);
    bytes.extend(values.flat_map(|value| value.to_le_bytes()));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(WEIGHTS);
    fs::write(&path, bytes).unwrap();
    (directory, path)
}

fn expected(list: &[(&str, &[usize])]) -> Vec<(String, Vec<usize>)> {
    list.iter().map(|&(name, shape)| (name.into(), shape.to_vec())).collect()
}

#[test]
fn out_and_back_is_the_same() {
    for (dtype, bias) in [
        (Dtype::F32, Bias::Present),
        (Dtype::F16, Bias::Present),
        (Dtype::Bf16, Bias::Present),
        (Dtype::F32, Bias::Absent),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let folder = directory.path().join("deep/model");
        let out = weights(&TINY, bias);
        let exported = export(&folder, &out, &TINY, None, dtype, Values::Dense).unwrap();
        let zeros = if bias == Bias::Absent { 2 * 6 + 1 } else { 0 };
        assert_eq!((exported.zero_biases.len(), exported.sparse24.len()), (zeros, 0));
        assert_eq!(Gpt2Config::read(&folder).unwrap(), TINY);
        for path in [&folder, &folder.join(WEIGHTS)] {
            assert_eq!(import(path, &TINY.parameters(bias)).unwrap(), out, "{dtype:?}");
        }
        let with = import(&folder, &TINY.parameters(Bias::Present)).unwrap();
        let added = with.iter().filter(|tensor| exported.zero_biases.contains(&tensor.name));
        assert!(added.flat_map(|tensor| &tensor.values).all(|&value| value == 0.0));
    }
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
    let (ones, infinite) = ([1.0; 24], [0.0, 1.0, f32::INFINITY, 3.0]);
    let heads = [[0.0, 1.0, 2.0, 4.0], [0.0, 1.0, 2.0, -3.0]];
    let untied = heads.each_ref().map(|head| {
        let tied: &[f32] = &[0.0, 1.0, 2.0, 3.0];
        [("wte.weight", &[2_usize, 2][..], tied), ("lm_head.weight", &[2, 2], head)]
    });
    let untied_message = "tensor \"lm_head.weight\" (F32 [2, 2]) differs from \"wte.weight\": the \
        head is not tied to the embedding, which this model needs";
    type Tensor<'a> = (&'a str, &'a [usize], &'a [f32]);
    type Case<'a> = (&'a [Tensor<'a>], (&'a str, &'a [usize]), &'a str);
    let cases: [Case<'_>; 11] = [
        (
            &[("wpe.weight", &[2, 2], &ones[..4])],
            ("wte.weight", &[3, 2]),
            "\"wpe.weight\" (F32 [2, 2]) has no place in the model",
        ),
        (
            &[],
            ("wte.weight", &[3, 2]),
            "holds no tensor \"wte.weight\" (nor \"transformer.wte.weight\")",
        ),
        (
            &[],
            ("ln_f.bias", &[2]),
            "(nor \"transformer.ln_f.bias\"); add it, with zeros if the model has no biases",
        ),
        (
            &[("transformer.wte.weight", &[4, 2], &ones[..8])],
            ("wte.weight", &[3, 2]),
            "has a vocabulary of 4 tokens, the model one of 3; use the tokenizer that goes with \
                the weights",
        ),
        (
            &[("wpe.weight", &[4, 2], &ones[..8])],
            ("wpe.weight", &[3, 2]),
            "has 4 positions, the model a context of 3",
        ),
        (
            &[("h.0.mlp.c_fc.weight", &[8, 2], &ones[..16])],
            ("h.0.mlp.c_fc.weight", &[8, 2]),
            "tensor \"h.0.mlp.c_fc.weight\" (F32 [8, 2]) is expected to be [2, 8]",
        ),
        (
            &[("ln_f.weight", &[2], &ones[..2]), ("ln_f.bias", &[2], &ones[..2])],
            ("ln_f.weight", &[2]),
            "tensor \"ln_f.bias\" (F32 [2]) is not zero, and the model has no biases; set \
                model.bias = true",
        ),
        (
            &[("ln_f.weight", &[2], &ones[..2]), ("transformer.ln_f.weight", &[2], &ones[..2])],
            ("ln_f.weight", &[2]),
            "occurs twice, with and without the prefix \"transformer.\"",
        ),
        (&untied[0], ("wte.weight", &[2, 2]), untied_message),
        (&untied[1], ("wte.weight", &[2, 2]), untied_message),
        (
            &[("wpe.weight", &[2, 2], &infinite)],
            ("wpe.weight", &[2, 2]),
            "holds inf at element 2 (byte 88); only finite values are read",
        ),
    ];
    for (given, wanted, message) in cases {
        let (_directory, path) = foreign(given);
        let found = problem(import(&path, &expected(&[wanted])));
        assert!(found.ends_with(message), "{found}");
        assert!(found.starts_with(&path.display().to_string()), "{found}");
    }
}

#[test]
fn other_types_are_refused() {
    let (_directory, path) = foreign(&[("wte.weight", &[1, 2], &[0.0, 1.0])]);
    let mut bytes = fs::read(&path).unwrap();
    let dtype = bytes.windows(3).position(|word| word == b"F32").unwrap();
    bytes[dtype] = b'I';
    fs::write(&path, bytes).unwrap();
    let message = problem(import(&path, &expected(&[("wte.weight", &[1, 2])])));
    let end = "tensor \"wte.weight\" (I32 [1, 2]) is expected to be F32, F16 or BF16";
    assert!(message.ends_with(end), "{message}");
}

#[test]
fn folders_without_weights_say_what_they_hold() {
    let directory = tempfile::tempdir().unwrap();
    for (file, end) in [
        ("README.md", "holds no \"model.safetensors\""),
        ("pytorch_model.bin", "is not read: save the weights again as safetensors"),
    ] {
        fs::write(directory.path().join(file), "").unwrap();
        let message = problem(import(directory.path(), &[]));
        assert!(message.ends_with(end), "{message}");
    }
}

#[test]
fn configurations_that_compute_something_else_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(CONFIG);
    let good = String::from_utf8(TINY.to_json("float32", None)).unwrap();
    for (from, to, message) in [
        (
            "gelu_new",
            "relu",
            "is \"relu\", expected \"gelu_new\" or \"gelu_pytorch_tanh\" or \"gelu\"",
        ),
        ("0.00001", "0.000001", "layer_norm_epsilon is 1e-6, expected 0.00001"),
        (
            "\"tie_word_embeddings\": true",
            "\"tie_word_embeddings\": false",
            "tie_word_embeddings is false, expected true",
        ),
        (
            "\"model_type\": \"gpt2\"",
            "\"model_type\": \"llama\", \"n_layer\": true",
            "model_type is \"llama\", expected \"gpt2\", the only model that can be imported",
        ),
        ("\"n_head\": 2", "\"n_head\": 3", "n_embd is 8, expected a multiple of n_head = 3"),
        ("\"n_head\": 2", "\"n_head\": 0", "n_head is 0, expected 1..=16777216"),
        (
            "\"n_layer\": 2",
            "\"n_layer\": 1000000000000",
            "n_layer is 1000000000000, expected 1..=4096",
        ),
    ] {
        let text = good.replace(from, to);
        assert_ne!(text, good, "{from}");
        fs::write(&path, text).unwrap();
        let found = problem(Gpt2Config::read(directory.path()));
        assert!(found.contains(message), "{found}");
    }
    let other = good.replace("\"n_inner\": null", "\"n_inner\": 20").replace("0.00001", "1e-05");
    fs::write(&path, other).unwrap();
    fs::write(directory.path().join(WEIGHTS), "").unwrap();
    let read = || Gpt2Config::read(&directory.path().join(WEIGHTS)).unwrap();
    assert_eq!(read(), Gpt2Config { n_inner: 20, ..TINY });
    let exact = Gpt2Config { activation: Activation::GeluErf, ..TINY };
    fs::write(&path, exact.to_json("float32", None)).unwrap();
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
    let exported = export(directory.path(), &out, &TINY, None, Dtype::Bf16, values).unwrap();
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
    let out = weights(&TINY, Bias::Absent);
    let renamed = |names: [&str; 2]| {
        let mut masks = masks();
        masks.iter_mut().zip(names).for_each(|(mask, name)| mask.0 = name.into());
        masks
    };
    let mut broken = masks();
    broken[1].1.tiles_mut()[9] ^= 1;
    for (phase, masks, expected) in [
        (
            PhaseKind::Dense,
            masks(),
            "the checkpoint is of a dense phase with 2 masks, so it is not a 2:4 model",
        ),
        (PhaseKind::Sparse, Vec::new(), "of a sparse phase with 0 masks, so it is not a 2:4 model"),
        (
            PhaseKind::Sparse,
            broken,
            "mask check: the mask is not transposable: tile (1, 1) holds 0x",
        ),
        (
            PhaseKind::Sparse,
            renamed(["h.0.mlp.c_proj.weight", "h.1.mlp.c_proj.weight"]),
            "the mask of \"h.0.mlp.c_proj.weight\" is [32, 8], its weight [8, 32]",
        ),
        (
            PhaseKind::Sparse,
            renamed(["h.7.mlp.c_fc.weight", "h.1.mlp.c_proj.weight"]),
            "\"h.7.mlp.c_fc.weight\" has no place in Hugging Face's GPT-2",
        ),
    ] {
        let structure = MaskKind::Transposable;
        let values = Values::Sparse24 { phase, masks: &masks, structure };
        let message = problem(export(&folder, &out, &TINY, None, Dtype::F32, values));
        assert!(message.contains(expected), "{message}");
    }
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn exports_that_cannot_be_leave_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path().join("model");
    let good = weights(&TINY, Bias::Absent);
    type Change = fn(&mut Vec<NamedTensor>);
    let changes: [(Change, Dtype, &str); 4] = [
        (
            |weights| drop(weights.remove(0)),
            Dtype::F32,
            "cannot be exported to: the weight \"wte.weight\" is missing",
        ),
        (
            |weights| weights[4].shape = vec![16, 4],
            Dtype::F32,
            "the weight \"h.0.attn.c_proj.weight\" is [16, 4], GPT-2 expects [8, 8]",
        ),
        (
            |weights| {
                let name = "h.0.mlp.gate.weight".to_owned();
                weights.push(NamedTensor { name, shape: vec![0], values: Vec::new() });
            },
            Dtype::F32,
            "\"h.0.mlp.gate.weight\" has no place in Hugging Face's GPT-2",
        ),
        (
            |weights| weights[0].values[3] = 1e5,
            Dtype::F16,
            "\"wte.weight\" holds 100000 at element 3, which is not finite in F16",
        ),
    ];
    for (change, dtype, end) in changes {
        let mut bad = good.clone();
        change(&mut bad);
        let message = problem(export(&folder, &bad, &TINY, None, dtype, Values::Dense));
        assert!(message.ends_with(end), "{message}");
    }
    let mut operations = 0;
    loop {
        fault::plan(Plan::Fail(operations, Fault::NoSpace));
        match export(&folder, &good, &TINY, None, Dtype::F32, Values::Dense) {
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
}

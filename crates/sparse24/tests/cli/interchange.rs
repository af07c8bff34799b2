//! `sparse24 export`, `import` and `--init-from`: round trips and refusals.

use std::{collections::BTreeMap, fs};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::json;

use crate::support::{Place, TINY};

/// Tensors by name: type, shape and bytes.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn tensors(place: &Place, file: &str) -> Tensors {
    let bytes = fs::read(place.path(file)).unwrap();
    let tensor = |(name, view): (&str, TensorView<'_>)| {
        (name.to_owned(), (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
    };
    SafeTensors::deserialize(&bytes).unwrap().iter().map(tensor).collect()
}

fn write_tensors(place: &Place, file: &str, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    place.write(file, safetensors::serialize(views, None).unwrap());
}

/// Writes a Hugging Face GPT-2 with one layer, all zeros.
fn write_zero_gpt2(place: &Place, folder: &str, d: usize, vocabulary: usize) {
    let (inner, positions) = (8, 4);
    fs::create_dir(place.path(folder)).unwrap();
    let config = json!({ "model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": d,
        "n_positions": positions, "vocab_size": vocabulary, "n_inner": inner });
    place.write(&format!("{folder}/config.json"), config.to_string());
    let parts: [(&str, &[usize]); 9] = [
        ("wte", &[vocabulary, d]),
        ("wpe", &[positions, d]),
        ("h.0.ln_1", &[d]),
        ("h.0.attn.c_attn", &[d, 3 * d]),
        ("h.0.attn.c_proj", &[d, d]),
        ("h.0.ln_2", &[d]),
        ("h.0.mlp.c_fc", &[d, inner]),
        ("h.0.mlp.c_proj", &[inner, d]),
        ("ln_f", &[d]),
    ];
    let zeros = |shape: &[usize]| {
        (Dtype::F32, shape.to_vec(), vec![0; 4 * shape.iter().product::<usize>()])
    };
    let mut tensors = Tensors::new();
    for (name, shape) in parts {
        tensors.insert(format!("{name}.weight"), zeros(shape));
        if !name.starts_with('w') {
            tensors.insert(format!("{name}.bias"), zeros(&shape[shape.len() - 1..]));
        }
    }
    write_tensors(place, &format!("{folder}/model.safetensors"), &tensors);
}

#[test]
fn the_tokenizer_is_chosen_only_for_vocabulary_sizes_of_gpt2() {
    let place = Place::new();
    for (vocabulary, is_gpt2) in [(50_256, false), (50_257, true), (50_258, false), (50_304, true)]
    {
        let (folder, run) = (format!("v{vocabulary}"), format!("run{vocabulary}"));
        write_zero_gpt2(&place, &folder, 4, vocabulary);
        place.answer(&format!("import {folder} {run}"));
        assert_eq!(place.path(&run).join("tokenizer.json").exists(), is_gpt2, "{vocabulary}");
    }
    write_zero_gpt2(&place, "padded", 8, 512);
    place.answer("import padded run --tokenizer byte");
    // All logits are equal, and half of the ids are padding, which has no text.
    place.answer("sample run --tokens 50 --top-k 512");
}

#[test]
fn an_exported_model_is_imported_with_the_same_weights() {
    let place = Place::new();
    // One sequence at a time, as imported models are evaluated, so that sums are the same.
    place.train("run", "--set model.bias=true --set data.tokenizer=byte --set batch.size=1");
    assert_eq!(place.answer("export run out"), "exported step 12 to out\n");
    let answer = place.answer("import out imported");
    assert!(answer.contains("imported/checkpoints/step-00000000"), "{answer}");
    place.answer("export imported again");
    assert!(tensors(&place, "out/model.safetensors") == tensors(&place, "again/model.safetensors"));
    assert_eq!(place.read("out/config.json"), place.read("again/config.json"));
    let [trained, imported] = ["run", "imported --data text"]
        .map(|run| place.json(&format!("eval {run} --json"))["loss"].clone());
    assert_eq!(trained, imported);
    assert!(place.answer("sample imported --prompt the --tokens 5").starts_with("the"));
    assert_eq!(place.json("config --config imported/config.toml --json")["preset"], "imported");
    place.refuses("resume imported", 3, "imported/checkpoints/step-00000000: *--init-from");

    for (name, expected) in [("f16", Dtype::F16), ("bf16", Dtype::BF16)] {
        place.answer(&format!("export run {name} --dtype {name}"));
        let stored = tensors(&place, &format!("{name}/model.safetensors"));
        assert!(stored.values().all(|(found, ..)| *found == expected));
    }
}

#[test]
fn missing_biases_are_exported_as_zeros_and_dropped_on_import() {
    let place = Place::trained("");
    assert!(place.answer("export run out").contains("13 biases of zeros"));
    assert!(place.answer("import out imported").contains("model.bias = false"));
    assert!(place.read("imported/config.toml").contains("bias = false"));
    assert!(!place.path("imported/tokenizer.json").exists(), "27 tokens could be any tokenizer");
}

#[test]
fn only_a_sparse_checkpoint_is_exported_as_2_4() {
    let place = Place::trained("");
    place.train("dense", "--method dense");
    let answer = place.answer("export run/checkpoints/step-00000010 sparse --sparse24");
    let (told, verify) = answer.trim_end().rsplit_once('\n').unwrap();
    assert!(told.contains("4 weights"), "{answer}");
    place.answer(verify.strip_prefix("sparse24 ").unwrap());
    place.answer("verify sparse/model.safetensors --include mlp.*weight");
    for run in ["run", "dense"] {
        let pattern = format!("{run}: step 12*dense phase*`sparse24 prune`");
        place.refuses(&format!("export {run} out --sparse24"), 3, &pattern);
    }
    place.answer("export run/checkpoints/step-00000010 values");
    let (code, ..) = place.run("verify values/model.safetensors --include mlp.*weight");
    assert_eq!(code, Some(1), "dense values are not 2:4");
}

#[test]
fn exports_that_cannot_be_written_or_represented_are_refused() {
    let place = Place::trained("");
    place.train("gated", "--set model.activation=geglu");
    fs::create_dir(place.path("full")).unwrap();
    place.write("full/file", "");
    // 1e5 is beyond F16.
    write_zero_gpt2(&place, "gpt2", 8, 256);
    let mut values = tensors(&place, "gpt2/model.safetensors");
    values.get_mut("wpe.weight").unwrap().2[12..16].copy_from_slice(&1e5_f32.to_le_bytes());
    write_tensors(&place, "gpt2/model.safetensors", &values);
    place.answer("import gpt2 large");
    for (line, code, pattern) in [
        ("run full", 3, "full: *empty folder"),
        ("run run", 3, "run: *empty folder"),
        ("run text", 3, "text: *empty folder"),
        ("run text/out", 4, "cannot create text*os error"),
        ("run /proc/out", 4, "cannot create /proc/*os error"),
        ("gated out", 3, "gated: *GELU"),
        ("large out --dtype f16", 3, "out: *\"wpe.weight\"*100000*element 3*F16"),
    ] {
        place.refuses(&format!("export {line}"), code, pattern);
    }
    place.answer("export large out --dtype bf16");
}

/// The tests of `sparse24_run::interchange` have every reason.
#[test]
fn an_import_is_refused_for_its_folder_tokenizer_or_shape() {
    let place = Place::trained("");
    place.answer("export run gpt2");
    write_zero_gpt2(&place, "odd", 6, 8);
    for (line, code, pattern) in [
        ("nowhere new", 3, "nowhere: does not exist*config.json*model.safetensors"),
        ("gpt2 run", 3, "run: *empty run directory*resume"),
        ("gpt2 text", 3, "text: *is a file"),
        ("gpt2 text/new", 4, "cannot create text/new*os error"),
        ("gpt2 new --tokenizer char", 2, "--tokenizer: *char*byte or gpt2"),
        ("gpt2 new --tokenizer byte", 2, "--tokenizer: *byte*256*27"),
        ("gpt2 new --tokenizer word", 2, "'word'*byte, char, gpt2"),
        ("odd new", 3, "odd: *model.d_model: *4*6"),
    ] {
        place.refuses(&format!("import {line}"), code, pattern);
    }
    let mut damaged = tensors(&place, "gpt2/model.safetensors");
    let weight = &mut damaged.get_mut("transformer.h.0.mlp.c_fc.weight").unwrap().2;
    weight[8..12].copy_from_slice(&f32::NAN.to_le_bytes());
    write_tensors(&place, "gpt2/model.safetensors", &damaged);
    let pattern = "gpt2/model.safetensors: *h.0.mlp.c_fc.weight\" (F32 [16, 32])*NaN*element 2";
    place.refuses("import gpt2 new", 3, pattern);
    place.refuses(&format!("train {TINY} --init-from gpt2 --out new"), 3, pattern);
}

#[test]
fn a_run_starts_with_given_weights() {
    let place = Place::trained("");
    place.answer("export run gpt2");
    place.answer("import gpt2 imported");
    let end = place.model("run", 12);
    for (from, out) in
        [("run", "a"), ("run/checkpoints/step-00000012", "b"), ("gpt2", "c"), ("imported", "d")]
    {
        place.train(out, &format!("--init-from {from} --set run.keep_last=9"));
        assert!(place.model(out, 0) == end, "{from}: other weights at step 0");
        assert!(place.model(out, 12) == place.model("a", 12), "{from}");
    }
    assert!(place.model("a", 12) != end);
    // So does a resume from step 0.
    let end = place.tree("a/checkpoints/step-00000012");
    place.rewind("a", [10, 12]);
    place.answer("resume a");
    assert!(place.tree("a/checkpoints/step-00000012") == end);
}

#[test]
fn weights_of_another_shape_are_refused() {
    let place = Place::trained("");
    place.answer("export run gpt2");
    fs::create_dir(place.path("folder")).unwrap();
    for (settings, from, pattern) in [
        ("model.d_model=32", "run", "run: *wte.weight: *864*[27, 32]*432*the model's shape"),
        (
            "model.d_model=32",
            "gpt2",
            "gpt2/model.safetensors: *wte.weight\" (F32 [27, 16])*[27, 32]",
        ),
        ("model.layers=1", "run", "run: *h.1.*the model's shape"),
        ("model.layers=3", "gpt2", "gpt2/model.safetensors: *\"h.2."),
        ("model.bias=true", "run", "run: *.bias: *the model's shape"),
        ("seed=1", "nowhere", "nowhere: does not exist*model.safetensors"),
        ("seed=1", "folder", "folder: *\"model.safetensors\""),
    ] {
        let train = format!("train {TINY} --set {settings} --init-from {from} --out new");
        place.refuses(&train, 3, pattern);
    }
}

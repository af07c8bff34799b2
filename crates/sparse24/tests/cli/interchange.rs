//! `sparse24 export`, `import` and `--init-from`: round trips, and every way in which they refuse.

use std::{collections::BTreeMap, fs};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Value, json};

use crate::support::{Place, TINY};

/// Tensors by name: type, shape and bytes.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn tensors(place: &Place, file: &str) -> Tensors {
    let bytes = fs::read(place.path(file)).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.iter()
        .map(|(name, view)| {
            (name.to_owned(), (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
        })
        .collect()
}

fn write_tensors(place: &Place, file: &str, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    place.write(file, safetensors::serialize(views, None).unwrap());
}

/// A folder as of Hugging Face, one layer of zeros.
fn write_gpt2_of_zeros(place: &Place, folder: &str, width: usize, vocabulary: usize) {
    let (d, inner, positions) = (width, 8, 4);
    fs::create_dir(place.path(folder)).unwrap();
    let config = json!({ "model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": d, "n_positions": positions, "vocab_size": vocabulary, "n_inner": inner });
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
fn a_vocabulary_padded_beyond_its_tokenizer_is_never_drawn_from() {
    let place = Place::new();
    write_gpt2_of_zeros(&place, "padded", 8, 512);
    place.answer("import padded run --tokenizer byte");
    // All logits are equal: of 512 ids, half of all draws would mean nothing.
    let mut command = place.command("sample run --tokens 50 --top-k 512");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn only_a_vocabulary_of_gpt2_tells_of_its_tokenizer() {
    let place = Place::new();
    for (vocabulary, is_gpt2) in
        [(50_256, false), (50_257, true), (50_258, false), (50_304, true), (51_200, false)]
    {
        let (folder, run) = (format!("v{vocabulary}"), format!("run{vocabulary}"));
        write_gpt2_of_zeros(&place, &folder, 4, vocabulary);
        place.answer(&format!("import {folder} {run}"));
        assert_eq!(place.path(&run).join("tokenizer.json").exists(), is_gpt2, "{vocabulary}");
    }
}

#[test]
fn dense_values_go_out_and_come_back() {
    let place = Place::new();
    // One sequence at a time, as an imported model is evaluated: then the sums are the same.
    place.train("run", "--set model.bias=true --set data.tokenizer=byte --set batch.size=1");
    let said = place.answer("export run out");
    assert_eq!(said, "exported step 12 to out\n");
    let said = place.answer("import out imported");
    assert!(
        said.starts_with("imported ") && said.contains("imported/checkpoints/step-00000000"),
        "{said}"
    );
    place.answer("export imported again");
    assert!(tensors(&place, "out/model.safetensors") == tensors(&place, "again/model.safetensors"));
    assert_eq!(place.read("out/config.json"), place.read("again/config.json"));
    let [trained, imported] = ["run", "imported --data text"]
        .map(|run| place.json(&format!("eval {run} --json"))["loss"].clone());
    assert_eq!(trained, imported, "the same weights on the same text");
    assert!(place.answer("sample imported --prompt the --tokens 5").starts_with("the"));
    assert_eq!(place.json("config --config imported/config.toml --json")["preset"], "imported");
    place.refuses("resume imported", 3, "imported/checkpoints/step-00000000: is an imported model, which was not trained here; begin a run from it with `sparse24 train --init-from`");

    for (dtype, stored) in [("f16", Dtype::F16), ("bf16", Dtype::BF16)] {
        place.answer(&format!("export run {dtype} --dtype {dtype}"));
        assert!(
            tensors(&place, &format!("{dtype}/model.safetensors"))
                .values()
                .all(|(found, ..)| *found == stored)
        );
    }
}

#[test]
fn a_model_without_biases_gets_zeros_that_are_taken_back() {
    let place = Place::new();
    place.train("run", "");
    let said = place.answer("export run out");
    assert!(
        said.contains(
            "13 biases that the model has not were written as zeros, which compute the same"
        ),
        "{said}"
    );
    let said = place.answer("import out imported");
    assert!(
        said.contains("all of its biases are zero: the model has none (model.bias = false)"),
        "{said}"
    );
    assert!(place.read("imported/config.toml").contains("bias = false"));
    assert!(
        !place.path("imported/tokenizer.json").exists(),
        "a vocabulary of 27 tells of no tokenizer"
    );
}

#[test]
fn only_a_sparse_checkpoint_is_exported_as_2_4() {
    let place = Place::new();
    place.train("run", "");
    place.train("dense", "--method dense");
    let said = place.answer("export run/checkpoints/step-00000010 sparse --sparse24");
    let (told, verify) = said.trim_end().rsplit_once('\n').unwrap();
    assert!(
        told.ends_with("4 weights were read back and proved 2:4; to verify them again:"),
        "{said}"
    );
    place.answer(verify.strip_prefix("sparse24 ").unwrap());
    place.answer("verify sparse/model.safetensors --include mlp.*weight");
    let message = "*: step 12 is of a dense phase, its weights have left their masks: export the checkpoint at the end of the sparse phase, or prune the exported file with `sparse24 prune`";
    place.refuses("export run out --sparse24", 3, message);
    place.refuses("export dense out --sparse24", 3, message);
    place.answer("export run/checkpoints/step-00000010 values");
    let output =
        place.command("verify values/model.safetensors --include mlp.*weight").output().unwrap();
    assert_eq!(output.status.code(), Some(1), "dense values are not 2:4");
}

#[test]
fn what_cannot_be_exported_is_refused() {
    let place = Place::new();
    place.train("run", "");
    place.train("gated", "--set model.activation=geglu");
    fs::create_dir(place.path("full")).unwrap();
    place.write("full/file", "");
    let not_empty = "is not an empty folder, expected a new or empty one; choose another";
    for (line, code, message) in [
        ("run full", 3, format!("full: {not_empty}")),
        ("run run", 3, format!("run: {not_empty}")),
        ("run text", 3, format!("text: {not_empty}")),
        ("run text/out", 4, "cannot create text*: * (os error *)".to_owned()),
        ("run /proc/out", 4, "cannot create /proc/*: * (os error *)".to_owned()),
        ("gated out", 3, "gated: Hugging Face's GPT-2 has GELU feed-forward layers, this model has not".to_owned()),
        (
            "run out --dtype f8",
            2,
            "invalid value 'f8' for '--dtype <DTYPE>' [possible values: f32, f16, bf16]*; --help tells all".to_owned(),
        ),
    ] {
        place.refuses(&format!("export {line}"), code, &message);
    }
}

#[test]
fn a_value_that_a_type_cannot_hold_is_not_exported() {
    let place = Place::new();
    write_gpt2_of_zeros(&place, "large", 8, 256);
    let mut values = tensors(&place, "large/model.safetensors");
    values.get_mut("wpe.weight").unwrap().2[12..16].copy_from_slice(&1e5_f32.to_le_bytes());
    write_tensors(&place, "large/model.safetensors", &values);
    place.answer("import large run");
    let message = r#"out: cannot be exported to: "wpe.weight" holds 100000 at element 3, which is not finite in F16"#;
    place.refuses("export run out --dtype f16", 3, message);
    place.answer("export run out --dtype bf16");
}

#[test]
fn a_damaged_or_foreign_folder_is_not_imported() {
    let place = Place::new();
    place.train("run", "");
    place.answer("export run gpt2");
    let config: Value = serde_json::from_str(&place.read("gpt2/config.json")).unwrap();
    let refuses_config = |change: &dyn Fn(&mut Value), message: &str| {
        let mut config = config.clone();
        change(&mut config);
        place.write("gpt2/config.json", config.to_string());
        place.refuses("import gpt2 new", 3, message);
    };
    refuses_config(
        &|c| c["model_type"] = json!("bert"),
        r#"gpt2/config.json: model_type is "bert", expected "gpt2""#,
    );
    refuses_config(
        &|c| c["activation_function"] = json!("relu"),
        r#"gpt2/config.json: activation_function is "relu", expected "gelu_new"; *"#,
    );
    refuses_config(
        &|c| c["layer_norm_epsilon"] = json!(1e-6),
        "gpt2/config.json: layer_norm_epsilon is *, expected *; *",
    );
    refuses_config(
        &|c| c["tie_word_embeddings"] = json!(false),
        "gpt2/config.json: tie_word_embeddings is false, expected true; *",
    );
    refuses_config(
        &|c| c["n_head"] = json!(3),
        "gpt2/config.json: n_embd is 16, expected a multiple of n_head = 3",
    );
    refuses_config(
        &|c| c["n_layer"] = json!(0),
        "gpt2/config.json: n_layer is 0, expected 1..=4096",
    );
    refuses_config(&|c| c["n_layer"] = json!(-2), "gpt2/config.json: not a GPT-2 configuration: *");
    refuses_config(
        &|c| c["n_layer"] = Value::Null,
        "gpt2/config.json: not a GPT-2 configuration: *",
    );
    refuses_config(&|c| *c = json!([1]), "gpt2/config.json: not a GPT-2 configuration: *");
    refuses_config(
        &|c| c["n_layer"] = json!(3),
        r#"gpt2/model.safetensors: holds no tensor "h.2.ln_1.weight" (nor "transformer.h.2.ln_1.weight")*"#,
    );
    refuses_config(
        &|c| c["n_layer"] = json!(1),
        r#"gpt2/model.safetensors: tensor "transformer.h.1.*" (F32 [*]) has no place in the model"#,
    );
    refuses_config(
        &|c| c["vocab_size"] = json!(28),
        r#"gpt2/model.safetensors: tensor "transformer.wte.weight" (F32 [27, 16]) has a vocabulary of 27 tokens, the model one of 28; *"#,
    );
    refuses_config(
        &|c| c["n_positions"] = json!(13),
        r#"gpt2/model.safetensors: tensor "transformer.wpe.weight" (F32 [12, 16]) has 12 positions, the model a context of 13"#,
    );
    refuses_config(
        &|c| c["n_inner"] = json!(64),
        r#"gpt2/model.safetensors: tensor "*" (F32 *) is expected to be *"#,
    );
    fs::remove_file(place.path("gpt2/config.json")).unwrap();
    place.refuses(
        "import gpt2 new",
        3,
        "gpt2/config.json: does not exist, expected that of a Hugging Face GPT-2",
    );
    place.write("gpt2/config.json", config.to_string());

    let whole = tensors(&place, "gpt2/model.safetensors");
    let refuses_weights = |change: &dyn Fn(&mut Tensors), message: &str| {
        let mut tensors = whole.clone();
        change(&mut tensors);
        write_tensors(&place, "gpt2/model.safetensors", &tensors);
        place.refuses("import gpt2 new", 3, &format!("gpt2/model.safetensors: {message}"));
        place.refuses(
            &format!("train {TINY} --init-from gpt2 --out new"),
            3,
            &format!("gpt2/model.safetensors: {message}"),
        );
    };
    let weight = "transformer.h.0.mlp.c_fc.weight";
    refuses_weights(
        &|t| drop(t.remove(weight)),
        r#"holds no tensor "h.0.mlp.c_fc.weight" (nor "transformer.h.0.mlp.c_fc.weight")*"#,
    );
    refuses_weights(
        &|t| t.get_mut(weight).unwrap().2[8..12].copy_from_slice(&f32::NAN.to_le_bytes()),
        r#"tensor "transformer.h.0.mlp.c_fc.weight" (F32 [16, 32]) holds NaN at element 2 (byte *); only finite values are read"#,
    );
    refuses_weights(
        &|t| t.get_mut(weight).unwrap().1 = vec![32, 16],
        r#"tensor "transformer.h.0.mlp.c_fc.weight" (F32 [32, 16]) is expected to be [16, 32]"#,
    );
    refuses_weights(
        &|t| t.get_mut(weight).unwrap().0 = Dtype::I32,
        r#"tensor "transformer.h.0.mlp.c_fc.weight" (I32 [16, 32]) is expected to be F32, F16 or BF16"#,
    );
    refuses_weights(
        &|t| {
            let mut head = t["transformer.wte.weight"].clone();
            head.2[0] ^= 1;
            t.insert("lm_head.weight".to_owned(), head);
        },
        r#"tensor "lm_head.weight" (F32 [27, 16]) differs from "wte.weight": the head is not tied to the embedding, which this model needs"#,
    );
    let name = "transformer.more.weight";
    refuses_weights(
        &|t| drop(t.insert(name.to_owned(), t[weight].clone())),
        r#"tensor "transformer.more.weight" (F32 [16, 32]) has no place in the model"#,
    );

    write_tensors(&place, "gpt2/model.safetensors", &whole);
    let bytes = fs::read(place.path("gpt2/model.safetensors")).unwrap();
    for (bytes, message) in [
        (&bytes[..bytes.len() - 4], "*"),
        (&bytes[..5], "*5 bytes*"),
        (b"this is no safetensors file", "*"),
    ] {
        place.write("gpt2/model.safetensors", bytes);
        place.refuses("import gpt2 new", 3, &format!("gpt2/model.safetensors: {message}"));
    }
    fs::remove_file(place.path("gpt2/model.safetensors")).unwrap();
    place.refuses("import gpt2 new", 3, r#"gpt2: holds no "model.safetensors""#);
    place.write("gpt2/pytorch_model.bin", "");
    place.refuses(
        "import gpt2 new",
        3,
        r#"gpt2: holds no "model.safetensors"; "pytorch_model.bin" is not read: save the weights again as safetensors"#,
    );
    place.write("gpt2/model.safetensors.index.json", "{}");
    place.refuses("import gpt2 new", 3, r#"gpt2: holds no "model.safetensors"; the weights are in several files: save them again as one"#);
    let message = "nowhere: does not exist, expected a folder with config.json and model.safetensors, or the latter with the former beside it";
    place.refuses("import nowhere new", 3, message);
}

#[test]
fn an_import_that_cannot_be_placed_or_read_is_refused() {
    let place = Place::new();
    place.train("run", "");
    place.answer("export run gpt2");
    for (line, code, message) in [
        (
            "gpt2 run",
            3,
            r#"run: already holds "*", expected a new or empty run directory; choose another, or resume this one"#,
        ),
        ("gpt2 text", 3, "text: is a file, expected a new or empty run directory; choose another"),
        ("gpt2 text/new", 4, "cannot create text/new: * (os error *)"),
        (
            "gpt2 new --tokenizer char",
            2,
            "--tokenizer: a char tokenizer's characters stand in no Hugging Face folder, expected byte or gpt2, or leave it out",
        ),
        (
            "gpt2 new --tokenizer byte",
            2,
            "--tokenizer: byte has 256 tokens, the model only 27; leave it out",
        ),
        (
            "gpt2 new --tokenizer gpt2",
            2,
            "--tokenizer: gpt2 has 50257 tokens, the model only 27; leave it out",
        ),
        (
            "gpt2 new --tokenizer word",
            2,
            "invalid value 'word' for '--tokenizer <TOKENIZER>' [possible values: byte, char, gpt2]; --help tells all",
        ),
    ] {
        place.refuses(&format!("import {line}"), code, message);
    }
    write_gpt2_of_zeros(&place, "odd", 6, 8);
    place.refuses(
        "import odd new",
        3,
        "odd: model.d_model: expected a multiple of 4, for 4x4 tiles, and of model.heads 1, found 6",
    );
}

#[test]
fn a_run_begins_with_weights_from_elsewhere() {
    let place = Place::new();
    place.train("run", "");
    place.answer("export run gpt2");
    place.answer("import gpt2 imported");
    for (from, out) in
        [("run", "a"), ("run/checkpoints/step-00000012", "b"), ("gpt2", "c"), ("imported", "d")]
    {
        place.train(out, &format!("--init-from {from} --set run.keep_last=9"));
        let first = |run: &str| {
            fs::read(place.path(run).join("checkpoints/step-00000000/model.safetensors")).unwrap()
        };
        let end = |run: &str| {
            fs::read(place.path(run).join("checkpoints/step-00000012/model.safetensors")).unwrap()
        };
        assert!(first(out) == end("run"), "{from}: step 0 is where the other run ended");
        assert!(end(out) == end("a") && end(out) != end("run"), "{from}");
    }
    // A resume begins with them too.
    let end = place.tree("a/checkpoints/step-00000012");
    for step in ["step-00000010", "step-00000012"] {
        fs::remove_dir_all(place.path("a/checkpoints").join(step)).unwrap();
    }
    place.answer("resume a");
    assert!(place.tree("a/checkpoints/step-00000012") == end);
}

#[test]
fn weights_of_another_shape_are_refused() {
    let place = Place::new();
    place.train("run", "");
    place.answer("export run gpt2");
    let advice = "the weights to begin with must have the model's shape";
    for (settings, run, gpt2) in [
        (
            "--set model.d_model=32",
            "wte.weight: expected 864 values ([27, 32]), found 432",
            "tensor \"transformer.wte.weight\" (F32 [27, 16]) is expected to be [27, 32]",
        ),
        (
            "--set model.sequence_length=8",
            "wpe.weight: expected 128 values ([8, 16]), found 192",
            "tensor \"transformer.wpe.weight\" (F32 [12, 16]) has 12 positions, the model a context of 8",
        ),
        (
            "--set data.tokenizer=byte",
            "wte.weight: expected 4096 values ([256, 16]), found 432",
            "tensor \"transformer.wte.weight\" (F32 [27, 16]) has a vocabulary of 27 tokens, the model one of 256; *",
        ),
        (
            "--set model.layers=1",
            "h.1.*: the model has no such parameter",
            "tensor \"transformer.h.1.*\" (F32 *) has no place in the model",
        ),
        ("--set model.layers=3", "h.2.*: its weight is missing", "holds no tensor \"h.2.*"),
        ("--set model.bias=true", "*.bias: its weight is missing", ""),
    ] {
        place.refuses(
            &format!("train {TINY} {settings} --init-from run --out new"),
            3,
            &format!("run: {run}; {advice}"),
        );
        if !gpt2.is_empty() {
            place.refuses(
                &format!("train {TINY} {settings} --init-from gpt2 --out new"),
                3,
                &format!("gpt2/model.safetensors: {gpt2}"),
            );
        }
    }
    let message = "nowhere: does not exist, expected a safetensors file, or a folder with a model.safetensors";
    place.refuses(&format!("train {TINY} --init-from nowhere --out new"), 3, message);
    fs::create_dir(place.path("folder")).unwrap();
    place.refuses(
        &format!("train {TINY} --init-from folder --out new"),
        3,
        r#"folder: holds no "model.safetensors""#,
    );
    place.write("folder/config.toml", place.read("run/config.toml"));
    place.refuses(
        &format!("train {TINY} --init-from folder --out new"),
        3,
        "folder: has no checkpoint yet",
    );
}

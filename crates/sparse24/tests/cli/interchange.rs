//! `sparse24 export`, `import` and `--init-from`: round trips and refusals. The tests of
//! `sparse24_run::interchange` have every reason for a refusal.

use std::{collections::BTreeMap, fs};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use crate::support::{Place, TINY};

/// Tensors by name: type, shape and bytes.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn tensors(place: &Place, folder: &str) -> Tensors {
    let bytes = fs::read(place.path(folder).join("model.safetensors")).unwrap();
    let tensor = |(name, view): (&str, TensorView<'_>)| {
        (name.to_owned(), (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
    };
    SafeTensors::deserialize(&bytes).unwrap().iter().map(tensor).collect()
}

fn write_tensors(place: &Place, folder: &str, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    let bytes = safetensors::serialize(views, None).unwrap();
    place.write(&format!("{folder}/model.safetensors"), bytes);
}

/// A place with a run and its export.
fn place() -> Place {
    let place = Place::trained("");
    assert!(place.answer("export run gpt2").contains("13 biases of zeros"));
    place
}

#[test]
fn the_tokenizer_is_chosen_only_for_vocabulary_sizes_of_gpt2() {
    let place = place();
    let mut resized = tensors(&place, "gpt2");
    let mut config = place.value("gpt2/config.json");
    let mut import = |vocabulary: usize, more: &str| {
        // All logits are equal.
        let zeros = (Dtype::F32, vec![vocabulary, 16], vec![0; vocabulary * 16 * 4]);
        resized.insert("transformer.wte.weight".into(), zeros);
        write_tensors(&place, "gpt2", &resized);
        config["vocab_size"] = vocabulary.into();
        place.write("gpt2/config.json", config.to_string());
        place.answer(&format!("import gpt2 run{vocabulary} {more}"));
    };
    for (vocabulary, is_gpt2) in [(50_256, false), (50_257, true), (50_258, false), (50_304, true)]
    {
        import(vocabulary, "");
        let file = place.path(&format!("run{vocabulary}/tokenizer.json"));
        assert_eq!(file.exists(), is_gpt2, "{vocabulary}");
    }
    // Half of the ids are padding, which has no text.
    import(512, "--tokenizer byte");
    place.answer("sample run512 --tokens 50 --top-k 512");
}

#[test]
fn an_exported_model_is_imported_with_the_same_weights() {
    let place = place();
    // One sequence at a time, as imported models are evaluated, so that sums are the same.
    place.train("byte", "--set model.bias=true --set data.tokenizer=byte --set batch.size=1");
    assert_eq!(place.answer("export byte out"), "exported step 12 to out\n");
    let answer = place.answer("import out imported");
    assert!(answer.contains("imported/checkpoints/step-00000000"), "{answer}");
    place.answer("export imported again");
    assert!(tensors(&place, "out") == tensors(&place, "again"));
    assert_eq!(place.read("out/config.json"), place.read("again/config.json"));
    let [trained, imported] = ["byte", "imported --data text"]
        .map(|run| place.json(&format!("eval {run} --json"))["loss"].clone());
    assert_eq!(trained, imported);
    assert!(place.answer("sample imported --prompt the --tokens 5").starts_with("the"));
    assert_eq!(place.json("config --config imported/config.toml --json")["preset"], "imported");
    place.refuses("resume imported", 3, "imported/checkpoints/step-00000000: *--init-from");
    for (name, expected) in [("f16", Dtype::F16), ("bf16", Dtype::BF16)] {
        place.answer(&format!("export run {name} --dtype {name}"));
        assert!(tensors(&place, name).values().all(|(found, ..)| *found == expected));
    }
    assert!(place.answer("import gpt2 unbiased").contains("model.bias = false"));
    assert!(place.read("unbiased/config.toml").contains("bias = false"));
    assert!(!place.path("unbiased/tokenizer.json").exists(), "27 tokens could be any tokenizer");
}

#[test]
fn a_sparse_checkpoint_of_a_run_that_ends_dense_is_exported_as_2_4() {
    let place = place();
    let answer = place.answer("export run/checkpoints/step-00000010 sparse");
    assert!(
        answer.starts_with("exported step 10, pruned as it is evaluated, to sparse\n"),
        "{answer}"
    );
    let (_, verify) = answer.trim_end().rsplit_once('\n').unwrap();
    place.answer(verify.strip_prefix("sparse24 ").unwrap());
    place.refuses("export run out --sparse24", 3, "run: step 12*dense phase*`sparse24 prune`");
    let answer = place.answer("export run/checkpoints/step-00000010 values --dense");
    assert_eq!(
        answer.lines().next(),
        Some("exported step 10, the dense weights of a sparse phase, to values")
    );
    let (_, err) = place.exits("verify values/model.safetensors --include mlp.*weight", 1);
    assert!(err.contains("4 of 4"), "dense values are not 2:4: {err}");
}

#[test]
fn impossible_exports_and_imports_are_refused() {
    let place = place();
    place.train("gated", "--set model.activation=geglu");
    for (line, code, pattern) in [
        ("export run gpt2", 3, "gpt2: *empty folder"),
        ("export run text", 3, "text: *empty folder"),
        ("export run text/out", 4, "cannot create text*os error"),
        ("export gated out", 3, "gated: *GELU"),
        ("import nowhere new", 3, "nowhere: does not exist*config.json*model.safetensors"),
        ("import gpt2 run", 3, "run: *empty run directory*resume"),
        ("import gpt2 text", 3, "text: *is a file"),
        ("import gpt2 text/new", 4, "cannot create text/new*os error"),
        ("import gpt2 new --tokenizer char", 2, "--tokenizer: *char*byte or gpt2"),
        ("import gpt2 new --tokenizer byte", 2, "--tokenizer: *byte*256*27"),
        ("import gpt2 new --tokenizer word", 2, "'word'*byte, char, gpt2"),
    ] {
        place.refuses(line, code, pattern);
    }
    let mut damaged = tensors(&place, "gpt2");
    let weight = &mut damaged.get_mut("transformer.h.0.mlp.c_fc.weight").unwrap().2;
    weight[8..12].copy_from_slice(&f32::NAN.to_le_bytes());
    write_tensors(&place, "gpt2", &damaged);
    let pattern = "gpt2/model.safetensors: *h.0.mlp.c_fc.weight\" (F32 [16, 32])*NaN*element 2";
    place.refuses("import gpt2 new", 3, pattern);
    place.refuses(&format!("train {TINY} --init-from gpt2 --out new"), 3, pattern);
}

#[test]
fn a_run_starts_with_given_weights() {
    let place = place();
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
    let end = place.saved("a", 12);
    place.rewind("a", [10, 12]);
    place.answer("resume a");
    assert!(place.saved("a", 12) == end);

    fs::create_dir(place.path("folder")).unwrap();
    for (settings, from, pattern) in [
        ("model.d_model=32", "run", "run: *wte.weight: *864*[27, 32]*432*the model's shape"),
        (
            "model.d_model=32",
            "gpt2",
            "gpt2/model.safetensors: *wte.weight\" (F32 [27, 16])*[27, 32]",
        ),
        ("model.layers=3", "gpt2", "gpt2/model.safetensors: *\"h.2."),
        ("model.bias=true", "run", "run: *.bias: *the model's shape"),
        ("seed=1", "nowhere", "nowhere: does not exist*model.safetensors"),
        ("seed=1", "folder", "folder: *\"model.safetensors\""),
    ] {
        let train = format!("train {TINY} --set {settings} --init-from {from} --out new");
        place.refuses(&train, 3, pattern);
    }
}

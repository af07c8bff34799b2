//! `sparse24 export`, `import` and `--init-from`: round trips and refusals. The tests of
//! `sparse24_run::interchange` have every reason for a refusal.

use std::{collections::BTreeMap, fs};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::Value;

use crate::{
    finetune::questions,
    support::{Place, SAVED, TINY},
};

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
    let answer = place.answer("export run gpt2");
    let end = "wrote no tokenizer: those of the kind char are not exported\n";
    assert!(answer.contains("13 zero biases") && answer.ends_with(end), "{answer}");
    assert!(!place.has("gpt2/tokenizer.json"));
    assert_eq!(place.value("gpt2/config.json")["eos_token_id"], Value::Null);
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

/// `sparse24_run::interchange` tests what is compared.
#[test]
fn a_folders_own_tokenizer_is_not_replaced() {
    let place = Place::trained("--set data.tokenizer=byte");
    place.answer("export run hf");
    assert!(!place.answer("import hf known").contains("tokenizer"));
    assert!(place.has("known/tokenizer.json"));
    place.edit("hf/tokenizer.json", "\"a\":97", "\"a\":98");
    place.edit("hf/tokenizer.json", "\"b\":98", "\"b\":97");
    let remark = "is not supported (tokenizer.json: /model/type: expected";
    assert!(place.answer("import hf other").contains(remark));
    assert!(!place.has("other/tokenizer.json"));
    for (line, pattern) in [
        ("sample other", "other has no tokenizer.json*cannot read or write text"),
        ("eval other --data text", "text: is text, which this model has no tokenizer for"),
        (
            &format!("train {TINY} --set data.tokenizer=byte --init-from hf --out new"),
            "hf: has a tokenizer that is not supported*/model/type*data.tokenizer=char",
        ),
        (
            "finetune --task cola --data hf --init-from hf --out new",
            "hf: has a tokenizer that is not supported*/model/type*so it cannot read text",
        ),
    ] {
        place.refuses(line, 3, pattern);
    }
    // Its ids are read from shards that name no tokenizer.
    for split in ["train", "val"] {
        let ids = (0..=u16::from(u8::MAX)).flat_map(u16::to_le_bytes);
        place.write(&format!("ids/{split}.bin"), ids.collect::<Vec<_>>());
    }
    place.answer("train --data ids --steps 2 --set backend.threads=1 --init-from hf --out ids-run");
    assert!(!place.has("ids-run/tokenizer.json"));
    // Other ids, without the largest.
    place.folder("fewer");
    for split in ["train", "val"] {
        let ids = place.bytes(&format!("ids/{split}.bin"));
        place.write(&format!("fewer/{split}.bin"), &ids[..510]);
    }
    place.answer("resume ids-run --set data.path=fewer --set steps=3");
    assert!(!place.answer("import hf named --tokenizer byte").contains("tokenizer"));
    place.remove("hf/tokenizer.json");
    let remark = "tokenizer byte, assumed from the vocabulary of 256";
    assert!(place.answer("import hf assumed").contains(remark));
    let line = format!("train {TINY} --set data.tokenizer=byte --init-from hf --out new");
    assert!(place.notes(&line).contains(remark));
}

/// The table of tokens may have more rows than there are tokens, also at a resume.
#[test]
fn a_padded_model_trains() {
    let place = place();
    let mut padded = tensors(&place, "gpt2");
    let (_, shape, data) = padded.get_mut("transformer.wte.weight").unwrap();
    shape[0] = 32;
    data.resize(32 * 16 * 4, 0);
    write_tensors(&place, "gpt2", &padded);
    place.edit("gpt2/config.json", "\"vocab_size\": 27", "\"vocab_size\": 32");
    let notes = place.notes(&format!("train {TINY} {SAVED} --init-from gpt2 --out padded"));
    for remark in ["all biases are zero, so the model has none", "the text is read as char ids"] {
        assert!(notes.contains(remark), "{notes}");
    }
    place.repeats("padded");
    let bytes = place.model("padded", 12);
    let table = SafeTensors::deserialize(&bytes).unwrap().tensor("wte.weight").unwrap().shape()[0];
    assert_eq!(table, 32);
    place.answer("eval padded");
    place.answer("sample padded --tokens 20 --top-k 32");
    place.answer("export padded back");
    assert_eq!(place.value("back/config.json")["vocab_size"], 32);
    place.answer(&format!("train {TINY} --init-from padded --out more"));
    // Biases of zeros are weights where they are asked for.
    let line = format!("train {TINY} --set run.keep_last=9 --set model.bias=true --init-from gpt2");
    let notes = place.notes(&format!("{line} --out biased"));
    assert!(!notes.contains("biases"), "{notes}");
    let bytes = place.model("biased", 0);
    assert!(SafeTensors::deserialize(&bytes).unwrap().tensor("ln_f.bias").is_ok());
}

#[test]
fn an_exported_model_is_imported_with_the_same_weights() {
    let place = place();
    // One sequence at a time, as imported models are evaluated, so that sums are the same.
    place.train("byte", "--set model.bias=true --set data.tokenizer=byte --set batch.size=1");
    assert_eq!(place.answer("export byte out"), "exported step 12 to out\n");
    assert_eq!(place.value("out/tokenizer.json")["model"]["vocab"]["a"], 97);
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
    place.refuses("eval imported", 2, "data.path: *imported model*embedded text*--data");
    place.refuses("resume imported", 3, "imported/checkpoints/step-00000000: *--init-from");
    for (name, expected) in [("f16", Dtype::F16), ("bf16", Dtype::BF16)] {
        place.answer(&format!("export run {name} --dtype {name}"));
        assert!(tensors(&place, name).values().all(|(found, ..)| *found == expected));
    }
    assert!(place.answer("import gpt2 unbiased").contains("model.bias = false"));
    assert!(place.read("unbiased/config.toml").contains("bias = false"));
    assert!(!place.has("unbiased/tokenizer.json"), "27 tokens could be any tokenizer");
}

const BERT: &str = "--set model.kind=bert --set model.bias=true --set model.activation=gelu-erf \
    --set data.tokenizer=byte";

/// The same for a BERT, whose pre-training goes on from a run and from a folder alike.
#[test]
fn a_bert_goes_out_and_comes_back() {
    let place = Place::trained(BERT);
    assert_eq!(place.answer("export run out"), "exported step 12 to out\n");
    assert_eq!(place.value("out/tokenizer.json")["model"]["vocab"]["[MASK]"], 256);
    let answer = place.answer("import out imported");
    assert_eq!(answer.lines().count(), 1, "{answer}");
    place.answer("export imported again");
    assert!(tensors(&place, "out") == tensors(&place, "again"));
    assert_eq!(place.read("out/config.json"), place.read("again/config.json"));
    let [trained, imported] = ["run", "imported --data text"]
        .map(|run| place.json(&format!("eval {run} --json"))["tokens"].clone());
    assert_eq!(trained, imported);
    for from in ["run", "out"] {
        let line = format!("train --data text --steps 2 {SAVED} --set backend.threads=1");
        place.answer(&format!("{line} --init-from {from} --out more-{from}"));
        assert!(place.model(&format!("more-{from}"), 0) == place.model("run", 12), "{from}");
    }
    assert!(place.model("more-run", 2) == place.model("more-out", 2));
    // A tokenizer that is not known.
    place.remove("out/tokenizer.json");
    place.write("out/vocab.txt", "[PAD]\n[MASK]\n");
    let answer = place.answer("import out words");
    assert!(answer.contains("token ids, not text, the last of which it takes for its mask"));
    for line in ["train --data text", "finetune --task cola --data text"] {
        place.refuses(&format!("{line} --init-from out --out new"), 3, "out: has *tokenizer*");
    }
}

/// The tokenizer of words goes along, from either file, and reads text and questions.
#[test]
fn a_bert_of_words_goes_out_and_comes_back() {
    let place = Place::new();
    place.write("text", "a b c xy d ab cd\n".repeat(100));
    let pieces = place.json("prepare --data text --json --tokenizer wordpiece --out pieces");
    let words = "--set data.path=pieces --set data.tokenizer=wordpiece --set steps=2";
    // One sequence at a time, as imported models are evaluated, so that sums are the same.
    let more = "--method dense --set batch.size=1 --set model.sequence_length=24";
    place.train("run", &format!("{BERT} {words} {more}"));
    assert_eq!(place.answer("export run out"), "exported step 2 to out\n");
    let config = place.value("out/config.json");
    assert_eq!(
        (&config["vocab_size"], &config["pad_token_id"]),
        (&pieces["vocabulary"], &0.into())
    );
    let end = place.model("run", 2);
    let train = format!("train --steps 4 {SAVED} --set backend.threads=1 --init-from out");
    for file in ["tokenizer.json", "vocab.txt"] {
        let imported = format!("imported-{file}");
        assert_eq!(place.answer(&format!("import out {imported}")).lines().count(), 1, "{file}");
        let [trained, back] = ["run", &format!("{imported} --data pieces")]
            .map(|run| place.json(&format!("eval {run} --json"))["loss"].clone());
        assert_eq!(trained, back, "{file}");
        let tokenizers = [&imported, "run"].map(|run| place.read(&format!("{run}/tokenizer.json")));
        assert_eq!(tokenizers[0], tokenizers[1], "{file}");
        // Other words than those that the vocabulary was trained on.
        place.write("other", "xy or zebra\n".repeat(100));
        place.answer(&format!("{train} --data other --out more-{file}"));
        assert!(place.model(&format!("more-{file}"), 0) == end, "{file}");
        assert_eq!(place.read(&format!("more-{file}/tokenizer.json")), tokenizers[1]);
        place.answer(&format!("resume more-{file} --set steps=5"));
        let _ = fs::remove_file(place.path("out/tokenizer.json"));
    }
    place.remove("out/tokenizer_config.json");
    let remark = "pieces: capital letters become lower case";
    let pieces = place.read("out/vocab.txt");
    assert!(place.answer("import out guessed").contains(remark));
    let line = "prepare --data text --tokenizer out/vocab.txt --out again";
    assert!(place.exits(line, 0).1.contains(remark));
    let (fewer, _) = pieces.trim_end().rsplit_once('\n').unwrap();
    place.write("out/vocab.txt", fewer);
    let remark = place.answer("import out fewer");
    assert!(remark.contains("check that they belong together"), "{remark}");
    place.write("out/vocab.txt", pieces + "one\ntoo\nmany\n");
    place.refuses("import out new", 3, "out/vocab.txt: has * pieces, but the model only * ids");
}

/// The head for a span comes back for the task, and is replaced by another fine-tuning.
#[test]
fn models_that_answer_are_exported() {
    for (model, class) in [(BERT, "Bert"), ("--set data.tokenizer=byte", "GPT2")] {
        let place = Place::trained(&format!("{model} --set model.sequence_length=24"));
        questions(&place);
        let tune = "finetune --task squad --data squad --epochs 1";
        place.answer(&format!("{tune} --init-from run --out tuned"));
        place.answer("export tuned out");
        let config = place.value("out/config.json");
        assert_eq!(config["architectures"][0], format!("{class}ForQuestionAnswering"));
        place.answer("import out imported --task squad");
        place.answer("export imported again");
        assert!(tensors(&place, "out") == tensors(&place, "again"));
        let [tuned, imported] = ["tuned", "imported --data squad"]
            .map(|run| place.json(&format!("eval {run} --json"))["scores"].clone());
        assert_eq!(tuned, imported);
        let not = "out: has a head for a span, the task cola expects 2 classes";
        place.refuses("import out new --task cola", 3, not);
        let left = place.notes(&format!("{tune} --init-from out --out more"));
        assert!(left.contains("left out qa_outputs, which the model"), "{left}");
        assert!(tensors(&place, "out").contains_key("qa_outputs.weight"));
    }
}

/// A head comes back for the same task, and only for it.
#[test]
fn fine_tuned_models_are_exported_with_their_heads() {
    for (model, class) in [(BERT, "Bert"), ("--set data.tokenizer=byte", "GPT2")] {
        let place = Place::trained(model);
        for name in ["train.tsv", "dev.tsv"] {
            let row = |i: usize| format!("s\t{}\t\tword {i}\n", i % 2);
            place.write(&format!("task/{name}"), (0..16).map(row).collect::<String>());
        }
        let tune = "finetune --task cola --data task --epochs 1 --set optimizer.learning_rate=0.01";
        place.answer(&format!("{tune} --init-from run --out tuned"));
        place.answer("export tuned out");
        let config = place.value("out/config.json");
        assert_eq!(config["architectures"][0], format!("{class}ForSequenceClassification"));
        place.answer("import out imported --task cola");
        place.answer("export imported again");
        assert!(tensors(&place, "out") == tensors(&place, "again"));
        assert_eq!(place.read("out/config.json"), place.read("again/config.json"));
        let [tuned, imported] = ["tuned", "imported --data task"]
            .map(|run| place.json(&format!("eval {run} --json"))["scores"].clone());
        assert_eq!(tuned, imported);
        let not = "out: has a head for 2 classes, the task";
        place.refuses("import out new --task mnli", 3, &format!("{not} mnli expects 3 classes"));
        place.refuses("import out new --task sts-b", 3, &format!("{not} sts-b expects a number"));
        let left = place.notes(&format!("{tune} --init-from out --out again-tuned"));
        assert!(left.contains("left out "), "{left}");
        place.edit("out/config.json", "\"0\": \"0\"", "\"0\": \"1\"");
        let renamed = "out: its class 0 is \"1\", but that of the task cola is \"0\"; order";
        place.refuses("import out new --task cola", 3, renamed);
        match class {
            "Bert" => place.refuses("import out new", 3, "out: is fine-tuned*`import --task NAME`"),
            _ => assert!(place.answer("import out new").contains("left out score, which")),
        }
    }
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
    place.refuses("export run out --sparse24", 3, "run: step 12*dense phase*at the end of the*");
    place.train("dense", "--method dense");
    place.refuses(
        "export dense out --sparse24",
        3,
        "dense: step 12*masked: prune*`sparse24 prune`",
    );
    let answer = place.answer("export run/checkpoints/step-00000010 values --dense");
    assert_eq!(
        answer.lines().next(),
        Some("exported step 10, the dense weights of a sparse phase, to values")
    );
    let (_, err) = place.exits("verify values/model.safetensors --include mlp.*weight", 1);
    assert!(err.contains("4 of 4") && !err.contains("export"), "not 2:4: {err}");
    for path in ["", "/model.safetensors"] {
        let (_, err) = place.exits(&format!("verify run/checkpoints/step-00000010{path}"), 1);
        assert!(err.contains("`sparse24 export` writes the 2:4 model"), "{err}");
    }
}

#[test]
fn impossible_exports_and_imports_are_refused() {
    let place = place();
    let more = "--set model.activation=geglu --out gated";
    let answer = place.answer(&format!("train {TINY} {more}"));
    assert!(answer.ends_with("next            sparse24 sample gated\n"), "{answer}");
    for (folder, config) in
        [("llama", r#"{"model_type":"llama","hidden_size":64}"#), ("seven", "7")]
    {
        place.write(&format!("{folder}/config.json"), config);
    }
    for (line, code, pattern) in [
        ("export run gpt2", 3, "gpt2: *empty folder"),
        ("export run text", 3, "text: *empty folder"),
        ("export run text/out", 4, "cannot create text*os error"),
        ("export gated out", 3, "gated: model.activation: *gated*gelu-erf or relu"),
        ("import llama new", 3, "llama/config.json: model_type is \"llama\"*\"gpt2\" or \"bert\""),
        ("import gpt2 new --task colla", 2, "--task: *colla*did you mean \"cola\""),
        (
            "import gpt2 new --task cola",
            3,
            "gpt2: has no head for one class or number*cola*2 classes",
        ),
        ("import seven new", 3, "seven/config.json: *`7`, expected an object with model_type"),
        ("import nowhere new", 3, "nowhere: does not exist*config.json*model.safetensors"),
        ("import gpt2 run", 3, "run: *empty run directory*resume"),
        ("import gpt2 text", 3, "text: *is a file"),
        ("import gpt2 text/new", 4, "cannot create text/new*os error"),
        ("import gpt2 new --tokenizer char", 2, "--tokenizer*byte, gpt2"),
        ("import gpt2 new --tokenizer byte", 2, "--tokenizer: *byte*256*27"),
        ("import gpt2 new --tokenizer word", 2, "'word'*byte, gpt2"),
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

    place.folder("folder");
    for (settings, from, pattern) in [
        (
            "model.d_model=32 --set model.layers=3 --set model.activation=geglu",
            "run",
            "run: model.layers=3, but the initial weights have 2; model.d_model=32, but the \
             initial weights have 16; model.activation=\"geglu\", but the initial weights have \
             \"gelu\"; use settings",
        ),
        ("model.sequence_length=8", "gpt2", "gpt2: model.sequence_length=8*have 12"),
        ("model.bias=true", "run", "run: model.bias=true*have false"),
        ("data.tokenizer=byte", "run", "run: data.tokenizer=\"byte\"*have \"char\""),
        ("data.tokenizer=byte", "gpt2", "gpt2: has a vocabulary of 27 tokens*256"),
        ("data.path=other", "run", "other: the character 'A'*27 characters"),
        (
            "method.name=half",
            "run",
            "run: the method half has a d_ff of 16, but the initial weights",
        ),
        ("seed=1", "nowhere", "nowhere: does not exist*model.safetensors"),
        ("seed=1", "folder", "folder/config.json: does not exist"),
    ] {
        place.write("other", place.read("text").replace('a', "A"));
        let train = format!("train {TINY} --set {settings} --init-from {from} --out new");
        place.refuses(&train, 3, pattern);
    }
}

#[test]
fn initial_weights_bring_their_shape() {
    let place = place();
    place.shard("gpt2/model.safetensors", "shards", "h.0");
    place.write("shards/config.json", place.bytes("gpt2/config.json"));
    let end = place.model("run", 12);
    for (from, more) in [
        ("run", ""),
        ("run", "--config run/config.toml --method dense"),
        ("shards", "--set data.tokenizer=char"),
    ] {
        let out = "runs/new";
        place.answer(&format!("train --init-from {from} --data text --steps 1 --out {out} {more}"));
        let config = place.read("runs/new/config.toml");
        for line in ["layers = 2", "d_ff = 32", "sequence_length = 12", "tokenizer = \"char\""] {
            assert!(config.contains(line), "{line}: {config}");
        }
        assert!(place.model(out, 0) == end, "{from} {more}");
        place.remove("runs");
    }
}

/// The commands of docs/other-programs.md print what it says, up to numbers.
#[test]
fn the_page_about_other_programs_is_true() {
    let place = Place::new();
    let names =
        ["mlp.up_proj", "mlp.down_proj"].map(|name| format!("model.layers.0.{name}.weight"));
    let llama = [
        ("lm_head.weight", [32, 16]),
        ("model.embed_tokens.weight", [32, 16]),
        (&names[0], [64, 16]),
        (&names[1], [16, 64]),
    ];
    let tensor = |(name, shape): &(&str, [usize; 2])| {
        let values = (0..shape[0] * shape[1]).map(|at| (at * 7 % 11) as f32 - 5.0);
        let data = values.flat_map(f32::to_le_bytes).collect();
        ((*name).to_owned(), (Dtype::F32, shape.to_vec(), data))
    };
    place.folder("whole");
    write_tensors(&place, "whole", &llama.iter().map(tensor).collect());
    place.shard("whole/model.safetensors", "llama", "lm_head");
    let masked = |text: &str| {
        let plain = text.replace(|c: char| c.is_ascii_digit() || c == '.', "#");
        plain.split('#').filter(|part| !part.is_empty()).collect::<Vec<_>>().join("#")
    };
    let page = include_str!("../../../../docs/other-programs.md");
    let blocks = page.split("```console\n").skip(1).filter_map(|block| block.split("```").next());
    let mut commands = 0;
    for command in blocks.flat_map(|block| block.split("$ sparse24 ").skip(1)) {
        let (line, expected) = command.split_once('\n').unwrap();
        let smaller = format!("{line} {TINY} --set data.tokenizer=byte");
        if line.starts_with("train") {
            place.answer(&smaller);
        } else {
            assert_eq!(masked(&place.answer(line)), masked(expected), "{line}");
        }
        commands += 1;
    }
    assert_eq!(commands, 8);
}

#[cfg(unix)]
#[test]
fn one_process_at_a_time_writes_a_file_or_folder() {
    let place = Place::trained("");
    place.folder(".tmp-out");
    place.write("run/.tmp-report.html", "half");
    for (line, aside) in [("export run out", ".tmp-out"), ("report run", "run/.tmp-report.html")] {
        let other = fs::File::open(place.path(aside)).unwrap();
        other.lock().unwrap();
        place.refuses(line, 4, "cannot write *: another process is writing it; wait for it");
        assert!(place.has(aside), "{aside}");
        drop(other);
        place.answer(line);
        assert!(!place.has(aside), "{aside}");
    }
}

//! `sparse24 eval` and `sparse24 sample`: what they answer, and every way in which they refuse.

use std::fs;

use serde_json::Value;
use sparse24_run::checkpoint::{self, NamedTensor};

use crate::support::{Place, TINY, text};

#[test]
fn a_run_and_its_checkpoints_are_evaluated_as_training_did() {
    let place = Place::new();
    place.train("run", "");
    let metrics = place.metrics("run");
    for (what, step, phase) in [
        ("run", 12, "dense"),
        ("run/checkpoints/step-00000012", 12, "dense"),
        ("run/checkpoints/step-00000010", 10, "sparse"),
    ] {
        let report = place.json(&format!("eval {what} --json"));
        assert_eq!(
            (&report["step"], &report["phase"], &report["tokens"]),
            (&Value::from(step), &Value::from(phase), &Value::from(399))
        );
        let (loss, told) =
            (report["loss"].as_f64().unwrap(), metrics[step - 1]["val_loss"].as_f64().unwrap());
        assert_eq!(loss, told);
        assert!((report["perplexity"].as_f64().unwrap() - loss.exp()).abs() <= 1e-9);
    }
    let line = place.answer("eval run");
    assert!(
        line.starts_with("step 12 (dense): loss ") && line.ends_with(", over 399 tokens\n"),
        "{line}"
    );
    let mut command = place.command("eval step-00000010 --json");
    let report = command.current_dir(place.path("run/checkpoints")).output().unwrap();
    assert!(
        report.status.success(),
        "a checkpoint finds its run from within: {}",
        String::from_utf8_lossy(&report.stderr)
    );
    place.write("other", text(2));
    let other = place.json("eval run --data other --json");
    assert_eq!(other["tokens"], 399);
    assert_ne!(other["loss"], place.json("eval run --json")["loss"]);
}

#[test]
fn a_loss_is_the_same_number_however_large_a_batch_is() {
    let place = Place::new();
    // 2000 validation tokens: more than an evaluation takes at a time, and fewer than a batch.
    place.train("run", "--set data.validation_share=0.5 --set batch.size=200 --set steps=6");
    let told = place.metrics("run").last().unwrap()["val_loss"].as_f64().unwrap();
    let report = place.json("eval run --json");
    assert!(
        report["tokens"].as_u64().unwrap() > 1024 && report["loss"].as_f64().unwrap() == told,
        "{report}, in training {told}"
    );
}

#[test]
fn only_what_is_held_out_must_suffice() {
    let place = Place::new();
    place.train("run", "");
    place.write("short", &text(2)[..11]);
    assert_eq!(
        place.json("eval run --data short --json")["tokens"],
        1,
        "training would ask for a context of 12"
    );
}

#[test]
fn a_checkpoint_of_another_model_is_refused() {
    let place = Place::new();
    place.train("run", "");
    let sound = checkpoint::load(&place.path("run/checkpoints/step-00000012")).unwrap();
    let refused = |change: &dyn Fn(&mut Vec<NamedTensor>), message: &str| {
        let mut checkpoint = sound.clone();
        [&mut checkpoint.weights, &mut checkpoint.first_moments, &mut checkpoint.second_moments]
            .into_iter()
            .for_each(change);
        checkpoint::save(&place.path("run/checkpoints"), &checkpoint).unwrap();
        place.refuses(
            "eval run",
            3,
            &format!("run/checkpoints/step-00000012: {message}; name another checkpoint"),
        );
    };
    let without =
        |tensors: &mut Vec<NamedTensor>| tensors.retain(|tensor| tensor.name != "wte.weight");
    refused(&without, "holds no wte.weight, the token embedding of a GPT-2");
    let shorter = |tensors: &mut Vec<NamedTensor>| {
        for tensor in tensors.iter_mut().filter(|tensor| tensor.name == "wte.weight") {
            tensor.shape[0] -= 1;
            tensor.values.truncate(26 * 16);
        }
    };
    refused(&shorter, "has a wte.weight of 26 rows for the 27 tokens of its tokenizer");
}

#[test]
fn what_cannot_be_evaluated_is_refused() {
    let place = Place::new();
    place.train("run", "");
    let neither = "is neither a run directory, which holds a config.toml, nor a checkpoint of one";
    fs::create_dir_all(place.path("folder/checkpoints/step-00000001")).unwrap();
    for command in ["eval", "sample", "export"] {
        let out = if command == "export" { " out" } else { "" };
        for what in ["nowhere", "folder", "text", "run/checkpoints", "run/checkpoints/step-12"] {
            place.refuses(&format!("{command} {what}{out}"), 3, &format!("{what}: {neither}"));
        }
        let message =
            "run/checkpoints/step-00000011: does not exist, expected a checkpoint of the run";
        place.refuses(&format!("{command} run/checkpoints/step-00000011{out}"), 3, message);
        let message = "folder/checkpoints/step-00000001: lies in no run directory, expected RUN/checkpoints/step-NNNNNNNN";
        place.refuses(&format!("{command} folder/checkpoints/step-00000001{out}"), 3, message);
    }
    place.write("folder/config.toml", place.read("run/config.toml"));
    for command in ["eval folder", "sample folder", "export folder out"] {
        fs::remove_dir_all(place.path("folder/checkpoints")).unwrap_or_default();
        place.refuses(command, 3, "folder: has no checkpoint yet");
    }
    let config = place.read("run/config.toml");
    for (from, to) in
        [("d_model = 16", "d_model = 32"), ("heads = 2", "heads = 4"), ("\"char\"", "\"byte\"")]
    {
        place.write("run/config.toml", config.replacen(from, to, 1));
        let message = "run/config.toml: says * = *, but run/checkpoints/step-00000012 was saved with * = *; undo the change";
        for command in ["eval run", "sample run", "export run out"] {
            place.refuses(command, 3, message);
        }
    }
    place.write("run/config.toml", config);
    let tokenizer = place.read("run/tokenizer.json");
    place.write("run/tokenizer.json", "{}");
    place.refuses(
        "eval run --data text",
        3,
        "run/tokenizer.json: is not a tokenizer of sparse24 *: missing field *",
    );
    place.write("run/tokenizer.json", tokenizer);

    // Data.
    place.write("capitals", "THE QUICK BROWN FOX".repeat(20));
    place.write("short", "ab");
    place.answer("prepare --data capitals --tokenizer char --out others");
    for (data, code, message) in [
        (
            "nowhere",
            3,
            "nowhere: does not exist, expected a text file, a folder of them, or a folder of token shards",
        ),
        (
            "capitals",
            3,
            "capitals: the character 'T' (U+0054) at byte 0 is not among the 27 characters of the tokenizer's vocabulary",
        ),
        ("short", 3, "short: has 1 validation tokens, expected at least 2"),
        ("others", 3, "others: has a tokenizer of 16 tokens, expected one of 27"),
    ] {
        place.refuses(&format!("eval run --data {data}"), code, message);
    }
    place.write("text", text(2));
    let message = "*/text: holds other data than the run was trained on; restore them, or name the data to evaluate on";
    place.refuses("eval run", 3, message);
    place.answer("eval run --data text");
}

#[test]
fn a_model_without_a_tokenizer_is_not_evaluated_on_larger_ids() {
    let place = Place::new();
    fs::create_dir_all(place.path("small")).unwrap();
    fs::create_dir_all(place.path("large")).unwrap();
    for (folder, most) in [("small", 10), ("large", 20)] {
        let ids: Vec<u8> = (0..500_u16).flat_map(|id| (id % most).to_le_bytes()).collect();
        place.write(&format!("{folder}/train.bin"), &ids);
        place.write(&format!("{folder}/val.bin"), &ids);
    }
    let said = place.answer(&format!("train {TINY} --data small --out run"));
    assert!(
        said.ends_with("\nnext            sparse24 export run DIR\n"),
        "nothing could read a sample: {said}"
    );
    let message =
        "the data have 20 token ids, the model has 10: evaluate with the run's own tokenizer";
    place.refuses("eval run --data large", 3, message);
    place.answer("eval run --data small");
    let message = "text: is text, which this model has no tokenizer for; expected a folder of prepared shards (train.bin and val.bin)";
    place.refuses("eval run --data text", 3, message);
    place.refuses(
        "eval run --data nowhere",
        3,
        "nowhere: does not exist, expected a text file, a folder of them, or a folder of token shards",
    );
    place.refuses(
        "sample run",
        3,
        "run has no tokenizer.json: it was trained on token ids without one",
    );
}

#[test]
fn samples_continue_the_prompt_and_repeat_themselves() {
    let place = Place::new();
    place.train("run", "");
    let sample =
        |more: &str| place.answer(&format!("sample run --prompt quick --tokens 40 {more}"));
    let text = sample("--seed 1");
    assert!(
        text.starts_with("quick") && text.ends_with('\n') && text.chars().count() == 5 + 40 + 1,
        "{text}"
    );
    assert_eq!(text, sample("--seed 1"));
    assert_ne!(text, sample("--seed 2"));
    assert_eq!(sample("--temperature 0 --seed 1"), sample("--temperature 0 --seed 2"));
    assert_eq!(
        sample("--top-k 1 --seed 1"),
        sample("--temperature 0"),
        "of one token, that one is drawn"
    );
    assert_eq!(place.answer("sample run --prompt quick --tokens 0"), "quick\n");
    // Without a new line in the vocabulary, the first token begins.
    assert!(place.answer("sample run --tokens 3").starts_with(' '));
}

#[test]
fn what_cannot_be_sampled_is_refused() {
    let place = Place::new();
    place.train("run", "");
    for (arguments, message) in [
        ("--temperature -1", "--temperature: expected a finite number of at least 0, found -1"),
        ("--temperature nan", "--temperature: expected a finite number of at least 0, found NaN"),
        ("--temperature inf", "--temperature: expected a finite number of at least 0, found inf"),
        (
            "--temperature hot",
            "invalid value 'hot' for '--temperature <TEMPERATURE>': *; --help tells all",
        ),
        ("--top-k 0", "--top-k: expected at least 1, found 0"),
        ("--top-k -1", "invalid value '-1' for '--top-k <TOP_K>': *; --help tells all"),
        ("--tokens -1", "invalid value '-1' for '--tokens <TOKENS>': *; --help tells all"),
        (
            "--prompt Zürich",
            "--prompt: the character 'Z' (U+005A) at byte 0 is not among the 27 characters of the tokenizer's vocabulary",
        ),
        (
            "--prompt zürich",
            "--prompt: the character 'ü' (U+00FC) at byte 1 is not among the 27 characters of the tokenizer's vocabulary",
        ),
    ] {
        place.refuses(&format!("sample run {arguments}"), 2, message);
    }
    let mut command = place.command("sample run --prompt");
    command.arg("");
    place.refuses_command(
        command,
        2,
        "--prompt: expected at least one character, found an empty text",
    );
    // Of more tokens than the model has, and of as many others.
    place.write("more", format!("{}{}", text(1), "ABC".repeat(99)));
    place.write("others", text(1).replace('q', "Q"));
    for corpus in ["more", "others"] {
        place.answer(&format!("prepare --data {corpus} --tokenizer char --out {corpus}-shards"));
        fs::copy(
            place.path(&format!("{corpus}-shards/tokenizer.json")),
            place.path("run/tokenizer.json"),
        )
        .unwrap();
        let message = "run/tokenizer.json: is not the tokenizer that run/checkpoints/step-00000012 was saved with; restore it";
        for command in ["sample run", "eval run --data text", "export run out"] {
            place.refuses(command, 3, message);
        }
    }
    fs::remove_file(place.path("run/tokenizer.json")).unwrap();
    let message = "run/tokenizer.json: is missing, the tokenizer that run/checkpoints/step-00000012 was saved with; restore it";
    place.refuses("sample run", 3, message);
}

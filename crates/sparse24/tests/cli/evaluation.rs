//! `sparse24 eval` and `sparse24 sample`.

use serde_json::{Value, json};
use sparse24_run::checkpoint;

use crate::support::{Place, SAVED, TINY, checkpoint as of_step, text};

#[test]
fn eval_repeats_the_validation_losses_of_training() {
    let place = Place::trained("");
    let metrics = place.metrics("run");
    for (what, step, phase) in [
        ("run", 12, "dense"),
        ("run/checkpoints/step-00000012", 12, "dense"),
        ("run/checkpoints/step-00000010", 10, "sparse"),
    ] {
        let report = place.json(&format!("eval {what} --json"));
        let loss = &metrics[step - 1]["val_loss"];
        assert_eq!(
            [&report["step"], &report["phase"], &report["tokens"], &report["loss"]],
            [&json!(step), &json!(phase), &json!(399), loss]
        );
        let perplexity = report["perplexity"].as_f64().unwrap();
        assert!((perplexity - loss.as_f64().unwrap().exp()).abs() <= 1e-9);
    }
    assert!(place.answer("eval run").starts_with("step 12 (dense): loss "));
    // A growing batch moves the ends of phases; the switch is after step 9.
    let growing = "--set batch.gradient_accumulation_steps=2 --set run.eval_every=1 --set \
                   batch.final_gradient_accumulation_steps=8 --set run.checkpoint_every=1";
    place.train("growing", &format!("{growing} --set run.keep_last=12"));
    for (step, metrics) in (1..).zip(place.metrics("growing")) {
        let report = place.json(&format!("eval growing/checkpoints/step-{step:08} --json"));
        assert_eq!([&report["phase"], &report["loss"]], [&metrics["phase"], &metrics["val_loss"]]);
    }
    let (table, note) = place.exits("eval run missing run/checkpoints/step-00000010", 3);
    assert_eq!(table.lines().count(), 3, "{table}");
    assert!(note.contains("missing") && note.contains("1 of 3 runs not evaluated"), "{note}");
    let mut command = place.command("eval step-00000010 --json");
    let output = command.current_dir(place.path("run/checkpoints")).output().unwrap();
    assert!(output.status.success(), "a checkpoint finds its run from within: {output:?}");
    place.write("other", text(2));
    let other = place.json("eval run --data other --json");
    assert_eq!(other["tokens"], 399);
    assert_ne!(other["loss"], metrics[11]["val_loss"]);
    // Too short to train on, but not to evaluate.
    place.write("short", &text(2)[..11]);
    assert_eq!(place.json("eval run --data short --json")["tokens"], 1);
}

/// In a sparse phase under the masks of the weights.
#[test]
fn the_moving_average_is_kept_evaluated_and_exported() {
    let place = Place::trained(&format!("{SAVED} --set optimizer.ema_decay=0.75"));
    place.repeats("run");
    for (step, more) in [(10, "--sparse24"), (12, "")] {
        let saved = of_step("run", step);
        let [average, weights] =
            ["--ema", ""].map(|ema| place.json(&format!("eval {saved} --json {ema}")));
        assert_ne!(average["loss"], weights["loss"]);
        assert_eq!((&average["ema"], weights.get("ema")), (&json!(true), None));
        let [average, weights] = ["--ema", ""].map(|ema| {
            let out = format!("{step}{ema}");
            place.answer(&format!("export {saved} {out} {more} {ema}"));
            place.bytes(&format!("{out}/model.safetensors"))
        });
        assert!(average != weights);
    }
    let line = place.answer("eval run --ema");
    assert!(line.starts_with("step 12 (dense, moving average): loss "), "{line}");
    place.train("other", "");
    for line in ["eval other --ema", "sample other --ema", "export other out --ema"] {
        place.refuses(line, 3, "other: *optimizer.ema_decay");
    }
}

#[test]
fn a_model_is_computed_on_the_backend_that_is_named() {
    let place = Place::trained("--set backend.arithmetic=bf16");
    let loss = |more: &str| place.json(&format!("eval run --json {more}"))["loss"].clone();
    let sample =
        |more: &str| place.answer(&format!("sample run --temperature 0 --tokens 9 {more}"));
    let (own, cpu) = (loss(""), loss("--backend cpu"));
    assert_ne!(own, cpu, "the default is f32");
    assert_eq!(own, loss("--set backend.arithmetic=bf16"));
    for (line, code, pattern) in [
        ("--backend tpu", 2, "backend.name: *tpu*cpu"),
        ("--set backend.number=1", 2, "backend: *number*gpu"),
        ("--set steps=13", 2, "--set: *backend*steps=13"),
    ] {
        place.refuses(&format!("eval run {line}"), code, pattern);
        place.refuses(&format!("sample run {line}"), code, pattern);
    }
    if !cfg!(feature = "wgpu") {
        return;
    }
    let line = "--backend wgpu --set backend.gpu=99";
    place.refuses(&format!("eval run {line}"), 6, "adapter 99*--backend cpu");
    place.refuses(&format!("sample run {line}"), 6, "adapter 99*--backend cpu");
    let adapters = place.json("doctor --json")["wgpu"]["adapters"].as_array().unwrap().len();
    if adapters == 0 && std::env::var_os("SPARSE24_REQUIRE_WGPU").is_none() {
        println!("skipped: no adapter");
        return;
    }
    let line = "--backend wgpu --set backend.arithmetic=bf16";
    place.refuses(&format!("eval run {line}"), 2, "backend.arithmetic: *wgpu*f32");
    let is_close = || {
        let difference = loss("--backend wgpu").as_f64().unwrap() - cpu.as_f64().unwrap();
        assert!(difference.abs() <= 1e-5, "sums of f32 in another order: {difference}");
    };
    is_close();
    assert_eq!(sample("--backend wgpu"), sample("--backend cpu"));
    // No adapter can bind this batch.
    place.edit("run/config.toml", "\nsize = 6\n", "\nsize = 16777216\n");
    is_close();
    assert_eq!(sample("--backend wgpu"), sample("--backend cpu"));
}

#[test]
fn the_loss_does_not_depend_on_the_batch_size() {
    let place = Place::new();
    // 2000 validation tokens: more than one evaluation batch, fewer than a training batch.
    place.train("run", "--set data.validation_share=0.5 --set batch.size=200 --set steps=6");
    let report = place.json("eval run --json");
    assert!(report["tokens"].as_u64().unwrap() > 1024);
    assert_eq!(report["loss"], place.metrics("run").last().unwrap()["val_loss"]);
}

#[test]
fn a_checkpoint_of_another_model_is_refused() {
    let place = Place::trained("");
    let mut checkpoint = checkpoint::load(&place.path("run/checkpoints/step-00000012")).unwrap();
    let parts =
        [&mut checkpoint.weights, &mut checkpoint.first_moments, &mut checkpoint.second_moments];
    for tensors in parts {
        tensors.retain(|tensor| tensor.name != "wte.weight");
    }
    checkpoint::save(&place.path("run/checkpoints"), &checkpoint).unwrap();
    place.refuses("eval run", 3, "run/checkpoints/step-00000012*wte.weight");
}

#[test]
fn eval_sample_and_export_refuse_what_is_not_a_run_or_was_changed() {
    let place = Place::trained("");
    place.folder("folder/checkpoints/step-00000001");
    let refuse = |what: &str, pattern: &str| {
        for line in [format!("eval {what}"), format!("sample {what}"), format!("export {what} out")]
        {
            place.refuses(&line, 3, pattern);
        }
    };
    for what in ["nowhere", "folder", "text", "run/checkpoints", "run/checkpoints/step-12"] {
        refuse(what, &format!("{what}: *config.toml*checkpoint"));
    }
    refuse("run/checkpoints/step-00000011", "step-00000011: does not exist");
    refuse("folder/checkpoints/step-00000001", "step-00000001: *RUN/checkpoints/step-NNNNNNNN");
    place.write("folder/config.toml", place.read("run/config.toml"));
    place.remove("folder/checkpoints");
    refuse("folder", "folder: *checkpoint");
    // A checkpoint is evaluated with the settings that it was saved with.
    let answer = place.answer("eval run");
    place.edit("run/config.toml", "d_model = 16", "d_model = 32");
    assert_eq!(place.answer("eval run"), answer);
    // Tokenizers: more tokens than the model has, as many others, damaged, missing.
    let tokenizer = place.read("run/tokenizer.json");
    place.write("more", format!("{}{}", text(1), "ABC".repeat(99)));
    place.write("others", text(1).replace('q', "Q"));
    for corpus in ["more", "others"] {
        place.answer(&format!("prepare --data {corpus} --tokenizer char --out {corpus}-shards"));
        place.write("run/tokenizer.json", place.read(&format!("{corpus}-shards/tokenizer.json")));
        refuse("run", "run/tokenizer.json: *run/checkpoints/step-00000012");
    }
    place.write("run/tokenizer.json", "{}");
    place.refuses("eval run --data text", 3, "run/tokenizer.json: *missing field");
    place.remove("run/tokenizer.json");
    place.refuses("sample run", 3, "run/tokenizer.json: is missing");
    place.write("run/tokenizer.json", tokenizer);

    place.write("foreign/train.bin", [1, 0, 2, 0]);
    place.write("foreign/val.bin", [99, 0]);
    place.write("capitals", "THE QUICK BROWN FOX".repeat(20));
    place.write("short", "ab");
    for (data, pattern) in [
        ("nowhere", "nowhere: does not exist"),
        ("capitals", "capitals: *'T' (U+0054)*byte 0*27"),
        ("short", "short: *1 tokens*validation*2"),
        ("more-shards", "more-shards: *30*27"),
        ("others-shards", "others-shards: *a tokenizer other than"),
        ("foreign", "foreign/val.bin: token 99*27"),
    ] {
        place.refuses(&format!("eval run --data {data}"), 3, pattern);
    }
    place.write("text", text(2));
    place.refuses("eval run", 3, "/text: *data");
    place.answer("eval run --data text");
}

#[test]
fn a_model_without_a_tokenizer_takes_only_ids_of_its_vocabulary() {
    let place = Place::new();
    for (folder, vocabulary) in [("small", 10), ("large", 20)] {
        let ids: Vec<u8> = (0..500_u16).flat_map(|id| (id % vocabulary).to_le_bytes()).collect();
        place.write(&format!("{folder}/train.bin"), &ids);
        place.write(&format!("{folder}/val.bin"), &ids);
    }
    let answer = place.answer(&format!("train {TINY} --data small --out run"));
    assert!(!answer.contains("sparse24 sample") && answer.contains("sparse24 export"), "{answer}");
    assert!(!place.has("run/tokenizer.json"));
    place.answer("eval run");
    for (line, pattern) in [
        ("eval run --data large", "20*10"),
        ("eval run --data text", "text: *tokenizer*train.bin"),
        ("sample run", "run has no tokenizer.json"),
    ] {
        place.refuses(line, 3, pattern);
    }
}

#[test]
fn samples_continue_the_prompt_and_depend_only_on_the_seed() {
    let place = Place::trained("");
    let sample =
        |more: &str| place.answer(&format!("sample run --prompt quick --tokens 40 {more}"));
    let text = sample("--seed 1");
    assert!(text.starts_with("quick") && text.ends_with('\n'), "{text}");
    assert_eq!(text.chars().count(), 5 + 40 + 1);
    assert_eq!(text, sample("--seed 1"));
    assert_ne!(text, sample("--seed 2"));
    let likeliest = sample("--temperature 0 --seed 1");
    assert_eq!(likeliest, sample("--temperature 0 --seed 2"));
    assert_eq!(likeliest, sample("--top-k 1 --seed 1"));
    assert_eq!(place.answer("sample run --prompt quick --tokens 0"), "quick\n");
    place.write("prompt", "quick");
    let numbered = "sample run --prompt-file prompt --tokens 40 --num-samples 2";
    let both = format!("{text}---------------\n{}", sample("--seed 2"));
    assert_eq!(place.answer(&format!("{numbered} --seed 1")), both);
    for (line, seed) in place.answer(&format!("{numbered} --seed 1 --json")).lines().zip(1..) {
        let found: Value = serde_json::from_str(line).unwrap();
        let whole = format!("quick{}\n", found["text"].as_str().unwrap());
        assert_eq!(whole, sample(&format!("--seed {seed}")));
        assert_eq!([&found["seed"], &found["tokens"]], [&json!(seed), &json!(40)]);
    }
    // The vocabulary has no new line, so token 0 is the prompt.
    assert!(place.answer("sample run --tokens 3").starts_with(' '));
    // WordPiece encodes white space to no token.
    place.answer("prepare --data text --tokenizer wordpiece --pieces 100 --out pieces");
    place.train("words", "--set data.path=pieces --set data.tokenizer=wordpiece --set steps=3");
    place.answer("sample words --tokens 3");
}

#[test]
fn wrong_arguments_of_sample_are_refused() {
    let place = Place::trained("");
    for (arguments, pattern) in [
        ("--temperature -1", "--temperature: *-1"),
        ("--temperature nan", "--temperature: *NaN"),
        ("--top-k 0", "--top-k: *1*0"),
        ("--top-k -1", "'-1'*--top-k"),
        ("--prompt zürich", "--prompt: *'ü' (U+00FC)*byte 1*27"),
        ("--prompt=", "--prompt: *at least one token"),
        ("--prompt x --prompt-file text", "'--prompt <PROMPT>'*'--prompt-file"),
        ("--num-samples 0", "'0'*--num-samples"),
    ] {
        place.refuses(&format!("sample run {arguments}"), 2, pattern);
    }
}

/// The validation loss rises, since the validation split is another text.
#[test]
fn the_best_checkpoint_is_kept_if_asked_for() {
    let place = Place::new();
    place.write("text", ["ab".repeat(1800), "aabb".repeat(100)].concat());
    let settings = "--checkpoint-every 0 --set run.keep_last=1 --set run.eval_every=1 \
        --method dense";
    place.train("run", &format!("{settings} --set run.keep_best=true"));
    for steps in [12, 13] {
        let metrics = place.metrics("run");
        let losses = metrics.iter().map(|metrics| metrics["val_loss"].as_f64().unwrap());
        let (best, loss) = (1..).zip(losses).min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
        assert!((1..12).contains(&best), "{best}");
        let names = [best, steps].map(|step| format!("step-{step:08}"));
        assert_eq!(place.checkpoints("run"), names);
        let found = place.json("eval run --best --json");
        assert_eq!([&found["step"], &found["loss"]], [&json!(best), &json!(loss)]);
        if steps == 12 {
            place.answer("resume run --set steps=13");
        }
    }
    let notes = place.notes("resume run --set steps=14 --set run.keep_best=false");
    assert!(notes.contains("may remove the best checkpoint"), "{notes}");
    place.train("newest", settings);
    for run in ["run", "newest"] {
        let pattern = format!("{run}: *no checkpoint of step*only while run.keep_best");
        place.refuses(&format!("sample {run} --best"), 3, &pattern);
    }
}

/// Losses that were measured differently are not compared.
#[test]
fn the_best_checkpoint_starts_anew_when_evaluations_change() {
    let place = Place::new();
    place.write("text", ["ab".repeat(1800), "aabb".repeat(100)].concat());
    place.write("other", ["ab".repeat(1800), "bbaa".repeat(100)].concat());
    for (at, change) in [
        "data.path=other",
        "data.validation_share=0.2 --allow data",
        "run.eval_tokens=24",
        "seed=9",
    ]
    .into_iter()
    .enumerate()
    {
        let run = format!("run{at}");
        let settings = "--set run.eval_every=1 --set run.keep_best=true --method dense";
        place.train(&run, settings);
        let best = place.json(&format!("eval {run} --best --json --tokens 24"));
        let former = format!("step-{:08}", best["step"].as_u64().unwrap());
        let notes = place.notes(&format!("resume {run} --set {change} --set steps=14"));
        assert!(notes.contains("a former best is kept"), "{notes}");
        assert!(place.checkpoints(&run).contains(&former), "{change}: the former best is gone");
        let found = place.json(&format!("eval {run} --best --json --tokens 24"));
        assert!(found["step"].as_u64().unwrap() > 12, "{change}: {found}");
        place.answer(&format!("resume {run} --set steps=15"));
        let found = place.json(&format!("eval {run} --best --json --tokens 24"));
        assert!(found["step"].as_u64().unwrap() > 12, "{change}: {found}");
    }
    // A change undone before it is in a checkpoint does not count.
    for name in place.checkpoints("run2").iter().filter(|name| name.as_str() > "step-00000012") {
        std::fs::remove_dir_all(place.path("run2/checkpoints").join(name)).unwrap();
    }
    place.answer("resume run2 --set run.eval_tokens=0 --set steps=14");
    let found = place.json("eval run2 --best --json --tokens 24");
    assert!(found["step"].as_u64().unwrap() <= 12, "{found}");
    // A change that was asked for once allows no other, even at the same path.
    place.write("other", ["ab".repeat(1800), "abab".repeat(100)].concat());
    place.refuses("resume run0 --set steps=16", 3, "run0/*data of *`*--allow data.path`*");
}

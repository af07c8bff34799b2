//! `sparse24 config`: how a configuration is resolved, and how a wrong one is refused.

use serde_json::{Value, json};

use crate::support::Place;

/// Settings, with the values that the refusal names besides the key.
#[test]
fn a_wrong_setting_is_refused_with_its_key_and_value() {
    let place = Place::new();
    let unknown = |key: &str, found: &str, meant: &str| {
        let tip = if meant.is_empty() { String::new() } else { format!("did you mean {meant:?}") };
        format!("{key}*{found:?}*known: *{tip}")
    };
    for (settings, pattern) in [
        ("foo=1", unknown("", "foo", "")),
        ("stepz=1", unknown("", "stepz", "steps")),
        ("model.layres=3", unknown("model", "layres", "layers")),
        ("modle.layers=3", unknown("", "modle", "model")),
        ("=3", unknown("", "", "")),
        ("model.activation=gleu", unknown("model.activation", "gleu", "gelu")),
        ("model.sparsify=all", unknown("model.sparsify", "all", "")),
        ("optimizer.name=lionn", unknown("optimizer.name", "lionn", "lion")),
        ("optimizer.schedule=cosin", unknown("optimizer.schedule", "cosin", "cosine")),
        ("optimizer.no_weight_decay=bias", unknown("optimizer.no_weight_decay", "bias", "")),
        ("model.sparsify=fnn", unknown("model.sparsify", "fnn", "ffn")),
        ("data.tokenizer=spm", unknown("data.tokenizer", "spm", "")),
        ("backend.arithmetic=f16", unknown("backend.arithmetic", "f16", "bf16")),
        ("backend.name=metal", unknown("backend.name", "metal", "")),
        ("method.name=fts", unknown("method.name", "fts", "fst")),
        ("model.kind=elmo", unknown("model.kind", "elmo", "")),
        ("method.decay=weights", unknown("method.decay", "weights", "")),
        ("method.forward=column", unknown("method.forward", "column", "")),
        ("method.dgrad=forward", unknown("method.dgrad", "forward", "")),
        ("method.wgrad=mvu", unknown("method.wgrad", "mvu", "mvue")),
        ("backend.name=gpu", unknown("backend.name", "gpu", "cuda")),
    ] {
        place.refuses(&format!("config --set {settings}"), 2, &pattern);
    }
    for key in [
        "steps",
        "model.layers",
        "model.heads",
        "model.d_model",
        "model.d_ff",
        "model.sequence_length",
        "batch.size",
        "batch.gradient_accumulation_steps",
        "run.keep_last",
    ] {
        place.refuses(&format!("config --set {key}=0"), 2, &format!("{key}: *1*0"));
    }
    for (settings, pattern) in [
        ("model.layers", "KEY=VALUE"),
        // Names of other programs, and keys without or with another section.
        ("n_layer=6", "model.layers"),
        ("lr=1e-3", "optimizer.learning_rate"),
        ("per_device_train_batch_size=6", "batch.size"),
        ("weight_decay=0", "optimizer.weight_decay"),
        ("optimizer.layers=3", "model.layers"),
        ("preset=gpt2-124m", "`train --preset`"),
        ("optim=adamw_torch", "optimizer.name"),
        ("optim.lr=1", "did you mean optimizer?"),
        ("out_dir=out", "--out"),
        ("init_from=gpt2", "--init-from*sparse24 resume"),
        ("run.log_every=10", "metrics.jsonl"),
        ("wandb_log=true", "--tensorboard"),
        // Former names.
        ("model.width=8", "model.d_model"),
        ("half.ratio=1", "method.d_ff_ratio"),
        ("backend.launches=queued", "backend.cuda_graphs"),
        // Types.
        ("model.layers=two", "\"two\""),
        ("model.layers=2.5", "2.5"),
        ("model.layers=", "\"\""),
        ("model.layers=-1", "-1"),
        ("model.bias=1", "true*false"),
        ("method.lambda=small", "\"small\""),
        ("model=3", "section*3"),
        ("seed.low=1", "low = 1"),
        ("steps=5000000000", "4294967295*5000000000"),
        ("seed=18446744073709551615", "9223372036854775807*18446744073709551615"),
        ("method.phases=sparse", "\"sparse\""),
        ("method.phases=[5]", "string"),
        (r#"method.phases=["spare:5/6"]"#, "dense*frozen*spare:5/6"),
        // Of other models.
        ("augmentation.mixup=0.5", "only a DeiT*0.5"),
        ("model.image_size=8", "only a DeiT*8"),
        ("data.source=en", "only a Transformer*en"),
        ("data.vocabulary=300", "only a Transformer*300"),
        // Impossible values.
        ("batch.size=99999999999", "16777216*99999999999"),
        ("backend.threads=99999", "4096*99999"),
        ("backend.exchange=nccl", "auto or tcp*nccl with cpu"),
        ("backend.arithmetic=bf16 backend.name=wgpu", "wgpu computes in f32*native"),
        ("backend.arithmetic=f32 backend.name=cuda", "cuda computes in bf16*native"),
        ("model.heads=3", "model.d_model*128*3"),
        ("model.d_model=130 model.heads=2", "4*model.heads*2*130"),
        ("model.d_model=130", "4*model.heads*130"),
        ("model.d_ff=514", "4*514"),
        ("model.dropout=1", "[0, 1)*1"),
        ("model.dropout=-0.1", "[0, 1)*-0.1"),
        ("model.dropout=nan", "[0, 1)*NaN"),
        ("optimizer.beta1=1.0", "[0, 1)*1"),
        ("optimizer.beta2=2", "[0, 1)*2"),
        ("method.lambda=-1e-5", "at least 0*-0.00001"),
        ("method.lambda=nan", "at least 0*NaN"),
        ("optimizer.learning_rate=inf", "finite*inf"),
        ("optimizer.learning_rate=1e300", "3.4028235e38*1e300"),
        ("optimizer.cooldown_steps=9", "0*wsd*9"),
        ("optimizer.min_learning_rate=-1", "at least 0*-1"),
        ("optimizer.weight_decay=nan", "NaN"),
        ("optimizer.max_grad_norm=-1", "at least 0*-1"),
        ("optimizer.epsilon=0", "above 0*0"),
        ("optimizer.decay_steps=150", "optimizer.warmup_steps*150"),
        ("optimizer.momentum=1", "[0, 1)*1"),
        ("optimizer.warmup_learning_rate=-1", "at least 0*-1"),
        ("optimizer.warmup_learning_rate=1 optimizer.warmup_steps=0", "0*warmup_steps is 0*1"),
        ("optimizer.warmup_steps=9 optimizer.schedule=triangle", "0*triangle*9"),
        ("optimizer.warmup_steps=0 optimizer.schedule=inverse-sqrt", "at least 1*inverse-sqrt*0"),
        ("optimizer.decay_steps=900 optimizer.schedule=inverse-sqrt", "0*schedule*900"),
        ("optimizer.name=sgd method.name=step", "adamw*variance"),
        (
            "batch.final_gradient_accumulation_steps=2 batch.gradient_accumulation_steps=3",
            "batch.gradient_accumulation_steps 3, or 0*2",
        ),
        ("batch.final_gradient_accumulation_steps=4097", "at most 4096*4097"),
        ("batch.replicas=2", "a power of two*every step (1), found 2"),
        ("batch.replicas=3 batch.gradient_accumulation_steps=3", "a power of two*3"),
        ("data.validation_share=0", "above 0*0"),
        ("data.validation_share=1.5", "below 1*1.5"),
        ("method.d_ff_ratio=2", "1*\"2\""),
        ("method.d_ff_ratio=0", "0*\"0\""),
        // Combinations.
        (r#"method.phases=["sparse:5/6"]"#, "last*end"),
        (r#"method.phases=["dense","sparse:1/2"]"#, "last*end"),
        (r#"method.phases=["frozen"]"#, "at least one step*frozen"),
        (r#"method.phases=["sparse"] method.name=dense"#, "method.forward*method.wgrad"),
        ("method.wgrad=mvue method.name=dense", "dense*method.phases"),
        ("method.decay=on-weights method.name=dense", "dense"),
        (r#"method.decay=on-gradients method.phases=["dense"]"#, "fst"),
        ("method.dgrad=permuted", "row-wise*permuted"),
    ] {
        let set: String = settings.split(' ').map(|setting| format!(" --set {setting}")).collect();
        let key = settings.split(['=', ' ']).next().unwrap();
        let key = key.strip_suffix(".low").or(key.strip_suffix(".lr")).unwrap_or(key);
        place.refuses(&format!("config{set}"), 2, &format!("{key}: *{pattern}"));
    }
}

#[test]
fn a_wrong_flag_is_refused() {
    let place = Place::new();
    for (line, pattern) in [
        ("config --preset quikstart", r#"preset*"quikstart"*did you mean "quickstart"*gpt2-1558m"#),
        ("config --method ftsx", r#"method.name*"ftsx"*known: dense"#),
        ("train --out new --backend gpu", r#"backend.name*"gpu"*did you mean "cuda" or "wgpu"?"#),
        ("config --learning-rate 1", "--learning-rate*--set optimizer.learning_rate=VALUE"),
        ("train --batch-size 3", "--batch-size*--set batch.size=VALUE"),
        ("eval run --batch_size=3", "unexpected argument '--batch_size'"),
        ("sample run --start=x", "--start is not an option; use --prompt"),
        ("train --start=x", "unexpected argument '--start'"),
        ("train --resume runs/x", "--resume*sparse24 resume RUN"),
        ("resume runs/x --steps 3", "--steps*`--set steps=VALUE`"),
        ("resume runs/x --preset gpt2-124m", "--preset*keeps its preset"),
        ("sample run --tokens -1", "'-1'*--tokens*whole number of 0"),
        ("lambda-search --out s --candidates a", "'a'*--candidates*expected a number"),
        ("estimate --steps -5", "steps*-5"),
        ("config --steps many", "steps*\"many\""),
        ("config --checkpoint-every x", "run.checkpoint_every*\"x\""),
        ("train --stepz 5", "'--stepz'*'--steps'*see --help"),
        ("estimate --steps", "'--steps <STEPS>'*see --help"),
    ] {
        place.refuses(line, 2, pattern);
    }
}

#[test]
fn a_wrong_document_is_refused_with_its_name_and_line() {
    let place = Place::new();
    for (document, pattern) in [
        ("seed = 1\n[model\nlayers = 1\n", "line 2"),
        ("seed = 1\nseed = 2", "line 2*duplicate key"),
        ("seed = 1\n[model]\nlayers = -4\n", "model.layers*-4"),
        ("[modle]\nlayers = 1\n", "\"modle\"*did you mean \"model\""),
        ("model.layers.x = 1\n", "model.layers*x = 1"),
        ("preset = \"x\"\n", "preset*\"x\"*quickstart"),
        ("preset = 3\n", "preset*string*3"),
    ] {
        place.write("my.toml", document);
        place.refuses("config --config my.toml", 2, &format!("my.toml: *{pattern}"));
    }
    place.write("my.toml", b"seed = 1\nsteps = 2\n# caf\xe9\n");
    place.refuses("train --config my.toml --out new", 2, "my.toml*line 3*UTF-8");
    place.refuses("config --config nowhere.toml", 3, "nowhere.toml*does not exist");
    place.refuses("config --config .", 3, ".: is a folder");
}

#[test]
fn two_different_presets_are_refused() {
    let place = Place::new();
    let config = |line: &str| place.json(&format!("config --config my.toml --json {line}"));
    place.write("my.toml", "preset = \"shakespeare-char\"\n");
    for command in ["config", "train"] {
        let line = format!("{command} --config my.toml --preset quickstart");
        place.refuses(&line, 2, "my.toml*\"shakespeare-char\"*\"quickstart\"*--preset");
    }
    for line in ["", "--preset shakespeare-char"] {
        assert_eq!(config(line)["preset"], "shakespeare-char");
    }
    place.write("my.toml", "seed = 1\n");
    assert_eq!(config("--preset shakespeare-char")["model"]["layers"], 6);
    assert_eq!(config("")["preset"], "quickstart");
    place.refuses("config --preset imported", 2, "preset*\"imported\"");
}

#[test]
fn flags_override_settings_which_override_the_file_which_overrides_the_preset() {
    let place = Place::new();
    let document = "preset = \"shakespeare-char-cpu\"\nsteps = 7\nseed = 8\n[model]\nlayers = 3\n";
    place.write("my.toml", document);
    let flags = "--data some/where --method dense --backend cpu --steps 3 --checkpoint-every 5";
    for (line, expected) in [
        (
            "--config my.toml --set model.layers=5 --set seed=9 --seed 10",
            vec![
                ("/preset", json!("shakespeare-char-cpu")),
                ("/steps", json!(7)),
                ("/seed", json!(10)),
                ("/model/layers", json!(5)),
                ("/data/tokenizer", json!("char")),
            ],
        ),
        (
            flags,
            vec![
                ("/data/path", json!("some/where")),
                ("/method/name", json!("dense")),
                ("/steps", json!(3)),
                ("/run/checkpoint_every", json!(5)),
            ],
        ),
        ("--set data.path=\"corpus\"", vec![("/data/path", json!("corpus"))]),
        ("--set data.path=2024", vec![("/data/path", json!("2024"))]),
        ("--set data.path=true", vec![("/data/path", json!("true"))]),
        ("--set data.path=a=b", vec![("/data/path", json!("a=b"))]),
        ("--set model.bias=true", vec![("/model/bias", json!(true))]),
        ("--set optimizer.max_grad_norm=2", vec![("/optimizer/max_grad_norm", json!(2.0))]),
        ("--set steps=1_000", vec![("/steps", json!(1000))]),
        ("--set steps=1e3", vec![("/steps", json!(1000))]),
        ("--set optimizer.schedule=wsd", vec![("/optimizer/schedule", json!("wsd"))]),
        // A method has its own lambda, unless one is set.
        ("--config my.toml --method sr-ste", vec![("/method/lambda", json!(2e-4))]),
        ("--set method.lambda=3 --method sr-ste", vec![("/method/lambda", json!(3.0))]),
        ("--preset gpt2-350m --method fst", vec![("/method/lambda", json!(2e-4))]),
        ("--method dense", vec![("/method/lambda", json!(6e-5))]),
    ] {
        let config = place.json(&format!("config {line} --json"));
        for (key, value) in expected {
            assert_eq!(config.pointer(key), Some(&value), "{line}");
        }
    }
}

#[test]
fn a_printed_configuration_resolves_to_itself() {
    let place = Place::new();
    // Without the lambda that its method does not use, so another method gets its own.
    let dense = place.answer("config --method dense");
    place.write("edited.toml", dense.replace("\"dense\"", "\"fst\""));
    assert_eq!(place.answer("config --config edited.toml"), place.answer("config"));
    for preset in place.json("presets --json").as_array().unwrap() {
        let name = preset["name"].as_str().unwrap();
        let printed = place.answer(&format!(
            "config --preset {name} --set model.dropout=0.1 --set data.path=a\"b\\c --seed 5"
        ));
        place.write("printed.toml", &printed);
        assert_eq!(place.answer("config --config printed.toml"), printed);
        let json = place.json("config --config printed.toml --json");
        assert_eq!(json["data"]["path"], Value::from("a\"b\\c"));
        assert_eq!(json["model"]["layers"], preset["config"]["model"]["layers"]);
    }
}

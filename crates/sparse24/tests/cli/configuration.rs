//! `sparse24 config`: how a configuration is resolved, and every way in which it is refused.

use serde_json::Value;

use crate::support::Place;

#[test]
fn a_setting_that_cannot_be_is_refused_by_its_key() {
    let place = Place::new();
    for (settings, message) in [
        // Unknown keys and sections.
        (
            "foo=1",
            r#"configuration: "foo" is not known (known: backend, batch, data, method, model, *)"#,
        ),
        ("stepz=1", r#"configuration: "stepz" is not known; did you mean "steps"? (known: *)"#),
        (
            "model.layres=3",
            r#"model: "layres" is not known; did you mean "layers"? (known: activation, activation_checkpointing, bias, *)"#,
        ),
        (
            "modle.layers=3",
            r#"configuration: "modle" is not known; did you mean "model"? (known: *)"#,
        ),
        ("optimizer.layers=3", r#"optimizer: "layers" is not known (known: beta1, *)"#),
        ("=3", r#"configuration: "" is not known (known: *)"#),
        ("model.layers", "model.layers: expected KEY=VALUE, found no ="),
        ("preset=gpt2-124m", "preset: *--preset"),
        // Types.
        ("model.layers=two", r#"model.layers: expected a whole number, found "two""#),
        ("model.layers=2.5", "model.layers: expected a whole number, found 2.5"),
        ("model.layers=", r#"model.layers: expected a whole number, found """#),
        ("model.layers=-1", "model.layers: expected a whole number of at least 0, found -1"),
        ("model.bias=1", "model.bias: expected true or false, found 1"),
        ("method.lambda=small", r#"method.lambda: expected a number, found "small""#),
        ("model=3", "model: expected a section, found 3"),
        ("seed.low=1", "seed: expected a whole number, found { low = 1 }"),
        ("steps=5000000000", "steps: expected at most 4294967295, found 5000000000"),
        (
            "seed=18446744073709551615",
            "seed: expected at most 9223372036854775807, found 18446744073709551615",
        ),
        // Choices.
        (
            "model.activation=relu",
            r#"model.activation: "relu" is not known; did you mean "gelu"? (known: gelu, geglu, swiglu)"#,
        ),
        (
            "model.sparsify=all",
            r#"model.sparsify: "all" is not known (known: ffn, ffn-and-attention)"#,
        ),
        (
            "model.sparsify=fnn",
            r#"model.sparsify: "fnn" is not known; did you mean "ffn"? (known: ffn, ffn-and-attention)"#,
        ),
        ("data.tokenizer=bpe", r#"data.tokenizer: "bpe" is not known (known: byte, char, gpt2)"#),
        (
            "backend.arithmetic=f16",
            r#"backend.arithmetic: "f16" is not known; did you mean "bf16"? (known: native, f32, bf16)"#,
        ),
        ("backend.name=metal", r#"backend.name: "metal" is not known (known: *"#),
        (
            "method.name=fts",
            r#"method.name: "fts" is not known; did you mean "fst"? (known: dense, half, ste, ste-row-wise, sr-ste, fst, step, bi-mask, s-ste)"#,
        ),
        (
            "method.decay=weights",
            r#"method.decay: "weights" is not known (known: none, on-gradients, on-weights)"#,
        ),
        (
            "method.forward=column",
            r#"method.forward: "column" is not known (known: dense, transposable, row-wise, soft-threshold)"#,
        ),
        (
            "method.dgrad=forward",
            r#"method.dgrad: "forward" is not known (known: dense, as-forward, permuted)"#,
        ),
        (
            "method.wgrad=mvu",
            r#"method.wgrad: "mvu" is not known; did you mean "mvue"? (known: dense, mvue, mvue-approximate)"#,
        ),
        ("method.phases=sparse", r#"method.phases: expected a list of strings, found "sparse""#),
        ("method.phases=[5]", "method.phases*expected a string"),
        (
            r#"method.phases=["spare:5/6"]"#,
            r#"method.phases: expected one of dense, sparse, frozen, and unless it is the last, its end, as in "sparse:5/6" or "dense:settled", found "spare:5/6""#,
        ),
        // Impossible values.
        ("steps=0", "steps: expected at least 1, found 0"),
        ("model.layers=0", "model.layers: expected at least 1, found 0"),
        ("model.heads=0", "model.heads: expected at least 1, found 0"),
        ("model.width=8", "model.width: renamed to model.d_model"),
        ("half.ratio=1", "half.ratio: renamed to method.d_ff_ratio"),
        ("backend.launches=queued", "backend.launches: renamed to backend.cuda_graphs (true *"),
        ("model.kind=bert", r#"model.kind: "bert" is not known (known: gpt2)"#),
        ("model.d_model=0", "model.d_model: expected at least 1, found 0"),
        ("model.d_ff=0", "model.d_ff: expected at least 1, found 0"),
        ("model.sequence_length=0", "model.sequence_length: expected at least 1, found 0"),
        (
            r#"method.phases=["sparse:5/6"]"#,
            "method.phases: expected phases that follow each other, the last one to the end of the run",
        ),
        (
            r#"method.phases=["dense","sparse:1/2"]"#,
            "method.phases: expected phases that follow each other, the last one to the end of the run",
        ),
        (
            r#"method.phases=["frozen"]"#,
            "method.phases: expected at least one step before a frozen variance, found none",
        ),
        (
            r#"method.name=dense method.phases=["sparse"]"#,
            r#"method.phases: the method has no sparse operands*"#,
        ),
        (
            "method.name=dense method.wgrad=mvue",
            r#"method.wgrad: all phases of dense are dense; *"#,
        ),
        (
            "method.name=dense method.decay=on-weights",
            "method.decay: needs a phase whose forward is pruned, and dense has none*",
        ),
        (
            r#"method.decay=on-gradients method.phases=["dense"]"#,
            "method.decay: needs a phase whose forward is pruned, and fst has none*",
        ),
        (
            "method.dgrad=permuted",
            r#"method.dgrad: expected a row-wise forward beside "permuted" (method.forward = "row-wise")"#,
        ),
        (
            "method.d_ff_ratio=2",
            r#"method.d_ff_ratio: expected a share above 0 and at most 1, as in "1/2" or "0.77", found "2""#,
        ),
        (
            "method.d_ff_ratio=0",
            r#"method.d_ff_ratio: expected a share above 0 and at most 1, as in "1/2" or "0.77", found "0""#,
        ),
        ("batch.size=0", "batch.size: expected at least 1, found 0"),
        (
            "batch.gradient_accumulation_steps=0",
            "batch.gradient_accumulation_steps: expected at least 1, found 0",
        ),
        ("run.keep_last=0", "run.keep_last: expected at least 1, found 0"),
        (
            "model.d_model=99999999999",
            "model.d_model: expected at most 16777216, found 99999999999",
        ),
        ("batch.size=99999999999", "batch.size: expected at most 16777216, found 99999999999"),
        ("backend.threads=99999", "backend.threads: expected at most 4096, *found 99999"),
        ("model.heads=3", "model.heads: expected a divisor of model.d_model 128, found 3"),
        (
            "model.d_model=130 model.heads=2",
            "model.d_model: expected a multiple of 4, for 4x4 tiles, and of model.heads 2, found 130",
        ),
        (
            "model.d_model=130",
            "model.d_model: expected a multiple of 4, for 4x4 tiles, and of model.heads 4, found 130",
        ),
        ("model.d_ff=514", "model.d_ff: expected a multiple of 4, for 4x4 tiles, found 514"),
        ("model.dropout=1", "model.dropout: expected a number in [0, 1), found 1"),
        ("model.dropout=-0.1", "model.dropout: expected a number in [0, 1), found -0.1"),
        ("model.dropout=nan", "model.dropout: expected a number in [0, 1), found NaN"),
        ("optimizer.beta1=1.0", "optimizer.beta1: expected a number in [0, 1), found 1"),
        ("optimizer.beta2=2", "optimizer.beta2: expected a number in [0, 1), found 2"),
        (
            "method.lambda=-1e-5",
            "method.lambda: expected a finite number of at least 0, found -0.00001",
        ),
        ("method.lambda=nan", "method.lambda: expected a finite number of at least 0, found NaN"),
        (
            "optimizer.learning_rate=inf",
            "optimizer.learning_rate: expected a finite number of at least 0, found inf",
        ),
        (
            "optimizer.learning_rate=1e300",
            "optimizer.learning_rate: expected a finite number of at least 0, found inf",
        ),
        (
            "optimizer.min_learning_rate=-1",
            "optimizer.min_learning_rate: expected a finite number of at least 0, found -1",
        ),
        (
            "optimizer.weight_decay=nan",
            "optimizer.weight_decay: expected a finite number of at least 0, found NaN",
        ),
        (
            "optimizer.max_grad_norm=-1",
            "optimizer.max_grad_norm: expected a finite number of at least 0, found -1",
        ),
        ("optimizer.epsilon=0", "optimizer.epsilon: expected a finite number above 0, found 0"),
        (
            "optimizer.decay_steps=150",
            "optimizer.decay_steps: expected more than optimizer.warmup_steps 150, or 0 for the last step, found 150",
        ),
        (
            "data.validation_share=0",
            "data.validation_share: expected a share above 0 and below 1, found 0",
        ),
        (
            "data.validation_share=1.5",
            "data.validation_share: expected a share above 0 and below 1, found 1.5",
        ),
    ] {
        let set: String = settings.split(' ').map(|setting| format!(" --set {setting}")).collect();
        place.refuses(&format!("config{set}"), 2, message);
    }
}

#[test]
fn flags_are_refused_like_settings() {
    let place = Place::new();
    for (flags, message) in [
        (
            "--preset quikstart",
            r#"preset: "quikstart" is not known; did you mean "quickstart"? (known: quickstart, *, gpt2-1558m)"#,
        ),
        ("--method ftsx", r#"method.name: "ftsx" is not known (known: dense, *)"#),
        ("--backend gpu", r#"backend.name: "gpu" is not known; did you mean "cpu"? (known: *"#),
        ("--steps 0", "steps: expected at least 1, found 0"),
        ("--steps -5", "steps: expected a whole number of at least 0, found -5"),
        ("--steps many", r#"steps: expected a whole number, found "many""#),
        (
            "--seed 18446744073709551615",
            "seed: expected at most 9223372036854775807, found 18446744073709551615",
        ),
        ("--checkpoint-every x", r#"run.checkpoint_every: expected a whole number, found "x""#),
        (
            "--stepz 5",
            "unexpected argument '--stepz' found; tip: a similar argument exists: '--steps'; --help tells all",
        ),
        (
            "--steps",
            "a value is required for '--steps <STEPS>' but none was supplied; --help tells all",
        ),
    ] {
        place.refuses(&format!("config {flags}"), 2, message);
        place.refuses(&format!("train {flags} --out new"), 2, message);
        place.refuses(&format!("estimate {flags}"), 2, message);
    }
}

#[test]
fn a_document_is_refused_by_its_name_and_line() {
    let place = Place::new();
    for (document, message) in [
        ("seed = 1\n[model\nlayers = 1\n", "my.toml: line 2: unclosed table, expected `]`"),
        ("seed = 1\n\nlayers == 1\n", "my.toml: line 3: *"),
        ("seed = 1\nseed = 2", "my.toml: line 2: duplicate key"),
        ("= 1", "my.toml: line 1: *"),
        (
            "seed = 1\n[model]\nlayers = \"1\"\n",
            r#"my.toml: model.layers: expected a whole number, found "1""#,
        ),
        (
            "seed = 1\n[model]\nlayers = -4\n",
            "my.toml: model.layers: expected a whole number of at least 0, found -4",
        ),
        (
            "[model]\nactivation = \"relu\"\n",
            r#"my.toml: model.activation: "relu" is not known; did you mean "gelu"? (known: gelu, geglu, swiglu)"#,
        ),
        (
            "[modle]\nlayers = 1\n",
            r#"my.toml: configuration: "modle" is not known; did you mean "model"? (known: *)"#,
        ),
        ("model.layers.x = 1\n", "my.toml: model.layers: expected a whole number, found { x = 1 }"),
        ("preset = \"x\"\n", r#"my.toml: preset: "x" is not known (known: quickstart, *)"#),
        ("preset = 3\n", "my.toml: preset: expected a string, found 3"),
        ("steps = 0", "my.toml: steps: expected at least 1, found 0"),
    ] {
        place.write("my.toml", document);
        place.refuses("config --config my.toml", 2, message);
        place.refuses("train --config my.toml --out new", 2, message);
    }
    place.write("my.toml", b"seed = 1\nsteps = 2\n# caf\xe9\n");
    place.refuses("config --config my.toml", 2, "my.toml: line 3: is not UTF-8 text");
    place.refuses(
        "config --config nowhere.toml",
        3,
        "nowhere.toml: does not exist, expected a TOML file; `sparse24 config` prints one",
    );
    place.refuses("config --config .", 3, ".: is a folder, expected a file");
}

#[test]
fn a_preset_is_named_once() {
    let place = Place::new();
    place.write("my.toml", "preset = \"shakespeare-char\"\n");
    let message =
        r#"my.toml: preset: found "shakespeare-char" here and "quickstart" for --preset, *"#;
    place.refuses("config --config my.toml --preset quickstart", 2, message);
    place.refuses("train --config my.toml --preset quickstart", 2, message);
    for line in [
        "config --config my.toml --json",
        "config --config my.toml --preset shakespeare-char --json",
    ] {
        assert_eq!(place.json(line)["preset"], "shakespeare-char");
    }
    place.write("my.toml", "seed = 1\n");
    assert_eq!(
        place.json("config --config my.toml --preset shakespeare-char --json")["model"]["layers"],
        6
    );
    assert_eq!(place.json("config --config my.toml --json")["preset"], "quickstart");
    place.refuses("config --preset imported", 2, r#"preset: "imported" is not known (known: *)"#);
}

#[test]
fn layers_are_laid_in_the_documented_order() {
    let place = Place::new();
    place.write("my.toml", "preset = \"shakespeare-char-cpu\"\nsteps = 7\nseed = 8\n[model]\nlayers = 3\ndropout = 0\n");
    let config =
        place.json("config --config my.toml --set model.layers=5 --set seed=9 --seed 10 --json");
    assert_eq!(config["preset"], "shakespeare-char-cpu");
    assert_eq!(
        (&config["steps"], &config["seed"], &config["model"]["layers"]),
        (&Value::from(7), &Value::from(10), &Value::from(5))
    );
    assert_eq!(config["data"]["tokenizer"], "char");
    let flags =
        "--data some/where --method dense --backend cpu --steps 3 --seed 4 --checkpoint-every 5";
    let config = place.json(&format!("config {flags} --json"));
    assert_eq!(config["data"]["path"], "some/where");
    assert_eq!(config["method"]["name"], "dense");
    assert_eq!(
        (&config["steps"], &config["seed"], &config["run"]["checkpoint_every"]),
        (&Value::from(3), &Value::from(4), &Value::from(5))
    );
}

#[test]
fn strings_need_no_quotes_and_numbers_may_be_whole() {
    let place = Place::new();
    for (setting, key, value) in [
        ("data.path=corpus", "/data/path", Value::from("corpus")),
        ("data.path=\"corpus\"", "/data/path", Value::from("corpus")),
        ("data.path=2024", "/data/path", Value::from("2024")),
        ("data.path=true", "/data/path", Value::from("true")),
        ("data.path=a=b", "/data/path", Value::from("a=b")),
        ("model.bias=true", "/model/bias", Value::from(true)),
        ("optimizer.max_grad_norm=2", "/optimizer/max_grad_norm", Value::from(2.0)),
        ("method.lambda=0.5", "/method/lambda", Value::from(0.5)),
        ("steps=1_000", "/steps", Value::from(1000)),
    ] {
        let config = place.json(&format!("config --set {setting} --json"));
        assert_eq!(config.pointer(key), Some(&value), "{setting}");
    }
}

#[test]
fn what_is_printed_resolves_to_itself() {
    let place = Place::new();
    for preset in place.json("presets --json").as_array().unwrap() {
        let name = preset["name"].as_str().unwrap();
        let printed = place.answer(&format!(
            "config --preset {name} --set model.dropout=0.1 --set data.path=a\"b\\c --seed 5"
        ));
        place.write("printed.toml", &printed);
        assert_eq!(place.answer("config --config printed.toml"), printed);
        let json = place.json("config --config printed.toml --json");
        assert_eq!(json["data"]["path"], "a\"b\\c");
        assert_eq!(json["model"]["layers"], preset["config"]["model"]["layers"]);
    }
}

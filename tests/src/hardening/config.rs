//! Configurations as TOML documents and `--set` settings, and study plans.
//!
//! An accepted configuration has an estimate without overflow, or the key of a size that is too
//! large; and its own text resolves to it.

use serde_json::{Value, json};
use sparse24_lab::study::{Overrides, Plan};
use sparse24_run::config::{Config, dotted, preset, read_table, table_of};
use sparse24_train::{Error, estimate::estimate, method};

use super::{
    Files,
    document::{Document, Format},
    file, files, refused,
};

pub(super) fn document(bytes: &[u8]) -> bool {
    let path = file("config.toml", bytes);
    match (Config::read(&path), Config::resolve(None, Some(&path), &[])) {
        (Ok(config), Ok(resolved)) => {
            // A key that earlier versions did not write is left to the preset.
            let [whole, resolved] = [&config, &resolved].map(|of| dotted(table_of(of)));
            let written = read_table(&path, "a configuration").expect("was read above");
            for key in dotted(written).keys() {
                assert_eq!(whole.get(key), resolved.get(key), "{key} was left to a preset");
            }
            accepted(&config)
        }
        (Ok(config), Err(error)) => accepted(&config) && refused(&error, "config.toml"),
        (Err(error), Ok(resolved)) => refused(&error, "config.toml") || accepted(&resolved),
        (Err(error), Err(other)) => {
            refused(&error, "config.toml") || refused(&other, "config.toml")
        }
    }
}

pub(super) fn settings(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    let settings: Vec<String> = text.lines().map(str::to_owned).collect();
    match Config::resolve(None, None, &settings) {
        Ok(config) => accepted(&config),
        Err(error) => refused(&error, ": "),
    }
}

pub(super) fn study(bytes: &[u8]) -> bool {
    match Plan::read(&file("study.toml", bytes), &Overrides::default()) {
        Ok(_) => true,
        Err(error) => refused(&error, "study.toml"),
    }
}

fn accepted(config: &Config) -> bool {
    let again = Config::read(&file("resolved.toml", config.to_toml().as_bytes())).unwrap();
    assert_eq!(again, *config, "its own text is another configuration");
    for vocabulary in [1, 50_257, u32::MAX as usize] {
        let recipe = config.recipe(vocabulary).unwrap();
        let backend = config.backend_entry().unwrap();
        match estimate(&recipe, backend) {
            Ok(cost) => assert!(cost.device_bytes() > 0),
            // The product of two sizes, each of which is possible.
            Err(Error::Setting { key, problem }) => {
                assert!(["batch.size", "model.d_model"].contains(&&*key), "{key}: {problem}");
                assert!(problem.contains("elements"), "{key}: {problem}");
            }
            Err(error) => panic!("{error}"),
        }
    }
    let _ = (config.check_corpus(), config.remarks());
    true
}

/// Texts that mean something to some key: presets, methods, choices, phases and ratios.
const WORDS: &str = "imported dense none on-gradients on-weights transposable row-wise
    soft-threshold as-forward permuted mvue mvue-approximate sparse frozen sparse:5/6 dense:1/6
    dense:settled frozen:settled sparse: :1/2 sparse:2 dense:settled:1/2 gelu geglu swiglu ffn
    ffn-and-attention blocks byte char gpt2 stop skip cpu cuda native f32 bf16 replayed queued
    10/13 0.77 1/0 0/1 3/4294967295 4294967296/3 sparse:4294967295/4294967296 sparse:1x/2
    sparse:+1/2 sparse:-1/2 1.0 1.5 .5 1. 1e-3 0.00000000000000000001 99999999999999999999/3";

/// The default configuration.
fn sound() -> Value {
    serde_json::to_value(preset::PRESETS[0].config()).expect("a configuration is a table")
}

/// One change each to TOML, and every choice of a method set to every word under every method.
fn variants(sound: &Value) -> Files {
    let presets = preset::PRESETS.iter().map(|preset| preset.name);
    let methods = method::PRESETS.iter().map(|preset| preset.name);
    let words: Vec<_> =
        presets.chain(methods).chain(WORDS.split_whitespace()).map(str::to_owned).collect();
    let mut files = Document::toml(sound, &words).variants(String::into_bytes);
    for (method, word) in method::PRESETS.iter().flat_map(|m| words.iter().map(move |w| (m, w))) {
        for (key, value) in sound["method"].as_object().expect("a section") {
            let mut changed = sound.clone();
            changed["method"]["name"] = method.name.into();
            changed["method"]["lambda"] = 1e-4.into();
            let last = ["dense", "sparse", "frozen"][word.len() % 3];
            match value {
                Value::String(_) if key != "name" => changed["method"][key] = json!(word),
                Value::Array(_) => changed["method"][key] = json!([word, last]),
                _ => continue,
            }
            files.push(Format::Toml.write(&changed).into_bytes());
        }
    }
    files
}

pub(super) fn document_variants() -> Files {
    variants(&sound())
}

pub(super) fn settings_variants() -> Files {
    variants(&sound_settings())
}

/// The default configuration without its preset, which is no setting.
fn sound_settings() -> Value {
    let mut settings = sound();
    settings.as_object_mut().expect("a table").remove("preset");
    settings
}

pub(super) fn document_seeds() -> Files {
    let mut seeds: Files =
        preset::PRESETS.iter().map(|preset| preset.config().to_toml().into_bytes()).collect();
    seeds.extend(files(&[
        "steps = 1 # comment\nsteps = 2\n",
        "[model]\nheads = 8\n[model]\nheads = 16\n",
        "steps = -1\n[model]\nlayers = 9223372036854775807\nheads = 9223372036854775808\n",
        "[optimizer]\nlearning_rate = nan\nepsilon = -inf\nclip = 1e400\nbeta1 = 1e39\n",
        "[[model]]\n[[model]]\n",
    ]));
    let mut huge = sound();
    for size in huge["model"].as_object_mut().expect("a section").values_mut() {
        *size = if size.is_u64() { (1 << 24).into() } else { size.clone() };
    }
    seeds.push(Format::Toml.write(&huge).into_bytes());
    seeds.push(b"steps = 1 # \xff\n".to_vec());
    let long = ["k.", "[x.", "k = [", "k = {k="].map(|piece| piece.repeat(5000).into_bytes());
    seeds.extend(long);
    seeds
}

pub(super) fn settings_seeds() -> Files {
    let mut seeds = vec![Format::Toml.write(&sound_settings()).trim().as_bytes().to_vec()];
    seeds.extend(files(&[
        "optimizer.clip=1e39\nmodel.dropout=-0.0\nmethod.lambda=1e-46",
        "data.path=C:\\new\ndata.path=\"quoted\"\ndata.path='''",
        "=\n==\n.=\n..=.\na..b=c",
        "model=3\nmodel.heads={}\nmodel.heads=[[[[[",
        "model={heads=8}\nmodel.heads.x=1",
        "preset=quickstart",
        "steps=1\u{0}\u{1b}[31m\u{2028}",
    ]));
    for (start, piece) in [("x", ".x"), ("k", "k"), ("steps=", "["), ("steps=", "9")] {
        seeds.push(format!("{start}{}=1", piece.repeat(50_000)).into_bytes());
    }
    seeds
}

/// A study of two methods on the default configuration.
fn sound_study() -> Value {
    json!({"reference": "dense", "seeds": [1, 2], "base": sound(),
        "arms": [{"name": "dense", "method": {"name": "dense"}}, {"name": "fst", "steps": 20}]})
}

pub(super) fn study_seeds() -> Files {
    let mut seeds = vec![Format::Toml.write(&sound_study()).into_bytes()];
    seeds.extend(files(&[
        "reference = \"a\"\nseeds = [1]\n[[arms]]\nname = \"a\"\n[[arms]]\nname = \"A\"\n",
        "seeds = [1, 1]\narms = [[], {}]\n",
        "arms = [{name = \"../..\"}, {name = \"\\u001b[2J\"}]\nseeds = [1, 2]\n",
    ]));
    seeds
}

pub(super) fn study_variants() -> Files {
    let words = ["dense", "fst", "DENSE", "..", "a/b"].map(str::to_owned);
    let mut small = sound_study();
    small["base"] = json!({"steps": 40});
    Document::toml(&small, &words).variants(String::into_bytes)
}

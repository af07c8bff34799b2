//! Configurations: the TOML document and `--set`.
//!
//! Invariant: what is accepted can be estimated without overflow, and is read back as it was from
//! its own text.

use sparse24_run::config::{Config, preset};
use sparse24_train::{estimate::estimate, method::PRESETS};

use super::{kinds, place, refused, values};

pub(super) fn document(bytes: &[u8]) {
    let path = place::file("config.toml", bytes);
    let resolved = Config::resolve(None, Some(&path), &[]);
    match &resolved {
        Ok(config) => accepted(config),
        Err(error) => refused(error, "config.toml"),
    }
    match (Config::read(&path), resolved) {
        (Ok(config), Ok(resolved)) => {
            assert_eq!(config, resolved, "a whole configuration leaves nothing to a preset")
        }
        (Ok(config), Err(_)) => accepted(&config),
        (Err(error), _) => refused(&error, "config.toml"),
    }
}

pub(super) fn settings(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let settings: Vec<String> = text.split('\n').map(str::to_owned).collect();
    match Config::resolve(None, None, &settings) {
        Ok(config) => accepted(&config),
        Err(error) => refused(&error, ": "),
    }
}

fn accepted(config: &Config) {
    let again = Config::read(&place::file("resolved.toml", config.to_toml().as_bytes())).unwrap();
    assert_eq!(again, *config, "its own text is another configuration");
    for vocabulary in [1, 50_257, u32::MAX as usize] {
        let recipe = config.recipe(vocabulary).unwrap();
        assert!(estimate(&recipe).device_bytes() > 0);
    }
    let _ = (config.check_corpus(), config.remark());
}

pub(super) fn document_seeds() -> Vec<Vec<u8>> {
    let mut seeds: Vec<Vec<u8>> =
        preset::PRESETS.iter().map(|preset| preset.config().to_toml().into_bytes()).collect();
    let whole = preset::PRESETS[0].config().to_toml();
    seeds.push(whole.replace('\n', "\r\n").into_bytes());
    seeds.push([b"\xef\xbb\xbf", whole.as_bytes()].concat());
    seeds.push(whole.as_bytes()[..whole.len() / 2].to_vec());
    let attacks = [
        "",
        "\0",
        "preset = \"imported\"\n[model]\nd_model = 8\nheads = 2\n",
        "steps = 1\nsteps = 2\n",
        "[model]\nd_model = 8\n[model]\nd_model = 16\n",
        "steps = -1\n[model]\nlayers = 9223372036854775807\nd_model = 9223372036854775808\n",
        "[optimizer]\nlearning_rate = nan\nepsilon = -inf\nmax_grad_norm = 1e400\nbeta1 = 1e39\n",
        "[model]\nlayers = 16777216\nheads = 4\nd_model = 16777216\nd_ff = 16777216\nsequence_length = 16777216\n",
        "seed = 0x7fffffffffffffff\nsteps = 0o37777777777\n",
        "model = 1979-05-27T07:32:00Z\n",
        "steps.steps.steps = 1\nmodel.d_model.x = 2\n",
        "\"ste\\u0070s\" = 3\n'model'.\"d_model\" = 8\n",
        "[data]\npath = \"\\u0000\\u001b[31m\\n\"\ntokenizer = \"gpt2\"\n",
        "[method]\nname = \"\u{1b}[2J\"\n",
        "[[model]]\n[[model]]\n",
        "x = \"\"\"\\\n   \\\n",
    ];
    seeds.extend(attacks.map(|text| text.as_bytes().to_vec()));
    seeds.push(b"steps = 1 # \xff\n".to_vec());
    seeds.push(["x = ", &"[".repeat(5000)].concat().into_bytes());
    seeds.push(["x = ", &"{a=".repeat(3000)].concat().into_bytes());
    seeds.push(["x", &".x".repeat(5000), " = 1"].concat().into_bytes());
    seeds.push(["[x", &".x".repeat(5000), "]"].concat().into_bytes());
    seeds.push(["k".repeat(20_000), " = 1".to_owned()].concat().into_bytes());
    seeds.push(["preset = \"", &"q".repeat(20_000), "\""].concat().into_bytes());
    seeds
}

/// Values of texts that mean something to a key.
fn words() -> Vec<&'static str> {
    let presets = preset::PRESETS.iter().map(|preset| preset.name).chain(["imported"]);
    let methods = PRESETS.iter().map(|preset| preset.name);
    presets.chain(methods).chain(WORDS.split_whitespace()).collect()
}

const WORDS: &str = "dense none on-gradients on-weights transposable row-wise soft-threshold as-forward permuted mvue mvue-approximate
    sparse frozen sparse:5/6 dense:1/6 dense:settled frozen:settled sparse: :1/2 sparse:2 dense:settled:1/2
    gelu geglu swiglu ffn ffn-and-attention blocks byte char gpt2 stop skip cpu cuda native f32 bf16 replayed queued 10/13 0.77
    dens q quick-start Quickstart";

/// Shares in every way of writing them, of more and more digits, and nearly so.
fn shares() -> impl Iterator<Item = String> {
    let digits = (0..=20).flat_map(|length| ["0", "1", "9"].map(|digit| digit.repeat(length)));
    let broken = (1..=11).flat_map(|length| {
        (0..length).map(move |at| format!("{}x{}", "1".repeat(at), "1".repeat(length - at - 1)))
    });
    let numbers = digits
        .chain(broken)
        .chain(["4294967295", "4294967296", "+1", "-1", "\u{e9}"].map(str::to_owned));
    numbers.flat_map(|n| {
        [
            format!("{n}/3"),
            format!("3/{n}"),
            format!("{n}.5"),
            format!("0.{n}"),
            format!("1{n}.0"),
            n,
        ]
    })
}

/// Slips of every word that means something.
fn slips() -> impl Iterator<Item = String> {
    words().into_iter().flat_map(kinds::slips).chain(kinds::foreign())
}

/// Settings whose value is the name of something.
const NAMES: [&str; 7] = [
    "preset",
    "method.name",
    "method.decay",
    "method.wgrad",
    "model.activation",
    "data.tokenizer",
    "backend.name",
];

/// Keys with a value that is a word, a slip of one, or a share; choices with every method.
fn chosen() -> Vec<Vec<(&'static str, String)>> {
    let mut all = Vec::new();
    for method in PRESETS {
        let name = format!("\"{}\"", method.name);
        let mut choose = |key, value| {
            all.push(vec![
                ("method.name", name.clone()),
                ("method.lambda", "1e-4".to_owned()),
                (key, value),
            ])
        };
        for word in WORDS.split_whitespace() {
            for key in ["method.decay", "method.forward", "method.dgrad", "method.wgrad"] {
                choose(key, format!("\"{word}\""));
            }
            for last in ["dense", "sparse", "frozen"] {
                choose("method.phases", format!("[\"{word}\", \"{last}\"]"));
            }
        }
    }
    let mut set = |key, value| all.push(vec![("method.lambda", "1e-4".to_owned()), (key, value)]);
    for slip in slips() {
        NAMES.into_iter().for_each(|key| set(key, format!("\"{slip}\"")));
    }
    for share in shares() {
        set("method.d_ff_ratio", format!("\"{share}\""));
        set("method.phases", format!("[\"sparse:{share}\", \"dense\"]"));
    }
    all
}

/// Keys and values as lines.
fn lines(settings: &[(&str, String)], is: &str) -> String {
    settings.iter().map(|(key, value)| format!("{key}{is}{value}")).collect::<Vec<_>>().join("\n")
}

pub(super) fn document_variants() -> Vec<Vec<u8>> {
    let mut variants = values::toml(&preset::PRESETS[0].config().to_toml(), &words());
    variants.extend(chosen().iter().map(|settings| lines(settings, " = ")));
    variants.extend(
        kinds::foreign()
            .flat_map(|key| [format!("\"{key}\" = 0\n"), format!("[model]\n\"{key}\" = 0\n")]),
    );
    values::files(variants)
}

pub(super) fn settings_variants() -> Vec<Vec<u8>> {
    let mut variants = values::settings(&preset::PRESETS[0].config().to_toml(), &words());
    variants.extend(chosen().iter().map(|settings| lines(settings, "=")));
    variants.extend(kinds::foreign().flat_map(|key| {
        [format!("{key}=0"), format!("model.{key}=0"), format!("model.d_model.{key}=0")]
    }));
    values::files(variants)
}

pub(super) fn settings_seeds() -> Vec<Vec<u8>> {
    let mut seeds: Vec<Vec<u8>> = [
        "model.d_model=16\nmodel.heads=4",
        "optimizer.learning_rate=nan",
        "optimizer.max_grad_norm=1e39\nmodel.dropout=-0.0\nmethod.lambda=1e-46",
        "seed=18446744073709551616\nsteps=-9223372036854775808",
        "data.path=C:\\new\ndata.path=\"quoted\"\ndata.path='''",
        "data.tokenizer=char\nmodel.activation=gelu\nmethod.name=dense",
        "=\n==\n.=\n..=.\na..b=c",
        "model=3\nmodel.d_model={}\nmodel.d_model=[[[[[",
        "model={d_model=8}\nmodel.d_model.x=1",
        "preset=quickstart",
        "steps=1\u{0}\u{1b}[31m\u{2028}",
        "backend.name=cpu\nbackend.threads=4097\nbackend.gpu=9223372036854775807",
    ]
    .map(|text| text.as_bytes().to_vec())
    .into();
    seeds.push(["x", &".x".repeat(100_000), "=1"].concat().into_bytes());
    seeds.push(["k".repeat(100_000), "=1".to_owned()].concat().into_bytes());
    seeds.push(["model.d_model=", &"[".repeat(50_000)].concat().into_bytes());
    seeds.push(["steps=", &"9".repeat(50_000)].concat().into_bytes());
    seeds
}

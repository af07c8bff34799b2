//! TOML documents as layers of a configuration: reading, overlaying, converting and comparing.

use std::{collections::BTreeMap, path::Path};

use toml::{Table, Value};

use super::{Config, preset, renamed, unknown};
use crate::{Error, Result, disk};

/// The key in errors about the top level.
const ROOT: &str = "configuration";

/// Longest document, in bytes: some fifty configurations. Parsing takes a hundred times as much
/// memory.
pub(super) const LONGEST: u64 = 1 << 16;

/// Description of a configuration file in errors.
pub(super) const DOCUMENT: &str = "a TOML file; `sparse24 config` prints one";

fn out_of_range(key: &str, most: u64, found: &str) -> Error {
    Error::setting(key, format!("expected at most {most}, found {found}"))
}

/// The dotted keys of a document with their values as TOML.
pub fn dotted(document: Table) -> BTreeMap<String, String> {
    fn flatten(table: Table, prefix: &str, into: &mut BTreeMap<String, String>) {
        for (key, value) in table {
            match value {
                Value::Table(section) => flatten(section, &format!("{prefix}{key}."), into),
                value => {
                    into.insert(format!("{prefix}{key}"), value.to_string());
                }
            }
        }
    }
    let mut settings = BTreeMap::new();
    flatten(document, "", &mut settings);
    settings
}

/// Refuses whole numbers that TOML cannot hold: no configuration could be read with them.
pub(super) fn check_whole_numbers(config: &Config) -> Result {
    fn check(value: &serde_json::Value, key: &str) -> Result {
        if let Some(section) = value.as_object() {
            let dotted = |name: &String| [key, name].join(".");
            return section.iter().try_for_each(|(name, value)| check(value, &dotted(name)));
        }
        match value.as_u64() {
            Some(found @ 0x8000_0000_0000_0000..) => {
                let key = key.trim_start_matches('.');
                Err(out_of_range(key, i64::MAX as u64, &found.to_string()))
            }
            _ => Ok(()),
        }
    }
    check(&serde_json::to_value(config).expect("plain values"), "")
}

/// The TOML table of a configuration.
///
/// # Panics
/// For a whole number above [`i64::MAX`], which [`Config::check`] refuses.
pub fn table_of(config: &Config) -> Table {
    // Through text, which writes an f32 in its shortest form.
    config.to_toml().parse().expect("a configuration is a TOML table")
}

/// The document, overlaid on the settings `given` and the preset that it names, or else `preset`.
pub(super) fn on_preset(preset: Option<&str>, given: &[String], document: Table) -> Result<Config> {
    let named = document.get("preset").and_then(Value::as_str);
    if let (Some(named), Some(preset)) = (named, preset)
        && named != preset
    {
        bail!(
            setting = "preset",
            "found {named:?} here and {preset:?} for --preset, expected only one of the two"
        );
    }
    let preset = preset::named(named.or(preset).unwrap_or(preset::DEFAULT))?;
    preset.under(Table::new(), given)?.under(document, &[])
}

/// Parses a whole configuration.
pub(super) fn from_table(table: Table) -> Result<Config> {
    Value::Table(table).try_into().map_err(|error: toml::de::Error| {
        // The library names the key only in its last line.
        let text = error.to_string();
        let key = text
            .lines()
            .last()
            .and_then(|line| line.strip_prefix("in `")?.strip_suffix('`'))
            .unwrap_or(ROOT);
        // Backquotes enclose the found value, and the known ones of a choice.
        let words: Vec<&str> = error.message().split('`').skip(1).step_by(2).collect();
        match (error.message(), words.as_slice()) {
            (message, [found, known @ ..]) if message.starts_with("unknown variant") => {
                unknown(key, found, known.iter().copied())
            }
            (message, [found]) if message.ends_with("expected u32") => {
                out_of_range(key, u32::MAX.into(), found)
            }
            (message, _) => Error::setting(key, message),
        }
    })
}

/// Settings, and their names in nanoGPT, in Hugging Face's GPT-2 and in its `Trainer`.
const ELSEWHERE: [(&str, &str); 28] = [
    ("model.layers", "n_layer num_hidden_layers"),
    ("model.heads", "n_head num_attention_heads"),
    ("model.d_model", "n_embd hidden_size"),
    ("model.d_ff", "n_inner intermediate_size"),
    ("model.sequence_length", "block_size n_positions n_ctx max_position_embeddings"),
    ("model.activation", "hidden_act activation_function"),
    ("model.dropout", "resid_pdrop hidden_dropout_prob"),
    ("model.activation_checkpointing", "gradient_checkpointing"),
    ("optimizer.name", "optim"),
    ("optimizer.learning_rate", "lr"),
    ("optimizer.min_learning_rate", "min_lr"),
    ("optimizer.schedule", "lr_scheduler_type"),
    ("optimizer.warmup_steps", "warmup_iters"),
    ("optimizer.decay_steps", "lr_decay_iters"),
    ("optimizer.max_grad_norm", "grad_clip"),
    ("optimizer.beta1", "adam_beta1"),
    ("optimizer.beta2", "adam_beta2"),
    ("optimizer.epsilon", "adam_epsilon"),
    ("batch.size", "batch_size micro_batch_size per_device_train_batch_size"),
    ("steps", "max_iters max_steps"),
    ("backend.name", "device backend"),
    ("method.name", "method"),
    ("backend.arithmetic", "dtype bf16"),
    ("data.path", "dataset data"),
    ("run.eval_every", "eval_interval eval_steps"),
    ("run.eval_tokens", "eval_iters"),
    ("run.checkpoint_every", "save_steps"),
    ("run.keep_last", "save_total_limit"),
];

/// Replacements of settings of other programs that have no setting here.
const INSTEAD: [(&str, &str); 5] = [
    ("the option --out DIR", "out_dir output_dir"),
    ("the option --init-from PATH, or `sparse24 resume RUN`", "init_from model_name_or_path"),
    ("`sparse24 resume RUN`", "resume resume_from_checkpoint"),
    ("metrics.jsonl, which has every step", "log_every log_interval logging_steps"),
    ("the option --tensorboard", "wandb_log report_to"),
];

/// The row of a table that has this name of another program.
fn named_elsewhere(table: &[(&'static str, &str)], name: &str) -> Option<&'static str> {
    let has = |names: &str| names.split(' ').any(|other| other == name);
    table.iter().find(|(_, names)| has(names)).map(|(here, _)| *here)
}

/// The key that is meant by its last word alone or by its name in another program; `-` stands for
/// `_`.
#[must_use]
pub fn meant(name: &str) -> Option<String> {
    let name = name.replace('-', "_");
    named_elsewhere(&ELSEWHERE, &name).map(str::to_owned).or_else(|| {
        let keys = dotted(table_of(&Config::default())).into_keys();
        let mut keys = keys.filter(|key| key.rsplit('.').next() == Some(&name));
        keys.next().filter(|_| keys.next().is_none())
    })
}

/// Reads the TOML document of a file; `expected` describes such a file in errors.
pub fn read_table(path: &Path, expected: &str) -> Result<Table> {
    let refuse = |line: usize, problem: &str| {
        Error::setting(format!("line {line}"), problem.replace('\n', ", "))
    };
    let bytes = disk::read_small(path, LONGEST).map_err(|e| e.expecting(expected))?;
    let line = |at: usize| 1 + bytes.iter().take(at).filter(|&&byte| byte == b'\n').count();
    let text = str::from_utf8(&bytes)
        .map_err(|error| refuse(line(error.valid_up_to()), "is not UTF-8 text"))?;
    text.parse::<Table>()
        .map_err(|error| refuse(line(error.span().map_or(0, |span| span.start)), error.message()))
}

/// Overlays `base`, whose keys are all the known ones, with `over`.
pub(super) fn overlay(base: &mut Table, over: Table, prefix: &str) -> Result {
    for (key, value) in over {
        let dotted = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        if !base.contains_key(&key) {
            let known: Vec<_> = base.keys().map(String::as_str).collect();
            let section = if prefix.is_empty() { ROOT } else { prefix };
            return Err(renamed::refusal(&dotted).unwrap_or_else(|| {
                let mut meant = meant(&key).filter(|meant| *meant != dotted);
                if value.is_table() {
                    meant = meant.and_then(|key| key.split('.').next().map(str::to_owned));
                }
                let problem = match (named_elsewhere(&INSTEAD, &key), meant) {
                    (Some(instead), _) => format!("is no setting; use {instead}"),
                    (None, Some(meant)) => format!("is not known; did you mean {meant}?"),
                    (None, None) => return unknown(section, &key, known.iter().copied()),
                };
                Error::setting(&dotted, problem)
            }));
        }
        match (&mut base[&key], value) {
            (Value::Table(base), Value::Table(over)) => overlay(base, over, &dotted)?,
            (slot, value) => *slot = converted(&dotted, slot, value)?,
        }
    }
    Ok(())
}

/// The value in the type of the one it replaces; an integer may replace a float.
fn converted(key: &str, known: &Value, value: Value) -> Result<Value> {
    match (known, value) {
        (Value::Float(_), Value::Integer(whole)) => Ok(Value::Float(whole as f64)),
        (Value::Float(_), Value::Float(large))
            if large.is_finite() && (large as f32).is_infinite() =>
        {
            Err(Error::setting(key, format!("expected at most {:e}, found {large:e}", f32::MAX)))
        }
        // 1e3
        (Value::Integer(_), Value::Float(whole))
            if whole.fract() == 0.0 && (0.0..=u32::MAX.into()).contains(&whole) =>
        {
            Ok(Value::Integer(whole as i64))
        }
        (Value::Integer(_), Value::Integer(negative @ ..0)) => Err(Error::setting(
            key,
            format!("expected a whole number of at least 0, found {negative}"),
        )),
        // A number too large for TOML.
        (Value::Integer(_), Value::String(digits))
            if digits.bytes().all(|b| b.is_ascii_digit()) && digits.len() >= 19 =>
        {
            Err(out_of_range(key, i64::MAX as u64, &digits))
        }
        (known, value) if known.same_type(&value) => Ok(value),
        (known, value) => {
            let expected = match known {
                Value::Integer(_) => "a whole number",
                Value::Float(_) => "a number",
                Value::Boolean(_) => "true or false",
                Value::Table(_) => "a section",
                Value::Array(_) => "a list of strings",
                _ => "a string",
            };
            Err(Error::setting(key, format!("expected {expected}, found {value}")))
        }
    }
}

/// Applies `a.b=value`. The value is TOML, or where the key holds a string, any text.
pub(super) fn apply(mut table: Table, setting: &str) -> Result<Table> {
    let Some((key, text)) = setting.split_once('=') else {
        bail!(setting = setting, "expected KEY=VALUE, but there is no '='");
    };
    let (key, text) = (key.trim(), text.trim());
    if key == "preset" {
        bail!(
            setting = key,
            "a preset comes before the settings, and a run keeps its own; choose it with \
                `train --preset`, and change other keys here"
        );
    }
    // Sections do not nest: all but the last of several dots belong to an unknown name.
    let (section, leaf) =
        key.rsplit_once('.').map_or((None, key), |(section, leaf)| (Some(section), leaf));
    let known = section.map_or(Some(&table), |section| table.get(section)?.as_table());
    let wants_string = known.and_then(|known| known.get(leaf)).is_some_and(Value::is_str);
    let value = text
        .parse()
        .ok()
        .filter(|value: &Value| !wants_string || value.is_str())
        .unwrap_or_else(|| Value::String(text.to_owned()));
    let leaf = Table::from_iter([(leaf.to_owned(), value)]);
    let over = match section {
        None => leaf,
        Some(section) => Table::from_iter([(section.to_owned(), Value::Table(leaf))]),
    };
    overlay(&mut table, over, "")?;
    Ok(table)
}

//! The identity of a run: settings, data and tokenizer that a resume, or a reader of its model,
//! must find unchanged. Runs with equal identities produce the same bits.

use std::{collections::BTreeMap, path::Path};

use toml::Table;

use super::{
    components::RunData,
    snapshot::{no_dataset, none},
};
use crate::{
    Error, Result,
    checkpoint::{DatasetIdentity, Fingerprint, State},
    config::{self, Config, UNSET, renamed},
    data::Tokenizer,
    task::Split,
    translation::PairSplit,
    word::word,
};
use sparse24_train::method::Method;

/// Key of the data.
pub(super) const DATA: &str = "data.path";
/// Key of the tokenizer.
pub(super) const TOKENIZER: &str = "data.tokenizer";

/// The identity of a run at a position.
pub(super) fn identity(config: &Config, data: &RunData, at: State) -> State {
    State {
        config: config.decisive(),
        dataset: of_data(data),
        tokenizer: of_tokenizer(data.tokenizer()),
        ..at
    }
}

/// The identity of data; images count as tokens.
#[must_use]
pub fn of_data(data: &RunData) -> DatasetIdentity {
    let (fingerprint, [training_tokens, held_out_tokens]) = match data {
        RunData::Text(dataset) => (
            dataset.fingerprint(),
            [dataset.train().len(), dataset.validation().len()].map(|count| count as u64),
        ),
        RunData::Task(examples) => {
            let splits = [&examples.train, &examples.validation];
            (examples.fingerprint(), splits.map(Split::tokens))
        }
        RunData::Images(images) => {
            (images.fingerprint(), images.counts().map(|count| count as u64))
        }
        RunData::Pairs(pairs) => {
            (pairs.fingerprint(), [&pairs.train, &pairs.validation].map(PairSplit::tokens))
        }
    };
    let (fingerprint, vocabulary) = (fingerprint.into(), data.vocabulary());
    DatasetIdentity { fingerprint, training_tokens, held_out_tokens, vocabulary }
}

/// The identity of data, or `saved` if that hashes the same ids. Text is identified by its ids, and
/// so were prepared shards in earlier versions.
///
/// # Errors
/// [`Error::Io`] and [`Error::File`] for shards that cannot be read.
pub fn of_same_data(data: &RunData, saved: DatasetIdentity) -> Result<DatasetIdentity> {
    let now = of_data(data);
    let RunData::Text(dataset) = data else { return Ok(now) };
    let is_prepared = dataset.train().shards().iter().any(|shard| shard.origin().is_some());
    if now == saved
        || !is_prepared
        || now != (DatasetIdentity { fingerprint: now.fingerprint, ..saved })
    {
        return Ok(now);
    }
    let content = Fingerprint::from(dataset.content_fingerprint()?);
    Ok(if content == saved.fingerprint { saved } else { now })
}

pub(super) fn of_tokenizer(tokenizer: Option<&Tokenizer>) -> Fingerprint {
    tokenizer.map_or_else(none, |tokenizer| tokenizer.fingerprint().into())
}

/// The method of a checkpoint's configuration.
pub(super) fn method(saved: &State) -> Result<Method> {
    Config::of_document(document(saved)?, &[])?.method_value()
}

/// The configuration that a checkpoint records, with the present names of its keys.
fn document(saved: &State) -> Result<Table> {
    let text: String =
        saved.config.iter().map(|(key, value)| format!("{key} = {value}\n")).collect();
    let mut document = text
        .parse()
        .map_err(|error| Error::setting("config", format!("not a configuration: {error}")))?;
    renamed::update(&mut document);
    Ok(document)
}

/// The settings that a checkpoint records, with the present names of their keys.
fn saved_settings(saved: &State) -> Result<BTreeMap<String, String>> {
    document(saved).map(config::dotted)
}

/// A setting that changed.
struct Difference {
    key: String,
    was: String,
    is: String,
    /// Whether weights and moments fit, so that `--allow` accepts the change; if not, they have
    /// another shape or meaning.
    fits: bool,
}

/// The differences between two configurations, by key.
fn settings(saved: &BTreeMap<String, String>, now: &BTreeMap<String, String>) -> Vec<Difference> {
    let keys = saved.keys().chain(now.keys().filter(|key| !saved.contains_key(*key)));
    let unset = |key: &str| {
        let named = |&&(name, value): &&(&str, &str)| name == key && value != "\"\"";
        UNSET.iter().find(named).map(|(_, value)| *value)
    };
    let described = |key: &str, settings: &BTreeMap<String, String>| {
        let value = settings.get(key).map(String::as_str).or_else(|| unset(key));
        value.map_or_else(|| format!("no {key}"), |value| format!("{key} = {value}"))
    };
    let width = |settings: &BTreeMap<String, String>| {
        let name = settings.get("method.name").map_or("", |name| name.trim_matches('"'));
        Method::preset(name, 0.0).map(|method| method.width)
    };
    let fits = |key: &str| match key {
        "model.dropout" | "model.drop_path" | "model.label_smoothing" => true,
        "method.d_ff_ratio" | "optimizer.name" | "task.outputs" | "data.vocabulary" => false,
        "method.name" => width(saved) == width(now),
        _ => !key.starts_with("model."),
    };
    let differing = keys.filter(|key| saved.get(*key) != now.get(*key));
    differing
        .map(|key| Difference {
            key: key.clone(),
            was: described(key, saved),
            is: described(key, now),
            fits: fits(key),
        })
        .collect()
}

/// Settings that decide what an evaluation measures, besides the data and the model.
const MEASURED: [&str; 2] = ["run.eval_tokens", "seed"];

/// Whether evaluations measure now what they measured when a checkpoint was saved.
pub(super) fn measure_alike(saved: &State, now: &State) -> Result<bool> {
    let settings = saved_settings(saved)?;
    Ok(saved.dataset == now.dataset
        && MEASURED.iter().all(|key| settings.get(*key) == now.config.get(*key)))
}

/// The configuration that a checkpoint was saved with; neutral settings are those of `now`.
pub(super) fn config_of(saved: &State, now: Config) -> Result<Config> {
    match settings(&saved_settings(saved)?, &now.decisive()).is_empty() {
        true => Ok(now),
        false => now.recorded(document(saved)?),
    }
}

/// Refuses names to allow that are no key or section of a run's identity.
pub(super) fn check_names(allowed: &[String], config: &Config) -> Result {
    let decisive = config.decisive();
    let keys = || decisive.keys().map(String::as_str).chain(UNSET.map(|(key, _)| key));
    let is_known = |name: &str| covers(name, DATA) || keys().any(|key| covers(name, key));
    match allowed.iter().find(|name| !is_known(name)) {
        Some(name) => Err(config::unknown("--allow", name, keys())),
        None => Ok(()),
    }
}

/// Refuses to continue a run with other settings or data, except those that the keys and sections
/// `allowed` name, with advice on how to `accept` them by an option; returns the key of each
/// accepted change and a notice.
pub(super) fn check(
    path: &Path,
    saved: &State,
    now: &State,
    allowed: &[String],
    accept: impl FnOnce(&str) -> String,
) -> Result<Vec<(String, String)>> {
    if saved.dataset == no_dataset() {
        bail!(
            path,
            "is an imported model, which was not trained here; start a run from it \
            with `sparse24 train --init-from`"
        );
    }
    let mut differences = settings(&saved_settings(saved)?, &now.config);
    // Without masked decay, its factor has no effect.
    let decays = method(now)?.decay.lambda().is_some();
    differences.retain(|difference| decays || difference.key != "method.lambda");
    let short = |fingerprint: Fingerprint| fingerprint.to_string()[..8].to_owned();
    if saved.dataset.fingerprint != now.dataset.fingerprint {
        let described =
            |DatasetIdentity { fingerprint, training_tokens, held_out_tokens, vocabulary }| {
                format!(
                    "data of {training_tokens} + {held_out_tokens} tokens of {vocabulary} \
                    (fingerprint {})",
                    short(fingerprint)
                )
            };
        differences.push(Difference {
            key: DATA.into(),
            was: described(saved.dataset),
            is: described(now.dataset),
            fits: saved.dataset.vocabulary == now.dataset.vocabulary,
        });
    }
    if saved.tokenizer != now.tokenizer {
        let described = |fingerprint| match fingerprint == none() {
            true => "no tokenizer".to_owned(),
            false => format!("a tokenizer (fingerprint {})", short(fingerprint)),
        };
        let (was, is) = (described(saved.tokenizer), described(now.tokenizer));
        differences.push(Difference { key: TOKENIZER.into(), was, is, fits: true });
    }
    // Another tokenizer changes the meaning of the ids, so `--allow data` does not cover it.
    let names = |name: &str, key: &str| name == key || key != TOKENIZER && covers(name, key);
    let is_accepted = |d: &Difference| d.fits && allowed.iter().any(|name| names(name, &d.key));
    let (accepted, refused): (Vec<_>, Vec<_>) = differences.into_iter().partition(is_accepted);
    if refused.is_empty() {
        let notice = |Difference { key, was, is, .. }| {
            (key, format!("the run continues with {is} instead of {was}"))
        };
        return Ok(accepted.into_iter().map(notice).collect());
    }
    let all = |field: fn(&Difference) -> &str| refused.iter().map(field).collect::<Vec<_>>();
    let (was, is) = (all(|d| &d.was).join(", "), all(|d| &d.is).join(", "));
    let problem = format!("was saved with {was}, but the run now has {is}");
    if !refused.iter().all(|d| d.fits) {
        let advice = "which changes the shape or meaning of its weights or moments; undo the \
                      change, or start a new run";
        bail!(path, "{problem}, {advice}");
    }
    let undo = |d: &Difference| {
        let value = d.was.strip_prefix(&d.key)?.strip_prefix(" = ")?;
        Some(format!("--set {}", word(format!("{}={value}", d.key))))
    };
    let undo: Option<Vec<_>> = refused.iter().map(undo).collect();
    let undo = undo.map_or(String::new(), |undo| format!(" with `{}`", undo.join(" ")));
    let allow = format!("--allow {}", all(|d| &d.key).join(" --allow "));
    Err(Error::file(path, problem)
        .advising(&format!("; undo the change{undo}, {}, or start a new run", accept(&allow))))
}

/// Whether a name is this key of a configuration or a section that holds it.
#[must_use]
pub fn covers(name: &str, key: &str) -> bool {
    key.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

//! Configurations that were written by earlier versions.
//!
//! A run's own files are read with the old keys, and with the methods that these meant. A user's
//! file or setting with an old key is refused, with the key's present name.

use toml::{Table, Value};

use crate::Error;

/// Each old key with its present name.
const RENAMED: [(&str, &str); 10] = [
    ("model.width", "model.d_model"),
    ("model.ffn_width", "model.d_ff"),
    ("model.context", "model.sequence_length"),
    ("model.recompute", "model.activation_checkpointing"),
    ("batch.sequences", "batch.size"),
    ("batch.accumulation", "batch.gradient_accumulation_steps"),
    ("half.ratio", "method.d_ff_ratio"),
    ("backend.launches", "backend.cuda_graphs"),
    ("optimizer.clip", "optimizer.max_grad_norm"),
    ("data.validation", "data.validation_share"),
];

/// A removed key: a file from elsewhere must not name code that is then loaded.
const LIBRARIES: &str = "backend.libraries";

/// The refusal of an old key, or of a section of old keys.
pub(super) fn refusal(key: &str) -> Option<Error> {
    if key == LIBRARIES {
        let problem = "removed; name the folders in the environment variable \
                       SPARSE24_CUDA_LIBRARIES instead";
        return Some(Error::setting(key, problem));
    }
    let is_old = |old: &str| {
        old.strip_prefix(key).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    let (old, new) = RENAMED.iter().find(|(old, _)| is_old(old))?;
    let values = if *old == "backend.launches" {
        " (true for \"replayed\", false for \"queued\")"
    } else {
        ""
    };
    Some(Error::setting(*old, format!("renamed to {new}{values}")))
}

/// Whether a document has an old key.
#[must_use]
pub fn is_old(document: &Table) -> bool {
    RENAMED
        .iter()
        .any(|(old, _)| section(document, old).is_some_and(|(s, key)| s.contains_key(key)))
}

/// Translates a whole configuration, if an earlier version wrote it.
pub fn update(document: &mut Table) {
    take(document, LIBRARIES);
    if is_old(document) {
        update_settings(document);
    }
}

/// Translates settings that are known to be of an earlier version, such as those of a study's arm.
pub fn update_settings(document: &mut Table) {
    for (old, new) in RENAMED {
        let Some(value) = take(document, old) else { continue };
        let value = match (old, value.as_str()) {
            ("backend.launches", Some(launches)) => Value::Boolean(launches == "replayed"),
            _ => value,
        };
        let (name, key) = split(new);
        let section = document.entry(name).or_insert_with(|| Value::Table(Table::new()));
        if let Value::Table(section) = section {
            section.entry(key).or_insert(value);
        }
    }
    if let Some(Value::Table(method)) = document.get_mut("method") {
        keep_method(method);
    }
}

/// Makes explicit what a method's name meant before `ste` got the paper's transposable masks, and
/// `sr-ste` and `bi-mask` the decay on gradients of their sources' code.
fn keep_method(method: &mut Table) {
    match method.get("name").and_then(Value::as_str) {
        Some("ste") => {
            method.insert("name".to_owned(), Value::from("ste-row-wise"));
        }
        Some("sr-ste" | "bi-mask")
            if method.get("decay").is_none_or(|decay| decay.as_str() == Some("")) =>
        {
            method.insert("decay".to_owned(), Value::from("on-weights"));
        }
        _ => {}
    }
}

/// Removes the value of a key, and its section if that has no other.
fn take(document: &mut Table, key: &str) -> Option<Value> {
    let (name, key) = split(key);
    let section = document.get_mut(name)?.as_table_mut()?;
    let value = section.remove(key);
    if section.is_empty() {
        document.remove(name);
    }
    value
}

fn section<'a, 'k>(document: &'a Table, key: &'k str) -> Option<(&'a Table, &'k str)> {
    let (name, key) = split(key);
    Some((document.get(name)?.as_table()?, key))
}

fn split(key: &str) -> (&str, &str) {
    key.split_once('.').expect("every renamed key is in a section")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, dotted, preset, table_of};

    #[test]
    fn an_old_document_keeps_its_values() {
        let parse = |text: &str| text.parse::<Table>().unwrap();
        let mut old = parse(
            "model = { width = 8, layers = 2 }\nhalf.ratio = \"10/13\"\n\
             backend.launches = \"queued\"",
        );
        update(&mut old);
        let new = parse(
            "model = { d_model = 8, layers = 2 }\nmethod.d_ff_ratio = \"10/13\"\n\
             backend.cuda_graphs = false",
        );
        assert_eq!(old, new);
        assert!(!is_old(&new));
        // Methods of earlier versions, and the same in present terms.
        for (before, now) in [
            ("name = \"ste\"", "name = \"ste-row-wise\""),
            ("name = \"sr-ste\"", "name = \"sr-ste\", decay = \"on-weights\""),
            ("name = \"bi-mask\", decay = \"\"", "name = \"bi-mask\", decay = \"on-weights\""),
            ("name = \"sr-ste\", decay = \"none\"", "name = \"sr-ste\", decay = \"none\""),
            ("name = \"fst\", decay = \"\"", "name = \"fst\", decay = \"\""),
        ] {
            let document = |key: &str, method: &str| {
                parse(&format!("model.{key} = 8\nmethod = {{ {method} }}"))
            };
            let (mut old, mut new) = (document("width", before), document("d_model", before));
            update(&mut old);
            assert_eq!(old, document("d_model", now));
            update(&mut new);
            assert_eq!(new, document("d_model", before), "a new document is unchanged");
        }
    }

    #[test]
    fn a_configuration_names_no_code() {
        let mut own: Table = "[backend]\nlibraries = \"/tmp/evil\"\ngpu = 1".parse().unwrap();
        update(&mut own);
        assert_eq!(own, "[backend]\ngpu = 1".parse().unwrap());
        let refused = Config::resolve(None, None, &["backend.libraries=/tmp".into()]);
        let message = refused.unwrap_err().to_string();
        assert!(message.contains("SPARSE24_CUDA_LIBRARIES"), "{message}");
    }

    #[test]
    fn every_new_name_is_a_key_and_every_old_one_is_refused() {
        let mut keys = dotted(table_of(&preset::PRESETS[0].config()));
        for (old, new) in RENAMED {
            assert!(keys.remove(new).is_some(), "{new}");
            assert!(!keys.contains_key(old), "{old}");
            let refused = Config::resolve(None, None, &[format!("{old}=1")]);
            let message = refused.unwrap_err().to_string();
            assert!(message.starts_with(&format!("{old}: renamed to {new}")), "{message}");
        }
    }
}

//! Sound documents in which one value after another is of every kind, absent, or there twice: what a reader tells apart field by field, and what
//! random damage would need long to find.
//!
//! Deliberately absent: what the fields mean.

use serde_json::Value;

const JSON: [&str; 17] = [
    "null",
    "true",
    "0",
    "-1",
    "1.5",
    "4294967296",
    "18446744073709551615",
    "18446744073709551616",
    "1e999",
    r#""""#,
    r#""x""#,
    r#""\u0000""#,
    r#""\ud800""#,
    "[]",
    "[0]",
    "{}",
    r#"{"x":0}"#,
];

const TOML: [&str; 21] = [
    "true",
    "0",
    "-1",
    "1.5",
    "1e-46",
    "1e39",
    "nan",
    "-inf",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "\"\"",
    "\"x\"",
    "\"\\u0000\"",
    "'''x'''",
    "[]",
    "[0]",
    "{}",
    "{x = 0}",
    "1979-05-27T07:32:00Z",
    "",
];

/// Stands where a value is to be.
const PLACE: &str = "<place>";

/// The variants of a JSON document.
pub(super) fn json(sound: &str) -> Vec<String> {
    let document: Value = serde_json::from_str(sound).expect("a sound document");
    let mut places = Vec::new();
    gather(&document, String::new(), &mut places);
    let mut variants = Vec::new();
    for (place, key) in &places {
        let mut marked = document.clone();
        let value = std::mem::replace(marked.pointer_mut(place).expect("gathered there"), PLACE.into());
        let marked = marked.to_string();
        let mut put = |text: &str| variants.push(marked.replacen(&format!("\"{PLACE}\""), text, 1));
        JSON.iter().for_each(|kind| put(kind));
        if let Some(key) = key {
            let key = Value::from(key.as_str());
            put(&format!("{value},{key}:{value}"));
            put(&format!("{value},\"unknown\":0"));
            let mut without = document.clone();
            let (above, _) = place.rsplit_once('/').expect("a key is in an object");
            without.pointer_mut(above).and_then(Value::as_object_mut).expect("an object").remove(key.as_str().expect("a key"));
            variants.push(without.to_string());
        }
    }
    variants
}

/// Documents as files.
pub(super) fn files(documents: impl IntoIterator<Item = String>) -> Vec<Vec<u8>> {
    documents.into_iter().map(String::into_bytes).collect()
}

/// The pointers to all values, and their keys in objects.
fn gather(value: &Value, place: String, places: &mut Vec<(String, Option<String>)>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                let place = format!("{place}/{}", key.replace('~', "~0").replace('/', "~1"));
                places.push((place.clone(), Some(key.clone())));
                gather(value, place, places);
            }
        }
        Value::Array(values) => {
            for (at, value) in values.iter().enumerate() {
                let place = format!("{place}/{at}");
                places.push((place.clone(), None));
                gather(value, place, places);
            }
        }
        _ => {}
    }
}

/// The variants of a TOML document of a line a value.
pub(super) fn toml(sound: &str) -> Vec<String> {
    let lines: Vec<&str> = sound.lines().collect();
    let with = |at: usize, line: &str| [&lines[..at], &[line], &lines[at + 1..], &[""]].concat().join("\n");
    let mut variants = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        if let Some((key, _)) = line.split_once(" = ") {
            variants.extend(TOML.iter().map(|kind| with(at, &format!("{key} = {kind}"))));
        }
        for line in ["", &format!("{line}\n{line}"), &format!("[{line}]"), &format!("{line} # \u{1b}")] {
            variants.push(with(at, line));
        }
    }
    variants
}

/// The values of a TOML document as settings, one by one, of every kind.
pub(super) fn settings(sound: &str) -> Vec<String> {
    let mut section = String::new();
    let mut variants = Vec::new();
    for line in sound.lines() {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            section = format!("{name}.");
        } else if let Some((key, value)) = line.split_once(" = ") {
            variants.extend(TOML.iter().chain([&value]).map(|kind| format!("{section}{key}={kind}")));
        }
    }
    variants
}

#[cfg(test)]
mod tests {
    use super::{JSON, TOML, json, settings, toml};

    #[test]
    fn every_value_is_of_every_kind_once() {
        let variants = json(r#"{"a/b":[1,{"c":2}]}"#);
        assert_eq!(variants.len(), 4 * JSON.len() + 2 * 3);
        for variant in [r#"{"a/b":null}"#, r#"{"a/b":[-1,{"c":2}]}"#, r#"{"a/b":[1,{"c":2,"c":2}]}"#, r#"{}"#] {
            assert_eq!(variants.iter().filter(|&found| found == variant).count(), 1, "{variant}");
        }
        let sound = "a = 1\n[b]\nc = 2";
        assert_eq!(toml(sound).len(), 2 * TOML.len() + 3 * 4);
        assert!(toml(sound).contains(&"a = 1\n[b]\nc = nan\n".to_owned()));
        assert_eq!(settings(sound).len(), 2 * (TOML.len() + 1));
        assert!(settings(sound).contains(&"b.c=[0]".to_owned()));
    }
}

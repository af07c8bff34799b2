//! Sound documents in which one value or key after another is of every kind, absent, or there
//! twice, which end anywhere or have a piece of syntax anywhere: what a reader tells apart field by
//! field, and what random damage would need long to find.
//!
//! Invariant: no variant stands twice. Deliberately absent: which kinds there are, and what the
//! fields mean but for the words that a caller knows.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::kinds;

/// Stands where a value or a key is to be.
const PLACE: &str = "<place>";

/// The variants of a JSON document; `words` are values of its texts that mean something.
pub(super) fn json(sound: &str, words: &[&str]) -> Vec<String> {
    let document: Value = serde_json::from_str(sound).expect("a sound document");
    let mut places = Vec::new();
    gather(&document, String::new(), &mut places);
    let kinds = kinds::json();
    let mut variants: Vec<String> = kinds::late_errors().collect();
    variants.extend(cuts(&document.to_string()).chain(cuts(&format!("{document:#}"))));
    variants.extend(insertions(&document.to_string()));
    for pointer in &places {
        let value = document.pointer(pointer).expect("gathered there");
        variants.extend(put(&document, pointer, &kinds));
        variants.extend(ends(&document, pointer, &kinds::SPACED));
        if let Value::Number(_) = value {
            variants.extend(put(&document, pointer, kinds::floats()));
        }
        if let Value::String(_) = value {
            variants.extend(put(
                &document,
                pointer,
                words.iter().flat_map(|word| kinds::words(word)),
            ));
            // What a variant of an enumeration holds is read alike for all of them.
            for word in &words[..1] {
                variants.extend(put(
                    &document,
                    pointer,
                    insertions(&format!("{{\"{word}\":null}}")),
                ));
                variants.extend(ends(
                    &document,
                    pointer,
                    &[&format!(" {{\t\"{word}\" :\r null }}")],
                ));
                variants.extend(put(
                    &document,
                    pointer,
                    kinds.iter().map(|kind| format!("{{\"{word}\":{kind}}}")),
                ));
            }
        }
        if let Value::Object(fields) = value {
            // A structure may be read from a list of its fields, in their order.
            let mut keys_in_order: Vec<&String> = fields.keys().collect();
            keys_in_order.sort_by_key(|key| sound.find(&format!("\"{key}\":")));
            let values: Vec<String> =
                keys_in_order.iter().map(|key| fields[*key].to_string()).collect();
            let list = |values: &[&[String]]| format!("[{}]", values.concat().join(","));
            variants.extend(put(
                &document,
                pointer,
                (0..=values.len()).map(|count| list(&[&values[..count]])),
            ));
            let with = |at: usize| {
                let after = values.get(at + 1..).unwrap_or_default();
                kinds
                    .iter()
                    .map(|kind| list(&[&values[..at], std::slice::from_ref(kind), after]))
                    .collect::<Vec<_>>()
            };
            variants.extend(put(&document, pointer, (0..=values.len()).flat_map(with)));
            for key in fields.keys() {
                variants.extend(keys(&document, pointer, key, &kinds));
            }
        }
    }
    let of = |is: fn(&Value) -> bool| {
        places.iter().find(|pointer| document.pointer(pointer).is_some_and(is))
    };
    if let Some(number) = of(Value::is_number) {
        variants.extend(put(&document, number, kinds::long_numbers()));
    }
    if let Some(text) = of(Value::is_string) {
        variants.extend(put(
            &document,
            text,
            kinds::lengths().map(|length| format!("\"{}\"", "x".repeat(length))),
        ));
    }
    variants
}

/// The document with each of these texts in the place of a value.
fn put(
    document: &Value,
    pointer: &str,
    texts: impl IntoIterator<Item: AsRef<str>>,
) -> impl Iterator<Item = String> {
    let mut marked = document.clone();
    *marked.pointer_mut(pointer).expect("a place of the document") = PLACE.into();
    let marked = marked.to_string();
    texts.into_iter().map(move |text| marked.replacen(&format!("\"{PLACE}\""), text.as_ref(), 1))
}

/// The document that ends at each place of these texts, which stand for a value.
fn ends(document: &Value, pointer: &str, texts: &[&str]) -> Vec<String> {
    let marked: String = put(document, pointer, [PLACE]).collect();
    let before = marked.split(PLACE).next().unwrap_or_default();
    texts.iter().flat_map(|text| cuts(text)).map(|text| [before, &text].concat()).collect()
}

/// The document with a key of every kind for one of its own, without it, with it twice, and with an
/// unknown one.
fn keys(document: &Value, object: &str, key: &str, kinds: &[String]) -> Vec<String> {
    let mut changed = document.clone();
    let value = fields(&mut changed, object).remove(key).expect("a key of it");
    let without = changed.to_string();
    fields(&mut changed, object).insert(PLACE.to_owned(), value.clone());
    let marked = changed.to_string();
    let key = Value::from(key);
    let twice = [format!("{key}:{value},{key}"), format!("\"unknown\":{value},{key}")];
    let with = |text: &String| marked.replacen(&format!("\"{PLACE}\""), text, 1);
    kinds.iter().chain(&twice).map(with).chain([without]).collect()
}

fn fields<'d>(document: &'d mut Value, object: &str) -> &'d mut Map<String, Value> {
    document.pointer_mut(object).and_then(Value::as_object_mut).expect("an object of the document")
}

/// The pointers to all values.
fn gather(value: &Value, place: String, places: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                gather(
                    value,
                    format!("{place}/{}", key.replace('~', "~0").replace('/', "~1")),
                    places,
                );
            }
        }
        Value::Array(values) => {
            for (at, value) in values.iter().enumerate() {
                gather(value, format!("{place}/{at}"), places);
            }
        }
        _ => {}
    }
    places.push(place);
}

/// Every beginning of a text.
fn cuts(text: &str) -> impl Iterator<Item = String> {
    text.char_indices().map(|(at, _)| text[..at].to_owned())
}

/// Documents as files, each once.
pub(super) fn files(documents: impl IntoIterator<Item = String>) -> Vec<Vec<u8>> {
    BTreeSet::from_iter(documents).into_iter().map(String::into_bytes).collect()
}

/// A text with a piece of syntax somewhere.
fn insertions(text: &str) -> impl Iterator<Item = String> {
    let places = text.char_indices().map(|(at, _)| at).chain([text.len()]);
    places.flat_map(|at| kinds::SYNTAX.map(|piece| [&text[..at], piece, &text[at..]].concat()))
}

/// The variants of a configuration of a line a value; `words` are values of its texts that mean
/// something.
pub(super) fn toml(sound: &str, words: &[&str]) -> Vec<String> {
    let lines: Vec<&str> = sound.lines().collect();
    let with = |at: usize, line: &str| {
        [&lines[..at], &[line], &lines[at + 1..], &[""]].concat().join("\n")
    };
    let kinds = kinds::toml();
    let mut variants: Vec<String> =
        kinds::late_errors().chain(cuts(sound)).chain(insertions(sound)).collect();
    for length in kinds::lengths() {
        let x = "x".repeat(length);
        variants.extend([
            format!("a = \"{x}\"\n"),
            format!("a = '{x}'\n"),
            format!("# {x}\n"),
            format!("{x} = 0\n"),
        ]);
        variants.extend(["", "[model]\n"].map(|section| {
            (0..length).fold(section.to_owned(), |text, key| format!("{text}k{key} = 0\n"))
        }));
    }
    let mut section = "";
    for (at, line) in lines.iter().enumerate() {
        if let Some((key, value)) = line.split_once(" = ") {
            variants.extend(kinds.iter().map(|kind| with(at, &format!("{key} = {kind}"))));
            variants.extend(kinds::toml_lines(key, value).iter().map(|line| with(at, line)));
            variants.extend(
                kinds::slips(key).iter().map(|slip| with(at, &format!("{slip} = {value}"))),
            );
            if value.contains(['.', 'e']) && value.parse::<f64>().is_ok() {
                variants.extend(kinds::floats().map(|float| with(at, &format!("{key} = {float}"))));
            }
            if value.starts_with('"') {
                variants.extend(
                    kinds::lengths()
                        .map(|length| with(at, &format!("{key} = \"{}\"", "x".repeat(length)))),
                );
            }
            let of_word = |word: &&str| match value.chars().next() {
                Some('"') => Some(with(at, &format!("{key} = \"{word}\""))),
                Some('[') => Some(with(at, &format!("{key} = [\"{word}\", \"dense\"]"))),
                _ => None,
            };
            variants.extend(words.iter().filter_map(of_word));
            variants.extend(
                words.iter().map(|word| format!("preset = \"{word}\"\n{section}\n{line}\n")),
            );
        } else if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            section = line;
            variants.extend(kinds::slips(name).iter().map(|slip| with(at, &format!("[{slip}]"))));
            variants.extend(kinds::toml_headers(name).iter().map(|line| with(at, line)));
        }
    }
    variants
}

/// The values of a configuration as settings, one by one, of every kind, and all of them together,
/// of which one is not sound.
pub(super) fn settings(sound: &str, words: &[&str]) -> Vec<String> {
    let kinds = kinds::toml();
    let mut section = String::new();
    let mut variants = Vec::new();
    let mut all = Vec::new();
    for line in sound.lines() {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            section = format!("{name}.");
        } else if let Some((key, value)) = line.split_once(" = ") {
            let key = section.clone() + key;
            variants.extend(kinds.iter().map(|kind| format!("{key}={kind}")));
            variants.extend(words.iter().map(|word| format!("{key}={word}")));
            variants.extend(words.iter().map(|word| format!("{key}=[\"{word}\"]")));
            variants.extend(kinds::toml_lines(&key, value));
            variants.extend(cuts(&format!("{key}={value}")));
            all.push((key, value));
        }
    }
    for at in 0..all.len() {
        let with = |kind: &str| {
            let lines = all.iter().enumerate().map(|(other, (key, value))| {
                format!("{key}={}", if other == at { kind } else { value })
            });
            lines.collect::<Vec<_>>().join("\n")
        };
        variants
            .extend(["-1", "1.5", "nan", "x", "true", "[0]", "{x = 0}", "1979-05-27"].map(with));
        variants.push(with(&format!("{}\n{}.x=0", all[at].1, all[at].0)));
        variants.push(with(&format!("{}\n{}x=0", all[at].1, all[at].0)));
    }
    variants
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{json, kinds, settings, toml};

    #[test]
    fn every_value_is_of_every_kind() {
        let variants = BTreeSet::from_iter(json(r#"{"a/b":[1,{"c":"x"}]}"#, &["word"]));
        let expect = |variant: String| assert!(variants.contains(&variant), "{variant:?}");
        for kind in kinds::json() {
            expect(format!(r#"{{"a/b":{kind}}}"#));
            expect(format!(r#"{{"a/b":[{kind},{{"c":"x"}}]}}"#));
            expect(format!(r#"{{"a/b":[1,{kind}]}}"#));
            expect(format!(r#"{{"a/b":[1,{{"c":{kind}}}]}}"#));
            expect(format!(r#"{{{kind}:[1,{{"c":"x"}}]}}"#));
            expect(format!(r#"{{"a/b":[1,{{"c":{{"word":{kind}}}}}]}}"#));
            expect(format!(r#"{{"a/b":[1,[{kind}]]}}"#));
            expect(kind);
        }
        for number in kinds::long_numbers() {
            expect(format!(r#"{{"a/b":[{number},{{"c":"x"}}]}}"#));
        }
        for variant in [
            r#"{"a/b":[1,{"c":"x","c":"x"}]}"#,
            r#"{"a/b":[1,{"c":"word"}]}"#,
            r#"{"a/b":[1,["x",0]]}"#,
            r#"{"a/b":[1,{}]}"#,
            "{\"a/b\":[1,{\"c\": {\t\"word\" :\r nul",
            r#"{"a/b":[1,{"c":tr"#,
            r#"{"a/b":[1e-45,{"c":"x"}]}"#,
            r#"{"a/b":[1,{"c":"#,
            r#"{"a/b":[1 ,{"c":"x"}]}"#,
            r#"{"a/b":[1,{"c":"x"}]}#"#,
        ] {
            expect(variant.to_owned());
        }
    }

    #[test]
    fn every_line_is_written_in_every_way() {
        let sound = "a = 1\n[b]\nc = \"x\"\nevery = 5";
        let variants = BTreeSet::from_iter(toml(sound, &["word"]));
        let settings = BTreeSet::from_iter(settings(sound, &["word"]));
        let expect = |variant: String| assert!(variants.contains(&variant), "{variant:?}");
        for kind in kinds::toml() {
            assert!(
                settings.contains(&format!("a={kind}"))
                    && settings.contains(&format!("b.c={kind}")),
                "{kind:?}"
            );
            expect(format!("a = {kind}\n[b]\nc = \"x\"\nevery = 5\n"));
            expect(format!("a = 1\n[b]\nc = {kind}\nevery = 5\n"));
        }
        for variant in [
            "a.x = 1\n[b]\nc = \"x\"\nevery = 5\n",
            "\"\\u0061\" = 1\n[b]\nc = \"x\"\nevery = 5\n",
            "a = 1\n[[b]]\nc = \"x\"\nevery = 5\n",
            "a = 1\n[\"\\u0062\"]\nc = \"x\"\nevery = 5\n",
            "a = 1\n[b]\nc = \"word\"\nevery = 5\n",
            "preset = \"word\"\n[b]\nc = \"x\"\n",
            "a = 1\n[b]\nc = \"x\"\nevery.x = 5\n",
            "a = 1\n[b",
            "a = 1\n[b]\n\u{e9} = \"x\"\nevery = 5\n",
            "a = 1\n[b]\nc = \"x\"\nevrey = 5\n",
            "a = 1\n[b]\nc = \"xxxxxxxxxxxxxxxx\"\nevery = 5\n",
        ] {
            expect(variant.to_owned());
        }
        for setting in [
            "b.c=word",
            "a=[\"word\"]",
            "a=1\nb.c=nan\nb.every=5",
            "a=1\nb.c=\"x\"\nb.c.x=0\nb.every=5",
        ] {
            assert!(settings.contains(setting), "{setting}");
        }
    }

    #[test]
    fn fields_are_listed_in_their_order() {
        assert!(json(r#"{"b":1,"a":2}"#, &["word"]).contains(&"[1,2]".to_owned()));
    }

    #[test]
    fn digits_are_multiplied() {
        let power = (0..80).fold("1".to_owned(), |digits, _| kinds::multiplied(&digits, 2));
        assert_eq!(power, (1_u128 << 80).to_string());
    }
}

//! Structured changes to a sound document in JSON or TOML: every value of a wrong kind, every field
//! missing, doubled, misspelt or unknown, every cut and stray character.

use std::collections::BTreeSet;

use serde_json::Value;

/// How a document is written.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Format {
    Json,
    Toml,
}

/// Stands for the value or key that is replaced.
const PLACE: &str = "<place>";

/// Values that are wrong somewhere, whatever is expected; not all are valid JSON or TOML.
const VALUES: &str = r#"null true false True 0 -0 -1 00 1_0 0x7f 1.5 -0.0 1e-46 1e39 -1e400 nan inf
    NaN 255 65536 4294967295 4294967296 9223372036854775807 9223372036854775808 -9223372036854775809
    18446744073709551615 18446744073709551616 "" "x" 'x' "0" "../x" "/" "\u0000\u001b[2J\n" "\ud800"
    "\ud83d\ude00" "ĀāĂăĄąĆćĈĉĊċČčĎď" "ĀāĂăĄąĆćĈĉĊċČčĎďĐđĒēĔĕĖėĘęĚěĜĝĞğĠ" "\x" "x" "y"x [] [0]
    ["x"] [[]] [null] [-1,0] [0,] [0 {} {"x":0} {x=0} {"x":null} {"x" 1979-05-27T07:32:00Z , = : # \
    """x'''"#;

/// Large values: long texts, numbers and names, many elements, deep nesting.
fn large() -> [String; 9] {
    let many = |piece: &str, last: &str| piece.repeat(200) + last;
    [
        format!("\"{}\"", "x".repeat(5000)),
        format!("\"{}\"", "\\n".repeat(2500)),
        "9".repeat(400),
        format!("0.{}1e400", "0".repeat(400)),
        "[".repeat(3000),
        "{\"x\":".repeat(1000),
        many("[", "") + &many("]", ""),
        format!("[{}", many("0,", "0]")),
        format!("{{{}}}", (0..200).map(|n| format!("\"k{n}\":0")).collect::<Vec<_>>().join(",")),
    ]
}

/// Syntax that is inserted everywhere, in turns of three.
const PIECES: [&str; 13] =
    [" ", "\t", "\n", "\r\n", "\0", ",", "\"", "'", "\\", "[", "}", "0", "\u{e9}"];

/// A sound document.
pub(super) struct Document {
    pub(super) text: String,
    value: Value,
    format: Format,
    /// Texts that mean something where texts are expected.
    words: Vec<String>,
}

impl Document {
    /// A document in JSON.
    pub(super) fn json(text: &str, words: &[&str]) -> Self {
        let value = serde_json::from_str(text).expect("a sound document");
        let words = words.iter().map(|&word| word.to_owned()).collect();
        Self { text: text.to_owned(), value, format: Format::Json, words }
    }

    /// A document in TOML.
    pub(super) fn toml(value: &Value, words: &[String]) -> Self {
        let format = Format::Toml;
        Self { text: format.write(value), value: value.clone(), format, words: words.to_vec() }
    }

    /// The document with one change, for every change, made into files.
    pub(super) fn variants(&self, file: impl Fn(String) -> Vec<u8>) -> Vec<Vec<u8>> {
        self.texts().into_iter().map(file).collect()
    }

    fn texts(&self) -> BTreeSet<String> {
        let text = &self.text;
        let mut variants = BTreeSet::from([text.replace('\n', "\r\n"), format!("\u{feff}{text}")]);
        variants.extend(["\n", " "].map(|space| space.repeat(1000) + "!"));
        for (at, _) in text.char_indices() {
            let (before, after) = text.split_at(at);
            variants.insert(before.to_owned());
            let pieces = (0..3).map(|turn| PIECES[(3 * at + turn) % PIECES.len()]);
            variants.extend(pieces.map(|piece| [before, piece, after].concat()));
        }
        let mut pointers = Vec::new();
        gather(&self.value, String::new(), &mut pointers);
        for pointer in &pointers {
            let mut changed = self.value.clone();
            let place = changed.pointer_mut(pointer).expect("gathered from it");
            let found = std::mem::replace(place, PLACE.into());
            self.put(&changed, self.values_like(&found), &mut variants);
            let Value::Object(fields) = &found else { continue };
            for (key, value) in fields {
                let mut others = fields.clone();
                others.remove(key);
                *changed.pointer_mut(pointer).expect("a place") = others.clone().into();
                variants.insert(self.format.write(&changed));
                others.insert(PLACE.to_owned(), value.clone());
                *changed.pointer_mut(pointer).expect("a place") = others.into();
                self.put(&changed, self.keys_like(key, value), &mut variants);
            }
        }
        variants
    }

    /// Replaces the place in a document by each of these texts.
    fn put(&self, marked: &Value, texts: Vec<String>, into: &mut BTreeSet<String>) {
        let marked = self.format.write(marked);
        let quoted = format!("\"{PLACE}\"");
        let place = if marked.contains(&quoted) { &quoted } else { PLACE };
        let (before, after) = marked.split_once(place).expect("a place");
        into.extend(texts.iter().map(|text| [before, text, after].concat()));
    }

    /// Texts to replace a value by: of every kind, and close to its own.
    fn values_like(&self, found: &Value) -> Vec<String> {
        let mut texts: Vec<String> = VALUES.split_whitespace().map(str::to_owned).collect();
        texts.extend(large());
        match found {
            Value::String(own) => {
                for word in &self.words {
                    texts.extend([format!("{word:?}"), format!("[{word:?}]")]);
                    texts.extend([format!("{{{word:?}:null}}"), format!("{{{word:?}:0}}")]);
                }
                texts.extend(slips(own).iter().map(|slip| format!("{slip:?}")));
            }
            Value::Number(own) => {
                texts.extend((-48..=40).step_by(4).map(|power| format!("5.5e{power}")));
                texts.extend((0..=64).step_by(8).map(|bit| (1_u128 << bit).to_string()));
                texts.extend(["-", "1", "0"].map(|before| format!("{before}{own}")));
                texts.extend([".0", ".5", "e1", "0"].map(|after| format!("{own}{after}")));
            }
            Value::Array(items) => {
                let (shorter, twice) = (items.split_last(), [&items[..], items].concat());
                texts.push(Value::from(twice).to_string());
                texts.extend(shorter.map(|(_, items)| Value::from(items).to_string()));
                texts.extend(self.words.iter().map(|word| format!("[{word:?},{word:?}]")));
            }
            // A structure may also be read from the list of its fields, in their order.
            Value::Object(fields) => {
                let mut fields: Vec<_> = fields.iter().collect();
                fields.sort_by_key(|(key, _)| self.text.find(&format!("\"{key}\":")));
                let fields: Vec<_> = fields.iter().map(|(_, value)| value.to_string()).collect();
                let lists = (0..=fields.len()).map(|end| format!("[{}]", fields[..end].join(",")));
                texts.extend(lists);
            }
            Value::Null | Value::Bool(_) => {}
        }
        texts
    }

    /// Texts to replace a key by: other keys, misspelt ones, the key and itself or another.
    fn keys_like(&self, key: &str, value: &Value) -> Vec<String> {
        let (is, and) = if self.format == Format::Json { (":", ",") } else { (" = ", "\n") };
        let mut texts: Vec<String> = VALUES.split_whitespace().map(str::to_owned).collect();
        texts.push(format!("\"{}\"", "k".repeat(5000)));
        texts.extend(slips(key).iter().map(|slip| format!("{slip:?}")));
        texts.extend([format!("{key:?}.x"), format!("x.{key:?}"), format!(" {key:?}\t")]);
        let value = self.format.value(value);
        texts.extend([key, "unknown"].map(|twice| format!("{twice:?}{is}{value}{and}{key:?}")));
        texts
    }
}

impl Format {
    /// The text of a document; the sections of TOML are written as dotted keys.
    pub(super) fn write(self, document: &Value) -> String {
        let line = |(key, value): (&String, &Value)| match value {
            Value::Object(section) => {
                let field = |(name, value)| format!("{key}.{name} = {}\n", self.value(value));
                section.iter().map(field).collect()
            }
            _ => format!("{key} = {}\n", self.value(value)),
        };
        match (self, document) {
            (Self::Toml, Value::Object(fields)) => fields.iter().map(line).collect(),
            _ => document.to_string(),
        }
    }

    /// The text of a value, in which the objects of TOML are inline tables.
    fn value(self, value: &Value) -> String {
        let join = |items: Vec<String>| items.join(", ");
        match (self, value) {
            (Self::Toml, Value::Array(items)) => {
                format!("[{}]", join(items.iter().map(|item| self.value(item)).collect()))
            }
            (Self::Toml, Value::Object(fields)) => {
                let field = |(key, value)| format!("{key:?} = {}", self.value(value));
                format!("{{{}}}", join(fields.iter().map(field).collect()))
            }
            _ => value.to_string(),
        }
    }
}

/// A word with one letter missing, inserted, replaced or swapped with the next.
fn slips(word: &str) -> Vec<String> {
    let letters: Vec<char> = word.chars().collect();
    let around = |at: usize| {
        let (before, letter, after) = (&letters[..at], letters[at], &letters[at + 1..]);
        let others = [vec![], vec!['\u{e9}'], vec!['x', letter]]
            .map(|other| [before, &other, after].concat());
        let swapped =
            after.split_first().map(|(&next, after)| [before, &[next, letter], after].concat());
        others.into_iter().chain(swapped)
    };
    (0..letters.len()).flat_map(around).map(String::from_iter).collect()
}

/// The pointers to all values.
fn gather(value: &Value, pointer: String, pointers: &mut Vec<String>) {
    let fields: Vec<(String, &Value)> = match value {
        Value::Object(fields) => fields.iter().map(|(key, value)| (key.clone(), value)).collect(),
        Value::Array(items) => (0..).map(|at: usize| at.to_string()).zip(items).collect(),
        _ => Vec::new(),
    };
    for (key, value) in fields {
        gather(value, format!("{pointer}/{}", key.replace('~', "~0").replace('/', "~1")), pointers);
    }
    pointers.push(pointer);
}

//! JSON files: written as this crate writes them, and parsed within a bound on memory.

use serde::{Serialize, de::DeserializeOwned};

/// Most values of a file that others may have made, unless its reader says otherwise. They take up
/// to 40 MiB besides their text.
pub const VALUES: usize = 1 << 18;

/// Parses the text of a file that others may have made.
///
/// # Errors
/// The problem: more than `most` values, or not what is expected.
pub fn parse<T: DeserializeOwned>(text: &[u8], most: usize) -> Result<T, String> {
    // In a `serde_json::Value`, an entry takes up to 160 bytes, a list of one 128 and an object of
    // one 640. Punctuation in strings counts too.
    let values = text.iter().map(|byte| match byte {
        b',' | b'[' => 1,
        b'{' => 5,
        _ => 0,
    });
    match values.sum::<usize>() {
        values if values > most => {
            Err(format!("has {values} values (an object counts as 5), expected at most {most}"))
        }
        _ => serde_json::from_slice(text).map_err(|e| e.to_string()),
    }
}

/// Indented JSON with a newline at its end.
///
/// # Panics
/// If the value has a map with keys that are not strings.
pub(crate) fn pretty(value: &impl Serialize) -> Vec<u8> {
    let mut text = serde_json::to_vec_pretty(value).expect("keys are strings");
    text.push(b'\n');
    text
}

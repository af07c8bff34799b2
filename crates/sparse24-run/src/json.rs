//! JSON files as this crate writes them.

use serde::Serialize;

/// Indented JSON with a newline at its end.
///
/// # Panics
/// If the value has a map with keys that are not strings.
pub(crate) fn pretty(value: &impl Serialize) -> Vec<u8> {
    let mut text = serde_json::to_vec_pretty(value).expect("keys are strings");
    text.push(b'\n');
    text
}

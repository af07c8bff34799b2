//! Errors about unknown names.

use crate::{Error, Result};

/// "X is not known; did you mean Y?", with the nearest known name where at most a third of the
/// letters differ.
pub fn unknown<'a>(key: &str, found: &str, known: impl Iterator<Item = &'a str> + Clone) -> Error {
    /// Memory grows with the square of the length, and no key is this long.
    const LONGEST: usize = 64;
    let distance = |name: &&str| strsim::damerau_levenshtein(found, name);
    let near = |name: &&str| found.len() <= LONGEST && 3 * distance(name) <= found.chars().count();
    // Near in meaning.
    let is_gpu = |name: &&str| found == "gpu" && ["cuda", "wgpu"].contains(name);
    let mut meant: Vec<_> = known.clone().filter(is_gpu).collect();
    if meant.is_empty() {
        meant.extend(known.clone().filter(near).min_by_key(distance));
    }
    let meant: Vec<_> = meant.into_iter().map(|name| format!("{name:?}")).collect();
    let advice = match meant[..] {
        [] => String::new(),
        _ => format!("; did you mean {}?", meant.join(" or ")),
    };
    let all = known.collect::<Vec<_>>().join(", ");
    Error::setting(key, format!("{found:?} is not known{advice} (known: {all})"))
}

/// The error of a key whose value is not the expected one.
pub(super) fn refuse(key: &str, expected: &str, found: impl std::fmt::Display) -> Result {
    Err(Error::setting(key, format!("expected {expected}, found {found}")))
}

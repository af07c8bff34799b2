//! The masks of a model as a file.

use sparse24_core::Mask;

/// The masks in order, each as its tiles in little-endian `u16`, see [`Mask::tiles`].
#[must_use]
pub fn packed<'a>(masks: impl IntoIterator<Item = &'a Mask>) -> Vec<u8> {
    masks.into_iter().flat_map(Mask::tiles).flat_map(|tile| tile.to_le_bytes()).collect()
}

/// BLAKE3 of [`packed`] masks, in hexadecimal digits.
#[must_use]
pub fn hash(packed: &[u8]) -> String {
    blake3::hash(packed).to_hex().to_string()
}

//! GPT-2's byte-pair encoding: the vocabulary and the merges of long words are tiktoken's.
//!
//! Invariant: the tokens are those of `encode_ordinary` there, at several times its speed.

use std::sync::LazyLock;

use regex::Regex;
use rustc_hash::FxHashMap;

use crate::{Error, Result};

pub(super) const VOCABULARY: u32 = 50_257;

/// `<|endoftext|>`.
pub(super) const END_OF_DOCUMENT: u32 = 50_256;

/// tiktoken's pre-tokenizer backtracks over a run of white space, and gives up before a million
/// characters.
const LONGEST_SPACE: usize = 1 << 18;

/// Words of more bytes are left to tiktoken, whose time does not grow with the square.
const SHORT: usize = 64;

/// The id of every token by its bytes; a lower id is merged first.
static RANKS: LazyLock<FxHashMap<Vec<u8>, u32>> =
    LazyLock::new(|| (0..END_OF_DOCUMENT).map(|id| (decode(&[id]), id)).collect());

/// GPT-2's pattern of words without the alternative `\s+(?!\S)`, see [`word`].
static PATTERN: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+")
        .expect("the pattern is well formed")
});

#[derive(Clone, Copy, PartialEq)]
enum Class {
    Letter,
    Digit,
    Space,
    Other,
    /// Left to the regular expression.
    NotAscii,
}

static CLASSES: [Class; 256] = {
    let mut classes = [Class::NotAscii; 256];
    let mut byte = 0_u8;
    while byte < 128 {
        classes[byte as usize] = match byte {
            b'a'..=b'z' | b'A'..=b'Z' => Class::Letter,
            b'0'..=b'9' => Class::Digit,
            b'\t'..=b'\r' | b' ' => Class::Space,
            _ => Class::Other,
        };
        byte += 1;
    }
    classes
};

/// Bytes of the first word of a text that is not empty.
///
/// `\s+(?!\S)` matches a run of white space without its last character if something follows the
/// run, so that a space goes with the word after it; the run of one character is a word itself.
pub(super) fn word(text: &str) -> usize {
    let bytes = text.as_bytes();
    let class = |at: usize| CLASSES[usize::from(bytes[at])];
    if bytes[0] == b'\'' {
        let is_next = |end: &&&str| bytes[1..].starts_with(end.as_bytes());
        if let Some(end) = ["s", "t", "re", "ve", "m", "ll", "d"].iter().find(is_next) {
            return 1 + end.len();
        }
    }
    let first = usize::from(bytes[0] == b' ' && bytes.len() > 1 && class(1) != Class::Space);
    let kind = class(first);
    let mut end = first + 1;
    while end < bytes.len() && class(end) == kind {
        end += 1;
    }
    let is_ascii = kind != Class::NotAscii && (end == bytes.len() || class(end) != Class::NotAscii);
    if !is_ascii {
        end = PATTERN.find(text).expect("some alternative matches any character").end();
    }
    let last = text[..end].chars().next_back().expect("a word is not empty");
    if end < bytes.len() && last.len_utf8() < end && last.is_whitespace() {
        end -= last.len_utf8();
    }
    end
}

pub(super) fn encode(text: &str) -> Result<Vec<u32>> {
    let ranks = &*RANKS;
    let (mut ids, mut parts) = (Vec::with_capacity(text.len() / 3), Vec::new());
    let mut rest = text;
    while !rest.is_empty() {
        let (word, after) = rest.split_at(word(rest));
        match ranks.get(word.as_bytes()) {
            Some(&id) => ids.push(id),
            None if word.len() <= SHORT => merge(word.as_bytes(), ranks, &mut parts, &mut ids),
            None => {
                // A word may begin with a space, but only white space ends with one.
                if word.ends_with(char::is_whitespace)
                    && let Some((at, _)) = word.char_indices().nth(LONGEST_SPACE)
                {
                    let offset = text.len() - rest.len() + at;
                    return Err(Error::LongWhiteSpace { longest: LONGEST_SPACE, offset });
                }
                ids.extend(tiktoken_rs::r50k_base_singleton().encode_ordinary(word));
            }
        }
        rest = after;
    }
    Ok(ids)
}

/// Appends the ids of a word: of all neighbours whose bytes together are a token, those with the
/// lowest id, and the first of these, are merged, until there are none.
pub(super) fn merge(
    word: &[u8],
    ranks: &FxHashMap<Vec<u8>, u32>,
    parts: &mut Vec<(usize, u32)>,
    ids: &mut Vec<u32>,
) {
    let rank = |start: usize, end: usize| ranks.get(&word[start..end]).copied().unwrap_or(u32::MAX);
    // Where each part starts, and the id that it makes with the next one.
    parts.clear();
    parts.extend((0..word.len() - 1).map(|at| (at, rank(at, at + 2))));
    parts.extend([(word.len() - 1, u32::MAX), (word.len(), u32::MAX)]);
    while let Some((at, _)) =
        parts.iter().enumerate().map(|(at, part)| (at, part.1)).min_by_key(|part| part.1)
        && parts[at].1 != u32::MAX
    {
        parts.remove(at + 1);
        for at in at.saturating_sub(1)..=at {
            let end = parts.get(at + 2).map(|next| next.0);
            parts[at].1 = end.map_or(u32::MAX, |end| rank(parts[at].0, end));
        }
    }
    ids.extend(parts.windows(2).map(|part| ranks[&word[part[0].0..part[1].0]]));
}

/// The start of the last word that can be cut off: the word before it ends without white space.
pub(super) fn last_border(text: &str) -> Option<usize> {
    let (mut at, mut border) = (0, None);
    while at < text.len() {
        if at > 0 && !text[..at].ends_with(char::is_whitespace) {
            border = Some(at);
        }
        at += word(&text[at..]);
    }
    border
}

pub(super) fn decode(ids: &[u32]) -> Vec<u8> {
    tiktoken_rs::r50k_base_singleton()
        .decode_bytes(ids)
        .expect("ids below the vocabulary were checked")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The oracle has the original pattern, and backtracks.
        #[test]
        fn tokens_are_those_of_tiktoken(
            text in "([ \n\t\r\u{a0}\u{2003}\u{85}]{0,4}|'(s|t|re|ve|m|ll|d|x|S)|[a-zA-Z]{1,12}\
                |[0-9]{1,4}|[.,!'\"(){}<|>=_-]{1,5}|[éßñ½²٣ⅷ漢字かな]{1,4}|😀|\u{301}|\u{0}){0,40}|\\PC*"
        ) {
            let expected = tiktoken_rs::r50k_base_singleton().encode_ordinary(&text);
            prop_assert_eq!(encode(&text).unwrap(), expected.clone());
            if let Some(border) = last_border(&text) {
                let parts = [&text[..border], &text[border..]].map(|part| encode(part).unwrap());
                prop_assert_eq!(parts.concat(), expected);
            }
        }
    }

    #[test]
    fn long_words_are_those_of_tiktoken() {
        let longest = "a".repeat(LONGEST_SPACE + 1);
        for word in ["ab".repeat(40), "=".repeat(300), "\n".repeat(70), "漢".repeat(50), longest] {
            let text = format!("x {word} y");
            let expected = tiktoken_rs::r50k_base_singleton().encode_ordinary(&text);
            assert!(encode(&text).unwrap() == expected, "{:.80}", text);
        }
    }
}

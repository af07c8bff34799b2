//! Byte-pair encoding with a vocabulary of its own (Sennrich et al. 2016, over bytes), and a
//! dictionary of pieces that another program made.
//!
//! Text is split into words as GPT-2's tokenizer does it, so a space goes with the word after it
//! and `decode(encode(text)) == text`. Within a word, of all neighbours whose bytes together are a
//! token, those of the lowest id are merged first. A word of more than [`LONGEST`] bytes is encoded
//! in parts of so many.

use std::sync::Arc;

use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use tokenizers::{
    AddedToken, Trainer as _,
    models::bpe::{BPE, BpeTrainer},
};

use super::{
    FEWEST,
    gpt2::{merge, word},
    wordpiece::MOST_PIECES,
};

/// The tokens before a vocabulary, with fairseq's ids: of the beginning of a sentence, of padding,
/// of its end, and of a piece that is not in the vocabulary.
pub(super) const SPECIAL: [&str; 4] = ["<s>", "<pad>", "</s>", "<unk>"];

/// A piece that is not in a dictionary.
pub(super) const UNKNOWN: u32 = 3;

/// Tokens before the merged ones: special ones and bytes.
const FIRST: u32 = FEWEST;

/// The most bytes that are merged at a time, as the time grows with their square: a longer word is
/// several.
const LONGEST: usize = 64;

/// A vocabulary of merged bytes.
#[derive(Debug, Clone)]
pub struct Bpe(Arc<Parts>);

#[derive(Debug)]
struct Parts {
    /// The bytes of each token, from [`FIRST`] on.
    merged: Vec<Vec<u8>>,
    ids: FxHashMap<Vec<u8>, u32>,
}

impl PartialEq for Bpe {
    fn eq(&self, other: &Self) -> bool {
        self.0.merged == other.0.merged
    }
}

impl Eq for Bpe {}

/// The merged tokens in a file: each byte is the character of that number.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Merged(Vec<String>);

fn spelled(bytes: &[u8]) -> String {
    bytes.iter().copied().map(char::from).collect()
}

impl From<&Bpe> for Merged {
    fn from(bpe: &Bpe) -> Self {
        Self(bpe.0.merged.iter().map(|bytes| spelled(bytes)).collect())
    }
}

impl TryFrom<Merged> for Bpe {
    type Error = String;

    fn try_from(Merged(pieces): Merged) -> Result<Self, String> {
        let mut ids: FxHashMap<Vec<u8>, u32> =
            (0..=255).map(|byte| (vec![byte], SPECIAL.len() as u32 + u32::from(byte))).collect();
        let mut merged = Vec::with_capacity(pieces.len());
        for (id, piece) in (FIRST..).zip(&pieces) {
            let bytes: Option<Vec<u8>> =
                piece.chars().map(|c| u8::try_from(u32::from(c)).ok()).collect();
            let bytes = bytes.filter(|bytes| (2..=LONGEST).contains(&bytes.len()));
            let bytes =
                bytes.ok_or_else(|| format!("the token {id} is not 2 to {LONGEST} bytes"))?;
            // Otherwise no word would ever be encoded with it.
            let has_parts = (1..bytes.len())
                .any(|at| ids.contains_key(&bytes[..at]) && ids.contains_key(&bytes[at..]));
            if !has_parts {
                return Err(format!("the token {id}, {piece:?}, does not join two earlier tokens"));
            }
            if let Some(other) = ids.insert(bytes.clone(), id) {
                return Err(format!("the tokens {other} and {id} are both {piece:?}"));
            }
            merged.push(bytes);
        }
        Ok(Self(Arc::new(Parts { merged, ids })))
    }
}

impl Bpe {
    /// The vocabulary of at most `size` tokens, special ones and all bytes among them, that merges
    /// the most frequent pairs of these texts; equally frequent pairs in the order of their ids. A
    /// pair occurs at least twice.
    pub(crate) fn train(
        size: u32,
        texts: impl Iterator<Item = impl AsRef<str> + Send> + Send,
    ) -> Self {
        let bytes = (0..=255_u8).map(char::from);
        // The trainer gives these ids in their order, and those of merged tokens after them.
        let first = SPECIAL.into_iter().map(str::to_owned).chain(bytes.clone().map(String::from));
        let mut trainer = BpeTrainer::builder()
            .vocab_size((size.max(FEWEST) as usize).min(MOST_PIECES))
            .min_frequency(2)
            .show_progress(false)
            .special_tokens(first.map(|token| AddedToken::from(token, true)).collect())
            .initial_alphabet(bytes.collect())
            .build();
        let words = |mut text: &str| {
            let mut words = Vec::new();
            while !text.is_empty() {
                let (found, rest) = text.split_at(word(text));
                words.extend(found.as_bytes().chunks(LONGEST).map(spelled));
                text = rest;
            }
            Ok(words)
        };
        trainer.feed(texts, words).expect("no word fails");
        let mut model = BPE::default();
        trainer.train(&mut model).expect("training reads nothing");
        let mut pieces: Vec<_> =
            model.get_vocab().into_iter().filter(|&(_, id)| id >= FIRST).collect();
        pieces.sort_unstable_by_key(|&(_, id)| id);
        let pieces = pieces.into_iter().map(|(piece, _)| piece).collect();
        Self::try_from(Merged(pieces)).expect("a token is merged of two before it")
    }

    pub(super) fn vocabulary(&self) -> u32 {
        FIRST + self.0.merged.len() as u32
    }

    /// The merged tokens, for the fingerprint.
    pub(super) fn merged(&self) -> &[Vec<u8>] {
        &self.0.merged
    }

    pub(super) fn encode(&self, text: &str) -> Vec<u32> {
        let (mut ids, mut parts) = (Vec::with_capacity(text.len() / 3), Vec::new());
        let mut rest = text;
        while !rest.is_empty() {
            let (word, after) = rest.split_at(word(rest));
            match self.0.ids.get(word.as_bytes()) {
                Some(&id) => ids.push(id),
                None => {
                    for part in word.as_bytes().chunks(LONGEST) {
                        merge(part, &self.0.ids, &mut parts, &mut ids);
                    }
                }
            }
            rest = after;
        }
        ids
    }

    /// Special tokens stand for no bytes.
    pub(super) fn decode(&self, ids: &[u32]) -> Vec<u8> {
        let mut text = Vec::new();
        for &id in ids {
            match id.checked_sub(SPECIAL.len() as u32) {
                None => {}
                Some(byte @ 0..=255) => text.push(byte as u8),
                Some(_) => text.extend(&self.0.merged[(id - FIRST) as usize]),
            }
        }
        text
    }
}

/// Pieces separated by spaces that another program made, as fairseq's `dict.*.txt` lists them. A
/// piece that ends with `@@` is continued by the next one.
#[derive(Debug, Clone)]
pub struct Dictionary(Arc<(Vec<String>, FxHashMap<String, u32>)>);

impl PartialEq for Dictionary {
    fn eq(&self, other: &Self) -> bool {
        self.pieces() == other.pieces()
    }
}

impl Eq for Dictionary {}

impl TryFrom<Vec<String>> for Dictionary {
    type Error = String;

    fn try_from(pieces: Vec<String>) -> Result<Self, String> {
        let all = SPECIAL.into_iter().chain(pieces.iter().map(String::as_str));
        let mut ids = FxHashMap::default();
        for (id, piece) in (0..).zip(all) {
            if piece.is_empty() || piece.contains(char::is_whitespace) {
                return Err(format!("the piece {piece:?} of id {id} is not a word"));
            }
            if let Some(other) = ids.insert(piece.to_owned(), id) {
                return Err(format!("the ids {other} and {id} have the same piece {piece:?}"));
            }
        }
        Ok(Self(Arc::new((pieces, ids))))
    }
}

impl Dictionary {
    /// The pieces before those of a dictionary, with fairseq's ids.
    pub(crate) const SPECIAL: [&str; 4] = SPECIAL;

    /// The pieces after the special ones.
    pub(crate) fn pieces(&self) -> &[String] {
        &self.0.0
    }

    pub(super) fn vocabulary(&self) -> u32 {
        (SPECIAL.len() + self.pieces().len()) as u32
    }

    pub(super) fn encode(&self, text: &str) -> Vec<u32> {
        let id = |piece| self.0.1.get(piece).copied().unwrap_or(UNKNOWN);
        text.split_whitespace().map(id).collect()
    }

    /// Pieces apart by spaces, joined where `@@` says so; an unknown piece is `<unk>`.
    pub(super) fn decode(&self, ids: &[u32]) -> Vec<u8> {
        let mut text = String::new();
        for &id in ids {
            let piece = match (id as usize).checked_sub(SPECIAL.len()) {
                Some(at) => self.pieces()[at].as_str(),
                None if id == UNKNOWN => SPECIAL[UNKNOWN as usize],
                None => continue,
            };
            match piece.strip_suffix("@@") {
                Some(beginning) => text.push_str(beginning),
                None => {
                    text.push_str(piece);
                    text.push(' ');
                }
            }
        }
        text.truncate(text.trim_end().len());
        text.into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::END, *};

    const TEXT: &str = "low lower lowest, new newer newest, wide wider widest; low new wide";

    #[test]
    fn training_merges_frequent_pairs_in_order() {
        Bpe::train(u32::MAX, [TEXT].into_iter());
        let one = Bpe::train(FEWEST + 12, [TEXT, "low Über"].into_iter());
        assert_eq!(one, Bpe::train(FEWEST + 12, ["low Über", TEXT].into_iter()));
        assert_eq!(one.vocabulary(), FEWEST + 12);
        assert_eq!(one.encode(" low").len(), 1, "{:?}", one.merged());
        assert_eq!(Bpe::train(FEWEST, [TEXT].into_iter()).encode("low").len(), 3);
        let again: Merged = (&one).into();
        assert_eq!(Bpe::try_from(again), Ok(one));
    }

    #[test]
    fn vocabularies_that_no_training_makes_are_refused() {
        for (pieces, expected) in [
            (&["ab", "ab"][..], "the tokens 260 and 261 are both"),
            (&["abc"], "does not join two earlier tokens"),
            (&["a"], "not 2 to 64 bytes"),
            (&["a\u{3b1}"], "not 2 to 64 bytes"),
            (&["a".repeat(65).as_str()], "not 2 to 64 bytes"),
        ] {
            let merged = Merged(pieces.iter().map(|&piece| piece.to_owned()).collect());
            let error = Bpe::try_from(merged).unwrap_err();
            assert!(error.contains(expected), "{pieces:?}: {error}");
        }
    }

    #[test]
    fn a_dictionary_joins_its_pieces() {
        let pieces = ["ein", "Hun@@", "d", "."].map(str::to_owned).to_vec();
        let dictionary = Dictionary::try_from(pieces).unwrap();
        let ids = dictionary.encode(" ein Hun@@ d  bellt .");
        assert_eq!(ids, [4, 5, 6, 3, 7]);
        assert_eq!(dictionary.decode(&[ids, vec![END]].concat()), b"ein Hund <unk> .");
        let twice = vec!["a".to_owned(), "a".to_owned()];
        assert!(Dictionary::try_from(twice).unwrap_err().contains("same piece"));
    }

    proptest! {
        #[test]
        fn decoding_gives_the_text_back(text in "([ \n\t]|low|er|est|é|漢|😀|\u{0}|\\PC){0,30}") {
            let bpe = Bpe::train(FEWEST + 20, [TEXT].into_iter());
            let ids = bpe.encode(&text);
            prop_assert_eq!(bpe.decode(&ids), text.as_bytes());
            prop_assert!(ids.iter().all(|&id| id < bpe.vocabulary()));
        }
    }
}

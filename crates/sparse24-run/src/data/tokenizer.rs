//! Tokenizers. Invariant: `decode(encode(text)) == text`, and every id is below
//! [`Tokenizer::vocabulary`].

use std::{iter, ops::Range, path::Path};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::Tokens;
use crate::{Error, disk};

#[cfg(feature = "tokenizers")]
mod gpt2;

/// Kind of tokenizer in a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum TokenizerKind {
    /// One token per byte of UTF-8: 256.
    #[serde(rename = "byte")]
    Byte,
    /// One token per character of the corpus.
    #[serde(rename = "char")]
    Character,
    /// GPT-2's byte-pair encoding: 50257.
    #[serde(rename = "gpt2")]
    Gpt2,
}

impl TokenizerKind {
    /// All kinds, by size of the vocabulary.
    pub const ALL: [Self; 3] = [Self::Byte, Self::Character, Self::Gpt2];

    /// The name in configurations, on the command line and in `tokenizer.json`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Byte => "byte",
            Self::Character => "char",
            Self::Gpt2 => "gpt2",
        }
    }
}

/// The characters of a text that is read in pieces.
#[derive(Default)]
pub(super) struct Characters(Vec<bool>);

impl Characters {
    pub(super) fn add(&mut self, text: &str) {
        let Self(seen) = self;
        for c in text.chars().map(|c| c as usize) {
            if c >= seen.len() {
                seen.resize(c + 1, false);
            }
            seen[c] = true;
        }
    }

    pub(super) fn tokenizer(self) -> Tokenizer {
        let seen = (0..).zip(self.0).filter(|&(_, seen)| seen);
        Tokenizer::Character(seen.filter_map(|(c, _)| char::from_u32(c)).collect())
    }
}

/// A tokenizer with its vocabulary.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Description", into = "Description")]
pub enum Tokenizer {
    /// The id of a byte is its value.
    Byte,
    /// The id of a character is its rank among these, ascending by code point.
    Character(Vec<char>),
    /// GPT-2's byte-pair encoding, ids as in its `encoder.json`; `<|endoftext|>` (50256) is in the
    /// vocabulary, but text that spells it is encoded as ordinary text. Source: Radford et al.,
    /// "Language models are unsupervised multitask learners", 2019, section 2.2.
    #[cfg(feature = "tokenizers")]
    Gpt2,
}

impl Tokenizer {
    /// The tokenizer of this kind; the character tokenizer takes its vocabulary from `text`.
    ///
    /// # Errors
    /// [`Error::Setting`] for a kind that this build lacks.
    pub fn for_text(kind: TokenizerKind, text: &str) -> Result<Self, Error> {
        match kind {
            TokenizerKind::Byte => Ok(Self::Byte),
            TokenizerKind::Character => {
                let mut seen = Characters::default();
                seen.add(text);
                Ok(seen.tokenizer())
            }
            #[cfg(feature = "tokenizers")]
            TokenizerKind::Gpt2 => Ok(Self::Gpt2),
            #[cfg(not(feature = "tokenizers"))]
            TokenizerKind::Gpt2 => {
                let key = "the tokenizer (data.tokenizer, or --tokenizer of prepare)";
                Err(Error::setting(key, "gpt2 needs a build with the feature `tokenizers`"))
            }
        }
    }

    /// The kind of this tokenizer.
    #[must_use]
    pub fn kind(&self) -> TokenizerKind {
        match self {
            Self::Byte => TokenizerKind::Byte,
            Self::Character(_) => TokenizerKind::Character,
            #[cfg(feature = "tokenizers")]
            Self::Gpt2 => TokenizerKind::Gpt2,
        }
    }

    /// The tokens before a sentence and after it, for a BERT: `[CLS]` and `[SEP]`. A tokenizer
    /// without special ones has its mask token in their place, the id after the last.
    #[must_use]
    pub fn sentence_tokens(&self) -> [u32; 2] {
        [self.vocabulary(); 2]
    }

    /// Number of ids; every id is below it.
    #[must_use]
    pub fn vocabulary(&self) -> u32 {
        match self {
            Self::Byte => 256,
            Self::Character(characters) => characters.len() as u32,
            #[cfg(feature = "tokenizers")]
            Self::Gpt2 => gpt2::VOCABULARY,
        }
    }

    /// BLAKE3 of the name, a zero byte and the characters in UTF-8: two tokenizers with the same
    /// fingerprint encode alike.
    #[must_use]
    pub fn fingerprint(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        hasher.update(self.kind().name().as_bytes()).update(&[0]);
        if let Self::Character(characters) = self {
            hasher.update(characters.iter().collect::<String>().as_bytes());
        }
        hasher.finalize()
    }

    /// The ids of a text.
    ///
    /// # Errors
    /// [`Error::UnknownCharacter`] where the vocabulary of a character tokenizer has no such
    /// character; [`Error::LongWhiteSpace`] where the GPT-2 tokenizer would have to split a run of
    /// white space too long for it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        match self {
            Self::Byte => Ok(text.bytes().map(u32::from).collect()),
            Self::Character(characters) => text
                .char_indices()
                .map(|(offset, character)| match characters.binary_search(&character) {
                    Ok(id) => Ok(id as u32),
                    Err(_) => Err(Error::UnknownCharacter {
                        character,
                        offset,
                        vocabulary: self.vocabulary(),
                    }),
                })
                .collect(),
            #[cfg(feature = "tokenizers")]
            Self::Gpt2 => gpt2::encode(text),
        }
    }

    /// The ids of a text, and the bytes of the text that each stands for, in order.
    ///
    /// # Errors
    /// Same as [`Tokenizer::encode`].
    pub fn encode_with_ranges(&self, text: &str) -> Result<(Vec<u32>, Vec<Range<u32>>), Error> {
        let ids = self.encode(text)?;
        let mut end = 0;
        let ranges = ids.iter().map(|&id| {
            let start = end;
            end += match self {
                Self::Byte => 1,
                Self::Character(characters) => characters[id as usize].len_utf8() as u32,
                #[cfg(feature = "tokenizers")]
                Self::Gpt2 => gpt2::decode(&[id]).len() as u32,
            };
            start..end
        });
        let ranges = ranges.collect();
        Ok((ids, ranges))
    }

    /// Appends the ids of a text of any length, without a second copy of them, on all threads of
    /// the current pool.
    ///
    /// # Errors
    /// Same as [`Tokenizer::encode`].
    pub fn encode_into(&self, text: &str, tokens: &mut Tokens) -> Result<(), Error> {
        const PIECE: usize = 1 << 19;
        let pieces: Vec<&str> = self.pieces(text, PIECE).collect();
        let mut before = 0;
        for pieces in pieces.chunks(4 * rayon::current_num_threads()) {
            let encoded: Vec<_> = pieces.par_iter().map(|piece| self.encode(piece)).collect();
            for (piece, ids) in pieces.iter().zip(encoded) {
                tokens.extend(ids.map_err(|e| e.moved(before))?);
                before += piece.len();
            }
        }
        Ok(())
    }

    /// The id that ends a document, and that no text is encoded to.
    pub(super) fn end_of_document(&self) -> Option<u32> {
        match self {
            Self::Byte | Self::Character(_) => None,
            #[cfg(feature = "tokenizers")]
            Self::Gpt2 => Some(gpt2::END_OF_DOCUMENT),
        }
    }

    /// Whether the token of this id begins with the first byte of a character.
    pub(super) fn starts_character(&self, id: u32) -> bool {
        let first = match self {
            Self::Byte => Some(id as u8),
            Self::Character(_) => None,
            #[cfg(feature = "tokenizers")]
            Self::Gpt2 => gpt2::decode(&[id]).first().copied(),
        };
        first.is_none_or(|byte| byte & 0xc0 != 0x80)
    }

    /// The text in pieces of at least `size` bytes but the last, to be encoded apart.
    fn pieces<'a>(&self, mut text: &'a str, size: usize) -> impl Iterator<Item = &'a str> {
        iter::from_fn(move || {
            let (piece, rest) = text.split_at(self.border(text, size).unwrap_or(text.len()));
            text = rest;
            (!piece.is_empty()).then_some(piece)
        })
    }

    /// The first place at or after `size`, before the end of the text, where it can be cut without
    /// changing a token.
    ///
    /// For GPT-2, white space follows that place, and no white space is before it: its
    /// pre-tokenizer lets white space only begin a word or fill one, and looks ahead only from it.
    pub(super) fn border(&self, text: &str, size: usize) -> Option<usize> {
        let from = (size..text.len()).find(|&at| text.is_char_boundary(at))?;
        match self {
            Self::Byte | Self::Character(_) => Some(from),
            #[cfg(feature = "tokenizers")]
            Self::Gpt2 => {
                let mut after_word =
                    text[..from].chars().next_back().is_some_and(|c| !c.is_whitespace());
                let border = text[from..].char_indices().find(|&(_, c)| {
                    let was_word = std::mem::replace(&mut after_word, !c.is_whitespace());
                    was_word && c.is_whitespace()
                });
                border.map(|(at, _)| from + at)
            }
        }
    }

    /// The last place where a text without a [`Tokenizer::border`] can be cut; takes the time of
    /// encoding it.
    #[cfg_attr(not(feature = "tokenizers"), allow(unused_variables))]
    pub(super) fn last_border(&self, text: &str) -> Option<usize> {
        match self {
            Self::Byte | Self::Character(_) => None,
            #[cfg(feature = "tokenizers")]
            Self::Gpt2 => gpt2::last_border(text),
        }
    }

    /// The bytes of a sequence of ids; the pieces of a sequence can be decoded separately.
    ///
    /// # Errors
    /// [`Error::UnknownToken`] for an id beyond the vocabulary.
    pub fn decode(&self, ids: &[u32]) -> Result<Vec<u8>, Error> {
        let vocabulary = self.vocabulary();
        if let Some(position) = ids.iter().position(|&id| id >= vocabulary) {
            return Err(Error::UnknownToken { token: ids[position], position, vocabulary });
        }
        Ok(match self {
            Self::Byte => ids.iter().map(|&id| id as u8).collect(),
            Self::Character(characters) => {
                ids.iter().map(|&id| characters[id as usize]).collect::<String>().into_bytes()
            }
            #[cfg(feature = "tokenizers")]
            Self::Gpt2 => gpt2::decode(ids),
        })
    }

    /// Writes `tokenizer.json`, atomically.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn save(&self, path: &Path) -> Result<(), Error> {
        let mut json = serde_json::to_vec_pretty(self).expect("a tokenizer is plain JSON");
        json.push(b'\n');
        disk::write_atomically(path, &json)
    }

    /// Reads what [`Tokenizer::save`] wrote.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::File`] for anything that is not such a file.
    pub fn load(path: &Path) -> Result<Self, Error> {
        /// Every character there is, as JSON escapes.
        const LARGEST: u64 = 12 * (char::MAX as u64 + 1);
        serde_json::from_slice(&disk::read_small(path, LARGEST)?).map_err(|e| {
            Error::file(
                path,
                format!("is not a tokenizer of sparse24 (`sparse24 prepare` writes one): {e}"),
            )
        })
    }
}

/// Contents of `tokenizer.json`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Description {
    /// Always 1; a later layout counts up.
    sparse24_tokenizer: u32,
    kind: TokenizerKind,
    /// All characters, ascending; for the character tokenizer only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    characters: Option<String>,
}

impl From<Tokenizer> for Description {
    fn from(tokenizer: Tokenizer) -> Self {
        let characters = match &tokenizer {
            Tokenizer::Character(characters) => Some(characters.iter().collect()),
            _ => None,
        };
        Self { sparse24_tokenizer: 1, kind: tokenizer.kind(), characters }
    }
}

impl TryFrom<Description> for Tokenizer {
    type Error = String;

    fn try_from(description: Description) -> Result<Self, String> {
        if description.sparse24_tokenizer != 1 {
            return Err(format!(
                "version {} is not 1; a newer sparse24 may read it",
                description.sparse24_tokenizer
            ));
        }
        match (description.kind, description.characters) {
            (TokenizerKind::Character, None) => {
                Err("kind `char` needs its `characters`".to_owned())
            }
            (TokenizerKind::Character, Some(characters)) => {
                if characters.is_empty() {
                    return Err("`characters` is empty".to_owned());
                }
                // Checked before allocating four bytes for each: there are few that ascend.
                match characters
                    .chars()
                    .zip(characters.chars().skip(1))
                    .find(|(one, next)| one >= next)
                {
                    None => Ok(Self::Character(characters.chars().collect())),
                    Some((one, next)) => {
                        Err(format!("`characters` must ascend, but {one:?} comes before {next:?}"))
                    }
                }
            }
            (kind, Some(_)) => Err(format!("kind `{}` has no `characters`", kind.name())),
            (kind, None) => Self::for_text(kind, "").map_err(|e| e.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;

    const TEXT: &str = "Hello, wörld: 3.14 \u{1F600}\n\n\tdon't  <|endoftext|>";

    #[test]
    fn vocabularies() {
        let characters = Tokenizer::for_text(TokenizerKind::Character, "banana\n").unwrap();
        assert_eq!(characters, Tokenizer::Character(vec!['\n', 'a', 'b', 'n']));
        assert_eq!(characters.encode("nab").unwrap(), [3, 1, 2]);
        assert_eq!(Tokenizer::Byte.encode("é").unwrap(), [0xc3, 0xa9]);
        assert_eq!(Tokenizer::Byte.vocabulary(), 256);
        let message = characters.encode("né").unwrap_err().to_string();
        assert!(
            message.contains("'é' (U+00E9) at byte 1") && message.contains("4 characters"),
            "{message}"
        );
        let message = characters.decode(&[0, 4]).unwrap_err().to_string();
        assert!(
            message.contains("token 4 at position 1") && message.contains("vocabulary of 4"),
            "{message}"
        );
    }

    #[cfg(feature = "tokenizers")]
    #[test]
    fn gpt2_ids_are_the_published_ones() {
        // From OpenAI's encoder: "Hello, world!" and the text of the end-of-text token, which is
        // ordinary here.
        assert_eq!(Tokenizer::Gpt2.encode("Hello, world!").unwrap(), [15496, 11, 995, 0]);
        assert_eq!(
            Tokenizer::Gpt2.encode("<|endoftext|>").unwrap(),
            [27, 91, 437, 1659, 5239, 91, 29]
        );
        assert_eq!(Tokenizer::Gpt2.decode(&[50_256]).unwrap(), b"<|endoftext|>");
        assert!(Tokenizer::Gpt2.decode(&[50_257]).is_err());
    }

    #[cfg(feature = "tokenizers")]
    #[test]
    fn gpt2_survives_hostile_runs() {
        for hostile in [
            " ".repeat(200_000) + "x",
            "\n".repeat(200_000),
            "a".repeat(200_000),
            "\u{1F600}".repeat(50_000),
            "\0".repeat(200_000),
        ] {
            let ids = Tokenizer::Gpt2.encode(&hostile).unwrap();
            assert_eq!(Tokenizer::Gpt2.decode(&ids).unwrap(), hostile.as_bytes());
        }
        let message = Tokenizer::Gpt2.encode(&(" ".repeat(300_000) + "x")).unwrap_err().to_string();
        assert!(
            message.contains("around byte 262144") && message.contains("white-space"),
            "{message}"
        );
    }

    #[test]
    fn a_long_text_is_encoded_like_a_short_one() {
        let text = "word, ".repeat(400_000);
        let tokenizer = Tokenizer::for_text(TokenizerKind::Character, &text).unwrap();
        let mut tokens = Tokens::for_vocabulary(tokenizer.vocabulary());
        tokenizer.encode_into(&text, &mut tokens).unwrap();
        let mut ids = Vec::new();
        tokens.copy_to(0, tokens.len(), &mut ids);
        assert_eq!(ids, tokenizer.encode(&text).unwrap());
        let message = tokenizer.encode_into(&(text + "X"), &mut tokens).unwrap_err().to_string();
        assert!(message.contains("'X' (U+0058) at byte 2400000"), "{message}");
    }

    #[test]
    fn every_kind_survives_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        let mut fingerprints = Vec::new();
        for kind in TokenizerKind::ALL {
            let Ok(tokenizer) = Tokenizer::for_text(kind, TEXT) else { continue };
            tokenizer.save(&path).unwrap();
            let loaded = Tokenizer::load(&path).unwrap();
            assert_eq!(loaded, tokenizer);
            let ids = loaded.encode(TEXT).unwrap();
            assert!(ids.iter().all(|&id| id < loaded.vocabulary()));
            assert_eq!(loaded.decode(&ids).unwrap(), TEXT.as_bytes());
            fingerprints.push(loaded.fingerprint());
        }
        fingerprints
            .push(Tokenizer::for_text(TokenizerKind::Character, "other").unwrap().fingerprint());
        for (i, one) in fingerprints.iter().enumerate() {
            assert!(fingerprints[..i].iter().all(|other| other != one));
        }
    }

    #[test]
    fn hostile_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        for (content, expected) in [
            ("", "EOF"),
            ("[1]", "not a tokenizer"),
            (r#"{"version":"1.0","model":{"type":"BPE"}}"#, "unknown field `version`"),
            (r#"{"sparse24_tokenizer":2,"kind":"byte"}"#, "version 2 is not 1"),
            (r#"{"sparse24_tokenizer":1,"kind":"word"}"#, "unknown variant `word`"),
            (r#"{"sparse24_tokenizer":1,"kind":"char"}"#, "needs its `characters`"),
            (r#"{"sparse24_tokenizer":1,"kind":"char","characters":""}"#, "is empty"),
            (r#"{"sparse24_tokenizer":1,"kind":"char","characters":"ba"}"#, "'b' comes before 'a'"),
            (r#"{"sparse24_tokenizer":1,"kind":"char","characters":"aa"}"#, "must ascend"),
            (r#"{"sparse24_tokenizer":1,"kind":"byte","characters":"a"}"#, "has no `characters`"),
            (r#"{"sparse24_tokenizer":1,"kind":"char","characters":"\ud800"}"#, "not a tokenizer"),
        ] {
            fs::write(&path, content).unwrap();
            let message = Tokenizer::load(&path).unwrap_err().to_string();
            assert!(
                message.contains("tokenizer.json") && message.contains(expected),
                "{content}: {message}"
            );
        }
        fs::write(&path, " ".repeat(14_000_000)).unwrap();
        assert!(Tokenizer::load(&path).unwrap_err().to_string().contains("holds 14000000 bytes"));
        assert!(
            Tokenizer::load(&folder.path().join("none"))
                .unwrap_err()
                .to_string()
                .starts_with("cannot read")
        );
    }

    proptest! {
        #[test]
        fn pieces_encode_as_the_whole(text in "([ \
            \n\t\u{a0}]{0,3}|'s|[a-z]{1,5}|[0-9]|[.,!']|é|😀){0,40}", size in 1_usize..20) {
                        for kind in TokenizerKind::ALL {
                if let Ok(tokenizer) = Tokenizer::for_text(kind, &text) {
                    let pieces: Vec<&str> = tokenizer.pieces(&text, size).collect();
                    prop_assert_eq!(pieces.concat(), text.as_str());
                    prop_assert!(pieces.iter().rev().skip(1).all(|piece| piece.len() >= size));
                    let encode = |piece: &&str| tokenizer.encode(piece).unwrap();
                    let apart: Vec<u32> = pieces.iter().flat_map(encode).collect();
                    prop_assert_eq!(apart, tokenizer.encode(&text).unwrap());
                }
            }
        }

        #[test]
        fn decode_inverts_encode(text in any::<String>()) {
            for kind in TokenizerKind::ALL {
                if let Ok(tokenizer) = Tokenizer::for_text(kind, &text) {
                    let ids = tokenizer.encode(&text).unwrap();
                    prop_assert!(ids.iter().all(|&id| id < tokenizer.vocabulary()));
                    prop_assert_eq!(tokenizer.decode(&ids).unwrap(), text.as_bytes());
                }
            }
        }
    }
}

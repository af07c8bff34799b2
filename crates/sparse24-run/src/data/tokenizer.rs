//! Tokenizers. Invariant: every id is below [`Tokenizer::vocabulary`] and, but for WordPiece and
//! dictionaries, `decode(encode(text)) == text`.

use std::{
    iter,
    ops::Range,
    path::{Path, PathBuf},
    str::FromStr,
};

use rayon::prelude::*;
use serde::{Deserialize, Serialize, de::IgnoredAny};

use self::description::Description;
use super::Tokens;
use crate::{Error, Result, disk, json};

mod added;
#[cfg(feature = "tokenizers")]
mod bpe;
mod description;
#[cfg(feature = "tokenizers")]
mod gpt2;
#[cfg(feature = "tokenizers")]
pub(super) mod wordpiece;

pub(crate) use added::config_beside;
#[cfg(feature = "tokenizers")]
pub use bpe::{Bpe, Dictionary, Merged};
#[cfg(feature = "tokenizers")]
pub use wordpiece::{Vocabulary, WordPiece};

/// Kind of tokenizer in a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum TokenizerKind {
    /// One token per byte of UTF-8: 256.
    #[serde(rename = "byte")]
    Byte,
    /// One token per character of the corpus.
    #[serde(rename = "char")]
    Character,
    /// BERT's WordPiece, trained on the corpus: up to 32768.
    #[serde(rename = "wordpiece")]
    WordPiece,
    /// Byte-pair encoding, trained on the corpus: up to `data.vocabulary`, or 32768.
    #[serde(rename = "bpe")]
    Bpe,
    /// GPT-2's byte-pair encoding: 50257.
    #[serde(rename = "gpt2")]
    Gpt2,
    /// The pieces that a fairseq dictionary lists, in a text that consists of them.
    #[serde(rename = "dictionary")]
    Dictionary,
}

impl TokenizerKind {
    /// The kinds that encode any corpus, by size of the vocabulary.
    pub const ALL: [Self; 5] =
        [Self::Byte, Self::Character, Self::WordPiece, Self::Bpe, Self::Gpt2];

    /// The name in configurations, on the command line and in `tokenizer.json`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Byte => "byte",
            Self::Character => "char",
            Self::WordPiece => "wordpiece",
            Self::Bpe => "bpe",
            Self::Gpt2 => "gpt2",
            Self::Dictionary => "dictionary",
        }
    }

    /// Whether it finds its vocabulary in a corpus, which takes long.
    #[must_use]
    pub const fn has_pieces(self) -> bool {
        matches!(self, Self::WordPiece | Self::Bpe | Self::Dictionary)
    }

    /// Ids of the tokenizer; of one that takes its vocabulary from a corpus, a usual number.
    #[must_use]
    pub const fn usual_vocabulary(self) -> u32 {
        match self {
            Self::Byte => 256,
            // The characters of tinyshakespeare.
            Self::Character => 65,
            Self::WordPiece | Self::Bpe | Self::Dictionary => DEFAULT_PIECES as u32,
            Self::Gpt2 => 50257,
        }
    }
}

/// Padding, as the tokenizers of translations have it.
pub(crate) const PADDING: u32 = 1;

/// The end of a sentence, as the tokenizers of translations have it; a translation also starts with
/// it.
pub const END: u32 = 2;

/// The fewest tokens of a vocabulary of merged bytes: four special ones and the bytes.
pub const FEWEST: u32 = 4 + 256;

/// Pieces of a vocabulary that is trained, by default: as many as the paper's BERT has.
pub const DEFAULT_PIECES: usize = 32_768;

/// Where the tokenizer of a corpus comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenizerSource {
    /// One of this kind, with a vocabulary of the corpus if the kind has no other.
    Kind(TokenizerKind),
    /// A file for [`Tokenizer::read`].
    File(PathBuf),
}

impl FromStr for TokenizerSource {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let kinds = TokenizerKind::ALL;
        match kinds.into_iter().find(|kind| kind.name() == text) {
            Some(kind) => Ok(Self::Kind(kind)),
            None if Path::new(text).is_file() => Ok(Self::File(text.into())),
            None => {
                let names = kinds.map(TokenizerKind::name).join(", ");
                Err(format!("expected {names}, or a file with a tokenizer"))
            }
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
    /// Byte-pair encoding with a vocabulary of its own, see [`Bpe`].
    #[cfg(feature = "tokenizers")]
    Bpe(Bpe),
    /// The pieces of another program, see [`Dictionary`].
    #[cfg(feature = "tokenizers")]
    Dictionary(Dictionary),
    /// BERT's tokenizer, which loses white space and, by most vocabularies, case and accents.
    #[cfg(feature = "tokenizers")]
    WordPiece(WordPiece),
}

impl Tokenizer {
    /// The tokenizer of this kind; characters, WordPiece and BPE take their vocabulary from `text`.
    ///
    /// # Errors
    /// [`Error::Setting`] for a kind that this build lacks, and for a dictionary, which is a file.
    pub fn for_text(kind: TokenizerKind, text: &str) -> Result<Self> {
        match kind {
            TokenizerKind::Byte => Ok(Self::Byte),
            TokenizerKind::Character => {
                let mut seen = Characters::default();
                seen.add(text);
                Ok(seen.tokenizer())
            }
            #[cfg(feature = "tokenizers")]
            TokenizerKind::Gpt2 => Ok(Self::Gpt2),
            #[cfg(feature = "tokenizers")]
            TokenizerKind::WordPiece => {
                let pieces = Self::WordPiece(WordPiece::untrained());
                let pieces: Vec<&str> = pieces.pieces(text, PIECE).collect();
                let trained = WordPiece::train(DEFAULT_PIECES, pieces.into_iter());
                Ok(Self::WordPiece(trained))
            }
            #[cfg(feature = "tokenizers")]
            TokenizerKind::Bpe => {
                Ok(Self::Bpe(Bpe::train(DEFAULT_PIECES as u32, std::iter::once(text))))
            }
            #[cfg(feature = "tokenizers")]
            TokenizerKind::Dictionary => {
                let problem = "dictionary is the vocabulary of a folder with sentence pairs";
                Err(Error::setting("data.tokenizer", problem))
            }
            #[cfg(not(feature = "tokenizers"))]
            TokenizerKind::Gpt2
            | TokenizerKind::WordPiece
            | TokenizerKind::Bpe
            | TokenizerKind::Dictionary => {
                let key = "the tokenizer (data.tokenizer, or --tokenizer of prepare)";
                let name = kind.name();
                let problem = format!("{name} needs a build with the feature `tokenizers`");
                Err(Error::setting(key, problem))
            }
        }
    }

    /// Reads a tokenizer from a file: one that [`Tokenizer::save`] wrote, or Hugging Face's
    /// `tokenizer.json` or `vocab.txt` of a WordPiece vocabulary.
    ///
    /// # Errors
    /// [`Error::File`] for any other file; [`Error::Io`].
    pub fn read(path: &Path) -> Result<Self> {
        #[cfg(feature = "tokenizers")]
        let tokenizer = {
            let is_ours = disk::read_small(path, LARGEST)
                .is_ok_and(|text| text.windows(OURS.len()).take(99).any(|at| at == OURS));
            if is_ours { Self::load(path) } else { WordPiece::read(path).map(Self::WordPiece) }?
        };
        #[cfg(not(feature = "tokenizers"))]
        let tokenizer = Self::load(path)?;
        tokenizer.json(path).map(|_| tokenizer)
    }

    /// The kind of this tokenizer.
    #[must_use]
    pub fn kind(&self) -> TokenizerKind {
        match self {
            Self::Byte => TokenizerKind::Byte,
            Self::Character(_) => TokenizerKind::Character,
            #[cfg(feature = "tokenizers")]
            Self::Gpt2 => TokenizerKind::Gpt2,
            #[cfg(feature = "tokenizers")]
            Self::WordPiece(_) => TokenizerKind::WordPiece,
            #[cfg(feature = "tokenizers")]
            Self::Bpe(_) => TokenizerKind::Bpe,
            #[cfg(feature = "tokenizers")]
            Self::Dictionary(_) => TokenizerKind::Dictionary,
        }
    }

    /// A remark for the user, if the rules of a `vocab.txt` were guessed.
    #[must_use]
    pub fn remark(&self) -> Option<String> {
        match self {
            #[cfg(feature = "tokenizers")]
            Self::WordPiece(tokenizer) => tokenizer.remark(),
            _ => None,
        }
    }

    /// The tokens that stand for no text, the mask token last; none but WordPiece has any.
    #[must_use]
    pub fn special_tokens(&self) -> Vec<u32> {
        match self {
            #[cfg(feature = "tokenizers")]
            Self::WordPiece(tokenizer) => tokenizer.special().to_vec(),
            _ => Vec::new(),
        }
    }

    /// The tokens before a sentence and after it, for a BERT: `[CLS]` and `[SEP]`. A tokenizer
    /// without special ones has its mask token in their place, the id after the last.
    #[must_use]
    pub fn sentence_tokens(&self) -> [u32; 2] {
        match self.special_tokens()[..] {
            [_, _, class, separator, _] => [class, separator],
            _ => [self.vocabulary(); 2],
        }
    }

    /// Number of ids; every id is below it.
    #[must_use]
    pub fn vocabulary(&self) -> u32 {
        match self {
            Self::Byte => 256,
            Self::Character(characters) => characters.len() as u32,
            #[cfg(feature = "tokenizers")]
            Self::Gpt2 => gpt2::VOCABULARY,
            #[cfg(feature = "tokenizers")]
            Self::WordPiece(tokenizer) => tokenizer.vocabulary().pieces.len() as u32,
            #[cfg(feature = "tokenizers")]
            Self::Bpe(bpe) => bpe.vocabulary(),
            #[cfg(feature = "tokenizers")]
            Self::Dictionary(dictionary) => dictionary.vocabulary(),
        }
    }

    /// BLAKE3 of the name, a zero byte and the vocabulary: two tokenizers with the same fingerprint
    /// encode alike. The vocabulary of characters is these in UTF-8; that of WordPiece a byte each
    /// for lower case, stripped accents and split ideographs, 0 or 1, and the pieces, each after a
    /// line feed; that of BPE, for each merged token, its number of bytes (u32, little endian) and
    /// these; that of a dictionary its pieces, each after a line feed.
    #[must_use]
    pub fn fingerprint(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        hasher.update(self.kind().name().as_bytes()).update(&[0]);
        match self {
            Self::Character(characters) => {
                hasher.update(characters.iter().collect::<String>().as_bytes());
            }
            #[cfg(feature = "tokenizers")]
            Self::WordPiece(tokenizer) => {
                let Vocabulary { lowercase, strip_accents, split_ideographs, pieces } =
                    tokenizer.vocabulary();
                hasher.update(&[*lowercase, *strip_accents, *split_ideographs].map(u8::from));
                for piece in pieces {
                    hasher.update(b"\n").update(piece.as_bytes());
                }
            }
            #[cfg(feature = "tokenizers")]
            Self::Bpe(bpe) => {
                for bytes in bpe.merged() {
                    hasher.update(&(bytes.len() as u32).to_le_bytes()).update(bytes);
                }
            }
            #[cfg(feature = "tokenizers")]
            Self::Dictionary(dictionary) => {
                for piece in dictionary.pieces() {
                    hasher.update(b"\n").update(piece.as_bytes());
                }
            }
            _ => {}
        }
        hasher.finalize()
    }

    /// The ids of a text.
    ///
    /// # Errors
    /// [`Error::UnknownCharacter`] where the vocabulary of a character tokenizer has no such
    /// character; [`Error::LongWhiteSpace`] where the GPT-2 tokenizer would have to split a run of
    /// white space too long for it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
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
            #[cfg(feature = "tokenizers")]
            Self::WordPiece(tokenizer) => Ok(tokenizer.encode(text)),
            #[cfg(feature = "tokenizers")]
            Self::Bpe(bpe) => Ok(bpe.encode(text)),
            #[cfg(feature = "tokenizers")]
            Self::Dictionary(dictionary) => Ok(dictionary.encode(text)),
        }
    }

    /// The ids of a text, and the bytes of the text that each stands for; a token of a part of a
    /// character stands for its own bytes only. Not for dictionaries, whose texts are not kept.
    ///
    /// # Errors
    /// Same as [`Tokenizer::encode`].
    pub fn encode_with_ranges(&self, text: &str) -> Result<(Vec<u32>, Vec<Range<usize>>)> {
        #[cfg(feature = "tokenizers")]
        if let Self::WordPiece(tokenizer) = self {
            return Ok(tokenizer.encode_with_ranges(text));
        }
        let ids = self.encode(text)?;
        let (mut ranges, mut start) = (Vec::with_capacity(ids.len()), 0);
        for id in &ids {
            let end = start + self.decode(std::slice::from_ref(id))?.len();
            ranges.push(start..end);
            start = end;
        }
        Ok((ids, ranges))
    }

    /// Appends the ids of a text of any length, without a second copy of them, on all threads of
    /// the current pool.
    ///
    /// # Errors
    /// Same as [`Tokenizer::encode`].
    pub fn encode_into(&self, text: &str, tokens: &mut Tokens) -> Result {
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

    /// A prompt for a text without a beginning: a line feed, or where that is no token, the end of
    /// a document or token 0.
    #[must_use]
    pub fn start_of_text(&self) -> Vec<u32> {
        let line_feed = self.encode("\n").unwrap_or_default();
        if line_feed.is_empty() { vec![self.end_of_document().unwrap_or(0)] } else { line_feed }
    }

    /// The id that ends a document, and that no text is encoded to: `[SEP]` of WordPiece, `</s>` of
    /// BPE.
    pub(super) fn end_of_document(&self) -> Option<u32> {
        match self {
            Self::Byte | Self::Character(_) => None,
            #[cfg(feature = "tokenizers")]
            Self::Gpt2 => Some(gpt2::END_OF_DOCUMENT),
            #[cfg(feature = "tokenizers")]
            Self::WordPiece(_) => Some(self.sentence_tokens()[1]),
            #[cfg(feature = "tokenizers")]
            Self::Bpe(_) | Self::Dictionary(_) => Some(END),
        }
    }

    /// Whether the token of this id begins with the first byte of a character.
    pub(super) fn starts_character(&self, id: u32) -> bool {
        let first = match self {
            Self::Byte => Some(id as u8),
            Self::Character(_) => None,
            #[cfg(feature = "tokenizers")]
            Self::Gpt2 => gpt2::decode(&[id]).first().copied(),
            #[cfg(feature = "tokenizers")]
            Self::Bpe(bpe) => bpe.decode(&[id]).first().copied(),
            #[cfg(feature = "tokenizers")]
            Self::WordPiece(_) | Self::Dictionary(_) => None,
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
    /// For GPT-2 and BPE, white space follows that place, and no white space is before it: its
    /// pre-tokenizer lets white space only begin a word or fill one, and looks ahead only from it.
    pub(super) fn border(&self, text: &str, size: usize) -> Option<usize> {
        let from = (size..text.len()).find(|&at| text.is_char_boundary(at))?;
        match self {
            Self::Byte | Self::Character(_) => Some(from),
            #[cfg(feature = "tokenizers")]
            Self::WordPiece(_) | Self::Dictionary(_) => WordPiece::border(text, from),
            #[cfg(feature = "tokenizers")]
            Self::Gpt2 | Self::Bpe(_) => {
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
            #[cfg(feature = "tokenizers")]
            Self::Gpt2 | Self::Bpe(_) => gpt2::last_border(text),
            _ => None,
        }
    }

    /// The bytes of a sequence of ids; the pieces of a sequence can be decoded separately, but for
    /// dictionaries. Words of WordPiece are decoded with a space before each.
    ///
    /// # Errors
    /// [`Error::UnknownToken`] for an id beyond the vocabulary.
    pub fn decode(&self, ids: &[u32]) -> Result<Vec<u8>> {
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
            #[cfg(feature = "tokenizers")]
            Self::WordPiece(tokenizer) => tokenizer.decode(ids),
            #[cfg(feature = "tokenizers")]
            Self::Bpe(bpe) => bpe.decode(ids),
            #[cfg(feature = "tokenizers")]
            Self::Dictionary(dictionary) => dictionary.decode(ids),
        })
    }

    /// Writes `tokenizer.json`, atomically.
    ///
    /// # Errors
    /// [`Error::File`] for a tokenizer that [`Tokenizer::load`] would refuse for its size;
    /// [`Error::Io`].
    pub fn save(&self, path: &Path) -> Result {
        disk::write_atomically(path, &self.json(path)?)
    }

    /// The text for [`Tokenizer::save`]; an error names `path`.
    fn json(&self, path: &Path) -> Result<Vec<u8>> {
        let text = json::pretty(self);
        let checked = match text.len() as u64 {
            size if size > LARGEST => Err(format!("takes {size} bytes, more than {LARGEST}")),
            _ => json::parse::<IgnoredAny>(&text, MOST_VALUES),
        };
        let refuse = |problem| format!("is too large to be written by sparse24: {problem}");
        checked.map(|_| text).map_err(|problem| Error::file(path, refuse(problem)))
    }

    /// Reads what [`Tokenizer::save`] wrote.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::File`] for anything that is not such a file.
    pub fn load(path: &Path) -> Result<Self> {
        json::parse(&disk::read_small(path, LARGEST)?, MOST_VALUES).map_err(|e| {
            Error::file(
                path,
                format!("is not a tokenizer of sparse24 (`sparse24 prepare` writes one): {e}"),
            )
        })
    }
}

/// Bytes that are encoded at a time.
const PIECE: usize = 1 << 19;

/// Every character there is, as JSON escapes.
const LARGEST: u64 = 12 * (char::MAX as u64 + 1);

/// Most values of a file: those of the largest WordPiece vocabulary, and [`json::VALUES`].
const MOST_VALUES: usize = (1 << 20) + json::VALUES;

/// The first key of our files.
#[cfg(feature = "tokenizers")]
const OURS: &[u8] = b"\"sparse24_tokenizer\"";

#[cfg(test)]
mod tests;

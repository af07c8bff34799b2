//! The contents of `tokenizer.json`.

use serde::{Deserialize, Serialize};

#[cfg(feature = "tokenizers")]
use super::{Bpe, Dictionary, Merged, Vocabulary, WordPiece};
use super::{Tokenizer, TokenizerKind};

/// Read so that a build without the feature can name it.
#[cfg(not(feature = "tokenizers"))]
type Vocabulary = serde_json::Value;
#[cfg(not(feature = "tokenizers"))]
type Merged = serde_json::Value;

/// Contents of `tokenizer.json`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Description {
    /// Always 1; a later layout counts up.
    sparse24_tokenizer: u32,
    kind: TokenizerKind,
    /// All characters, ascending; for the character tokenizer only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    characters: Option<String>,
    /// For WordPiece only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    wordpiece: Option<Vocabulary>,
    /// For BPE only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    bpe: Option<Merged>,
    /// For a dictionary only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dictionary: Option<Vec<String>>,
}

impl From<Tokenizer> for Description {
    fn from(tokenizer: Tokenizer) -> Self {
        let (sparse24_tokenizer, kind) = (1, tokenizer.kind());
        let (characters, wordpiece, bpe, dictionary) = (None, None, None, None);
        let mut of = Self { sparse24_tokenizer, kind, characters, wordpiece, bpe, dictionary };
        match tokenizer {
            Tokenizer::Character(all) => of.characters = Some(all.iter().collect()),
            #[cfg(feature = "tokenizers")]
            Tokenizer::WordPiece(tokenizer) => of.wordpiece = Some(tokenizer.vocabulary().clone()),
            #[cfg(feature = "tokenizers")]
            Tokenizer::Bpe(tokenizer) => of.bpe = Some((&tokenizer).into()),
            #[cfg(feature = "tokenizers")]
            Tokenizer::Dictionary(tokenizer) => of.dictionary = Some(tokenizer.pieces().to_vec()),
            _ => {}
        }
        of
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
        #[cfg(feature = "tokenizers")]
        match (description.kind, description.bpe, description.dictionary) {
            (TokenizerKind::Bpe, Some(merged), None) => {
                return Bpe::try_from(merged).map(Self::Bpe);
            }
            (TokenizerKind::Dictionary, None, Some(pieces)) => {
                return Dictionary::try_from(pieces).map(Self::Dictionary);
            }
            (_, None, None) if !matches!(description.kind, TokenizerKind::Bpe) => {}
            (kind, ..) => {
                return Err(format!("kind `{}` needs its own vocabulary alone", kind.name()));
            }
        }
        match (description.kind, description.wordpiece) {
            #[cfg(feature = "tokenizers")]
            (TokenizerKind::WordPiece, Some(vocabulary)) => {
                return WordPiece::try_from(vocabulary).map(Self::WordPiece);
            }
            #[cfg(feature = "tokenizers")]
            (TokenizerKind::WordPiece, None) => {
                return Err("kind `wordpiece` needs its `wordpiece`".to_owned());
            }
            (kind, Some(_)) if kind != TokenizerKind::WordPiece => {
                return Err(format!("kind `{}` has no `wordpiece`", kind.name()));
            }
            _ => {}
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

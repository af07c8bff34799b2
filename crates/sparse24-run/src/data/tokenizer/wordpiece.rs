//! WordPiece as BERT uses it (Schuster and Nakajima 2012; Devlin et al. 2018): text is cleaned,
//! split at white space and punctuation, and each word is the longest pieces from its start on. A
//! piece inside a word begins with `##`. The rules are those of the crate `tokenizers`.
//!
//! Invariant: the ids of a text are those that Hugging Face's tokenizer with this vocabulary gives
//! it without special tokens.

use std::{
    collections::HashSet,
    ops::Range,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokenizers::{
    AddedToken, Model as _, Normalizer, OffsetType, PreTokenizedString, PreTokenizer, Trainer as _,
    models::wordpiece::{WordPiece as Model, WordPieceTrainer},
    normalizers::BertNormalizer,
    pre_tokenizers::bert::BertPreTokenizer,
};

use super::{
    MOST_VALUES,
    added::{class, config_beside},
};
use crate::{Error, Result, disk, json};

/// The tokens that stand for no text: padding, a word that cannot be spelled, the starts of a
/// sequence and of what follows a sentence, and the mask.
pub(super) const SPECIAL: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];

/// Characters with pieces of their own in a trained vocabulary; words lose all others.
const ALPHABET: usize = 1000;
/// How often a pair of pieces occurs at least before it becomes one.
const LEAST_FREQUENT: u64 = 2;

/// White space at which text can be cut: whatever else Unicode counts as such, cleaning may remove.
const SPACES: [char; 4] = [' ', '\t', '\n', '\r'];

/// Most pieces; the largest vocabularies have half as many.
pub(super) const MOST_PIECES: usize = 1 << 20;
/// Characters of the longest word that has pieces; longer ones are `[UNK]`.
const LONGEST_WORD: usize = 100;
/// The largest file with a vocabulary; those of 250,000 pieces have 17 MB.
const LARGEST: u64 = 64 << 20;

/// A vocabulary and the rules for text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vocabulary {
    /// Whether text becomes lower case.
    pub lowercase: bool,
    /// Whether accents are removed.
    pub strip_accents: bool,
    /// Whether each Chinese character is a word.
    pub split_ideographs: bool,
    /// The piece of each id.
    pub pieces: Vec<String>,
}

/// A WordPiece tokenizer.
#[derive(Debug, Clone)]
pub struct WordPiece(Arc<Parts>);

#[derive(Debug)]
struct Parts {
    vocabulary: Vocabulary,
    model: Model,
    special: [u32; 5],
    is_guessed: bool,
}

impl PartialEq for WordPiece {
    fn eq(&self, other: &Self) -> bool {
        self.0.vocabulary == other.0.vocabulary
    }
}

impl Eq for WordPiece {}

impl TryFrom<Vocabulary> for WordPiece {
    type Error = String;

    fn try_from(vocabulary: Vocabulary) -> Result<Self, String> {
        let count = vocabulary.pieces.len();
        let bytes: usize = vocabulary.pieces.iter().map(String::len).sum();
        if count > MOST_PIECES || bytes as u64 > super::LARGEST {
            return Err(format!(
                "has {count} pieces of {bytes} bytes in all, expected at most {MOST_PIECES} and {}",
                super::LARGEST
            ));
        }
        let mut ids = FxHashMap::default();
        for (id, piece) in (0_u32..).zip(&vocabulary.pieces) {
            if piece.is_empty() {
                return Err(format!("the piece of id {id} is empty"));
            }
            if let Some(other) = ids.insert(piece.clone(), id) {
                return Err(format!("the ids {other} and {id} have the same piece {piece:?}"));
            }
        }
        let mut special = [0; 5];
        for (id, token) in special.iter_mut().zip(SPECIAL) {
            *id = *ids.get(token).ok_or_else(|| format!("has no {token}"))?;
        }
        // Starts from an empty map, so that its type needs no name.
        let mut vocab = Model::read_bytes(b"").expect("no line is broken");
        vocab.extend(ids);
        let model = Model::builder().vocab(vocab).build().expect("reads no file");
        Ok(Self(Arc::new(Parts { vocabulary, model, special, is_guessed: false })))
    }
}

impl WordPiece {
    /// The vocabulary and the rules.
    #[must_use]
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.0.vocabulary
    }

    /// The ids of `[PAD]`, `[UNK]`, `[CLS]`, `[SEP]` and `[MASK]`.
    #[must_use]
    pub fn special(&self) -> [u32; 5] {
        self.0.special
    }

    pub(super) fn remark(&self) -> Option<String> {
        let case = if self.0.vocabulary.lowercase { "become lower case" } else { "are kept" };
        self.0.is_guessed.then(|| {
            format!(
                "there is no tokenizer_config.json beside the vocabulary, so the case was guessed \
                 from its pieces: capital letters {case}"
            )
        })
    }

    pub(super) fn encode(&self, text: &str) -> Vec<u32> {
        // Words are split apart faster once than each time that they occur.
        let (mut ids, mut known) = (Vec::with_capacity(text.len() / 4), FxHashMap::default());
        for stretch in text.split(SPACES).filter(|stretch| !stretch.is_empty()) {
            let known = known.entry(stretch);
            ids.extend_from_slice(known.or_insert_with(|| self.encode_stretch(stretch).0));
        }
        ids
    }

    /// The ids of a text, and the bytes of the text that each stands for.
    pub(super) fn encode_with_ranges(&self, text: &str) -> (Vec<u32>, Vec<Range<usize>>) {
        let (mut ids, mut ranges, mut start) = (Vec::new(), Vec::new(), 0);
        // The library takes hundreds of bytes for each of a text.
        for stretch in text.split(SPACES) {
            if !stretch.is_empty() {
                let (own, places) = self.encode_stretch(stretch);
                ids.extend(own);
                ranges.extend(places.iter().map(|place| start + place.start..start + place.end));
            }
            start += stretch.len() + 1;
        }
        (ids, ranges)
    }

    fn encode_stretch(&self, text: &str) -> (Vec<u32>, Vec<Range<usize>>) {
        let mut words = split(&self.0.vocabulary, text);
        words.tokenize(|word| self.0.model.tokenize(word.get())).expect("[UNK] is in it");
        let encoding = words.into_encoding(None, 0, OffsetType::Byte).expect("all have tokens");
        let ranges = encoding.get_offsets().iter().map(|&(start, end)| start..end);
        (encoding.get_ids().to_vec(), ranges.collect())
    }

    /// The first place at or after `from` where a text can be cut without changing a token.
    pub(super) fn border(text: &str, from: usize) -> Option<usize> {
        text[from..].find(SPACES).map(|at| from + at)
    }

    pub(super) fn decode(&self, ids: &[u32]) -> Vec<u8> {
        let mut text = Vec::new();
        for &id in ids {
            match self.0.vocabulary.pieces[id as usize].strip_prefix("##") {
                Some(rest) => text.extend(rest.as_bytes()),
                None => {
                    text.push(b' ');
                    text.extend(self.0.vocabulary.pieces[id as usize].as_bytes());
                }
            }
        }
        text
    }

    /// A tokenizer with the special tokens alone, and the rules that training has.
    pub(in crate::data) fn untrained() -> Self {
        let pieces = SPECIAL.map(str::to_owned).to_vec();
        let rules =
            Vocabulary { lowercase: true, strip_accents: true, split_ideographs: true, pieces };
        Self::try_from(rules).expect("it has the special tokens")
    }

    /// Trains a vocabulary of at most `size` pieces on texts: of the most frequent [`ALPHABET`]
    /// characters, pairs of pieces are joined, the most frequent first. The result depends only on
    /// how often each word occurs.
    pub(in crate::data) fn train(
        size: usize,
        texts: impl Iterator<Item = impl AsRef<str> + Send> + Send,
    ) -> Self {
        let untrained = Self::untrained();
        let rules = untrained.vocabulary();
        let counts: Mutex<FxHashMap<char, u64>> = Mutex::default();
        let mut trainer = WordPieceTrainer::builder()
            .vocab_size(size.min(MOST_PIECES))
            .min_frequency(LEAST_FREQUENT)
            .show_progress(false)
            .build();
        let words = |text: &str| {
            let mut own: FxHashMap<char, u64> = FxHashMap::default();
            let words = split(rules, text);
            let words = words.get_splits(tokenizers::OffsetReferential::Original, OffsetType::None);
            let words = words.into_iter().map(|(word, ..)| word);
            let words = words.filter(|word| word.chars().nth(LONGEST_WORD).is_none());
            let words: Vec<String> = words.map(str::to_owned).collect();
            words
                .iter()
                .flat_map(|word| word.chars())
                .for_each(|c| *own.entry(c).or_default() += 1);
            let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
            own.into_iter().for_each(|(c, count)| *counts.entry(c).or_default() += count);
            Ok(words)
        };
        trainer.feed(texts, words).expect("no word fails");
        let mut alphabet: Vec<_> =
            counts.into_inner().unwrap_or_else(PoisonError::into_inner).into_iter().collect();
        alphabet.sort_unstable_by_key(|&(c, count)| (std::cmp::Reverse(count), c));
        alphabet.truncate(ALPHABET.min(size / 4));
        let mut alphabet: Vec<char> = alphabet.into_iter().map(|(c, _)| c).collect();
        alphabet.sort_unstable();
        // The trainer gives ids in the order of a hash map but to these tokens.
        let characters = alphabet.iter().flat_map(|c| [c.to_string(), format!("##{c}")]);
        let first = SPECIAL.into_iter().map(str::to_owned).chain(characters);
        trainer.set_special_tokens(first.map(|token| AddedToken::from(token, true)).collect());
        trainer.set_limit_alphabet(Some(alphabet.len()));
        trainer.set_initial_alphabet(HashSet::from_iter(alphabet));
        let mut model = Model::default();
        trainer.train(&mut model).expect("training reads nothing");
        let mut pieces: Vec<_> = model.get_vocab().into_iter().collect();
        pieces.sort_unstable_by_key(|&(_, id)| id);
        let pieces = pieces.into_iter().map(|(piece, _)| piece).collect();
        Self::try_from(Vocabulary { pieces, ..rules.clone() }).expect("all pieces differ")
    }

    /// Reads Hugging Face's `tokenizer.json`, or a `vocab.txt` with one piece per line. A
    /// `tokenizer_config.json` beside the first must not contradict it. Beside the second, it sets
    /// the rules, with the defaults of `BertTokenizer`; the default of lower case is an error if a
    /// piece has a capital letter. Without that file, the rules are guessed: text becomes lower
    /// case unless a piece has a capital letter. No tokens other than [`SPECIAL`] may be added.
    ///
    /// # Errors
    /// [`Error::File`] for a file of another kind; [`Error::Io`].
    pub(super) fn read(path: &Path) -> Result<Self> {
        let refuse = |problem: String| Error::file(path, problem);
        let is_json = path.extension().is_some_and(|end| end == "json");
        let bytes = disk::read_small(path, LARGEST)?;
        // Each line takes far more memory than its bytes.
        let lines = 1 + bytes.trim_ascii_end().iter().filter(|&&byte| byte == b'\n').count();
        if !is_json && lines > MOST_PIECES {
            return Err(refuse(format!("has {lines} pieces, expected at most {MOST_PIECES}")));
        }
        let (vocabulary, config) = if is_json {
            let json = json::parse(&bytes, MOST_VALUES).map_err(refuse)?;
            drop(bytes);
            (of_json(&json).map_err(refuse)?, config_beside(path, &json, &SPECIAL)?)
        } else {
            let text = String::from_utf8(bytes).map_err(|_| refuse("is not UTF-8".to_owned()))?;
            let pieces = text.lines().map(|line| line.trim_end().to_owned()).collect();
            let config = config_beside(path, &Value::Null, &SPECIAL)?;
            let is_bert = |class: &str| BERT.contains(&class.trim_end_matches("Fast"));
            if let Some(class) = class(path, &config)?.filter(|class| !is_bert(class)) {
                return Err(refuse(format!(
                    "belongs to a {class}, expected a BertTokenizer; text would be tokenized \
                     differently"
                )));
            }
            (of_lines(pieces, &config), config)
        };
        let class = config["tokenizer_class"].as_str();
        // Other classes take the rules of `tokenizer.json`.
        if !config.is_null() && (!is_json || class.is_some_and(|is| is.starts_with("BertToken"))) {
            agree(&vocabulary, &config).map_err(refuse)?;
        }
        let refuse = |problem| refuse(format!("not a WordPiece vocabulary: {problem}"));
        let mut words = Self::try_from(vocabulary).map_err(refuse)?;
        Arc::get_mut(&mut words.0).expect("it is new").is_guessed = config.is_null() && !is_json;
        Ok(words)
    }
}

/// The words of a text after cleaning.
fn split(rules: &Vocabulary, text: &str) -> PreTokenizedString {
    let &Vocabulary { lowercase, strip_accents, split_ideographs, .. } = rules;
    let normalizer = BertNormalizer::new(true, split_ideographs, Some(strip_accents), lowercase);
    let mut words = PreTokenizedString::from(text);
    words.normalize(|text| normalizer.normalize(text)).expect("any text can be cleaned");
    BertPreTokenizer.pre_tokenize(&mut words).expect("any text can be split");
    words
}

fn of_lines(pieces: Vec<String>, config: &Value) -> Vocabulary {
    let mut ordinary = pieces.iter().filter(|piece| !piece.starts_with('['));
    // Some capital letters, such as ℝ, have no lower case.
    let is_lower = |piece: &String| piece.chars().all(|c| c.to_lowercase().eq([c]));
    let [lowercase, strip_accents, split_ideographs] = rules(config, ordinary.all(is_lower));
    Vocabulary { lowercase, strip_accents, split_ideographs, pieces }
}

/// Hugging Face's tokenizer classes with BERT's rules; our exports name the last.
const BERT: [&str; 8] = [
    "BertTokenizer",
    "ConvBertTokenizer",
    "DistilBertTokenizer",
    "ElectraTokenizer",
    "LxmertTokenizer",
    "MobileBertTokenizer",
    "SqueezeBertTokenizer",
    "PreTrainedTokenizer",
];

/// The keys of the rules in a `tokenizer_config.json`.
const RULES: [&str; 3] = ["do_lower_case", "strip_accents", "tokenize_chinese_chars"];

/// Returns the rules of a `tokenizer_config.json`; `lowercase` is the default of the first.
fn rules(config: &Value, lowercase: bool) -> [bool; 3] {
    let rule = |at: usize, default| config[RULES[at]].as_bool().unwrap_or(default);
    let lowercase = rule(0, lowercase);
    [lowercase, rule(1, lowercase), rule(2, true)]
}

/// Refuses a `tokenizer_config.json` whose rules differ from those of the vocabulary.
fn agree(vocabulary: &Vocabulary, config: &Value) -> Result<(), String> {
    let &Vocabulary { lowercase, strip_accents, split_ideographs, .. } = vocabulary;
    let has = [lowercase, strip_accents, split_ideographs];
    let mut all = RULES.iter().zip(rules(config, true)).zip(has);
    all.find(|((_, asked), has)| asked != has).map_or(Ok(()), |((key, asked), has)| {
        Err(format!(
            "contradicts tokenizer_config.json: {key} is {has} in this vocabulary and {asked} \
             there (perhaps by default); change one of them"
        ))
    })
}

/// The vocabulary of a `tokenizer.json`, if its rules are BERT's.
fn of_json(json: &Value) -> Result<Vocabulary, String> {
    let expect = |at: &str, expected: Value| match json.pointer(at).unwrap_or(&Value::Null) {
        found if *found == expected => Ok(()),
        found => Err(format!("{at}: expected {expected}, found {found:.60}")),
    };
    expect("/model/type", "WordPiece".into())?;
    expect("/model/unk_token", SPECIAL[1].into())?;
    expect("/model/continuing_subword_prefix", "##".into())?;
    expect("/model/max_input_chars_per_word", LONGEST_WORD.into())?;
    expect("/pre_tokenizer/type", "BertPreTokenizer".into())?;
    expect("/normalizer/type", "BertNormalizer".into())?;
    expect("/normalizer/clean_text", true.into())?;
    let rule = |key: &str| json["normalizer"][key].as_bool();
    let lowercase = rule("lowercase").ok_or("/normalizer/lowercase: expected true or false")?;
    let ids = json["model"]["vocab"].as_object().ok_or("/model/vocab: expected an object")?;
    let mut pieces = vec![String::new(); ids.len()];
    for (piece, id) in ids {
        let place = id.as_u64().and_then(|id| pieces.get_mut(id as usize));
        let count = ids.len();
        *place.ok_or_else(|| format!("{piece:?}: expected an id below {count}, found {id}"))? =
            piece.clone();
    }
    let strip_accents = rule("strip_accents").unwrap_or(lowercase);
    let split_ideographs = rule("handle_chinese_chars").unwrap_or(true);
    Ok(Vocabulary { lowercase, strip_accents, split_ideographs, pieces })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    /// The pieces of Devlin et al.'s example, and a few more.
    fn small() -> WordPiece {
        let words = ["un", "##aff", "##able", "runn", "##ing", "strasse", "e", "##e", ",", "漢"];
        let pieces = SPECIAL.into_iter().chain(words).map(str::to_owned).collect();
        let vocabulary = Vocabulary { pieces, ..WordPiece::untrained().vocabulary().clone() };
        WordPiece::try_from(vocabulary).unwrap()
    }

    #[test]
    fn words_are_their_longest_pieces() {
        let tokenizer = small();
        for (text, pieces, ranges) in [
            (
                "UNaffable,\trunning",
                "un ##aff ##able , runn ##ing",
                vec![0..2, 2..5, 5..9, 9..10, 11..15, 15..18],
            ),
            ("é e\u{301}\u{0} x", "e e [UNK]", vec![0..2, 3..4, 8..9]),
            ("漢ee", "漢 e ##e", vec![0..3, 3..4, 4..5]),
            ("[MASK]", "[UNK] [UNK] [UNK]", vec![0..1, 1..5, 5..6]),
            (" \n", "", vec![]),
        ] {
            let (ids, found) = tokenizer.encode_with_ranges(text);
            let spelled = ids.iter().map(|&id| tokenizer.vocabulary().pieces[id as usize].as_str());
            assert_eq!(spelled.collect::<Vec<_>>().join(" "), pieces, "{text}");
            assert_eq!(found, ranges, "{text}");
        }
        let (ids, _) = tokenizer.encode_with_ranges("unaffable running");
        assert_eq!(tokenizer.decode(&ids), b" unaffable running");
    }

    #[test]
    fn training_depends_on_the_words_alone() {
        let texts = ["low lower lowest", "new newer newest, wide wider widest", "low new wide"];
        let one = WordPiece::train(60, texts.iter());
        assert_eq!(one, WordPiece::train(60, texts.iter().rev()));
        let pieces = &one.vocabulary().pieces;
        assert_eq!(pieces[..5], SPECIAL.map(str::to_owned));
        assert!(pieces.iter().any(|piece| piece == "low"), "{pieces:?}");
        assert!(!one.encode("newest lowest").contains(&one.special()[1]));
        assert!(WordPiece::train(20, texts.iter()).vocabulary().pieces.len() <= 20);
    }

    #[test]
    fn other_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let special: Vec<String> = SPECIAL.map(str::to_owned).to_vec();
        let lines = |more: &str| special.join("\n") + "\n" + more;
        let mut good = json!({
            "added_tokens": [{ "id": 1, "content": "[UNK]" }],
            "normalizer": { "type": "BertNormalizer", "clean_text": true, "lowercase": false },
            "pre_tokenizer": { "type": "BertPreTokenizer" },
            "model": { "type": "WordPiece", "unk_token": "[UNK]", "max_input_chars_per_word": 100,
                "continuing_subword_prefix": "##",
                "vocab": { "[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "A": 5 } },
        });
        let read = |name: &str, text: String| {
            let path = folder.path().join(name);
            fs::write(&path, text).unwrap();
            WordPiece::read(&path)
        };
        let cased = read("tokenizer.json", good.to_string()).unwrap();
        assert_eq!(cased, read("vocab.txt", lines("A\n")).unwrap());
        assert!(!cased.vocabulary().lowercase && !cased.vocabulary().strip_accents);
        let beside = folder.path().join("tokenizer_config.json");
        for (piece, config, expected) in [
            ("A", "", "false Some"),
            ("ℝ", "", "true Some"),
            ("ℝ", "{}", "true None"),
            ("A", "{}", "vocab.txt: contradicts"),
            ("A", r#"{"do_lower_case":true}"#, "true None"),
            ("a", r#"{"tokenizer_class":"ElectraTokenizerFast"}"#, "true None"),
            ("a", r#"{"tokenizer_class":"BertJapaneseTokenizer"}"#, "belongs to a BertJapaneseTok"),
        ] {
            if !config.is_empty() {
                fs::write(&beside, config).unwrap();
            }
            let found = read("vocab.txt", lines(piece)).map_or_else(
                |error| error.to_string(),
                |words| format!("{} {:?}", words.vocabulary().lowercase, words.remark()),
            );
            assert!(found.contains(expected), "{piece} {config}: {found}");
        }
        fs::remove_file(&beside).unwrap();
        let model = folder.path().join("config.json");
        fs::write(&model, r#"{"tokenizer_class":"BertJapaneseTokenizer"}"#).unwrap();
        let error = read("vocab.txt", lines("a")).unwrap_err().to_string();
        assert!(error.contains("belongs to a BertJapaneseTokenizer, expected"), "{error}");
        fs::remove_file(&model).unwrap();
        let refuses = |name: &str, text: String, expected: &str| {
            let error = read(name, text).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains(name), "{expected}: {error}");
        };
        for (name, text, expected) in [
            ("vocab.txt", "[PAD]\n[UNK]\nthe".to_owned(), "has no [CLS]"),
            ("vocab.txt", lines("a\nb\na"), "ids 5 and 7 have the same piece \"a\""),
            ("vocab.txt", lines("\n"), "id 5 is empty"),
            ("a.json", "{".to_owned(), "EOF"),
            ("a.json", r#"{"model":{"type":"BPE"}}"#.to_owned(), "\"WordPiece\", found \"BPE\""),
        ] {
            refuses(name, text, expected);
        }
        let many: Vec<String> = (0..=MOST_PIECES).map(|piece| piece.to_string()).collect();
        refuses("vocab.txt", many.join("\n"), "has 1048577 pieces, expected at most 1048576");
        // One long piece: our own file would be larger than what is read again.
        let long = folder.path().join("vocab.txt");
        fs::write(&long, lines(&"x".repeat(14 << 20))).unwrap();
        let error = super::super::Tokenizer::read(&long).unwrap_err().to_string();
        assert!(error.contains("at most 1048576 and 13369344"), "{error}");
        #[cfg(unix)]
        {
            fs::write(&long, lines("a")).unwrap();
            let outside = tempfile::NamedTempFile::new().unwrap();
            std::os::unix::fs::symlink(outside.path(), &beside).unwrap();
            let error = WordPiece::read(&long).unwrap_err().to_string();
            assert!(error.contains("tokenizer_config.json: is a link out of its"), "{error}");
            fs::remove_file(&beside).unwrap();
        }
        // Our own files agree; a cased vocabulary with the default of `BertTokenizer` does not.
        for (config, expected) in [
            (json!({ "tokenizer_class": "BertTokenizer", "do_lower_case": false }), ""),
            (json!({ "tokenizer_class": "BertTokenizer" }), "do_lower_case is false"),
            (json!([0]), "expected a map"),
            (json!({ "tokenizer_class": "PreTrainedTokenizerFast" }), ""),
            (json!({ "pad_token": "[PAD]", "mask_token": { "content": "[MASK]" } }), ""),
            (json!({ "added_tokens_decoder": { "5": { "content": "A" } } }), "token \"A\" is not"),
        ] {
            fs::write(&beside, config.to_string()).unwrap();
            let found = read("tokenizer.json", good.to_string())
                .map_or_else(|e| e.to_string(), |_| String::new());
            assert!(found.contains(expected) && found.is_empty() == expected.is_empty(), "{found}");
        }
        good["added_tokens"] = json!([{ "id": 1, "content": "[UNK]" }, { "content": "A" }]);
        refuses("a.json", good.to_string(), "a.json: the added token \"A\" is not supported");
        good["model"]["vocab"]["A"] = 7.into();
        refuses("a.json", good.to_string(), "\"A\": expected an id below 6, found 7");
    }

    proptest! {
        #[test]
        fn stretches_encode_as_the_whole(
            text in "([ \n\t\u{85}\u{a0}\u{b}]|un|AFFable|,|é|e\u{301}|漢|\u{0}|\u{ad}|\\PC){0,30}"
        ) {
            let tokenizer = small();
            let (ids, ranges) = tokenizer.encode_stretch(&text);
            prop_assert_eq!(&tokenizer.encode(&text), &ids);
            prop_assert_eq!(tokenizer.encode_with_ranges(&text), (ids, ranges.clone()));
            prop_assert!(ranges.iter().all(|range| text.get(range.clone()).is_some()));
        }
    }
}

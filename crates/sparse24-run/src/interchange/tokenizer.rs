//! The tokenizer files that `AutoTokenizer.from_pretrained` reads: a byte-pair encoding, spelled
//! with one character per byte and, for a BERT, with the token that masks others, or a WordPiece
//! vocabulary.
//!
//! Invariant: a text has the ids that [`Tokenizer::encode`] gives it.

use std::{collections::HashMap, path::Path};

use serde_json::{Map, Value, json};

use crate::{
    Error, Result,
    data::{Tokenizer, TokenizerKind, config_beside},
    disk, json,
    tensors::shards::check_inside,
};
use sparse24_train::model::ModelSpec;

#[cfg(feature = "tokenizers")]
mod fsmt;
#[cfg(feature = "tokenizers")]
mod wordpiece;

/// GPT-2's token between documents.
const END: &str = "<|endoftext|>";

/// BERT's token in place of others. A fine-tuned BERT has it before and after a sentence.
const MASK: &str = "[MASK]";

/// Its id; the tokenizer of text has no such token.
fn mask_token(tokenizer: &Tokenizer, model: &ModelSpec) -> Option<u32> {
    let ModelSpec::Bert(spec) = model else { return None };
    let [first, _] = tokenizer.sentence_tokens();
    Some(if spec.prediction.is_some() { first } else { spec.vocabulary as u32 - 1 })
}

/// Its id, if this is GPT-2's tokenizer.
pub(super) fn end_of_text(tokenizer: Option<&Tokenizer>) -> Option<u32> {
    let tokenizer = tokenizer.filter(|tokenizer| tokenizer.kind() == TokenizerKind::Gpt2)?;
    Some(tokenizer.vocabulary() - 1)
}

/// Bytes of the longest file that could be one of ours, of which GPT-2's has 1 to 3 MB.
const LONGEST: u64 = 4 << 20;

/// The tokenizer in a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FolderTokenizer {
    /// The folder has none of the files.
    Absent,
    /// WordPiece, or ours: saved by this program, or with our tokens and merges.
    Known(Tokenizer),
    /// Any other, or damaged: the reason.
    Other(String),
}

/// Reads the tokenizer in a folder (`tokenizer.json`, or else `vocab.json` and `merges.txt`, or
/// else `vocab.txt`): bytes or GPT-2's, as the model may have them, or WordPiece; of a Transformer
/// the dictionary in `vocab-src.json` and `vocab-tgt.json`.
///
/// # Errors
/// [`Error::File`] for a tokenizer behind a link out of the folder, and for more pieces than the
/// model has ids, or for another number of a Transformer; [`Error::Io`].
pub fn folder_tokenizer(folder: &Path, model: &ModelSpec) -> Result<FolderTokenizer> {
    let read = |name: &str| {
        let path = folder.join(name);
        if !disk::is_file(&path)? {
            return Ok(None);
        }
        check_inside(&path)?;
        match disk::read_small(&path, LONGEST) {
            Err(Error::File { .. }) => Ok(Some(Vec::new())),
            text => text.map(Some),
        }
    };
    #[cfg(feature = "tokenizers")]
    if let ModelSpec::Transformer(spec) = model {
        let [Some(source), Some(target)] = [read(fsmt::FILES[0])?, read(fsmt::FILES[1])?] else {
            return Ok(FolderTokenizer::Absent);
        };
        let other = |problem: String| Ok(FolderTokenizer::Other(problem));
        let dictionary = match fsmt::read(&source) {
            Ok(dictionary) => Tokenizer::Dictionary(dictionary),
            Err(problem) => return other(format!("{}: {problem}", fsmt::FILES[0])),
        };
        if source != target {
            return other(format!("{} and {} differ", fsmt::FILES[0], fsmt::FILES[1]));
        }
        let (pieces, ids) = (dictionary.vocabulary() as usize, spec.vocabulary);
        if pieces != ids {
            bail!(folder.join(fsmt::FILES[0]), "has {pieces} pieces, but the model {ids} ids");
        }
        return Ok(FolderTokenizer::Known(dictionary));
    }
    let parsed = |text: &[u8]| json::parse::<Value>(text, json::VALUES).unwrap_or_default();
    let mut file = match (read("tokenizer.json")?, read("vocab.json")?, read("merges.txt")?) {
        (Some(text), ..) => parsed(&text),
        (None, Some(vocabulary), Some(merges)) => {
            let merges = String::from_utf8_lossy(&merges);
            let is_merge = |line: &&str| !line.is_empty() && !line.starts_with("#version");
            let merges: Value = merges.lines().filter(is_merge).map(Value::from).collect();
            let model = json!({ "vocab": parsed(&vocabulary), "merges": merges });
            let pre_tokenizer = json!({ "type": "ByteLevel", "add_prefix_space": false });
            json!({ "model": model, "pre_tokenizer": pre_tokenizer })
        }
        _ => Value::Null,
    };
    let found = tokens(&mut file);
    let is_same = |ours: &Tokenizer| {
        let count = ours.vocabulary() as usize + usize::from(mask_token(ours, model).is_some());
        count <= model.vocabulary()
            && found[0].as_object().is_some_and(|ids| ids.len() == count)
            && tokens(&mut parsed(&files(ours, model)[0].1)) == found
    };
    let ours = [TokenizerKind::Byte, TokenizerKind::Gpt2].into_iter();
    let known = ours.filter_map(|kind| Tokenizer::for_text(kind, "").ok()).find(is_same);
    drop(found);
    let Some(tokenizer) = known else {
        let encloses = matches!(model, ModelSpec::Bert(_))
            && file["model"].is_object()
            && folder.join("tokenizer.json").exists();
        let known = own(folder, model)?;
        return Ok(match known {
            FolderTokenizer::Known(_) if encloses && !is_berts(&file["post_processor"]) => {
                FolderTokenizer::Other("tokenizer.json: /post_processor is not BERT's".to_owned())
            }
            known => known,
        });
    };
    let specials =
        [end_of_text(Some(&tokenizer)).map(|_| END), mask_token(&tokenizer, model).map(|_| MASK)];
    let specials: Vec<_> = specials.into_iter().flatten().collect();
    let path = folder.join("tokenizer.json");
    let rules = check_rules(&file, tokenizer.kind(), mask_token(&tokenizer, model).is_some());
    let rules = rules.map_err(|problem| Error::file(&path, problem));
    match rules.and_then(|()| config_beside(&path, &file, &specials)) {
        Ok(config) => Ok(match ADDING.iter().find(|key| config[**key] == true) {
            Some(key) => FolderTokenizer::Other(format!(
                "tokenizer_config.json sets {key} to true, which alters each text"
            )),
            None => FolderTokenizer::Known(tokenizer),
        }),
        Err(error) => other(error),
    }
}

/// Settings of a `tokenizer_config.json` that add a space or a token to each text.
const ADDING: [&str; 3] = ["add_prefix_space", "add_bos_token", "add_eos_token"];

/// Turns a file's error into an unsupported tokenizer, with the file's name instead of its path.
fn other(error: Error) -> Result<FolderTokenizer> {
    let Error::File { path, problem } = error else { return Err(error) };
    let name = path.file_name().unwrap_or_default().display();
    Ok(FolderTokenizer::Other(format!("{name}: {problem}")))
}

/// Refuses rules that differ from GPT-2's; a byte tokenizer need not split text into words, and
/// that of a BERT encloses a sentence in tokens.
fn check_rules(file: &Value, kind: TokenizerKind, encloses: bool) -> Result<(), String> {
    let value = |at: &str| file.pointer(at).unwrap_or(&Value::Null);
    let processor = "/post_processor/type";
    let rules = [
        ("/normalizer", json!([null])),
        ("/pre_tokenizer/type", json!(["ByteLevel"])),
        ("/pre_tokenizer/add_prefix_space", json!([false])),
        ("/pre_tokenizer/use_regex", json!([null, true, kind == TokenizerKind::Gpt2])),
        (processor, json!([null, "ByteLevel", encloses.then(|| value(processor))])),
        ("/model/dropout", json!([null])),
        ("/model/continuing_subword_prefix", json!([null, ""])),
        ("/model/end_of_word_suffix", json!([null, ""])),
    ];
    let differs = |(at, allowed): &&(&str, Value)| {
        !allowed.as_array().is_some_and(|allowed| allowed.contains(value(at)))
    };
    rules.iter().find(differs).map_or(Ok(()), |(at, _)| {
        Err(format!("{at} is not as in GPT-2's tokenizer, so text would be tokenized differently"))
    })
}

/// Whether a post-processor encloses a text or a pair as BERT does.
fn is_berts(processor: &Value) -> bool {
    let token = |id: &str, of: u8| json!({ "SpecialToken": { "id": id, "type_id": of } });
    let text = |id: &str, of: u8| json!({ "Sequence": { "id": id, "type_id": of } });
    let single = [token("[CLS]", 0), text("A", 0), token("[SEP]", 0)];
    let pair = [&single[..], &[text("B", 1), token("[SEP]", 1)]].concat();
    let is_template = json!([single, pair]) == json!([processor["single"], processor["pair"]]);
    let [before, after] = ["cls", "sep"].map(|key| &processor[key][0]);
    is_template || before == "[CLS]" && after == "[SEP]" && processor["type"] == "BertProcessing"
}

/// The WordPiece tokenizer in a folder, or one that this program has saved there.
fn own(folder: &Path, model: &ModelSpec) -> Result<FolderTokenizer> {
    let files = ["tokenizer.json", "vocab.txt"].map(|name| folder.join(name));
    let Some(path) = disk::first(files, |path| disk::is_file(path))? else {
        let pair = ["vocab.json", "merges.txt"].map(|name| folder.join(name).exists());
        return Ok(match pair {
            [true, true] => {
                let problem = "vocab.json and merges.txt hold other tokens or merges";
                FolderTokenizer::Other(problem.to_owned())
            }
            _ => FolderTokenizer::Absent,
        });
    };
    check_inside(&path)?;
    match Tokenizer::read(&path) {
        Ok(tokenizer) => {
            let adds_mask =
                tokenizer.special_tokens().is_empty() && mask_token(&tokenizer, model).is_some();
            let pieces = tokenizer.vocabulary() as usize + usize::from(adds_mask);
            let ids = model.vocabulary();
            if pieces > ids {
                bail!(path, "has {pieces} pieces, but the model only {ids} ids");
            }
            Ok(FolderTokenizer::Known(tokenizer))
        }
        Err(error) => other(error),
    }
}

/// Takes out the vocabulary and the merges of a `tokenizer.json`; null where it has none.
fn tokens(file: &mut Value) -> [Value; 2] {
    let mut part = |key| file.pointer_mut(key).map(Value::take).unwrap_or_default();
    [part("/model/vocab"), spaced(part("/model/merges"))]
}

/// Merges as in `merges.txt`: older files have strings, newer ones pairs.
fn spaced(merges: Value) -> Value {
    let Value::Array(merges) = merges else { return merges };
    let spaced = |merge: Value| match merge.as_array().map(Vec::as_slice) {
        Some([Value::String(left), Value::String(right)]) => format!("{left} {right}").into(),
        _ => merge,
    };
    merges.into_iter().map(spaced).collect()
}

/// Names and contents of the files. Characters and the BPE of translations have no such files.
pub(super) fn files(tokenizer: &Tokenizer, model: &ModelSpec) -> Vec<(&'static str, Vec<u8>)> {
    match tokenizer {
        Tokenizer::Character(_) => return Vec::new(),
        #[cfg(feature = "tokenizers")]
        Tokenizer::Bpe(_) => return Vec::new(),
        #[cfg(feature = "tokenizers")]
        Tokenizer::Dictionary(dictionary) => return fsmt::files(dictionary),
        #[cfg(feature = "tokenizers")]
        Tokenizer::WordPiece(tokenizer) => {
            return wordpiece::files(tokenizer, model);
        }
        _ => {}
    }
    let (end, mask) = (end_of_text(Some(tokenizer)), mask_token(tokenizer, model));
    let specials = [end.map(|id| (END, id)), mask.map(|id| (MASK, id))];
    let specials = specials.into_iter().flatten();
    let ordinary = end.unwrap_or(tokenizer.vocabulary());
    let bytes = |id| tokenizer.decode(&[id]).expect("the id is below the vocabulary");
    let tokens: Vec<Vec<u8>> = (0..ordinary).map(bytes).collect();
    let characters = byte_characters();
    let spell = |bytes: &[u8]| bytes.iter().map(|&b| characters[b as usize]).collect::<String>();
    let ids = tokens.iter().zip(0_u32..);
    let mut vocabulary: Map<_, _> = ids.map(|(token, id)| (spell(token), id.into())).collect();
    vocabulary.extend(specials.clone().map(|(name, id)| (name.to_owned(), id.into())));
    let merges: Vec<[String; 2]> =
        merges(&tokens).into_iter().map(|pair| pair.map(spell)).collect();
    let added = specials.map(|(name, id)| {
        json!({ "id": id, "content": name, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true })
    });
    let byte_level = json!({
        "type": "ByteLevel",
        "add_prefix_space": false,
        "trim_offsets": true,
        "use_regex": end.is_some(),
    });
    let sentences = mask.filter(|_| model.prediction().is_some()).map(sentences);
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": Vec::from_iter(added),
        "pre_tokenizer": &byte_level,
        "post_processor": sentences.as_ref().unwrap_or(&byte_level),
        "decoder": &byte_level,
        "model": {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": merges,
        },
    });
    let mut config = json!({ "tokenizer_class": "PreTrainedTokenizerFast" });
    config["model_max_length"] = model.extents().longest.into();
    match (mask, end) {
        (Some(_), _) => {
            // Padding is hidden from attention, so any token serves.
            for key in ["mask_token", "cls_token", "sep_token", "pad_token"] {
                config[key] = MASK.into();
            }
            config["model_input_names"] = json!(["input_ids", "token_type_ids", "attention_mask"]);
        }
        (None, Some(_)) => {
            config["tokenizer_class"] = "GPT2Tokenizer".into();
            for key in ["bos_token", "eos_token", "unk_token"] {
                config[key] = END.into();
            }
        }
        (None, None) => {}
    }
    // A line each would double its size.
    let tokenizer = tokenizer.to_string().into_bytes();
    vec![("tokenizer.json", tokenizer), ("tokenizer_config.json", json::pretty(&config))]
}

/// The tokens of a sentence and of a pair for a fine-tuned BERT: `[MASK] first [MASK]`, then
/// `second [MASK]` in segment 1.
fn sentences(mask: u32) -> Value {
    let special = |segment: u32| json!({ "SpecialToken": { "id": MASK, "type_id": segment } });
    let text = |id: &str, segment: u32| json!({ "Sequence": { "id": id, "type_id": segment } });
    let single = [special(0), text("A", 0), special(0)];
    let second = [text("B", 1), special(1)];
    let pair: Vec<_> = single.iter().chain(&second).collect();
    json!({
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": { MASK: { "id": MASK, "ids": [mask], "tokens": [MASK] } },
    })
}

/// The two parts of each token of several bytes, in order. A token joins the parts into which the
/// tokens before it encode its bytes.
fn merges(tokens: &[Vec<u8>]) -> Vec<[&[u8]; 2]> {
    let ranks: HashMap<&[u8], usize> =
        tokens.iter().enumerate().map(|(rank, token)| (token.as_slice(), rank)).collect();
    let cut = |(rank, token): (usize, &Vec<u8>)| {
        let mut cuts: Vec<usize> = (0..=token.len()).collect();
        while cuts.len() > 3 {
            let joined = |at: usize| ranks.get(&token[cuts[at]..cuts[at + 2]]).copied();
            let pairs = (0..cuts.len() - 2).filter_map(|at| Some((joined(at)?, at)));
            let (_, at) = pairs.filter(|pair| pair.0 < rank).min()?;
            cuts.remove(at + 1);
        }
        Some(cuts[1])
    };
    let long = tokens.iter().enumerate().filter(|(_, token)| token.len() > 1);
    long.map(|token| token.1.split_at(cut(token).expect("two tokens before it join to it")).into())
        .collect()
}

/// The character of each byte: itself if it is printable, otherwise the next from U+0100 on.
fn byte_characters() -> [char; 256] {
    let mut next = '\u{100}'..;
    std::array::from_fn(|byte| match char::from(byte as u8) {
        printable @ ('!'..='~' | '¡'..='¬' | '®'..='ÿ') => printable,
        _ => next.next().expect("there are more characters"),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::interchange::tests::{BERT, GPT2};
    use sparse24_train::{
        model::{BertSpec, Gpt2Spec},
        nn::Prediction,
    };

    /// A GPT-2 with this vocabulary.
    fn spec(vocabulary: u32) -> ModelSpec {
        ModelSpec::Gpt2(Gpt2Spec { vocabulary: vocabulary as usize, ..GPT2 })
    }

    /// A BERT for bytes.
    fn bert(vocabulary: usize) -> ModelSpec {
        let ModelSpec::Bert(spec) = BERT else { unreachable!("it is one") };
        ModelSpec::Bert(BertSpec { vocabulary, ..spec })
    }

    /// Our files as their reader sees them.
    fn model(kind: TokenizerKind) -> (Tokenizer, Value) {
        let tokenizer = Tokenizer::for_text(kind, "ab").unwrap();
        let files = files(&tokenizer, &spec(tokenizer.vocabulary()));
        assert_eq!(files.len(), 2);
        let mut file = serde_json::from_slice::<Value>(&files[0].1).unwrap();
        (tokenizer, file["model"].take())
    }

    #[cfg(feature = "tokenizers")]
    #[test]
    fn merges_are_gpt2s() {
        let (tokenizer, model) = model(TokenizerKind::Gpt2);
        let (vocabulary, merges) = (&model["vocab"], model["merges"].as_array().unwrap());
        assert_eq!((vocabulary.as_object().unwrap().len(), merges.len()), (50_257, 50_000));
        // The first and the last lines of OpenAI's merges.txt.
        for (at, pair) in [(0, ["Ġ", "t"]), (1, ["Ġ", "a"]), (2, ["h", "e"]), (3, ["i", "n"])] {
            assert_eq!(merges[at], json!(pair));
        }
        assert_eq!(merges[49_999], json!(["Ġg", "azed"]));
        for (token, id) in [("!", 0), ("Ċ", 198), ("Ġ", 220), ("Ġthe", 262), (END, 50_256)] {
            assert_eq!(vocabulary[token], id, "{token}");
        }
        // Every merge makes the next token, and each of its parts is one.
        for (pair, id) in merges.iter().zip(256..) {
            let [left, right] = [0, 1].map(|side| pair[side].as_str().unwrap());
            assert!([left, right].iter().all(|part| vocabulary[*part].as_u64().unwrap() < id));
            assert_eq!(vocabulary[&format!("{left}{right}")], id);
        }
        assert_eq!(end_of_text(Some(&tokenizer)), Some(50_256));
    }

    #[test]
    fn a_folders_tokenizer_is_compared_with_ours() {
        let kinds = [
            TokenizerKind::Byte,
            #[cfg(feature = "tokenizers")]
            TokenizerKind::Gpt2,
        ];
        for kind in kinds {
            let (folder, tokenizer) =
                (tempfile::tempdir().unwrap(), Tokenizer::for_text(kind, "").unwrap());
            let vocabulary = tokenizer.vocabulary();
            let known = FolderTokenizer::Known(tokenizer);
            let found = || folder_tokenizer(folder.path(), &spec(vocabulary)).unwrap();
            let write = |name: &str, text: String| {
                std::fs::write(folder.path().join(name), text).unwrap();
            };
            assert_eq!(found(), FolderTokenizer::Absent);
            let ((_, model), mut file) = (model(kind), Value::Null);
            let merges = spaced(model["merges"].clone());
            let lines: Vec<_> =
                merges.as_array().unwrap().iter().filter_map(Value::as_str).collect();
            write("vocab.json", model["vocab"].to_string());
            write("merges.txt", format!("#version: 0.2\n{}\n", lines.join("\n")));
            assert_eq!(found(), known);
            let is_other = |reason: &str| {
                let found = found();
                assert!(
                    matches!(&found, FolderTokenizer::Other(at) if at.contains(reason)),
                    "{found:?}"
                );
            };
            write("merges.txt", "a b\n".to_owned());
            is_other("merges.txt");
            // The one file counts where both are.
            for merges in [&model["merges"], &merges] {
                let model = json!({ "vocab": model["vocab"], "merges": merges });
                let split = json!({ "type": "ByteLevel", "add_prefix_space": false });
                let end = (kind == TokenizerKind::Gpt2).then(|| json!({ "content": END }));
                let added = Vec::from_iter(end);
                file = json!({ "model": model, "pre_tokenizer": split, "added_tokens": added });
                write("tokenizer.json", file.to_string());
                assert_eq!(found(), known);
            }
            for (at, value, reason) in [
                (
                    "added_tokens",
                    json!([{ "id": 50_257, "content": "<|user|>" }]),
                    "token \"<|user",
                ),
                ("normalizer", json!({ "type": "Lowercase" }), "/normalizer is not"),
                ("pre_tokenizer", json!({ "type": "Whitespace" }), "/pre_tokenizer/type is not"),
                ("post_processor", json!({ "type": "Sequence" }), "/post_processor/type is not"),
            ] {
                let mut file = file.clone();
                file[at] = value;
                write("tokenizer.json", file.to_string());
                is_other(reason);
            }
            write("tokenizer.json", file.to_string());
            let config = "tokenizer_config.json";
            for (name, text, reason) in [
                (config, "[0]", "tokenizer_config.json: invalid type: sequence, expected a map"),
                (config, r#"{"add_prefix_space":true}"#, "sets add_prefix_space to true"),
                (config, r#"{"add_bos_token":true}"#, "sets add_bos_token to true"),
                (config, r#"{"pad_token":{"content":"[PAD]"}}"#, "added token \"[PAD]\" is not"),
                (config, r#"{"added_tokens_decoder":{"9":{"content":"+"}}}"#, "token \"+\" is"),
                ("added_tokens.json", r#"{"<|a|>":50257}"#, "added_tokens.json: the added token"),
                ("special_tokens_map.json", r#"{"eos_token":"</s>"}"#, "token \"</s>\" is not"),
            ] {
                write(name, text.to_owned());
                is_other(reason);
                write(name, "{}".to_owned());
            }
            assert_eq!(found(), known);
            let long = " ".repeat(LONGEST as usize) + &json!({ "model": model }).to_string();
            let unknown = r#"{"model":{"type":"BPE","vocab":{"a":0},"merges":[]}}"#;
            for (other, reason) in
                [(&*long, "/model/type"), ("{", "EOF"), ("7", "/model/type"), (unknown, "BPE")]
            {
                write("tokenizer.json", other.to_owned());
                is_other(reason);
            }
        }
    }

    #[test]
    fn bytes_merge_nothing_and_characters_have_no_files() {
        let (tokenizer, model) = model(TokenizerKind::Byte);
        assert_eq!(model["merges"], json!([]));
        assert_eq!((&model["vocab"]["a"], &model["vocab"]["Ā"]), (&json!(97), &json!(0)));
        assert_eq!(end_of_text(Some(&tokenizer)), None);
        let characters = Tokenizer::for_text(TokenizerKind::Character, "ab").unwrap();
        assert!(files(&characters, &spec(2)).is_empty());
    }

    /// The mask token is in the files, and a folder is compared with it.
    #[test]
    fn a_bert_has_one_more_token() {
        let read = |files: &[(&str, Vec<u8>)]| -> [Value; 2] {
            [0, 1].map(|at| serde_json::from_slice(&files[at].1).unwrap())
        };
        for (vocabulary, prediction, id) in
            [(257, None, 256), (300, None, 299), (300, Some(Prediction::Class(2)), 256)]
        {
            let model = bert(vocabulary).predicting(prediction);
            let [tokenizer, config] = read(&files(&Tokenizer::Byte, &model));
            assert_eq!(tokenizer["model"]["vocab"][MASK], id);
            assert_eq!(tokenizer["added_tokens"][0]["id"], id);
            assert_eq!(
                (&config["mask_token"], &config["tokenizer_class"]),
                (&json!(MASK), &json!("PreTrainedTokenizerFast"),)
            );
            let processor = &tokenizer["post_processor"];
            let expected = if prediction.is_some() { "TemplateProcessing" } else { "ByteLevel" };
            assert_eq!(processor["type"], expected);
            let ids = prediction.map_or(Value::Null, |_| json!([id]));
            assert_eq!(processor["special_tokens"][MASK]["ids"], ids);
        }
        let folder = tempfile::tempdir().unwrap();
        let [masked, plain] = [bert(257), spec(257)];
        let found = |model: &ModelSpec| folder_tokenizer(folder.path(), model).unwrap();
        for model in [&masked, &plain] {
            assert_eq!(found(model), FolderTokenizer::Absent);
        }
        let write =
            |name: &str, text: &[u8]| std::fs::write(folder.path().join(name), text).unwrap();
        write("tokenizer.json", &files(&Tokenizer::Byte, &masked)[0].1);
        assert_eq!(found(&masked), FolderTokenizer::Known(Tokenizer::Byte));
        for model in [&plain, &bert(258), &bert(256)] {
            assert!(matches!(found(model), FolderTokenizer::Other(_)));
        }
    }

    /// Read from either file, with more ids than pieces but not with fewer.
    #[cfg(feature = "tokenizers")]
    #[test]
    fn a_folder_may_have_words() {
        let tokenizer = Tokenizer::for_text(TokenizerKind::WordPiece, "a b a b").unwrap();
        let pieces = tokenizer.vocabulary();
        for name in ["tokenizer.json", "vocab.txt"] {
            let folder = tempfile::tempdir().unwrap();
            let found = |vocabulary: usize| folder_tokenizer(folder.path(), &bert(vocabulary));
            let write = |file: &str, text: &[u8]| {
                std::fs::write(folder.path().join(file), text).unwrap();
            };
            for (file, text) in files(&tokenizer, &bert(pieces as usize)) {
                if [name, "tokenizer_config.json"].contains(&file) {
                    write(file, &text);
                }
            }
            for room in [0, 100] {
                let known = FolderTokenizer::Known(tokenizer.clone());
                assert_eq!(found(pieces as usize + room).unwrap(), known, "{name}");
            }
            let message = crate::error::problem(found(pieces as usize - 1));
            assert!(message.contains(name) && message.contains("pieces, but the model only"));
            if name == "tokenizer.json" {
                let (_, text) = files(&tokenizer, &spec(pieces)).swap_remove(0);
                write(name, &text);
                let other = found(300).unwrap();
                assert!(matches!(&other, FolderTokenizer::Other(at) if at.contains("not BERT's")));
            }
            write(name, b"[PAD]");
            let damaged = found(300).unwrap();
            assert!(
                matches!(&damaged, FolderTokenizer::Other(at) if at.contains(name)),
                "{damaged:?}"
            );
        }
    }
}

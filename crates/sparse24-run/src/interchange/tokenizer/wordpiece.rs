//! The files of a WordPiece vocabulary.

use serde_json::{Map, Value, json};

use crate::{
    data::{Vocabulary, WordPiece},
    json,
};
use sparse24_train::model::ModelSpec;

/// Names and contents of the files. Only for a BERT, a text is between `[CLS]` and `[SEP]`.
pub(super) fn files(tokenizer: &WordPiece, model: &ModelSpec) -> Vec<(&'static str, Vec<u8>)> {
    let &Vocabulary { lowercase, strip_accents, split_ideographs, ref pieces } =
        tokenizer.vocabulary();
    let ids: Map<String, Value> =
        pieces.iter().zip(0_u32..).map(|(piece, id)| (piece.clone(), id.into())).collect();
    let special = tokenizer.special();
    let spelled = special.map(|id| &pieces[id as usize]);
    let added = special.iter().zip(spelled).map(|(id, content)| {
        json!({ "id": id, "content": content, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true })
    });
    let [padding, unknown, class, separator, mask] = spelled;
    let is_bert = matches!(model, ModelSpec::Bert(_));
    let mut file = json!({
        "version": "1.0",
        "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": true,
            "handle_chinese_chars": split_ideographs,
            "strip_accents": strip_accents,
            "lowercase": lowercase,
        },
        "pre_tokenizer": { "type": "BertPreTokenizer" },
        "post_processor": {
            "type": "BertProcessing",
            "sep": [separator, special[3]],
            "cls": [class, special[2]],
        },
        "decoder": { "type": "WordPiece", "prefix": "##", "cleanup": true },
        "model": {
            "type": "WordPiece",
            "unk_token": unknown,
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": ids,
        },
    });
    let mut config = json!({
        "tokenizer_class": "BertTokenizer",
        "model_max_length": model.extents().longest,
        "do_lower_case": lowercase,
        "strip_accents": strip_accents,
        "tokenize_chinese_chars": split_ideographs,
        "pad_token": padding,
        "unk_token": unknown,
        "cls_token": class,
        "sep_token": separator,
        "mask_token": mask,
    });
    if !is_bert {
        file["post_processor"] = Value::Null;
        config["tokenizer_class"] = "PreTrainedTokenizerFast".into();
        config["model_input_names"] = json!(["input_ids", "attention_mask"]);
    }
    vec![
        ("tokenizer.json", file.to_string().into_bytes()),
        ("vocab.txt", (pieces.join("\n") + "\n").into_bytes()),
        ("tokenizer_config.json", json::pretty(&config)),
    ]
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{
        data::{Tokenizer, TokenizerKind},
        interchange::tests::{BERT, GPT2},
    };

    /// The library that other programs use reads them, and gives the same ids.
    #[test]
    fn the_files_are_the_tokenizer_again() {
        let text = "The naïve (lower) LOWEST newest? 漢字";
        let ours = Tokenizer::for_text(TokenizerKind::WordPiece, &text.repeat(9)).unwrap();
        let Tokenizer::WordPiece(tokenizer) = &ours else { unreachable!("it is one") };
        let folder = tempfile::tempdir().unwrap();
        let write = |model: &ModelSpec| {
            for (name, content) in files(tokenizer, model) {
                fs::write(folder.path().join(name), content).unwrap();
            }
        };
        write(&BERT);
        for name in ["tokenizer.json", "vocab.txt"] {
            assert_eq!(Tokenizer::read(&folder.path().join(name)).unwrap(), ours, "{name}");
        }
        let read = || tokenizers::Tokenizer::from_file(folder.path().join("tokenizer.json"));
        let theirs = read().unwrap();
        assert_eq!(theirs.encode(text, false).unwrap().get_ids(), ours.encode(text).unwrap());
        let marked = theirs.encode("lower", true).unwrap();
        assert_eq!(marked.get_ids()[0], tokenizer.special()[2]);
        write(&ModelSpec::Gpt2(GPT2));
        let plain = read().unwrap().encode("lower", true).unwrap();
        assert_eq!(plain.get_ids(), ours.encode("lower").unwrap());
    }
}

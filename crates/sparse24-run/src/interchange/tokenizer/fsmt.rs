//! The vocabularies of an FSMT: fairseq's dictionary, once for each language. A piece that ends a
//! word has `</w>` behind it, any other one lacks the `@@` of the dictionary.
//!
//! `FSMTTokenizer` splits words by a third file, the `merges.txt` of the program that made the
//! pieces, which a dictionary does not hold.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::{data::Dictionary, json};

/// Vocabularies of source and target.
pub(super) const FILES: [&str; 2] = ["vocab-src.json", "vocab-tgt.json"];

/// The dictionary of one of the files.
pub(super) fn read(text: &[u8]) -> Result<Dictionary, String> {
    let ids: BTreeMap<String, u32> = json::parse(text, json::VALUES)?;
    let mut pieces: Vec<_> = ids.into_iter().map(|(piece, id)| (id, piece)).collect();
    pieces.sort_unstable();
    if !pieces.iter().map(|(id, _)| *id).eq(0..pieces.len() as u32) {
        return Err("expected each id from 0 on once".to_owned());
    }
    let special = Dictionary::SPECIAL;
    if !pieces.iter().take(special.len()).map(|(_, piece)| piece).eq(special) {
        return Err(format!("expected {} as the first pieces", special.join(", ")));
    }
    let spelled = pieces.into_iter().skip(special.len()).map(|(_, piece)| {
        piece.strip_suffix("</w>").map_or_else(|| format!("{piece}@@"), str::to_owned)
    });
    Dictionary::try_from(spelled.collect::<Vec<_>>())
}

/// Names and contents of the files.
pub(super) fn files(dictionary: &Dictionary) -> Vec<(&'static str, Vec<u8>)> {
    let special = Dictionary::SPECIAL.map(str::to_owned).into_iter();
    let pieces = dictionary.pieces().iter().map(|piece| {
        piece.strip_suffix("@@").map_or_else(|| format!("{piece}</w>"), str::to_owned)
    });
    let ids: Map<String, Value> =
        special.chain(pieces).zip(0_u32..).map(|(piece, id)| (piece, id.into())).collect();
    FILES.map(|name| (name, json::pretty(&ids))).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vocabulary_comes_back_or_is_refused() {
        let pieces = ["ein", "Hun@@", "d", "@@", "madeupword0000"].map(str::to_owned).to_vec();
        let dictionary = Dictionary::try_from(pieces).unwrap();
        for (_, text) in files(&dictionary) {
            assert_eq!(read(&text), Ok(dictionary.clone()));
        }
        let special = "\"<s>\":0,\"<pad>\":1,\"</s>\":2,\"<unk>\":3";
        for (text, expected) in [
            (format!("{{{special},\"a\":5}}"), "expected each id from 0 on once"),
            (format!("{{{special},\"a\":3}}"), "expected each id from 0 on once"),
            ("{\"<pad>\":0,\"<s>\":1}".to_owned(), "expected <s>, <pad>, </s>, <unk>"),
            (format!("{{{special},\"a b</w>\":4}}"), "is not a word"),
            (format!("{{{special},\"a@@</w>\":4,\"a\":5}}"), "have the same piece"),
            (format!("{{{special},\"a\":-1}}"), "invalid value"),
            (format!("[{special}"), "invalid type"),
            (String::new(), "EOF"),
        ] {
            let error = read(text.as_bytes()).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}

//! Files and ids of every kind, and hostile ones.

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
    assert_eq!(Tokenizer::Gpt2.encode("<|endoftext|>").unwrap(), [27, 91, 437, 1659, 5239, 91, 29]);
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
    assert!(message.contains("around byte 262144") && message.contains("white-space"), "{message}");
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
        if kind != TokenizerKind::WordPiece {
            assert_eq!(loaded.decode(&ids).unwrap(), TEXT.as_bytes());
        }
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
    #[cfg(feature = "tokenizers")]
    {
        let list: Vec<_> = (0..1_200_000).map(|piece| format!("\"{piece}\"")).collect();
        let list = list.join(",");
        let text =
            format!(r#"{{"sparse24_tokenizer":1,"kind":"dictionary","dictionary":[{list}]}}"#);
        fs::write(&path, text).unwrap();
        let (message, name) = (Tokenizer::read(&path).unwrap_err().to_string(), path.to_str());
        assert!(message.contains("too large to be written") && message.contains(name.unwrap()));
    }
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
}

//! Documents in every format, and damaged files.

use std::{io::Cursor, sync::Arc};

use super::*;
use crate::data::{TokenizerKind, encoding::encode};

#[cfg(feature = "parquet")]
use ::parquet::basic::{Compression, Encoding};

#[cfg(feature = "parquet")]
fn parquet(texts: &[Option<&str>]) -> Vec<u8> {
    parquet_in(texts, Encoding::PLAIN, Compression::SNAPPY)
}

#[cfg(feature = "parquet")]
fn parquet_in(texts: &[Option<&str>], encoding: Encoding, compression: Compression) -> Vec<u8> {
    use ::parquet::{
        data_type::{ByteArray, ByteArrayType},
        file::{properties::WriterProperties, writer::SerializedFileWriter},
        schema::parser::parse_message_type,
    };
    let schema = "message corpus { required group a { required int64 id; } \
                  optional binary text (UTF8); }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let properties = WriterProperties::builder()
        .set_compression(compression)
        .set_dictionary_enabled(false)
        .set_column_encoding("text".into(), encoding)
        .build();
    let mut bytes = Vec::new();
    let mut file = SerializedFileWriter::new(&mut bytes, schema, Arc::new(properties)).unwrap();
    for texts in texts.chunks(3) {
        let mut group = file.next_row_group().unwrap();
        let mut ids = group.next_column().unwrap().unwrap();
        let numbers: Vec<i64> = (0..texts.len() as i64).collect();
        ids.typed::<::parquet::data_type::Int64Type>().write_batch(&numbers, None, None).unwrap();
        ids.close().unwrap();
        let values: Vec<_> = texts.iter().flatten().map(|&text| ByteArray::from(text)).collect();
        let levels: Vec<_> = texts.iter().map(|text| i16::from(text.is_some())).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
    }
    file.close().unwrap();
    bytes
}

fn zst(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(Cursor::new(bytes), 1).unwrap()
}

fn lines(texts: &[Option<&str>]) -> Vec<u8> {
    let line = |text| format!("{}\n", serde_json::json!({ "id": [7, {}], "text": text }));
    texts.iter().map(line).collect::<String>().into_bytes()
}

/// The ids of a file of this name and content.
fn ids(
    name: &str,
    bytes: &[u8],
    separator: Option<&str>,
    kind: TokenizerKind,
) -> Result<Vec<u32>, Error> {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join(name), bytes).unwrap();
    let documents = Documents::open(folder.path(), separator, "text")?;
    let (mut ids, mut last) = (Vec::new(), 0);
    encode(&documents, &Tokenizer::for_text(kind, "")?, |more, read| {
        ids.extend_from_slice(more);
        assert!((last..=documents.bytes).contains(&read), "{read} after {last}");
        last = read;
        Ok(())
    })?;
    assert_eq!(last, documents.bytes);
    Ok(ids)
}

fn kinds() -> impl Iterator<Item = (TokenizerKind, Tokenizer)> {
    [TokenizerKind::Byte, TokenizerKind::Gpt2]
        .into_iter()
        .filter_map(|kind| Some((kind, Tokenizer::for_text(kind, "").ok()?)))
}

#[test]
fn documents_are_the_same_in_every_format() {
    // Long ones are cut, also within runs without white space.
    let long = "naïve don't 3.14  \n\t漢字 ".repeat(70_000);
    let unbroken = "QmFzZTY0+/8=".repeat(150_000);
    let texts = ["a", "", "two\nlines\n", &long, " b ", "<|endoftext|", &unbroken, "é"];
    let some = texts.map(Some);
    let with_null: Vec<_> = some.iter().copied().chain([None]).collect();
    for (kind, tokenizer) in kinds() {
        let mut expected = Vec::new();
        for text in texts.iter().filter(|text| !text.is_empty()) {
            expected.extend(tokenizer.encode(text).unwrap());
            match tokenizer.end_of_document() {
                Some(id) => expected.push(id),
                None => expected.push(u32::from(b'\n')),
            }
        }
        let text = texts.join("<|sep|>");
        let all = [lines(&some), b"\n \r\n".to_vec()].concat();
        let two = [zst(&lines(&some[..4])), zst(&lines(&some[4..]))].concat();
        for (name, bytes) in [
            ("a.txt", text.clone().into_bytes()),
            ("a.txt.zst", zst(text.as_bytes())),
            ("a.jsonl", all),
            ("a.JSONL.zst", two),
            ("a.ndjson", lines(&with_null)),
            #[cfg(feature = "parquet")]
            ("a.parquet", parquet(&with_null)),
        ] {
            let found = ids(name, &bytes, Some("<|sep|>"), kind).unwrap();
            assert!(found == expected, "{name}, {}", kind.name());
        }
        // Without a separator, a text is not divided.
        let found = ids("a.txt", text.as_bytes(), None, kind).unwrap();
        assert!(found == tokenizer.encode(&text).unwrap(), "{}", kind.name());
    }
}

#[test]
fn a_separator_on_its_own_line_takes_the_line_along() {
    for (text, expected) in [
        ("a\n--\nb\n", "a\n|b\n|"),
        ("--\na--\nb", "a|\nb|"),
        ("a\n----\n\nb--", "a\n|\nb|"),
        ("a - b\n-", "a - b\n-|"),
    ] {
        // Also where blocks end within the separator, or beside it.
        for shift in 0..6 {
            let head = "x".repeat(BLOCK - 6 + shift) + "\n--\n";
            let found =
                ids("a", (head + text).as_bytes(), Some("--"), TokenizerKind::Byte).unwrap();
            let found = found[BLOCK - 6 + shift + 2..].iter().map(|&id| id as u8).collect();
            let expected = expected.replace('|', "\n");
            assert_eq!(String::from_utf8(found).unwrap(), expected, "{text:?}, {shift}");
        }
    }
}

#[test]
fn damaged_files_are_refused_with_the_place() {
    let good = lines(&[Some("first"), Some("second")]);
    let cut = zst(&"some words that differ 1 2 3\n".repeat(9000).into_bytes());
    let window = [0x28, 0xb5, 0x2f, 0xfd, 0, 0xa8, 1, 0, 0];
    let long_line = {
        let text = io::repeat(b'a').take(LARGEST as u64);
        zstd::encode_all(br#"{"text":""#.chain(text), 1).unwrap()
    };
    let mut table = vec![
        ("a.jsonl", [&good[..], b"{\"text\": 3}"].concat(), "line 3: *expected a string"),
        ("b.jsonl", [&good[..], b"{\"tex\": \"\"}"].concat(), "line 3: *no field `text`*--field"),
        ("c.jsonl", [&good[..], b"{\"text\": \"\xff\"}"].concat(), "line 3: "),
        ("d.jsonl", good[..good.len() - 3].to_vec(), "line 2: EOF"),
        ("e.jsonl", b"[\"text\"]".to_vec(), "line 1: *expected an object"),
        ("f.jsonl", b"{\"text\": \"a\"} b".to_vec(), "line 1: trailing"),
        ("t.jsonl", br#"{"text": "a", "text": "b"}"#.to_vec(), "line 1: two fields `text`"),
        ("g.jsonl.zst", long_line, "line 1: is longer than 64 MiB"),
        ("h.jsonl.zst", zst(&good)[..20].to_vec(), "line 1: "),
        ("i.zst", cut[..cut.len() - 9].to_vec(), "cannot be decompressed"),
        ("j.zst", [&cut[..], b"more"].concat(), "cannot be decompressed"),
        ("k.zst", window.to_vec(), "cannot be decompressed: *memory"),
        ("l.zst", zst(b"ab\xffc"), "byte 0xff at offset 2"),
        ("m.txt", "é".repeat(BLOCK).into_bytes()[1..].to_vec(), "byte 0xa9 at offset 0"),
        ("n.txt", "é".repeat(BLOCK).into_bytes()[..2 * BLOCK - 1].to_vec(), "offset 131070"),
        ("o.bin", vec![0; 8], "is a token shard"),
    ];
    #[cfg(feature = "parquet")]
    {
        let good = parquet(&[Some("first"), Some("second")]);
        let large = "to be ".repeat(300_000);
        let mut lying = parquet(&[Some(&large)]);
        let size = 2 * (large.len() as u32 + 10);
        let is_page = |at: &usize| {
            let bytes = &lying[*at..*at + 7];
            let fold = |n: u32, byte: &u8| n << 7 | u32::from(byte & 0x7f);
            bytes.starts_with(&[0x15, 0, 0x15]) && bytes[3..].iter().rev().fold(0, fold) == size
        };
        let at = (0..1000).find(is_page).expect("the header of the page");
        lying.splice(at + 3..at + 7, [0xfe, 0xff, 0xff, 0xff, 0x0f]);
        table.extend([
            ("p.parquet", good[..good.len() - 1].to_vec(), "its end is missing"),
            ("q.parquet", [&good[9..]].concat(), "row 1: "),
            ("r.parquet", lying, "row 1: a page of 2147483647 bytes"),
            ("s.parquet", b"PAR1 and no more".to_vec(), "its end is missing"),
        ]);
    }
    let marked = [b"\xef\xbb\xbf", &good[..]].concat();
    let read = |bytes: &[u8]| ids("u.jsonl", bytes, None, TokenizerKind::Byte).unwrap();
    assert_eq!(read(&marked), read(&good));
    for (name, bytes, expected) in table {
        let message = ids(name, &bytes, None, TokenizerKind::Byte).unwrap_err().to_string();
        let mut rest = message.as_str();
        for part in [name].into_iter().chain(expected.split('*')) {
            let at = rest.find(part).unwrap_or_else(|| panic!("{name}, {expected}: {message}"));
            rest = &rest[at + part.len()..];
        }
    }
}

#[test]
fn empty_documents_take_no_memory() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("a.jsonl"), lines(&[Some(""); 1000])).unwrap();
    fs::write(folder.path().join("b.txt"), "--".repeat(1000)).unwrap();
    let documents = Documents::open(folder.path(), Some("--"), "text").unwrap();
    documents
        .read(&Tokenizer::Byte, &mut |batch| {
            assert!(batch.places.len() <= 1, "{} places of no text", batch.places.len());
            Ok(())
        })
        .unwrap();
}

#[cfg(feature = "tokenizers")]
#[test]
fn long_words_are_named_with_their_place() {
    let text = "a b\n".to_owned() + &"c".repeat(3 << 20) + " d";
    let message = |name: &str, bytes: &[u8]| {
        ids(name, bytes, Some("--"), TokenizerKind::Gpt2).unwrap_err().to_string()
    };
    let found = message("text", &["--\n", &text].concat().into_bytes());
    assert!(found.contains("text: the word at byte 6 is longer than 1 MiB"), "{found}");
    let found = message("a.jsonl", &lines(&[Some("x"), Some(&text)]));
    assert!(found.contains("a.jsonl: line 2: the word at byte "), "{found}");
    assert!(ids("text", text.as_bytes(), None, TokenizerKind::Byte).is_ok());
}

/// A delta encoding has one or two blocks of lengths: each in turn claims 2^31 - 1 of them.
#[cfg(feature = "parquet")]
#[test]
fn lengths_that_would_fill_the_memory_are_refused() {
    let texts = [Some("first"), None, Some("second"), Some("third")];
    for (encoding, blocks) in
        [(Encoding::DELTA_LENGTH_BYTE_ARRAY, 1), (Encoding::DELTA_BYTE_ARRAY, 2)]
    {
        let good = parquet_in(&texts, encoding, Compression::UNCOMPRESSED);
        let expected = ids("a.parquet", &parquet(&texts), None, TokenizerKind::Byte).unwrap();
        assert_eq!(ids("a.parquet", &good, None, TokenizerKind::Byte).unwrap(), expected);
        // Blocks of 128 numbers in 4 parts, and two numbers in the first row group.
        let starts = (0..good.len()).filter(|&at| good[at..].starts_with(&[0x80, 1, 4, 2]));
        let starts: Vec<_> = starts.collect();
        assert_eq!(starts.len(), blocks, "{encoding}");
        for at in starts {
            let mut bytes = good.clone();
            bytes[at + 3..at + 8].copy_from_slice(&[0xff, 0xff, 0xff, 0xff, 0x07]);
            let error = ids("a.parquet", &bytes, None, TokenizerKind::Byte).unwrap_err();
            let error = error.to_string();
            assert!(error.contains("row 1: a page of 2147483647 values"), "{error}");
        }
    }
}

#[cfg(feature = "parquet")]
#[test]
fn a_parquet_file_that_expands_without_end_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let text = "a".repeat(12 << 20);
    let level = Compression::ZSTD(::parquet::basic::ZstdLevel::default());
    let refused = |rows: usize| {
        let bytes = parquet_in(&vec![Some(&*text); rows], Encoding::PLAIN, level);
        assert!(bytes.len() < 1 << 14, "{} bytes", bytes.len());
        fs::write(folder.path().join("a.parquet"), bytes).unwrap();
        let documents = Documents::open(folder.path(), None, "text").unwrap();
        documents.read(&Tokenizer::Byte, &mut |_| Ok(())).err().map(|error| error.to_string())
    };
    assert_eq!(refused(9), None);
    let error = refused(18).unwrap();
    assert!(
        error.contains(".parquet: row 1") && error.contains("over 4096 times the size"),
        "{error}"
    );
}

/// Every byte changed in four ways: an error or tokens, but never a panic.
#[cfg(feature = "parquet")]
#[test]
fn no_damage_of_a_parquet_file_panics() {
    let good = parquet(&[Some("first"), None, Some("second"), Some("third")]);
    let mut refused = 0;
    for at in 0..good.len() {
        for change in [0x01, 0x80, 0xff, 0x10] {
            let mut bytes = good.clone();
            bytes[at] ^= change;
            refused += usize::from(ids("a.parquet", &bytes, None, TokenizerKind::Byte).is_err());
        }
    }
    assert!(refused > good.len(), "{refused} of {}", 4 * good.len());
}

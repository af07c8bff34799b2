//! Files made by hand, most of them hostile.

use std::{fs, io::Cursor};

use super::super::{Documents, Tokenizer};
use crate::{Error, Result};

/// A schema with the column `text`, as a member of a footer.
const SCHEMA: &[u8] = b"\x19\x2c\x48\x01m\x15\x02\0\x15\x0c\x25\0\x18\x04text\0";
/// The same without its head and root.
const COLUMN: &[u8] = SCHEMA.split_at(8).1;

const ONE: &[u8] = b"\x05\0\0\0hello";

/// A length in Thrift's compact protocol, seven bits to a byte.
fn length(mut number: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    while number > 0x7f {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
    bytes
}

/// A number in the same protocol.
fn number(number: usize) -> Vec<u8> {
    length(2 * number)
}

/// A page with so many values that claims `size` bytes, and has more members in its header. Its
/// kind is 0 for data and 2 for a dictionary.
fn page(
    [kind, encoding]: [u8; 2],
    data: &[u8],
    size: usize,
    values: usize,
    more: &[u8],
) -> Vec<u8> {
    let (own, levels) = if kind == 0 { (0x2c, &b"\x15\x06\x15\x06"[..]) } else { (0x4c, &[][..]) };
    [
        &[0x15, 2 * kind, 0x15][..],
        &number(size),
        &[0x15],
        &number(data.len()),
        &[own, 0x15],
        &number(values),
        &[0x15, 2 * encoding],
        levels,
        &[0],
        more,
        &[0],
        data,
    ]
    .concat()
}

/// A file whose row groups have the same pages.
fn file(schema: &[u8], codec: u8, pages: &[u8], groups: usize, rows: usize) -> Vec<u8> {
    let group = [
        &b"\x19\x1c\x26\x08\x1c\x15\x0c\x19\x15\0\x19\x18\x04text\x15"[..],
        &[2 * codec, 0x16, 2, 0x16, 2, 0x16],
        &number(pages.len())[..],
        b"\x26\x08\0\0\x16\0\x16\x02\0",
    ];
    let groups = [&[0x19, 0xfc], &length(groups)[..], &group.concat().repeat(groups)].concat();
    let footer = [b"\x15\x02", schema, &[0x16], &number(rows), &groups, &[0]].concat();
    [b"PAR1", pages, &footer, &(footer.len() as u32).to_le_bytes(), b"PAR1"].concat()
}

/// A file of one row.
fn one(schema: &[u8], page: &[u8]) -> Vec<u8> {
    file(schema, 0, page, 1, 1)
}

/// The text of a file, without what exceeds a megabyte.
fn read(bytes: &[u8]) -> Result<String> {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("a.parquet"), bytes).unwrap();
    let mut text = String::new();
    Documents::open(folder.path(), None, "text")?.read(&Tokenizer::Byte, &mut |batch| {
        text.push_str(if text.len() < 1 << 20 { &batch.text } else { "" });
        Ok(())
    })?;
    Ok(text)
}

fn zst(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(Cursor::new(bytes), 1).unwrap()
}

/// 64 MiB of zeros in each of 100 row groups.
fn zeros() -> Vec<u8> {
    let size = 64 << 20;
    file(SCHEMA, 6, &page([0, 0], &zst(&vec![0; size]), size, 1, &[]), 100, 100)
}

#[test]
fn hostile_files_are_refused() {
    let good = page([0, 0], ONE, 9, 1, &[]);
    let nested = |kind, groups: usize| {
        let open = b"\x48\x01g\x15\x02\0".repeat(groups);
        one(&[&[kind, 0xfc], &length(groups + 1)[..], &open, COLUMN].concat(), &good)
    };
    let childless = [b"\x19\x2c\x48\x01m\x15", &number(i32::MAX as usize)[..], &[0], COLUMN];
    let with = |more: &[&[u8]]| one(SCHEMA, &page([0, 0], ONE, 9, 1, &more.concat()));
    let dictionary = |bytes: &[u8], size, count| page([2, 0], bytes, size, count, &[]);
    let most = super::ENTRIES;
    let empty = zst(&vec![0; 4 * most + 4]);
    let long = [&6000_u32.to_le_bytes()[..], &[b'a'; 6000]].concat();
    let indices = [&[1], &length(30_000 << 1)[..], &[0]].concat();
    let shared =
        [dictionary(&long, 6004, 1), page([0, 8], &indices, indices.len(), 30_000, &[])].concat();
    for (bytes, expected) in [
        (nested(0x19, 5000), "footer is damaged"),
        (nested(0x1a, 5000), "footer is damaged"),
        (one(&childless.concat(), &good), "footer is damaged"),
        (with(&[&[5, 4], &number(i32::MAX as usize)]), "row 1: a page of 2147483647 bytes"),
        (with(&[&[0xf9, 0xf2], &length(i32::MAX as usize)]), "row 1: a damaged page header"),
        (one(SCHEMA, &dictionary(ONE, 9, 3)), "row 1: a dictionary of 3 texts in 9 bytes"),
        (file(SCHEMA, 6, &dictionary(&empty, 4 * most, most), 1, 1), "row 1: a page without"),
        (file(SCHEMA, 6, &dictionary(&empty, 4 * most + 4, most + 1), 1, 1), "texts in 16777220"),
        (one(SCHEMA, &page([0, 8], &indices, indices.len(), 1, &[])), "row 1: damaged data"),
        (file(SCHEMA, 2, &good, 1, 1), "is compressed with gzip"),
        (file(SCHEMA, 0, &shared, 1, 30_000), "4096 times as much text"),
        (zeros(), "row 3: pages of over 4096 times the size"),
    ] {
        let error = read(&bytes).unwrap_err().to_string();
        assert!(error.contains(expected), "{expected}: {error}");
    }
    for (bytes, expected) in [
        (file(SCHEMA, 0, &good, 3, 3), "hello\nhello\nhello\n"),
        (with(&[b"\xf9\x41ABCD\x1a\x11D"]), "hello\n"),
    ] {
        assert_eq!(read(&bytes).unwrap(), expected);
    }
}

#[test]
fn a_file_without_text_can_be_interrupted() {
    let folder = tempfile::tempdir().unwrap();
    // Each ends with an error.
    for (name, bytes) in [
        ("a.parquet", zeros()),
        ("a.jsonl", [&[b'\n'; 200_000][..], b"{"].concat()),
        ("a.txt", [&[b'-'; 200_000][..], b"\xff"].concat()),
    ] {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        let documents = Documents::open(&path, Some("-"), "text").unwrap();
        let error = documents.read(&Tokenizer::Byte, &mut |_| Err(Error::Interrupted)).unwrap_err();
        assert!(matches!(error, Error::Interrupted), "{error}");
    }
}

//! Safetensors files as `sparse24 prune` and `sparse24 verify` read them, and attacks that every
//! reader of such files gets.
//!
//! A pruned file verifies, and differs from its input by zeros alone.

use std::iter::repeat_n;

use serde_json::{Map, Value, json};
use sparse24_core::MaskKind;
use sparse24_run::pruning::{Embeddings, Search, Selection, Unprunable, Verdict, prune, verify};

use super::{Files, document::Document, file as write, path, read, refused};

pub(super) fn pruned(bytes: &[u8]) -> bool {
    let (input, output) = (write("weights.safetensors", bytes), path("pruned.safetensors"));
    let silent = &mut |_, _| Ok(());
    let mut pruned_any = false;
    for kind in MaskKind::ALL {
        let include = &|name: &str| !name.contains("excluded");
        let selection = Selection { kind, include, embeddings: Embeddings::Skip };
        let found = verify(&input, selection, silent);
        let (search, unprunable) = (Search::Exact, Unprunable::Copy);
        let pruned = prune(&input, &output, selection, search, unprunable, silent);
        let pruned = match (found, pruned) {
            (Ok(_), Ok(pruned)) => pruned,
            (Err(error), Err(other)) => {
                refused(&error, "weights.safetensors");
                assert_eq!(error.to_string(), other.to_string());
                continue;
            }
            (found, other) => panic!("verify returned {found:?}, prune {other:?}"),
        };
        let reports = verify(&output, selection, silent).unwrap();
        assert_eq!(reports.len(), pruned.len());
        for report in reports {
            assert!(report.outcome.map_or(true, |verdict| verdict == Verdict::Holds));
        }
        let after = read(&output);
        let mut pairs = bytes.iter().zip(&after);
        assert!(after.len() == bytes.len() && pairs.all(|(old, new)| old == new || *new == 0));
        pruned_any = true;
    }
    let (kind, embeddings) = (MaskKind::Transposable, Embeddings::Include);
    let strict = Selection { kind, include: &|_| true, embeddings };
    match prune(&input, &output, strict, Search::Greedy, Unprunable::Refuse, silent) {
        Ok(reports) => assert!(!reports.is_empty()),
        Err(error) => _ = refused(&error, "weights.safetensors"),
    }
    pruned_any
}

/// A file with this header and data.
pub fn file(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// The header and the data of a sound file.
pub(super) fn split(file: &[u8]) -> (&str, &[u8]) {
    let (length, rest) = file.split_first_chunk().expect("a length");
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    (str::from_utf8(header).expect("JSON"), data)
}

/// Headers that no reader may trust, whatever it looks for, each over 64 bytes of data; with facts
/// that an error names, separated by `*`, if any reader of tensors refuses them.
#[must_use]
pub fn headers() -> Vec<(String, &'static str)> {
    let entry = |name: &str, shape: &str, from: &str, to: &str| {
        let offsets = format!("\"data_offsets\":[{from},{to}]");
        format!(r#""{name}":{{"dtype":"F32","shape":{shape},{offsets}}}"#)
    };
    let one = |shape: &str, from: &str, to: &str| format!("{{{}}}", entry("w", shape, from, to));
    let two = |name: &str, from: &str, to: &str| {
        let [first, second] = [entry("w", "[4,2]", "0", "32"), entry(name, "[4,2]", from, to)];
        format!("{{{first},{second}}}")
    };
    let long = "n".repeat(5000);
    vec![
        (one("[4,4]", "0", "64").replace("data_", ""), "tensor `w`*missing field `data_offsets`"),
        (one("[4,4]", "64", "0"), "tensor `w` starts at offset"),
        (one("[4,4]", "8", "72"), "tensor `w` starts at offset"),
        (one("[4,4]", "18446744073709551552", "18446744073709551615"), "tensor `w` starts"),
        (one("[4,4]", "0", "18446744073709551615"), "`w`*[4, 4]*64"),
        (one("[4,4]", "0", "18446744073709551616"), "`w`"),
        (one("[4,8]", "0", "128"), "tensor `w` ends at offset"),
        (one("[4,3]", "0", "48"), "tensors end at offset 48, the data at 64"),
        (one("[4,5]", "0", "64").replace("\"w\"", &format!("\"{long}\"")), "5000*4096"),
        (one("[4,5]", "0", "64"), "tensor `w` F32 [4, 5] takes 80 bytes"),
        (one("[4294967296,4294967296,4]", "0", "64"), "tensor `w` cannot have the shape"),
        (one("[9223372036854775808,4]", "0", "64"), "`w`*9223372036854775808"),
        (one("[18446744073709551615,0]", "0", "0"), ""),
        (one(&format!("[{}1]", "1,".repeat(100)), "0", "4"), ""),
        (one(&format!("[{}1]", "1,".repeat(3000)), "0", "4"), "tensor `w`: an entry of"),
        (two("b", "16", "48"), "tensor `b` starts at offset"),
        (two("b", "32", "64"), ""),
        (two("b", "40", "72"), "tensor `b` starts at offset"),
        (two("w", "32", "64"), "names the tensor `w` twice"),
        ("{\"__metadata__\":7,\"__metadata__\":{\"a\":[]}}".to_owned(), ""),
        ("{\"__metadata__\":{\"a\":1}}".to_owned(), "`__metadata__` expects strings*integer `1`"),
        (r#"{"w":["F32",[4,4],[0,64]]}"#.to_owned(), "`w`"),
        (r#"{"\u001b[2J":0}"#.to_owned(), "\\u{1b}[2J*control characters"),
        (r#"{"w":{"dtype":"F32","dtype":"F16"}}"#.to_owned(), "`w`*`dtype`"),
    ]
}

/// Files that no reader may trust.
pub(super) fn attacks() -> Files {
    let sound = r#"{"w":{"dtype":"F32","shape":[4,4],"data_offsets":[0,64]}}"#;
    let length = sound.len() as u64;
    let mut seeds = vec![Vec::new(), vec![0; 7], vec![0; 8], vec![0xff; 64]];
    for length in [0, 1, length - 1, length + 1, 1 << 24, 1 << 63, u64::MAX, u64::MAX - 7] {
        let mut bytes = file(sound, &[0; 64]);
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        seeds.push(bytes);
    }
    seeds.extend(headers().iter().map(|(header, _)| file(header, &[0; 64])));
    let mut invalid = file(sound, &[0; 64]);
    invalid[10] = 0xff;
    seeds.push(invalid);
    seeds
}

/// All types of the format, with their bits per element.
#[rustfmt::skip]
const DTYPES: [(&str, usize); 22] = [
    ("BOOL", 8), ("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6), ("U8", 8), ("I8", 8), ("F8_E5M2", 8),
    ("F8_E4M3", 8), ("F8_E8M0", 8), ("F8_E4M3FNUZ", 8), ("F8_E5M2FNUZ", 8), ("I16", 16),
    ("U16", 16), ("F16", 16), ("BF16", 16), ("I32", 32), ("U32", 32), ("F32", 32), ("C64", 64),
    ("F64", 64), ("I64", 64), ("U64", 64),
];

/// A tensor: its name, its type with its bits, and its shape.
pub type Entry = (String, (&'static str, usize), Vec<usize>);

/// A sound file with one change each: in its header's text, or in what the file holds (tensors,
/// types, shapes, order; values that are zero, negative, infinite, NaN).
pub(super) fn variants(sound: &[u8]) -> Files {
    let (header, data) = split(sound);
    let document = Document::json(header, &DTYPES.map(|(name, _)| name));
    let mut files = document.variants(|header| file(&header, data));
    let entries = entries(header);
    let mut lists = vec![entries.clone(), vec![], entries.iter().rev().cloned().collect()];
    for (at, (name, _, shape)) in entries.iter().enumerate() {
        let mut change = |change: &dyn Fn(&mut Vec<Entry>)| {
            lists.push(entries.clone());
            change(lists.last_mut().expect("just pushed"));
        };
        change(&|entries| drop(entries.remove(at)));
        change(&|entries| entries[at].0.push('x'));
        change(&|entries| entries.push((format!("{name}x"), entries[at].1, shape.clone())));
        DTYPES.iter().for_each(|&dtype| change(&|entries| entries[at].1 = dtype));
        let elements = shape.iter().product();
        let (flat, row, column) = (vec![elements], vec![1, elements], vec![elements, 1]);
        let deeper = [&shape[..], &[1]].concat();
        for shape in [vec![], vec![0], vec![0, 4], vec![4, 0], flat, row, column, deeper] {
            change(&|entries| entries[at].2.clone_from(&shape));
        }
    }
    for dtype in DTYPES {
        let retyped = entries.iter().map(|(name, _, shape)| (name.clone(), dtype, shape.clone()));
        lists.push(retyped.collect());
    }
    const FILLS: [u32; 7] =
        [0x3f80_3c00, 0, 0x8000_8000, 0x7c00_7c00, 0x7f80_7f80, 0xff80_0000, u32::MAX];
    files.extend(lists.iter().flat_map(|list| FILLS.map(|fill| holding(list, fill))));
    files
}

/// The tensors of a sound header.
fn entries(header: &str) -> Vec<Entry> {
    let header: Map<String, Value> = serde_json::from_str(header).expect("a sound header");
    let entry = |(name, entry): (&String, &Value)| {
        let (dtype, shape) = (entry["dtype"].as_str()?, entry["shape"].as_array()?);
        let &dtype = DTYPES.iter().find(|(known, _)| *known == dtype)?;
        let shape = shape.iter().filter_map(Value::as_u64).map(|length| length as usize).collect();
        Some((name.clone(), dtype, shape))
    };
    header.iter().filter_map(entry).collect()
}

/// A file of these tensors, filled with one 32-bit word.
pub fn holding(entries: &[Entry], fill: u32) -> Vec<u8> {
    let (mut header, mut end) = (Map::new(), 0);
    for (name, (dtype, bits), shape) in entries {
        let begin = end;
        end += (shape.iter().product::<usize>() * bits).div_ceil(8);
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]});
        header.insert(name.clone(), entry);
    }
    let data: Vec<u8> = repeat_n(fill.to_le_bytes(), end.div_ceil(4)).flatten().take(end).collect();
    file(&Value::from(header).to_string(), &data)
}

pub(super) fn prune_variants() -> Files {
    let sound = &prune_seeds()[0];
    let (header, data) = split(sound);
    variants(&file(&header.replacen('{', r#"{"__metadata__":{"format":"pt"},"#, 1), data))
}

pub(super) fn prune_seeds() -> Files {
    let embedding = ("wte.weight".to_owned(), ("U8", 8), vec![3, 4]);
    let with = |dtype| [("w".to_owned(), dtype, vec![8, 4]), embedding.clone()];
    let floats = [("F32", 32), ("F16", 16), ("BF16", 16), ("F64", 64)];
    let mut seeds = floats.map(|dtype| holding(&with(dtype), 0x3fc0_3c00)).to_vec();
    seeds.extend(attacks());
    let mut special = seeds[0].clone();
    let data = special.len() - 140;
    special[data..data + 12].copy_from_slice(&[0, 0, 0xc0, 0x7f, 0, 0, 0x80, 0xff, 0, 0, 0, 0x80]);
    seeds.push(special);
    seeds
}

//! Safetensors files as `sparse24 prune` and `sparse24 verify` read them, and the attacks that
//! every reader of such files gets.
//!
//! Invariant: what was pruned verifies, and differs from what it was by zeros alone.

use std::fs;

use serde_json::{Map, Value, json};
use sparse24_core::MaskKind;
use sparse24_run::pruning::{Search, Selection, Unprunable, Verdict, prune_file, verify_file};

use super::{place, refused, values};

pub(super) fn prune(bytes: &[u8]) {
    let input = place::file("weights.safetensors", bytes);
    let output = place::path("pruned.safetensors");
    for kind in [MaskKind::Transposable, MaskKind::RowWise, MaskKind::ColumnWise] {
        let selection = Selection { kind, include: &|name| !name.contains("excluded") };
        let pruned = match (
            verify_file(&input, selection),
            prune_file(&input, &output, selection, Search::Exact, Unprunable::Copy),
        ) {
            (Ok(_), Ok(pruned)) => pruned,
            (Err(error), Err(other)) => {
                refused(&error, "weights.safetensors");
                assert_eq!(error.to_string(), other.to_string());
                continue;
            }
            (found, other) => panic!("verify finds {found:?}, prune {other:?}"),
        };
        let proved = verify_file(&output, selection).unwrap();
        assert!(
            proved.iter().all(|report| report
                .outcome
                .as_ref()
                .is_ok_and(|verdict| *verdict == Verdict::Holds)
                || report.outcome.is_err())
        );
        let names = |reports: &[_]| reports.len();
        assert_eq!(names(&proved), pruned.len());
        let after = fs::read(&output).unwrap();
        assert!(
            after.len() == bytes.len()
                && bytes.iter().zip(&after).all(|(before, after)| before == after || *after == 0)
        );
    }
    match prune_file(
        &input,
        &output,
        Selection { kind: MaskKind::Transposable, include: &|_| true },
        Search::Greedy,
        Unprunable::Refuse,
    ) {
        Ok(reports) => assert!(!reports.is_empty()),
        Err(error) => refused(&error, "weights.safetensors"),
    }
}

/// Finite numbers in 16, 32 and 64 bits.
pub(super) const FINITE: u32 = 0x3fc0_3c00;

/// A file with this header and so many bytes of data.
pub(super) fn file(header: &str, data: usize) -> Vec<u8> {
    let data = FINITE.to_le_bytes().into_iter().cycle().take(data);
    (header.len() as u64).to_le_bytes().into_iter().chain(header.bytes()).chain(data).collect()
}

/// Files that no reader may trust, whatever it looks for.
pub(super) fn attacks() -> Vec<Vec<u8>> {
    let one = |entry: &str| format!("{{\"w\":{entry}}}");
    let sound = one(r#"{"dtype":"F32","shape":[4,4],"data_offsets":[0,64]}"#);
    let mut seeds = vec![Vec::new(), vec![0; 7], vec![0; 8], vec![0xff; 8], vec![0xff; 64]];
    for length in [
        0,
        1,
        sound.len() as u64 - 1,
        sound.len() as u64 + 1,
        100_000_000,
        1 << 24,
        1 << 63,
        u64::MAX,
        u64::MAX - 7,
    ] {
        let mut bytes = file(&sound, 64);
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        seeds.push(bytes);
    }
    let headers = [
        "{}",
        "{",
        "[]",
        "null",
        "{\"w\":null}",
        "{\"__metadata__\":{\"format\":\"pt\"}}",
        "{\"__metadata__\":7,\"__metadata__\":{\"a\":[]}}",
        &one(r#"{"dtype":"F32","shape":[4,4],"data_offsets":[0,64],"extra":0}"#),
        &one(r#"{"dtype":"F32","dtype":"F32","shape":[4,4],"data_offsets":[0,64]}"#),
        &one(r#"["F32",[4,4],[0,64]]"#),
        &one(r#"{"dtype":"F33","shape":[4,4],"data_offsets":[0,64]}"#),
        &one(r#"{"dtype":"F32","shape":[4,-4],"data_offsets":[0,64]}"#),
        &one(r#"{"dtype":"F32","shape":[4,4.0],"data_offsets":[0,64]}"#),
        &one(r#"{"dtype":"F32","shape":[4,4],"data_offsets":[0,64,64]}"#),
        &one(r#"{"dtype":"F32","shape":[4,4],"data_offsets":[64,0]}"#),
        &one(r#"{"dtype":"F32","shape":[4,4],"data_offsets":[8,72]}"#),
        &one(
            r#"{"dtype":"F32","shape":[4,4],"data_offsets":[18446744073709551552,18446744073709551615]}"#,
        ),
        &one(r#"{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,64]}"#),
        &one(r#"{"dtype":"F32","shape":[18446744073709551615,0],"data_offsets":[0,0]}"#),
        &one(r#"{"dtype":"F4","shape":[1],"data_offsets":[0,1]}"#),
        &one(r#"{"dtype":"F6_E2M3","shape":[4,4],"data_offsets":[0,12]}"#),
        &one(r#"{"dtype":"C64","shape":[4,2],"data_offsets":[0,64]}"#),
        &one(r#"{"dtype":"F32","shape":[],"data_offsets":[0,4]}"#),
        r#"{"a":{"dtype":"F32","shape":[4,2],"data_offsets":[0,32]},"b":{"dtype":"F32","shape":[4,2],"data_offsets":[16,48]}}"#,
        r#"{"a":{"dtype":"F32","shape":[4,1],"data_offsets":[0,16]},"b":{"dtype":"F32","shape":[4,2],"data_offsets":[32,64]}}"#,
        r#"{"a":{"dtype":"F32","shape":[4,2],"data_offsets":[0,32]},"a":{"dtype":"F32","shape":[4,2],"data_offsets":[32,64]}}"#,
        r#"{"\u001b[2J\n":{"dtype":"F32","shape":[3],"data_offsets":[0,64]}}"#,
    ];
    seeds.extend(headers.map(|header| file(header, 64)));
    seeds.push(file(&one(&"[".repeat(3000)), 0));
    seeds.push(file(
        &one(&format!(r#"{{"dtype":"F32","shape":[{}1],"data_offsets":[0,4]}}"#, "1,".repeat(100))),
        4,
    ));
    seeds.push(file(
        &sound.replace("\"w\"", &format!("\"{}\"", "n".repeat(5000))).replace("[4,4]", "[4,5]"),
        64,
    ));
    let mut invalid = file(&sound, 64);
    invalid[10] = 0xff;
    seeds.push(invalid);
    seeds
}

/// The types that such files know, and their bits.
const DTYPES: [(&str, usize); 22] = [
    ("BOOL", 8),
    ("F4", 4),
    ("F6_E2M3", 6),
    ("F6_E3M2", 6),
    ("U8", 8),
    ("I8", 8),
    ("F8_E5M2", 8),
    ("F8_E4M3", 8),
    ("F8_E8M0", 8),
    ("F8_E4M3FNUZ", 8),
    ("F8_E5M2FNUZ", 8),
    ("I16", 16),
    ("U16", 16),
    ("F16", 16),
    ("BF16", 16),
    ("I32", 32),
    ("U32", 32),
    ("F32", 32),
    ("C64", 64),
    ("F64", 64),
    ("I64", 64),
    ("U64", 64),
];

/// A tensor of a file: its name, its type with its bits, and its shape.
type Entry = (String, (&'static str, usize), Vec<usize>);

/// The variants of a file: of its header, each before the file's data, and whole files that say
/// what they hold.
pub(super) fn variants(sound: &[u8]) -> Vec<Vec<u8>> {
    let (length, rest) = sound.split_first_chunk().expect("a length");
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header = str::from_utf8(header).expect("JSON");
    let headers = values::files(values::json(header, &DTYPES.map(|(name, _)| name)));
    let mut files: Vec<_> = headers
        .iter()
        .map(|header| [&(header.len() as u64).to_le_bytes(), &header[..], data].concat())
        .collect();
    let entries = entries(header);
    let mut whole = |entries: &[Entry]| {
        files.extend(
            [0x3f80_3c00, 0, 1, 0x8000_8000, 0x7c00_7c00, 0x7f80_7f80, 0xff80_0000, u32::MAX]
                .map(|fill| holding(entries, fill)),
        );
    };
    whole(&[]);
    whole(&entries);
    whole(&entries.iter().rev().cloned().collect::<Vec<_>>());
    for at in 0..entries.len() {
        let (before, after) = (&entries[..at], &entries[at + 1..]);
        let (name, dtype, shape) = entries[at].clone();
        let elements = shape.iter().product();
        whole(&[before, after].concat());
        whole(&[before, &[(name.clone() + "x", dtype, shape.clone())], after].concat());
        whole(&[&entries[..], &[(name.clone() + "x", dtype, shape.clone())]].concat());
        for other in DTYPES.into_iter().filter(|&other| other != dtype) {
            whole(&[before, &[(name.clone(), other, shape.clone())], after].concat());
        }
        for other in [
            vec![],
            vec![0],
            vec![0, 4],
            vec![4, 0],
            vec![elements],
            vec![1, elements],
            vec![elements, 1],
            [&shape[..], &[1]].concat(),
        ] {
            whole(&[before, &[(name.clone(), dtype, other)], after].concat());
        }
    }
    for other in DTYPES.into_iter().filter(|_| entries.len() > 1) {
        whole(
            &entries
                .iter()
                .map(|(name, _, shape)| (name.clone(), other, shape.clone()))
                .collect::<Vec<_>>(),
        );
    }
    files
}

/// What a header says.
fn entries(header: &str) -> Vec<Entry> {
    let said: Map<String, Value> = serde_json::from_str(header).expect("a sound header");
    let of = |(name, entry): (&String, &Value)| {
        let (dtype, shape) = (entry["dtype"].as_str()?, entry["shape"].as_array()?);
        let &dtype = DTYPES.iter().find(|(known, _)| *known == dtype)?;
        Some((
            name.clone(),
            dtype,
            shape.iter().filter_map(Value::as_u64).map(|length| length as usize).collect(),
        ))
    };
    said.iter().filter_map(of).collect()
}

/// A file of these tensors, one behind the other, filled with a word.
pub(super) fn holding(entries: &[Entry], fill: u32) -> Vec<u8> {
    let (mut header, mut end) = (Map::new(), 0);
    for (name, (dtype, bits), shape) in entries {
        let begin = end;
        end += (shape.iter().product::<usize>() * bits).div_ceil(8);
        header.insert(
            name.clone(),
            json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}),
        );
    }
    let mut bytes = file(&Value::from(header).to_string(), 0);
    bytes.extend(fill.to_le_bytes().iter().cycle().take(end));
    bytes
}

pub(super) fn prune_variants() -> Vec<Vec<u8>> {
    let header = r#"{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[8,4],"data_offsets":[0,128]},"wte.weight":{"dtype":"U8","shape":[3,4],"data_offsets":[128,140]}}"#;
    variants(&file(header, 140))
}

pub(super) fn prune_seeds() -> Vec<Vec<u8>> {
    let mut seeds = attacks();
    for dtype in [("F16", 16), ("BF16", 16), ("F32", 32), ("F64", 64)] {
        seeds.push(holding(
            &[
                ("w".to_owned(), dtype, vec![8, 4]),
                ("wte.weight".to_owned(), ("U8", 8), vec![3, 4]),
            ],
            FINITE,
        ));
    }
    let mut special = file(r#"{"w":{"dtype":"F32","shape":[4,4],"data_offsets":[0,64]}}"#, 64);
    let data = special.len() - 64;
    special[data..data + 12].copy_from_slice(&[0, 0, 0xc0, 0x7f, 0, 0, 0x80, 0xff, 0, 0, 0, 0x80]);
    seeds.push(special);
    seeds
}

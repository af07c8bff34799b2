//! A checkpoint of which one file is from outside, under a manifest whose hashes are right: what
//! hides behind a checksum is no more to be trusted than what has none.
//!
//! Invariant: what loads can be saved, and loads again as it was. The manifest is written here as
//! `docs/checkpoint-format.md` says, and not by the code under test.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use sparse24_core::Mask;
use sparse24_run::checkpoint::{
    Checkpoint, DatasetIdentity, Fingerprint, NamedTensor, PhaseEnd, PhaseKind, State, Values,
    load, save, verify,
};

use super::{place, refused, tensors, values};

const MANIFEST: &str = "manifest.json";

pub(super) fn manifest(bytes: &[u8]) {
    let folder = saved(MANIFEST);
    fs::write(folder.join(MANIFEST), bytes).unwrap();
    opened(&folder, MANIFEST);
    fs::write(folder.join(MANIFEST), sealed(bytes)).unwrap();
    if let Some(loaded) = opened(&folder, "-00000007") {
        assert_eq!(loaded, sound(), "a manifest changes nothing of what it proves");
    }
}

pub(super) fn tensors(bytes: &[u8]) {
    let (file, bytes) = match bytes.split_first() {
        Some((selector, bytes)) if selector % 2 == 1 => ("optimizer.safetensors", bytes),
        _ => ("model.safetensors", bytes.get(1..).unwrap_or_default()),
    };
    tampered(file, bytes);
}

pub(super) fn masks(bytes: &[u8]) {
    tampered("masks.safetensors", bytes);
}

pub(super) fn state(bytes: &[u8]) {
    tampered("state.json", bytes);
}

/// A checkpoint in which this file is from outside.
fn tampered(file: &str, bytes: &[u8]) {
    let folder = saved(file);
    forge(&folder, file, bytes);
    verify(&folder).unwrap();
    let Some(loaded) = opened(&folder, "-00000007") else { return };
    let again = save(&place::path("again"), &loaded).unwrap();
    assert_eq!(load(&again).unwrap(), loaded);
}

/// Replaces a file of a checkpoint, and lets the manifest say so.
pub fn forge(checkpoint: &Path, file: &str, bytes: &[u8]) {
    let manifest = checkpoint.join(MANIFEST);
    fs::write(checkpoint.join(file), bytes).unwrap();
    let hash = blake3::hash(bytes).to_hex().to_string();
    let mut said: Value = serde_json::from_slice(&fs::read(&manifest).unwrap()).unwrap();
    said["files"][file] = json!([{"name": "all", "end": bytes.len(), "blake3": hash}]);
    fs::write(manifest, written(&said)).unwrap();
}

fn opened(folder: &Path, names: &str) -> Option<Checkpoint> {
    match load(folder) {
        Ok(loaded) => Some(loaded),
        Err(error) => {
            refused(&error, names);
            None
        }
    }
}

/// The text of a manifest with its checksum.
fn written(manifest: &Value) -> Vec<u8> {
    closed(&without_checksum(manifest))
}

fn without_checksum(manifest: &Value) -> String {
    let mut manifest = manifest.clone();
    manifest.as_object_mut().unwrap().remove("checksum");
    manifest.to_string()
}

/// The text of an object, whose last brace may be missing, with a checksum as its last field.
fn closed(text: &str) -> Vec<u8> {
    let open = text.strip_suffix('}').unwrap_or(text);
    sealed(format!("{open},\n  \"checksum\": \"{}\"\n}}\n", "0".repeat(64)).as_bytes())
}

/// The bytes of a manifest with the right checksum, where they have room for one.
pub fn sealed(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let Some(end) = bytes.len().checked_sub(4).filter(|&end| end >= 64) else { return bytes };
    bytes[end - 64..end].fill(b'0');
    let checksum = blake3::hash(&bytes).to_hex();
    bytes[end - 64..end].copy_from_slice(checksum.as_bytes());
    bytes
}

/// The sound checkpoint in a folder of this thread and of this use.
fn saved(purpose: &str) -> PathBuf {
    let run = place::path(&format!("{purpose}.run"));
    let folder = run.join("step-00000007");
    if folder.exists() { folder } else { save(&run, &sound()).unwrap() }
}

/// A small checkpoint with something of everything.
pub fn sound() -> Checkpoint {
    let tensor = |name: &str, shape: &[usize]| NamedTensor {
        name: name.to_owned(),
        shape: shape.to_vec(),
        values: (0..shape.iter().product()).map(|at: usize| at as f32 - 7.5).collect(),
    };
    let typed = |name: &str, length: usize, values| NamedTensor {
        name: name.to_owned(),
        shape: vec![length],
        values,
    };
    let weights = [tensor("wte.weight", &[3, 4]), tensor("h.0.mlp.c_fc.weight", &[8, 4])];
    Checkpoint {
        state: State {
            step: 7,
            total_steps: 60,
            phase: 0,
            phase_kind: PhaseKind::Sparse,
            seed: u64::MAX,
            tokens_seen: 1 << 60,
            skipped_steps: 3,
            phase_ends: vec![PhaseEnd { phase: 1, step: 30 }],
            plan: BTreeMap::from([("ffn".to_owned(), "algorithm 7".to_owned())]),
            config: BTreeMap::from([("steps".to_owned(), "60".to_owned())]),
            dataset: DatasetIdentity {
                fingerprint: Fingerprint::of(b"dataset"),
                training_tokens: 900,
                held_out_tokens: 100,
                vocabulary: 65,
            },
            tokenizer: Fingerprint::of(b"tokenizer"),
        },
        weights: weights.to_vec(),
        first_moments: weights.to_vec(),
        second_moments: weights[..1].to_vec(),
        masks: vec![(
            "h.0.mlp.c_fc.weight".to_owned(),
            Mask::from_tiles(8, 4, vec![0x3c3c, 0xc3c3]).unwrap(),
        )],
        auxiliary: vec![
            typed("scale", 3, Values::F32(vec![-0.0, 1.0, 2.0])),
            typed("row_order", 2, Values::U32(vec![1, u32::MAX])),
            typed("dgrad_mask", 1, Values::U16(vec![0x3c3c])),
        ],
    }
}

fn file_of_sound(name: &str) -> Vec<u8> {
    fs::read(saved("seeds").join(name)).unwrap()
}

pub(super) fn manifest_seeds() -> Vec<Vec<u8>> {
    let text = String::from_utf8(file_of_sound(MANIFEST)).unwrap();
    let changes = [
        ("\"step\": 7", "\"step\": 8"),
        ("\"step\": 7", "\"step\": 4294967296"),
        ("\"step\": 7", "\"step\": 7, \"step\": 7"),
        ("\"format_version\": 1", "\"format_version\": 2"),
        ("\"end\": ", "\"end\": 1844674407370955"),
        ("\"masks.safetensors\"", "\"../../etc/passwd\""),
        ("\"masks.safetensors\"", "\"masks.safetensors\": 7, \"masks.safetensors\""),
        ("\"state.json\"", "\"state\\u0000.json\""),
        ("\"header\"", "\"\\u001b[2J\""),
        ("\"files\"", "\"flies\""),
        ("\"step\": 7", "\"step\": [[[[[[[["),
        ("\n", "\r\n"),
    ];
    let mut seeds: Vec<Vec<u8>> =
        changes.map(|(from, to)| text.replacen(from, to, 1).into_bytes()).into();
    seeds.extend([
        Vec::new(),
        vec![b'0'; 67],
        text.as_bytes()[..text.len() - 1].to_vec(),
        vec![b'['; 5000],
    ]);
    seeds.push(text.into_bytes());
    seeds
}

pub(super) fn manifest_variants() -> Vec<Vec<u8>> {
    let manifest = String::from_utf8(file_of_sound(MANIFEST)).unwrap();
    let (fields, _) = manifest.split_once(",\n  \"checksum\"").expect("its last field");
    let variants =
        values::json(&format!("{fields}}}"), &["header", "all", "model.safetensors", "../x"]);
    values::files(variants)
        .iter()
        .map(|text| closed(str::from_utf8(text).expect("it was text")))
        .collect()
}

pub(super) fn tensors_variants() -> Vec<Vec<u8>> {
    let files = [(0, "model.safetensors"), (1, "optimizer.safetensors")];
    let variants = files.into_iter().flat_map(|(selector, name)| {
        tensors::variants(&file_of_sound(name)).into_iter().map(move |file| (selector, file))
    });
    variants.map(|(selector, file)| [&[selector], &file[..]].concat()).collect()
}

pub(super) fn masks_variants() -> Vec<Vec<u8>> {
    tensors::variants(&file_of_sound("masks.safetensors"))
}

pub(super) fn state_variants() -> Vec<Vec<u8>> {
    let text = String::from_utf8(file_of_sound("state.json")).unwrap();
    values::files(values::json(&text, &["dense", "sparse", "frozen", "settled"]))
}

pub(super) fn tensors_seeds() -> Vec<Vec<u8>> {
    let mut seeds: Vec<Vec<u8>> =
        tensors::attacks().into_iter().map(|file| [&[0], &file[..]].concat()).collect();
    seeds.push([&[0], &file_of_sound("model.safetensors")[..]].concat());
    seeds.push([&[1], &file_of_sound("optimizer.safetensors")[..]].concat());
    let header = r#"{"exp_avg.x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"x":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#;
    seeds.push([&[1], &tensors::file(header, 8)[..]].concat());
    seeds
}

pub(super) fn masks_seeds() -> Vec<Vec<u8>> {
    let mut seeds = tensors::attacks();
    seeds.push(file_of_sound("masks.safetensors"));
    for shape in ["[2,2]", "[1,1,4]", "[4]", "[0,4611686018427387904]", "[4611686018427387904,0]"] {
        seeds.push(tensors::file(
            &format!(r#"{{"wte.weight":{{"dtype":"U16","shape":{shape},"data_offsets":[0,8]}}}}"#),
            8,
        ));
        seeds.push(tensors::file(
            &format!(r#"{{"wte.weight":{{"dtype":"U16","shape":{shape},"data_offsets":[0,0]}}}}"#),
            0,
        ));
    }
    seeds
}

pub(super) fn state_seeds() -> Vec<Vec<u8>> {
    let text = String::from_utf8(file_of_sound("state.json")).unwrap();
    let changes = [
        ("\"step\": 7", "\"step\": 4294967296"),
        ("\"step\": 7", "\"step\": -1"),
        ("\"step\": 7", "\"step\": 7.0"),
        ("\"step\": 7", "\"step\": 7, \"step\": 7"),
        ("\"sparse\"", "\"neither\""),
        ("\"flips\": 3", "\"flips\": 3, \"flips\": 4"),
        ("\"flips\": 3", "\"flips\": 18446744073709551616"),
        ("\"ffn\"", "\"\\ud800\""),
        ("\"plan\"", "\"plane\\u001b[2J\""),
        ("\n", "\r\n"),
    ];
    let mut seeds: Vec<Vec<u8>> =
        changes.map(|(from, to)| text.replacen(from, to, 1).into_bytes()).into();
    seeds.extend([
        Vec::new(),
        b"null".to_vec(),
        vec![b'{'; 100],
        vec![b'['; 5000],
        text.as_bytes()[..text.len() / 2].to_vec(),
    ]);
    seeds.push(text.into_bytes());
    seeds
}

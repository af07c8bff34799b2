//! A checkpoint with one hostile file under a manifest whose hashes are right: a checksum does not
//! make the contents trustworthy.
//!
//! A checkpoint that loads can be saved, and loads again unchanged. Manifests are written here from
//! `docs/checkpoint-format.md`, not by the code under test.

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

use super::{Files, document::Document, path, read, refused, tensors};

const MANIFEST: &str = "manifest.json";
const TENSORS: [&str; 2] = ["model.safetensors", "optimizer.safetensors"];
const MASKS: &str = "masks.safetensors";
const STATE: &str = "state.json";

pub(super) fn manifest(bytes: &[u8]) -> bool {
    let folder = saved(MANIFEST);
    fs::write(folder.join(MANIFEST), bytes).unwrap();
    opened(&folder, MANIFEST);
    fs::write(folder.join(MANIFEST), sealed(bytes)).unwrap();
    let loaded = opened(&folder, "-00000007");
    assert!(loaded.iter().all(|loaded| *loaded == sound()), "a manifest changed its files");
    loaded.is_some()
}

/// The first byte chooses between the files of weights and of moments.
pub(super) fn tensors(bytes: &[u8]) -> bool {
    let (selector, bytes) = bytes.split_first().unwrap_or((&0, &[]));
    tampered(TENSORS[usize::from(selector % 2)], bytes)
}

pub(super) fn masks(bytes: &[u8]) -> bool {
    tampered(MASKS, bytes)
}

pub(super) fn state(bytes: &[u8]) -> bool {
    tampered(STATE, bytes)
}

/// Loads a checkpoint in which this file is hostile.
fn tampered(file: &str, bytes: &[u8]) -> bool {
    let folder = saved(file);
    forge(&folder, file, bytes);
    verify(&folder).unwrap();
    let Some(loaded) = opened(&folder, "-00000007") else { return false };
    let again = save(&path("again"), &loaded).unwrap();
    assert_eq!(load(&again).unwrap(), loaded);
    true
}

/// Replaces a file of a checkpoint and makes the manifest agree.
pub fn forge(checkpoint: &Path, file: &str, bytes: &[u8]) {
    let manifest = checkpoint.join(MANIFEST);
    fs::write(checkpoint.join(file), bytes).unwrap();
    let hash = blake3::hash(bytes).to_hex().to_string();
    let mut changed: Value = serde_json::from_slice(&read(&manifest)).unwrap();
    changed.as_object_mut().unwrap().remove("checksum");
    changed["files"][file] = json!([{"name": "all", "end": bytes.len(), "blake3": hash}]);
    fs::write(manifest, closed(&changed.to_string())).unwrap();
}

fn opened(folder: &Path, names: &str) -> Option<Checkpoint> {
    let loaded = load(folder);
    loaded.inspect_err(|error| _ = refused(error, names)).ok()
}

/// The text of an object, whose last brace may be missing, with a checksum as its last field.
pub fn closed(text: &str) -> Vec<u8> {
    let open = text.strip_suffix('}').unwrap_or(text);
    sealed(format!("{open},\n  \"checksum\": \"{}\"\n}}\n", "0".repeat(64)).as_bytes())
}

/// A manifest with its checksum recomputed, if it is long enough to have one.
fn sealed(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let Some(end) = bytes.len().checked_sub(4).filter(|&end| end >= 64) else { return bytes };
    bytes[end - 64..end].fill(b'0');
    let checksum = blake3::hash(&bytes).to_hex();
    bytes[end - 64..end].copy_from_slice(checksum.as_bytes());
    bytes
}

/// The sound checkpoint, in a folder of this thread for this purpose.
fn saved(purpose: &str) -> PathBuf {
    let run = path(&format!("{purpose}.run"));
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
    let mask = Mask::from_tiles(8, 4, vec![0x3c3c, 0xc3c3]).unwrap();
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
        masks: vec![("h.0.mlp.c_fc.weight".to_owned(), mask)],
        auxiliary: vec![
            typed("scale", 3, Values::F32(vec![-0.0, 1.0, 2.0])),
            typed("row_order", 2, Values::U32(vec![1, u32::MAX])),
            typed("dgrad_mask", 1, Values::U16(vec![0x3c3c])),
        ],
    }
}

fn file_of_sound(name: &str) -> Vec<u8> {
    read(saved("seeds").join(name))
}

pub(super) fn manifest_seeds() -> Files {
    let text = file_of_sound(MANIFEST);
    vec![text.clone(), Vec::new(), vec![b'0'; 67], text[..text.len() - 1].to_vec()]
}

pub(super) fn manifest_variants() -> Files {
    let manifest = String::from_utf8(file_of_sound(MANIFEST)).expect("JSON");
    let (fields, _) = manifest.split_once(",\n  \"checksum\"").expect("its last field");
    let words = ["header", "all", "model.safetensors", "../../etc/passwd", "state\0.json"];
    Document::json(&format!("{fields}}}"), &words).variants(|text| closed(&text))
}

pub(super) fn state_seeds() -> Files {
    vec![file_of_sound(STATE), Vec::new(), vec![b'['; 5000]]
}

pub(super) fn state_variants() -> Files {
    let words = ["dense", "sparse", "frozen", "settled"];
    let text = String::from_utf8(file_of_sound(STATE)).expect("JSON");
    Document::json(&text, &words).variants(String::into_bytes)
}

fn selected(selector: u8, files: Files) -> impl Iterator<Item = Vec<u8>> {
    files.into_iter().map(move |file| [&[selector], &file[..]].concat())
}

pub(super) fn tensors_seeds() -> Files {
    let [weights, moments] = TENSORS.map(file_of_sound);
    let attacks = [vec![weights], tensors::attacks()].concat();
    selected(0, attacks).chain(selected(1, vec![moments])).collect()
}

pub(super) fn tensors_variants() -> Files {
    let [weights, moments] = TENSORS.map(|name| tensors::variants(&file_of_sound(name)));
    selected(0, weights).chain(selected(1, moments)).collect()
}

pub(super) fn masks_seeds() -> Files {
    let mut seeds = vec![file_of_sound(MASKS)];
    seeds.extend(tensors::attacks());
    for (shape, end) in [("1,1,4", 8), ("0,4611686018427387904", 0), ("4611686018427387904,0", 8)] {
        let entry = format!(r#"{{"dtype":"U16","shape":[{shape}],"data_offsets":[0,{end}]}}"#);
        seeds.push(tensors::file(&format!(r#"{{"wte.weight":{entry}}}"#), &vec![0; end]));
    }
    seeds
}

pub(super) fn masks_variants() -> Files {
    tensors::variants(&file_of_sound(MASKS))
}

//! Round trips, refusals and rotation; damage, failures, crashes and the files of released versions
//! have their own files.

use std::{
    collections::BTreeMap,
    fs,
    num::NonZeroUsize,
    path::{Path, PathBuf},
    sync::mpsc,
};

use sparse24_core::Mask;
use tempfile::TempDir;

use super::{
    manifest::{MANIFEST, MASKS, MODEL, OPTIMIZER, STATE},
    *,
};
use crate::{Error, ErrorKind, Result, error::problem};

mod damage;
mod faults;
mod golden;
mod replay;

const FILES: [&str; 5] = [MANIFEST, MODEL, OPTIMIZER, MASKS, STATE];

fn sample(step: u32) -> Checkpoint {
    let tensor = |name: &str, shape: &[usize], scale: f32| {
        let values = (0..shape.iter().product())
            .map(|i: usize| (i as f32 - 7.5) * scale * (1.0 + step as f32))
            .collect();
        NamedTensor { name: name.into(), shape: shape.to_vec(), values }
    };
    let shapes: [(&str, &[usize]); 3] =
        [("wte.weight", &[5, 8]), ("h.0.mlp.c_fc.weight", &[16, 8]), ("h.0.ln_1.weight", &[8])];
    let list = |scale| shapes.map(|(name, shape)| tensor(name, shape, scale)).to_vec();
    let tiles = (0..8).map(|i| 0x3c3c_u16.rotate_left(i * 4) ^ step as u16).collect();
    Checkpoint {
        state: State {
            step,
            total_steps: 60,
            phase: u32::from(step > 50),
            phase_kind: if step > 50 { PhaseKind::Dense } else { PhaseKind::Sparse },
            seed: u64::MAX,
            tokens_seen: 1 << 60,
            skipped_steps: 3,
            phase_ends: vec![PhaseEnd { phase: 1, step: 30 }],
            plan: BTreeMap::from([("ffn.forward".into(), "algorithm 7".into())]),
            config: BTreeMap::from([
                ("model.width".into(), "16".into()),
                ("method.name".into(), "\"fst\"".into()),
            ]),
            dataset: DatasetIdentity {
                fingerprint: Fingerprint::of(b"dataset"),
                training_tokens: u64::MAX,
                held_out_tokens: 400,
                vocabulary: 27,
            },
            tokenizer: Fingerprint::of(b"tokenizer"),
        },
        weights: list(0.1),
        first_moments: list(f32::MIN_POSITIVE / 4.0),
        second_moments: list(1e-20),
        masks: vec![("h.0.mlp.c_fc.weight".into(), Mask::from_tiles(16, 8, tiles).unwrap())],
        auxiliary: auxiliary(),
    }
}

/// One tensor of each type.
fn auxiliary() -> Vec<NamedTensor<Values>> {
    let tensor = |name: &str, shape: &[usize], values| NamedTensor {
        name: name.into(),
        shape: shape.to_vec(),
        values,
    };
    vec![
        tensor("scale", &[3], Values::F32(vec![-0.0, 0.5, 3e38])),
        tensor("row_order.h.0.mlp.c_fc.weight", &[2], Values::U32(vec![u32::MAX, 1])),
        tensor("dgrad_mask.h.0.mlp.c_fc.weight", &[1, 2], Values::U16(vec![u16::MAX, 0x3c3c])),
    ]
}

fn saved(step: u32) -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = save(directory.path(), &sample(step)).unwrap();
    (directory, path)
}

/// The work that goes on may be what the copy waits for.
#[test]
fn a_saver_takes_its_checkpoint_when_it_is_copied() {
    let directory = tempfile::tempdir().unwrap();
    let retention = || Retention { last: NonZeroUsize::MIN, every: 0, always: Vec::new() };
    let mut saver = Saver::new(directory.path().to_owned());
    let (copied, copy) = mpsc::channel();
    saver.begin(move || Ok(copy.recv().unwrap()), retention(), || Ok(()), |_| Ok(())).unwrap();
    assert!(!saver.is_idle() && saver.spare().is_none());
    copied.send(sample(4)).unwrap();
    let path = saver.wait().unwrap().unwrap();
    assert_eq!(load(&path).unwrap(), sample(4));
    assert!(saver.spare().is_some(), "its room serves the next");
    let lost = || Err(Error::setting("copy", "is lost"));
    saver.begin(lost, retention(), || panic!("nothing is saved"), |_| Ok(())).unwrap();
    assert_eq!(problem(saver.wait()), problem(lost()));
    assert!(
        saver.spare().is_none() && load(&path).is_ok() && count(directory.path()).unwrap() == 1
    );
}

/// Saves and removes all but the newest, as a run does that keeps one.
fn rotate(at: &Path, checkpoint: &Checkpoint) -> Result {
    save(at, checkpoint)?;
    retain(at, &Retention { last: NonZeroUsize::MIN, every: 0, always: Vec::new() }).map(drop)
}

/// An old checkpoint and a new one, which in the second pair is of the same step.
fn pairs() -> [(Checkpoint, Checkpoint); 2] {
    let mut changed = sample(1);
    changed.weights[0].values[0] = 42.0;
    [(sample(1), sample(2)), (sample(1), changed)]
}

/// A deterministic stream of numbers: splitmix64.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) % bound as u64) as usize
    }
}

#[test]
fn empty_lists_survive() {
    let directory = tempfile::tempdir().unwrap();
    let mut bare = sample(0);
    (bare.first_moments, bare.second_moments, bare.masks, bare.auxiliary) = Default::default();
    let path = save(directory.path(), &bare).unwrap();
    assert_eq!(load(&path).unwrap(), bare);
}

#[test]
fn the_manifest_proves_itself() {
    let (_directory, path) = saved(1);
    let file = path.join(MANIFEST);
    let good = fs::read_to_string(&file).unwrap();
    let refused = |bytes: &[u8], expected: &str| {
        fs::write(&file, bytes).unwrap();
        let message = problem(load(&path));
        assert!(message.contains(expected), "{message}");
    };
    let other_step = good.replace("\"step\": 1,", "\"step\": 2,");
    refused(other_step.as_bytes(), "manifest.json: is damaged, bytes 0..");
    refused(&good.as_bytes()[..good.len() / 2], ": cut or damaged");
    for (text, expected) in [
        (
            good.replace("\"format_version\": 2", "\"format_version\": 3"),
            "version 3; this build reads \"sparse24-checkpoint\", versions 1 to 2",
        ),
        (good.replace("masks.safetensors", "../../etc/passwd"), "lists [\"../../etc/passwd\","),
        (other_step, "state.json: is of step 1, but the manifest of step 2"),
        (
            good.replace("\"end\"", "\"length\""),
            "manifest.json: not a manifest: unknown field `length`",
        ),
    ] {
        // With a checksum that is right.
        let mut bytes = text.into_bytes();
        let digits = bytes.len() - 68..bytes.len() - 4;
        bytes[digits.clone()].fill(b'0');
        let checksum = Fingerprint::of(&bytes).to_string();
        bytes[digits].copy_from_slice(checksum.as_bytes());
        refused(&bytes, expected);
    }
}

#[test]
fn contents_that_contradict_each_other_are_refused() {
    type Change = fn(&mut Checkpoint);
    let changes: [(Change, &str); 4] = [
        (
            |checkpoint| drop(checkpoint.state.config.insert("steps".into(), "7".into())),
            "has total_steps 60, but steps = 7 in its config",
        ),
        (
            |checkpoint| drop(checkpoint.state.config.insert("seed".into(), "7".into())),
            "has seed 18446744073709551615, but seed = 7 in its config",
        ),
        (
            |checkpoint| checkpoint.masks[0].0 = "nobody".into(),
            "the mask \"nobody\" has shape [16, 8], its weight is missing",
        ),
        (
            |checkpoint| checkpoint.second_moments[0].shape = vec![8, 5],
            "\"exp_avg_sq.wte.weight\" has shape [8, 5], its weight [5, 8]",
        ),
    ];
    for (change, expected) in changes {
        let (mut other, directory) = (sample(1), tempfile::tempdir().unwrap());
        change(&mut other);
        other.write(directory.path()).unwrap();
        let message = problem(load(directory.path()));
        assert!(message.ends_with(expected), "{message}");
    }
}

/// Otherwise, rotation could remove the last checkpoint that loads.
#[test]
fn a_checkpoint_that_would_not_load_is_not_saved() {
    type Change = fn(&mut Checkpoint);
    let changes: [(Change, &str); 5] = [
        (|bad| bad.weights[0].shape = vec![5, 9], "\"wte.weight\" has shape [5, 9] and 40 values"),
        (|bad| bad.auxiliary[0].name.push('\u{1b}'), "has control characters"),
        (|bad| bad.auxiliary[0].name = "n".repeat(4096), "a name of 4106 bytes, expected at most"),
        (
            |bad| drop(bad.state.config.insert("note".into(), "n".repeat(1 << 20))),
            "state.json: holds 1",
        ),
        (
            |bad| {
                let name = |i| format!("{i:04000}");
                let one = |i| NamedTensor { name: name(i), ..bad.auxiliary[0].clone() };
                bad.auxiliary = (0..1100).map(one).collect();
            },
            "manifest.json: holds 4",
        ),
    ];
    let (directory, good) = saved(1);
    for (change, expected) in changes {
        let mut bad = sample(2);
        change(&mut bad);
        let error = rotate(directory.path(), &bad).unwrap_err();
        let message = error.to_string();
        assert_eq!(error.kind(), ErrorKind::Input, "{message}");
        assert!(message.contains(expected) && message.ends_with("; nothing was written"));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "{message}");
        assert_eq!(load(&good).unwrap(), sample(1));
    }
}

#[test]
fn what_is_not_finite_is_never_written() {
    let directory = tempfile::tempdir().unwrap();
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut bad = sample(9);
        bad.second_moments[1].values[17] = value;
        let error = save(directory.path(), &bad).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NonFinite);
        let expected = format!(
            "checkpoint of step 9 not written: \"exp_avg_sq.h.0.mlp.c_fc.weight\" holds {value} at \
                element 17; lower optimizer.learning_rate or method.lambda"
        );
        assert_eq!(error.to_string(), expected);
    }
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn the_newest_that_verifies_is_found_and_the_others_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    assert!(latest(&at.join("nowhere")).unwrap().checkpoint.is_none());
    let paths = [1, 20, 300].map(|step| save(at, &sample(step)).unwrap());
    fs::create_dir(at.join("step-4")).unwrap();
    fs::write(at.join("notes.txt"), "mine").unwrap();
    assert_eq!(latest(at).unwrap().checkpoint.as_ref(), Some(&paths[2]));
    fs::write(paths[2].join(STATE), "{}").unwrap();
    let found = latest(at).unwrap();
    assert_eq!(found.checkpoint.as_ref(), Some(&paths[1]));
    assert_eq!(found.refused.len(), 1);
    let message = found.refused[0].1.to_string();
    assert!(message.contains("state.json: ends at byte 2, but the manifest says"), "{message}");
    let renamed = at.join("step-00000400");
    fs::rename(&paths[1], &renamed).unwrap();
    let found = latest(at).unwrap();
    assert_eq!(found.checkpoint.as_ref(), Some(&paths[0]));
    let message = found.refused[0].1.to_string();
    assert!(message.ends_with("is a checkpoint of step 20, not of the step in its name"));
    // The operating system opens no socket.
    #[cfg(unix)]
    {
        let manifest = renamed.join(MANIFEST);
        fs::remove_file(&manifest).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(&manifest).unwrap();
        assert!(problem(latest(at)).starts_with("cannot read "));
    }
    assert_eq!(
        (step_of(&renamed), step_of(Path::new("step-4")), step_of(Path::new("."))),
        (Some(400), None, None)
    );
}

#[test]
fn rotation_waits_for_a_newer_one_that_verifies() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    for step in [10, 20, 30, 40, 50] {
        save(at, &sample(step)).unwrap();
    }
    let retention = Retention { last: NonZeroUsize::new(2).unwrap(), every: 0, always: vec![20] };
    let newest = at.join("step-00000050");
    let good = fs::read(newest.join(STATE)).unwrap();
    fs::write(newest.join(STATE), "").unwrap();
    assert!(problem(retain(at, &retention)).contains("state.json: ends at byte 0"));
    assert_eq!(fs::read_dir(at).unwrap().count(), 5);
    fs::write(newest.join(STATE), good).unwrap();
    assert_eq!(retain(at, &retention).unwrap(), [10, 30]);
    assert_eq!(set_aside_after(at, 20).unwrap(), [40, 50]);
    save(at, &sample(50)).unwrap();
    assert_eq!(set_aside_after(at, 20).unwrap(), [50]);
    assert_eq!(latest(at).unwrap().checkpoint, Some(at.join("step-00000020")));
    let mut names: Vec<_> =
        fs::read_dir(at).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    let [a, b, c] = ["40.1", "50.1", "50.2"].map(|end| format!("damaged-step-000000{end}"));
    assert_eq!(names, [&a, &b, &c, "step-00000020"]);
}

#[test]
fn fingerprints_have_one_spelling() {
    let fingerprint = Fingerprint::of(b"");
    let text = fingerprint.to_string();
    assert_eq!(text.parse(), Ok(fingerprint));
    for wrong in [text.to_uppercase(), text[1..].to_owned(), text.replace('a', "g")] {
        let problem = wrong.parse::<Fingerprint>().unwrap_err();
        assert!(problem.starts_with("expected 64 lower-case hexadecimal digits"), "{wrong}");
    }
}

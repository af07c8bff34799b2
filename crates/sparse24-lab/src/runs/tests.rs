//! Names of arms, and the folders and sets that are refused.

use std::{fs, path::Path};

use sparse24_run::{machine::Memory, run::Needs};

use super::{Folder, Identity, Keep, check_name, check_needs};

#[test]
fn an_arm_is_the_name_of_a_folder() {
    for name in ["dense", "fst-6e-5", "a.b_c+d=e", "4", &"x".repeat(64)] {
        assert!(check_name("arms", name).is_ok(), "{name}");
    }
    for (name, expected) in ["", ".", "..", "a/b", "a b", "-x", "_x", "é", "x.", "a\u{1}b"]
        .map(|name| (name, "is not a folder name"))
        .into_iter()
        .chain([(&*"x".repeat(65), "64 letters"), ("Study.json", "a file beside the arms")])
    {
        let refused = check_name("arms", name).unwrap_err().to_string();
        assert!(refused.starts_with("arms: ") && refused.contains(expected), "{refused}");
    }
}

fn open(path: &Path) -> Result<Folder, String> {
    let read = |_: &Path| Ok(Identity::default());
    Folder::open(path, "study.toml", String::new(), &Identity::default(), read)
        .map_err(|error| error.to_string())
}

#[test]
fn a_folder_with_something_else_is_not_touched() {
    let temporary = tempfile::tempdir().unwrap();
    let at = |name: &str| temporary.path().join(name);
    for (name, path, expected) in [
        ("thesis", temporary.path(), "already holds \"thesis\" but no study.toml"),
        ("thesis", &at("thesis"), "is a file"),
        ("study.json", temporary.path(), "has lost its study.toml; start the same command with"),
        ("study.toml", temporary.path(), "has lost its study.toml; start the same command with"),
    ] {
        fs::write(at(name), "").unwrap();
        let refused = open(path).unwrap_err();
        assert!(refused.contains(expected), "{refused}");
    }
    assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 3);
}

/// A process that was killed before it wrote the description leaves a lock, and perhaps a part of
/// the description.
#[test]
fn a_start_that_was_killed_is_repeated() {
    let temporary = tempfile::tempdir().unwrap();
    for name in ["lock", ".tmp-study.toml"] {
        fs::write(temporary.path().join(name), "half").unwrap();
    }
    open(temporary.path()).unwrap();
}

#[test]
fn a_folder_is_never_shared() {
    let temporary = tempfile::tempdir().unwrap();
    let again = || open(temporary.path());
    let held = again().unwrap();
    let refused = again().unwrap_err();
    assert!(refused.contains("in use by process ") && refused.contains(": this one"), "{refused}");
    drop(held);
    again().unwrap();
}

/// Three runs, of which the last needs most memory and the first has a checkpoint.
#[test]
fn runs_that_fit_one_by_one_alone_are_refused() {
    let temporary = tempfile::tempdir().unwrap();
    let (total, available) = (100 << 20, 100 << 20);
    let memory = Memory { total, available, limit: None, address_space: None };
    let [small, large] = [1, 1 << 50];
    for (jobs, keep, checkpoint, expected) in [
        (1, Keep::Checkpoints, small, ""),
        (2, Keep::Checkpoints, small, ""),
        (3, Keep::Checkpoints, small, "--jobs: running 3 runs at a time needs 120 MiB*has 100"),
        // Two that each keeps, but for the first one, and the one that is written.
        (1, Keep::Checkpoints, large, "checkpoints of 3 runs need 6442450944.0 MiB"),
        (2, Keep::Results, large, "checkpoints of 2 runs need 6442450944.0 MiB"),
    ] {
        let run = |memory: u64, there| (Needs { memory: memory << 20, checkpoint, kept: 2 }, there);
        let runs = [run(30, 1), run(40, 0), run(50, 0)];
        let found = check_needs(temporary.path(), &runs, jobs, keep, Some(&memory));
        let found = found.map_or_else(|error| error.to_string(), |()| String::new());
        let is_like = expected.split('*').all(|part| found.contains(part));
        assert!(is_like && found.is_empty() == expected.is_empty(), "{expected}: {found}");
    }
}

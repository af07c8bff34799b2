//! Names of arms, and the folders that are refused.

use std::{collections::BTreeSet, fs, path::Path};

use super::{Description, Folder, Identity, check_name, folder::Settings};

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

fn identity(steps: u32, arms: &[(&str, u32)], seeds: &[u64]) -> Identity {
    let setting = |key: &str, value: u32| Settings::from([(key.to_owned(), value.to_string())]);
    Identity {
        settings: setting("steps", steps),
        arms: arms.iter().map(|&(arm, x)| (arm.to_owned(), setting("lambda", x))).collect(),
        seeds: BTreeSet::from_iter(seeds.iter().copied()),
    }
}

/// Opens a folder that was started with steps = 9, the arms a and b, and seed 1.
fn open(path: &Path, text: &str, identity: Identity) -> Result<Folder, String> {
    let before = self::identity(9, &[("a", 2), ("b", 3)], &[1]);
    let read = |_: &Path| Ok(before.clone());
    let description = Description { file: "study.toml", text, identity, read: &read };
    Folder::open(path, &description).map_err(|error| error.to_string())
}

#[test]
fn arms_and_seeds_may_be_added_and_nothing_else_may_change() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("runs/study");
    let arms = [("a", 2), ("b", 3)];
    open(&path, "first", identity(9, &arms, &[1])).unwrap();
    for (now, expected) in [
        (identity(8, &arms, &[1]), "with steps = 9, found steps = 8;"),
        (identity(9, &arms[..1], &[1]), "with arm b, found no arm b;"),
        (identity(9, &arms, &[2]), "with seed 1, found no seed 1;"),
        (
            identity(9, &[("a", 2), ("b", 4)], &[1]),
            "with arm b: lambda = 3, found arm b: lambda = 4;",
        ),
        (Identity::default(), "with steps = 9, found no steps;"),
    ] {
        let refused = open(&path, "second", now).unwrap_err();
        assert!(refused.contains(expected), "{refused}");
        let text = fs::read_to_string(path.join("study.toml")).unwrap();
        assert_eq!(text, "first", "a refusal changes nothing");
    }
    open(&path, "second", identity(9, &[("a", 2), ("b", 3), ("c", 4)], &[1, 2])).unwrap();
    assert_eq!(fs::read_to_string(path.join("study.toml")).unwrap(), "second");
}

#[test]
fn a_folder_with_something_else_is_not_touched() {
    let temporary = tempfile::tempdir().unwrap();
    fs::write(temporary.path().join("thesis"), "").unwrap();
    for (path, expected) in [
        (temporary.path(), "already holds \"thesis\" but no study.toml"),
        (&temporary.path().join("thesis"), "is a file"),
    ] {
        let refused = open(path, "", Identity::default()).unwrap_err();
        assert!(refused.contains(expected), "{refused}");
    }
    assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 1);
}

/// A process that was killed before it wrote the description leaves a lock, and perhaps a part of
/// the description.
#[test]
fn a_start_that_was_killed_is_repeated() {
    let temporary = tempfile::tempdir().unwrap();
    for name in ["lock", ".tmp-study.toml"] {
        fs::write(temporary.path().join(name), "half").unwrap();
    }
    open(temporary.path(), "", Identity::default()).unwrap();
}

#[test]
fn two_processes_never_share_a_folder() {
    let temporary = tempfile::tempdir().unwrap();
    let again = || open(temporary.path(), "", identity(9, &[("a", 2), ("b", 3)], &[1]));
    let held = again().unwrap();
    let refused = again().unwrap_err();
    assert!(refused.contains("is in use by another process"), "{refused}");
    drop(held);
    again().unwrap();
}

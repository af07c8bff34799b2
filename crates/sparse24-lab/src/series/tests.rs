//! Names of arms, and what a folder refuses.

use std::{collections::BTreeMap, fs, path::Path};

use super::{Folder, check_name, folder::Description};

#[test]
fn an_arm_is_the_name_of_a_folder() {
    for name in ["dense", "fst-6e-5", "a.b_c+d=e", "4", &"x".repeat(64)] {
        assert!(check_name("arms", name).is_ok(), "{name}");
    }
    for name in ["", ".", "..", "a/b", "a b", "-x", "_x", "é", "x.", "a\u{1}b", &"x".repeat(65)] {
        let refused = check_name("arms", name).unwrap_err().to_string();
        assert!(
            refused.starts_with("arms: ") && refused.contains("is no name of a folder"),
            "{refused}"
        );
    }
    let refused = check_name("arms", "Study.json").unwrap_err().to_string();
    assert_eq!(
        refused,
        "arms: \"Study.json\" is the name of a file beside the arms; choose another"
    );
}

/// Lines `key` and `key=value`, with a blank for the separator of lists.
fn decides(text: &str) -> BTreeMap<String, String> {
    let pair = |line: &str| {
        line.split_once('=').map_or((line.replace(' ', "\u{1}"), String::new()), |(k, v)| {
            (k.replace(' ', "\u{1}"), v.to_owned())
        })
    };
    text.lines().map(pair).collect()
}

fn open(path: &Path, text: &str) -> Result<(), String> {
    let parse = |file: &Path| Ok(decides(&fs::read_to_string(file).unwrap()));
    let description = Description {
        file: "study.toml",
        text,
        decides: decides(text),
        lists: &["arms", "seeds"],
        parse: &parse,
    };
    Folder::open(path, &description).map(drop).map_err(|error| error.to_string())
}

const BEFORE: &str = "steps=9\nseeds 1\narms a\narms a lambda=2\narms b";

#[test]
fn arms_and_seeds_may_be_added_and_nothing_else_may_change() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("runs/study");
    open(&path, BEFORE).unwrap();
    assert_eq!(fs::read_to_string(path.join("study.toml")).unwrap(), BEFORE);
    for (text, expected) in [
        (BEFORE.replace('9', "8"), "was begun with steps = 9, now it is asked for with steps = 8;"),
        (
            BEFORE.replace("\narms b", ""),
            "was begun with arms b, now it is asked for without arms b;",
        ),
        (
            BEFORE.replace("seeds 1", "seeds 2"),
            "was begun with seeds 1, now it is asked for without seeds 1;",
        ),
        (
            format!("{BEFORE}\narms b lambda=1"),
            "was begun without arms b lambda, now it is asked for with arms b lambda = 1;",
        ),
        (format!("{BEFORE}\nnew=1"), "was begun without new, now it is asked for with new = 1;"),
    ] {
        let refused = open(&path, &text).unwrap_err();
        assert!(
            refused.contains(expected) && refused.ends_with("undo that, or name another folder"),
            "{refused}"
        );
        assert_eq!(
            fs::read_to_string(path.join("study.toml")).unwrap(),
            BEFORE,
            "a refusal changes nothing"
        );
    }
    let more = format!("{BEFORE}\nseeds 2\narms c\narms c lambda=3");
    open(&path, &more).unwrap();
    assert_eq!(fs::read_to_string(path.join("study.toml")).unwrap(), more);
}

#[test]
fn a_folder_of_somebody_else_is_not_touched() {
    let temporary = tempfile::tempdir().unwrap();
    fs::write(temporary.path().join("thesis"), "").unwrap();
    let refused = open(temporary.path(), BEFORE).unwrap_err();
    assert!(refused.ends_with("already holds \"thesis\" and no study.toml, expected a new or empty folder; choose another"), "{refused}");
    assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 1);
    let refused = open(&temporary.path().join("thesis"), BEFORE).unwrap_err();
    assert!(
        refused.ends_with("is a file, expected a new or empty folder; choose another"),
        "{refused}"
    );
}

/// A process that died before it had written the description leaves a lock, and perhaps what it had
/// written of it.
#[test]
fn a_start_that_died_is_begun_anew() {
    let temporary = tempfile::tempdir().unwrap();
    for name in ["lock", ".tmp-study.toml"] {
        fs::write(temporary.path().join(name), "half").unwrap();
    }
    open(temporary.path(), BEFORE).unwrap();
}

#[test]
fn two_processes_never_share_a_folder() {
    let temporary = tempfile::tempdir().unwrap();
    let parse = |_: &Path| Ok(BTreeMap::new());
    let description = Description {
        file: "study.toml",
        text: "",
        decides: BTreeMap::new(),
        lists: &[],
        parse: &parse,
    };
    let held = Folder::open(temporary.path(), &description).unwrap();
    let refused = Folder::open(temporary.path(), &description).unwrap_err().to_string();
    assert!(refused.contains("is in use by another process"), "{refused}");
    drop(held);
    Folder::open(temporary.path(), &description).unwrap();
}

//! The failure, in every way, of every file operation of a save and of the rotation after it.

use super::*;
use crate::disk::fault::{self, Fault, Plan, trace};

/// A directory that holds this alone.
fn begin(at: &Path, old: &Checkpoint) {
    let _ = fs::remove_dir_all(at);
    save(at, old).unwrap();
}

fn under<T>(plan: Plan, work: impl FnOnce() -> T) -> T {
    fault::plan(plan);
    let done = work();
    fault::plan(Plan::Healthy);
    done
}

/// The last good checkpoint, or the new one, always loads; another rotation then goes through.
fn survives(at: &Path, old: &Checkpoint, new: &Checkpoint, what: &str) {
    let found = latest(at).unwrap();
    assert!(found.refused.is_empty(), "{what}: {:?}", found.refused);
    let loaded = load(&found.checkpoint.unwrap_or_else(|| panic!("{what}: none is left"))).unwrap();
    assert!(loaded == *old || loaded == *new, "{what}");
    rotate(at, new).unwrap();
    assert_eq!(load(&latest(at).unwrap().checkpoint.unwrap()).unwrap(), *new, "{what}");
}

/// Passes every pair, in a directory, with the number of operations of its rotation.
fn for_each_pair(test: impl Fn(&Path, [&Checkpoint; 2], u32)) {
    let directory = tempfile::tempdir().unwrap();
    let at = &directory.path().join("checkpoints");
    for (old, new) in &pairs() {
        begin(at, old);
        let operations = trace(|| rotate(at, new).unwrap()).len() as u32;
        assert!(operations > 25, "{operations}");
        test(at, [old, new], operations);
    }
}

#[test]
fn any_failure_of_any_operation_is_told_and_leaves_a_good_checkpoint() {
    for_each_pair(|at, [old, new], operations| {
        for (operation, fault) in (0..operations).flat_map(|n| Fault::ALL.map(|fault| (n, fault))) {
            let what = format!("{fault:?} at operation {operation}");
            begin(at, old);
            match under(Plan::Fail(operation, fault), || rotate(at, new)) {
                // A short write is written on, and an interrupted one again.
                Ok(()) => assert!(
                    [Fault::Short, Fault::Interrupted, Fault::Full].contains(&fault),
                    "{what}"
                ),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Io, "{what}: {error}");
                    let is_told = error.to_string().starts_with("cannot ");
                    assert!(is_told && fault != Fault::Short, "{what}: {error}");
                }
            }
            for entry in fs::read_dir(at).unwrap() {
                let name = entry.unwrap().file_name();
                // What a removal left is the next save's to take.
                assert!(
                    name.to_str().unwrap().starts_with("step-")
                        || latest(at).unwrap().checkpoint.is_some(),
                    "{what} left {name:?}"
                );
            }
            survives(at, old, new, &what);
        }
    });
}

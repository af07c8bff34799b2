//! Searches and studies killed at every file operation: the same command goes on and ends with the same results, byte for byte.

use std::{fs, os::unix::process::ExitStatusExt, process::Output};

use crate::{
    shim::{self, Plan},
    support::{Place, TINY},
};

/// Kills a command at each operation (of every so many, one) below its folder `out`, runs it again and compares this file; gives how many died.
fn kill_everywhere(place: &Place, line: &str, results: &str, stride: usize) -> usize {
    let out = place.path("out");
    let run = |plan: Option<Plan>| -> Output {
        let mut command = place.command(&format!("{line} --out {}", out.display()));
        if let Some(plan) = plan {
            shim::under(&mut command, &out, plan);
        }
        command.output().unwrap()
    };
    let trace = place.path("trace");
    let mut whole = place.command(&format!("{line} --out {}", out.display()));
    shim::traced(&mut whole, &out, &trace);
    let whole = whole.output().unwrap();
    assert!(whole.status.success(), "{}", String::from_utf8_lossy(&whole.stderr));
    let (operations, expected) = (fs::read_to_string(&trace).unwrap().lines().count(), place.tree("out"));
    let answer = String::from_utf8(whole.stdout).unwrap();
    let mut kills = 0;
    for operation in (0..operations).step_by(stride) {
        fs::remove_dir_all(&out).unwrap();
        let killed = run(Some(Plan::Kill(operation)));
        kills += usize::from(killed.status.signal() == Some(9));
        let again = run(None);
        assert!(again.status.success(), "killed at operation {operation}: {}", String::from_utf8_lossy(&again.stderr));
        let found = place.tree("out");
        for file in results.split_whitespace() {
            assert!(
                found[file.as_ref() as &std::path::Path] == expected[file.as_ref() as &std::path::Path],
                "{file} differs, killed at operation {operation}"
            );
        }
        assert_eq!(String::from_utf8(again.stdout).unwrap(), answer, "killed at operation {operation}");
        let names = |tree: &std::collections::BTreeMap<std::path::PathBuf, _>| tree.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&found), names(&expected), "killed at operation {operation}");
    }
    println!("killed at {kills} of {operations} operations");
    kills
}

#[test]
fn a_search_killed_anywhere_ends_with_the_same_results() {
    let place = Place::new();
    let line = format!("lambda-search {TINY} --set run.flip_every=1 --until 4 --window 2..4 --candidates 1e-9,1e-2,2e-2,4e-2,1e-1 --json");
    let kills = kill_everywhere(&place, &line, "search.json search.toml", 3);
    assert!(kills > 40, "{kills}");
}

#[test]
fn a_study_killed_anywhere_ends_with_the_same_results() {
    let place = Place::new();
    place.write(
        "study.toml",
        "reference = \"dense\"\nseeds = [1, 2]\n[[arms]]\nname = \"dense\"\nmethod.name = \"dense\"\n[[arms]]\nname = \"fst\"\n",
    );
    let line = format!("study study.toml {TINY} --set steps=6 --set method.refresh=2 --set run.checkpoint_every=2 --json");
    let kills = kill_everywhere(&place, &line, "study.json study.toml", 3);
    assert!(kills > 60, "{kills}");
}

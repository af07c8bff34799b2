//! Searches and studies killed at file operations from the first to the last: the same command
//! continues and ends with the same results, byte for byte, and the same last checkpoints.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
};

use crate::{
    shim::{self, Plan},
    support::{Place, TINY},
};

/// Distance between the operations to kill at.
const STRIDE: usize = 3;

/// Kills the command `line` at operations below the folder `out`, runs it again, and compares the
/// exit code and the files that `counts` selects. Returns the number of kills.
fn kill_everywhere(
    place: &Place,
    line: &dyn Fn(&Path) -> String,
    counts: fn(&Path) -> bool,
) -> usize {
    let (out, trace) = (place.path("out"), place.path("trace"));
    let code = |line: String| {
        let output = place.command(&line).output().unwrap();
        output.status.code().ok_or_else(|| String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let files = || {
        place
            .tree("out")
            .into_iter()
            .filter(|(path, _)| counts(path))
            .collect::<BTreeMap<PathBuf, _>>()
    };
    let mut whole = place.command(&line(&out));
    shim::traced(&mut whole, &out, &trace);
    let ended = Ok(whole.output().unwrap().status.code().expect("it is not killed"));
    let (expected, operations) = (files(), fs::read_to_string(&trace).unwrap().lines().count());
    let mut kills = 0;
    for operation in (0..operations).step_by(STRIDE) {
        fs::remove_dir_all(&out).unwrap();
        let mut command = place.command(&line(&out));
        shim::under(&mut command, &out, Plan::Kill(operation));
        kills += usize::from(command.output().unwrap().status.signal() == Some(9));
        assert_eq!(code(line(&out)), ended, "killed at operation {operation}");
        let found = files();
        let differs = expected
            .keys()
            .chain(found.keys())
            .find(|path| expected.get(*path) != found.get(*path));
        assert_eq!(differs, None, "killed at operation {operation}");
    }
    println!("killed at {kills} of {operations} operations");
    kills
}

fn is_result(path: &Path) -> bool {
    ["search.json", "search.toml", "study.json", "study.toml"]
        .iter()
        .any(|file| path.ends_with(file))
}

#[test]
fn a_search_killed_anywhere_ends_with_the_same_results() {
    let place = Place::new();
    let line = format!(
        "lambda-search {TINY} --set run.flip_every=1 --until 4 --candidates 1e-9,1e-2,1e-1 --out"
    );
    let kills = kill_everywhere(&place, &|out| format!("{line} {}", out.display()), is_result);
    assert!(kills > 40, "{kills}");
}

#[test]
fn a_study_killed_anywhere_ends_with_the_same_results() {
    let place = Place::new();
    let arms = "[[arms]]\nname = \"dense\"\nmethod.name = \"dense\"\n[[arms]]\nname = \"fst\"\n";
    place.write("study.toml", format!("reference = \"dense\"\nseeds = [1, 2]\n{arms}"));
    let settings = "--set steps=6 --set method.refresh=2 --set run.checkpoint_every=2";
    let line = format!("study study.toml {TINY} {settings} --out");
    let is_end = |path: &Path| {
        is_result(path) || path.components().any(|part| part.as_os_str() == "step-00000006")
    };
    let kills = kill_everywhere(&place, &|out| format!("{line} {}", out.display()), is_end);
    assert!(kills > 60, "{kills}");
}

/// The search, the run that takes its lambda from it, and the time between the two.
#[test]
fn a_run_that_searches_first_killed_anywhere_ends_with_the_same_bits() {
    let place = Place::new();
    let settings =
        "--set method.decay=on-weights --set run.flip_every=1 --set optimizer.warmup_steps=4";
    let begin = format!("train {TINY} {settings} --lambda auto --out");
    let line = |out: &Path| {
        let is_begun = out.join("config.toml").exists();
        format!("{} {}", if is_begun { "resume" } else { &begin }, out.display())
    };
    let is_end = |path: &Path| {
        path.ends_with("config.toml")
            || path.starts_with("checkpoints/step-00000012")
            || is_result(path)
    };
    let kills = kill_everywhere(&place, &line, is_end);
    assert!(kills > 60, "{kills}");
}

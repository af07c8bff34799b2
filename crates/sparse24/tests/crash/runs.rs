//! Searches and studies killed at file operations from the first to the last: the same command
//! continues and ends with the same results, byte for byte, and the same last checkpoints.

use std::path::Path;

use crate::{
    run::kill_everywhere,
    support::{Place, TINY, Tree},
};

/// Distance between the operations to kill at.
const STRIDE: usize = 3;

/// The results below a folder, and the files that `counts` selects.
fn results(place: &Place, out: &str, counts: fn(&Path) -> bool) -> Tree {
    let results = ["search.json", "search.toml", "study.json", "study.toml"];
    let mut tree = place.tree(out);
    tree.retain(|path, _| counts(path) || results.iter().any(|file| path.ends_with(file)));
    tree
}

#[test]
fn a_search_killed_anywhere_ends_with_the_same_results() {
    let place = Place::new();
    let line = format!(
        "lambda-search {TINY} --set run.flip_every=1 --until 4 --candidates 1e-9,1e-2,1e-1 --out"
    );
    let line = |out: &Path| format!("{line} {}", out.display());
    kill_everywhere(&place, STRIDE, &line, &|out| results(&place, out, |_| false));
}

#[test]
fn a_study_killed_anywhere_ends_with_the_same_results() {
    let place = Place::new();
    let arms = "[[arms]]\nname = \"dense\"\nmethod.name = \"dense\"\n[[arms]]\nname = \"fst\"\n";
    place.write("study.toml", format!("reference = \"dense\"\nseeds = [1, 2]\n{arms}"));
    let settings = "--set steps=6 --set method.refresh=2 --set run.checkpoint_every=2";
    let line = format!("study study.toml {TINY} {settings} --out");
    let line = |out: &Path| format!("{line} {}", out.display());
    let is_end = |path: &Path| path.iter().any(|part| part == "step-00000006");
    kill_everywhere(&place, STRIDE, &line, &|out| results(&place, out, is_end));
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
        path.ends_with("config.toml") || path.starts_with("checkpoints/step-00000012")
    };
    kill_everywhere(&place, STRIDE, &line, &|out| results(&place, out, is_end));
}

//! Passes build information to the crate: versions of the libraries that compute or store, and the
//! commit of a release build.
//!
//! Invariant: what cannot be known is left out; the build never fails for it.

use std::{env, fs, path::Path, process::Command};

const LIBRARIES: [&str; 8] = [
    "blake3",
    "half",
    "libm",
    "matrixmultiply",
    "private-gemm-x86",
    "rayon",
    "serde_json",
    "tiktoken-rs",
];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let lock = Path::new("../../Cargo.lock");
    if let Ok(text) = fs::read_to_string(lock) {
        println!("cargo::rerun-if-changed={}", lock.display());
        println!("cargo::rustc-env=SPARSE24_LIBRARIES={}", versions(&text).join(" "));
    }
    // A development build would otherwise recompile after every commit.
    if env::var("PROFILE").is_ok_and(|profile| profile == "release")
        && let Some(commit) = git(&["rev-parse", "HEAD"])
    {
        if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
            println!("cargo::rerun-if-changed={log}");
        }
        println!("cargo::rustc-env=SPARSE24_GIT_COMMIT={commit}");
    }
}

/// `name=version` of each library in a `Cargo.lock`.
fn versions(lock: &str) -> Vec<String> {
    let quoted = |line: &str, key: &str| Some(line.strip_prefix(key)?.trim_matches('"').to_owned());
    let names = lock.lines().filter_map(|line| quoted(line, "name = "));
    let versions = lock
        .lines()
        .skip_while(|line| !line.starts_with("name = "))
        .filter_map(|line| quoted(line, "version = "));
    names
        .zip(versions)
        .filter(|(name, _)| LIBRARIES.contains(&name.as_str()))
        .map(|(name, version)| format!("{name}={version}"))
        .collect()
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git")
        .args(arguments)
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

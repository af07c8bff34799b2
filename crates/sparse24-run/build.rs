//! Passes build information to the crate: versions of the libraries that compute or store, and the
//! commit of a release build.
//!
//! Invariant: what cannot be known is left out; the build never fails for it.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

/// This folder in the repository.
const PREFIX: &str = "crates/sparse24-run/";

/// Those that every build has.
const LIBRARIES: [&str; 6] = ["blake3", "half", "libm", "matrixmultiply", "rayon", "serde_json"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if let Some(lock) = lock()
        && let Ok(text) = fs::read_to_string(&lock)
    {
        println!("cargo::rerun-if-changed={}", lock.display());
        println!("cargo::rustc-env=SPARSE24_LIBRARIES={}", versions(&text).join(" "));
    }
    // A development build would otherwise recompile after every commit.
    if env::var("PROFILE").is_ok_and(|profile| profile == "release")
        && git(&["rev-parse", "--show-prefix"]).as_deref() == Some(PREFIX)
        && let Some(commit) = git(&["rev-parse", "HEAD"])
    {
        if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
            println!("cargo::rerun-if-changed={log}");
        }
        println!("cargo::rustc-env=SPARSE24_GIT_COMMIT={commit}");
    }
}

/// The lock file of the workspace that is built. Cargo compiles a workspace's own packages by paths
/// from its root, and dependencies by absolute ones, whose own lock file is not used.
fn lock() -> Option<PathBuf> {
    let (here, within) = (Path::new(env!("CARGO_MANIFEST_DIR")).join("build.rs"), file!());
    let root = here.ancestors().nth(Path::new(within).components().count())?;
    (Path::new(within).is_relative() && root.join(within) == here).then(|| root.join("Cargo.lock"))
}

/// `name=version` of each library in a `Cargo.lock` that this build has.
fn versions(lock: &str) -> Vec<String> {
    let quoted = |line: &str, key: &str| Some(line.strip_prefix(key)?.trim_matches('"').to_owned());
    let names = lock.lines().filter_map(|line| quoted(line, "name = "));
    let versions = lock
        .lines()
        .skip_while(|line| !line.starts_with("name = "))
        .filter_map(|line| quoted(line, "version = "));
    let is_built = |name: &str| match name {
        "private-gemm-x86" => env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch == "x86_64"),
        "tiktoken-rs" => env::var_os("CARGO_FEATURE_TOKENIZERS").is_some(),
        name => LIBRARIES.contains(&name),
    };
    names
        .zip(versions)
        .filter(|(name, _)| is_built(name))
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

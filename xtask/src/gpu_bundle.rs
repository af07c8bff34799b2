//! `cargo xtask gpu-bundle`: what a GPU host without Rust needs to test and measure the CUDA kernels, and training with them, in one folder: the
//! tests, the benches and the command as stripped binaries, compiled kernels, and `run.sh`. The host's C library must be as recent as this machine's.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use serde_json::Value;

use crate::{
    Result,
    kernels::{self, Selection},
    output,
};

const PACKAGE: &str = "sparse24-cuda";

const RUN: &str = include_str!("gpu_bundle/run.sh");

/// What an earlier bundle is known by, in its `run.sh`.
const MARK: &str = "# sparse24 on a GPU host, without Rust";

pub(crate) fn run(arguments: &[String]) -> Result<ExitCode> {
    let mut selection = Selection::parse(arguments)?;
    if !selection.names.is_empty() {
        return Err("a bundle has all kernels: no names, please".into());
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask lies in no workspace")?;
    let out = selection.out.take().unwrap_or_else(|| root.join("target/gpu-bundle"));
    clear(&out)?;
    // First, so that a bundle that was not finished is known for one.
    fs::write(out.join("run.sh"), RUN)?;
    selection.out = Some(out.join("kernels"));
    let checked = kernels::build(&selection)?;
    let mut size = 0;
    for (name, built) in build(root)? {
        let to = out.join(name);
        output(Command::new("strip").arg("-o").arg(&to).arg(built), root)?;
        size += fs::metadata(&to)?.len();
    }
    println!("{}: {} MB of binaries; `bash run.sh test` there", out.display(), size.div_ceil(1 << 20));
    Ok(checked)
}

/// Makes the folder, without what an earlier bundle left in it; another folder with files in it is not touched.
fn clear(out: &Path) -> Result<()> {
    let is_bundle = fs::read_to_string(out.join("run.sh")).is_ok_and(|text| text.contains(MARK));
    let is_empty = fs::read_dir(out).map_or(true, |mut files| files.next().is_none());
    if !is_bundle && !is_empty {
        return Err(format!("{} holds something that is no bundle", out.display()).into());
    }
    if is_bundle {
        fs::remove_dir_all(out)?;
    }
    Ok(fs::create_dir_all(out.join("benches"))?)
}

/// Builds everything and says where it lies: its path in the bundle, and that of the binary.
fn build(root: &Path) -> Result<Vec<(String, PathBuf)>> {
    let cargo = || Command::new(env!("CARGO"));
    let metadata = output(cargo().args(["metadata", "--no-deps", "--format-version", "1"]), root)?;
    let mut command = cargo();
    command.args(["build", "--release", "-p", PACKAGE, "-p", "sparse24-train", "-p", "sparse24", "--features", "sparse24-train/cuda"]);
    command.args(["--test", "gpu", "--test", "training", "--bin", "sparse24"]);
    command.args(benches(&metadata)?.iter().flat_map(|name| ["--bench", name]));
    let messages = output(command.arg("--message-format=json-render-diagnostics"), root)?;
    messages.lines().filter_map(|line| binary(line).transpose()).collect()
}

/// The benches of the package, from `cargo metadata`.
fn benches(metadata: &str) -> Result<Vec<String>> {
    let metadata: Value = serde_json::from_str(metadata)?;
    let packages = metadata["packages"].as_array().ok_or("cargo metadata without packages")?;
    let targets = packages.iter().filter(|package| package["name"] == PACKAGE).filter_map(|package| package["targets"].as_array());
    let benches = targets.flatten().filter(|target| target["kind"][0] == "bench").filter_map(|target| target["name"].as_str());
    Ok(benches.map(str::to_owned).collect())
}

/// The binary that a message of `cargo build` is about, if it is about one.
fn binary(message: &str) -> Result<Option<(String, PathBuf)>> {
    let message: Value = serde_json::from_str(message)?;
    let (kind, name) = (message["target"]["kind"][0].as_str(), message["target"]["name"].as_str());
    let (Some(kind), Some(name), Some(file)) = (kind, name, message["executable"].as_str()) else { return Ok(None) };
    Ok(Some((if kind == "bench" { format!("benches/{name}") } else { name.to_owned() }, file.into())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn benches_and_binaries_are_told_from_the_rest() {
        let metadata = r#"{"packages": [
            {"name": "sparse24-cuda", "targets": [{"kind": ["lib"], "name": "a"}, {"kind": ["bench"], "name": "b"}, {"kind": ["test"], "name": "gpu"}]},
            {"name": "sparse24-cpu", "targets": [{"kind": ["bench"], "name": "c"}]}]}"#;
        assert_eq!(benches(metadata).unwrap(), ["b"]);
        let message = |kind, executable| format!(r#"{{"target": {{"kind": ["{kind}"], "name": "x"}}, "executable": {executable}}}"#);
        assert_eq!(binary(&message("bench", r#""/t/x-1""#)).unwrap(), Some(("benches/x".into(), "/t/x-1".into())));
        assert_eq!(binary(&message("test", r#""/t/x-1""#)).unwrap(), Some(("x".into(), "/t/x-1".into())));
        assert_eq!(binary(&message("lib", "null")).unwrap(), None);
        assert_eq!(binary(r#"{"reason": "build-finished", "success": true}"#).unwrap(), None);
    }

    #[test]
    fn only_an_earlier_bundle_is_cleared() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("x/kept");
        clear(&folder.path().join("x")).unwrap();
        fs::remove_dir(folder.path().join("x/benches")).unwrap();
        clear(&folder.path().join("x")).unwrap();
        fs::write(&file, "").unwrap();
        assert!(clear(&folder.path().join("x")).is_err() && file.exists());
        fs::write(folder.path().join("x/run.sh"), RUN).unwrap();
        clear(&folder.path().join("x")).unwrap();
        assert!(!file.exists() && folder.path().join("x/benches").is_dir());
    }
}

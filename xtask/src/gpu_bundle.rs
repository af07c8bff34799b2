//! `cargo xtask gpu-bundle`: what a GPU host without Rust needs to test and measure the CUDA
//! kernels, and training with them, in one folder: the tests, the benches and the command as
//! stripped binaries, compiled kernels, and `run.sh`. The host's C library must be as recent as
//! this machine's.

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
    let root =
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask lies in no workspace")?;
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
    println!(
        "{}: {} MB of binaries; `bash run.sh test` there",
        out.display(),
        size.div_ceil(1 << 20)
    );
    Ok(checked)
}

/// Makes the folder, without what an earlier bundle left in it; another folder with files in it is
/// not touched.
fn clear(out: &Path) -> Result<()> {
    let is_bundle = fs::read_to_string(out.join("run.sh")).is_ok_and(|text| text.contains(MARK));
    let is_empty = fs::read_dir(out).map_or(true, |mut files| files.next().is_none());
    if !is_bundle && !is_empty {
        return Err(format!("{} holds something that is no bundle", out.display()).into());
    }
    if is_bundle {
        fs::remove_dir_all(out)?;
    }
    Ok(fs::create_dir_all(out)?)
}

/// Builds everything and says where it lies: its name in the bundle, and the binary's path.
fn build(root: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut command = Command::new(env!("CARGO"));
    command.args([
        "build",
        "--release",
        "-p",
        PACKAGE,
        "-p",
        "sparse24-run",
        "-p",
        "sparse24",
        "--features",
        "sparse24-run/cuda",
    ]);
    command.args(["--test", "gpu", "--test", "training", "--bin", "sparse24"]);
    let messages = output(command.arg("--message-format=json-render-diagnostics"), root)?;
    messages.lines().filter_map(|line| binary(line).transpose()).collect()
}

/// The binary that a message of `cargo build` is about, if it is about one.
fn binary(message: &str) -> Result<Option<(String, PathBuf)>> {
    let message: Value = serde_json::from_str(message)?;
    let named = message["target"]["name"].as_str().zip(message["executable"].as_str());
    Ok(named.map(|(name, file)| (name.to_owned(), file.into())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn binaries_are_told_from_the_rest() {
        let message = |executable| {
            format!(
                r#"{{"target": {{"kind": ["test"], "name": "x"}}, "executable": {executable}}}"#
            )
        };
        assert_eq!(binary(&message(r#""/t/x-1""#)).unwrap(), Some(("x".into(), "/t/x-1".into())));
        assert_eq!(binary(&message("null")).unwrap(), None);
        assert_eq!(binary(r#"{"reason": "build-finished", "success": true}"#).unwrap(), None);
    }

    /// With a sanitizer that complains of a race, and for whom a defect of initcheck's is none.
    #[cfg(unix)]
    #[test]
    fn all_tools_of_the_sanitizer_run_and_each_failure_is_told() {
        use std::os::unix::fs::PermissionsExt;
        const SANITIZER: &str = "#!/usr/bin/env bash\necho \"$*\" >> calls\n\
            case \"$*\" in\n*planted::initcheck*) exit 0;;\n*planted::*) echo \"planted_$2\"; exit 86;;\n*racecheck*) exit 86;;\nesac\n";
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in
            [("run.sh", RUN), ("sparse24", "#!/bin/sh\n"), ("compute-sanitizer", SANITIZER)]
        {
            let file = folder.path().join(name);
            fs::write(&file, text).unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        }
        let path = std::env::var_os("PATH").unwrap();
        let folders = std::iter::once(folder.path().to_owned()).chain(std::env::split_paths(&path));
        let mut command = Command::new("bash");
        command
            .arg(folder.path().join("run.sh"))
            .arg("sanitize")
            .env("PATH", std::env::join_paths(folders).unwrap());
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        let failed: Vec<&str> =
            said.lines().filter_map(|line| line.strip_prefix("== failed: ")).collect();
        let expected = [
            "racecheck over all kernels ended with 86",
            "initcheck did not find the planted defect: exit code 0 instead of 86",
        ];
        assert_eq!(failed, expected);
        let tools = || {
            fs::read_to_string(folder.path().join("calls"))
                .unwrap()
                .lines()
                .filter(|call| call.starts_with("--tool"))
                .count()
        };
        assert_eq!(tools(), 8, "four tools, over all and over a defect");
        assert!(command.arg("memcheck").status().unwrap().success(), "the tool that is named");
        assert_eq!(tools(), 10);
    }

    #[test]
    fn only_an_earlier_bundle_is_cleared() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("x/kept");
        clear(&folder.path().join("x")).unwrap();
        clear(&folder.path().join("x")).unwrap();
        fs::write(&file, "").unwrap();
        assert!(clear(&folder.path().join("x")).is_err() && file.exists());
        fs::write(folder.path().join("x/run.sh"), RUN).unwrap();
        clear(&folder.path().join("x")).unwrap();
        assert!(!file.exists() && folder.path().join("x").is_dir());
    }
}

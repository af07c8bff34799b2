//! `cargo xtask gpu-bundle`: packs a folder for a GPU host without Rust: the GPU tests and the
//! command (with its benchmarks) as stripped binaries, compiled kernels, and `run.sh`, which runs
//! them. The host's C library must be at least as recent as this machine's.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use serde_json::Value;

use crate::{
    Result,
    kernels::{self, Selection},
    output, root,
};

const RUN: &str = include_str!("gpu_bundle/run.sh");

/// A line of `run.sh` that marks a folder as a bundle.
const MARK: &str = "# sparse24 on a GPU host, without Rust";

pub(crate) fn run(mut selection: Selection) -> Result<ExitCode> {
    if !selection.names.is_empty() {
        return Err("a bundle contains all kernels: leave out the names".into());
    }
    let root = root()?;
    let out = selection.out.take().unwrap_or_else(|| root.join("target/gpu-bundle"));
    clear(&out)?;
    // Written first, so that an unfinished bundle is recognized as one.
    fs::write(out.join("run.sh"), RUN)?;
    selection.out = Some(out.join("kernels"));
    let checked = kernels::build(&selection)?;
    let mut size = 0;
    for (name, built) in build(root)? {
        let to = out.join(name);
        output(Command::new("strip").arg("-o").arg(&to).arg(built), root)?;
        size += fs::metadata(&to)?.len();
    }
    let size = size.div_ceil(1 << 20);
    println!("{}: {size} MB of binaries; run `bash run.sh test` on the GPU host", out.display());
    Ok(checked)
}

/// Creates the folder, or empties it if it holds an earlier bundle. Any other folder with files is
/// an error.
fn clear(out: &Path) -> Result<()> {
    let is_bundle = fs::read_to_string(out.join("run.sh")).is_ok_and(|text| text.contains(MARK));
    let is_empty = fs::read_dir(out).map_or(true, |mut files| files.next().is_none());
    if !is_bundle && !is_empty {
        return Err(format!("{} contains files that are not a bundle", out.display()).into());
    }
    if is_bundle {
        fs::remove_dir_all(out)?;
    }
    Ok(fs::create_dir_all(out)?)
}

/// Builds the binaries. Returns the name of each in the bundle, and its path.
fn build(root: &Path) -> Result<Vec<(String, PathBuf)>> {
    const ARGUMENTS: &str = "build --release -p sparse24-cuda -p sparse24-run -p sparse24 \
        -p sparse24-tests --features sparse24-run/cuda,sparse24-tests/cuda --test gpu \
        --test gpu_training --test conformance_cuda --bin sparse24 \
        --message-format=json-render-diagnostics";
    let messages = output(Command::new(env!("CARGO")).args(ARGUMENTS.split_whitespace()), root)?;
    let mut binaries = Vec::new();
    for line in messages.lines() {
        let message: Value = serde_json::from_str(line)?;
        if let (Some(name), Some(file)) =
            (message["target"]["name"].as_str(), message["executable"].as_str())
        {
            binaries.push((name.to_owned(), file.into()));
        }
    }
    Ok(binaries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clear_only_deletes_bundles() {
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

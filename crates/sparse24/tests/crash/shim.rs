//! Compiles `shim.c` and preloads it into a command.

use std::{
    fmt,
    path::{Path, PathBuf},
    process::Command,
    sync::LazyLock,
};

/// Treatment of the operations that change files below a folder, or of what is sent to other ranks,
/// counted from 0.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Plan {
    /// Nothing; they are only counted.
    Healthy,
    /// The process dies before this one; a write is half done.
    Kill(usize),
    /// The same, but the process is stopped.
    Stop(usize),
    /// The process dies this many microseconds after this one.
    KillLater(usize, u64),
    /// This one fails with an error number.
    Fail(usize, i32),
    /// Every Nth one fails.
    Every(usize, i32),
    /// The first write from this one on writes half.
    Short(usize),
    /// From this one on, operations that need disk space fail.
    Full(usize),
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Healthy => write!(f, "none"),
            Self::Kill(at) => write!(f, "kill {at}"),
            Self::Stop(at) => write!(f, "stop {at}"),
            Self::KillLater(at, microseconds) => write!(f, "later {at} {microseconds}"),
            Self::Fail(at, error) => write!(f, "fail {at} {error}"),
            Self::Every(count, error) => write!(f, "every {count} {error}"),
            Self::Short(at) => write!(f, "short {at}"),
            Self::Full(at) => write!(f, "full {at}"),
        }
    }
}

/// Path of the compiled shim.
static SHIM: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (source, library) =
        (Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/crash/shim.c"), folder.join("shim.so"));
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-o"])
        .arg(&library)
        .arg(source)
        .status();
    assert!(compiled.expect("a C compiler, which Rust needs for linking").success());
    library
});

/// Runs a command under the shim, which applies the plan to paths that start with `root`.
pub(crate) fn under(command: &mut Command, root: &Path, plan: Plan) {
    command.env("LD_PRELOAD", &*SHIM).env("SHIM_ROOT", root).env("SHIM_PLAN", plan.to_string());
}

/// Writes the operations to a file, one per line: name and path.
pub(crate) fn traced(command: &mut Command, root: &Path, trace: &Path) {
    under(command, root, Plan::Healthy);
    command.env("SHIM_TRACE", trace);
}

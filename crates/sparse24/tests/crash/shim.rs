//! `shim.c`, compiled once, and how a command is put under it.

use std::{
    fmt,
    path::{Path, PathBuf},
    process::Command,
    sync::LazyLock,
};

/// What happens to the operations that change files below a folder, counted from 0.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Plan {
    /// They are counted.
    Healthy,
    /// The process dies before this one; a write is half done.
    Kill(usize),
    /// The process dies so many microseconds after this one.
    KillLater(usize, u64),
    /// This one fails with an error number.
    Fail(usize, i32),
    /// Of so many, the last fails, again and again.
    Every(usize, i32),
    /// The next write from this one on does half.
    Short(usize),
    /// From this one on, whatever takes room fails.
    Full(usize),
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Healthy => write!(f, "none"),
            Self::Kill(at) => write!(f, "kill {at}"),
            Self::KillLater(at, microseconds) => write!(f, "later {at} {microseconds}"),
            Self::Fail(at, error) => write!(f, "fail {at} {error}"),
            Self::Every(count, error) => write!(f, "every {count} {error}"),
            Self::Short(at) => write!(f, "short {at}"),
            Self::Full(at) => write!(f, "full {at}"),
        }
    }
}

/// The compiled shim, in a folder that lives as long as the tests.
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

/// Puts a command under the shim: operations on paths that begin with `root` are counted and
/// planned.
pub(crate) fn under(command: &mut Command, root: &Path, plan: Plan) {
    command.env("LD_PRELOAD", &*SHIM).env("SHIM_ROOT", root).env("SHIM_PLAN", plan.to_string());
}

/// Also writes the operations to a file, one a line: its name and the path.
pub(crate) fn traced(command: &mut Command, root: &Path, trace: &Path) {
    under(command, root, Plan::Healthy);
    command.env("SHIM_TRACE", trace);
}

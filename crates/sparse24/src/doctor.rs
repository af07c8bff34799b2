//! `sparse24 doctor`: reports what this machine offers and whether training would run on it.

use std::{
    collections::BTreeMap,
    env,
    fmt::Display,
    fs,
    num::NonZeroUsize,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sparse24_run::{
    disk,
    machine::{self, Memory},
    processor::Simd,
    run::lock,
};
use sparse24_train::backend::{BACKENDS, BackendEntry, BackendSettings};

use crate::{
    failure::{Exit, Failure, Result},
    output::{print_json, say},
};

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "wgpu")]
mod wgpu;

/// Report the hardware, the backends and whether runs can be written here
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Folder where runs would be written
    #[arg(long, default_value = "runs")]
    out: PathBuf,
    /// Index of the GPU to open, in the driver's order; exits with 1 if no backend can open it
    /// [default: 0, if there is one]
    #[arg(long, value_name = "NUMBER")]
    gpu: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Survey a GPU platform for another `doctor`
    #[arg(long, hide = true)]
    platform: Option<String>,
}

/// Surveys a GPU platform: JSON and lines of text.
type Survey = fn() -> (Value, Vec<String>);

/// The GPU platforms of this build, by their key in the JSON report and the name of their backend.
const PLATFORMS: &[(&str, Survey)] = &[
    #[cfg(feature = "cuda")]
    ("cuda", cuda::survey),
    #[cfg(feature = "wgpu")]
    ("wgpu", wgpu::survey),
];

#[derive(Serialize)]
struct Report {
    version: &'static str,
    threads: usize,
    simd: String,
    /// In bytes.
    memory: Option<Memory>,
    memory_available_mib: Option<u64>,
    #[serde(flatten)]
    platforms: BTreeMap<&'static str, Value>,
    backends: Vec<Backend>,
    out: PathBuf,
    problem: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct Backend {
    name: String,
    /// How sparse products are computed; absent if the backend cannot be opened.
    sparse_products: Option<String>,
    problem: Option<String>,
}

pub(crate) fn run(args: &Args) -> Result {
    let settings = BackendSettings { gpu: args.gpu.unwrap_or(0), ..BackendSettings::default() };
    let (mut lines, mut platforms) = (Vec::new(), BTreeMap::new());
    let mut backends = Vec::new();
    for entry in BACKENDS {
        let Some(&(key, survey)) = PLATFORMS.iter().find(|(key, _)| *key == entry.name) else {
            backends.push(open(entry, settings.clone()));
            continue;
        };
        match args.platform.as_deref() {
            Some(name) if name == key => {
                let (report, text) = survey();
                return print_json(&(report, text, open(entry, settings)));
            }
            Some(_) => {}
            None => {
                let (report, text, backend) = surveyed(key, settings.gpu);
                platforms.insert(key, report);
                lines.extend(text);
                backends.push(backend);
            }
        }
    }
    let memory = machine::memory();
    let is_open = |of: &Backend| of.name != "cpu" && of.problem.is_none();
    let missing = args.gpu.filter(|_| !backends.iter().any(is_open));
    let missing = missing.map(|number| format!("--gpu {number}: no backend can open this GPU"));
    let folder = write_problem(&args.out);
    let is_writable = folder.is_none();
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        threads: thread::available_parallelism().map_or(1, NonZeroUsize::get),
        simd: Simd::detect().to_string(),
        memory_available_mib: memory.as_ref().map(|memory| memory.available >> 20),
        memory,
        platforms,
        backends,
        out: args.out.clone(),
        problem: folder.or(missing),
    };
    if args.json {
        print_json(&report)?;
    } else {
        say!("sparse24      {}", report.version);
        say!("threads       {}", report.threads);
        say!("SIMD          {}", report.simd);
        match &report.memory {
            Some(memory) => {
                say!("memory        {} MiB available; {memory}", memory.available >> 20)
            }
            None => say!("memory        unknown on this system"),
        }
        for line in lines {
            say!("{line}");
        }
        if PLATFORMS.is_empty() {
            say!("GPU           not supported by this build (features `cuda` and `wgpu`)");
        }
        for Backend { name, sparse_products, problem } in &report.backends {
            match sparse_products {
                Some(how) => say!("backend {name:<5} ready; sparse products are {how}"),
                None => say!("backend {name:<5} {}", problem.as_deref().unwrap_or_default()),
            }
        }
        if is_writable {
            say!("runs          {} can be written", args.out.display());
        }
    }
    report.problem.map_or(Ok(()), |problem| Err(Failure::new(Exit::Refuted, problem)))
}

/// Surveys a platform in a process of its own: a driver that crashes must not end this one.
fn surveyed(key: &str, gpu: usize) -> (Value, Vec<String>, Backend) {
    let survey = |program| {
        let mut command = Command::new(program);
        command.args(["doctor", "--platform", key, "--gpu", &gpu.to_string()]);
        command.stdin(Stdio::null()).stderr(Stdio::inherit()).output()
    };
    let problem = match env::current_exe().and_then(survey) {
        Ok(output) => match serde_json::from_slice(&output.stdout) {
            Ok(found) => return found,
            Err(_) => format!("crashed: its driver ended a process with {}", output.status),
        },
        Err(error) => format!("cannot be surveyed: {error}"),
    };
    let (report, problem) = (json!({ "problem": problem }), Some(problem));
    (report, Vec::new(), Backend { name: key.to_owned(), sparse_products: None, problem })
}

fn open(entry: &BackendEntry, settings: BackendSettings) -> Backend {
    let device = (entry.open)(settings).map(|backend| backend.device());
    Backend {
        name: entry.name.to_owned(),
        sparse_products: device.as_ref().ok().map(|device| device.sparse_products.to_owned()),
        problem: device.err().map(|error| error.to_string()),
    }
}

/// Why nothing can be written at or below the path; leaves nothing there.
fn write_problem(out: &Path) -> Option<String> {
    let existing = out
        .ancestors()
        .map(|path| if path.as_os_str().is_empty() { Path::new(".") } else { path })
        .find(|path| path.exists() || path.is_symlink())?;
    if !fs::metadata(existing).is_ok_and(|metadata| metadata.is_dir()) {
        let (existing, out) = (existing.display(), out.display());
        return Some(format!("{existing} is not a folder: runs cannot be written to {out}"));
    }
    let failed = |error: &dyn Display| format!("{} cannot be written: {error}", existing.display());
    let folder = match tempfile::tempdir_in(existing) {
        Ok(folder) => folder,
        Err(error) => return Some(failed(&error)),
    };
    // What a run does; an empty file can be made on a full disk.
    let written = lock(folder.path())
        .and_then(|_lock| disk::write_atomically(&folder.path().join("file"), &[1; 1 << 16]))
        .and_then(|()| disk::sync_directory(existing));
    written.err().map(|error| failed(&error))
}

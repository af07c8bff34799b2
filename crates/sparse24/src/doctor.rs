//! `sparse24 doctor`: what this machine offers, and whether training would run on it.

use std::{env, ffi::OsString, fs, num::NonZeroUsize, path::PathBuf, thread};

use serde::Serialize;
use sparse24_cpu::Simd;
use sparse24_run::machine;
use sparse24_train::backend::{BACKENDS, BackendEntry, BackendSettings};

use crate::{
    failure::{Exit, Failure},
    output::say,
};

#[cfg(feature = "cuda")]
mod cuda;

/// Report the hardware, the backends and whether a run could be written here
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Where runs would be written
    #[arg(long, default_value = "runs")]
    out: PathBuf,
    /// Folders with CUDA's libraries, as the setting `backend.libraries`
    #[arg(long, value_name = "FOLDERS")]
    libraries: Option<OsString>,
    /// The number of the GPU that the backend is opened on, as its driver counts
    #[arg(long, value_name = "NUMBER", default_value = "0")]
    gpu: usize,
    /// One JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    version: &'static str,
    threads: usize,
    simd: String,
    memory_available_mib: Option<u64>,
    #[cfg(feature = "cuda")]
    cuda: cuda::Cuda,
    backends: Vec<Backend>,
    out: PathBuf,
    problem: Option<String>,
}

#[derive(Serialize)]
struct Backend {
    name: &'static str,
    /// How it computes them; nothing where it cannot be opened.
    sparse_products: Option<&'static str>,
    problem: Option<String>,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let libraries: Vec<PathBuf> = args.libraries.iter().flat_map(env::split_paths).collect();
    #[cfg(feature = "cuda")]
    let cuda = cuda::Cuda::of_machine(&libraries);
    let settings = BackendSettings { gpu: args.gpu, libraries, ..BackendSettings::default() };
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        threads: thread::available_parallelism().map_or(1, NonZeroUsize::get),
        simd: Simd::detect().to_string(),
        memory_available_mib: machine::memory().map(|memory| memory.available >> 20),
        #[cfg(feature = "cuda")]
        cuda,
        backends: BACKENDS.iter().map(|entry| opened(entry, settings.clone())).collect(),
        out: args.out.clone(),
        problem: unwritable(&args.out),
    };
    if args.json {
        say!("{}", serde_json::to_string_pretty(&report).expect("plain values"));
    } else {
        say!("sparse24      {}", report.version);
        say!("threads       {}", report.threads);
        say!("SIMD          {}", report.simd);
        match report.memory_available_mib {
            Some(mib) => say!("memory        {mib} MiB available"),
            None => say!("memory        unknown on this system"),
        }
        #[cfg(feature = "cuda")]
        for line in report.cuda.lines() {
            say!("{line}");
        }
        if cfg!(not(feature = "cuda")) {
            say!("CUDA          not in this build: the feature `cuda` was left out");
        }
        for Backend { name, sparse_products, problem } in &report.backends {
            match (sparse_products, problem) {
                (Some(how), _) => say!("backend {name:<5} ready; sparse products are {how}"),
                (None, problem) => {
                    say!("backend {name:<5} {}", problem.as_deref().unwrap_or_default())
                }
            }
        }
        // Otherwise it is the error.
        if report.problem.is_none() {
            say!("runs          {} can be written", args.out.display());
        }
    }
    match report.problem {
        None => Ok(()),
        Some(problem) => Err(Failure::new(Exit::Refuted, problem)),
    }
}

fn opened(entry: &BackendEntry, settings: BackendSettings) -> Backend {
    let device = (entry.open)(settings).map(|backend| backend.device());
    Backend {
        name: entry.name,
        sparse_products: device.as_ref().ok().map(|device| device.sparse_products),
        problem: device.err().map(|error| error.to_string()),
    }
}

/// Why nothing could be written at or below the path, without leaving anything there.
fn unwritable(out: &std::path::Path) -> Option<String> {
    let existing = out
        .ancestors()
        .map(|path| if path.as_os_str().is_empty() { std::path::Path::new(".") } else { path })
        .find(|path| path.exists())?;
    if !fs::metadata(existing).is_ok_and(|metadata| metadata.is_dir()) {
        return Some(format!(
            "{} is no folder: runs cannot be written to {}",
            existing.display(),
            out.display()
        ));
    }
    tempfile::tempfile_in(existing)
        .err()
        .map(|error| format!("{} cannot be written: {error}", existing.display()))
}

//! `cargo xtask kernels`: compiles every CUDA kernel for every architecture it supports, with NVRTC
//! and without a GPU, and checks the compiler's log and the machine code. Findings are undeclared
//! spills and local memory, warnings, serialized `wgmma`, missing instructions, and kernels with
//! programmatic dependent launch that access memory before they wait. Results are not checked; that
//! needs a GPU (`cargo xtask gpu-bundle`).

use std::{collections::HashMap, env, iter, path::PathBuf, process::ExitCode, time::Instant};

use clap::builder::PossibleValuesParser;
use rayon::prelude::*;
use sparse24_cuda::{
    Architecture, Compiled, compile,
    kernels::{SOURCES, Source, Start},
    library::Library,
    spmm24::shared_memory,
};

use crate::Result;

mod disassembler;
mod log;

use disassembler::Disassembler;
use log::Log;

/// The kernels to compile, and where to save the machine code.
#[derive(Debug, clap::Args)]
pub(crate) struct Selection {
    /// Files of kernels, without `.cu` [default: all]
    #[arg(value_parser = PossibleValuesParser::new(SOURCES.iter().map(|source| source.name)),
        hide_possible_values = true)]
    pub(crate) names: Vec<String>,
    /// An architecture [default: all]; may be repeated
    #[arg(long = "arch", value_name = "ARCHITECTURE", value_parser = architecture)]
    architectures: Vec<Architecture>,
    /// Folder for the machine code; `SPARSE24_KERNEL_CACHE` may name it
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
}

impl Selection {
    fn takes(&self, source: &Source, architecture: Architecture) -> bool {
        (self.names.is_empty() || self.names.iter().any(|name| name == source.name))
            && (self.architectures.is_empty() || self.architectures.contains(&architecture))
    }
}

fn architecture(name: &str) -> std::result::Result<Architecture, String> {
    let known = Architecture::ALL.map(Architecture::name).join(", ");
    let found = Architecture::ALL.into_iter().find(|architecture| architecture.name() == name);
    found.ok_or_else(|| format!("expected one of {known}"))
}

/// Compiles, prints a table and every finding, and saves the machine code; fails if there is a
/// finding.
pub(crate) fn build(selection: &Selection) -> Result<ExitCode> {
    Library::Nvrtc.load()?;
    let pairs = SOURCES
        .iter()
        .flat_map(|source| source.serves.iter().map(move |&architecture| (source, architecture)));
    let jobs: Vec<_> =
        pairs.filter(|&(source, architecture)| selection.takes(source, architecture)).collect();
    let disassembler = Disassembler::find();
    let mut findings = Vec::new();
    println!(
        "{:<32} {:<8} {:>9} {:>7} {:>7} {:>6} {:>6}",
        "kernel", "arch", "registers", "shared", "spills", "stack", "ms"
    );
    let compile = |&(source, architecture): &(&Source, Architecture)| {
        let start = Instant::now();
        let compiled = compile(source, architecture);
        let milliseconds = start.elapsed().as_millis();
        let checked = match (&compiled, &disassembler) {
            (Ok(compiled), Some(by)) => {
                check_code(source, architecture, compiled, by).map_err(|error| error.to_string())
            }
            _ => Ok(Vec::new()),
        };
        (compiled, milliseconds, checked)
    };
    let results: Vec<_> = jobs.par_iter().map(compile).collect();
    for (&(source, architecture), (compiled, milliseconds, checked)) in jobs.iter().zip(results) {
        let found = match compiled {
            Err(error) => vec![error.to_string()],
            Ok(compiled) => {
                let mut log = Log::read(&compiled.log);
                for function in &mut log.functions {
                    function.shared += shared_memory(&function.name);
                }
                // The time is that of the whole file.
                let times = iter::once(milliseconds.to_string()).chain(iter::repeat(String::new()));
                for (function, time) in log.functions.iter().zip(times) {
                    let fits = function.shared <= architecture.shared_memory();
                    println!(
                        "{:<32} {:<8} {function} {time:>6}{}",
                        function.name,
                        architecture.name(),
                        if fits { "" } else { "  (more shared memory than here: not offered)" }
                    );
                }
                if let Some(folder) = &selection.out {
                    let failed = |error| format!("{}: {error}", folder.display());
                    compiled.keep(folder).map_err(failed)?;
                }
                let mut found = log.findings(source.entries, source.local_memory);
                found.extend(checked?);
                found
            }
        };
        let place = format!("kernels/{}.cu, {architecture}", source.name);
        findings.extend(found.iter().map(|what| format!("{place}: {what}")));
    }
    if disassembler.is_none() {
        let what = "machine code is not checked: no nvdisasm beside NVRTC, on the PATH or in \
                    CUDA_HOME/bin; install CUDA 13, or `pip install nvidia-cuda-nvdisasm` beside \
                    nvidia-cuda-nvrtc";
        if env::var_os("CI").is_some() {
            findings.push(what.to_owned());
        } else {
            println!("skipped: {what}");
        }
    }
    findings.iter().for_each(|finding| println!("{finding}"));
    println!("kernels: {} files compiled, {} findings", jobs.len(), findings.len());
    Ok(if findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The findings about the machine code of one file.
fn check_code(
    source: &Source,
    architecture: Architecture,
    compiled: &Compiled,
    disassembler: &Disassembler,
) -> Result<Vec<String>> {
    let early = source.start() == Start::Early && architecture.starts_early();
    if source.instructions.is_empty() && !early {
        return Ok(Vec::new());
    }
    let text = disassembler.read(&compiled.file_name, &compiled.cubin)?;
    let mut found = missing(source, architecture, &text);
    if early {
        let hasty = disassembler::access_before_wait(&text).into_iter();
        found.extend(
            hasty.map(|entry| format!("{entry} starts early and accesses memory before it waits")),
        );
        let constant = disassembler::constant_loads(&text).into_iter();
        let what = "starts early and loads global memory as constant, which may still change";
        found.extend(constant.map(|entry| format!("{entry} {what}")));
    }
    Ok(found)
}

/// One finding for every instruction that a kernel must contain and does not.
fn missing(source: &Source, architecture: Architecture, text: &str) -> Vec<String> {
    let code: HashMap<&str, &str> = disassembler::entries(text).collect();
    let lacking = |entry: &'static str| {
        let code = code.get(entry).copied().unwrap_or_default();
        let names = source.instructions_of(entry, architecture);
        names
            .filter(move |name| !disassembler::contains(code, name))
            .map(move |name| format!("the machine code of {entry} has no {name}"))
    };
    source.entries.iter().flat_map(|&entry| lacking(entry)).collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use sparse24_cuda::{
        Error,
        kernels::{Contraction, Instruction},
    };

    use super::*;
    use crate::Task;

    #[test]
    fn a_selection_narrows() {
        let taken = |line: &str| {
            let words = ["xtask", "kernels"].into_iter().chain(line.split_whitespace());
            let Ok(Task::Kernels(selection)) = Task::try_parse_from(words) else { return None };
            let other = Source { name: "other", ..SOURCES[0] };
            let count = |source| {
                Architecture::ALL.into_iter().filter(|&a| selection.takes(source, a)).count()
            };
            Some([SOURCES.iter().map(count).sum::<usize>(), count(&other)])
        };
        let all = Architecture::ALL.len();
        assert_eq!(taken(""), Some([all * SOURCES.len(), all]));
        assert_eq!(taken("flip_count --arch sm_80 --arch sm_90a"), Some([2, 0]));
        assert_eq!([taken("no_such"), taken("--arch sm_70")], [None, None]);
    }

    #[test]
    fn every_kernel_must_contain_its_instructions() {
        let source = SOURCES.iter().find(|source| source.name == "spmm24_sm90").unwrap();
        let text = |lacking: &str| -> String {
            let code = |entry: &str| {
                let has = entry != lacking && !entry.contains("gather");
                if has { "HGMMA.SP.64x192x32 R24 ;" } else { "FADD R1, R1, R2 ;" }
            };
            let entries = source.entries.iter();
            entries.map(|entry| format!("\n.text.{entry}:\n /*0*/ {}\n", code(entry))).collect()
        };
        assert_eq!(missing(source, Architecture::Sm90a, &text("none")), [""; 0]);
        let found = missing(source, Architecture::Sm90a, &text("spmm24_straight_320"));
        assert_eq!(found, ["the machine code of spmm24_straight_320 has no HGMMA.SP"]);
        assert_eq!(missing(source, Architecture::Sm90a, "").len(), source.entries.len());
        let attention = SOURCES.iter().find(|source| source.name == "attention_forward").unwrap();
        assert_eq!(missing(attention, Architecture::Sm90a, "").len(), attention.entries.len());
        assert_eq!(missing(attention, Architecture::Sm80, ""), [""; 0]);
    }

    /// Guards the logs in the tests of `log` against a newer compiler that writes something else.
    #[test]
    fn a_bad_kernel_is_found_in_the_log_of_the_compiler() {
        const TEXT: &str = "extern \"C\" __global__ void stacks(float* y, int n) {\n\
                            volatile float a[16]; int unused;\n\
                            a[n & 15] = y[0]; y[0] = a[n / 16 & 15];\n\
                            asm volatile(\"setmaxnreg.dec.sync.aligned.u32 40;\"); }";
        let source = Source {
            name: "bad",
            kind: sparse24_cuda::kernels::Kind::Copy,
            text: TEXT,
            entries: &["stacks"],
            serves: &[],
            contraction: Contraction::Off,
            instructions: &[Instruction {
                name: "HGMMA",
                kernels: "stacks",
                on: &Architecture::ALL,
            }],
            local_memory: 0,
        };
        match compile(&source, Architecture::Sm90a) {
            Err(error @ Error::Library { .. }) => println!("skipped: {error}"),
            Err(error) => panic!("{error}"),
            Ok(compiled) => {
                let log = Log::read(&compiled.log);
                let mut found = log.findings(source.entries, source.local_memory);
                let mut expected = vec!["stack", "warning", "C7508"];
                if let Some(disassembler) = Disassembler::find() {
                    let sm90a = Architecture::Sm90a;
                    found.extend(check_code(&source, sm90a, &compiled, &disassembler).unwrap());
                    expected.push("no HGMMA");
                }
                for what in expected {
                    let is_found = found.iter().any(|finding| finding.contains(what));
                    assert!(is_found, "{what} is missing in {found:?}");
                }
            }
        }
    }
}

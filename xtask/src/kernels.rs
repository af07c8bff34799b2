//! `cargo xtask kernels`: compiles every CUDA kernel for every architecture that it serves, with
//! NVRTC and no GPU, and reads what the compiler says about it. A spill, local memory, a warning, a
//! serialised `wgmma`, a missing instruction or an early kernel that does not wait fails the task.
//! What a kernel computes is not looked at: that wants a GPU (`cargo xtask gpu-bundle`).

use std::{
    collections::HashMap,
    env,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Instant,
};

use sparse24_cuda::{
    Architecture, Compiled, Error, compile,
    kernels::{SOURCES, Source, Start},
    library::Library,
};

use crate::Result;

mod disassembler;
mod log;

use disassembler::Disassembler;
use log::Log;

/// What to compile, and where to keep it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Selection {
    /// Sources by name; all if empty.
    pub(crate) names: Vec<String>,
    /// All if empty.
    pub(crate) architectures: Vec<Architecture>,
    /// A folder that can serve as `SPARSE24_KERNEL_CACHE`.
    pub(crate) out: Option<PathBuf>,
}

impl Selection {
    pub(crate) fn parse(arguments: &[String]) -> Result<Self> {
        let mut selection = Self::default();
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--out" => {
                    selection.out = Some(arguments.next().ok_or("--out wants a folder")?.into())
                }
                "--arch" => selection
                    .architectures
                    .push(architecture(arguments.next().ok_or("--arch wants an architecture")?)?),
                option if option.starts_with('-') => {
                    return Err(format!("unknown option {option}; known: --arch, --out").into());
                }
                name if SOURCES.iter().any(|source| source.name == name) => {
                    selection.names.push(name.to_owned())
                }
                name => {
                    return Err(
                        format!("there is no kernels/{name}.cu in the table of kernels").into()
                    );
                }
            }
        }
        Ok(selection)
    }

    fn takes(&self, source: &Source, architecture: Architecture) -> bool {
        (self.names.is_empty() || self.names.iter().any(|name| name == source.name))
            && (self.architectures.is_empty() || self.architectures.contains(&architecture))
    }
}

fn architecture(name: &str) -> Result<Architecture> {
    let known = Architecture::ALL.map(Architecture::name).join(", ");
    let found = Architecture::ALL.into_iter().find(|architecture| architecture.name() == name);
    found.ok_or_else(|| format!("unknown architecture {name}; known: {known}").into())
}

pub(crate) fn run(arguments: &[String]) -> Result<ExitCode> {
    build(&Selection::parse(arguments)?)
}

/// Compiles, prints the table and every finding, keeps the code; fails if there is a finding.
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
    for ((source, architecture), (compiled, milliseconds)) in jobs.iter().zip(compile_all(&jobs)) {
        let mut found = match compiled {
            Err(error) => vec![error.to_string()],
            Ok(compiled) => {
                let log = Log::read(&compiled.log);
                for (i, function) in log.functions.iter().enumerate() {
                    let of_file = if i == 0 { milliseconds.to_string() } else { String::new() };
                    println!(
                        "{:<32} {:<8} {function} {of_file:>6}",
                        function.name,
                        architecture.name()
                    );
                }
                keep(&compiled, selection.out.as_deref())?;
                let mut found = log.findings(source.entries, source.local_memory);
                if let Some(disassembler) = &disassembler {
                    found.extend(wrong_instructions(
                        source,
                        *architecture,
                        &compiled,
                        disassembler,
                    )?);
                }
                found
            }
        };
        found
            .iter_mut()
            .for_each(|what| *what = format!("kernels/{}.cu, {architecture}: {what}", source.name));
        findings.append(&mut found);
    }
    if disassembler.is_none() {
        let what = "instructions are not looked at: there is no nvdisasm beside NVRTC, on the PATH or in CUDA_HOME/bin; install CUDA 13, or \
                    `pip install nvidia-cuda-nvdisasm` beside nvidia-cuda-nvrtc";
        if env::var_os("CI").is_some() {
            findings.push(what.to_owned())
        } else {
            println!("skipped: {what}")
        }
    }
    findings.iter().for_each(|finding| println!("{finding}"));
    println!("kernels: {} files compiled, {} findings", jobs.len(), findings.len());
    Ok(if findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What each became and its milliseconds, in the order given; each thread takes the next.
fn compile_all(
    jobs: &[(&Source, Architecture)],
) -> Vec<(std::result::Result<Compiled, Error>, u128)> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        while let (at, Some(&(source, architecture))) = {
            let at = next.fetch_add(1, Ordering::Relaxed);
            (at, jobs.get(at))
        } {
            let start = Instant::now();
            done.push((at, compile(source, architecture), start.elapsed().as_millis()));
        }
        done
    };
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let mut done: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers
            .into_iter()
            .flat_map(|worker| worker.join().expect("compiling does not panic"))
            .collect()
    });
    done.sort_by_key(|&(at, ..)| at);
    done.into_iter().map(|(_, compiled, milliseconds)| (compiled, milliseconds)).collect()
}

fn keep(compiled: &Compiled, folder: Option<&Path>) -> Result<()> {
    match folder {
        None => Ok(()),
        Some(folder) => {
            compiled.keep(folder).map_err(|error| format!("{}: {error}", folder.display()).into())
        }
    }
}

/// What the machine code should have, and where it does what it should not.
fn wrong_instructions(
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
    let hasty = disassembler::hasty(&text).into_iter().filter(|_| early);
    found.extend(
        hasty.map(|entry| format!("{entry} starts early and touches memory before it waits")),
    );
    let trusting = disassembler::trusting(&text).into_iter().filter(|_| early);
    found.extend(trusting.map(|entry| {
        format!("{entry} starts early and loads as constants what may be written while it waits")
    }));
    Ok(found)
}

/// Of every kernel, the instructions that it should have and has not.
fn missing(source: &Source, architecture: Architecture, text: &str) -> Vec<String> {
    let code: HashMap<&str, &str> = disassembler::entries(text).collect();
    let wanted = source.entries.iter().flat_map(|&entry| {
        source.instructions_of(entry, architecture).map(move |name| (entry, name))
    });
    let has = |(entry, name): &(&str, &str)| {
        code.get(entry).is_some_and(|code| disassembler::contains(code, name))
    };
    wanted
        .filter(|wanted| !has(wanted))
        .map(|(entry, name)| format!("the machine code of {entry} has no {name}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use sparse24_cuda::kernels::{Contraction, Instruction};

    use super::*;

    fn selection(line: &str) -> Result<Selection> {
        Selection::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn a_selection_narrows() {
        let all = selection("").unwrap();
        let some = selection("flip_count --arch sm_80 --arch sm_90a --out target/x").unwrap();
        assert_eq!(some.out.as_deref(), Some(Path::new("target/x")));
        let other = Source { name: "other", ..SOURCES[0] };
        let flip = SOURCES.iter().find(|source| source.name == "flip_count").unwrap();
        let taken = |selection: &Selection, source| {
            Architecture::ALL.into_iter().filter(|&a| selection.takes(source, a)).count()
        };
        assert_eq!(
            [taken(&all, &other), taken(&some, flip), taken(&some, &other)],
            [Architecture::ALL.len(), 2, 0]
        );
        for wrong in ["no_such", "--arch sm_70", "--arch", "--out", "--fast"] {
            assert!(selection(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_instruction_is_looked_for_in_each_kernel_and_where_it_should_be() {
        let source = SOURCES.iter().find(|source| source.name == "spmm24_sm90").unwrap();
        let text = |lacking: &str| -> String {
            let code = |entry: &str| {
                if entry == lacking || entry.contains("gather") {
                    "FADD R1, R1, R2 ;"
                } else {
                    "HGMMA.SP.64x192x32 R24 ;"
                }
            };
            source
                .entries
                .iter()
                .map(|entry| format!("\n.text.{entry}:\n /*0*/ {}\n", code(entry)))
                .collect()
        };
        assert_eq!(missing(source, Architecture::Sm90a, &text("none")), [""; 0]);
        let found = missing(source, Architecture::Sm90a, &text("spmm24_straight_320"));
        assert_eq!(found, ["the machine code of spmm24_straight_320 has no HGMMA.SP"]);
        assert_eq!(
            missing(source, Architecture::Sm90a, "").len(),
            5,
            "what is not there has nothing"
        );
        let attention = SOURCES.iter().find(|source| source.name == "attention_forward").unwrap();
        assert_eq!(missing(attention, Architecture::Sm90a, "").len(), attention.entries.len());
        assert_eq!(missing(attention, Architecture::Sm80, ""), [""; 0]);
    }

    /// The compiler's own words, where there is a compiler: the texts of `log` could grow old.
    #[test]
    fn what_the_compiler_says_of_a_bad_kernel_is_found() {
        const TEXT: &str = "extern \"C\" __global__ void stacks(float* y, int n) {\n\
                            volatile float a[16]; int unused; a[n & 15] = y[0]; y[0] = a[n / 16 & 15];\n\
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
                let mut found =
                    Log::read(&compiled.log).findings(source.entries, source.local_memory);
                let disassembler = Disassembler::find();
                if let Some(disassembler) = &disassembler {
                    found.extend(
                        wrong_instructions(&source, Architecture::Sm90a, &compiled, disassembler)
                            .unwrap(),
                    );
                }
                for what in ["stack", "warning", "C7508"] {
                    assert!(
                        found.iter().any(|finding| finding.contains(what)),
                        "{what} is missing in {found:?}"
                    );
                }
                assert_eq!(
                    found.iter().any(|finding| finding.contains("no HGMMA")),
                    disassembler.is_some(),
                    "{found:?}"
                );
            }
        }
    }
}

//! Parses the log that NVRTC writes with `--ptxas-options=-v`: the resources of every function, and
//! warnings and remarks that are findings.

use std::fmt;

/// Marks the remarks C7508 to C7515 about ignored `setmaxnreg` and serialized `wgmma`, which cost a
/// kernel most of its speed.
const SLOW: &str = "Potential Performance Loss";

/// The parsed log of one file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Log {
    pub(super) functions: Vec<Function>,
    /// Warnings, and remarks marked [`SLOW`].
    remarks: Vec<String>,
}

/// Resources of a function; sizes in bytes.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Function {
    pub(super) name: String,
    /// Whether it is a kernel rather than a function that a kernel calls.
    entry: bool,
    registers: u32,
    /// Shared memory; the log knows only what is static.
    pub(super) shared: u32,
    /// Stores and loads together.
    spills: u32,
    stack: u32,
}

impl Log {
    pub(super) fn read(text: &str) -> Self {
        let mut log = Self::default();
        let mut entry = None;
        for line in text.lines() {
            if line.contains(" warning ") || line.contains(SLOW) {
                log.remarks.push(line.trim().to_owned());
            } else if let Some((_, name)) = line.split_once("Compiling entry function '") {
                entry = name.split('\'').next();
            } else if let Some((_, name)) = line.split_once("Function properties for ") {
                log.functions.push(Function {
                    name: name.trim().to_owned(),
                    entry: entry == Some(name.trim()),
                    ..Function::default()
                });
            } else if let Some(function) = log.functions.last_mut() {
                let number = |unit| number(line, unit).unwrap_or(0);
                function.registers += number(" registers");
                function.shared += number(" bytes smem");
                function.spills += number(" bytes spill stores") + number(" bytes spill loads");
                function.stack += number(" bytes stack frame");
            }
        }
        log
    }

    /// The findings, given the kernels that the file should have and the bytes of local memory that
    /// they may use.
    pub(super) fn findings(&self, entries: &[&str], local_memory: u32) -> Vec<String> {
        let mut found = self.remarks.clone();
        for Function { name, entry, spills, stack, .. } in &self.functions {
            if *spills > 0 && *stack > local_memory {
                found.push(format!("{name} spills {spills} bytes"));
            }
            if *stack > local_memory {
                found.push(format!("{name} has a stack of {stack} bytes: local memory"));
            }
            if *entry && !entries.contains(&name.as_str()) {
                found.push(format!("{name} is not in the table of kernels"));
            }
        }
        // A log without registers has a format that is not parsed here.
        let is_described = |name: &str| {
            let is = |function: &Function| function.entry && function.name == name;
            self.functions.iter().any(|function| is(function) && function.registers > 0)
        };
        let missing = entries.iter().filter(|name| !is_described(name));
        found.extend(missing.map(|name| format!("the compiler's log has no kernel {name}")));
        found
    }
}

impl fmt::Display for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { registers, shared, spills, stack, .. } = self;
        write!(f, "{registers:>9} {shared:>7} {spills:>7} {stack:>6}")
    }
}

/// The number before a unit in a comma-separated line.
fn number(line: &str, unit: &str) -> Option<u32> {
    line.split(',')
        .find_map(|part| part.trim().strip_suffix(unit)?.split_whitespace().last()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLEAN: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'clean' for 'sm_80'
ptxas info    : Function properties for clean
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers, 1024 bytes smem, 384 bytes cmem[0]
ptxas info    : Compile time = 4.160 ms
";

    /// A kernel that calls a function with a stack frame, and one that spills.
    const SPILLS: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'calls' for 'sm_90a'
ptxas info    : Function properties for calls
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
ptxas info    : Compile time = 8.191 ms
ptxas info    : Function properties for _Z6helperPKfi
ptxas         .     128 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function 'spills' for 'sm_90a'
ptxas info    : Function properties for spills
ptxas         .     440 bytes stack frame, 836 bytes spill stores, 844 bytes spill loads
ptxas info    : Used 64 registers, used 0 barriers, 440 bytes cumulative stack size
ptxas info    : Compile time = 25.227 ms
";

    #[test]
    fn resources_are_read() {
        let clean = Log::read(CLEAN);
        let expected = Function {
            name: "clean".into(),
            entry: true,
            registers: 24,
            shared: 1024,
            spills: 0,
            stack: 0,
        };
        assert_eq!(clean, Log { functions: vec![expected], remarks: vec![] });
    }

    #[test]
    fn everything_unexpected_is_found() {
        let spills = [
            "_Z6helperPKfi has a stack of 128 bytes: local memory",
            "spills spills 1680 bytes",
            "spills has a stack of 440 bytes: local memory",
        ];
        let [unknown, missing, other] = [
            "clean is not in the table of kernels",
            "the compiler's log has no kernel clean",
            "the compiler's log has no kernel other",
        ];
        for (log, kernels, local_memory, expected) in [
            (CLEAN, &["clean"][..], 0, &[][..]),
            (CLEAN, &[], 0, &[unknown]),
            (CLEAN, &["clean", "other"], 0, &[other]),
            ("", &["clean"], 0, &[missing]),
            (SPILLS, &["calls", "spills"], 0, &spills),
            // Declared stacks are not findings.
            (SPILLS, &["calls", "spills"], 128, &spills[1..]),
        ] {
            assert_eq!(Log::read(log).findings(kernels, local_memory), expected, "{kernels:?}");
        }
        for (remark, is_finding) in [
            ("ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored", true),
            ("ptxas info    : (C7511) Potential Performance Loss: wgmma is serialized", true),
            ("clean.cu(17): warning #177-D: variable \"unused\" was never referenced", true),
            ("ptxas warning : Stack size for entry function 'clean' is not known", true),
            ("ptxas info    : (C7519) warpgroup.arrive is injected", false),
            ("Remark: The warnings can be suppressed with \"-diag\"", false),
        ] {
            let found = Log::read(&format!("{remark}\n{CLEAN}")).findings(&["clean"], 0);
            assert_eq!(found, if is_finding { vec![remark] } else { vec![] });
        }
    }
}

//! Reads machine code with `nvdisasm`, which is not part of NVRTC but is found like it.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{self, Command},
};

use sparse24_cuda::library::Library;

use crate::{Result, output};

/// The path of an existing `nvdisasm`.
pub(super) struct Disassembler(PathBuf);

impl Disassembler {
    /// Searches beside NVRTC, where pip and CUDA install it, then the `PATH`, then CUDA's folders.
    pub(super) fn find() -> Option<Self> {
        let beside =
            Library::Nvrtc.load().ok().and_then(|file| Some(file.parent()?.parent()?.join("bin")));
        let path: Vec<PathBuf> =
            env::var_os("PATH").map(|path| env::split_paths(&path).collect()).unwrap_or_default();
        let homes = ["CUDA_HOME", "CUDA_PATH"]
            .into_iter()
            .filter_map(env::var_os)
            .map(|home| Path::new(&home).join("bin"));
        let folders =
            beside.into_iter().chain(path).chain(homes).chain(["/usr/local/cuda/bin".into()]);
        folders.map(|folder| folder.join("nvdisasm")).find(|file| file.is_file()).map(Self)
    }

    /// Disassembles `cubin`; `name` makes the name of the temporary file unique.
    pub(super) fn read(&self, name: &str, cubin: &[u8]) -> Result<String> {
        let file = env::temp_dir().join(format!("{}-{name}", process::id()));
        fs::write(&file, cubin)?;
        let text = output(Command::new(&self.0).arg("-c").arg(&file), &env::temp_dir());
        fs::remove_file(&file)?;
        text
    }
}

/// Whether the text contains an instruction, with any modifiers.
pub(super) fn contains(text: &str, instruction: &str) -> bool {
    let words = text.split_whitespace().filter_map(|word| word.strip_prefix(instruction));
    words.into_iter().any(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// The name and code of every kernel in the text.
pub(super) fn entries(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.split("\n.text.").skip(1).filter_map(|entry| entry.split_once(':'))
}

/// The kernels that do not wait for the previous kernel, or that access global memory before they
/// wait, in the order of the text: branches are not followed.
pub(super) fn access_before_wait(text: &str) -> Vec<&str> {
    const WAIT: &str = "ACQBULK";
    const TOUCHES: [&str; 11] =
        ["LD", "LDG", "LDGSTS", "ST", "STG", "ATOM", "ATOMG", "RED", "REDG", "UBLKCP", "UTMALDG"];
    let waits = |code: &str| {
        let first = code.lines().find(|line| {
            [WAIT].iter().chain(&TOUCHES).any(|instruction| contains(line, instruction))
        });
        first.is_some_and(|line| contains(line, WAIT))
    };
    entries(text).filter(|(_, code)| !waits(code)).map(|(entry, _)| entry).collect()
}

/// The kernels that load global memory through the constant path, which assumes that no kernel is
/// writing it.
pub(super) fn constant_loads(text: &str) -> Vec<&str> {
    let is_constant = |line: &str| contains(line, "LDG") && line.contains(".CONSTANT");
    entries(text)
        .filter(|(_, code)| code.lines().any(is_constant))
        .map(|(entry, _)| entry)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{access_before_wait, constant_loads, contains};

    #[test]
    fn accesses_before_the_wait_are_found() {
        let (wait, load) =
            ("  /*0010*/ ACQBULK ;\n", "  /*0020*/ @!P0 LDG.E.64 R2, desc[UR4][R2.64] ;\n");
        let (table, shared) =
            ("  /*0000*/ LDC R1, c[0x0][0x28] ;\n", "  /*0030*/ STS [R2], R3 ;\n");
        let text = [
            ("patient", [table, shared, wait, load]),
            ("hasty", [table, load, wait, shared]),
            ("never", [table, table, load, load]),
            ("idle", [table, table, shared, shared]),
        ]
        .map(|(name, code)| format!("\t.section\t.text.{name}\n.text.{name}:\n{}", code.concat()));
        assert_eq!(access_before_wait(&text.concat()), ["hasty", "never", "idle"]);
    }

    #[test]
    fn constant_loads_are_found() {
        let load = |kind| format!("  /*0020*/ @!P0 LDG.E.128{kind} R8, desc[UR6][R2.64] ;\n");
        let text = [("plain", load("")), ("constant", load(".CONSTANT"))]
            .map(|(name, code)| format!("\n.text.{name}:\n{code}"));
        assert_eq!(constant_loads(&text.concat()), ["constant"]);
    }

    #[test]
    fn an_instruction_is_found_with_its_modifiers_and_not_in_a_longer_name() {
        let text = "  /*0890*/  @P0  HGMMA.SP.64x256x32.F32.BF16 R24, R8, gdesc[UR4], R24, R3 ;\n\
                    /*08a0*/ HMMA.16816.F32 R4, R4, R8, RZ ;";
        for name in ["HGMMA.SP", "HGMMA", "HMMA.16816"] {
            assert!(contains(text, name), "{name}");
        }
        for name in ["HMMA.SP", "HMMA.1681", "MMA"] {
            assert!(!contains(text, name), "{name}");
        }
    }
}

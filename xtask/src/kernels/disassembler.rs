//! The disassembler of machine code, `nvdisasm`, found like the libraries; NVRTC has none.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{self, Command},
};

use sparse24_cuda::library::Library;

use crate::Result;

/// An `nvdisasm` that is there.
pub(super) struct Disassembler(PathBuf);

impl Disassembler {
    /// Beside NVRTC, where pip and CUDA put it, then on the `PATH`, then in CUDA's usual folders.
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

    /// The machine code as text; `name` distinguishes the temporary file.
    pub(super) fn read(&self, name: &str, cubin: &[u8]) -> Result<String> {
        let file = env::temp_dir().join(format!("{}-{name}", process::id()));
        fs::write(&file, cubin)?;
        let output = Command::new(&self.0).arg("-c").arg(&file).output();
        fs::remove_file(&file)?;
        let output = output.map_err(|error| format!("{}: {error}", self.0.display()))?;
        if !output.status.success() {
            return Err(format!(
                "{}: {}",
                self.0.display(),
                String::from_utf8_lossy(&output.stderr).trim()
            )
            .into());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// Whether an instruction stands in the text, with whatever modifiers.
pub(super) fn contains(text: &str, instruction: &str) -> bool {
    let words = text.split_whitespace().filter_map(|word| word.strip_prefix(instruction));
    words.into_iter().any(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// The kernels in the text, each with its code.
pub(super) fn entries(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.split("\n.text.").skip(1).filter_map(|entry| entry.split_once(':'))
}

/// The kernels that do not wait for the previous one, or touch global memory before: by the text,
/// whatever way branches take.
pub(super) fn hasty(text: &str) -> Vec<&str> {
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

/// The kernels with loads of constants, which memory that a kernel writes is not.
pub(super) fn trusting(text: &str) -> Vec<&str> {
    let is_constant = |line: &str| contains(line, "LDG") && line.contains(".CONSTANT");
    entries(text)
        .filter(|(_, code)| code.lines().any(is_constant))
        .map(|(entry, _)| entry)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{contains, hasty, trusting};

    #[test]
    fn who_touches_memory_before_waiting_is_hasty() {
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
        assert_eq!(hasty(&text.concat()), ["hasty", "never", "idle"]);
    }

    #[test]
    fn who_loads_constants_is_trusting() {
        let load = |kind| format!("  /*0020*/ @!P0 LDG.E.128{kind} R8, desc[UR6][R2.64] ;\n");
        let text = [("careful", load("")), ("trusting", load(".CONSTANT"))]
            .map(|(name, code)| format!("\n.text.{name}:\n{code}"));
        assert_eq!(trusting(&text.concat()), ["trusting"]);
    }

    #[test]
    fn an_instruction_is_found_with_its_modifiers_and_not_in_a_longer_name() {
        let text = "        /*0890*/              @P0  HGMMA.SP.64x256x32.F32.BF16 R24, R8, gdesc[UR4], R24, R3 ;\n  /*08a0*/ HMMA.16816.F32 R4, R4, R8, RZ ;";
        assert!(
            contains(text, "HGMMA.SP") && contains(text, "HGMMA") && contains(text, "HMMA.16816")
        );
        assert!(
            !contains(text, "HMMA.SP")
                && !contains(text, "HMMA.1681")
                && !contains(text, "MMA")
                && !contains("", "HMMA")
        );
    }
}

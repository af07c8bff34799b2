//! From CUDA C++ to machine code, by NVRTC.
//!
//! Deliberately absent: where the code is kept ([`crate::cache`]), and any GPU: one can compile for a GPU that is not there.

use std::{
    ffi::{CStr, CString, c_char},
    io,
    path::Path,
};

use cudarc::nvrtc::{result, sys};

use crate::{
    Architecture, Error,
    cache::Cache,
    kernels::{Contraction, HEADERS, Source},
    library::Library,
};

/// What the compiler made of a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// Its name in a folder of compiled kernels: all that the code depends on but the compiler's release, whose code serves as well.
    pub file_name: String,
    /// Machine code.
    pub cubin: Vec<u8>,
    /// What the compiler said, resources of each kernel included.
    pub log: String,
}

impl Compiled {
    /// Keeps the code in a folder that then serves as `SPARSE24_KERNEL_CACHE`, also where there is no compiler.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn keep(&self, folder: &Path) -> io::Result<()> {
        Cache::write(folder, &self.file_name, &self.cubin)
    }
}

/// Compiles a source for an architecture; needs no GPU.
///
/// # Errors
/// [`Error::Library`] without NVRTC; [`Error::Compile`] with what it said.
pub fn compile(source: &Source, architecture: Architecture) -> Result<Compiled, Error> {
    Library::Nvrtc.load()?;
    let failed = |log: String| Error::Compile { kernel: source.name, architecture, log };
    let refused = |error: result::NvrtcError| failed(error.to_string());
    let program = Program::new(source).map_err(refused)?;
    // SAFETY: the program is alive.
    let compiled = unsafe { result::compile_program(program.raw, &options(source, architecture)) };
    let log = program.log().map_err(refused)?;
    match compiled {
        Ok(()) => Ok(Compiled { file_name: file_name(source, architecture), cubin: program.cubin().map_err(refused)?, log }),
        Err(_) => Err(failed(log)),
    }
}

/// The machine code of a source: from the cache, or compiled and kept there.
pub(crate) fn cached(cache: &Cache, source: &Source, architecture: Architecture) -> Result<Vec<u8>, Error> {
    let name = file_name(source, architecture);
    if let Some(cubin) = cache.get(&name) {
        return Ok(cubin);
    }
    let Compiled { cubin, .. } = compile(source, architecture)?;
    cache.put(&name, &cubin);
    Ok(cubin)
}

/// Whether the machine code of a source is in the cache.
pub(crate) fn is_cached(cache: &Cache, source: &Source, architecture: Architecture) -> bool {
    cache.get(&file_name(source, architecture)).is_some()
}

/// The name under which a source's code is kept.
pub(crate) fn file_name(source: &Source, architecture: Architecture) -> String {
    let mut hash = blake3::Hasher::new();
    let mut part = |text: &str| {
        hash.update(&(text.len() as u64).to_le_bytes());
        hash.update(text.as_bytes());
    };
    part(env!("CARGO_PKG_VERSION"));
    options(source, architecture).iter().for_each(|option| part(option));
    HEADERS.iter().for_each(|header| {
        part(header.name);
        part(header.text);
    });
    part(source.text);
    format!("{}-{}-{}.cubin", source.name, architecture, &hash.finalize().to_hex()[..32])
}

fn options(source: &Source, architecture: Architecture) -> Vec<String> {
    let contraction = match source.contraction {
        Contraction::Off => "--fmad=false",
        Contraction::On => "--fmad=true",
    };
    ["--std=c++17", "--generate-line-info", "--ptxas-options=-v", contraction]
        .map(str::to_owned)
        .into_iter()
        .chain([format!("--gpu-architecture={architecture}")])
        .collect()
}

/// A program of the compiler, and the texts that it may point to.
struct Program {
    raw: sys::nvrtcProgram,
    _texts: Vec<CString>,
}

impl Program {
    fn new(source: &Source) -> Result<Self, result::NvrtcError> {
        let text = |text: &str| CString::new(text).expect("sources hold no NUL");
        let mut texts = vec![text(source.text), text(&format!("{}.cu", source.name))];
        texts.extend(HEADERS.iter().map(|header| text(header.text)));
        texts.extend(HEADERS.iter().map(|header| text(header.name)));
        let pointers: Vec<*const c_char> = texts.iter().map(|text| text.as_ptr()).collect();
        let (headers, names) = pointers[2..].split_at(HEADERS.len());
        let mut raw = std::ptr::null_mut();
        // SAFETY: every pointer is to a terminated text that lives as long as the program; there are as many headers as names.
        let created =
            unsafe { sys::nvrtcCreateProgram(&mut raw, pointers[0], pointers[1], HEADERS.len() as i32, headers.as_ptr(), names.as_ptr()) };
        created.result()?;
        Ok(Self { raw, _texts: texts })
    }

    fn log(&self) -> Result<String, result::NvrtcError> {
        // SAFETY: the program is alive; the log ends with a NUL.
        let log = unsafe { result::get_program_log(self.raw) }?;
        // SAFETY: as above.
        Ok(if log.is_empty() { String::new() } else { unsafe { CStr::from_ptr(log.as_ptr()) }.to_string_lossy().into_owned() })
    }

    fn cubin(&self) -> Result<Vec<u8>, result::NvrtcError> {
        let mut size = 0;
        // SAFETY: the program is alive.
        unsafe { sys::nvrtcGetCUBINSize(self.raw, &mut size) }.result()?;
        let mut cubin = vec![0_u8; size];
        // SAFETY: the program is alive, and the buffer has the size that the compiler asked for.
        unsafe { sys::nvrtcGetCUBIN(self.raw, cubin.as_mut_ptr().cast()) }.result()?;
        Ok(cubin)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program is alive, and nothing uses it afterwards.
        let _ = unsafe { result::destroy_program(self.raw) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::SOURCES;

    #[test]
    fn a_name_depends_on_text_options_and_architecture() {
        let source = SOURCES[0];
        let contraction = match source.contraction {
            Contraction::Off => Contraction::On,
            Contraction::On => Contraction::Off,
        };
        let names = [
            file_name(&source, Architecture::Sm80),
            file_name(&source, Architecture::Sm90a),
            file_name(&Source { text: "", ..source }, Architecture::Sm80),
            file_name(&Source { contraction, ..source }, Architecture::Sm80),
        ];
        let distinct: std::collections::HashSet<_> = names.iter().collect();
        assert_eq!(distinct.len(), names.len(), "{names:?}");
    }
}

//! Compiles CUDA C++ to machine code with NVRTC. No GPU is needed.

use std::{
    ffi::{CString, c_char, c_int},
    fmt, io,
    path::Path,
};

use cudarc::nvrtc::{
    result::NvrtcError,
    sys::{nvrtcProgram, nvrtcResult},
};

use crate::{
    Architecture, Error,
    cache::{Cache, SUFFIX},
    kernels::{Contraction, HEADERS, SOURCES, Source},
    library::Library,
    loader::functions,
};

functions! { Library::Nvrtc;
    nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> nvrtcResult;
    nvrtcCreateProgram(program: *mut nvrtcProgram, source: *const c_char, name: *const c_char,
        count: c_int, headers: *const *const c_char, names: *const *const c_char) -> nvrtcResult;
    nvrtcCompileProgram(program: nvrtcProgram, count: c_int, options: *const *const c_char)
        -> nvrtcResult;
    nvrtcDestroyProgram(program: *mut nvrtcProgram) -> nvrtcResult;
    nvrtcGetProgramLogSize(program: nvrtcProgram, size: *mut usize) -> nvrtcResult;
    nvrtcGetProgramLog(program: nvrtcProgram, log: *mut c_char) -> nvrtcResult;
    nvrtcGetCUBINSize(program: nvrtcProgram, size: *mut usize) -> nvrtcResult;
    nvrtcGetCUBIN(program: nvrtcProgram, cubin: *mut c_char) -> nvrtcResult;
}

/// The result of a compilation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// File name in a folder of compiled kernels, derived from everything the code depends on.
    pub file_name: String,
    /// Machine code.
    pub cubin: Vec<u8>,
    /// The compiler's log, with the resources of each kernel.
    pub log: String,
}

impl Compiled {
    /// Writes the code to a folder that can serve as `SPARSE24_KERNEL_CACHE` on machines without a
    /// compiler.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn keep(&self, folder: &Path) -> io::Result<()> {
        Cache::write(folder, &self.file_name, &self.cubin)
    }
}

/// A release of NVRTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Release {
    /// 13 in 13.0.
    pub major: c_int,
    /// 0 in 13.0.
    pub minor: c_int,
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The release of this machine's NVRTC.
pub(crate) fn release() -> Result<Release, Error> {
    load()?;
    let mut release = Release { major: 0, minor: 0 };
    // SAFETY: the library is loaded; the call writes two numbers.
    let status = unsafe { nvrtcVersion(&mut release.major, &mut release.minor) };
    status.result().map_err(|error| Error::Driver {
        what: "querying the release of NVRTC".into(),
        code: error.to_string(),
    })?;
    Ok(release)
}

/// This machine's release, or, without a compiler, the newest one with kernels in the cache.
pub(crate) fn release_for(cache: &Cache, architecture: Architecture) -> Result<Release, Error> {
    release().or_else(|error| {
        let names = cache.names();
        let sources = SOURCES.iter().filter(|source| source.serves.contains(&architecture));
        sources.flat_map(|source| releases_in(&names, source, architecture)).max().ok_or(error)
    })
}

/// Compiles a source for an architecture. No GPU is needed.
///
/// # Errors
/// [`Error::Library`] without NVRTC; [`Error::Compile`] with its log.
pub fn compile(source: &Source, architecture: Architecture) -> Result<Compiled, Error> {
    let release = release()?;
    let failed = |log: String| Error::Compile { kernel: source.name, architecture, log };
    let refused = |error: NvrtcError| failed(error.to_string());
    let program = Program::new(source).map_err(refused)?;
    let compiled = program.compile(&options(source, architecture));
    let log = program.log().map_err(refused)?;
    match compiled {
        Ok(()) => Ok(Compiled {
            file_name: file_name(source, architecture, release),
            cubin: program.cubin().map_err(refused)?,
            log,
        }),
        Err(_) => Err(failed(log)),
    }
}

/// The machine code of a source, from the cache or compiled into it.
pub(crate) fn cached(
    cache: &Cache,
    source: &Source,
    architecture: Architecture,
    release: Release,
) -> Result<Vec<u8>, Error> {
    if let Some(cubin) = cache.get(&file_name(source, architecture, release)) {
        return Ok(cubin);
    }
    let Compiled { file_name, cubin, .. } = compile(source, architecture)?;
    cache.put(&file_name, &cubin);
    Ok(cubin)
}

pub(crate) fn is_cached(
    cache: &Cache,
    source: &Source,
    architecture: Architecture,
    release: Release,
) -> bool {
    cache.get(&file_name(source, architecture, release)).is_some()
}

pub(crate) fn file_name(source: &Source, architecture: Architecture, release: Release) -> String {
    format!("{}{release}{SUFFIX}", stem(source, architecture))
}

/// The releases whose code of this source is among these file names.
fn releases_in(names: &[String], source: &Source, architecture: Architecture) -> Vec<Release> {
    let stem = stem(source, architecture);
    let release = |name: &String| {
        let (major, minor) = name.strip_prefix(&stem)?.strip_suffix(SUFFIX)?.split_once('.')?;
        Some(Release { major: major.parse().ok()?, minor: minor.parse().ok()? })
    };
    names.iter().filter_map(release).collect()
}

/// The file name up to the release: a hash of everything else that the code depends on.
fn stem(source: &Source, architecture: Architecture) -> String {
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
    format!("{}-{architecture}-{}-", source.name, &hash.finalize().to_hex()[..32])
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

/// An NVRTC program, and the texts that it may point to.
struct Program {
    raw: nvrtcProgram,
    _texts: Vec<CString>,
}

impl Program {
    fn new(source: &Source) -> Result<Self, NvrtcError> {
        let text = |text: &str| CString::new(text).expect("sources hold no NUL");
        let mut texts = vec![text(source.text), text(&format!("{}.cu", source.name))];
        texts.extend(HEADERS.iter().map(|header| text(header.text)));
        texts.extend(HEADERS.iter().map(|header| text(header.name)));
        let pointers: Vec<*const c_char> = texts.iter().map(|text| text.as_ptr()).collect();
        let (headers, names) = pointers[2..].split_at(HEADERS.len());
        let mut raw = std::ptr::null_mut();
        // SAFETY: every pointer is to a NUL-terminated text that lives as long as the program, and
        // there are as many headers as names.
        let created = unsafe {
            nvrtcCreateProgram(
                &mut raw,
                pointers[0],
                pointers[1],
                HEADERS.len() as c_int,
                headers.as_ptr(),
                names.as_ptr(),
            )
        };
        created.result()?;
        Ok(Self { raw, _texts: texts })
    }

    fn compile(&self, options: &[String]) -> Result<(), NvrtcError> {
        let options: Vec<CString> = options
            .iter()
            .map(|option| CString::new(option.as_str()).expect("options hold no NUL"))
            .collect();
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program is alive, and every pointer is to a NUL-terminated text that lives
        // until the call returns.
        unsafe { nvrtcCompileProgram(self.raw, pointers.len() as c_int, pointers.as_ptr()) }
            .result()
    }

    fn log(&self) -> Result<String, NvrtcError> {
        let mut log = self.read(nvrtcGetProgramLogSize, nvrtcGetProgramLog)?;
        // It ends with a NUL.
        log.pop();
        Ok(String::from_utf8_lossy(&log).into_owned())
    }

    fn cubin(&self) -> Result<Vec<u8>, NvrtcError> {
        self.read(nvrtcGetCUBINSize, nvrtcGetCUBIN)
    }

    /// Reads what `content` writes, which has the bytes that `size` reports.
    fn read(
        &self,
        size: unsafe fn(nvrtcProgram, *mut usize) -> nvrtcResult,
        content: unsafe fn(nvrtcProgram, *mut c_char) -> nvrtcResult,
    ) -> Result<Vec<u8>, NvrtcError> {
        let mut bytes = 0;
        // SAFETY: the program is alive.
        unsafe { size(self.raw, &mut bytes) }.result()?;
        let mut to = vec![0_u8; bytes];
        // SAFETY: the program is alive, and the buffer has the requested size.
        unsafe { content(self.raw, to.as_mut_ptr().cast()) }.result()?;
        Ok(to)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program is alive, and nothing uses it afterwards.
        let _ = unsafe { nvrtcDestroyProgram(&mut self.raw) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: Release = Release { major: 13, minor: 0 };
    const NEW: Release = Release { major: 13, minor: 1 };

    #[test]
    fn a_compile_error_names_its_place() {
        let broken = Source {
            text: "#include \"scalar.cuh\"\n\nextern \"C\" __global__ void x() { u32 a = b; }\n",
            ..SOURCES[0]
        };
        match compile(&broken, Architecture::Sm80) {
            Err(Error::Library { .. }) => println!("skipped: NVRTC is not installed"),
            Err(error @ Error::Compile { .. }) => {
                let (place, text) =
                    (format!("{}.cu(3): error: ", SOURCES[0].name), error.to_string());
                assert!(text.contains(&place) && text.lines().count() == 1, "{text}");
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn file_names_are_of_one_source_and_hold_the_release() {
        let (source, sm_80) = (&SOURCES[0], Architecture::Sm80);
        let contraction = match source.contraction {
            Contraction::Off => Contraction::On,
            Contraction::On => Contraction::Off,
        };
        let names = [NEW, OLD].map(|release| file_name(source, sm_80, release));
        assert_eq!(releases_in(&names, source, sm_80), [NEW, OLD]);
        for (other, architecture) in [
            (&SOURCES[1], sm_80),
            (source, Architecture::Sm90a),
            (&Source { text: "", ..*source }, sm_80),
            (&Source { contraction, ..*source }, sm_80),
        ] {
            assert_eq!(releases_in(&names, other, architecture), []);
        }
    }

    #[test]
    fn without_a_compiler_the_newest_kernels_are_used() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = Cache::at(folder.path());
        let chosen = |cache: &Cache| release_for(cache, Architecture::Sm80);
        match release() {
            Ok(here) => assert_eq!(chosen(&cache), Ok(here)),
            Err(error) => assert_eq!(chosen(&cache), Err(error)),
        }
        for release in [NEW, OLD] {
            cache.put(&file_name(&SOURCES[0], Architecture::Sm80, release), b"cubin");
        }
        assert_eq!(chosen(&cache), Ok(release().unwrap_or(NEW)));
    }
}

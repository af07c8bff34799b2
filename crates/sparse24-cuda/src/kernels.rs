//! The table of all kernels: what dispatch, tests, the sanitizer's run, benches and `cargo xtask kernels` go through.
//!
//! A source is one operation. Adding a kernel is a file in `kernels/` and a line here.

use crate::Architecture;

/// A file of kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// Its name, without `.cu`.
    pub name: &'static str,
    /// CUDA C++.
    pub text: &'static str,
    /// The kernels in it.
    pub entries: &'static [&'static str],
    /// What it is compiled for.
    pub serves: &'static [Architecture],
    /// Whether a product and a sum may become one operation.
    pub contraction: Contraction,
    /// An instruction that its machine code must contain.
    pub instruction: Option<&'static str>,
}

/// Whether the compiler may contract a product and a sum into one operation, which rounds once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contraction {
    /// Every operation rounds, as core defines it.
    Off,
    /// Contracted: results lie within a bound.
    On,
}

/// A file that sources include.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// As it stands in `#include`.
    pub name: &'static str,
    /// CUDA C++.
    pub text: &'static str,
}

const ALL: &[Architecture] = &Architecture::ALL;

macro_rules! sources {
    ($($name:literal: $($entry:literal),+; $serves:expr, $contraction:ident $(, contains $instruction:literal)?;)+) => {
        &[$(Source {
            name: $name,
            text: include_str!(concat!("../kernels/", $name, ".cu")),
            entries: &[$($entry),+],
            serves: $serves,
            contraction: Contraction::$contraction,
            instruction: sources!(@instruction $($instruction)?),
        }),+]
    };
    (@instruction) => { None };
    (@instruction $instruction:literal) => { Some($instruction) };
}

/// All kernels.
pub const SOURCES: &[Source] = sources! {
    "flip_count": "flip_count"; ALL, Off;
    "spmm24_mma": "spmm24_mma_straight", "spmm24_mma_transposed"; ALL, On, contains "HMMA.SP";
    "spmm24_sm90": "spmm24_transposed_256x192a", "spmm24_transposed_256x192b", "spmm24_transposed_256x160a", "spmm24_transposed_128x256b",
        "spmm24_straight_256x192a", "spmm24_straight_256x192b", "spmm24_straight_256x160a", "spmm24_straight_128x256a",
        "spmm24_straight_128x256b", "spmm24_gather", "spmm24_gather_transposed";
        &[Architecture::Sm90a], On, contains "HGMMA.SP";
};

/// All headers.
pub const HEADERS: &[Header] = &[
    Header { name: "scalar.cuh", text: include_str!("../kernels/scalar.cuh") },
    Header { name: "hopper.cuh", text: include_str!("../kernels/hopper.cuh") },
    Header { name: "philox.cuh", text: include_str!("../kernels/philox.cuh") },
];

/// The source with a kernel.
pub(crate) fn source_of(entry: &str) -> Option<&'static Source> {
    SOURCES.iter().find(|source| source.entries.contains(&entry))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_the_kernels_of_their_file_and_no_others() {
        let mut seen = std::collections::HashSet::new();
        for source in SOURCES {
            assert!(!source.serves.is_empty(), "{} serves no GPU", source.name);
            for entry in source.entries {
                assert!(seen.insert(entry), "{entry} stands twice");
                assert!(source.text.contains(entry), "{} has no {entry}", source.name);
            }
            let kernels = source.text.matches("__global__").count();
            assert!(kernels >= 1, "{} has no kernel", source.name);
        }
    }

    #[test]
    fn every_file_opens_with_its_contract() {
        for source in SOURCES {
            let banner: String = source.text.lines().take_while(|line| line.starts_with("//")).collect::<Vec<_>>().join("\n");
            for word in ["in ", "out ", "pre ", "ref "] {
                assert!(banner.contains(&format!("// {word}")), "{}: the banner does not say `{word}`", source.name);
            }
            let included = source.text.lines().filter_map(|line| line.strip_prefix("#include "));
            for name in included {
                assert!(HEADERS.iter().any(|header| name == format!("\"{}\"", header.name)), "{} includes {name}", source.name);
            }
        }
    }
}

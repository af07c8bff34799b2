//! The table of all kernels: what dispatch, tests, the sanitizer's run, benches and
//! `cargo xtask kernels` go through.
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
    /// What the machine code of its kernels must contain.
    pub instructions: &'static [Instruction],
    /// Bytes of local memory that a thread may use, where a few registers spilled pay for more
    /// threads at once.
    pub local_memory: u32,
}

/// An instruction that kernels are written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Instruction {
    /// As the disassembler names it, without modifiers.
    pub name: &'static str,
    /// How the names of these kernels begin.
    pub kernels: &'static str,
    /// Where they have it.
    pub on: &'static [Architecture],
}

/// Whether the compiler may contract a product and a sum into one operation, which rounds once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contraction {
    /// Every operation rounds, as core defines it.
    Off,
    /// Contracted: results lie within a bound.
    On,
}

/// When a kernel's blocks may take their places.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Once all that was queued before is done.
    AfterPrevious,
    /// Where the GPU can, once the previous kernel's blocks have all ended or let it start: it
    /// waits by itself before it touches what others write.
    Early,
}

impl Source {
    /// What the machine code of a kernel must contain on an architecture.
    pub fn instructions_of(
        &self,
        entry: &str,
        architecture: Architecture,
    ) -> impl Iterator<Item = &'static str> {
        let wanted = self.instructions.iter().filter(move |wanted| {
            entry.starts_with(wanted.kernels) && wanted.on.contains(&architecture)
        });
        wanted.map(|wanted| wanted.name)
    }

    /// When blocks of its kernels may take their places.
    #[must_use]
    pub fn start(&self) -> Start {
        if self.text.contains("#include \"early.cuh\"") {
            Start::Early
        } else {
            Start::AfterPrevious
        }
    }
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
const HOPPER: &[Architecture] = &[Architecture::Sm90a];

macro_rules! sources {
    ($($name:literal: $($entry:literal),+; $serves:expr, $contraction:ident $(, $instruction:literal in $kernels:literal on $on:expr)* $(, spills $bytes:literal)?;)+) => {
        &[$(Source {
            name: $name,
            text: include_str!(concat!("../kernels/", $name, ".cu")),
            entries: &[$($entry),+],
            serves: $serves,
            contraction: Contraction::$contraction,
            instructions: &[$(Instruction { name: $instruction, kernels: $kernels, on: $on }),*],
            local_memory: 0 $(+ $bytes)?,
        }),+]
    };
}

/// All kernels.
pub const SOURCES: &[Source] = sources! {
    "activation": "gelu_forward", "gelu_backward", "geglu_forward", "geglu_backward", "swiglu_forward", "swiglu_backward"; ALL, On;
    "adamw": "adamw_step"; ALL, Off;
    "attention_backward": "attention_backward_64_queries", "attention_backward_64_keys", "attention_backward_128_queries", "attention_backward_128_keys",
        "attention_backward_dropout_64_queries", "attention_backward_dropout_64_keys", "attention_backward_dropout_128_queries", "attention_backward_dropout_128_keys";
        ALL, On, "HGMMA" in "attention" on HOPPER, spills 32;
    "attention_forward": "attention_forward_64", "attention_forward_128", "attention_forward_dropout_64", "attention_forward_dropout_128";
        ALL, On, "HGMMA" in "attention" on HOPPER, spills 32;
    "bias_grad": "column_sums", "row_sums"; ALL, Off;
    "compress_weight": "compress_weight", "compress_forward"; ALL, Off;
    "dropout": "dropout"; ALL, Off;
    "embedding": "embed_forward", "embed_sort", "embed_order", "embed_runs", "embed_join", "embed_positions"; ALL, Off;
    "flip_count": "flip_count"; ALL, Off;
    "grad_norm": "square_sums", "norm_of_sums"; ALL, Off;
    "loss": "head_loss", "loss_forward", "loss_sum"; ALL, On;
    "mask_search": "mask_search_f32", "mask_search_bf16", "row_mask_search_f32", "row_mask_search_bf16", "column_mask_search_f32",
        "column_mask_search_bf16"; ALL, Off;
    "mvue_compress": "mvue_compress_exact", "mvue_compress_approximate"; ALL, Off;
    "norm": "norm_forward_1", "norm_forward_2", "norm_forward_4", "norm_forward_8", "norm_backward_1", "norm_backward_2", "norm_backward_3",
        "norm_backward_4", "norm_backward_8", "norm_backward_16", "norm_parameters"; ALL, On;
    "spmm24_mma": "spmm24_mma_straight", "spmm24_mma_transposed"; ALL, On, "HMMA.SP" in "spmm24_mma" on ALL;
    "spmm24_sm90": "spmm24_transposed_384", "spmm24_transposed_256", "spmm24_straight_384", "spmm24_straight_320", "spmm24_straight_256",
        "spmm24_gather", "spmm24_gather_transposed";
        HOPPER, On, "HGMMA.SP" in "spmm24_transposed" on HOPPER, "HGMMA.SP" in "spmm24_straight" on HOPPER;
};

/// All headers.
pub const HEADERS: &[Header] = &[
    Header { name: "activation.cuh", text: include_str!("../kernels/activation.cuh") },
    Header { name: "attention.cuh", text: include_str!("../kernels/attention.cuh") },
    Header { name: "early.cuh", text: include_str!("../kernels/early.cuh") },
    Header { name: "health.cuh", text: include_str!("../kernels/health.cuh") },
    Header { name: "hopper.cuh", text: include_str!("../kernels/hopper.cuh") },
    Header { name: "mvue.cuh", text: include_str!("../kernels/mvue.cuh") },
    Header { name: "packed.cuh", text: include_str!("../kernels/packed.cuh") },
    Header { name: "parameters.cuh", text: include_str!("../kernels/parameters.cuh") },
    Header { name: "philox.cuh", text: include_str!("../kernels/philox.cuh") },
    Header { name: "scalar.cuh", text: include_str!("../kernels/scalar.cuh") },
];

/// The source with a kernel.
pub(crate) fn source_of(entry: &str) -> Option<&'static Source> {
    SOURCES.iter().find(|source| source.entries.contains(&entry))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// That a file has no others is for who compiles it to see: `cargo xtask kernels`.
    #[test]
    fn entries_stand_in_their_file_and_once_in_the_table() {
        let mut seen = std::collections::HashSet::new();
        for source in SOURCES {
            assert!(!source.serves.is_empty(), "{} serves no GPU", source.name);
            for entry in source.entries {
                assert!(seen.insert(entry), "{entry} stands twice");
                assert!(source.text.contains(entry), "{} has no {entry}", source.name);
            }
            assert!(source.text.contains("__global__"), "{} has no kernel", source.name);
        }
    }

    #[test]
    fn every_file_opens_with_its_contract() {
        for source in SOURCES {
            let banner: String = source
                .text
                .lines()
                .take_while(|line| line.starts_with("//"))
                .collect::<Vec<_>>()
                .join("\n");
            for word in ["in ", "out ", "pre ", "ref "] {
                assert!(
                    banner.contains(&format!("// {word}")),
                    "{}: the banner does not say `{word}`",
                    source.name
                );
            }
            let included = source.text.lines().filter_map(|line| line.strip_prefix("#include "));
            for name in included {
                assert!(
                    HEADERS.iter().any(|header| name == format!("\"{}\"", header.name)),
                    "{} includes {name}",
                    source.name
                );
            }
        }
    }
}

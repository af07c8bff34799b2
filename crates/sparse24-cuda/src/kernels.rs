//! The table of all kernels. A new kernel is a file in `kernels/`, a row here, and its wrapper.

use crate::Architecture;

/// A file of kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// File name without `.cu`.
    pub name: &'static str,
    /// The purpose of its kernels.
    pub kind: Kind,
    /// CUDA C++.
    pub text: &'static str,
    /// Names of its kernels.
    pub entries: &'static [&'static str],
    /// Architectures that it is compiled for.
    pub serves: &'static [Architecture],
    /// Whether the compiler may fuse products and sums.
    pub contraction: Contraction,
    /// Instructions that the machine code must contain.
    pub instructions: &'static [Instruction],
    /// Bytes of local memory that a thread may use, where spilling a few registers pays for more
    /// resident threads.
    pub local_memory: u32,
}

/// The purpose of work on the GPU, for profiles and reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Sparse products of this crate.
    SparseProduct,
    /// Dense products of cuBLASLt.
    DenseProduct,
    /// Attention, forward and backward.
    Attention,
    /// Compression of sampled gradients.
    Mvue,
    /// Mask search, compression of weights, flip counts.
    Mask,
    /// LayerNorm and residual sums.
    Norm,
    /// GELU, GEGLU, SwiGLU.
    Activation,
    /// Cross-entropy.
    Loss,
    /// Gradient norm and optimizer step.
    Optimizer,
    /// Gradients of biases.
    Bias,
    /// Embeddings.
    Embedding,
    /// Dropout outside of attention.
    Dropout,
    /// Rows by number.
    Rows,
    /// Copies and fills.
    Copy,
}

impl Kind {
    /// The name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::SparseProduct => "sparse products",
            Self::DenseProduct => "dense products",
            Self::Attention => "attention",
            Self::Mvue => "mvue",
            Self::Mask => "masks and compression",
            Self::Norm => "norm",
            Self::Activation => "activation",
            Self::Loss => "loss",
            Self::Optimizer => "optimizer",
            Self::Bias => "bias gradients",
            Self::Embedding => "embedding",
            Self::Dropout => "dropout",
            Self::Rows => "rows by number",
            Self::Copy => "copies and fills",
        }
    }
}

/// An instruction that kernels must contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Instruction {
    /// The disassembler's name, without modifiers.
    pub name: &'static str,
    /// Prefix of the names of these kernels.
    pub kernels: &'static str,
    /// Architectures on which they contain it.
    pub on: &'static [Architecture],
}

/// Whether the compiler may contract a product and a sum into one operation, which rounds once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contraction {
    /// Every operation rounds, as core defines it.
    Off,
    /// Results are within a bound.
    On,
}

/// When a kernel's blocks may become resident.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Once all earlier work is done.
    Late,
    /// While the previous kernel ends (programmatic dependent launch): the kernel itself waits
    /// before it touches memory that others write.
    Early,
}

impl Source {
    /// Instructions that a kernel must contain on an architecture.
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

    /// When blocks of its kernels may become resident.
    #[must_use]
    pub fn start(&self) -> Start {
        if self.text.contains("#include \"pdl.cuh\"") { Start::Early } else { Start::Late }
    }
}

/// A file that sources include.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Its name in `#include`.
    pub name: &'static str,
    /// CUDA C++.
    pub text: &'static str,
}

const ALL: &[Architecture] = &Architecture::ALL;
const HOPPER: &[Architecture] = &[Architecture::Sm90a];

macro_rules! sources {
    ($($name:literal $kind:ident: [$($entry:literal),+ $(,)?], $serves:expr, $contraction:ident
        $(, $instruction:literal in $kernels:literal on $on:expr)*
        $(, spills $bytes:literal)?;)+) => {
        &[$(Source {
            name: $name,
            kind: Kind::$kind,
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
    "activation" Activation: [
        "gelu_forward", "gelu_backward", "gelu_erf_forward", "gelu_erf_backward", "geglu_forward",
        "geglu_backward", "swiglu_forward", "swiglu_backward", "tanh_forward", "tanh_backward",
        "relu_forward", "relu_backward",
    ], ALL, On;
    "activation_compress" Mvue: [
        "gelu_backward_compress", "gelu_erf_backward_compress", "relu_backward_compress",
        "geglu_backward_compress", "swiglu_backward_compress",
    ], ALL, Off;
    "add" Norm: ["add", "add_f32"], ALL, Off;
    "attention_backward" Attention: [
        "attention_backward_64_queries", "attention_backward_64_keys",
        "attention_backward_128_queries", "attention_backward_128_keys",
        "attention_backward_dropout_64_queries", "attention_backward_dropout_64_keys",
        "attention_backward_dropout_128_queries", "attention_backward_dropout_128_keys",
        "attention_backward_64_lengths_queries", "attention_backward_64_lengths_keys",
        "attention_backward_128_lengths_queries", "attention_backward_128_lengths_keys",
        "attention_backward_dropout_64_lengths_queries",
        "attention_backward_dropout_64_lengths_keys",
        "attention_backward_dropout_128_lengths_queries",
        "attention_backward_dropout_128_lengths_keys",
    ], ALL, On, "HGMMA" in "attention" on HOPPER, spills 32;
    "attention_forward" Attention: [
        "attention_forward_64", "attention_forward_128",
        "attention_forward_dropout_64", "attention_forward_dropout_128",
        "attention_forward_64_lengths", "attention_forward_128_lengths",
        "attention_forward_dropout_64_lengths", "attention_forward_dropout_128_lengths",
    ], ALL, On, "HGMMA" in "attention" on HOPPER, spills 32;
    "average" Optimizer: ["moving_average"], ALL, Off;
    "bias_grad" Bias: ["column_sums", "row_sums"], ALL, Off;
    "compress_weight" Mask: ["compress_weight", "compress_forward", "prune_dense"], ALL, Off;
    "dropout" Dropout: ["dropout", "drop_sequences"], ALL, Off;
    "embedding" Embedding: [
        "embed_forward", "embed_sort", "embed_order", "embed_runs", "embed_join",
        "embed_positions",
    ], ALL, Off;
    "flip_count" Mask: ["flip_count"], ALL, Off;
    "geglu_peers" Activation: [
        "transposed_geglu_forward", "strided_geglu_forward",
    ], ALL, On;
    "grad_norm" Optimizer: ["square_sums", "norm_of_sums"], ALL, Off;
    "l1_distance" Optimizer: ["l1_distance"], ALL, Off;
    "loss" Loss: ["head_loss", "loss_forward", "squared_error", "span_loss", "loss_sum"], ALL, On;
    "mask_search" Mask: [
        "mask_search_f32", "mask_search_bf16", "row_mask_search_f32", "row_mask_search_bf16",
        "column_mask_search_f32", "column_mask_search_bf16",
    ], ALL, Off;
    "mask_search_peers" Mask: ["greedy_mask_search_f32", "pattern_mask_search_f32"], ALL, Off;
    "mma_peers" DenseProduct: ["mma_peer_transposed", "mma_peer_straight"], HOPPER, On,
        "HMMA" in "mma_peer" on HOPPER;
    "mvue_compress" Mvue: ["mvue_compress_exact", "mvue_compress_approximate"], ALL, Off;
    "norm" Norm: [
        "norm_forward_1", "norm_forward_2", "norm_forward_4", "norm_forward_8",
        "norm_backward_1", "norm_backward_2", "norm_backward_3",
        "norm_backward_4", "norm_backward_8", "norm_backward_16",
        "norm_backward_1_overwrite", "norm_backward_2_overwrite", "norm_backward_3_overwrite",
        "norm_backward_4_overwrite", "norm_backward_8_overwrite", "norm_backward_16_overwrite",
        "norm_parameters",
    ], ALL, On;
    "optimizer" Optimizer: ["adamw_step", "adam_step", "sgd_step", "lion_step"], ALL, Off;
    "permuted_mask" Mask: ["permuted_mask"], ALL, Off;
    "rows" Rows: ["gather_rows", "scatter_rows"], ALL, Off;
    "scale" Embedding: ["scale", "scale_grad"], ALL, Off;
    "spmm24_gather" SparseProduct: [
        "spmm24_gather", "spmm24_gather_transposed", "spmm24_gather_transposed_gelu",
        "spmm24_gather_transposed_relu",
    ], ALL, On;
    "spmm24_mma" SparseProduct: [
        "spmm24_mma_transposed_320", "spmm24_mma_transposed_256", "spmm24_mma_transposed_128",
        "spmm24_mma_straight_320", "spmm24_mma_straight_256", "spmm24_mma_straight_128",
    ], ALL, On, "HMMA.SP" in "spmm24_mma" on ALL;
    "spmm24_sm90" SparseProduct: [
        "spmm24_transposed_384", "spmm24_transposed_256", "spmm24_straight_384",
        "spmm24_straight_320", "spmm24_straight_256",
        "spmm24_transposed_384_gelu", "spmm24_transposed_256_gelu",
        "spmm24_transposed_384_relu", "spmm24_transposed_256_relu",
    ], HOPPER, On, "HGMMA.SP" in "spmm24_transposed" on HOPPER,
        "HGMMA.SP" in "spmm24_straight" on HOPPER, spills 8;
};

macro_rules! headers {
    ($($name:literal),+) => {
        &[$(Header { name: $name, text: include_str!(concat!("../kernels/", $name)) }),+]
    };
}

/// All headers.
pub const HEADERS: &[Header] = headers![
    "activation.cuh",
    "attention.cuh",
    "health.cuh",
    "hopper.cuh",
    "mma.cuh",
    "mvue.cuh",
    "mvue_tile.cuh",
    "packed.cuh",
    "parameters.cuh",
    "pdl.cuh",
    "philox.cuh",
    "scalar.cuh",
    "spmm24.cuh"
];

/// The kernel of this name, for names that are put together.
///
/// # Panics
/// If it is not in the table.
pub(crate) fn entry(name: &str) -> &'static str {
    let all = SOURCES.iter().flat_map(|source| source.entries);
    all.copied()
        .find(|entry| *entry == name)
        .unwrap_or_else(|| panic!("{name} is not in the table of kernels"))
}

/// The source of a kernel.
pub(crate) fn source_of(entry: &str) -> Option<&'static Source> {
    SOURCES.iter().find(|source| source.entries.contains(&entry))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `cargo xtask kernels` checks that files define no other kernels.
    #[test]
    fn entries_are_in_their_file_and_once_in_the_table() {
        let mut seen = std::collections::HashSet::new();
        for source in SOURCES {
            assert!(!source.serves.is_empty(), "{} serves no GPU", source.name);
            for entry in source.entries {
                assert!(seen.insert(entry), "{entry} is listed twice");
                let stem = ["_queries", "_keys"].iter().find_map(|end| entry.strip_suffix(end));
                let stem = stem.unwrap_or(entry);
                assert!(source.text.contains(stem), "{} has no {entry}", source.name);
            }
            assert!(source.text.contains("__global__"), "{} has no kernel", source.name);
        }
    }

    #[test]
    fn every_file_starts_with_its_contract() {
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
                    "{}: the banner has no `{word}`",
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

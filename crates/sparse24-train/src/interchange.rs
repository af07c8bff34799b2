//! Weights of Hugging Face's GPT-2, in and out.
//!
//! Our names are theirs without the prefix `transformer.`; the only difference is that their Conv1D stores the four linear
//! weights of a block as `[in, out]` where we store `[out, in]`. Their head is tied: it is `wte.weight`.
//!
//! Invariant: an import gives exactly the tensors asked for, each finite and in its shape, or an error that names the one that is
//! not; an export is a folder that `GPT2LMHeadModel.from_pretrained` loads, or nothing. Deliberately absent: tokenizers, and other
//! models' weights.

mod config;
mod export;
mod import;

#[cfg(test)]
mod tests;

pub use config::Gpt2Config;
pub use export::{Dtype, Exported, Values, export};
pub use import::import;

const WEIGHTS: &str = "model.safetensors";
const CONFIG: &str = "config.json";
const PREFIX: &str = "transformer.";

/// Whether Hugging Face stores this weight as `[in, out]`.
fn is_conv1d(name: &str) -> bool {
    name.starts_with("h.")
        && ["attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"]
            .iter()
            .any(|suffix| name.strip_suffix(suffix).is_some_and(|rest| rest.ends_with('.')))
}

/// `[rows, columns]`, row-major, becomes `[columns, rows]`.
fn transpose(values: &[f32], [rows, columns]: [usize; 2]) -> Vec<f32> {
    // Square pieces: reads and writes then both stay within few cache lines.
    const SIDE: usize = 32;
    let mut out = vec![0.0; values.len()];
    for top in (0..rows).step_by(SIDE) {
        for left in (0..columns).step_by(SIDE) {
            for row in top..rows.min(top + SIDE) {
                for column in left..columns.min(left + SIDE) {
                    out[column * rows + row] = values[row * columns + column];
                }
            }
        }
    }
    out
}

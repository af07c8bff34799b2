//! Import and export of Hugging Face's GPT-2: weights, shape and, on the way out, tokenizer.
//!
//! Our names are theirs without the prefix `transformer.`. Their Conv1D stores the four linear
//! weights of a block as `[in, out]`, we store `[out, in]`. The head is tied to `wte.weight`.
//!
//! Invariant: an import returns exactly the requested tensors, finite and in their shapes, or an
//! error that names the wrong one; an export is a folder that `GPT2LMHeadModel.from_pretrained`
//! loads, or nothing.

mod config;
mod export;
mod import;
mod tokenizer;

#[cfg(test)]
mod tests;

pub use config::{Gpt2Config, shapes};
pub use export::{Dtype, Exported, Values, export};
pub use import::import;
pub use tokenizer::{FolderTokenizer, folder_tokenizer};

use crate::tensors::WEIGHTS;

const CONFIG: &str = "config.json";
const PREFIX: &str = "transformer.";

/// Whether Hugging Face stores this weight as `[in, out]`.
fn is_conv1d(name: &str) -> bool {
    name.starts_with("h.")
        && ["attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"]
            .iter()
            .any(|suffix| name.strip_suffix(suffix).is_some_and(|rest| rest.ends_with('.')))
}

/// Rows and columns transposed at a time, so that reads and writes touch few cache lines.
const SIDE: usize = 32;

/// Transposes `[rows, columns]`, row-major.
fn transpose(values: &[f32], [rows, columns]: [usize; 2]) -> Vec<f32> {
    let mut out = vec![0.0; values.len()];
    for (panel, first) in values.chunks((SIDE * columns).max(1)).zip((0..).step_by(SIDE)) {
        transpose_rows(panel, first, &mut out, [rows, columns]);
    }
    out
}

/// Writes the rows `first..` of `[rows, columns]` to the columns of `out`, `[columns, rows]`.
fn transpose_rows(panel: &[f32], first: usize, out: &mut [f32], [rows, columns]: [usize; 2]) {
    for left in (0..columns).step_by(SIDE) {
        for (values, row) in panel.chunks_exact(columns).zip(first..) {
            for column in left..columns.min(left + SIDE) {
                out[column * rows + row] = values[column];
            }
        }
    }
}

//! Import and export of Hugging Face's models and of timm's: weights, configuration and, on the way
//! out, tokenizer.
//!
//! | step | type |
//! | --- | --- |
//! | how a model is stored | [`Format`], the rows of [`FORMATS`] |
//! | the model of a folder | [`FolderModel`], its tokenizer [`FolderTokenizer`] |
//! | tensors of files to ours | [`import()`] |
//! | a model to a folder | [`export()`] |
//!
//! Invariant: an import returns the requested tensors, finite and in their shapes, or an error that
//! names the wrong one; an export is a folder that the library loads, or nothing.

mod bert;
mod config;
mod export;
mod folder;
mod format;
mod fsmt;
mod gpt2;
mod import;
mod timm;
mod tokenizer;

#[cfg(test)]
mod tests;

pub use export::{Dtype, Exported, Values, export};
pub use folder::{Description, FORMATS, FolderModel, numbered, shapes};
pub use format::Format;
pub use import::{Imported, import};
pub use tokenizer::{FolderTokenizer, folder_tokenizer};

use crate::tensors::WEIGHTS;

const CONFIG: &str = "config.json";

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

//! Checkpoints: their format, and how they survive a crash.
//!
//! A checkpoint is the state at an optimizer-step boundary: a directory `step-NNNNNNNN` of four
//! files and a manifest.
//!
//! | file | contents |
//! | --- | --- |
//! | `model.safetensors` | weights, named as in Hugging Face's GPT-2, linear layers `[out, in]` |
//! | `optimizer.safetensors` | `exp_avg.<weight>`, `exp_avg_sq.<weight>`, and `auxiliary.<name>` |
//! | `masks.safetensors` | one u16 per 4x4 tile, `[rows/4, columns/4]`, named as the weight |
//! | `state.json` | [`State`] |
//! | `manifest.json` | format version, BLAKE3 of the parts of each file, a checksum of itself |
//!
//! `docs/checkpoint-format.md` is enough to write a reader.
//!
//! Invariant: at every instant, also between any two file operations of a [`save`], a checkpoint
//! directory with its final name is complete or provably damaged, and the last good one still
//! exists. [`save`] writes under another name, syncs each file, writes the manifest last, then
//! renames.
//!
//! Every random number is a function of (seed, site, step), so there is no generator state to save.

mod content;
mod manifest;
mod saver;
mod state;
mod store;
mod tensor;
mod version1;

#[cfg(test)]
mod tests;

pub use content::{Checkpoint, load};
pub(crate) use content::{read_state, rows};
pub use manifest::{FORMAT_VERSION, verify};
pub use saver::Saver;
pub use state::{DatasetIdentity, Fingerprint, PhaseEnd, State};

pub use sparse24_train::method::PhaseKind;
pub use store::{
    Latest, Retention, count, latest, named, recover, retain, save, set_aside_after, states,
    step_of,
};
pub use tensor::{NamedTensor, Values};

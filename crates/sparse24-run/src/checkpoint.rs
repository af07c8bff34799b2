//! What is saved and how it survives.
//!
//! A checkpoint is the state at an optimizer-step boundary, a directory `step-NNNNNNNN` of four
//! files and a manifest:
//!
//! | file | holds |
//! | --- | --- |
//! | `model.safetensors` | the weights, under the names of Hugging Face's GPT-2, linear layers `[out, in]` |
//! | `optimizer.safetensors` | `exp_avg.<weight>`, `exp_avg_sq.<weight>`, and `auxiliary.<name>` |
//! | `masks.safetensors` | one u16 a 4x4 tile, `[rows/4, columns/4]`, under the name of the weight |
//! | `state.json` | [`State`] |
//! | `manifest.json` | format version, the parts of each file with their blake3, and a checksum of itself |
//!
//! `docs/checkpoint-format.md` is enough to write a reader.
//!
//! Invariant: at every instant, also between any two file operations of a [`save`], a checkpoint
//! directory that carries its final name is complete or can be told from a complete one, and the
//! last good one is still there. [`save`] writes beside the final name, syncs each file, writes the
//! manifest last, then renames.
//!
//! The position of the random numbers is the step itself: every draw is a function of (seed, site,
//! step), so there is no generator state to save. Deliberately absent: when to save, and what the
//! tensors mean.

mod content;
mod manifest;
mod saver;
mod state;
mod store;

#[cfg(test)]
mod tests;

pub use content::{Checkpoint, NamedTensor, load};
pub use manifest::{FORMAT_VERSION, verify};
pub use saver::Saver;
pub use state::{DatasetIdentity, Fingerprint, State};

pub use sparse24_train::method::PhaseKind;
pub use store::{
    Latest, Retention, count, is_named, latest, recover, retain, save, set_aside_after, states,
    step_of,
};

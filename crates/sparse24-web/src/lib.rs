//! The quickstart model of `sparse24 train`, pre-trained in a browser tab with WebGPU.
//!
//! The recipe, the data and the masks after the first search are the command's, to the bit. Each
//! device sums f32 in its own order, so losses, and masks that are searched later, may differ.
#![forbid(unsafe_code)]

mod masks;
mod quickstart;
#[cfg(target_family = "wasm")]
mod session;

pub use masks::{hash, packed};
pub use quickstart::{Text, recipe};
